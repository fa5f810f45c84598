// The Python module. Plain NumPy arrays and current torch tensors come in through torch_door.cpp and
// torch_ops.cpp; what is unusual, and older torch, hands over addresses, which were checked in Python.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <pthread.h>

#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "axes.h"
#include "dispatch.h"
#include "numpy_array.h"
#include "torch_door.h"
#include "torch_memory.h"
#include "torch_ops.h"
#include "transposing.h"

namespace nb = nanobind;

namespace {

std::vector<std::string> isa_names() {
  std::vector<std::string> names;
  for (const char *const *name = axisnorm::supported_isas(); *name; name++) names.push_back(*name);
  return names;
}

// An array's address, whatever its type and strides, writable or not.
uintptr_t address(nb::ndarray<nb::ro> array) { return (uintptr_t)array.data(); }

// A tensor: its address (0: there is none) and its strides in elements, one for each of its axes.
typedef std::pair<uintptr_t, std::vector<int64_t>> Given;

struct Axes : axisnorm::PackedAxes {
  explicit Axes(nb::bytes packed) : PackedAxes(packed.c_str(), packed.size()) {
    if (!fit()) throw nb::value_error("too many axes");
  }
  void set(axisnorm::Problem &problem, const Given &given, int64_t axisnorm::Axis::*member) const {
    if ((int64_t)given.second.size() < rank()) throw nb::value_error("too few strides");
    set_strides(problem, given.second.data(), member);
  }
};

// What is the same for forward and backward: (dtype, weight_dtype, bias_dtype, mean_dtype, var_dtype,
// center, rounded, eps, correction, weight_offset).
typedef std::tuple<int, int, int, int, int, bool, bool, double, double, double> Constants;

void set_constants(const Constants &constants, Job &job, Task &task, double group_size) {
  std::tie(job.dtype, job.weight_dtype, job.bias_dtype, task.running_mean_dtype,
           task.running_var_dtype, std::ignore, std::ignore, job.eps, task.correction,
           job.weight_offset) = constants;
  job.center = std::get<5>(constants);
  job.rounded = std::get<6>(constants);
  job.divisor = axisnorm::divisor(group_size, task.correction);
}

// Why there is no plan for tensors of these strides, or None: then y, and what else was asked for, is
// written. With a gradient of y, what is written to y is the gradient of what is activated.
std::optional<std::string> forward(nb::bytes packed, const Given &x, const Given &y,
                                   const Given &mask, uintptr_t weight, uintptr_t bias,
                                   uintptr_t running_mean, uintptr_t running_var, uintptr_t stats,
                                   uintptr_t var, uintptr_t count, const Constants &constants,
                                   int activation, const Given &grad) {
  const Axes axes(packed);
  axisnorm::Problem problem = axes.problem();
  axes.set(problem, x, &axisnorm::Axis::x);
  if ((problem.has_y = y.first)) axes.set(problem, y, &axisnorm::Axis::y);
  if ((problem.has_mask = mask.first)) axes.set(problem, mask, &axisnorm::Axis::mask);
  if ((problem.has_grad = grad.first)) axes.set(problem, grad, &axisnorm::Axis::grad);
  problem.has_running = running_mean;
  const auto plan = axisnorm::plan_for(problem);
  if (plan->refused) return plan->refused;
  Job job = {};
  Task task = {};
  set_constants(constants, job, task, (double)plan->nest.group_size);
  job.activation = activation;
  job.x = (const void *)x.first;
  job.y = (void *)y.first;
  job.grad = (const void *)grad.first;
  job.weight = (const void *)weight;
  job.bias = (const void *)bias;
  job.stats = (void *)stats;
  job.var = (double *)var;
  task.mask = (const unsigned char *)mask.first;
  task.running_mean = (const void *)running_mean;
  task.running_var = (const void *)running_var;
  task.count = (double *)count;
  nb::gil_scoped_release release;
  axisnorm::forward(*plan, job, task);
  return {};
}

std::optional<std::string> backward(nb::bytes packed, const Given &grad, const Given &x,
                                    const Given &dx, const Given &mask, uintptr_t weight,
                                    uintptr_t bias, uintptr_t running_mean, uintptr_t running_var,
                                    uintptr_t stats, uintptr_t dweight, uintptr_t dbias,
                                    const Constants &constants) {
  const Axes axes(packed);
  axisnorm::Problem problem = axes.problem();
  axes.set(problem, x, &axisnorm::Axis::x);
  axes.set(problem, grad, &axisnorm::Axis::grad);
  problem.has_grad = true;
  if ((problem.has_dx = dx.first)) axes.set(problem, dx, &axisnorm::Axis::dx);
  if ((problem.has_mask = mask.first)) axes.set(problem, mask, &axisnorm::Axis::mask);
  problem.has_running = running_mean;
  const auto plan = axisnorm::plan_for(problem);
  if (plan->refused) return plan->refused;
  Job job = {};
  Task task = {};
  set_constants(constants, job, task, (double)plan->nest.group_size);
  job.grad = (const void *)grad.first;
  job.x = (const void *)x.first;
  job.dx = (void *)dx.first;
  job.weight = (const void *)weight;
  job.bias = (const void *)bias;  // it is there: not read
  job.stats = (void *)stats;
  job.dweight = (void *)dweight;
  job.dbias = (void *)dbias;
  task.mask = (const unsigned char *)mask.first;
  task.running_mean = (const void *)running_mean;
  task.running_var = (const void *)running_var;
  nb::gil_scoped_release release;
  axisnorm::backward(*plan, job, task);
  return {};
}

// The loops for a tensor of these strides: "rows", "lines" or "lanes", or why there are none.
std::string loops(nb::bytes packed, const std::vector<int64_t> &strides, bool masked, bool running) {
  const Axes axes(packed);
  axisnorm::Problem problem = axes.problem();
  axes.set(problem, {1, strides}, &axisnorm::Axis::x);
  if ((problem.has_mask = masked)) axes.set(problem, {1, strides}, &axisnorm::Axis::mask);
  problem.has_running = running;
  const auto plan = axisnorm::plan_for(problem);
  return plan->refused ? plan->refused : plan->rows ? "rows" : plan->nest.lanes ? "lanes" : "lines";
}

// Moves running statistics; see norm.h.
void move(uintptr_t mean, uintptr_t var, int mean_dtype, int var_dtype, int64_t channels,
          int64_t averaged, int64_t inner, uintptr_t stats, uintptr_t group_var, uintptr_t count,
          double group_size, double correction, double running_correction, double momentum,
          int dtype) {
  axisnorm::move({(void *)mean, (void *)var, mean_dtype, var_dtype, channels, averaged, inner,
                  (const void *)stats, (const double *)group_var, (const double *)count, group_size,
                  correction, running_correction, momentum, dtype});
}

// Whether a contiguous copy was made; see transposing.h.
bool transpose(const Given &from, uintptr_t to, const std::vector<int64_t> &sizes,
               int64_t element_size) {
  if (from.second.size() != sizes.size()) throw nb::value_error("as many strides as sizes");
  nb::gil_scoped_release release;
  return axisnorm::transpose((const void *)from.first, (void *)to, element_size, (int)sizes.size(),
                             sizes.data(), from.second.data());
}

// What add_forward and add_backward have in common.
Job sum_job(uintptr_t weight, uintptr_t stats, double dropout_p, int64_t seed, int64_t rows,
            int64_t n, int dtype, int weight_dtype, int bias_dtype, bool center, bool rounded,
            double eps, double weight_offset) {
  Job job = {};
  job.dtype = dtype;
  job.weight_dtype = weight_dtype;
  job.bias_dtype = bias_dtype;
  job.center = center;
  job.rounded = rounded;
  job.eps = eps;
  job.divisor = (double)n;
  job.weight_offset = weight_offset;
  job.rows = rows;
  job.n = n;
  job.weight = (const void *)weight;
  job.stats = (void *)stats;
  job.dropout_p = dropout_p;
  job.seed = (uint64_t)seed;
  return job;
}

void add_forward(uintptr_t x, uintptr_t residual, uintptr_t weight, uintptr_t bias, uintptr_t y,
                 uintptr_t h, uintptr_t stats, double dropout_p, int64_t seed, int64_t rows,
                 int64_t n, int64_t x_stride, int64_t residual_stride, int64_t y_stride,
                 int64_t h_stride, int dtype, int weight_dtype, int bias_dtype, bool center,
                 bool rounded, double eps, double weight_offset, int activation) {
  Job job = sum_job(weight, stats, dropout_p, seed, rows, n, dtype, weight_dtype, bias_dtype,
                    center, rounded, eps, weight_offset);
  job.activation = activation;
  job.x = (const void *)x;
  job.x_stride = x_stride;
  job.residual = (const void *)residual;
  job.residual_stride = residual_stride;
  job.bias = (const void *)bias;
  job.y = (void *)y;
  job.y_stride = y_stride;
  job.h = (void *)h;
  job.h_stride = h_stride;
  axisnorm::forward(job);
}

void add_backward(uintptr_t grad, uintptr_t grad_h, uintptr_t h, uintptr_t weight, uintptr_t stats,
                  uintptr_t dh, uintptr_t dx, uintptr_t dweight, uintptr_t dbias, double dropout_p,
                  int64_t seed, int64_t rows, int64_t n, int64_t grad_stride, int64_t grad_h_stride,
                  int64_t h_stride, int64_t dh_stride, int64_t dx_stride, int dtype,
                  int weight_dtype, int bias_dtype, bool center, bool rounded, double eps,
                  double weight_offset) {
  Job job = sum_job(weight, stats, dropout_p, seed, rows, n, dtype, weight_dtype, bias_dtype,
                    center, rounded, eps, weight_offset);
  job.x = (const void *)h;
  job.x_stride = h_stride;
  job.grad = (const void *)grad;
  job.grad_stride = grad_stride;
  job.grad_h = (const void *)grad_h;
  job.grad_h_stride = grad_h_stride;
  job.dx = (void *)dh;
  job.dx_stride = dh_stride;
  job.dropped_dx = (void *)dx;
  job.dropped_dx_stride = dx_stride;
  job.dweight = (void *)dweight;
  job.dbias = (void *)dbias;
  axisnorm::backward(job);
}

// The pool of reused memory for tensors, or for arrays.
memory::Account &pool(bool tensors) {
  if (tensors) return torch_door::storages;
  return numpy_array::blocks;
}

}  // namespace

