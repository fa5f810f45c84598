// The operators of this library for plain torch tensors: what compiled programs call. Each function
// takes the operator's arguments and returns its results; what is unusual it hands to the Python
// function of the same operator, which checks everything and raises where something is wrong. Those
// called _into write their results into tensors that the caller has allocated. And the short way of
// normalize, which knows a scheme by its text as the operators do.
#include "torch_ops.h"

#include <stddef.h>
#include <string.h>

#include <memory>

#include "arrays.h"
#include "axes.h"

namespace torch_door {
namespace {

// Python functions, by name; see _route.py and _torch_ops.py.
struct {
  PyObject *prepared;  // {(scheme, shape, affine): the constants below, or None}
  PyObject *prepare;   // (scheme, shape, affine) -> the same, which it puts there
  PyObject *new_stats;  // (x, groups) -> a tensor (3, groups) of the compute type
  PyObject *nothing;    // x -> a tensor without elements
  PyObject *forward, *backward, *behind, *train;  // the operators
  // Those that write into given tensors.
  PyObject *forward_into, *backward_into, *behind_into, *train_into, *scale_into;
  PyObject *add_forward_into, *add_backward_into;
} python;

// What Python has worked out for a scheme and a shape.
enum {
  AXES, GROUPS, CENTER, ROUNDED, EPS, CORRECTION, OFFSET, USES_RUNNING, AFFINE_SHAPE, RUNNING_SHAPE,
  CHANNELS, MOMENTUM, RUNNING_CORRECTION
};

bool has_shape(const Reading &r, PyObject *shape) {
  if (r.t.ndim != PyTuple_Size(shape)) return false;
  for (int i = 0; i < r.t.ndim; i++)
    if (r.t.shape[i] != PyLong_AsLongLong(PyTuple_GetItem(shape, i))) return false;
  return true;
}

// A contiguous tensor of this shape, or None. False: something else.
template <class Source>
bool read_parameter(PyObject *object, PyObject *shape, const void *&place, int32_t &dtype) {
  if (object == Py_None) return true;
  Reading r;
  if (!Source::read(object, r) || !has_shape(r, shape)) return false;
  place = data(r);
  dtype = r.dtype;
  return true;
}

// The constants that were looked up last: a text is the same object in every call of a compiled
// program, and the lookup takes an eighth of a small norm.
class LastConstants {
 public:
  PyObject *find(PyObject *text, const Reading &x, bool affine) const {
    const Entry &e = entries_[place(text, x)];
    return e.text == text && e.affine == affine && same_shape(x, e.shape, e.ndim) ? e.constants
                                                                                  : nullptr;
  }
  void keep(PyObject *text, const Reading &x, bool affine, PyObject *constants) {
    Entry &e = entries_[place(text, x)];
    PyObject *const old[] = {e.text, e.constants};
    Py_INCREF(text);
    Py_INCREF(constants);
    e = {text, constants, affine, x.t.ndim, {}};
    for (int i = 0; i < x.t.ndim; i++) e.shape[i] = x.t.shape[i];
    for (PyObject *object : old) Py_XDECREF(object);
  }

 private:
  struct Entry {
    PyObject *text, *constants;
    bool affine;
    int ndim;
    int64_t shape[Strides::MOST];
  } entries_[64] = {};

  static uint64_t place(PyObject *text, const Reading &x) {
    return ((uint64_t)text / 16 + (uint64_t)x.size) * 0x9e3779b97f4a7c15 >> 58;
  }
} last_constants;

class Call {
 public:
  Reading x;
  axisnorm::Problem problem;
  std::shared_ptr<const axisnorm::Plan> plan;
  Job job = {};
  Task task = {};
  int64_t groups;

  ~Call() { Py_XDECREF(constants); }

  // False: unusual, perhaps with an error.
  template <class Source = Tensors>
  bool read(PyObject *tensor, PyObject *weight, PyObject *bias, PyObject *mask,
            PyObject *running_mean, PyObject *running_var, PyObject *scheme) {
    if (mask != Py_None || !Source::read(tensor, x, &strides)) return false;
    if (!find_constants(scheme, weight != Py_None || bias != Py_None)) return false;
    const bool running = running_mean != Py_None;
    if (running != (running_var != Py_None)) return false;
    job.dtype = job.weight_dtype = job.bias_dtype = x.dtype;
    job.x = data(x);
    job.center = constant(CENTER) == Py_True;
    job.rounded = constant(ROUNDED) == Py_True;
    groups = PyLong_AsLongLong(constant(GROUPS));
    if (!read_parameter<Source>(weight, constant(AFFINE_SHAPE), job.weight, job.weight_dtype) ||
        !read_parameter<Source>(bias, constant(AFFINE_SHAPE), job.bias, job.bias_dtype) ||
        !read_parameter<Source>(running_mean, constant(RUNNING_SHAPE), task.running_mean,
                                task.running_mean_dtype) ||
        !read_parameter<Source>(running_var, constant(RUNNING_SHAPE), task.running_var,
                                task.running_var_dtype) ||
        !read_number(constant(CORRECTION), task.correction) ||
        !read_number(constant(OFFSET), job.weight_offset))
      return false;
    if (constant(EPS) == Py_None) job.eps = x.dtype == F64 ? 0x1p-52 : 0x1p-23;
    else if (!read_number(constant(EPS), job.eps)) return false;
    problem = axes().problem();
    set_strides(strides, &axisnorm::Axis::x);
    return true;
  }

