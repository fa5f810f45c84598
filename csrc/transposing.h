#pragma once
#include <stdint.h>

namespace axisnorm {

// Copies a tensor into contiguous memory where its innermost axis in memory is not its last one, by tiles:
// torch's copy, which steps over memory, takes up to ten times as long. False, and nothing is written:
// it is not such a tensor. Strides in elements.
bool transpose(const void *from, void *to, int64_t element_size, int axes, const int64_t *sizes,
               const int64_t *strides);

}  // namespace axisnorm
