#include "numpy_array.h"

#include <dlfcn.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <algorithm>
#include <new>

namespace numpy_array {

Blocks &blocks = *new Blocks;

namespace {

// PyArrayObject.
struct Array {
  PyObject head;
  char *data;
  int ndim;
  Py_ssize_t *sizes, *strides;  // the latter in bytes
  PyObject *base, *descr;
  int flags;
  PyObject *weak_references;
  void *buffers;
  PyObject *handler;  // of its memory, where it is its own
};
enum { C_CONTIGUOUS = 0x1, F_CONTIGUOUS = 0x2, OWNS_DATA = 0x4, ALIGNED = 0x100, WRITEABLE = 0x400 };

// PyDataMem_Handler: where arrays that name it have their memory from.
struct Handler {
  char name[127];
  uint8_t version;
  void *context;
  void *(*allocate)(void *context, size_t size);
  void *(*allocate_zeros)(void *context, size_t count, size_t size);
  void *(*resize)(void *context, void *data, size_t size);
  void (*release)(void *context, void *data, size_t size);
};

// Places of functions in the table, and the order of a new array that is its model's.
enum { GET_ABI_VERSION = 0, ARRAY_TYPE = 2, NEW_FROM_DESCR = 94, NEW_LIKE_ARRAY = 277 };
constexpr int KEEP_ORDER = 2;

PyTypeObject *array_type;  // set once by connect(), under the GIL
PyObject *(*new_like)(void *model, int order, PyObject *descr, int subclass);
PyObject *(*new_from)(PyTypeObject *type, PyObject *descr, int ndim, const Py_ssize_t *sizes,
                      const Py_ssize_t *strides, void *data, int flags, PyObject *model);
PyObject *handler;  // a capsule of the one below
int64_t aligned;    // bytes from which a new array begins with a cache line
int64_t large;      // bytes from which its memory is reused, too
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

// ---- memory of new arrays. It begins with a cache line, since a store that crosses into the next one
// takes twice as long. The block around it is malloc's, which hands out what was freed last and is in
// the cache; glibc's aligned_alloc gave eight calls eight other blocks.

struct Head {  // stands before the memory that the array sees
  void *block;
  size_t size;
};
constexpr size_t LINE = 64;
constexpr size_t ROOM = sizeof(Head) + LINE - alignof(max_align_t);

Head &header(void *data) { return ((Head *)data)[-1]; }

char *first_line(char *block) {
  return (char *)(((uintptr_t)block + sizeof(Head) + LINE - 1) / LINE * LINE);
}

void *allocate(void *, size_t size) {
  if ((int64_t)size >= large)
    if (void *const kept = blocks.take(size)) return kept;
  char *const block = (char *)malloc(ROOM + size);
  if (!block) return nullptr;
#ifdef MADV_HUGEPAGE
  if (size >= 4 << 20) {  // as NumPy does
    char *const page = (char *)(((uintptr_t)block + 4095) / 4096 * 4096);
    madvise(page, size - 4096, MADV_HUGEPAGE);
  }
#endif
  char *const data = first_line(block);
  header(data) = {block, size};
  return data;
}

void *allocate_zeros(void *, size_t count, size_t size) {
  void *const data = allocate(nullptr, count * size);
  return data ? memset(data, 0, count * size) : nullptr;
}

void *resize(void *, void *data, size_t size) {
  const Head old = header(data);
  const size_t offset = (char *)data - (char *)old.block;
  char *const block = (char *)realloc(old.block, ROOM + size);
  if (!block) return nullptr;
  char *const moved = first_line(block);
  // The head is written last: it may stand where the elements are now.
  if (moved != block + offset) memmove(moved, block + offset, std::min(old.size, size));
  header(moved) = {block, size};
  return moved;
}

void free_block(void *data) { free(header(data).block); }

// One that was made small by resize is for no large array, and takes more than is counted.
void release(void *, void *data, size_t) {
  const size_t size = header(data).size;
  if ((int64_t)size < large) free_block(data);
  else blocks.keep(data, size);
}

Handler pool_handler = {"axisnorm", 1, nullptr, allocate, allocate_zeros, resize, release};

// tracemalloc is told as NumPy tells it, which says itself what is resized or released.
constexpr unsigned TRACED_DOMAIN = 389047;
int (*const trace)(unsigned domain, uintptr_t address, size_t size) =
    (decltype(trace))dlsym(RTLD_DEFAULT, "PyTraceMalloc_Track");

// Those of numpy.empty_like: without gaps, the axes in the order of their strides.
void keep_order(const Array &a, Py_ssize_t width, Py_ssize_t *strides) {
  int order[64];  // the most axes that NumPy has
  const auto step = [&](int axis) { return a.strides[axis] < 0 ? -a.strides[axis] : a.strides[axis]; };
  for (int i = 0; i < a.ndim; i++) {
    int at = i;
    for (; at && step(order[at - 1]) < step(i); at--) order[at] = order[at - 1];
    order[at] = i;
  }
  for (int i = a.ndim; i--; width *= a.sizes[order[i]]) strides[order[i]] = width;
}

// numpy.empty_like of an array of so many bytes; by_rows: in the order of the axes, whatever the array's.
// Null: an exception is set.
PyObject *aligned_like(PyObject *model, int64_t bytes, bool by_rows) {
  const Array &a = *(const Array *)model;
  by_rows = by_rows || a.flags & C_CONTIGUOUS;
  Py_ssize_t strides[64], size = 1;
  const bool by_columns = !by_rows && a.flags & F_CONTIGUOUS, mixed = !by_rows && !by_columns;
  for (int i = 0; mixed && i < a.ndim; i++) size *= a.sizes[i];
  if (mixed) keep_order(a, bytes / size, strides);
  void *const data = allocate(nullptr, bytes);
  if (!data) return PyErr_NoMemory();
  Py_INCREF(a.descr);
  PyObject *const y = new_from(array_type, a.descr, a.ndim, a.sizes, mixed ? strides : nullptr, data,
                               by_columns ? WRITEABLE | F_CONTIGUOUS : WRITEABLE, nullptr);
  if (!y) return free_block(data), nullptr;
  Array &made = *(Array *)y;
  Py_INCREF(handler);
  made.handler = handler;
  made.flags |= OWNS_DATA;
  if (trace) trace(TRACED_DOMAIN, (uintptr_t)data, bytes);
  return y;
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
  PyObject *least_aligned = nullptr, *least_large = nullptr;
  if (!torch_door::take(args[1], {{"aligned", &least_aligned},
                                  {"large", &least_large},
                                  {"dtype", &dtype_of}}))
    return nullptr;
  aligned = PyLong_AsLongLong(least_aligned);
  large = PyLong_AsLongLong(least_large);
  Py_DECREF(least_aligned);
  Py_DECREF(least_large);
  if (PyErr_Occurred()) return nullptr;
  new_like = (PyObject * (*)(void *, int, PyObject *, int)) table[NEW_LIKE_ARRAY];
  new_from = (decltype(new_from))table[NEW_FROM_DESCR];
  if (!handler && !(handler = PyCapsule_New(&pool_handler, "mem_handler", nullptr))) return nullptr;
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

void *Blocks::take(size_t size) {
  const auto found = by_size_.find(size);
  if (found == by_size_.end()) return nullptr;
  auto &same = found->second;
  void *const data = *same.back();
  order_.erase(same.back());
  same.pop_back();
  if (same.empty()) by_size_.erase(found);
  kept -= (int64_t)size;
  return data;
}

void Blocks::keep(void *data, size_t size) {
  if ((int64_t)size > most) return free_block(data);
  while (kept + (int64_t)size > most) drop_oldest();
  try {
    order_.push_back(data);
    by_size_[size].push_back(std::prev(order_.end()));
  } catch (const std::bad_alloc &) {
    if (!order_.empty() && order_.back() == data) order_.pop_back();
    return free_block(data);
  }
  kept += (int64_t)size;
}

void Blocks::drop_oldest() {
  void *const data = order_.front();
  const size_t size = header(data).size;
  const auto found = by_size_.find(size);
  found->second.pop_front();
  if (found->second.empty()) by_size_.erase(found);
  order_.pop_front();
  kept -= (int64_t)size;
  free_block(data);
}

void Blocks::clear() {
  while (!order_.empty()) drop_oldest();
}

// array_like(array, bytes, by_rows) -> numpy.empty_like(array), of so many bytes, that begins with a cache
// line; or None where NumPy is to make it
PyObject *array_like(PyObject *, PyObject *const *args, Py_ssize_t count) {
  if (count != 3) {
    PyErr_SetString(PyExc_TypeError, "array_like takes an array, its size in bytes and an order");
    return nullptr;
  }
  const int64_t bytes = PyLong_AsLongLong(args[1]);
  if (PyErr_Occurred()) return nullptr;
  if (!is_array(args[0]) || bytes < aligned) Py_RETURN_NONE;
  return aligned_like(args[0], bytes, args[2] == Py_True);
}

PyObject *like(PyObject *array, int64_t size, int dtype, void *&address, Strides *strides) {
  const int64_t bytes = size * axisnorm::element_size(dtype);
  PyObject *const result =
      bytes < aligned ? new_like(array, KEEP_ORDER, nullptr, 0) : aligned_like(array, bytes, false);
  if (!result) return nullptr;
  const Array &a = *(const Array *)result;
  address = a.data;
  if (strides) set_strides(a, axisnorm::element_size(dtype), *strides);
  return result;
}

}  // namespace numpy_array
