#pragma once
#include <Python.h>

namespace torch_door {
// Adds the functions that take plain tensors and arrays.
void add_to(PyObject *module);
}  // namespace torch_door