NB_MODULE(_native, m) {
  m.def("address", &address, nb::arg("array").noconvert());
  m.def("forward", &forward);
  m.def("backward", &backward);
  m.def("loops", &loops);
  m.def("move", &move);
  m.def("transpose", &transpose);
  m.def("isa", &axisnorm::isa);
  m.def("set_isa", &axisnorm::set_isa);
  m.def("stream_from", &axisnorm::stream_from);
  m.def("read_singly_from", &axisnorm::read_singly_from);
  m.def("isa_names", &isa_names);
  m.def("isa_error", &axisnorm::isa_error, nb::rv_policy::copy);
  m.def("max_threads", &axisnorm::max_threads);
  m.def("openmp_source", &axisnorm::openmp_source);
  m.def("set_torch_openmp", &axisnorm::set_torch_openmp);
  m.def("add_forward", &add_forward, nb::call_guard<nb::gil_scoped_release>());
  m.def("add_backward", &add_backward, nb::call_guard<nb::gil_scoped_release>());
  torch_door::add_to(m.ptr());
  torch_door::add_ops_to(m.ptr());
  torch_door::add_memory_to(m.ptr());
  m.def("pool_most", [](bool tensors) { return pool(tensors).most; });
  m.def("set_pool_most", [](bool tensors, int64_t most) { pool(tensors).most = most; });
  m.def("pool_kept", [](bool tensors) { return pool(tensors).kept; });
  m.def("clear_pool", [](bool tensors) { pool(tensors).clear(); });
  pthread_atfork(nullptr, nullptr, [] { torch_door::storages.renew(); });
}
