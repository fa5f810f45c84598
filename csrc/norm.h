// The C contract between the Python module (bind.cpp), the threads (dispatch.cpp) and the
// mathematics (kernels.cpp, compiled once per instruction set). Plain C: nothing here may become
// an inline function with external linkage, or the linker would merge it across instruction sets.
#pragma once
#include <stdint.h>

// The types that tensors are stored in, with those of vec.h; also the order of the dtype lists in Python.
#define EACH_DTYPE(X) X(F32, float) X(F64, double) X(F16, f16) X(BF16, bf16)
#define NAME_OF(name, type) name,
enum Dtype { EACH_DTYPE(NAME_OF) };
#undef NAME_OF

// What follows the affine map; in the order of reference.py, which says what each is.
enum Activation { NO_ACTIVATION = 0, RELU = 1, SILU = 2, GELU = 3 };

// One normalization of `rows` groups of `n` elements. Inside a row all elements are contiguous;
// rows lie `*_stride` elements apart (0 is allowed for inputs: an expanded row).
// The compute type is double for F64 and float otherwise.
//
//   hi + lo = mean(x)        (0 when not centred)        V = sum((x - hi - lo)^2) / divisor
//   rstd    = 1 / sqrt(V + eps), 0 where V + eps = 0
//   xhat    = ((x - hi) - lo) * rstd                     rounded to the type of x if `rounded`
//   z       = xhat * (weight + weight_offset) + bias
//   y       = activation(z)                              one rounding to the type of x
//
// With an activation and a gradient, forward reads the statistics that it saved, and writes
// grad * activation'(z) in place of y. That is the gradient that backward takes, which knows of no
// activation:
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
  int32_t streamed;      // 1: y or dx is written past the caches, where its lines stand well
  int32_t singly;        // 1: one row or group is read after another, and nothing is fetched ahead
  int32_t overlapped;    // 1: what comes next is measured while one is written, and nothing is fetched
  int32_t activation;    // forward
  int32_t alone;         // forward, 1: no backward follows, though statistics are wanted
  double eps;
  double divisor;        // n - correction, > 0
  double weight_offset;
  int64_t rows, n;
  int64_t x_stride, y_stride, grad_stride, dx_stride;
  const void *x;
  const void *weight;    // n elements, or null: ones (then weight_offset is not added)
  const void *bias;      // n elements, or null: zeros
  const void *grad;      // backward, and forward with an activation
  void *y;               // forward; null: statistics only. May be exactly x with the same stride.
  void *stats;           // [3][rows] of the compute type: hi, lo, rstd. forward writes it (null:
                         // not wanted), backward and forward with a gradient read it
  double *var;           // [rows]: V, which may not fit the compute type; null: not wanted
  void *dx;              // backward, null: not wanted
  void *dweight;         // backward, null: not wanted
  void *dbias;           // backward, null: not wanted

  // The norm of a sum. With a residual, forward normalizes h = residual + dropout(x), which is
  // rounded to dtype; backward's x is that h, its dx the gradient of h and of the residual.
  const void *residual;    // forward, null: x is normalized
  void *h;                 // forward, null: not wanted
  const void *grad_h;      // backward: added to dx before it is rounded, null: nothing
  void *dropped_dx;        // backward: the gradient of what is dropped from, null: not wanted
  int64_t residual_stride, h_stride, grad_h_stride, dropped_dx_stride;
  double dropout_p;        // in [0, 1); dropout keeps an element where 32 random bits are at least
                           // p 2^32, and multiplies it by 1 / (1 - p)
  uint64_t seed;           // these bits follow from it and from the element's row and column
};

// Weight and bias as the kernels read them: in the compute type, weight_offset added. Step 1, or 0
// for a parameter that is missing: four vectors of ones or zeros, read again and again.
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

// ---- any other scheme or layout
//
// The axes of the tensor, in the order in which they lie in memory and merged where they can be, are
// loops. The innermost one is contiguous, and decides:
//
//   LINES  It is reduced: a group is a number of lines of `n` contiguous elements.
//   LANES  It is kept: neighbours belong to different groups, and a group steps over the reduced
//          loops. `fold` neighbours may still share a group: GroupNorm in channels_last.
//
// A unit is what is normalized at once: one group of lines, or one tile of lanes. The reduced loops
// of a unit are cut into parts, whose sums are merged in order. Units and parts follow from the
// shape alone.

enum { MAX_LOOPS = 16 };

// Offsets into the tensors, in elements; also the steps of a loop.
enum Array { X, Y, GRAD, DX, MASK, AFFINE, STATS, RUNNING, PIECE, ARRAYS };

struct Loop {
  int64_t size;
  int64_t step[ARRAYS];
};

