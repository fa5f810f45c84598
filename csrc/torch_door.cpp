// The short way for plain torch tensors and NumPy arrays: these functions read their arguments, check
// everything, compute and return, or return None when anything is unusual: Python then takes the long
// way, which finds out why and raises where something is wrong.
#include "torch_door.h"

#include "arrays.h"

namespace torch_door {
namespace {

PyObject *apply_node;     // _ShortNorm.apply(x, weight, bias, (y, kept)) -> y
PyObject *long_backward;  // (ctx, saved, grad): what short_backward leaves alone

// Names of attributes, made once.
struct {
  PyObject *to_save, *saved_tensors, *needs_input_grad, *kept;
} names;

// The sizes of the trailing axes that share a mean, a number or several: fills job.rows and job.n.
bool read_shape(PyObject *shape, const Reading &x, Job &job, int64_t *sizes, int &count) {
  const bool one = PyLong_CheckExact(shape), tuple = PyTuple_Check(shape);
  if (!one && !tuple && !PyList_Check(shape)) return false;
  const Py_ssize_t length = one ? 1 : tuple ? PyTuple_Size(shape) : PyList_Size(shape);
  if (length < 1 || length > x.t.ndim || length > 8) return false;
  count = (int)length;
  job.n = 1;
  for (int i = 0; i < count; i++) {
    PyObject *item = one     ? shape
                     : tuple ? PyTuple_GetItem(shape, i)
                             : PyList_GetItem(shape, i);
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

// What a node keeps beside its saved tensors x (or h) and weight, in one tuple: attributes cost more.
// The bias may change before backward, which does not read it unless there is an activation, the last
// of the constants (but for a sum's): then it is saved, too.
enum { STATS, KEPT_BIAS, CONSTANTS };

// x, weight, bias, normalized_shape, eps, weight_offset, center, rounded: what forward and
// backward have in common.
enum { X, WEIGHT, BIAS, SHAPE, EPS, OFFSET, CENTER, ROUNDED, COMMON };
constexpr int ACTIVATION = COMMON;  // behind them, in a node

template <class Source> bool read_common(PyObject *const *args, Job &job, Reading &x) {
  int64_t sizes[8];
  int count;
  Reading parameter;
  if (!Source::read(args[X], x) || !read_shape(args[SHAPE], x, job, sizes, count) ||
      !Source::is_positive(args[X]))
    return false;
  job.dtype = job.weight_dtype = job.bias_dtype = x.dtype;
  job.x = data(x);
  if (args[WEIGHT] != Py_None) {
    if (!Source::read(args[WEIGHT], parameter) || !same_shape(parameter, sizes, count) ||
        !Source::is_positive(args[WEIGHT]))
      return false;
    job.weight = data(parameter);
    job.weight_dtype = parameter.dtype;
  }
  if (args[BIAS] != Py_None) {
    if (!Source::read(args[BIAS], parameter) || !same_shape(parameter, sizes, count) ||
        !Source::is_positive(args[BIAS]))
      return false;
    job.bias = data(parameter);
    job.bias_dtype = parameter.dtype;
  }
  job.center = args[CENTER] == Py_True;
  if (args[EPS] == Py_None && !job.center)
    job.eps = x.dtype == F64 ? 0x1p-52 : 0x1p-23;
  else if (!read_number(args[EPS], job.eps))
    return false;
  if (!read_number(args[OFFSET], job.weight_offset)) return false;
  job.rounded = args[ROUNDED] == Py_True;
  job.divisor = (double)job.n;
  job.x_stride = job.y_stride = job.grad_stride = job.dx_stride = job.n;
  return true;
}

bool run_rows(void (*compute)(const Job &), const Job &job) {
  return run([&] { compute(job); }, job.rows * job.n);
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
template <class Source>
bool read_channels(PyObject *object, int64_t channels, const void *&place, int32_t &dtype) {
  if (object == Py_None) return true;
  Reading r;
  if (!Source::read(object, r) || !same_shape(r, &channels, 1) || !Source::is_positive(object))
    return false;
  place = data(r);
  dtype = r.dtype;
  return true;
}

// x, weight, bias, kind, groups, eps: what forward and backward have in common.
enum { KIND = 3, GROUPS, CHANNEL_EPS, GIVEN, CHANNEL_ACTIVATION, CHANNEL_CONSTANTS };

template <class Source>
bool read_channel_norm(PyObject *const *args, Channels &c, Strides &strides) {
  if (!Source::read(args[X], c.x, &strides) || c.x.t.ndim < 2 || !Source::is_positive(args[X]))
    return false;
  c.kind = (Kind)PyLong_AsLong(args[KIND]);
  c.groups = PyLong_Check(args[GROUPS]) ? PyLong_AsLongLong(args[GROUPS]) : -1;
  c.channels = c.x.t.shape[1];
  if (PyErr_Occurred()) return PyErr_Clear(), false;
  if (c.kind == GROUP && (c.groups < 1 || c.channels % c.groups)) return false;
  c.job.dtype = c.job.weight_dtype = c.job.bias_dtype = c.x.dtype;
  c.job.x = data(c.x);
  c.job.center = 1;
  if (!read_channels<Source>(args[WEIGHT], c.channels, c.job.weight, c.job.weight_dtype) ||
      !read_channels<Source>(args[BIAS], c.channels, c.job.bias, c.job.bias_dtype) ||
      !read_number(args[CHANNEL_EPS], c.job.eps))
    return false;
  set_axes(c);
  set_strides(c, strides, &axisnorm::Axis::x);
  return true;
}

// y with the node that knows its gradient; takes the reference to `kept`.
PyObject *noted(PyObject *const *args, PyObject *y, PyObject *kept) {
  // Within a tuple, y is no input of the node.
  PyObject *found = kept ? PyTuple_Pack(2, y, kept) : nullptr;
  PyObject *result = found ? PyObject_CallFunctionObjArgs(apply_node, args[X], args[WEIGHT],
                                                          args[BIAS], found, nullptr)
                           : nullptr;
  Py_XDECREF(kept);
  Py_XDECREF(found);
  return result;
}

// short_channel_norm of arrays, whose running statistics do not move here.
PyObject *channel_norm_of_arrays(PyObject *const *args, PyObject *out) {
  PyObject *const running_mean = args[6], *const running_var = args[7];
  const bool given = args[8] == Py_False;
  Channels c = {};
  Strides strides;
  double momentum;
  if (given != (running_mean != Py_None) || given != (running_var != Py_None) ||
      (!given && args[8] != Py_True) || !read_channel_norm<Arrays>(args, c, strides) ||
      !read_activation(args[10], c.job.activation) ||
      !read_number(args[9], momentum) ||  // not used, but it may be an error
      (!given && c.kind == BATCH && c.x.size == c.channels) ||  // another
      !read_channels<Arrays>(running_mean, c.channels, c.task.running_mean,
                             c.task.running_mean_dtype) ||
      !read_channels<Arrays>(running_var, c.channels, c.task.running_var,
                             c.task.running_var_dtype) ||
      may_meet<Arrays>(out, {running_mean, running_var}))
    return unsure();
  Output<Arrays> output;
  if (!output.make(args[X], c.x, out, {args[X], args[WEIGHT], args[BIAS]}, c.job.y, &strides))
    return failed_or_unsure();
  c.problem.has_y = true;
  c.problem.has_running = given;
  set_strides(c, strides, &axisnorm::Axis::y);
  const auto plan = axisnorm::plan_for(c.problem);
  if (plan->refused) return unsure();
  c.job.divisor = (double)plan->nest.group_size;
  return output.result(
      run([&] { axisnorm::forward(*plan, c.job, c.task), output.settle(); }, c.x.size));
}

// short_channel_norm(x, weight, bias, kind, groups, eps, running_mean, running_var, batch, momentum,
// activation, out=None) -> y. batch: normalize with the statistics of this batch, towards which those
// given move.
PyObject *short_channel_norm(PyObject *, PyObject *const *args, Py_ssize_t count) {
  if (count < 11 || count > 12) return unsure();
  PyObject *const out = count > 11 ? args[11] : Py_None;
  if (numpy_array::is_array(args[X])) return channel_norm_of_arrays(args, out);
  if (!api || !is_exact(args[X]) || !unwatched()) return unsure();
  PyObject *const running_mean = args[6], *const running_var = args[7];
  const bool running = running_mean != Py_None, given = args[8] == Py_False;
  Channels c = {};
  Strides strides;
  double momentum = 0;
  if (running != (running_var != Py_None) || (running && running_mean == running_var) ||
      (given ? !running : args[8] != Py_True) || !read_channel_norm<Tensors>(args, c, strides) ||
      !read_activation(args[10], c.job.activation))
    return unsure();
  if (!given && c.kind == BATCH && c.x.size == c.channels) return unsure();  // an error
  // It is copied first: see in_memory_format of the torch engine.
  if (out == Py_None && c.kind != LAYER_2D && !in_memory_format(c.x.t, strides)) return unsure();
  const void *mean = nullptr, *var = nullptr;
  int32_t mean_dtype = 0, var_dtype = 0;
  if (running && (!read_channels<Tensors>(running_mean, c.channels, mean, mean_dtype) ||
                  !read_channels<Tensors>(running_var, c.channels, var, var_dtype)))
    return unsure();
  if (running && !given &&
      (!read_number(args[9], momentum) || is_inference(running_mean) || is_inference(running_var)))
    return unsure();
  const bool recording = is_recording();
  if (recording && (wants_gradient(running_mean) || wants_gradient(running_var))) return unsure();
  const bool gradient = recording && (wants_gradient(args[X]) || wants_gradient(args[WEIGHT]) ||
                                      wants_gradient(args[BIAS]) || wants_gradient(out));
  if (gradient && out != Py_None) return unsure();  // an error
  if (running && may_meet<Tensors>(out, {running_mean, running_var})) return unsure();
  if (given) {
    c.task.running_mean = mean;
    c.task.running_var = var;
    c.task.running_mean_dtype = mean_dtype;
    c.task.running_var_dtype = var_dtype;
  }

  Output<Tensors> output;
  if (!output.make(args[X], c.x, out, {args[X], args[WEIGHT], args[BIAS]}, c.job.y, &strides))
    return failed_or_unsure();
  c.problem.has_y = true;
  c.problem.has_running = given;
  set_strides(c, strides, &axisnorm::Axis::y);
  const auto plan = axisnorm::plan_for(c.problem);
  if (plan->refused) return unsure();
  const Nest &nest = plan->nest;
  c.job.divisor = (double)nest.group_size;
  c.job.alone = !gradient;
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
  PyObject *const y = output.result(
      fine && run([&] { axisnorm::forward(*plan, c.job, c.task), output.settle(); }, c.x.size));
  if (y && gradient) {
    result = noted(args, y, PyTuple_Pack(7, stats, args[BIAS], args[KIND], args[GROUPS],
                                         args[CHANNEL_EPS], given ? Py_True : Py_False, args[10]));
  } else {
    result = y;
    Py_XINCREF(y);
  }
  // Last, and after the node has seen the versions of its tensors.
  if (result && !given && running) {
    const int64_t averaged = nest.groups / c.channels;
    axisnorm::move({(void *)mean, (void *)var, mean_dtype, var_dtype, c.channels, averaged, 1,
                    c.job.stats, c.job.var, nullptr, (double)nest.group_size, 0, 1, momentum,
                    c.x.dtype});
    if (!increment_versions({running_mean, running_var})) Py_CLEAR(result);
  }
  for (PyObject *used : {y, stats, moments}) Py_XDECREF(used);
  return result;
}

// What a node keeps, as new references.
class Kept {
 public:
  explicit Kept(PyObject *ctx)
      : saved(PyObject_GetAttr(ctx, names.saved_tensors)),
        needed(saved ? PyObject_GetAttr(ctx, names.needs_input_grad) : nullptr),
        others(needed ? PyObject_GetAttr(ctx, names.kept) : nullptr) {}
  Kept(const Kept &) = delete;
  ~Kept() {
    Py_XDECREF(saved);
    Py_XDECREF(needed);
    Py_XDECREF(others);
  }
  bool failed() const { return !others; }  // an exception is set
  PyObject *tensors() const { return saved; }
  bool of_channels() const { return !PyTuple_Check(constant(0)); }
  bool needs(int input) const { return PyTuple_GetItem(needed, input) == Py_True; }
  PyObject *constant(int i) const { return PyTuple_GetItem(others, CONSTANTS + i); }
  // x, weight, bias and the constants; returns the statistics. All are borrowed.
  PyObject *inputs(PyObject **args, int count) const {
    args[X] = PyTuple_GetItem(saved, 0);
    args[WEIGHT] = PyTuple_GetItem(saved, 1);
    args[BIAS] = PyTuple_Size(saved) > BIAS ? PyTuple_GetItem(saved, BIAS)
                                            : PyTuple_GetItem(others, KEPT_BIAS);
    for (int i = 3; i < count; i++) args[i] = constant(i - 3);
    return PyTuple_GetItem(others, STATS);
  }

 private:
  PyObject *saved, *needed, *others;
};

// The gradients (dx, dweight, dbias, None), or None.
PyObject *channel_backward(const Kept &node, PyObject *gradient) {
  PyObject *args[CHANNEL_CONSTANTS], *const stats = node.inputs(args, CHANNEL_CONSTANTS);
  const bool given = args[GIVEN] == Py_True;
  Channels c = {};
  Strides strides, grad_strides;
  Reading grad;
  if (!read_channel_norm<Tensors>(args, c, strides) || !read(gradient, grad, &grad_strides) ||
      grad.dtype != c.x.dtype || !same_shape(grad, c.x.t.shape, c.x.t.ndim) ||
      !PyBytes_Check(stats) || !read_activation(args[CHANNEL_ACTIVATION], c.job.activation))
    return unsure();
  c.job.grad = data(grad);
  c.problem.has_grad = true;
  set_strides(c, grad_strides, &axisnorm::Axis::grad);
  c.job.stats = PyBytes_AsString(stats);
  c.problem.has_running = given;
  if (given) {
    c.task.running_mean = c.job.stats;
    c.task.running_var = (const double *)c.job.stats + c.channels;
    c.task.running_mean_dtype = c.task.running_var_dtype = F64;
  }
  // False: there is no plan, or the statistics are others.
  std::shared_ptr<const axisnorm::Plan> plan;
  const auto is_planned = [&](Channels &norm) {
    plan = axisnorm::plan_for(norm.problem);
    norm.job.divisor = (double)plan->nest.group_size;
    const int64_t size = given ? 2 * c.channels * 8
                               : 3 * plan->nest.groups * (c.x.dtype == F64 ? 8 : 4);
    return !plan->refused && PyBytes_Size(stats) == size;
  };
  PyObject *behind = nullptr;  // the gradient of what is activated
  if (c.job.activation) {
    Channels norm = c;
    behind = like(args[X], c.x.size, c.x.dtype, norm.job.y, &grad_strides);
    if (!behind) return nullptr;
    norm.problem.has_y = true;
    set_strides(norm, grad_strides, &axisnorm::Axis::y);
    const bool known = is_planned(norm);
    if (!known || !run([&] { axisnorm::forward(*plan, norm.job, norm.task); }, c.x.size)) {
      Py_DECREF(behind);
      return known ? nullptr : unsure();
    }
    c.job.grad = norm.job.y;
    set_strides(c, grad_strides, &axisnorm::Axis::grad);
  }
  PyObject *results[3] = {};
  void **targets[3] = {&c.job.dx, &c.job.dweight, &c.job.dbias};
  bool fine = true;
  for (int i = 0; i < 3 && fine; i++) {
    if (!node.needs(i) || args[i] == Py_None) continue;
    const int dtype = i == 0 ? c.x.dtype : i == 1 ? c.job.weight_dtype : c.job.bias_dtype;
    results[i] = like(args[i], i ? c.channels : c.x.size, dtype, *targets[i], i ? nullptr : &strides);
    fine = results[i] != nullptr;
  }
  PyObject *result = nullptr;
  if (fine) {
    if ((c.problem.has_dx = c.job.dx)) set_strides(c, strides, &axisnorm::Axis::dx);
    if (!is_planned(c)) {
      result = unsure();
    } else if (run([&] { axisnorm::backward(*plan, c.job, c.task); }, c.x.size)) {
      PyObject *all[3];
      for (int i = 0; i < 3; i++) all[i] = results[i] ? results[i] : Py_None;
      result = PyTuple_Pack(4, all[0], all[1], all[2], Py_None);
    }
  }
  for (PyObject *r : results) Py_XDECREF(r);
  Py_XDECREF(behind);
  return result;
}

// ---- what Python calls

// connect_nodes({name: object}) -> None: what the nodes of plain norms need, by name
PyObject *connect_nodes(PyObject *, PyObject *given) {
  if (!take(given, {{"apply_node", &apply_node}, {"long_backward", &long_backward}}))
    return nullptr;
#define INTERN(name) \
  if (!(names.name = PyUnicode_InternFromString(#name))) return nullptr
  INTERN(to_save);
  INTERN(saved_tensors);
  INTERN(needs_input_grad);
  INTERN(kept);
#undef INTERN
  Py_RETURN_NONE;
}

// The output of the common arguments, in `out` unless that is None; with `stats`, also what backward
// needs.
template <class Source>
PyObject *compute(PyObject *const *args, int32_t activation, PyObject *out, PyObject **stats) {
  Job job = {};
  Reading x;
  if (!read_common<Source>(args, job, x)) return unsure();
  if (!job.weight && !job.bias && job.n >= axisnorm::LONG) return unsure();  // no rows
  job.activation = activation;
  Output<Source> output;
  if (!output.make(args[X], x, out, {args[X], args[WEIGHT], args[BIAS]}, job.y))
    return failed_or_unsure();
  if (stats && !(*stats = new_stats(job))) return nullptr;
  return output.result(run([&] { axisnorm::forward(job), output.settle(); }, x.size));
}

// The sizes of trailing axes as a node keeps them: a list of the caller's could change.
PyObject *kept_shape(PyObject *shape) {
  return PyLong_Check(shape) ? PyTuple_Pack(1, shape) : PySequence_Tuple(shape);
}

// The whole short way: guard, forward, and where a gradient is needed the autograd node.
PyObject *short_way(PyObject *const *args, PyObject *name, PyObject *out) {
  int32_t activation;
  if (numpy_array::is_array(args[X]))
    return read_activation(name, activation) ? compute<Arrays>(args, activation, out, nullptr)
                                             : unsure();
  if (!api || !is_exact(args[X]) || !unwatched() || !read_activation(name, activation))
    return unsure();
  // What is no tensor is refused when it is read.
  const bool gradient =
      is_recording() &&
      (wants_gradient(args[X]) || wants_gradient(args[WEIGHT]) || wants_gradient(args[BIAS]) ||
       wants_gradient(out));
  if (!gradient) return compute<Tensors>(args, activation, out, nullptr);
  if (out != Py_None) return unsure();  // an error
  PyObject *stats = nullptr, *y = compute<Tensors>(args, activation, out, &stats);
  if (!stats) return y;  // unsure, or an error
  PyObject *shape = y ? kept_shape(args[SHAPE]) : nullptr;
  PyObject *result = shape ? noted(args, y, PyTuple_Pack(8, stats, args[BIAS], shape, args[EPS],
                                                         args[OFFSET], args[CENTER], args[ROUNDED],
                                                         name))
                           : nullptr;
  for (PyObject *used : {y, stats, shape}) Py_XDECREF(used);
  return result;
}

// node_forward(ctx, x, weight, bias, (y, kept)) -> y: keeps what backward needs
PyObject *node_forward(PyObject *, PyObject *const *args, Py_ssize_t count) {
  if (count != 5 || !PyTuple_Check(args[4]) || PyTuple_Size(args[4]) != 2) {
    PyErr_SetString(PyExc_TypeError, "node_forward takes 5 arguments");
    return nullptr;
  }
  PyObject *ctx = args[0], *y = PyTuple_GetItem(args[4], 0), *kept = PyTuple_GetItem(args[4], 1);
  const bool activated = PyTuple_GetItem(kept, PyTuple_Size(kept) - 1) != Py_None;
  PyObject *saved = PyTuple_Pack(activated ? 3 : 2, args[1], args[2], args[3]);
  const bool fine = saved && !PyObject_SetAttr(ctx, names.to_save, saved) &&
                    !PyObject_SetAttr(ctx, names.kept, kept);
  Py_XDECREF(saved);
  if (!fine) return nullptr;
  Py_INCREF(y);
  return y;
}

// What was given in this place, or None.
PyObject *optional(PyObject *const *args, Py_ssize_t count, int place) {
  return count > place ? args[place] : Py_None;
}

// short_layer_norm(x, normalized_shape, weight, bias, eps, activation, out=None) -> y
PyObject *short_layer_norm(PyObject *, PyObject *const *args, Py_ssize_t count) {
  if (count < 6 || count > 7) return unsure();
  static PyObject *const zero = PyFloat_FromDouble(0.0);
  PyObject *common[COMMON] = {args[0], args[2], args[3], args[1], args[4], zero, Py_True, Py_False};
  return short_way(common, args[5], optional(args, count, 6));
}

// False: neither of the two texts.
bool read_rounding(PyObject *text, bool &once) {
  if (!PyUnicode_Check(text)) return false;
  once = PyUnicode_CompareWithASCIIString(text, "once") == 0;
  return once || PyUnicode_CompareWithASCIIString(text, "before_affine") == 0;
}

// short_rms_norm(x, normalized_shape, weight, eps, weight_offset, rounding, activation, out=None) -> y
PyObject *short_rms_norm(PyObject *, PyObject *const *args, Py_ssize_t count) {
  bool once;
  if (count < 7 || count > 8 || !read_rounding(args[5], once)) return unsure();
  PyObject *common[COMMON] = {args[0], args[2], Py_None,  args[1],
                              args[3], args[4], Py_False, once ? Py_False : Py_True};
  return short_way(common, args[6], optional(args, count, 7));
}

// The gradient of what is activated, which becomes the job's. Null: an exception is set.
PyObject *gradient_behind(PyObject *x_object, const Reading &x, Job &job) {
  Job norm = job;
  PyObject *behind = like(x_object, x.size, x.dtype, norm.y);
  if (behind && !run_rows(axisnorm::forward, norm)) Py_CLEAR(behind);
  job.grad = norm.y;
  return behind;
}

// (dx, dweight, dbias, None), or None.
PyObject *short_backward(const Kept &node, PyObject *const *grads) {
  if (!is_exact(grads[0]) || !is_positive(grads[0])) return unsure();
  if (node.of_channels()) return channel_backward(node, grads[0]);
  PyObject *common[ACTIVATION + 1], *const stats = node.inputs(common, ACTIVATION + 1);
  Job job = {};
  Reading x, grad;
  if (!read_common<Tensors>(common, job, x) ||
      !read_activation(common[ACTIVATION], job.activation) || !read(grads[0], grad) ||
      !same_kind(grad, x) || !PyBytes_Check(stats) ||
      PyBytes_Size(stats) != 3 * job.rows * (x.dtype == F64 ? 8 : 4))
    return unsure();
  job.grad = data(grad);
  job.stats = PyBytes_AsString(stats);
  PyObject *behind = nullptr;
  if (job.activation && !(behind = gradient_behind(common[X], x, job))) return nullptr;
  PyObject *results[3] = {};
  void **targets[3] = {&job.dx, &job.dweight, &job.dbias};
  bool fine = true;
  for (int i = 0; i < 3 && fine; i++) {
    if (node.needs(i) && common[i] != Py_None)
      fine = (results[i] = like(common[i], i ? job.n : x.size, x.dtype, *targets[i])) != nullptr;
  }
  PyObject *result = nullptr;
  if (fine && run_rows(axisnorm::backward, job)) {
    PyObject *all[3];
    for (int i = 0; i < 3; i++) all[i] = results[i] ? results[i] : Py_None;
    result = PyTuple_Pack(4, all[0], all[1], all[2], Py_None);
  }
  for (PyObject *r : results) Py_XDECREF(r);
  Py_XDECREF(behind);
  return result;
}

// A contiguous copy of a gradient that is none, such as the expanded one of sum(). Null if it needs
// no copy, and also with an error set.
PyObject *gathered(PyObject *grad) {
  if (!is_exact(grad)) return nullptr;
  PyObject *copy = PyObject_CallMethod(grad, "contiguous", nullptr);
  if (copy == grad) Py_CLEAR(copy);
  return copy;
}

// The gradients of a node: by the short way, else with contiguous gradients, else by the long one.
// What the node keeps is read once: checkpoints let nobody read it twice.
PyObject *gradients(PyObject *(*short_one)(const Kept &, PyObject *const *), PyObject *long_one,
                    PyObject *ctx, PyObject *const *grads, Py_ssize_t count) {
  const Kept node(ctx);
  if (node.failed()) return nullptr;
  if (api && unwatched() && !is_recording()) {
    PyObject *result = short_one(node, grads);
    if (result != Py_None) return result;
    PyObject *copies[2] = {}, *all[2] = {};
    bool any = false;
    for (Py_ssize_t i = 0; i < count && !PyErr_Occurred(); i++) {
      copies[i] = gathered(grads[i]);
      all[i] = copies[i] ? copies[i] : grads[i];
      any |= copies[i] != nullptr;
    }
    if (PyErr_Occurred()) Py_CLEAR(result);
    else if (any) Py_DECREF(result), result = short_one(node, all);
    for (PyObject *copy : copies) Py_XDECREF(copy);
    if (result != Py_None) return result;
    Py_DECREF(result);
  }
  return PyObject_CallFunctionObjArgs(long_one, ctx, node.tensors(), grads[0],
                                      count > 1 ? grads[1] : nullptr, nullptr);
}

// The method `apply` of the node's class, which autograd calls.
PyObject *node_apply(PyObject *ctx, PyObject *const *args, Py_ssize_t count) {
  if (count == 1) return gradients(short_backward, long_backward, ctx, args, 1);
  PyErr_SetString(PyExc_TypeError, "a norm has one gradient");
  return nullptr;
}

// node_backward(ctx, grad) -> (dx, dweight, dbias, None)
PyObject *node_backward(PyObject *, PyObject *const *args, Py_ssize_t count) {
  return node_apply(args[0], args + 1, count - 1);
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
PyObject *long_add_backward;  // (ctx, saved, grad, grad_h)
PyObject *draw;               // torch.Tensor.random_
PyObject *kept_seed;          // an int64 tensor that seeds are drawn into
bool kept_seed_in_use;

struct {
  PyObject *materialize_grads, *non_differentiable;
} add_names;

// connect_add({name: object}) -> None: what the functions below need, by name
PyObject *connect_add(PyObject *, PyObject *given) {
  if (!take(given, {{"apply_node", &apply_add_node},
                    {"long_backward", &long_add_backward},
                    {"draw", &draw},
                    {"seed", &kept_seed}}))
    return nullptr;
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

enum { RESIDUAL, DROPOUT_P, TRAINING, PRENORM, NAME, ADDED };  // the last one: of an activation

// What is added and normalized, as read.
struct Sum {
  Job job = {};
  Reading x;
  bool prenorm;
};

// False: something else.
template <class Source>
bool read_sum(PyObject *const *args, PyObject *const *added, Sum &sum) {
  Reading residual;
  double p;
  const int training = PyObject_IsTrue(added[TRAINING]);
  const int prenorm = training < 0 ? -1 : PyObject_IsTrue(added[PRENORM]);
  if (prenorm < 0) return PyErr_Clear(), false;
  Job &job = sum.job;
  if (!read_common<Source>(args, job, sum.x) || !Source::read(added[RESIDUAL], residual) ||
      !same_kind(residual, sum.x) || !Source::is_positive(added[RESIDUAL]) ||
      !read_number(added[DROPOUT_P], p) || !(p >= 0 && p < 1) ||
      !read_activation(added[NAME], job.activation))
    return false;
  job.residual = data(residual);
  job.residual_stride = job.h_stride = job.n;
  if (training) job.dropout_p = p;
  sum.prenorm = prenorm;
  return true;
}

// As short_add_way, of arrays, from which nothing is dropped.
PyObject *sum_of_arrays(PyObject *const *args, PyObject *const *added) {
  Sum sum;
  if (!read_sum<Arrays>(args, added, sum) || sum.job.dropout_p > 0) return unsure();
  const Reading &x = sum.x;
  PyObject *y = Arrays::like(args[X], x.size, x.dtype, sum.job.y), *h = nullptr, *result = nullptr;
  bool fine = y != nullptr;
  if (fine && sum.prenorm)
    fine = (h = Arrays::like(args[X], x.size, x.dtype, sum.job.h)) != nullptr;
  if (fine && run_rows(axisnorm::forward, sum.job)) {
    result = sum.prenorm ? PyTuple_Pack(2, y, h) : y;
    if (!sum.prenorm) Py_INCREF(y);
  }
  Py_XDECREF(y);
  Py_XDECREF(h);
  return result;
}

// As short_way, for the norm of a sum: y, or with prenorm (y, h).
PyObject *short_add_way(PyObject *const *args, PyObject *const *added) {
  if (numpy_array::is_array(args[X])) return sum_of_arrays(args, added);
  if (!api || !apply_add_node || !is_exact(args[X]) || !unwatched()) return unsure();
  Sum sum;
  if (!read_sum<Tensors>(args, added, sum)) return unsure();
  Job &job = sum.job;
  const Reading &x = sum.x;
  const bool prenorm = sum.prenorm;
  const bool recording = is_recording();
  const bool gradient_of_h =
      recording && (wants_gradient(args[X]) || wants_gradient(added[RESIDUAL]));
  const bool gradient = gradient_of_h || (recording && (wants_gradient(args[WEIGHT]) ||
                                                        wants_gradient(args[BIAS])));
  PyObject *y = like(args[X], x.size, x.dtype, job.y), *h = nullptr, *stats = nullptr;
  bool fine = y != nullptr;
  if (fine && (gradient || prenorm)) fine = (h = like(args[X], x.size, x.dtype, job.h)) != nullptr;
  if (fine && gradient) fine = (stats = new_stats(job)) != nullptr;
  if (fine && job.dropout_p > 0) fine = draw_seed(job.seed);
  fine = fine && run_rows(axisnorm::forward, job);
  PyObject *result = nullptr;
  if (fine && gradient) {
    PyObject *shape = kept_shape(args[SHAPE]);
    PyObject *kept = shape ? Py_BuildValue("(OOOOOOOOdL)", stats, args[BIAS], shape, args[EPS],
                                           args[OFFSET], args[CENTER], args[ROUNDED], added[NAME],
                                           job.dropout_p, (long long)job.seed)
                           : nullptr;
    PyObject *found =
        kept ? PyTuple_Pack(4, y, h, kept, gradient_of_h ? Py_True : Py_False) : nullptr;
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
    for (PyObject *used : {shape, kept, found}) Py_XDECREF(used);
  } else if (fine && prenorm) {
    result = PyTuple_Pack(2, y, h);
  } else if (fine) {
    result = y;
    Py_INCREF(y);
  }
  for (PyObject *used : {y, h, stats}) Py_XDECREF(used);
  return result;
}

// short_add_layer_norm(x, residual, normalized_shape, weight, bias, eps, dropout_p, training, prenorm,
// activation) -> y or (y, h)
PyObject *short_add_layer_norm(PyObject *, PyObject *const *args, Py_ssize_t count) {
  if (count != 10) return unsure();
  static PyObject *const zero = PyFloat_FromDouble(0.0);
  PyObject *common[COMMON] = {args[0], args[3], args[4], args[2], args[5], zero, Py_True, Py_False};
  PyObject *added[ADDED] = {args[1], args[6], args[7], args[8], args[9]};
  return short_add_way(common, added);
}

// short_add_rms_norm(x, residual, normalized_shape, weight, eps, weight_offset, rounding, dropout_p,
// training, prenorm, activation) -> y or (y, h)
PyObject *short_add_rms_norm(PyObject *, PyObject *const *args, Py_ssize_t count) {
  bool once;
  if (count != 11 || !read_rounding(args[6], once)) return unsure();
  PyObject *common[COMMON] = {args[0], args[3], Py_None,  args[2],
                              args[4], args[5], Py_False, once ? Py_False : Py_True};
  PyObject *added[ADDED] = {args[1], args[7], args[8], args[9], args[10]};
  return short_add_way(common, added);
}

// add_node_forward(ctx, x, residual, weight, bias, (y, h, kept, whether h has a gradient)) -> (y, h)
PyObject *add_node_forward(PyObject *, PyObject *const *args, Py_ssize_t count) {
  if (count != 6 || !PyTuple_Check(args[5]) || PyTuple_Size(args[5]) != 4) {
    PyErr_SetString(PyExc_TypeError, "add_node_forward takes 6 arguments");
    return nullptr;
  }
  PyObject *ctx = args[0], *found = args[5], *h = PyTuple_GetItem(found, 1);
  PyObject *name = PyTuple_GetItem(PyTuple_GetItem(found, 2), CONSTANTS + ACTIVATION - SHAPE);
  PyObject *saved = PyTuple_Pack(name != Py_None ? 3 : 2, h, args[3], args[4]);
  // An output that nobody used has no gradient rather than one of zeros.
  bool fine = saved && !PyObject_SetAttr(ctx, names.to_save, saved) &&
              !PyObject_SetAttr(ctx, names.kept, PyTuple_GetItem(found, 2)) &&
              !PyObject_SetAttr(ctx, add_names.materialize_grads, Py_False);
  Py_XDECREF(saved);
  if (fine && PyTuple_GetItem(found, 3) != Py_True) {
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

// (dx, dresidual, dweight, dbias, None), or None.
PyObject *short_add_backward(const Kept &node, PyObject *const *grads) {
  PyObject *common[ACTIVATION + 1], *const stats = node.inputs(common, ACTIVATION + 1);
  Job job = {};
  Reading h, grad, grad_h;
  if (!read_common<Tensors>(common, job, h) || !read_gradient(grads[0], h, grad) ||
      !read_activation(common[ACTIVATION], job.activation) ||
      (grads[1] != Py_None && !read_gradient(grads[1], h, grad_h)) || !PyBytes_Check(stats) ||
      PyBytes_Size(stats) != 3 * job.rows * (h.dtype == F64 ? 8 : 4))
    return unsure();
  job.grad = data(grad);
  if (grads[1] != Py_None) job.grad_h = data(grad_h);
  job.stats = PyBytes_AsString(stats);
  PyObject *behind = nullptr;
  if (job.activation && !(behind = gradient_behind(common[X], h, job))) return nullptr;
  job.grad_h_stride = job.dropped_dx_stride = job.n;
  job.dropout_p = PyFloat_AsDouble(node.constant(6));
  job.seed = (uint64_t)PyLong_AsLongLong(node.constant(7));
  if (PyErr_Occurred()) return Py_XDECREF(behind), nullptr;

  const bool dropped = job.dropout_p > 0;
  PyObject *dx = nullptr, *dh = nullptr, *dweight = nullptr, *dbias = nullptr;
  bool fine = true;
  const auto make = [&](bool wanted, PyObject *model, int64_t size, PyObject *&result,
                        void *&place) {
    if (fine && wanted) fine = (result = like(model, size, h.dtype, place)) != nullptr;
  };
  make(node.needs(1) || (node.needs(0) && !dropped), common[X], h.size, dh, job.dx);
  make(node.needs(0) && dropped, common[X], h.size, dx, job.dropped_dx);
  make(node.needs(2) && common[WEIGHT] != Py_None, common[WEIGHT], job.n, dweight, job.dweight);
  make(node.needs(3) && common[BIAS] != Py_None, common[BIAS], job.n, dbias, job.dbias);
  PyObject *result = nullptr;
  if (fine && run_rows(axisnorm::backward, job)) {
    const auto or_none = [](PyObject *object) { return object ? object : Py_None; };
    result = PyTuple_Pack(5, node.needs(0) ? or_none(dropped ? dx : dh) : Py_None,
                          node.needs(1) ? or_none(dh) : Py_None, or_none(dweight), or_none(dbias),
                          Py_None);
  }
  for (PyObject *made : {dx, dh, dweight, dbias, behind}) Py_XDECREF(made);
  return result;
}

PyObject *add_node_apply(PyObject *ctx, PyObject *const *args, Py_ssize_t count) {
  if (count == 2) return gradients(short_add_backward, long_add_backward, ctx, args, 2);
  PyErr_SetString(PyExc_TypeError, "the norm of a sum has two gradients");
  return nullptr;
}

// add_node_backward(ctx, grad, grad_h) -> (dx, dresidual, dweight, dbias, None)
PyObject *add_node_backward(PyObject *, PyObject *const *args, Py_ssize_t count) {
  return add_node_apply(args[0], args + 1, count - 1);
}

PyMethodDef add_apply_definition = {"apply", (PyCFunction)(void *)add_node_apply, METH_FASTCALL,
                                    nullptr};

PyObject *quicken_add(PyObject *, PyObject *type) { return set_apply(type, &add_apply_definition); }

PyMethodDef methods[] = {
    {"connect", (PyCFunction)(void *)connect, METH_FASTCALL, nullptr},
    {"connect_nodes", (PyCFunction)connect_nodes, METH_O, nullptr},
    {"short_layer_norm", (PyCFunction)(void *)short_layer_norm, METH_FASTCALL, nullptr},
    {"short_rms_norm", (PyCFunction)(void *)short_rms_norm, METH_FASTCALL, nullptr},
    {"short_channel_norm", (PyCFunction)(void *)short_channel_norm, METH_FASTCALL, nullptr},
    {"node_forward", (PyCFunction)(void *)node_forward, METH_FASTCALL, nullptr},
    {"quicken", (PyCFunction)quicken, METH_O, nullptr},
    {"node_backward", (PyCFunction)(void *)node_backward, METH_FASTCALL, nullptr},
    {"connect_add", (PyCFunction)connect_add, METH_O, nullptr},
    {"short_add_layer_norm", (PyCFunction)(void *)short_add_layer_norm, METH_FASTCALL, nullptr},
    {"short_add_rms_norm", (PyCFunction)(void *)short_add_rms_norm, METH_FASTCALL, nullptr},
    {"add_node_forward", (PyCFunction)(void *)add_node_forward, METH_FASTCALL, nullptr},
    {"quicken_add", (PyCFunction)quicken_add, METH_O, nullptr},
    {"add_node_backward", (PyCFunction)(void *)add_node_backward, METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

void add_to(PyObject *module) {
  if (PyModule_AddFunctions(module, methods)) throw nanobind::python_error();
}

}  // namespace torch_door
