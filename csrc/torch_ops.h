#pragma once
#include <Python.h>

namespace torch_door {
// Adds the functions that torch's dispatcher calls for the operators of this library.
void add_ops_to(PyObject *module);
}  // namespace torch_door