// The lines (or steps) of one unit, the outermost loop first.
struct Lines {
  int32_t loops;
  struct Loop loop[MAX_LOOPS];
  int64_t count, n;  // so many lines, each of n elements (LINES)
  // Either each line is cut into `split` pieces of `piece` elements, or `per_part` lines are a part.
  int64_t split, piece, per_part, parts;
};

struct Nest {
  int32_t lanes;        // 1: LANES, 0: LINES
  int32_t per_element;  // weight and bias vary along the innermost loop,
  int32_t mixed;        // LANES: and from step to step, too
  int32_t in_order;     // LINES of running statistics, forward: in the order of memory
  int32_t kept_loops;
  struct Loop kept[MAX_LOOPS];  // the outer kept loops
  int64_t outer;                // the product of their sizes
  struct Lines measured;        // what the statistics run over
  struct Lines applied;         // the same elements, cut where weight or mask change
  int64_t width, fold, tile, tiles;      // LANES: neighbours in all, in a group, in a tile
  int64_t units;                         // outer * tiles
  int64_t mask_step;                     // along the innermost loop: 0 or 1
  int64_t stats_step, running_step;      // from one group of a tile, or line in order, to the next
  int64_t group_size, groups;
  int64_t channels;     // of the running statistics
  int64_t affine_size;  // elements of the gathered weight
  int64_t pieces;       // LINES: pieces of lines in all
};

// What the nests read beside the job. The weight and the bias are gathered: in the compute type, one
// element for each index of the affine loops in memory order.
struct Task {
  const struct Job *job;
  const struct Nest *nest;
  const void *weight, *bias;
  double correction;
  const unsigned char *mask;  // null: all elements are valid
  const void *running_mean, *running_var;  // null: statistics of this batch. Else normalize by these
  int32_t running_mean_dtype, running_var_dtype;
  const void *given;  // [3][given_pitch]: hi, lo, rstd of the running statistics, in the compute type
  double *count;  // [groups], null: not wanted. How many elements were valid
  // Backward: the sums of grad * xhat and of grad, null: not wanted. Lines with flat weights have two
  // doubles for each piece of a line, lanes with weights of their own (not mixed) two arrays of doubles
  // for each unit. Otherwise two arrays of `pitch` doubles for each chunk of `chunk` successive units:
  // one for each of the weight's elements, for lanes with flat weights 16.
  void *sums;
  int64_t chunk, pitch;
  // How many bytes of memory a unit needs while it is under way, and where that memory is when all
  // units are under way at once (null: one unit after the other).
  int64_t slot;
  char *slots;
};

// Running statistics after a batch: (1 - momentum) * old + momentum * new, where new is the average over
// the groups of a channel, weighted by their valid elements, with the variance of divisor
// n - running_correction. A channel without a valid element keeps its old values.
struct Running {
  void *mean, *var;
  int32_t mean_dtype, var_dtype;
  int64_t channels, averaged;  // groups = outer * channels * inner, averaged = outer * inner
  int64_t inner;
  const void *stats;        // hi, lo, rstd of the groups, in the compute type
  const double *group_var;  // V
  const double *count;            // of valid elements of each group, or null: group_size
  double group_size, correction, running_correction, momentum;
  int32_t dtype;  // of the normalized tensor
};

// START and FINISH bracket the statistics, SUM and APPLY work on a part, REPAIR does single groups again.
enum Step { START, SUM, FINISH, APPLY, REPAIR };

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

  // The nests: whole units, one after the other in the memory of one,
  void (*forward_units)(const struct Task *, int64_t unit, int64_t unit_end, void *slot);
  void (*backward_units)(const struct Task *, int64_t unit, int64_t unit_end, void *slot);
  // or one step of one part of a unit, all units in memory. FINISH returns 1 where SUM and FINISH are
  // to be taken again; it or START return 2 where REPAIR is needed.
  int (*forward_step)(const struct Task *, int step, int64_t unit, int64_t part);
  int (*backward_step)(const struct Task *, int step, int64_t unit, int64_t part);
  // Bytes of a unit's memory.
  int64_t (*slot)(const struct Nest *);
  // A parameter in the order of loops, in the compute type; order without loops: n as they are.
  void (*gather)(int32_t compute, int32_t dtype, const void *, const struct Lines *order,
                 double offset, void *out);
  // The inverse, of so many elements: adds up what belongs to one. `sums` is as long as the result.
  void (*scatter)(int32_t dtype, const double *, const struct Lines *order, int64_t size,
                  double *sums, void *out);
  // Gathered dweight and dbias.
  void (*merge_affine)(const struct Task *, double *dweight, double *dbias, int64_t begin,
                       int64_t end);
  void (*move)(const struct Running *);
  // Task::given from the running statistics, in so many bytes.
  int64_t (*given_bytes)(const struct Task *);
  void (*give)(const struct Task *, void *given);
};
