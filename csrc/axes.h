// The axes of a scheme as Python's _route.axes packs them: four numbers for each axis or part of one.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "plan.h"

namespace axisnorm {

class PackedAxes {
 public:
  PackedAxes(const void *bytes, size_t size)
      : parts((const Part *)bytes), count((int)(size / sizeof(Part))) {}

  bool fit() const { return count <= MAX_AXES; }
  int64_t rank() const { return count ? parts[count - 1].axis + 1 : 0; }  // of the tensor

  Problem problem() const {
    Problem problem = {};
    problem.axes = count;
    for (int i = 0; i < count; i++) {
      Axis &axis = problem.axis[i];
      axis.size = parts[i].size;
      axis.reduced = parts[i].role & 1;
      axis.affine = parts[i].role & 2;
      axis.running = parts[i].role & 4;
    }
    return problem;
  }

  // Enters the strides of one tensor, one for each of its own axes.
  void set_strides(Problem &problem, const int64_t *strides, int64_t Axis::*member) const {
    for (int i = 0; i < count; i++)
      problem.axis[i].*member = strides[parts[i].axis] * parts[i].inner;
  }

 private:
  struct Part {
    int64_t size, role, axis, inner;
  };
  const Part *parts;
  int count;
};

// What squared deviations are divided by.
inline double divisor(double group_size, double correction) {
  return group_size > correction ? group_size - correction : 1;
}

}  // namespace axisnorm