  PyObject *constant(int i) const { return PyTuple_GetItem(constants, i); }

  void set_strides(const Strides &given, int64_t axisnorm::Axis::*member) {
    axes().set_strides(problem, given.of, member);
  }

  // False: there is no plan for these strides.
  bool make_plan() {
    plan = axisnorm::plan_for(problem);
    job.divisor = axisnorm::divisor((double)plan->nest.group_size, task.correction);
    return !plan->refused;
  }

  // Statistics that are there. False: something else.
  bool read_stats(PyObject *tensor) {
    Reading r;
    if (!torch_door::read(tensor, r) || r.size != 3 * groups ||
        r.dtype != (x.dtype == F64 ? F64 : F32))
      return false;
    job.stats = (void *)data(r);
    return true;
  }

  // Where others normalize none are measured, and an operator gives no unwritten memory.
  void clear_stats() {
    if (problem.has_running && job.stats)
      memset(job.stats, 0, (size_t)(3 * groups) * (x.dtype == F64 ? 8 : 4));
  }

  // For the norm of a sum, whose tensors are contiguous: the rows, and what dropout drops. False:
  // something else.
  bool set_rows(PyObject *seed, PyObject *dropout_p) {
    if (constant(USES_RUNNING) == Py_True || task.correction) return false;
    job.rows = groups;
    job.n = x.size / groups;
    job.divisor = (double)job.n;
    job.x_stride = job.y_stride = job.grad_stride = job.dx_stride = job.residual_stride =
        job.h_stride = job.grad_h_stride = job.dropped_dx_stride = job.n;
    if (seed == Py_None) return true;
    dltensor t;
    if (!is_exact(seed) || api->describe(seed, &t)) return PyErr_Clear(), false;
    if (t.ndim || t.device.device_type != 1 || t.dtype.code || t.dtype.bits != 64) return false;
    job.seed = *(const uint64_t *)((const char *)t.data + t.byte_offset);
    return read_number(dropout_p, job.dropout_p);
  }

  // A contiguous tensor like x, or None. False: something else.
  bool read_like(PyObject *tensor, void *&place) const {
    if (tensor == Py_None) return true;
    Reading r;
    if (!torch_door::read(tensor, r) || !same_kind(r, x)) return false;
    place = (void *)data(r);
    return true;
  }

  // The statistics that backward needs, a new tensor.
  PyObject *new_stats(PyObject *tensor) {
    PyObject *count = PyLong_FromLongLong(groups);
    PyObject *stats =
        count ? PyObject_CallFunctionObjArgs(python.new_stats, tensor, count, nullptr) : nullptr;
    Py_XDECREF(count);
    if (stats && !read_stats(stats)) {
      PyErr_SetString(PyExc_SystemError, "new statistics cannot be read");
      Py_CLEAR(stats);
    }
    if (stats) clear_stats();
    return stats;
  }

 private:
  PyObject *constants = nullptr;
  Strides strides;

  axisnorm::PackedAxes axes() const {
    PyObject *bytes = constant(AXES);
    return {PyBytes_AsString(bytes), (size_t)PyBytes_Size(bytes)};
  }

