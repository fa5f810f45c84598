// Reading NumPy arrays in C, by the structure and the table of functions that NumPy guarantees to
// modules that were built against it (its C ABI, of versions 1 and 2), without its headers.
#pragma once
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

// ---- reused memory for large arrays; see _numpy_memory.py

// The memory of arrays: an array of bytes, which is the base of those over it.
class Bytes {
 public:
  // Takes the reference.
  explicit Bytes(PyObject *array);

  memory::State look(int64_t size) const;

  // numpy.empty_like of an array as large. Null: an exception is set.
  PyObject *like(PyObject *model) const;

 private:
  nanobind::object array_;
  char *address_;
};

extern memory::Pool<Bytes> &blocks;

PyObject *large_array_like(PyObject *, PyObject *const *args, Py_ssize_t count);

}  // namespace numpy_array
