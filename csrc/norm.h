// The C contract between the Python module (bind.cpp), the threads (dispatch.cpp) and the
// mathematics (kernels.cpp, compiled once per instruction set). Plain C: nothing here may become
// an inline function with external linkage, or the linker would merge it across instruction sets.
#pragma once
#include <stdint.h>

// Also the order of the dtype lists in Python.
enum Dtype { F32 = 0, F64 = 1, F16 = 2, BF16 = 3 };

// One normalization of `rows` groups of `n` elements. Inside a row all elements are contiguous;
// rows lie `*_stride` elements apart (0 is allowed for inputs: an expanded row).
// The compute type is double for F64 and float otherwise.
//
//   hi + lo = mean(x)        (0 when not centred)        V = sum((x - hi - lo)^2) / divisor
//   rstd    = 1 / sqrt(V + eps), 0 where V + eps = 0
//   xhat    = ((x - hi) - lo) * rstd                     rounded to the type of x if `rounded`
//   y       = xhat * (weight + weight_offset) + bias     one rounding to the type of x
//
//   gw = grad * (weight + weight_offset)
//   dx = rstd * (gw - mean(gw) [if centred] - xhat * sum(gw * xhat) / divisor)
//   dweight = sum over rows of grad * xhat,  dbias = sum over rows of grad
struct Job {
  int32_t dtype;         // of x, y, grad, dx
  int32_t weight_dtype;  // of weight and dweight: dtype, or any other of the four
  int32_t bias_dtype;    // of bias and dbias
  int32_t center;        // 0: root mean square
  int32_t rounded;       // 1: xhat is rounded to dtype before the affine map
  double eps;
  double divisor;        // n - correction, > 0
  double weight_offset;
  int64_t rows, n;
  int64_t x_stride, y_stride, grad_stride, dx_stride;
  const void *x;
  const void *weight;    // n elements, or null: ones (then weight_offset is not added)
  const void *bias;      // n elements, or null: zeros
  const void *grad;      // backward only
  void *y;               // forward; null: statistics only. May be exactly x with the same stride.
  void *stats;           // [3][rows] of the compute type: hi, lo, rstd. forward writes it (null:
                         // not wanted), backward reads it
  void *var;             // [rows] of the compute type: V; forward only, null: not wanted
  void *dx;              // backward, null: not wanted
  void *dweight;         // backward, null: not wanted
  void *dbias;           // backward, null: not wanted
};

// Weight and bias as the kernels read them: in the compute type, weight_offset added. Step 1, or 0
// for a parameter that is missing: one vector of ones or zeros, read again and again.
struct Affine {
  const void *weight, *bias;
  int64_t weight_step, bias_step;
};

// How backward sums over rows. Each chunk of `chunk_rows` rows has two sums of its own, for dweight
// and dbias, each `pitch` elements of the compute type; they are merged in order. The chunks follow
// from (rows, n) alone, so that the bits do not depend on the number of threads.
struct Chunks {
  int64_t rows, count, pitch;
  void *sums;  // [count][2][pitch], null: neither dweight nor dbias is wanted
};

// One per instruction set. The ranges are disjoint parts that threads may compute independently.
struct Table {
  const char *name;
  // Bytes that `prepare` needs, 0 where weight and bias can be read where they are.
  int64_t (*scratch)(const struct Job *);
  void (*prepare)(const struct Job *, void *scratch, struct Affine *);
  void (*forward)(const struct Job *, const struct Affine *, int64_t row, int64_t row_end);
  void (*backward)(const struct Job *, const struct Affine *, const struct Chunks *,
                   int64_t chunk, int64_t chunk_end);
  // dweight and dbias from the sums of all chunks
  void (*merge)(const struct Job *, const struct Chunks *, int64_t column, int64_t column_end);
};
