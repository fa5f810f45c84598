// Reading torch tensors in C, and what is read of arrays, too. torch exposes a table of C functions (DLPack 1.3, the type's
// __dlpack_c_exchange_api__) that describes a tensor without a Python call and without linking to
// torch.
#pragma once
#include <Python.h>
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <stdint.h>

#include <initializer_list>
#include <new>

#include "dispatch.h"

namespace torch_door {

using nanobind::dlpack::dltensor;

// The table of dlpack.h, version 1.3.
struct ExchangeApi {
  struct {
    uint32_t major, minor;
    void *previous;
  } header;
  void *allocate, *managed_from_object, *object_from_managed;  // functions that are not used here
  int (*describe)(void *object, dltensor *out);
  void *current_stream;
};

// Set once by connect(), under the GIL.
extern const ExchangeApi *api;
extern PyObject *tensor_type, *parameter_type, *empty_like;

// connect(capsule, {name: object}) -> bool: the table, and by name what is asked here.
PyObject *connect(PyObject *, PyObject *const *args, Py_ssize_t count);

// Takes new references to values of a dictionary. False: an exception is set.
struct Wanted {
  const char *name;
  PyObject **place;
};
bool take(PyObject *dictionary, std::initializer_list<Wanted> wanted);

// A function that is asked often, of nothing or of a tensor. One in C that takes nothing is called as
// it is, in half of the time.
class Question {
 public:
  PyObject *function = nullptr;

  // With a tensor, a method of this class becomes the function of it. False: an exception is set.
  bool prepare(PyObject *model = nullptr) {
    direct_ = nullptr;
    PyObject *bound = function;
    Py_INCREF(bound);
    if (model && PyObject_TypeCheck(function, &PyMethodDescr_Type)) {
      Py_DECREF(bound);
      if (!(bound = PyObject_CallMethod(function, "__get__", "O", model))) return false;
    }
    if (PyCFunction_Check(bound) && PyCFunction_GetFlags(bound) == METH_NOARGS) {
      direct_ = PyCFunction_GetFunction(bound);
      self_ = model ? nullptr : PyCFunction_GetSelf(bound);
    }
    Py_DECREF(bound);
    if (PyErr_Occurred()) return false;
    return true;
  }
  PyObject *ask() const { return direct_ ? direct_(self_, nullptr) : PyObject_CallNoArgs(function); }
  PyObject *ask(PyObject *tensor) const {
    return direct_ ? direct_(tensor, nullptr)
                   : PyObject_CallFunctionObjArgs(function, tensor, nullptr);
  }

 private:
  PyCFunction direct_ = nullptr;
  PyObject *self_ = nullptr;  // borrowed from the function
};

// ---- the guard: a tensor that something watches goes the long way. Each line of it was seen to
// give silently wrong results when missing; each has a test.

// The class is exactly a tensor's. (Its subclasses have a say in what is computed.)
bool is_exact(PyObject *object);
// Not a view that torch keeps negated (is_neg): its memory holds the opposite sign.
bool is_positive(PyObject *tensor);
// Nobody traces, transforms or dispatches.
bool unwatched();
bool is_recording();  // gradients
// None does not.
bool wants_gradient(PyObject *tensor);
// A tensor that keeps no version may not be written.
bool is_inference(PyObject *tensor);
// Not one made in inference mode, unless that is on.
bool may_be_written(PyObject *tensor);
// That tensors were written, for autograd. False: an exception is set.
bool increment_versions(std::initializer_list<PyObject *> tensors);

// ---- reading

struct Reading {
  dltensor t;
  int dtype;
  int64_t size;
};

// The strides of a tensor of at most MOST axes, in elements.
struct Strides {
  static constexpr int MOST = 8;
  int64_t of[MOST];
  void set(const dltensor &t);
};

// Whether memory is in the order of the axes or in torch's channels_last.
bool in_memory_format(const dltensor &t, const Strides &strides);

// A plain tensor of this process's memory, not empty, and contiguous unless its strides are asked for;
// false otherwise, without an error.
bool read(PyObject *object, Reading &r, Strides *strides = nullptr);

inline const void *data(const Reading &r) { return (const char *)r.t.data + r.t.byte_offset; }
inline bool same_shape(const Reading &r, const int64_t *sizes, int count) {
  if (r.t.ndim != count) return false;
  for (int i = 0; i < count; i++)
    if (r.t.shape[i] != sizes[i]) return false;
  return true;
}
inline bool same_kind(const Reading &a, const Reading &b) {
  return a.dtype == b.dtype && same_shape(a, b.t.shape, b.t.ndim);
}
// These numbers as a tuple. Null: an exception is set.
PyObject *tuple_of(const int64_t *numbers, int count);
// A finite number.
bool read_number(PyObject *object, double &value);
// None, or the name of an activation. False: something else.
bool read_activation(PyObject *name, int32_t &activation);

// ---- computing

// Above this many elements a call takes longer than handing the GIL over.
constexpr int64_t kReleaseGil = 1 << 16;

// Runs with the GIL released where that pays. False: an exception is set.
template <class Compute> bool run(const Compute &compute, int64_t elements) {
  PyThreadState *state = elements >= kReleaseGil ? PyEval_SaveThread() : nullptr;
  bool fine = true;
  try {
    compute();
  } catch (const std::bad_alloc &) {
    fine = false;
  }
  if (state) PyEval_RestoreThread(state);
  if (!fine) PyErr_NoMemory();
  return fine;
}

// A new tensor like this one, of so many elements, in `address`; its strides in `strides`.
PyObject *like(PyObject *tensor, int64_t size, int dtype, void *&address,
               Strides *strides = nullptr);

// "I am not sure": what the functions that Python calls return for the long way.
inline PyObject *unsure() { Py_RETURN_NONE; }

}  // namespace torch_door
