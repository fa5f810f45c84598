// The operators of this library for plain torch tensors: what compiled programs call. Each function
// takes the operator's arguments and returns its results; what is unusual it hands to the Python
// function of the same operator, which checks everything and raises where something is wrong.
#include "torch_ops.h"

#include <string.h>

#include "axes.h"
#include "torch_tensor.h"

namespace torch_door {
namespace {

// Python functions, by name; see _torch.py.
struct {
  PyObject *prepared;  // {(scheme, shape, affine): the constants below, or None}
  PyObject *prepare;   // (scheme, shape, affine) -> the same, which it puts there
  PyObject *new_stats;  // (x, groups) -> a tensor (3, groups) of the compute type
  PyObject *nothing;    // x -> a tensor without elements
  PyObject *forward, *backward, *train;  // the operators
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
bool read_parameter(PyObject *object, PyObject *shape, const void *&place, int32_t &dtype) {
  if (object == Py_None) return true;
  Reading r;
  if (!read(object, r) || !has_shape(r, shape)) return false;
  place = data(r);
  dtype = r.dtype;
  return true;
}

class Call {
 public:
  Reading x;
  axisnorm::Problem problem;
  axisnorm::Plan plan;
  Job job = {};
  Task task = {};
  int64_t groups;

  ~Call() { Py_XDECREF(constants); }