  bool find_constants(PyObject *scheme, bool affine) {
    if ((constants = last_constants.find(scheme, x, affine))) {
      Py_INCREF(constants);
      return true;
    }
    PyObject *shape = tuple_of(x.t.shape, x.t.ndim);
    PyObject *key = shape ? PyTuple_Pack(3, scheme, shape, affine ? Py_True : Py_False) : nullptr;
    if (key && (constants = PyDict_GetItemWithError(python.prepared, key))) Py_INCREF(constants);
    else if (key && !PyErr_Occurred()) constants = PyObject_CallObject(python.prepare, key);
    Py_XDECREF(shape);
    Py_XDECREF(key);
    if (!constants || constants == Py_None) return false;
    last_constants.keep(scheme, x, affine, constants);
    return true;
  }
};

// Calls the Python function of an operator, unless an error is set.
PyObject *by_python(PyObject *function, PyObject *const *args, Py_ssize_t count) {
  if (PyErr_Occurred()) return nullptr;
  PyObject *all = PyTuple_New(count);
  for (Py_ssize_t i = 0; all && i < count; i++) {
    Py_INCREF(args[i]);
    if (PyTuple_SetItem(all, i, args[i])) Py_CLEAR(all);
  }
  PyObject *result = all ? PyObject_CallObject(function, all) : nullptr;
  Py_XDECREF(all);
  return result;
}

// y, and with it the plan. Null: an error, or none where there is no plan.
PyObject *new_output(Call &call, PyObject *x) {
  Strides strides;
  PyObject *y = like(x, call.x.size, call.x.dtype, call.job.y, &strides);
  if (!y) return nullptr;
  call.problem.has_y = true;
  call.set_strides(strides, &axisnorm::Axis::y);
  if (!call.make_plan()) Py_CLEAR(y);
  return y;
}

// op_forward(x, weight, bias, mask, scheme, running_mean=None, running_var=None, activation=None)
// -> (y, stats)
PyObject *op_forward(PyObject *, PyObject *const *args, Py_ssize_t count) {
  const auto optional = [&](int i) { return count > i ? args[i] : Py_None; };
  PyObject *const mean = optional(5), *const var = optional(6);
  Call call;
  if (count < 5 || count > 8 || !read_activation(optional(7), call.job.activation) ||
      !call.read(args[0], args[1], args[2], args[3], mean, var, args[4]) ||
      (call.constant(USES_RUNNING) == Py_True) != (mean != Py_None))
    return by_python(python.forward, args, count);
  call.problem.has_running = mean != Py_None;
  PyObject *y = new_output(call, args[0]), *stats = nullptr, *result = nullptr;
  if (!y) return by_python(python.forward, args, count);
  if ((stats = call.new_stats(args[0])) &&
      run([&] { axisnorm::forward(*call.plan, call.job, call.task); }, call.x.size))
    result = PyTuple_Pack(2, y, stats);
  Py_DECREF(y);
  Py_XDECREF(stats);
  return result;
}

// The arguments of short_normalize, nobody watching.
template <class Source> PyObject *normalized(PyObject *const *args, PyObject *out) {
  Call call;
  if (!read_activation(args[6], call.job.activation) ||
      !call.read<Source>(args[0], args[2], args[3], Py_None, args[4], args[5], args[1]) ||
      (call.constant(USES_RUNNING) == Py_True) != (args[4] != Py_None))
    return failed_or_unsure();
  call.problem.has_running = args[4] != Py_None;
  Output<Source> output;
  Strides strides;
  if (may_meet<Source>(out, {args[4], args[5]}) ||
      !output.make(args[0], call.x, out, {args[0], args[2], args[3]}, call.job.y, &strides))
    return failed_or_unsure();
  call.problem.has_y = true;
  call.set_strides(strides, &axisnorm::Axis::y);
  if (!call.make_plan()) return unsure();
  return output.result(run(
      [&] { axisnorm::forward(*call.plan, call.job, call.task), output.settle(); }, call.x.size));
}

// short_normalize(x, scheme, weight, bias, running_mean, running_var, activation, out=None) -> y, where
// no gradient is wanted and nothing moves
PyObject *short_normalize(PyObject *, PyObject *const *args, Py_ssize_t count) {
  if (count < 7 || count > 8 || !PyUnicode_Check(args[1])) return unsure();
  PyObject *const out = count > 7 ? args[7] : Py_None;
  if (numpy_array::is_array(args[0])) return normalized<Arrays>(args, out);
  if (!api || !unwatched()) return unsure();
  const bool recording = is_recording();
  for (int i : {0, 2, 3, 4, 5})
    if ((i == 0 || args[i] != Py_None) && (!is_exact(args[i]) || !is_positive(args[i]) ||
                                           (recording && wants_gradient(args[i]))))
      return unsure();
  if (recording && wants_gradient(out)) return unsure();
  return normalized<Tensors>(args, out);
}

// A tensor like x that is written to, and the axes' strides of it. False: something else.
bool read_target(Call &call, PyObject *tensor, void *&place, int64_t axisnorm::Axis::*member) {
  Reading r;
  Strides strides;
  if (!read(tensor, r, &strides) || !same_kind(r, call.x)) return false;
  place = (void *)data(r);
  call.set_strides(strides, member);
  return true;
}

// Whether this gradient does not keep its elements with the opposite sign. An operator gets no such
// tensor from the dispatcher. Compiled programs pass on what they are given: of their inputs none is
// such a one, for which they are compiled anew, but the gradients of their outputs may be.
bool is_readable(PyObject *grad) { return !is_exact(grad) || is_positive(grad); }

// Where an argument's elements are, as a Job knows them; -1 for what is no tensor of a Job.
#define PLACE(member) (int)offsetof(Job, member)

// One of the operators that write into given tensors and take all that they need from a Job.
struct Operator {
  static constexpr int MOST = 13;  // arguments
  const char *name;
  int count;                           // of arguments
  bool backward;                       // else forward
  bool (*read)(Call &, PyObject *const *);  // false: something is unusual
  PyObject **by_python;
  int places[MOST];
  bool is_gradient(int i) const { return places[i] == PLACE(grad) || places[i] == PLACE(grad_h); }
};

bool compute(const Operator &op, const axisnorm::Plan *plan, const Job &job, const Task &task,
             int64_t elements) {
  const auto of_plan = op.backward
                           ? (void (*)(const axisnorm::Plan &, Job, Task))axisnorm::backward
                           : (void (*)(const axisnorm::Plan &, Job, Task))axisnorm::forward;
  const auto of_rows = op.backward ? (void (*)(const Job &))axisnorm::backward
                                   : (void (*)(const Job &))axisnorm::forward;
  return run([&] { plan ? of_plan(*plan, job, task) : of_rows(job); }, elements);
}

// Whether all its gradients are.
bool are_readable(const Operator &op, PyObject *const *args) {
  for (int i = 0; i < op.count; i++)
    if (op.is_gradient(i) && !is_readable(args[i])) return false;
  return true;
}

bool read_all(const Operator &op, Call &call, PyObject *const *args, Py_ssize_t count) {
  if (count != op.count || !are_readable(op, args) || !op.read(call, args)) return false;
  call.clear_stats();
  return true;
}

PyObject *operate(const Operator &op, PyObject *const *args, Py_ssize_t count) {
  Call call;
  if (!read_all(op, call, args, count)) return by_python(*op.by_python, args, count);
  if (!compute(op, call.plan.get(), call.job, call.task, call.x.size)) return nullptr;
  Py_RETURN_NONE;
}

bool read_forward_into(Call &call, PyObject *const *args) {
  if (!read_activation(args[7], call.job.activation) ||
      !call.read(args[0], args[1], args[2], args[3], args[5], args[6], args[4]) ||
      (call.constant(USES_RUNNING) == Py_True) != (args[5] != Py_None) ||
      !read_target(call, args[8], call.job.y, &axisnorm::Axis::y) ||
      (args[9] != Py_None && !call.read_stats(args[9])))
    return false;
  call.problem.has_running = args[5] != Py_None;
  call.problem.has_y = true;
  return call.make_plan();
}

// op_forward_into(x, weight, bias, mask, scheme, running_mean, running_var, activation, y, stats or
// None) -> None
const Operator forward_into = {
    "op_forward_into", 10, false, read_forward_into, &python.forward_into,
    {PLACE(x), PLACE(weight), PLACE(bias), -1, -1, -1, -1, -1, PLACE(y), PLACE(stats)}};

PyObject *op_forward_into(PyObject *, PyObject *const *args, Py_ssize_t count) {
  return operate(forward_into, args, count);
}

void copy(void *to, const void *from, int64_t size, int dtype) {
  memcpy(to, from, (size_t)(size * axisnorm::element_size(dtype)));
}

// A copy of a contiguous tensor of so many elements, and where its elements are.
PyObject *copy_of(PyObject *tensor, const void *elements, int64_t size, int dtype, void *&place) {
  PyObject *made = like(tensor, size, dtype, place);
  if (made) copy(place, elements, size, dtype);
  return made;
}

// Reads the arguments of op_train: what normalizes in `call`, what moves in `running`, and where the
// running statistics are in `given`.
bool read_train(Call &call, Running &running, Task &given, PyObject *const *args) {
  if (!call.read(args[0], args[1], args[2], args[3], args[5], args[6], args[4]) ||
      args[5] == Py_None || call.constant(USES_RUNNING) == Py_True ||
      !PyTuple_Check(call.constant(CHANNELS)) ||
      !read_number(call.constant(MOMENTUM), running.momentum) ||
      !read_number(call.constant(RUNNING_CORRECTION), running.running_correction))
    return false;
  given = call.task;
  call.task.running_mean = call.task.running_var = nullptr;
  PyObject *const channels = call.constant(CHANNELS);
  running.channels = PyLong_AsLongLong(PyTuple_GetItem(channels, 0));
  running.averaged = PyLong_AsLongLong(PyTuple_GetItem(channels, 1));
  running.inner = PyLong_AsLongLong(PyTuple_GetItem(channels, 2));
  running.mean_dtype = given.running_mean_dtype;
  running.var_dtype = given.running_var_dtype;
  running.correction = call.task.correction;
  running.dtype = call.x.dtype;
  return true;
}

// Normalizes, and moves the running statistics. `moments` has room for a double a group. False: an
// exception is set.
bool train(Call &call, Running &running, PyObject *moments) {
  running.group_size = (double)call.plan->nest.group_size;
  running.stats = call.job.stats;
  running.group_var = call.job.var = (double *)PyBytes_AsString(moments);
  if (!run([&] { axisnorm::forward(*call.plan, call.job, call.task); }, call.x.size)) return false;
  axisnorm::move(running);
  return true;
}

// op_train(x, weight, bias, mask, scheme, running_mean, running_var, activation=None) -> (y, stats, and
// running_mean and running_var as they are after this batch)
PyObject *op_train(PyObject *, PyObject *const *args, Py_ssize_t count) {
  Call call;
  Running running = {};
  Task given;
  if (count < 7 || count > 8 ||
      !read_activation(count > 7 ? args[7] : Py_None, call.job.activation) ||
      !read_train(call, running, given, args))
    return by_python(python.train, args, count);
  PyObject *y = new_output(call, args[0]);
  if (!y) return by_python(python.train, args, count);
  PyObject *stats = call.new_stats(args[0]), *mean = nullptr, *var = nullptr, *result = nullptr;
  PyObject *moments = stats ? PyBytes_FromStringAndSize(nullptr, call.groups * 8) : nullptr;
  if (moments &&
      (mean = copy_of(args[5], given.running_mean, running.channels, running.mean_dtype,
                      running.mean)) &&
      (var = copy_of(args[6], given.running_var, running.channels, running.var_dtype,
                     running.var))) {
    if (train(call, running, moments)) result = PyTuple_Pack(4, y, stats, mean, var);
  }
  for (PyObject *used : {y, stats, moments, mean, var}) Py_XDECREF(used);
  return result;
}

// op_train_into(x, weight, bias, mask, scheme, running_mean, running_var, activation, y, stats,
// running_mean_out, running_var_out) -> None
PyObject *op_train_into(PyObject *, PyObject *const *args, Py_ssize_t count) {
  Call call;
  Running running = {};
  Task given;
  Reading mean, var;
  if (count != 12 || !read_activation(args[7], call.job.activation) ||
      !read_train(call, running, given, args) ||
      !read_target(call, args[8], call.job.y, &axisnorm::Axis::y) || !call.read_stats(args[9]) ||
      !read(args[10], mean) || !read(args[11], var) || mean.size != running.channels ||
      var.size != running.channels || mean.dtype != running.mean_dtype ||
      var.dtype != running.var_dtype)
    return by_python(python.train_into, args, count);
  call.problem.has_y = true;
  if (!call.make_plan()) return by_python(python.train_into, args, count);
  PyObject *moments = PyBytes_FromStringAndSize(nullptr, call.groups * 8);
  if (!moments) return nullptr;
  running.mean = (void *)data(mean);
  running.var = (void *)data(var);
  copy(running.mean, given.running_mean, running.channels, running.mean_dtype);
  copy(running.var, given.running_var, running.channels, running.var_dtype);
  const bool fine = train(call, running, moments);
  Py_DECREF(moments);
  if (!fine) return nullptr;
  Py_RETURN_NONE;
}

// Reads the arguments of op_backward. False: something is unusual.
bool read_backward(Call &call, PyObject *const *args) {
  Reading grad;
  Strides strides;
  if (!call.read(args[1], args[2], args[3], args[4], args[5], args[6], args[8]) ||
      (call.constant(USES_RUNNING) == Py_True) != (args[5] != Py_None) ||
      !read(args[0], grad, &strides) || !same_kind(grad, call.x) || !call.read_stats(args[7]))
    return false;
  call.job.grad = data(grad);
  call.problem.has_grad = true;
  call.problem.has_running = args[5] != Py_None;
  call.set_strides(strides, &axisnorm::Axis::grad);
  return true;
}

// op_backward(grad, x, weight, bias, mask, running_mean, running_var, stats, scheme) -> (dx, dweight,
// dbias), the latter without elements where there is no parameter
PyObject *op_backward(PyObject *, PyObject *const *args, Py_ssize_t count) {
  Call call;
  Strides strides;
  if (count != 9 || !read_backward(call, args)) return by_python(python.backward, args, count);
  call.problem.has_dx = true;
  PyObject *results[3] = {};
  results[0] = like(args[1], call.x.size, call.x.dtype, call.job.dx, &strides);
  if (!results[0]) return nullptr;
  call.set_strides(strides, &axisnorm::Axis::dx);
  if (!call.make_plan()) {
    Py_DECREF(results[0]);
    return by_python(python.backward, args, count);
  }
  void **const places[] = {nullptr, &call.job.dweight, &call.job.dbias};
  const int dtypes[] = {0, call.job.weight_dtype, call.job.bias_dtype};
  bool fine = true;
  for (int i = 1; i < 3 && fine; i++) {
    PyObject *parameter = args[i + 1];
    // Parameters are small: no large memory is looked for.
    results[i] = parameter == Py_None
                     ? PyObject_CallFunctionObjArgs(python.nothing, args[1], nullptr)
                     : like(parameter, 0, dtypes[i], *places[i]);
    fine = results[i] != nullptr;
  }
  PyObject *result = nullptr;
  if (fine && run([&] { axisnorm::backward(*call.plan, call.job, call.task); }, call.x.size))
    result = PyTuple_Pack(3, results[0], results[1], results[2]);
  for (PyObject *made : results) Py_XDECREF(made);
  return result;
}

// A parameter's gradient, contiguous as the parameter is, or None. False: something else.
bool read_gradient(PyObject *tensor, PyObject *parameter, int dtype, void *&place) {
  if (tensor == Py_None) return true;
  Reading r, like;
  if (!read(tensor, r) || !read(parameter, like) || !same_kind(r, like) || r.dtype != dtype)
    return false;
  place = (void *)data(r);
  return true;
}

bool read_backward_into(Call &call, PyObject *const *args) {
  if (!read_backward(call, args) ||
      !read_target(call, args[9], call.job.dx, &axisnorm::Axis::dx) ||
      !read_gradient(args[10], args[2], call.job.weight_dtype, call.job.dweight) ||
      !read_gradient(args[11], args[3], call.job.bias_dtype, call.job.dbias))
    return false;
  call.problem.has_dx = true;
  return call.make_plan();
}

// op_backward_into(grad, x, weight, bias, mask, running_mean, running_var, stats, scheme, dx, dweight or
// None, dbias or None) -> None
const Operator backward_into = {
    "op_backward_into", 12, true, read_backward_into, &python.backward_into,
    {PLACE(grad), PLACE(x), PLACE(weight), PLACE(bias), -1, -1, -1, PLACE(stats), -1, PLACE(dx),
     PLACE(dweight), PLACE(dbias)}};

PyObject *op_backward_into(PyObject *, PyObject *const *args, Py_ssize_t count) {
  return operate(backward_into, args, count);
}

// Reads the arguments of op_behind: those of op_backward and an activation. False: something is
// unusual.
bool read_behind(Call &call, PyObject *const *args) {
  if (!read_backward(call, args) || !read_activation(args[9], call.job.activation)) return false;
  call.problem.has_y = true;
  return call.job.activation != NO_ACTIVATION;
}

// op_behind(grad, x, weight, bias, mask, running_mean, running_var, stats, scheme, activation) -> the
// gradient of what is activated
PyObject *op_behind(PyObject *, PyObject *const *args, Py_ssize_t count) {
  Call call;
  if (count != 10 || !read_behind(call, args)) return by_python(python.behind, args, count);
  PyObject *behind = new_output(call, args[1]);
  if (!behind) return by_python(python.behind, args, count);
  if (!run([&] { axisnorm::forward(*call.plan, call.job, call.task); }, call.x.size))
    Py_CLEAR(behind);
  return behind;
}

bool read_behind_into(Call &call, PyObject *const *args) {
  return read_behind(call, args) &&
         read_target(call, args[10], call.job.y, &axisnorm::Axis::y) && call.make_plan();
}

// op_behind_into(grad, x, weight, bias, mask, running_mean, running_var, stats, scheme, activation,
// behind) -> None
const Operator behind_into = {
    "op_behind_into", 11, false, read_behind_into, &python.behind_into,
    {PLACE(grad), PLACE(x), PLACE(weight), PLACE(bias), -1, -1, -1, PLACE(stats), -1, -1, PLACE(y)}};

PyObject *op_behind_into(PyObject *, PyObject *const *args, Py_ssize_t count) {
  return operate(behind_into, args, count);
}

bool read_add_forward_into(Call &call, PyObject *const *args) {
  void *x = nullptr, *residual = nullptr;
  if (!read_activation(args[7], call.job.activation) ||
      !call.read(args[0], args[2], args[3], Py_None, Py_None, Py_None, args[6]) ||
      !call.read_like(args[0], x) || !call.read_like(args[1], residual) ||
      !call.set_rows(args[4], args[5]) || !call.read_like(args[8], call.job.y) ||
      !call.read_like(args[9], call.job.h) || (args[10] != Py_None && !call.read_stats(args[10])))
    return false;
  call.job.residual = residual;
  return true;
}

// op_add_forward_into(x, residual, weight, bias, seed, dropout_p, scheme, activation, y, h or None,
// stats or None) -> None
const Operator add_forward_into = {
    "op_add_forward_into", 11, false, read_add_forward_into, &python.add_forward_into,
    {PLACE(x), PLACE(residual), PLACE(weight), PLACE(bias), -1, -1, -1, -1, PLACE(y), PLACE(h),
     PLACE(stats)}};

PyObject *op_add_forward_into(PyObject *, PyObject *const *args, Py_ssize_t count) {
  return operate(add_forward_into, args, count);
}

bool read_add_backward_into(Call &call, PyObject *const *args) {
  void *h = nullptr, *grad = nullptr, *grad_h = nullptr;
  if (!call.read(args[2], args[3], args[4], Py_None, Py_None, Py_None, args[8]) ||
      !call.read_like(args[2], h) || !call.read_like(args[0], grad) ||
      !call.read_like(args[1], grad_h) || !call.read_stats(args[6]) ||
      !call.set_rows(args[5], args[7]) || !call.read_like(args[9], call.job.dropped_dx) ||
      !call.read_like(args[10], call.job.dx) ||
      !read_gradient(args[11], args[3], call.job.weight_dtype, call.job.dweight) ||
      !read_gradient(args[12], args[4], call.job.bias_dtype, call.job.dbias))
    return false;
  call.job.grad = grad;
  call.job.grad_h = grad_h;
  return true;
}

// op_add_backward_into(grad, grad_h or None, h, weight, bias, seed, stats, dropout_p, scheme, dx or None,
// dresidual, dweight or None, dbias or None) -> None
const Operator add_backward_into = {
    "op_add_backward_into", 13, true, read_add_backward_into, &python.add_backward_into,
    {PLACE(grad), PLACE(grad_h), PLACE(x), PLACE(weight), PLACE(bias), -1, PLACE(stats), -1, -1,
     PLACE(dropped_dx), PLACE(dx), PLACE(dweight), PLACE(dbias)}};

PyObject *op_add_backward_into(PyObject *, PyObject *const *args, Py_ssize_t count) {
  return operate(add_backward_into, args, count);
}

// ---- calls that are made again and again: one for each place in a compiled program

// What a tensor is beside its elements.
struct Kind {
  int dtype, ndim;
  bool contiguous;
  int64_t shape[Strides::MOST], strides[Strides::MOST];

