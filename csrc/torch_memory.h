// Reused memory for large tensors; see _torch_memory.py.
#pragma once
#include "memory.h"
#include "torch_tensor.h"

namespace torch_door {

// The memory of tensors: torch's storage, and a tensor over it that others are made of.
class Storage {
 public:
  // Null: an exception is set.
  static std::shared_ptr<Storage> make(PyObject *storage, PyObject *dtype);

  memory::State look(int64_t bytes) const;
  // Says that this one is free, as are all that are counted the same. False: the count is not understood.
  bool set_free() const;

  // A new tensor of this memory, of a layout (sizes, strides, dtype). Null: an exception is set.
  PyObject *tensor(PyObject *layout);

 private:
  nanobind::object storage_, counted_;
  int64_t address_;
  nanobind::object base_, dtype_;        // a tensor over it without elements, of this type
  nanobind::object layout_, arguments_;  // of the last tensor, and what it was made with

  int64_t references() const;  // to the Python object
  int64_t holders() const;     // tensors, and that object
  // False: an exception is set.
  bool set_dtype(PyObject *dtype);
};

extern memory::Pool<Storage> &storages;

// A tensor of so many bytes and this layout, in memory that was used before. None: there is none. Null:
// an exception is set.
PyObject *reuse(int64_t bytes, PyObject *layout);

// Adds the functions that Python calls.
void add_memory_to(PyObject *module);

}  // namespace torch_door
