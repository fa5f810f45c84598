#pragma once
#include <Python.h>

namespace torch_door {
// Adds the functions that take torch tensors.
void add_to(PyObject *module);
}  // namespace torch_door
