// From the axes of a scheme and the strides of the tensors to the loops of norm.h.
#pragma once
#include <memory>

#include "norm.h"

namespace axisnorm {

enum { MAX_AXES = MAX_LOOPS };

// Lines from this length on are cut into parts for threads to share. Rows are not, which is faster
// where each of their elements has a weight; without weights such rows are lines, however many.
constexpr int64_t LONG = 65536;

// The axes of the tensor, or parts of them, in logical order. Strides in elements, 0 where a tensor is
// broadcast.
struct Axis {
  int64_t size;
  bool reduced;  // its elements share a mean
  bool affine;   // weight and bias vary along it
  bool running;  // so do running statistics
  int64_t x, y, grad, dx, mask;
};

struct Problem {
  int axes;
  Axis axis[MAX_AXES];
  bool has_y, has_grad, has_dx, has_mask, has_running;
};

struct Plan {
  bool rows;  // the plain rows of Job, see set_rows
  Nest nest;
  Lines order;  // of the weight; without loops where it is gathered already
  const char *refused;  // why there is no plan, else null
};

// Where `refused` starts with "copy", a copy of x with the strides of y helps. The plans that a thread
// asked for last are kept: making one takes longer than normalizing a few rows.
std::shared_ptr<const Plan> plan_for(const Problem &problem);

// The sizes and steps of plain rows.
void set_rows(const Plan &plan, Job &job);

}  // namespace axisnorm
