// The Python module. NumPy and older torch hand over addresses; current torch tensors come in
// through torch_door.cpp. Every address was checked in Python.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#include "dispatch.h"
#include "torch_door.h"

namespace nb = nanobind;

namespace {

std::vector<std::string> isa_names() {
  std::vector<std::string> names;
  for (const char *const *name = axisnorm::supported_isas(); *name; name++) names.push_back(*name);
  return names;
}

// An array's address, whatever its type and strides, writable or not.
uintptr_t address(nb::ndarray<nb::ro> array) { return (uintptr_t)array.data(); }

// What forward and backward have in common.
Job job_of(uintptr_t x, uintptr_t weight, uintptr_t stats, int64_t rows, int64_t n,
           int64_t x_stride, int dtype, int weight_dtype, int bias_dtype, bool center,
           bool rounded, double eps, double divisor, double weight_offset) {
  Job job = {};
  job.dtype = dtype;
  job.weight_dtype = weight_dtype;
  job.bias_dtype = bias_dtype;
  job.center = center;
  job.rounded = rounded;
  job.eps = eps;
  job.divisor = divisor;
  job.weight_offset = weight_offset;
  job.rows = rows;
  job.n = n;
  job.x_stride = x_stride;
  job.x = (const void *)x;
  job.weight = (const void *)weight;
  job.stats = (void *)stats;
  return job;
}

void forward(uintptr_t x, uintptr_t weight, uintptr_t bias, uintptr_t y, uintptr_t stats,
             uintptr_t var, int64_t rows, int64_t n, int64_t x_stride, int64_t y_stride, int dtype,
             int weight_dtype, int bias_dtype, bool center, bool rounded, double eps,
             double divisor, double weight_offset) {
  Job job = job_of(x, weight, stats, rows, n, x_stride, dtype, weight_dtype, bias_dtype, center,
                   rounded, eps, divisor, weight_offset);
  job.bias = (const void *)bias;
  job.y = (void *)y;
  job.y_stride = y_stride;
  job.var = (void *)var;
  axisnorm::forward(job);
}

void backward(uintptr_t grad, uintptr_t x, uintptr_t weight, uintptr_t stats, uintptr_t dx,
              uintptr_t dweight, uintptr_t dbias, int64_t rows, int64_t n, int64_t grad_stride,
              int64_t x_stride, int64_t dx_stride, int dtype, int weight_dtype, int bias_dtype,
              bool center, bool rounded, double eps, double divisor, double weight_offset) {
  Job job = job_of(x, weight, stats, rows, n, x_stride, dtype, weight_dtype, bias_dtype, center,
                   rounded, eps, divisor, weight_offset);
  job.grad = (const void *)grad;
  job.grad_stride = grad_stride;
  job.dx = (void *)dx;
  job.dx_stride = dx_stride;
  job.dweight = (void *)dweight;
  job.dbias = (void *)dbias;
  axisnorm::backward(job);
}

}  // namespace

NB_MODULE(_native, m) {
  m.def("address", &address, nb::arg("array").noconvert());
  m.def("forward", &forward, nb::call_guard<nb::gil_scoped_release>());
  m.def("backward", &backward, nb::call_guard<nb::gil_scoped_release>());
  m.def("isa", &axisnorm::isa);
  m.def("set_isa", &axisnorm::set_isa);
  m.def("isa_names", &isa_names);
  m.def("isa_error", &axisnorm::isa_error, nb::rv_policy::copy);
  m.def("max_threads", &axisnorm::max_threads);
  m.def("openmp_source", &axisnorm::openmp_source);
  torch_door::add_to(m.ptr());
}