  bool set(const dltensor &t) {
    if (t.ndim > Strides::MOST) return false;
    *this = {code(t), t.ndim, !t.strides, {}, {}};
    for (int i = 0; i < ndim; i++) {
      shape[i] = t.shape[i];
      strides[i] = t.strides ? t.strides[i] : 0;
    }
    return true;
  }
  bool is_of(const dltensor &t) const {
    if (t.ndim != ndim || code(t) != dtype || contiguous != !t.strides) return false;
    bool same = true;
    for (int i = 0; i < ndim; i++)
      same = same && shape[i] == t.shape[i] && (contiguous || strides[i] == t.strides[i]);
    return same;
  }

 private:
  // Its type and its device, as one number.
  static int code(const dltensor &t) {
    return (int)t.dtype.code << 24 | (int)t.dtype.bits << 16 | (int)t.dtype.lanes << 8 |
           (int)t.device.device_type;
  }
};

// An operator with all of its arguments but some tensors. What it has read is kept, and holds for as
// long as tensors of the same kinds come.
class Bound {
 public:
  static constexpr const char *NAME = "axisnorm.bound";

  // `layouts` are the sizes and strides that its tensors have, each a pair; assert_layout(tensor,
  // sizes, strides) raises where they are others.
  Bound(const Operator &op, PyObject *args, PyObject *layouts, PyObject *assert_layout)
      : op_(op), args_(args), layouts_(layouts), assert_layout_(assert_layout) {
    for (PyObject *object : {args_, layouts_, assert_layout_}) Py_INCREF(object);
    for (int i = 0; i < op.count; i++)
      if (PyTuple_GetItem(args, i) == Py_Ellipsis) given_[count_++] = i;
  }
  ~Bound() {
    for (PyObject *object : {args_, layouts_, assert_layout_}) Py_DECREF(object);
  }
  int tensors() const { return count_; }

