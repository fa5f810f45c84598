#include "torch_tensor.h"

#include <math.h>
#include <string.h>

#include "torch_memory.h"

namespace torch_door {

const ExchangeApi *api;
PyObject *tensor_type, *parameter_type, *empty_like;

namespace {

int64_t large;                // bytes from which memory is reused
PyObject *large_empty_like;  // empty_like with such memory
PyObject *new_large;         // empty_like, whose memory is kept
PyObject *empty_strided;  // (sizes, strides, dtype) -> a tensor, in half of the time; or None
PyObject *dtypes;         // torch's, by their numbers here
PyObject *increment_version;  // of tensors in a tuple

// Who may be watching: functions without arguments that return a number or a bool,
// torch.Tensor.is_neg, the state of torch.compiler and of forward_ad by their modules' dictionaries.
struct {
  Question dispatch_modes, function_mode, transforms, tracing, grad_enabled, inference_mode, is_neg,
      is_inference;
  PyObject *compiler, *forward_ad;
} watch;

// Names of attributes, made once.
struct {
  PyObject *_is_compiling_flag, *_current_level, *requires_grad;
} names;

// Whether the value is false, None, or a number at most `most`. An error counts as watching.
bool quiet(PyObject *value, long most = 0) {
  if (!value) return PyErr_Clear(), false;
  const bool none = value == Py_None;
  const long number = none ? 0 : PyLong_AsLong(value);
  if (number == -1 && PyErr_Occurred()) return PyErr_Clear(), false;
  return number <= most;
}

bool answers_quiet(PyObject *answer) {
  const bool result = quiet(answer);
  Py_XDECREF(answer);
  return result;
}

bool says_no(const Question &question) { return answers_quiet(question.ask()); }
bool says_no(const Question &question, PyObject *of) { return answers_quiet(question.ask(of)); }

int dtype_of(nanobind::dlpack::dtype d) {
  if (d.lanes != 1) return -1;
  if (d.code == (uint8_t)nanobind::dlpack::dtype_code::Float)
    return d.bits == 32 ? F32 : d.bits == 64 ? F64 : d.bits == 16 ? F16 : -1;
  return d.code == (uint8_t)nanobind::dlpack::dtype_code::Bfloat && d.bits == 16 ? BF16 : -1;
}

bool contiguous(const dltensor &t) {
  if (!t.strides) return true;
  int64_t step = 1;
  for (int i = t.ndim - 1; i >= 0; i--) {
    if (t.shape[i] != 1 && t.strides[i] != step) return false;
    step *= t.shape[i];
  }
  return true;
}

}  // namespace

bool take(PyObject *dictionary, std::initializer_list<Wanted> wanted) {
  if (!PyDict_Check(dictionary)) {
    PyErr_SetString(PyExc_TypeError, "what to connect comes in a dictionary");
    return false;
  }
  for (const Wanted &item : wanted) {
    PyObject *object = PyDict_GetItemString(dictionary, item.name);
    if (!object) {
      PyErr_Format(PyExc_KeyError, "%s", item.name);
      return false;
    }
    Py_INCREF(object);
    *item.place = object;
  }
  return true;
}

PyObject *connect(PyObject *, PyObject *const *args, Py_ssize_t count) {
  if (count != 2) {
    PyErr_SetString(PyExc_TypeError, "connect takes a capsule and a dictionary");
    return nullptr;
  }
  auto *table = (const ExchangeApi *)PyCapsule_GetPointer(args[0], "dlpack_exchange_api");
  if (!table) return nullptr;
  if (table->header.major != 1 || !table->describe) Py_RETURN_FALSE;
  PyObject *least = nullptr, *model = nullptr;
  if (!take(args[1], {{"Tensor", &tensor_type},
                      {"Parameter", &parameter_type},
                      {"empty_like", &empty_like},
                      {"large_empty_like", &large_empty_like},
                      {"new_large", &new_large},
                      {"large", &least},
                      {"empty_strided", &empty_strided},
                      {"dtypes", &dtypes},
                      {"increment_version", &increment_version},
                      {"model", &model},
                      {"dispatch_modes", &watch.dispatch_modes.function},
                      {"function_mode", &watch.function_mode.function},
                      {"transforms", &watch.transforms.function},
                      {"tracing", &watch.tracing.function},
                      {"grad_enabled", &watch.grad_enabled.function},
                      {"inference_mode", &watch.inference_mode.function},
                      {"is_neg", &watch.is_neg.function},
                      {"is_inference", &watch.is_inference.function},
                      {"compiler", &watch.compiler},
                      {"forward_ad", &watch.forward_ad}}))
    return nullptr;
  large = PyLong_AsLongLong(least);
  Py_DECREF(least);
  bool prepared = !PyErr_Occurred();
  for (Question *question : {&watch.dispatch_modes, &watch.function_mode, &watch.transforms,
                             &watch.tracing, &watch.grad_enabled, &watch.inference_mode})
    prepared = prepared && question->prepare();
  prepared = prepared && watch.is_neg.prepare(model) && watch.is_inference.prepare(model);
  Py_DECREF(model);
  if (!prepared) return nullptr;
#define INTERN(name) \
  if (!(names.name = PyUnicode_InternFromString(#name))) return nullptr
  INTERN(_is_compiling_flag);
  INTERN(_current_level);
  INTERN(requires_grad);
#undef INTERN
  if (!PyDict_GetItem(watch.compiler, names._is_compiling_flag) ||
      !PyDict_GetItem(watch.forward_ad, names._current_level))
    Py_RETURN_FALSE;  // another version of torch, where these stand elsewhere
  api = table;
  Py_RETURN_TRUE;
}

bool is_exact(PyObject *object) {
  PyObject *type = (PyObject *)Py_TYPE(object);
  return type == tensor_type || type == parameter_type;
}

bool is_positive(PyObject *tensor) { return says_no(watch.is_neg, tensor); }

bool unwatched() {
  return says_no(watch.dispatch_modes) && says_no(watch.function_mode) &&
         says_no(watch.transforms) && says_no(watch.tracing) &&
         quiet(PyDict_GetItemWithError(watch.compiler, names._is_compiling_flag)) &&
         quiet(PyDict_GetItemWithError(watch.forward_ad, names._current_level), -1);
}

bool is_recording() { return !says_no(watch.grad_enabled); }

bool wants_gradient(PyObject *tensor) {
  return tensor != Py_None && !answers_quiet(PyObject_GetAttr(tensor, names.requires_grad));
}

bool is_inference(PyObject *tensor) { return !says_no(watch.is_inference, tensor); }

bool may_be_written(PyObject *tensor) {
  return !is_inference(tensor) || !says_no(watch.inference_mode);
}

bool increment_versions(std::initializer_list<PyObject *> tensors) {
  PyObject *all = PyTuple_New((Py_ssize_t)tensors.size());
  Py_ssize_t i = 0;
  for (PyObject *tensor : tensors) {
    Py_INCREF(tensor);
    if (all && PyTuple_SetItem(all, i++, tensor)) Py_CLEAR(all);
  }
  PyObject *done =
      all ? PyObject_CallFunctionObjArgs(increment_version, all, nullptr) : nullptr;
  Py_XDECREF(all);
  Py_XDECREF(done);
  return done;
}

void Strides::set(const dltensor &t) {
  int64_t step = 1;
  for (int i = t.ndim - 1; i >= 0; i--) {
    of[i] = t.strides ? t.strides[i] : step;
    step *= t.shape[i];
  }
}

bool in_memory_format(const dltensor &t, const Strides &strides) {
  // What is made for expanded axes that are outermost is outermost.
  int first = 0;
  while (first < t.ndim && (t.shape[first] == 1 || !strides.of[first])) first++;
  const bool has_channels_last = t.ndim == 4 || t.ndim == 5;
  for (int last = 0; last <= has_channels_last; last++) {
    // The channels, axis 1, come at their place or after all others.
    int64_t outer = INT64_MAX;
    bool descends = true;
    for (int i = 0; i < t.ndim; i++) {
      const int axis = !last || !i ? i : i < t.ndim - 1 ? i + 1 : 1;
      if (axis < first || t.shape[axis] == 1) continue;
      descends = descends && strides.of[axis] && strides.of[axis] <= outer;
      outer = strides.of[axis];
    }
    if (descends) return true;
  }
  return false;
}

bool read(PyObject *object, Reading &r, Strides *strides) {
  if (!api || !is_exact(object)) return false;
  if (api->describe(object, &r.t)) {
    PyErr_Clear();
    return false;
  }
  r.dtype = dtype_of(r.t.dtype);
  if (r.t.device.device_type != nanobind::device::cpu::value || r.dtype < 0 || !r.t.data)
    return false;
  r.size = 1;
  for (int i = 0; i < r.t.ndim; i++) r.size *= r.t.shape[i];
  if (strides && r.t.ndim <= Strides::MOST) strides->set(r.t);
  return r.size > 0 && (strides ? r.t.ndim <= Strides::MOST : contiguous(r.t));
}

bool read_activation(PyObject *name, int32_t &activation) {
  activation = NO_ACTIVATION;
  if (name == Py_None) return true;
  if (!PyUnicode_Check(name)) return false;
  const char *const names[] = {"relu", "silu", "gelu"};
  for (int i = 0; i < 3; i++)
    if (PyUnicode_CompareWithASCIIString(name, names[i]) == 0) activation = RELU + i;
  return activation != NO_ACTIVATION;
}

bool read_number(PyObject *object, double &value) {
  value = PyFloat_AsDouble(object);
  if (value == -1.0 && PyErr_Occurred()) {
    PyErr_Clear();
    return false;
  }
  return isfinite(value);
}

PyObject *tuple_of(const int64_t *numbers, int count) {
  PyObject *tuple = PyTuple_New(count);
  for (int i = 0; tuple && i < count; i++) {
    PyObject *number = PyLong_FromLongLong(numbers[i]);
    if (!number || PyTuple_SetItem(tuple, i, number)) Py_CLEAR(tuple);
  }
  return tuple;
}

namespace {

// The sizes, strides and type of a tensor as empty_strided takes them, kept for the next one.
class KeptLayout {
 public:
  static constexpr int MOST = 6;  // axes
  PyObject *arguments = nullptr;

  // False: an exception is set.
  bool become(const dltensor &t, int new_dtype) {
    if (ndim == t.ndim && dtype == new_dtype && !memcmp(shape, t.shape, bytes(t)) &&
        !memcmp(steps, t.strides, bytes(t)))
      return true;
    // A collection of garbage during this may normalize, too, and use this place.
    PyObject *const sizes = tuple_of(t.shape, t.ndim);
    PyObject *const strides = sizes ? tuple_of(t.strides, t.ndim) : nullptr;
    PyObject *const made =
        strides ? PyTuple_Pack(3, sizes, strides, PyTuple_GetItem(dtypes, new_dtype)) : nullptr;
    Py_XDECREF(sizes);
    Py_XDECREF(strides);
    if (!made) return false;
    Py_XDECREF(arguments);
    arguments = made;
    memcpy(shape, t.shape, bytes(t));
    memcpy(steps, t.strides, bytes(t));
    ndim = t.ndim;
    dtype = new_dtype;
    return true;
  }

 private:
  int ndim = -1, dtype = -1;
  int64_t shape[MOST], steps[MOST];

  static size_t bytes(const dltensor &t) { return (size_t)t.ndim * sizeof(int64_t); }
} kept_layouts[16];

KeptLayout &kept_layout(const dltensor &t, int dtype) {
  uint64_t hash = (uint64_t)(t.ndim + 64 * dtype);
  for (int i = 0; i < t.ndim; i++) hash = (hash ^ (uint64_t)t.shape[i]) * 0x9e3779b97f4a7c15;
  return kept_layouts[hash >> 60];
}

// Whether torch.empty_like of a tensor has the same strides: its elements fill their memory.
bool is_dense(const dltensor &t) {
  int order[KeptLayout::MOST], count = 0;
  for (int i = 0; i < t.ndim; i++) {
    if (t.shape[i] == 1) continue;
    int at = count++;
    for (; at && t.strides[order[at - 1]] > t.strides[i]; at--) order[at] = order[at - 1];
    order[at] = i;
  }
  int64_t step = 1;
  for (int i = 0; i < count; i++) {
    if (t.strides[order[i]] != step) return false;
    step *= t.shape[order[i]];
  }
  return true;
}

// torch.empty_like of a tensor.
PyObject *new_like(PyObject *tensor, bool is_large) {
  PyObject *const general = is_large ? large_empty_like : empty_like;
  dltensor t;
  if (empty_strided == Py_None) return PyObject_CallFunctionObjArgs(general, tensor, nullptr);
  if (api->describe(tensor, &t)) return nullptr;
  const int dtype = dtype_of(t.dtype);
  if (dtype < 0 || !t.strides || t.ndim > KeptLayout::MOST || !is_dense(t))
    return PyObject_CallFunctionObjArgs(general, tensor, nullptr);
  KeptLayout &kept = kept_layout(t, dtype);
  if (!kept.become(t, dtype)) return nullptr;
  // Another thread may need the place meanwhile.
  PyObject *const layout = kept.arguments;
  Py_INCREF(layout);
  PyObject *result = nullptr;
  if (is_large) {
    int64_t bytes = axisnorm::element_size(dtype);
    for (int i = 0; i < t.ndim; i++) bytes *= t.shape[i];
    if ((result = reuse(bytes, layout)) == Py_None) {
      Py_DECREF(result);
      result = PyObject_CallFunctionObjArgs(new_large, tensor, nullptr);
    }
  } else {
    result = PyObject_Call(empty_strided, layout, nullptr);
  }
  Py_DECREF(layout);
  return result;
}

}  // namespace

PyObject *like(PyObject *tensor, int64_t size, int dtype, void *&address, Strides *strides) {
  PyObject *const result = new_like(tensor, size * axisnorm::element_size(dtype) >= large);
  if (!result) return nullptr;
  dltensor t;
  if (api->describe(result, &t)) {
    Py_DECREF(result);
    return nullptr;
  }
  address = (char *)t.data + t.byte_offset;
  if (strides) strides->set(t);
  return result;
}

}  // namespace torch_door
