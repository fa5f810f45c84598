// Whose arrays a short way reads and makes: torch's or NumPy's. And where it writes.
#pragma once
#include <string.h>

#include <initializer_list>

#include "numpy_array.h"
#include "torch_tensor.h"

namespace torch_door {

struct Tensors {
  static bool read(PyObject *object, Reading &r, Strides *strides = nullptr) {
    return torch_door::read(object, r, strides);
  }
  static bool is_positive(PyObject *object) { return torch_door::is_positive(object); }
  static PyObject *like(PyObject *object, int64_t size, int dtype, void *&address,
                        Strides *strides = nullptr) {
    return torch_door::like(object, size, dtype, address, strides);
  }
  // Whether out= may be this one, which has been read.
  static bool may_be_out(PyObject *object) {
    return torch_door::is_positive(object) && may_be_written(object);
  }
  // What was saved of it is gone. False: an exception is set.
  static bool has_changed(PyObject *object) { return increment_versions({object}); }
};

struct Arrays {
  static bool read(PyObject *object, Reading &r, Strides *strides = nullptr) {
    return numpy_array::read(object, r, strides);
  }
  static bool is_positive(PyObject *) { return true; }
  static PyObject *like(PyObject *object, int64_t size, int dtype, void *&address,
                        Strides *strides = nullptr) {
    return numpy_array::like(object, size, dtype, address, strides);
  }
  static bool may_be_out(PyObject *object) { return numpy_array::is_writable(object); }
  static bool has_changed(PyObject *) { return true; }
};

// Whether two elements may share memory, as in an expanded tensor.
inline bool overlaps_itself(const Reading &r, const Strides &strides) {
  int64_t size[Strides::MOST], step[Strides::MOST];
  int count = 0;
  for (int i = 0; i < r.t.ndim; i++) {
    if (r.t.shape[i] == 1) continue;
    const int64_t s = strides.of[i] < 0 ? -strides.of[i] : strides.of[i];
    int at = count++;
    for (; at && step[at - 1] > s; at--) step[at] = step[at - 1], size[at] = size[at - 1];
    step[at] = s;
    size[at] = r.t.shape[i];
  }
  int64_t reach = 0;
  for (int i = 0; i < count; i++) {
    if (step[i] <= reach) return true;
    reach += step[i] * (size[i] - 1);
  }
  return false;
}

// The addresses from the first to behind the last element.
struct Span {
  const char *begin = nullptr, *end = nullptr;

  Span(const Reading &r, const Strides *strides) {
    int64_t before = 0, after = strides ? 1 : r.size;
    for (int i = 0; strides && i < r.t.ndim; i++)
      (strides->of[i] < 0 ? before : after) += strides->of[i] * (r.t.shape[i] - 1);
    const char *const first = (const char *)data(r);
    begin = first + before * axisnorm::element_size(r.dtype);
    end = first + after * axisnorm::element_size(r.dtype);
  }
  bool meets(const Span &other) const { return begin < other.end && other.begin < end; }
};

// What a norm writes: a new array like x, or the one that the caller gives, out=.
template <class Source> class Output {
 public:
  Output() = default;
  Output(const Output &) = delete;
  ~Output() { Py_XDECREF(made_); }

  // Sets `place`, and the strides if they are asked for. False: something unusual, or an exception is
  // set. Where `out` shares memory with what is read, nothing is overwritten before it is read.
  bool make(PyObject *x_object, const Reading &x, PyObject *out,
            std::initializer_list<PyObject *> inputs, void *&place, Strides *strides = nullptr) {
    if (out == Py_None)
      return (made_ = Source::like(x_object, x.size, x.dtype, place, strides)) != nullptr;
    Reading r;
    if (!Source::read(out, r, strides) || !Source::may_be_out(out) || !same_kind(r, x) ||
        (strides && overlaps_itself(r, *strides)))
      return false;
    out_ = out;
    place = (void *)data(r);
    bool shared = false;
    const Span written(r, strides);
    for (PyObject *input : inputs)
      if (input != Py_None && !looks(input, written, shared)) return false;
    if (!shared) return true;
    Strides own;
    target_ = place;
    bytes_ = (size_t)(x.size * axisnorm::element_size(x.dtype));
    made_ = Source::like(out, x.size, x.dtype, place, strides ? &own : nullptr);
    if (!made_) return false;
    source_ = place;
    for (int i = 0; strides && i < r.t.ndim; i++)
      if (r.t.shape[i] != 1 && own.of[i] != strides->of[i]) return false;
    return true;
  }

  // After the norm was written, with or without the GIL.
  void settle() const {
    if (target_) memcpy(target_, source_, bytes_);
  }

  // What the caller gets, a new reference; null where it is not fine, or an exception is set.
  PyObject *result(bool fine) {
    PyObject *const y = out_ ? out_ : made_;
    if (!fine || (out_ && !Source::has_changed(out_))) return nullptr;
    Py_INCREF(y);
    return y;
  }

 private:
  PyObject *made_ = nullptr, *out_ = nullptr;  // the latter borrowed
  void *target_ = nullptr;
  const void *source_ = nullptr;
  size_t bytes_ = 0;

  // False: it cannot be said.
  static bool looks(PyObject *input, const Span &written, bool &shared) {
    Reading r;
    Strides strides;
    const bool whole = Source::read(input, r);
    if (!whole && !Source::read(input, r, &strides)) return false;
    shared |= written.meets(Span(r, whole ? nullptr : &strides));
    return true;
  }
};

// Whether `out` and one of these, which are moved or normalize, may share memory, or cannot be read.
template <class Source>
bool may_meet(PyObject *out, std::initializer_list<PyObject *> others) {
  Reading r, other;
  Strides strides;
  if (out == Py_None) return false;
  if (!Source::read(out, r, &strides)) return true;
  const Span written(r, &strides);
  for (PyObject *object : others)
    if (object != Py_None &&
        (!Source::read(object, other) || written.meets(Span(other, nullptr))))
      return true;
  return false;
}

// Null with an exception set, or None.
inline PyObject *failed_or_unsure() { return PyErr_Occurred() ? nullptr : unsure(); }

}  // namespace torch_door