  PyObject *call(PyObject *const *tensors, Py_ssize_t count) {
    if (count != count_) {
      PyErr_Format(PyExc_TypeError, "%s is called with %d tensors", op_.name, count_);
      return nullptr;
    }
    Job job = job_;
    if (!is_known_ || !set_places(job, tensors)) return read(tensors);
    // Another thread may read others meanwhile.
    const std::shared_ptr<const axisnorm::Plan> plan = plan_;
    const Task task = task_;
    if (!compute(op_, plan.get(), job, task, elements_)) return nullptr;
    Py_RETURN_NONE;
  }

 private:
  const Operator &op_;
  PyObject *args_, *layouts_, *assert_layout_;
  int given_[Operator::MOST], count_ = 0;

  bool is_known_ = false;
  Kind kinds_[Operator::MOST];
  Job job_ = {};
  Task task_ = {};
  std::shared_ptr<const axisnorm::Plan> plan_;
  int64_t elements_ = 0;

  // False: others than before.
  bool set_places(Job &job, PyObject *const *tensors) const {
    for (int k = 0; k < count_; k++) {
      dltensor t;
      if (!is_exact(tensors[k])) return false;
      if (api->describe(tensors[k], &t)) return PyErr_Clear(), false;
      if (!kinds_[k].is_of(t) || !t.data ||
          (op_.is_gradient(given_[k]) && !is_positive(tensors[k])))
        return false;
      const void *place = (const char *)t.data + t.byte_offset;
      memcpy((char *)&job + op_.places[given_[k]], &place, sizeof place);
    }
    return true;
  }

