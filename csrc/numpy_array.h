// Reading NumPy arrays in C, by the structure and the table of functions that NumPy guarantees to
// modules that were built against it (its C ABI, of versions 1 and 2), without its headers.
#pragma once
#include <deque>
#include <list>
#include <unordered_map>

#include "memory.h"
#include "torch_tensor.h"

namespace numpy_array {

using torch_door::Reading;
using torch_door::Strides;

// connect_arrays(capsule, {name: object}) -> bool: NumPy's table, and by name what is asked here.
PyObject *connect(PyObject *, PyObject *const *args, Py_ssize_t count);

// The class is exactly numpy.ndarray. False until connect().
bool is_array(PyObject *object);

bool is_writable(PyObject *array);

// An array of this machine's numbers, aligned, not empty, and contiguous unless its strides are asked
// for; false otherwise, without an error.
bool read(PyObject *object, Reading &r, Strides *strides = nullptr);

// A new array like this one, of so many elements, in `address`; its strides in `strides`.
PyObject *like(PyObject *array, int64_t size, int dtype, void *&address,
               Strides *strides = nullptr);

// Reused memory for large arrays: blocks that arrays had, the newest last; see _numpy_memory.py.
class Blocks final : public memory::Account {
 public:
  // One of this size, or null.
  void *take(size_t size);
  // The oldest ones go where there is no room.
  void keep(void *data, size_t size);
  void clear() override;

 private:
  std::list<void *> order_;
  std::unordered_map<size_t, std::deque<std::list<void *>::iterator>> by_size_;

  void drop_oldest();
};

extern Blocks &blocks;

PyObject *array_like(PyObject *, PyObject *const *args, Py_ssize_t count);

}  // namespace numpy_array