  // False: unusual, perhaps with an error.
  bool read(PyObject *tensor, PyObject *weight, PyObject *bias, PyObject *mask,
            PyObject *running_mean, PyObject *running_var, PyObject *scheme) {
    if (!api || mask != Py_None || !torch_door::read(tensor, x, &strides)) return false;
    if (!find_constants(scheme, weight != Py_None || bias != Py_None)) return false;
    const bool running = running_mean != Py_None;
    if (running != (running_var != Py_None)) return false;
    job.dtype = job.weight_dtype = job.bias_dtype = x.dtype;
    job.x = data(x);
    job.center = constant(CENTER) == Py_True;
    job.rounded = constant(ROUNDED) == Py_True;
    groups = PyLong_AsLongLong(constant(GROUPS));
    if (!read_parameter(weight, constant(AFFINE_SHAPE), job.weight, job.weight_dtype) ||
        !read_parameter(bias, constant(AFFINE_SHAPE), job.bias, job.bias_dtype) ||
        !read_parameter(running_mean, constant(RUNNING_SHAPE), task.running_mean,
                        task.running_mean_dtype) ||
        !read_parameter(running_var, constant(RUNNING_SHAPE), task.running_var,
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
    plan = axisnorm::make_plan(problem);
    job.divisor = axisnorm::divisor((double)plan.nest.group_size, task.correction);
    return !plan.refused;
  }

  // The statistics that backward needs, a new tensor.
  PyObject *new_stats(PyObject *tensor) {
    PyObject *count = PyLong_FromLongLong(groups);
    PyObject *stats =
        count ? PyObject_CallFunctionObjArgs(python.new_stats, tensor, count, nullptr) : nullptr;
    Py_XDECREF(count);
    Reading r;
    if (stats && !torch_door::read(stats, r)) {
      PyErr_SetString(PyExc_SystemError, "new statistics cannot be read");
      Py_CLEAR(stats);
    }
    if (!stats) return nullptr;
    job.stats = (void *)data(r);
    // Where others normalize none are measured, and an operator gives no unwritten memory.
    if (problem.has_running) memset(job.stats, 0, (size_t)r.size * (r.dtype == F64 ? 8 : 4));
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
    PyObject *shape = PyTuple_New(x.t.ndim);
    for (int i = 0; shape && i < x.t.ndim; i++) {
      PyObject *size = PyLong_FromLongLong(x.t.shape[i]);
      if (!size || PyTuple_SetItem(shape, i, size)) Py_CLEAR(shape);
    }
    PyObject *key = shape ? PyTuple_Pack(3, scheme, shape, affine ? Py_True : Py_False) : nullptr;
    if (key && (constants = PyDict_GetItemWithError(python.prepared, key))) Py_INCREF(constants);
    else if (key && !PyErr_Occurred()) constants = PyObject_CallObject(python.prepare, key);
    Py_XDECREF(shape);
    Py_XDECREF(key);
    return constants && constants != Py_None;
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

// op_forward(x, weight, bias, mask, scheme, running_mean=None, running_var=None) -> (y, stats)
PyObject *op_forward(PyObject *, PyObject *const *args, Py_ssize_t count) {
  PyObject *const mean = count > 5 ? args[5] : Py_None, *const var = count > 6 ? args[6] : Py_None;
  Call call;
  if (count < 5 || count > 7 || !call.read(args[0], args[1], args[2], args[3], mean, var, args[4]) ||
      (call.constant(USES_RUNNING) == Py_True) != (mean != Py_None))
    return by_python(python.forward, args, count);
  call.problem.has_running = mean != Py_None;
  PyObject *y = new_output(call, args[0]), *stats = nullptr, *result = nullptr;
  if (!y) return by_python(python.forward, args, count);
  if ((stats = call.new_stats(args[0])) &&
      run([&] { axisnorm::forward(call.plan, call.job, call.task); }, call.x.size))
    result = PyTuple_Pack(2, y, stats);
  Py_DECREF(y);
  Py_XDECREF(stats);
  return result;
}

// A copy of a contiguous tensor of so many elements, and where its elements are.
PyObject *copy_of(PyObject *tensor, const void *elements, int64_t size, int dtype, void *&place) {
  PyObject *copy = like(tensor, size, dtype, place);
  if (copy) memcpy(place, elements, (size_t)size * (dtype == F64 ? 8 : dtype == F32 ? 4 : 2));
  return copy;
}

// op_train(x, weight, bias, mask, scheme, running_mean, running_var) -> (y, stats, and running_mean
// and running_var as they are after this batch)
PyObject *op_train(PyObject *, PyObject *const *args, Py_ssize_t count) {
  Call call;
  Running running = {};
  if (count != 7 || !call.read(args[0], args[1], args[2], args[3], args[5], args[6], args[4]) ||
      args[5] == Py_None || call.constant(USES_RUNNING) == Py_True ||
      !PyTuple_Check(call.constant(CHANNELS)) ||
      !read_number(call.constant(MOMENTUM), running.momentum) ||
      !read_number(call.constant(RUNNING_CORRECTION), running.running_correction))
    return by_python(python.train, args, count);
  const Task given = call.task;
  call.task.running_mean = call.task.running_var = nullptr;
  PyObject *y = new_output(call, args[0]);
  if (!y) return by_python(python.train, args, count);
  PyObject *const channels = call.constant(CHANNELS);
  running.channels = PyLong_AsLongLong(PyTuple_GetItem(channels, 0));
  running.averaged = PyLong_AsLongLong(PyTuple_GetItem(channels, 1));
  running.inner = PyLong_AsLongLong(PyTuple_GetItem(channels, 2));
  running.mean_dtype = given.running_mean_dtype;
  running.var_dtype = given.running_var_dtype;
  running.group_size = (double)call.plan.nest.group_size;
  running.correction = call.task.correction;
  running.dtype = call.x.dtype;

  PyObject *stats = call.new_stats(args[0]), *mean = nullptr, *var = nullptr, *result = nullptr;
  PyObject *moments = stats ? PyBytes_FromStringAndSize(nullptr, call.groups * 8) : nullptr;
  if (moments &&
      (mean = copy_of(args[5], given.running_mean, running.channels, running.mean_dtype,
                      running.mean)) &&
      (var = copy_of(args[6], given.running_var, running.channels, running.var_dtype,
                     running.var))) {
    running.stats = call.job.stats;
    running.group_var = call.job.var = (double *)PyBytes_AsString(moments);
    if (run([&] { axisnorm::forward(call.plan, call.job, call.task); }, call.x.size)) {
      axisnorm::move(running);
      result = PyTuple_Pack(4, y, stats, mean, var);
    }
  }
  for (PyObject *used : {y, stats, moments, mean, var}) Py_XDECREF(used);
  return result;
}

// op_backward(grad, x, weight, bias, mask, running_mean, running_var, stats, scheme) -> (dx, dweight,
// dbias), the latter without elements where there is no parameter
PyObject *op_backward(PyObject *, PyObject *const *args, Py_ssize_t count) {
  Call call;
  Reading grad, stats;
  Strides strides;
  if (count != 9 || !call.read(args[1], args[2], args[3], args[4], args[5], args[6], args[8]) ||
      (call.constant(USES_RUNNING) == Py_True) != (args[5] != Py_None) ||
      !read(args[0], grad, &strides) || !same_kind(grad, call.x) || !read(args[7], stats) ||
      stats.size != 3 * call.groups || stats.dtype != (call.x.dtype == F64 ? F64 : F32))
    return by_python(python.backward, args, count);
  call.job.grad = data(grad);
  call.job.stats = (void *)data(stats);
  call.problem.has_grad = call.problem.has_dx = true;
  call.problem.has_running = args[5] != Py_None;
  call.set_strides(strides, &axisnorm::Axis::grad);
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
  if (fine && run([&] { axisnorm::backward(call.plan, call.job, call.task); }, call.x.size))
    result = PyTuple_Pack(3, results[0], results[1], results[2]);
  for (PyObject *made : results) Py_XDECREF(made);
  return result;
}

// connect_ops({name: object}) -> None: what the functions above need, by name
PyObject *connect_ops(PyObject *, PyObject *given) {
  if (!take(given, {{"prepared", &python.prepared},
                    {"prepare", &python.prepare},
                    {"new_stats", &python.new_stats},
                    {"nothing", &python.nothing},
                    {"forward", &python.forward},
                    {"backward", &python.backward},
                    {"train", &python.train}}))
    return nullptr;
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"connect_ops", (PyCFunction)connect_ops, METH_O, nullptr},
    {"op_forward", (PyCFunction)(void *)op_forward, METH_FASTCALL, nullptr},
    {"op_train", (PyCFunction)(void *)op_train, METH_FASTCALL, nullptr},
    {"op_backward", (PyCFunction)(void *)op_backward, METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

void add_ops_to(PyObject *module) {
  if (PyModule_AddFunctions(module, methods)) throw nanobind::python_error();
}

}  // namespace torch_door
