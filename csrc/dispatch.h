// The C++ interface of the kernels, and which instruction set they use.
#pragma once
#include "norm.h"
#include "plan.h"
#include "threads.h"

namespace axisnorm {

// In bytes, of a storage type.
inline int64_t element_size(int32_t dtype) { return dtype == F64 ? 8 : dtype == F32 ? 4 : 2; }

// All may throw std::bad_alloc, before anything is written.
void forward(const Job &job);
void backward(const Job &job);

// Any plan. The task comes with mask, correction, running statistics and count, the job with
// everything but the sizes of plain rows.
void forward(const Plan &plan, Job job, Task task);
void backward(const Plan &plan, Job job, Task task);

void move(const Running &running);
// Two arrays of n elements each, in double, one after the other.
void widen(int64_t n, int32_t a_dtype, const void *a, int32_t b_dtype, const void *b, double *out);

// The instruction set in use. AXISNORM_ISA names another one at first use; where that is unknown or
// this processor lacks it, isa_error() says so (else null) and the best one is used.
const char *isa();
const char *isa_error();
bool set_isa(const char *name);    // false: not among supported_isas()
const char *const *supported_isas();  // best first, ended by null

// Outputs of at least so many bytes are written past the caches; returns what it was before.
int64_t stream_from(int64_t bytes);
// Tensors of at least so many bytes are read one row after another; returns what it was before.
int64_t read_singly_from(int64_t bytes);

}  // namespace axisnorm
