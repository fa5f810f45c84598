// The short way for plain torch tensors. torch exposes a table of C functions (DLPack 1.3, the
// type's __dlpack_c_exchange_api__) that describes a tensor without a Python call and without
// linking to torch. These functions read their arguments through it, check everything, compute
// and return, or return None when anything is unusual: Python then takes the long way, which
// finds out why and raises where something is wrong.
#include "torch_door.h"

#include <math.h>
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <stdint.h>

#include <initializer_list>
#include <new>

#include "dispatch.h"

namespace {

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
const ExchangeApi *api;
PyObject *tensor_type, *parameter_type, *empty_like, *large_empty_like;
int64_t large;  // bytes from which large_empty_like allocates

// Who may be watching: functions without arguments that return a number or a bool,
// torch.Tensor.is_neg, the state of torch.compiler and of forward_ad by their modules' dictionaries.
struct {
  PyObject *dispatch_modes, *function_mode, *transforms, *tracing, *grad_enabled, *is_neg, *is_inference,
      *increment_version;
  PyObject *compiler, *forward_ad;
} watch;

PyObject *apply_node;     // _ShortNorm.apply(x, weight, bias, (y, stats, constants)) -> y
PyObject *long_backward;  // (ctx, grad): what short_backward leaves alone

// Names of attributes, made once.
struct {
  PyObject *_is_compiling_flag, *_current_level, *requires_grad, *to_save, *saved_tensors,
      *needs_input_grad, *stats, *constants;
} names;

// ---- the guard: a tensor that something watches goes the long way. Each line of it was seen to
// give silently wrong results when missing; each has a test.

// Whether the value is false, None, or a number at most `most`. An error counts as watching.
bool quiet(PyObject *value, long most = 0) {
  if (!value) return PyErr_Clear(), false;
  const bool none = value == Py_None;
  const long number = none ? 0 : PyLong_AsLong(value);
  if (number == -1 && PyErr_Occurred()) return PyErr_Clear(), false;
  return number <= most;
}

bool answers_quiet(PyObject *function) {
  PyObject *answer = PyObject_CallNoArgs(function);
  const bool result = quiet(answer);
  Py_XDECREF(answer);
  return result;
}

// The class is exactly a tensor's. (Its subclasses have a say in what is computed.)
bool is_exact(PyObject *object) {
  PyObject *type = (PyObject *)Py_TYPE(object);
  return type == tensor_type || type == parameter_type;
}

// Not a view that torch keeps negated (is_neg): its memory holds the opposite sign.
bool is_positive(PyObject *tensor) {
  PyObject *answer = PyObject_CallFunctionObjArgs(watch.is_neg, tensor, nullptr);
  const bool result = quiet(answer);
  Py_XDECREF(answer);
  return result;
}

bool unwatched() {
  return answers_quiet(watch.dispatch_modes) && answers_quiet(watch.function_mode) &&
         answers_quiet(watch.transforms) && answers_quiet(watch.tracing) &&
         quiet(PyDict_GetItemWithError(watch.compiler, names._is_compiling_flag)) &&
         quiet(PyDict_GetItemWithError(watch.forward_ad, names._current_level), -1);
}

bool wants_gradient(PyObject *tensor) {
  if (tensor == Py_None) return false;
  PyObject *answer = PyObject_GetAttr(tensor, names.requires_grad);
  const bool result = !quiet(answer);
  Py_XDECREF(answer);
  return result;
}

// ---- reading

// Above this many elements a call takes longer than handing the GIL over.
constexpr int64_t kReleaseGil = 1 << 16;

struct Reading {
  dltensor t;
  int dtype;
  int64_t size;
};

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

// The strides of a tensor of at most MOST axes, in elements.
struct Strides {
  static constexpr int MOST = 8;
  int64_t of[MOST];
  void set(const dltensor &t) {
    int64_t step = 1;
    for (int i = t.ndim - 1; i >= 0; i--) {
      of[i] = t.strides ? t.strides[i] : step;
      step *= t.shape[i];
    }
  }
};

// A plain tensor of this process's memory, not empty, and contiguous unless its strides are asked for;
// false otherwise, without an error.
bool read(PyObject *object, Reading &r, Strides *strides = nullptr) {
  if (!is_exact(object)) return false;
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

const void *data(const Reading &r) { return (const char *)r.t.data + r.t.byte_offset; }

// The sizes of the trailing axes that share a mean: fills job.rows and job.n.
bool read_shape(PyObject *shape, const Reading &x, Job &job, int64_t *sizes, int &count) {
  const bool tuple = PyTuple_Check(shape);
  if (!tuple && !PyList_Check(shape)) return false;
  const Py_ssize_t length = tuple ? PyTuple_Size(shape) : PyList_Size(shape);
  if (length < 1 || length > x.t.ndim || length > 8) return false;
  count = (int)length;
  job.n = 1;
  for (int i = 0; i < count; i++) {
    PyObject *item = tuple ? PyTuple_GetItem(shape, i) : PyList_GetItem(shape, i);
    sizes[i] = PyLong_Check(item) ? PyLong_AsLongLong(item) : -1;
    if (sizes[i] < 0) {
      PyErr_Clear();
      return false;
    }
    if (x.t.shape[x.t.ndim - count + i] != sizes[i]) return false;
    job.n *= sizes[i];
  }
  job.rows = x.size / job.n;
  return true;
}

bool same_shape(const Reading &r, const int64_t *sizes, int count) {
  if (r.t.ndim != count) return false;
  for (int i = 0; i < count; i++)
    if (r.t.shape[i] != sizes[i]) return false;
  return true;
}

bool read_number(PyObject *object, double &value) {
  value = PyFloat_AsDouble(object);
  if (value == -1.0 && PyErr_Occurred()) {
    PyErr_Clear();
    return false;
  }
  return isfinite(value);
}

// x, weight, bias, normalized_shape, eps, weight_offset, center, rounded: what forward and
// backward have in common.
enum { X, WEIGHT, BIAS, SHAPE, EPS, OFFSET, CENTER, ROUNDED, COMMON };

bool read_common(PyObject *const *args, Job &job, Reading &x) {
  int64_t sizes[8];
  int count;
  Reading parameter;
  if (!read(args[X], x) || !read_shape(args[SHAPE], x, job, sizes, count) ||
      !is_positive(args[X]))
    return false;
  job.dtype = job.weight_dtype = job.bias_dtype = x.dtype;
  job.x = data(x);
  if (args[WEIGHT] != Py_None) {
    if (!read(args[WEIGHT], parameter) || !same_shape(parameter, sizes, count) ||
        !is_positive(args[WEIGHT]))
      return false;
    job.weight = data(parameter);
    job.weight_dtype = parameter.dtype;
  }
  if (args[BIAS] != Py_None) {
    if (!read(args[BIAS], parameter) || !same_shape(parameter, sizes, count) ||
        !is_positive(args[BIAS]))
      return false;
    job.bias = data(parameter);
    job.bias_dtype = parameter.dtype;
  }
  if (args[EPS] == Py_None)
    job.eps = x.dtype == F64 ? 0x1p-52 : 0x1p-23;
  else if (!read_number(args[EPS], job.eps))
    return false;
  if (!read_number(args[OFFSET], job.weight_offset)) return false;
  job.center = args[CENTER] == Py_True;
  job.rounded = args[ROUNDED] == Py_True;
  job.divisor = (double)job.n;
  job.x_stride = job.y_stride = job.grad_stride = job.dx_stride = job.n;
  return true;
}

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
bool run(void (*compute)(const Job &), const Job &job) {
  return run([&] { compute(job); }, job.rows * job.n);
}

// A new tensor like this one, of so many elements, in `address`; its strides in `strides`.
PyObject *like(PyObject *tensor, int64_t size, int dtype, void *&address,
               Strides *strides = nullptr) {
  const int64_t bytes = size * (dtype == F64 ? 8 : dtype == F32 ? 4 : 2);
  PyObject *allocate = bytes < large ? empty_like : large_empty_like;
  PyObject *result = PyObject_CallFunctionObjArgs(allocate, tensor, nullptr);
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

// The statistics that backward needs, (3, rows) of the compute type: as bytes, which cost a tenth of
// a tensor.
PyObject *new_stats(Job &job, int64_t rows) {
  const int64_t size = 3 * rows * (job.dtype == F64 ? 8 : 4);
  PyObject *stats = PyBytes_FromStringAndSize(nullptr, size);
  if (stats) job.stats = PyBytes_AsString(stats);
  return stats;
}
PyObject *new_stats(Job &job) { return new_stats(job, job.rows); }

PyObject *unsure() { Py_RETURN_NONE; }

// ---- norms of channels-first tensors: GroupNorm, InstanceNorm, BatchNorm, LayerNorm2d

enum Kind { GROUP, INSTANCE, BATCH, LAYER_2D };

// A norm of a tensor (N, C, ...), as read.
struct Channels {
  Kind kind;
  int64_t groups;  // of channels
  int64_t channels;
  axisnorm::Problem problem;
  Job job;
  Task task;
  Reading x;
};

// Which parts of the axes share a mean and which a weight; x must have been read.
void set_axes(Channels &c) {
  axisnorm::Problem &p = c.problem;
  const bool affine = c.job.weight || c.job.bias;
  const auto add = [&](int64_t size, bool reduced, bool channel) {
    p.axis[p.axes++] = {size, reduced, channel && affine, channel && !reduced, 0, 0, 0, 0, 0};
  };
  add(c.x.t.shape[0], c.kind == BATCH, false);
  if (c.kind == GROUP) {
    add(c.groups, false, true);
    add(c.channels / c.groups, true, true);
  } else {
    add(c.channels, c.kind == LAYER_2D, true);
  }
  for (int i = 2; i < c.x.t.ndim; i++) add(c.x.t.shape[i], c.kind != LAYER_2D, false);
}

// Enters a tensor's strides.
void set_strides(Channels &c, const Strides &strides, int64_t axisnorm::Axis::*member) {
  int axis = 0;
  for (int i = 0; i < c.x.t.ndim; i++) {
    if (i == 1 && c.kind == GROUP)
      c.problem.axis[axis++].*member = strides.of[1] * (c.channels / c.groups);
    c.problem.axis[axis++].*member = strides.of[i];
  }
}

// A tensor of one value a channel, or None. False: something else.
bool read_channels(PyObject *object, int64_t channels, const void *&place, int32_t &dtype) {
  if (object == Py_None) return true;
  Reading r;
  if (!read(object, r) || !same_shape(r, &channels, 1) || !is_positive(object)) return false;
  place = data(r);
  dtype = r.dtype;
  return true;
}

// x, weight, bias, kind, groups, eps: what forward and backward have in common.
enum { KIND = 3, GROUPS, CHANNEL_EPS, GIVEN, KEPT_BIAS, CHANNEL_CONSTANTS };

// Whether the constants that a node keeps are those of a norm of channels, not of rows.
bool of_channels(PyObject *constants) { return !PyTuple_Check(PyTuple_GetItem(constants, 0)); }

bool read_channel_norm(PyObject *const *args, Channels &c, Strides &strides) {
  if (!read(args[X], c.x, &strides) || c.x.t.ndim < 2 || !is_positive(args[X])) return false;
  c.kind = (Kind)PyLong_AsLong(args[KIND]);
  c.groups = PyLong_Check(args[GROUPS]) ? PyLong_AsLongLong(args[GROUPS]) : -1;
  c.channels = c.x.t.shape[1];
  if (PyErr_Occurred()) return PyErr_Clear(), false;
  if (c.kind == GROUP && (c.groups < 1 || c.channels % c.groups)) return false;
  c.job.dtype = c.job.weight_dtype = c.job.bias_dtype = c.x.dtype;
  c.job.x = data(c.x);
  c.job.center = 1;
  if (!read_channels(args[WEIGHT], c.channels, c.job.weight, c.job.weight_dtype) ||
      !read_channels(args[BIAS], c.channels, c.job.bias, c.job.bias_dtype) ||
      !read_number(args[CHANNEL_EPS], c.job.eps))
    return false;
  set_axes(c);
  set_strides(c, strides, &axisnorm::Axis::x);
  return true;
}

// Whether running statistics may be written: not in a tensor that keeps no version.
bool is_inference(PyObject *tensor) {
  PyObject *answer = PyObject_CallFunctionObjArgs(watch.is_inference, tensor, nullptr);
  const bool result = !quiet(answer);
  Py_XDECREF(answer);
  return result;
}

// short_channel_norm(x, weight, bias, kind, groups, eps, running_mean, running_var, batch, momentum)
// -> y. batch: normalize with the statistics of this batch, towards which those given move.
PyObject *short_channel_norm(PyObject *, PyObject *const *args, Py_ssize_t count) {
  if (count != 10 || !api || !is_exact(args[X]) || !unwatched()) return unsure();
  PyObject *const running_mean = args[6], *const running_var = args[7];
  const bool running = running_mean != Py_None, given = args[8] == Py_False;
  Channels c = {};
  Strides strides;
  double momentum = 0;
  if (running != (running_var != Py_None) || (running && running_mean == running_var) || (given ? !running : args[8] != Py_True) ||
      !read_channel_norm(args, c, strides))
    return unsure();
  if (!given && c.kind == BATCH && c.x.size == c.channels) return unsure();  // an error
  const void *mean = nullptr, *var = nullptr;
  int32_t mean_dtype = 0, var_dtype = 0;
  if (running && (!read_channels(running_mean, c.channels, mean, mean_dtype) ||
                  !read_channels(running_var, c.channels, var, var_dtype)))
    return unsure();
  if (running && !given &&
      (!read_number(args[9], momentum) || is_inference(running_mean) || is_inference(running_var)))
    return unsure();
  const bool recording = !answers_quiet(watch.grad_enabled);
  if (recording && (wants_gradient(running_mean) || wants_gradient(running_var))) return unsure();
  const bool gradient = recording && (wants_gradient(args[X]) || wants_gradient(args[WEIGHT]) ||
                                      wants_gradient(args[BIAS]));
  if (given) {
    c.task.running_mean = mean;
    c.task.running_var = var;
    c.task.running_mean_dtype = mean_dtype;
    c.task.running_var_dtype = var_dtype;
  }

  PyObject *y = like(args[X], c.x.size, c.x.dtype, c.job.y, &strides);
  if (!y) return nullptr;
  c.problem.has_y = true;
  c.problem.has_running = given;
  set_strides(c, strides, &axisnorm::Axis::y);
  const axisnorm::Plan plan = axisnorm::make_plan(c.problem);
  if (plan.refused) {
    Py_DECREF(y);
    return unsure();
  }
  const Nest &nest = plan.nest;
  c.job.divisor = (double)nest.group_size;
  PyObject *stats = nullptr, *moments = nullptr, *result = nullptr;
  bool fine = true;
  if (given && gradient) {
    // They may move before backward.
    stats = PyBytes_FromStringAndSize(nullptr, 2 * c.channels * 8);
    fine = stats != nullptr;
    if (fine)
      axisnorm::widen(c.channels, mean_dtype, mean, var_dtype, var, (double *)PyBytes_AsString(stats));
  } else if (!given && (gradient || running)) {
    stats = new_stats(c.job, nest.groups);
    fine = stats != nullptr;
  }
  if (fine && !given && running) {
    moments = PyBytes_FromStringAndSize(nullptr, nest.groups * 8);
    fine = moments != nullptr;
    if (fine) c.job.var = (double *)PyBytes_AsString(moments);
  }
  fine = fine && run([&] { axisnorm::forward(plan, c.job, c.task); }, c.x.size);
  if (fine && gradient) {
    // The bias is kept beside the saved tensors: it may change before backward, which does not read it.
    PyObject *constants = PyTuple_Pack(CHANNEL_CONSTANTS - 3, args[KIND], args[GROUPS],
                                       args[CHANNEL_EPS], given ? Py_True : Py_False, args[BIAS]);
    PyObject *found = constants ? PyTuple_Pack(3, y, stats, constants) : nullptr;
    result = found ? PyObject_CallFunctionObjArgs(apply_node, args[X], args[WEIGHT], args[BIAS],
                                                  found, nullptr)
                   : nullptr;
    Py_XDECREF(constants);
    Py_XDECREF(found);
  } else if (fine) {
    result = y;
    Py_INCREF(y);
  }
  // Last, and after the node has seen the versions of its tensors.
  if (result && !given && running) {
    const int64_t averaged = nest.groups / c.channels;
    axisnorm::move({(void *)mean, (void *)var, mean_dtype, var_dtype, c.channels, averaged, 1,
                    c.job.stats, c.job.var, nullptr, (double)nest.group_size, 0, 1, momentum,
                    c.x.dtype});
    PyObject *both = PyTuple_Pack(2, running_mean, running_var);
    PyObject *done =
        both ? PyObject_CallFunctionObjArgs(watch.increment_version, both, nullptr) : nullptr;
    if (!done) Py_CLEAR(result);
    Py_XDECREF(both);
    Py_XDECREF(done);
  }
  for (PyObject *used : {y, stats, moments}) Py_XDECREF(used);
  return result;
}

// The gradients (dx, dweight, dbias, None), or None.
PyObject *channel_backward(PyObject *saved, PyObject *needs, PyObject *stats, PyObject *constants,
                           PyObject *gradient) {
  PyObject *args[CHANNEL_CONSTANTS];
  for (int i = 0; i < CHANNEL_CONSTANTS; i++)
    args[i] = i < 3 ? PyTuple_GetItem(saved, i) : PyTuple_GetItem(constants, i - 3);
  args[BIAS] = args[KEPT_BIAS];
  const bool given = args[GIVEN] == Py_True;
  Channels c = {};
  Strides strides, grad_strides;
  Reading grad;
  if (!read_channel_norm(args, c, strides) || !read(gradient, grad, &grad_strides) ||
      grad.dtype != c.x.dtype || !same_shape(grad, c.x.t.shape, c.x.t.ndim) ||
      !PyBytes_Check(stats))
    return unsure();
  c.job.grad = data(grad);
  c.problem.has_grad = true;
  set_strides(c, grad_strides, &axisnorm::Axis::grad);
  PyObject *results[3] = {};
  void **targets[3] = {&c.job.dx, &c.job.dweight, &c.job.dbias};
  bool fine = true;
  for (int i = 0; i < 3 && fine; i++) {
    if (PyTuple_GetItem(needs, i) != Py_True || args[i] == Py_None) continue;
    const int dtype = i == 0 ? c.x.dtype : i == 1 ? c.job.weight_dtype : c.job.bias_dtype;
    results[i] = like(args[i], i ? c.channels : c.x.size, dtype, *targets[i], i ? nullptr : &strides);
    fine = results[i] != nullptr;
  }
  PyObject *result = nullptr;
  if (fine) {
    if ((c.problem.has_dx = c.job.dx)) set_strides(c, strides, &axisnorm::Axis::dx);
    c.problem.has_running = given;
    const axisnorm::Plan plan = axisnorm::make_plan(c.problem);
    const int64_t size = given ? 2 * c.channels * 8
                               : 3 * plan.nest.groups * (c.x.dtype == F64 ? 8 : 4);
    if (plan.refused || PyBytes_Size(stats) != size) {
      result = unsure();
    } else {
      c.job.divisor = (double)plan.nest.group_size;
      c.job.stats = PyBytes_AsString(stats);
      if (given) {
        c.task.running_mean = c.job.stats;
        c.task.running_var = (const double *)c.job.stats + c.channels;
        c.task.running_mean_dtype = c.task.running_var_dtype = F64;
      }
      if (run([&] { axisnorm::backward(plan, c.job, c.task); }, c.x.size)) {
        PyObject *all[3];
        for (int i = 0; i < 3; i++) all[i] = results[i] ? results[i] : Py_None;
        result = PyTuple_Pack(4, all[0], all[1], all[2], Py_None);
      }
    }
  }
  for (PyObject *r : results) Py_XDECREF(r);
  return result;
}

// ---- what Python calls

// connect(capsule, {name: object}) -> bool: the table and what `watch` holds, by name
PyObject *connect(PyObject *, PyObject *const *args, Py_ssize_t count) {
  const struct {
    const char *name;
    PyObject **place;
  } wanted[] = {{"Tensor", &tensor_type},
                {"Parameter", &parameter_type},
                {"empty_like", &empty_like},
                {"large_empty_like", &large_empty_like},
                {"dispatch_modes", &watch.dispatch_modes},
                {"function_mode", &watch.function_mode},
                {"transforms", &watch.transforms},
                {"tracing", &watch.tracing},
                {"grad_enabled", &watch.grad_enabled},
                {"is_neg", &watch.is_neg},
                {"is_inference", &watch.is_inference},
                {"increment_version", &watch.increment_version},
                {"compiler", &watch.compiler},
                {"forward_ad", &watch.forward_ad},
                {"apply_node", &apply_node},
                {"long_backward", &long_backward}};
  if (count != 2 || !PyDict_Check(args[1])) {
    PyErr_SetString(PyExc_TypeError, "connect takes a capsule and a dictionary");
    return nullptr;
  }
  auto *table = (const ExchangeApi *)PyCapsule_GetPointer(args[0], "dlpack_exchange_api");
  if (!table) return nullptr;
  if (table->header.major != 1 || !table->describe) Py_RETURN_FALSE;
  for (const auto &item : wanted) {
    PyObject *object = PyDict_GetItemString(args[1], item.name);
    if (!object) {
      PyErr_Format(PyExc_KeyError, "%s", item.name);
      return nullptr;
    }
    Py_INCREF(object);
    *item.place = object;
  }
  PyObject *least = PyDict_GetItemString(args[1], "large");
  large = least ? PyLong_AsLongLong(least) : 0;
  if (large <= 0) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_KeyError, "large");
    return nullptr;
  }
#define INTERN(name) \
  if (!(names.name = PyUnicode_InternFromString(#name))) return nullptr
  INTERN(_is_compiling_flag);
  INTERN(_current_level);
  INTERN(requires_grad);
  INTERN(to_save);
  INTERN(saved_tensors);
  INTERN(needs_input_grad);
  INTERN(stats);
  INTERN(constants);
#undef INTERN
  if (!PyDict_GetItem(watch.compiler, names._is_compiling_flag) ||
      !PyDict_GetItem(watch.forward_ad, names._current_level))
    Py_RETURN_FALSE;  // another version of torch, where these stand elsewhere
  api = table;
  Py_RETURN_TRUE;
}

// The output of the common arguments; with `stats`, also what backward needs.
PyObject *compute(PyObject *const *args, PyObject **stats) {
  Job job = {};
  Reading x;
  if (!read_common(args, job, x)) return unsure();
  PyObject *y = like(args[X], x.size, x.dtype, job.y);
  if (y && stats && !(*stats = new_stats(job))) Py_CLEAR(y);
  if (y && !run(axisnorm::forward, job)) Py_CLEAR(y);
  return y;
}

// The whole short way: guard, forward, and where a gradient is needed the autograd node.
PyObject *short_way(PyObject *const *args) {
  if (!api || !is_exact(args[X]) || !unwatched()) return unsure();
  // What is no tensor is refused when it is read.
  const bool gradient =
      !answers_quiet(watch.grad_enabled) &&
      (wants_gradient(args[X]) || wants_gradient(args[WEIGHT]) || wants_gradient(args[BIAS]));
  if (!gradient) return compute(args, nullptr);
  PyObject *stats = nullptr, *y = compute(args, &stats);
  if (!stats) return y;  // unsure, or an error
  PyObject *shape = PySequence_Tuple(args[SHAPE]);  // a list of the caller's could change
  PyObject *constants =
      shape ? PyTuple_Pack(5, shape, args[EPS], args[OFFSET], args[CENTER], args[ROUNDED]) : nullptr;
  // Within a tuple, y is no input of the node.
  PyObject *found = y && constants ? PyTuple_Pack(3, y, stats, constants) : nullptr;
  PyObject *result = found ? PyObject_CallFunctionObjArgs(apply_node, args[X], args[WEIGHT],
                                                          args[BIAS], found, nullptr)
                           : nullptr;
  for (PyObject *used : {y, stats, shape, constants, found}) Py_XDECREF(used);
  return result;
}

// node_forward(ctx, x, weight, bias, (y, stats, constants)) -> y: keeps what backward needs
PyObject *node_forward(PyObject *, PyObject *const *args, Py_ssize_t count) {
  if (count != 5) {
    PyErr_SetString(PyExc_TypeError, "node_forward takes 5 arguments");
    return nullptr;
  }
  PyObject *ctx = args[0], *y = PyTuple_GetItem(args[4], 0);
  PyObject *constants = y ? PyTuple_GetItem(args[4], 2) : nullptr;
  PyObject *saved = constants ? PyTuple_Pack(3, args[1], args[2],
                                             of_channels(constants) ? Py_None : args[3])
                              : nullptr;
  const bool fine = saved && !PyObject_SetAttr(ctx, names.to_save, saved) &&
                    !PyObject_SetAttr(ctx, names.stats, PyTuple_GetItem(args[4], 1)) &&
                    !PyObject_SetAttr(ctx, names.constants, constants);
  Py_XDECREF(saved);
  if (!fine) return nullptr;
  Py_INCREF(y);
  return y;
}

// short_layer_norm(x, normalized_shape, weight, bias, eps) -> y
PyObject *short_layer_norm(PyObject *, PyObject *const *args, Py_ssize_t count) {
  if (count != 5) return unsure();
  static PyObject *const zero = PyFloat_FromDouble(0.0);
  PyObject *common[COMMON] = {args[0], args[2], args[3], args[1], args[4], zero, Py_True, Py_False};
  return short_way(common);
}

// False: neither of the two texts.
bool read_rounding(PyObject *text, bool &once) {
  if (!PyUnicode_Check(text)) return false;
  once = PyUnicode_CompareWithASCIIString(text, "once") == 0;
  return once || PyUnicode_CompareWithASCIIString(text, "before_affine") == 0;
}

// short_rms_norm(x, normalized_shape, weight, eps, weight_offset, rounding) -> y
PyObject *short_rms_norm(PyObject *, PyObject *const *args, Py_ssize_t count) {
  bool once;
  if (count != 6 || !read_rounding(args[5], once)) return unsure();
  PyObject *common[COMMON] = {args[0], args[2], Py_None,  args[1],
                              args[3], args[4], Py_False, once ? Py_False : Py_True};
  return short_way(common);
}

// What the node keeps, as new references.
struct Kept {
  PyObject *saved, *needs, *stats, *constants;
  explicit Kept(PyObject *ctx)
      : saved(PyObject_GetAttr(ctx, names.saved_tensors)),
        needs(saved ? PyObject_GetAttr(ctx, names.needs_input_grad) : nullptr),
        stats(needs ? PyObject_GetAttr(ctx, names.stats) : nullptr),
        constants(stats ? PyObject_GetAttr(ctx, names.constants) : nullptr) {}
  Kept(const Kept &) = delete;
  ~Kept() {
    Py_XDECREF(saved);
    Py_XDECREF(needs);
    Py_XDECREF(stats);
    Py_XDECREF(constants);
  }
};

// short_backward(ctx, grad) -> (dx, dweight, dbias, None): what the node returns
PyObject *short_backward(PyObject *, PyObject *const *args, Py_ssize_t count) {
  if (!api || count != 2 || !is_exact(args[1]) || !unwatched() ||
      !answers_quiet(watch.grad_enabled) || !is_positive(args[1]))
    return unsure();
  const Kept kept(args[0]);
  if (!kept.constants) return nullptr;
  if (of_channels(kept.constants))
    return channel_backward(kept.saved, kept.needs, kept.stats, kept.constants, args[1]);
  PyObject *common[COMMON];
  for (int i = 0; i < COMMON; i++)
    common[i] = i < 3 ? PyTuple_GetItem(kept.saved, i) : PyTuple_GetItem(kept.constants, i - 3);
  Job job = {};
  Reading x, grad;
  if (!read_common(common, job, x) || !read(args[1], grad) || grad.dtype != x.dtype ||
      !same_shape(grad, x.t.shape, x.t.ndim) || !PyBytes_Check(kept.stats) ||
      PyBytes_Size(kept.stats) != 3 * job.rows * (x.dtype == F64 ? 8 : 4))
    return unsure();
  job.grad = data(grad);
  job.stats = PyBytes_AsString(kept.stats);
  PyObject *results[3] = {};
  void **targets[3] = {&job.dx, &job.dweight, &job.dbias};
  bool fine = true;
  for (int i = 0; i < 3 && fine; i++) {
    const bool needed = PyTuple_GetItem(kept.needs, i) == Py_True && common[i] != Py_None;
    if (needed)
      fine = (results[i] = like(common[i], i ? job.n : x.size, x.dtype, *targets[i])) != nullptr;
  }
  PyObject *result = nullptr;
  if (fine && run(axisnorm::backward, job)) {
    PyObject *all[3];
    for (int i = 0; i < 3; i++) all[i] = results[i] ? results[i] : Py_None;
    result = PyTuple_Pack(4, all[0], all[1], all[2], Py_None);
  }
  for (PyObject *r : results) Py_XDECREF(r);
  return result;
}

// A contiguous copy of a gradient that is none, such as the expanded one of sum(). Null if it needs
// no copy or somebody may be watching, and also with an error set.
PyObject *gathered(PyObject *grad) {
  if (!api || !is_exact(grad) || !unwatched() || !answers_quiet(watch.grad_enabled)) return nullptr;
  PyObject *copy = PyObject_CallMethod(grad, "contiguous", nullptr);
  if (copy == grad) Py_CLEAR(copy);
  return copy;
}

// The gradients of a node: by the short way, else with contiguous gradients, else by the long one.
// `all` is the node's context and what has arrived.
PyObject *gradients(PyObject *(*short_one)(PyObject *, PyObject *const *, Py_ssize_t),
                    PyObject *long_one, PyObject **all, Py_ssize_t count) {
  PyObject *result = short_one(nullptr, all, count);
  if (result != Py_None) return result;
  PyObject *copies[2] = {}, *given[2] = {};
  bool any = false;
  for (Py_ssize_t i = 1; i < count && !PyErr_Occurred(); i++) {
    given[i - 1] = all[i];
    if ((copies[i - 1] = gathered(all[i]))) all[i] = copies[i - 1], any = true;
  }
  if (PyErr_Occurred()) Py_CLEAR(result);
  else if (any) Py_DECREF(result), result = short_one(nullptr, all, count);
  for (PyObject *copy : copies) Py_XDECREF(copy);
  if (result != Py_None) return result;
  Py_DECREF(result);
  return PyObject_CallFunctionObjArgs(long_one, all[0], given[0], given[1], nullptr);
}

// The method `apply` of the node's class, which autograd calls.
PyObject *node_apply(PyObject *ctx, PyObject *const *args, Py_ssize_t count) {
  if (count == 1) {
    PyObject *all[2] = {ctx, args[0]};
    return gradients(short_backward, long_backward, all, 2);
  }
  PyErr_SetString(PyExc_TypeError, "a norm has one gradient");
  return nullptr;
}

PyMethodDef apply_definition = {"apply", (PyCFunction)(void *)node_apply, METH_FASTCALL, nullptr};

PyObject *set_apply(PyObject *type, PyMethodDef *definition) {
  PyObject *method = PyDescr_NewMethod((PyTypeObject *)type, definition);
  const bool fine = method && !PyObject_SetAttrString(type, "apply", method);
  Py_XDECREF(method);
  if (!fine) return nullptr;
  Py_RETURN_NONE;
}

// quicken(class) gives the node's class the method, in place of two Python functions.
PyObject *quicken(PyObject *, PyObject *type) { return set_apply(type, &apply_definition); }

// ---- the norm of a sum, h = residual + dropout(x)

PyObject *apply_add_node;     // _ShortAddNorm.apply(x, residual, weight, bias, found) -> (y, h)
PyObject *long_add_backward;  // (ctx, grad, grad_h)
PyObject *draw;               // torch.Tensor.random_
PyObject *kept_seed;          // an int64 tensor that seeds are drawn into
bool kept_seed_in_use;

struct {
  PyObject *materialize_grads, *non_differentiable;
} add_names;

// connect_add({name: object}) -> None: what the functions below need, by name
PyObject *connect_add(PyObject *, PyObject *given) {
  const struct {
    const char *name;
    PyObject **place;
  } wanted[] = {{"apply_node", &apply_add_node},
                {"long_backward", &long_add_backward},
                {"draw", &draw},
                {"seed", &kept_seed}};
  if (!PyDict_Check(given)) {
    PyErr_SetString(PyExc_TypeError, "connect_add takes a dictionary");
    return nullptr;
  }
  for (const auto &item : wanted) {
    PyObject *object = PyDict_GetItemString(given, item.name);
    if (!object) {
      PyErr_Format(PyExc_KeyError, "%s", item.name);
      return nullptr;
    }
    Py_INCREF(object);
    *item.place = object;
  }
  add_names.materialize_grads = PyUnicode_InternFromString("materialize_grads");
  add_names.non_differentiable = PyUnicode_InternFromString("non_differentiable");
  if (!add_names.materialize_grads || !add_names.non_differentiable) return nullptr;
  Py_RETURN_NONE;
}

// A number of torch's generator. False: an exception is set.
bool draw_seed(uint64_t &seed) {
  // One tensor is drawn into again and again, which costs half of a new one each time. Another thread
  // may come in while torch has released the GIL.
  const bool kept = !kept_seed_in_use;
  PyObject *tensor = kept ? kept_seed
                          : PyObject_CallFunctionObjArgs(empty_like, kept_seed, nullptr);
  if (!tensor) return false;
  if (kept) kept_seed_in_use = true;
  PyObject *drawn = PyObject_CallFunctionObjArgs(draw, tensor, nullptr);
  dltensor t;
  const bool fine = drawn && !api->describe(tensor, &t);
  if (fine) seed = *(const uint64_t *)((const char *)t.data + t.byte_offset);
  Py_XDECREF(drawn);
  if (kept) kept_seed_in_use = false;
  else Py_DECREF(tensor);
  return fine;
}

enum { RESIDUAL, DROPOUT_P, TRAINING, PRENORM, ADDED };

bool same_kind(const Reading &a, const Reading &b) {
  return a.dtype == b.dtype && same_shape(a, b.t.shape, b.t.ndim);
}

// As short_way, for the norm of a sum: y, or with prenorm (y, h).
PyObject *short_add_way(PyObject *const *args, PyObject *const *added) {
  if (!api || !apply_add_node || !is_exact(args[X]) || !unwatched()) return unsure();
  Job job = {};
  Reading x, residual;
  double p;
  const int training = PyObject_IsTrue(added[TRAINING]);
  const int prenorm = training < 0 ? -1 : PyObject_IsTrue(added[PRENORM]);
  if (prenorm < 0) return PyErr_Clear(), unsure();
  if (!read_common(args, job, x) || !read(added[RESIDUAL], residual) || !same_kind(residual, x) ||
      !is_positive(added[RESIDUAL]) || !read_number(added[DROPOUT_P], p) || !(p >= 0 && p < 1))
    return unsure();
  const bool recording = !answers_quiet(watch.grad_enabled);
  const bool gradient_of_h =
      recording && (wants_gradient(args[X]) || wants_gradient(added[RESIDUAL]));
  const bool gradient = gradient_of_h || (recording && (wants_gradient(args[WEIGHT]) ||
                                                        wants_gradient(args[BIAS])));
  job.residual = data(residual);
  job.residual_stride = job.h_stride = job.n;
  if (training) job.dropout_p = p;

  PyObject *y = like(args[X], x.size, x.dtype, job.y), *h = nullptr, *stats = nullptr;
  bool fine = y != nullptr;
  if (fine && (gradient || prenorm)) fine = (h = like(args[X], x.size, x.dtype, job.h)) != nullptr;
  if (fine && gradient) fine = (stats = new_stats(job)) != nullptr;
  if (fine && job.dropout_p > 0) fine = draw_seed(job.seed);
  fine = fine && run(axisnorm::forward, job);
  PyObject *result = nullptr;
  if (fine && gradient) {
    PyObject *shape = PySequence_Tuple(args[SHAPE]);
    PyObject *constants = shape ? Py_BuildValue("(OOOOOdL)", shape, args[EPS], args[OFFSET],
                                                args[CENTER], args[ROUNDED], job.dropout_p,
                                                (long long)job.seed)
                                : nullptr;
    PyObject *found = constants ? PyTuple_Pack(5, y, h, stats, constants,
                                               gradient_of_h ? Py_True : Py_False)
                                : nullptr;
    PyObject *both = found ? PyObject_CallFunctionObjArgs(apply_add_node, args[X], added[RESIDUAL],
                                                          args[WEIGHT], args[BIAS], found, nullptr)
                           : nullptr;
    if (both && !prenorm) {
      result = PyTuple_GetItem(both, 0);
      Py_XINCREF(result);
      Py_DECREF(both);
    } else {
      result = both;
    }
    for (PyObject *used : {shape, constants, found}) Py_XDECREF(used);
  } else if (fine && prenorm) {
    result = PyTuple_Pack(2, y, h);
  } else if (fine) {
    result = y;
    Py_INCREF(y);
  }
  for (PyObject *used : {y, h, stats}) Py_XDECREF(used);
  return result;
}

// short_add_layer_norm(x, residual, normalized_shape, weight, bias, eps, dropout_p, training,
// prenorm) -> y or (y, h)
PyObject *short_add_layer_norm(PyObject *, PyObject *const *args, Py_ssize_t count) {
  if (count != 9) return unsure();
  static PyObject *const zero = PyFloat_FromDouble(0.0);
  PyObject *common[COMMON] = {args[0], args[3], args[4], args[2], args[5], zero, Py_True, Py_False};
  PyObject *added[ADDED] = {args[1], args[6], args[7], args[8]};
  return short_add_way(common, added);
}

// short_add_rms_norm(x, residual, normalized_shape, weight, eps, weight_offset, rounding, dropout_p,
// training, prenorm) -> y or (y, h)
PyObject *short_add_rms_norm(PyObject *, PyObject *const *args, Py_ssize_t count) {
  bool once;
  if (count != 10 || !read_rounding(args[6], once)) return unsure();
  PyObject *common[COMMON] = {args[0], args[3], Py_None,  args[2],
                              args[4], args[5], Py_False, once ? Py_False : Py_True};
  PyObject *added[ADDED] = {args[1], args[7], args[8], args[9]};
  return short_add_way(common, added);
}

// add_node_forward(ctx, x, residual, weight, bias, (y, h, stats, constants, whether h has a
// gradient)) -> (y, h)
PyObject *add_node_forward(PyObject *, PyObject *const *args, Py_ssize_t count) {
  if (count != 6 || !PyTuple_Check(args[5]) || PyTuple_Size(args[5]) != 5) {
    PyErr_SetString(PyExc_TypeError, "add_node_forward takes 6 arguments");
    return nullptr;
  }
  PyObject *ctx = args[0], *found = args[5], *h = PyTuple_GetItem(found, 1);
  PyObject *saved = PyTuple_Pack(3, h, args[3], args[4]);
  // An output that nobody used has no gradient rather than one of zeros.
  bool fine = saved && !PyObject_SetAttr(ctx, names.to_save, saved) &&
              !PyObject_SetAttr(ctx, names.stats, PyTuple_GetItem(found, 2)) &&
              !PyObject_SetAttr(ctx, names.constants, PyTuple_GetItem(found, 3)) &&
              !PyObject_SetAttr(ctx, add_names.materialize_grads, Py_False);
  Py_XDECREF(saved);
  if (fine && PyTuple_GetItem(found, 4) != Py_True) {
    PyObject *constant = PyTuple_Pack(1, h);
    fine = constant && !PyObject_SetAttr(ctx, add_names.non_differentiable, constant);
    Py_XDECREF(constant);
  }
  return fine ? PyTuple_Pack(2, PyTuple_GetItem(found, 0), h) : nullptr;
}

// Whether this is a gradient of a tensor that was read.
bool read_gradient(PyObject *object, const Reading &of, Reading &gradient) {
  return is_exact(object) && is_positive(object) && read(object, gradient) &&
         same_kind(gradient, of);
}

// short_add_backward(ctx, grad, grad_h) -> (dx, dresidual, dweight, dbias, None)
PyObject *short_add_backward(PyObject *, PyObject *const *args, Py_ssize_t count) {
  if (!api || count != 3 || !unwatched() || !answers_quiet(watch.grad_enabled)) return unsure();
  const Kept kept(args[0]);
  if (!kept.constants) return nullptr;
  PyObject *common[COMMON];
  for (int i = 0; i < COMMON; i++)
    common[i] = i < 3 ? PyTuple_GetItem(kept.saved, i) : PyTuple_GetItem(kept.constants, i - 3);
  Job job = {};
  Reading h, grad, grad_h;
  if (!read_common(common, job, h) || !read_gradient(args[1], h, grad) ||
      (args[2] != Py_None && !read_gradient(args[2], h, grad_h)) || !PyBytes_Check(kept.stats) ||
      PyBytes_Size(kept.stats) != 3 * job.rows * (h.dtype == F64 ? 8 : 4))
    return unsure();
  job.grad = data(grad);
  if (args[2] != Py_None) job.grad_h = data(grad_h);
  job.stats = PyBytes_AsString(kept.stats);
  job.grad_h_stride = job.dropped_dx_stride = job.n;
  job.dropout_p = PyFloat_AsDouble(PyTuple_GetItem(kept.constants, 5));
  job.seed = (uint64_t)PyLong_AsLongLong(PyTuple_GetItem(kept.constants, 6));
  if (PyErr_Occurred()) return nullptr;

  const auto needs = [&](int i) { return PyTuple_GetItem(kept.needs, i) == Py_True; };
  const bool dropped = job.dropout_p > 0;
  PyObject *dx = nullptr, *dh = nullptr, *dweight = nullptr, *dbias = nullptr;
  bool fine = true;
  const auto make = [&](bool wanted, PyObject *model, int64_t size, PyObject *&result,
                        void *&place) {
    if (fine && wanted) fine = (result = like(model, size, h.dtype, place)) != nullptr;
  };
  make(needs(1) || (needs(0) && !dropped), common[X], h.size, dh, job.dx);
  make(needs(0) && dropped, common[X], h.size, dx, job.dropped_dx);
  make(needs(2) && common[WEIGHT] != Py_None, common[WEIGHT], job.n, dweight, job.dweight);
  make(needs(3) && common[BIAS] != Py_None, common[BIAS], job.n, dbias, job.dbias);
  PyObject *result = nullptr;
  if (fine && run(axisnorm::backward, job)) {
    const auto or_none = [](PyObject *object) { return object ? object : Py_None; };
    result = PyTuple_Pack(5, needs(0) ? or_none(dropped ? dx : dh) : Py_None,
                          needs(1) ? or_none(dh) : Py_None, or_none(dweight), or_none(dbias),
                          Py_None);
  }
  for (PyObject *made : {dx, dh, dweight, dbias}) Py_XDECREF(made);
  return result;
}

PyObject *add_node_apply(PyObject *ctx, PyObject *const *args, Py_ssize_t count) {
  if (count == 2) {
    PyObject *all[3] = {ctx, args[0], args[1]};
    return gradients(short_add_backward, long_add_backward, all, 3);
  }
  PyErr_SetString(PyExc_TypeError, "the norm of a sum has two gradients");
  return nullptr;
}

PyMethodDef add_apply_definition = {"apply", (PyCFunction)(void *)add_node_apply, METH_FASTCALL,
                                    nullptr};

PyObject *quicken_add(PyObject *, PyObject *type) { return set_apply(type, &add_apply_definition); }

PyMethodDef methods[] = {
    {"connect", (PyCFunction)(void *)connect, METH_FASTCALL, nullptr},
    {"short_layer_norm", (PyCFunction)(void *)short_layer_norm, METH_FASTCALL, nullptr},
    {"short_rms_norm", (PyCFunction)(void *)short_rms_norm, METH_FASTCALL, nullptr},
    {"short_channel_norm", (PyCFunction)(void *)short_channel_norm, METH_FASTCALL, nullptr},
    {"node_forward", (PyCFunction)(void *)node_forward, METH_FASTCALL, nullptr},
    {"quicken", (PyCFunction)quicken, METH_O, nullptr},
    {"short_backward", (PyCFunction)(void *)short_backward, METH_FASTCALL, nullptr},
    {"connect_add", (PyCFunction)connect_add, METH_O, nullptr},
    {"short_add_layer_norm", (PyCFunction)(void *)short_add_layer_norm, METH_FASTCALL, nullptr},
    {"short_add_rms_norm", (PyCFunction)(void *)short_add_rms_norm, METH_FASTCALL, nullptr},
    {"add_node_forward", (PyCFunction)(void *)add_node_forward, METH_FASTCALL, nullptr},
    {"quicken_add", (PyCFunction)quicken_add, METH_O, nullptr},
    {"short_add_backward", (PyCFunction)(void *)short_add_backward, METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

void torch_door::add_to(PyObject *module) {
  if (PyModule_AddFunctions(module, methods)) throw nanobind::python_error();
}