  // False: an exception is set. The operators in Python do not look at the sizes of everything that
  // is saved for backward.
  bool have_layouts(PyObject *const *tensors) const {
    for (int k = 0; k < count_; k++) {
      PyObject *pair = PyTuple_GetItem(layouts_, k);
      PyObject *sizes = pair ? PyTuple_GetItem(pair, 0) : nullptr;
      PyObject *strides = sizes ? PyTuple_GetItem(pair, 1) : nullptr;
      PyObject *done = strides ? PyObject_CallFunctionObjArgs(assert_layout_, tensors[k], sizes,
                                                              strides, nullptr)
                               : nullptr;
      Py_XDECREF(done);
      if (!done) return false;
    }
    return true;
  }

  // All arguments, and how to read them the next time.
  PyObject *read(PyObject *const *tensors) {
    is_known_ = false;
    if (!have_layouts(tensors)) return nullptr;
    PyObject *all[Operator::MOST];
    for (int i = 0, k = 0; i < op_.count; i++)
      all[i] = k < count_ && given_[k] == i ? tensors[k++] : PyTuple_GetItem(args_, i);
    Call call;
    if (!read_all(op_, call, all, op_.count)) return by_python(*op_.by_python, all, op_.count);
    keep(call, tensors);
    if (!compute(op_, call.plan.get(), call.job, call.task, call.x.size)) return nullptr;
    Py_RETURN_NONE;
  }

