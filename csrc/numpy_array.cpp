#include "numpy_array.h"

namespace numpy_array {
namespace {

// The first members of PyArrayObject.
struct Array {
  PyObject head;
  char *data;
  int ndim;
  Py_ssize_t *sizes, *strides;  // the latter in bytes
  PyObject *base, *descr;
  int flags;
};
enum { C_CONTIGUOUS = 0x1, ALIGNED = 0x100, WRITEABLE = 0x400 };

// Places of functions in the table, and the order of a new array that is its model's.
enum { GET_ABI_VERSION = 0, ARRAY_TYPE = 2, NEW_LIKE_ARRAY = 277 };
constexpr int KEEP_ORDER = 2;

PyTypeObject *array_type;  // set once by connect(), under the GIL
PyObject *(*new_like)(void *model, int order, PyObject *descr, int subclass);
PyObject *large_empty_like;
int64_t large;       // bytes from which large_empty_like allocates
PyObject *dtype_of;  // numpy.dtype -> its number here, or -1

// The numbers of the types that came last. Those of NumPy itself are one object each.
struct {
  PyObject *descr;
  int dtype;
} known[8];
int next_known;

// -1: none that is computed with.
int find_dtype(PyObject *descr) {
  for (const auto &k : known)
    if (k.descr == descr) return k.dtype;
  PyObject *number = PyObject_CallFunctionObjArgs(dtype_of, descr, nullptr);
  const int dtype = number ? (int)PyLong_AsLong(number) : -1;
  Py_XDECREF(number);
  if (PyErr_Occurred()) return PyErr_Clear(), -1;
  auto &k = known[next_known];
  next_known = (next_known + 1) % 8;
  PyObject *const old = k.descr;
  Py_INCREF(descr);
  k = {descr, dtype};
  Py_XDECREF(old);
  return dtype;
}

// False: they are not whole elements apart.
bool set_strides(const Array &a, int64_t width, Strides &strides) {
  for (int i = 0; i < a.ndim; i++) {
    if (a.strides[i] % width) return false;
    strides.of[i] = a.strides[i] / width;
  }
  return true;
}

}  // namespace

PyObject *connect(PyObject *, PyObject *const *args, Py_ssize_t count) {
  if (count != 2) {
    PyErr_SetString(PyExc_TypeError, "connect_arrays takes a capsule and a dictionary");
    return nullptr;
  }
  void *const *table = (void *const *)PyCapsule_GetPointer(args[0], nullptr);
  if (!table) return nullptr;
  const unsigned version = ((unsigned (*)())table[GET_ABI_VERSION])() >> 24;
  if (version < 1 || version > 2 || sizeof(Py_ssize_t) != sizeof(int64_t)) Py_RETURN_FALSE;
  PyObject *least = nullptr;
  if (!torch_door::take(args[1], {{"empty_like", &large_empty_like},
                                  {"large", &least},
                                  {"dtype", &dtype_of}}))
    return nullptr;
  large = PyLong_AsLongLong(least);
  Py_DECREF(least);
  if (PyErr_Occurred()) return nullptr;
  new_like = (PyObject * (*)(void *, int, PyObject *, int)) table[NEW_LIKE_ARRAY];
  array_type = (PyTypeObject *)table[ARRAY_TYPE];
  Py_RETURN_TRUE;
}

bool is_array(PyObject *object) { return Py_TYPE(object) == array_type; }

bool is_writable(PyObject *array) { return ((const Array *)array)->flags & WRITEABLE; }

bool read(PyObject *object, Reading &r, Strides *strides) {
  if (!is_array(object)) return false;
  const Array &a = *(const Array *)object;
  const bool contiguous = a.flags & C_CONTIGUOUS;
  if (!(a.flags & ALIGNED) || (strides ? a.ndim > Strides::MOST : !contiguous)) return false;
  r = {};
  r.dtype = find_dtype(a.descr);
  if (r.dtype < 0) return false;
  r.t.data = a.data;
  r.t.ndim = a.ndim;
  r.t.shape = (int64_t *)a.sizes;
  r.size = 1;
  for (int i = 0; i < a.ndim; i++) r.size *= a.sizes[i];
  return r.size > 0 && (!strides || set_strides(a, axisnorm::element_size(r.dtype), *strides));
}

PyObject *like(PyObject *array, int64_t size, int dtype, void *&address, Strides *strides) {
  PyObject *result = size * axisnorm::element_size(dtype) < large
                         ? new_like(array, KEEP_ORDER, nullptr, 0)
                         : PyObject_CallFunctionObjArgs(large_empty_like, array, nullptr);
  if (!result) return nullptr;
  const Array &a = *(const Array *)result;
  address = a.data;
  if (strides) set_strides(a, axisnorm::element_size(dtype), *strides);
  return result;
}

}  // namespace numpy_array
