#include "memory.h"

namespace memory {

Py_ssize_t references(PyObject *object) {
  static PyObject *const function = PySys_GetObject("getrefcount");
  static const PyCFunction count = PyCFunction_GetFunction(function);
  PyObject *const number = count(nullptr, object);
  const Py_ssize_t result = number ? PyLong_AsSsize_t(number) : -1;
  Py_XDECREF(number);
  return result;
}

}  // namespace memory