  void keep(const Call &call, PyObject *const *tensors) {
    if (call.problem.has_running) return;  // others than the job's tensors are read, and one is cleared
    for (int k = 0; k < count_; k++) {
      dltensor t;
      if (op_.places[given_[k]] < 0) return;
      if (api->describe(tensors[k], &t)) return PyErr_Clear();
      if (!kinds_[k].set(t)) return;
    }
    job_ = call.job;
    task_ = call.task;
    plan_ = call.plan;
    elements_ = call.x.size;
    is_known_ = true;
  }
};

const Operator *const operators[] = {&forward_into, &backward_into, &behind_into, &add_forward_into,
                                     &add_backward_into};

PyObject *call_bound(PyObject *capsule, PyObject *const *args, Py_ssize_t count) {
  auto *bound = (Bound *)PyCapsule_GetPointer(capsule, Bound::NAME);
  return bound ? bound->call(args, count) : nullptr;
}

PyMethodDef bound_method = {"bound", (PyCFunction)(void *)call_bound, METH_FASTCALL, nullptr};

// bound(name, args, layouts, assert_layout) -> a function of the tensors for which `...` stands in the
// operator's arguments
PyObject *bind(PyObject *, PyObject *const *args, Py_ssize_t count) {
  if (count != 4 || !PyUnicode_Check(args[0]) || !PyTuple_Check(args[1]) ||
      !PyTuple_Check(args[2])) {
    PyErr_SetString(PyExc_TypeError,
                    "bound takes an operator's name, arguments, layouts, and who asserts these");
    return nullptr;
  }
  const Operator *found = nullptr;
  for (const Operator *op : operators)
    if (!PyUnicode_CompareWithASCIIString(args[0], op->name) && PyTuple_Size(args[1]) == op->count)
      found = op;
  if (!found) {
    PyErr_Format(PyExc_ValueError, "no operator %U of %zd arguments", args[0],
                 PyTuple_Size(args[1]));
    return nullptr;
  }
  std::unique_ptr<Bound> made(new (std::nothrow) Bound(*found, args[1], args[2], args[3]));
  if (!made) return PyErr_NoMemory();
  if (made->tensors() != PyTuple_Size(args[2])) {
    PyErr_SetString(PyExc_ValueError, "each tensor has a layout");
    return nullptr;
  }
  PyObject *capsule = PyCapsule_New(made.get(), Bound::NAME, [](PyObject *self) {
    delete (Bound *)PyCapsule_GetPointer(self, Bound::NAME);
  });
  if (!capsule) return nullptr;
  (void)made.release();
  PyObject *function = PyCFunction_NewEx(&bound_method, capsule, nullptr);
  Py_DECREF(capsule);
  return function;
}

// connect_add_ops({name: object}) -> None: what these two need, by name
PyObject *connect_add_ops(PyObject *, PyObject *given) {
  if (!take(given, {{"forward_into", &python.add_forward_into},
                    {"backward_into", &python.add_backward_into}}))
    return nullptr;
  Py_RETURN_NONE;
}

double element(const Reading &r, int64_t i) {
  return r.dtype == F64 ? ((const double *)data(r))[i] : ((const float *)data(r))[i];
}

// op_scale_into(weight or None, var, eps, scale) -> None: scale = weight / sqrt(var + eps), as doubles
PyObject *op_scale_into(PyObject *, PyObject *const *args, Py_ssize_t count) {
  Reading weight, var, scale;
  double eps;
  const bool weighted = count == 4 && args[0] != Py_None;
  const auto is_wide = [](const Reading &r) { return r.dtype == F32 || r.dtype == F64; };
  if (count != 4 || !api || !read(args[1], var) || !is_wide(var) ||
      !read(args[3], scale) || scale.dtype != F64 || scale.size != var.size ||
      !read_number(args[2], eps) ||
      (weighted && (!read(args[0], weight) || !is_wide(weight) || weight.size != var.size)))
    return by_python(python.scale_into, args, count);
  double *const to = (double *)data(scale);
  for (int64_t i = 0; i < var.size; i++) {
    const double v = element(var, i) + eps;
    to[i] = (v == 0 ? 0 : 1 / __builtin_sqrt(v)) * (weighted ? element(weight, i) : 1);
  }
  Py_RETURN_NONE;
}

// connect_schemes({name: object}) -> None: how a scheme is looked up, by name
PyObject *connect_schemes(PyObject *, PyObject *given) {
  if (!take(given, {{"prepared", &python.prepared}, {"prepare", &python.prepare}})) return nullptr;
  Py_RETURN_NONE;
}

// connect_ops({name: object}) -> None: what the functions above need, by name
PyObject *connect_ops(PyObject *, PyObject *given) {
  if (!take(given, {{"new_stats", &python.new_stats},
                    {"nothing", &python.nothing},
                    {"forward", &python.forward},
                    {"backward", &python.backward},
                    {"behind", &python.behind},
                    {"train", &python.train},
                    {"forward_into", &python.forward_into},
                    {"backward_into", &python.backward_into},
                    {"behind_into", &python.behind_into},
                    {"train_into", &python.train_into},
                    {"scale_into", &python.scale_into}}))
    return nullptr;
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"connect_arrays", (PyCFunction)(void *)numpy_array::connect, METH_FASTCALL, nullptr},
    {"array_like", (PyCFunction)(void *)numpy_array::array_like, METH_FASTCALL, nullptr},
    {"connect_schemes", (PyCFunction)connect_schemes, METH_O, nullptr},
    {"connect_ops", (PyCFunction)connect_ops, METH_O, nullptr},
    {"short_normalize", (PyCFunction)(void *)short_normalize, METH_FASTCALL, nullptr},
    {"op_forward", (PyCFunction)(void *)op_forward, METH_FASTCALL, nullptr},
    {"op_train", (PyCFunction)(void *)op_train, METH_FASTCALL, nullptr},
    {"op_backward", (PyCFunction)(void *)op_backward, METH_FASTCALL, nullptr},
    {"op_behind", (PyCFunction)(void *)op_behind, METH_FASTCALL, nullptr},
    {"op_behind_into", (PyCFunction)(void *)op_behind_into, METH_FASTCALL, nullptr},
    {"op_forward_into", (PyCFunction)(void *)op_forward_into, METH_FASTCALL, nullptr},
    {"op_train_into", (PyCFunction)(void *)op_train_into, METH_FASTCALL, nullptr},
    {"connect_add_ops", (PyCFunction)connect_add_ops, METH_O, nullptr},
    {"op_add_forward_into", (PyCFunction)(void *)op_add_forward_into, METH_FASTCALL, nullptr},
    {"op_add_backward_into", (PyCFunction)(void *)op_add_backward_into, METH_FASTCALL, nullptr},
    {"bound", (PyCFunction)(void *)bind, METH_FASTCALL, nullptr},
    {"op_scale_into", (PyCFunction)(void *)op_scale_into, METH_FASTCALL, nullptr},
    {"op_backward_into", (PyCFunction)(void *)op_backward_into, METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

void add_ops_to(PyObject *module) {
  if (PyModule_AddFunctions(module, methods)) throw nanobind::python_error();
}

}  // namespace torch_door
