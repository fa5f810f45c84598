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
enum { C_CONTIGUOUS = 0x1, F_CONTIGUOUS = 0x2, ALIGNED = 0x100, WRITEABLE = 0x400 };

// Places of functions in the table, the order of a new array that is its model's, and a type.
enum {
  GET_ABI_VERSION = 0,
  ARRAY_TYPE = 2,
  DESCR_FROM_TYPE = 45,
  NEW_FROM_DESCR = 94,
  NEW_LIKE_ARRAY = 277,
  SET_BASE_OBJECT = 282
};
constexpr int KEEP_ORDER = 2, UINT8 = 2;

PyTypeObject *array_type;  // set once by connect(), under the GIL
PyObject *(*new_like)(void *model, int order, PyObject *descr, int subclass);
PyObject *(*new_from)(PyTypeObject *type, PyObject *descr, int ndim, const Py_ssize_t *sizes,
                      const Py_ssize_t *strides, void *data, int flags, PyObject *model);
int (*set_base)(PyObject *array, PyObject *base);
PyObject *bytes_type;  // numpy.dtype("uint8")
int64_t large;         // bytes from which memory is reused
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

// Over `data`, or with memory of its own. Null: an exception is set.
PyObject *new_array(PyObject *descr, int ndim, const Py_ssize_t *sizes, const Py_ssize_t *strides,
                    void *data, int flags) {
  Py_INCREF(descr);
  return new_from(array_type, descr, ndim, sizes, strides, data, flags, nullptr);
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
  if (!torch_door::take(args[1], {{"large", &least}, {"dtype", &dtype_of}})) return nullptr;
  large = PyLong_AsLongLong(least);
  Py_DECREF(least);
  if (PyErr_Occurred()) return nullptr;
  new_like = (PyObject * (*)(void *, int, PyObject *, int)) table[NEW_LIKE_ARRAY];
  new_from = (decltype(new_from))table[NEW_FROM_DESCR];
  set_base = (decltype(set_base))table[SET_BASE_OBJECT];
  bytes_type = ((PyObject * (*)(int)) table[DESCR_FROM_TYPE])(UINT8);
  if (!bytes_type) return nullptr;
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

// Never freed: at the end of the process Python may be gone first.
memory::Pool<Bytes> &blocks = *new memory::Pool<Bytes>;

Bytes::Bytes(PyObject *array)
    : array_(nanobind::steal(array)), address_(((const Array *)array)->data) {}

memory::State Bytes::look(int64_t size) const {
  if (memory::references(array_.ptr()) > 1) return memory::HELD;
  const Array &a = *(const Array *)array_.ptr();
  return a.ndim == 1 && a.sizes[0] == size && a.data == address_ ? memory::FREE : memory::SPOILED;
}

PyObject *Bytes::like(PyObject *model) const {
  const Array &a = *(const Array *)model;
  const bool by_rows = a.flags & C_CONTIGUOUS;
  // NumPy orders axes. What it makes for that is not touched, and costs a few pages.
  PyObject *other = nullptr;
  if (!by_rows && !(a.flags & F_CONTIGUOUS) && !(other = new_like(model, KEEP_ORDER, nullptr, 0)))
    return nullptr;
  PyObject *y = new_array(a.descr, a.ndim, a.sizes, other ? ((const Array *)other)->strides : nullptr,
                          address_, by_rows ? WRITEABLE : WRITEABLE | F_CONTIGUOUS);
  Py_XDECREF(other);
  if (!y) return nullptr;
  Py_INCREF(array_.ptr());
  if (set_base(y, array_.ptr())) Py_CLEAR(y);
  return y;
}

PyObject *large_like(PyObject *array, int64_t bytes) {
  std::shared_ptr<Bytes> block = blocks.take(bytes);
  if (!block) {
    const Py_ssize_t size = bytes;
    PyObject *const made = new_array(bytes_type, 1, &size, nullptr, nullptr, 0);
    if (!made) return nullptr;
    block = std::make_shared<Bytes>(made);
    blocks.keep(block, bytes);
  }
  return block->like(array);
}

// large_array_like(array, bytes) -> numpy.empty_like(array), of so many bytes
PyObject *large_array_like(PyObject *, PyObject *const *args, Py_ssize_t count) {
  if (count != 2 || !is_array(args[0])) {
    PyErr_SetString(PyExc_TypeError, "large_array_like takes an array and its size in bytes");
    return nullptr;
  }
  const int64_t bytes = PyLong_AsLongLong(args[1]);
  return PyErr_Occurred() ? nullptr : large_like(args[0], bytes);
}

PyObject *like(PyObject *array, int64_t size, int dtype, void *&address, Strides *strides) {
  const int64_t bytes = size * axisnorm::element_size(dtype);
  PyObject *const result =
      bytes < large ? new_like(array, KEEP_ORDER, nullptr, 0) : large_like(array, bytes);
  if (!result) return nullptr;
  const Array &a = *(const Array *)result;
  address = a.data;
  if (strides) set_strides(a, axisnorm::element_size(dtype), *strides);
  return result;
}

}  // namespace numpy_array
