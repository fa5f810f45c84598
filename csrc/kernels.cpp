// The mathematics: forward and backward of one normalization, compiled once per instruction set.
//
// Everything is in an anonymous namespace and only C headers are included: an inline function with
// external linkage would exist once per instruction set under one name, and the linker would keep
// any of them, also the one that this processor cannot run. Exported is table_<ISA> alone.
//
// A row's result depends on that row only: however many rows a loop takes at once and whoever calls
// it, each row goes through the same operations in the same order.
#include <stddef.h>

#include "activation.h"
#include "norm.h"
#include "residual.h"
#include "vec.h"

namespace {

template <class T> using Scalar = typename Compute<T>::scalar;
template <class T> using Vector = typename Compute<T>::vector;

template <class A, class B> constexpr bool same = false;
template <class A> constexpr bool same<A, A> = true;

// f(an element of the type that a number stands for)
template <class F> INLINE auto by_type(int32_t dtype, const F &f) {
#define CASE_OF(name, type) case name: return f(type{});
  switch (dtype) { EACH_DTYPE(CASE_OF) }
#undef CASE_OF
  __builtin_unreachable();
}

// A variance below this may have lost digits to underflow of the squares, and a mean below it, of
// which hi and lo keep twice the digits of the type, to denormals.
template <class C> constexpr double tiny = 0x1p-100;
template <> constexpr double tiny<double> = 0x1p-900;

template <class C> constexpr C least_normal = (C)0x1p-126;
template <> constexpr double least_normal<double> = 0x1p-1022;

// Sums run for 16 steps in the compute type before they are merged in something better: the rounding
// errors of a long row stay those of a short one.
constexpr int BLOCK = 16;
// Elements of a block with two sums each: of gradients that share a weight.
template <class T> constexpr int64_t FLAT = 2 * BLOCK * lanes<T>;

inline bool finite(double v) { return v - v == 0; }
inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// ---- statistics of one row

template <class T, int R> struct Moments {
  Scalar<T> hi[R], lo[R], rstd[R];
  double var[R];
  bool redo;  // of one of them, not valid: to be computed by Exact
};

// What elements are read from: memory, or sums of what stands in two places.
template <class P> struct ElementsOf;
template <class T> struct ElementsOf<T *> { typedef T type; };
template <class T> struct ElementsOf<const T *> { typedef T type; };
template <class T, bool Writes> struct ElementsOf<Sums<T, Writes>> { typedef T type; };
template <class P> using Element = typename ElementsOf<P>::type;

// The first one of n elements.
template <class P> INLINE Scalar<Element<P>> first_of(P x, int64_t n) {
  return (n < lanes<Element<P>> ? load(x, n) : load(x))[0];
}

// A value near the mean, exactly the common value if all elements are equal.
constexpr int64_t NEAR = 64;  // elements that it is the mean of
template <class P>
INLINE Vector<Element<P>> sum_near(P x, int64_t m, Scalar<Element<P>> *x0) {
  constexpr int W = lanes<Element<P>>;
  *x0 = first_of(x, m);
  Vector<Element<P>> s[2] = {};
  int64_t i = 0;
  for (; i + 2 * W <= m; i += 2 * W) s[0] += load(x + i) - *x0, s[1] += load(x + i + W) - *x0;
  if (i + W <= m) s[0] += load(x + i) - *x0, i += W;
  if (i < m) s[1] += keep(load(x + i, m - i) - *x0, m - i);
  return s[0] + s[1];
}
template <class P> INLINE Scalar<Element<P>> guess_mean(P x, int64_t n) {
  typedef Scalar<Element<P>> C;
  const int64_t m = smaller(n, NEAR);
  C x0;
  const double s = block_sum(sum_near(x, m, &x0));
  return x0 + (C)(m == NEAR ? s * (1.0 / NEAR) : s / (double)m);
}

// Adds n elements of each of R rows to its totals. beside(i): what else is done meanwhile, for each
// four vectors from i on.
template <class T, bool Center, int R, class P, class Beside>
INLINE void add_sums(const P *x, int64_t n, const Scalar<T> *k, Total<Vector<T>> *total_s,
                     Total<Vector<T>> *total_q, const Beside &beside) {
  constexpr int W = lanes<T>;
  typedef Vector<T> V;
  // Read before the loop: what is done meanwhile may write.
  V shift[R];
  for (int r = 0; r < R; r++) shift[r] = broadcast(k[r]);
  int64_t i = 0;
  do {
    const int64_t end = smaller(n, i + BLOCK * 4 * W);
    // Four sums each hide the latency of the additions.
    V s[R][4] = {}, q[R][4] = {};
    const auto add = [&](int r, int j, V v, int64_t tail) __attribute__((always_inline)) {
      V d = Center ? v - shift[r] : v;
      if (Center && tail) d = keep(d, tail);
      if (Center) s[r][j] += d;
      q[r][j] = fma(d, d, q[r][j]);
    };
    for (; i + 4 * W <= end; i += 4 * W) {
      for (int r = 0; r < R; r++) {
        V v[4];
        load_two(x[r] + i, v);
        load_two(x[r] + i + 2 * W, v + 2);
        for (int j = 0; j < 4; j++) add(r, j, v[j], 0);
      }
      beside(i);
    }
    for (; i + W <= end; i += W)
      for (int r = 0; r < R; r++) add(r, 0, load(x[r] + i), 0);
    if (__builtin_expect(i < end, 1)) {  // in the way of short lines
      for (int r = 0; r < R; r++) add(r, 1, load(x[r] + i, end - i), end - i);
      i = end;
    }
    // Nothing has come to the others, and adding it takes as long as a short line.
    const bool two = __builtin_expect(n < 4 * W, 0);
    const auto merged = [&](const V *v) __attribute__((always_inline)) {
      return two ? v[0] + v[1] : (v[0] + v[1]) + (v[2] + v[3]);
    };
    for (int r = 0; r < R; r++) {
      if (Center) total_s[r].add(merged(s[r]));
      total_q[r].add(merged(q[r]));
    }
  } while (i < n);
}
template <class T, bool Center>
INLINE void add_sums(const T *x, int64_t n, Scalar<T> k, Total<Vector<T>> &s,
                     Total<Vector<T>> &q) {
  add_sums<T, Center, 1>(&x, n, &k, &s, &q, [](int64_t) {});
}

// Whether the sums of n elements show a shift too far from the mean: (s / n)^2 is above the variance, or
// a quarter of it. Also for a NaN.
template <class T, class D> INLINE auto too_far(D s, D q, double n) {
  constexpr double factor = same<Scalar<T>, double> ? 5 : 2;
  return !(factor * s * s <= n * q);
}

// Whether a mean hi + lo is so small that C has not all its digits.
template <class C, class D> INLINE auto is_short(D hi, D lo) {
  const D zero = {};
  return (magnitude(hi + lo) < tiny<C>) & ((hi != zero) | (lo != zero));
}
// Whether the statistics of a group are no use: without all their digits, or not finite, which rstd is
// where the mean is. Or those of as many groups as D has lanes.
template <class C, class D> INLINE auto is_unsafe(D hi, D lo, D rstd) {
  return (rstd < (double)least_normal<C>) | (rstd - rstd != D{}) | is_short<C>(hi, lo);
}

// What the sums of groups are divided by: their valid elements, and those less the correction. Quick:
// multiplied by the reciprocals, taken once for groups of one size.
template <class D, bool Quick = false> struct Sizes {
  D count, free;
  INLINE Sizes(D count, D free)
      : count(Quick ? 1.0 / count : count), free(Quick ? 1.0 / free : free) {}
  static INLINE D divide(D sum, D by) { return Quick ? sum * by : sum / by; }
};

// What follows from the sums around hi, for as many groups as D has lanes, to the same bits: lo, rstd
// and the variance of each; which are out of the range of C. Quick: not to the same bits, but as good
// in floats.
template <class D, bool Quick = false, class C>
INLINE auto settle(const Job &job, D hi, D s, D q, const Sizes<D, Quick> &sizes, C *lo, C *rstd,
                   double *var) {
  const D zero = {};
  const D mean = sizes.divide(s, sizes.count);
  const D squares = q - s * mean;
  const D v = sizes.divide(squares < zero ? zero : squares, sizes.free);
  store_rounded(lo, mean);
  // A group that is constant gives its bias, whatever eps.
  const D root = store_rounded(rstd, reciprocal_root<Quick>(v + job.eps));
  store_rounded(var, v);
  auto redo = (v - v != zero) | ((root < (double)least_normal<C>) & (root >= zero));
  if (job.eps < tiny<C>) redo |= v < tiny<C>;
  if (job.center) redo |= is_short<C>(hi, mean) | ((mean == zero) & (s != zero));
  return redo;
}

template <class T, bool Center, int R, class P, class Beside>
INLINE void add_rows(const P (&x)[R], int64_t n, const Scalar<T> (&k)[R],
                     Total<Vector<T>> (&s)[R], Total<Vector<T>> (&q)[R], const Beside &beside) {
  if (n >= lanes<T>) return add_sums<T, Center, R>(x, n, k, s, q, beside);
  for (int r = 0; r < R; r++) {  // saves a fifth of the time of such a row
    const Vector<T> d = Center ? keep(load(x[r], n) - k[r], n) : load(x[r], n);
    if (Center) s[r].s = fold(d);
    q[r].s = fold(d * d);
  }
}

template <class T> INLINE const T *row_of(const Job &job, int64_t r) {
  return (const T *)job.x + r * job.x_stride;
}

// The rows of a norm, which stand in memory.
template <class T> struct StoredRows {
  const Job &job;
  INLINE const T *operator()(int64_t r) const { return row_of<T>(job, r); }
  INLINE const T *near(int64_t r) const { return row_of<T>(job, r); }
};
// Those of the norm of a sum, which come to stand there as they are read, unless near the mean.
template <class T> struct SummedRows {
  const Job &sum, &job;
  INLINE Sums<T, true> operator()(int64_t r) const { return at<true>(r); }
  INLINE Sums<T, false> near(int64_t r) const { return at<false>(r); }

 private:
  template <bool Writes> INLINE Sums<T, Writes> at(int64_t r) const {
    return {row_of<T>(sum, r), (const T *)sum.residual + r * sum.residual_stride,
            (T *)row_of<T>(job, r)};
  }
};

template <class T, bool Center, int R>
INLINE void guess(const Job &job, int64_t r, Scalar<T> (&hi)[R]) {
  for (int k = 0; k < R; k++) hi[k] = Center ? guess_mean(row_of<T>(job, r + k), job.n) : 0;
}

// Rows whose guess was too far off.
template <class T, int R, class D>
NOINLINE void sum_again(const Job &job, int64_t row, D (&sums)[2], Scalar<T> (&hi)[R]) {
  double s[2][R];
  memcpy(s, sums, sizeof s);
  for (int r = 0; r < R; r++) {
    if (!too_far<T>(s[0][r], s[1][r], (double)job.n)) continue;
    hi[r] += (Scalar<T>)(s[0][r] / (double)job.n);
    Total<Vector<T>> again[2][1] = {};
    add_rows<T, true, 1>({row_of<T>(job, row + r)}, job.n, {hi[r]}, again[0], again[1],
                         [](int64_t) {});
    for (int i = 0; i < 2; i++) s[i][r] = each_value(again[i]);
  }
  memcpy(sums, s, sizeof s);
}

// The moments of rows from their sums around m.hi, a guess of the mean. The variance loses digits by
// cancellation, one bit where the guess is a standard deviation off; beyond that a second pass follows,
// for double, whose sums are no better than its result, beyond half of that. A second pass is enough:
// the 64 elements of the guess belong to the row, so it is never off by more than sqrt(n / 64)
// deviations.
template <class T, bool Center, int R>
INLINE void settle_rows(const Job &job, int64_t r, const Total<Vector<T>> (&s)[R],
                        const Total<Vector<T>> (&q)[R], Moments<T, R> &m) {
  typedef typename Each<R>::type D;
  const double n = (double)job.n;
  D sum = Center ? each_value(s) : D{}, square = each_value(q);
  if (Center && __builtin_expect(any(too_far<T>(sum, square, n)), 0)) {
    D again[2] = {sum, square};
    sum_again<T, R>(job, r, again, m.hi);
    sum = again[0];
    square = again[1];
  }
  m.redo = any(settle<D>(job, as_doubles(m.hi), sum, square, {D{} + n, D{} + job.divisor}, m.lo,
                         m.rstd, m.var));
}

// One row after the other: where they come from memory, two at once would come later.
template <class T, bool Center, int R, class Rows>
INLINE void measure(const Job &job, const Rows &rows, int64_t r, Moments<T, R> &m) {
  Total<Vector<T>> s[R], q[R];
#pragma GCC unroll 1
  for (int k = 0; k < R; k++) {
    Total<Vector<T>> of_row[2][1] = {};
    m.hi[k] = Center ? guess_mean(rows.near(r + k), job.n) : 0;
    add_rows<T, Center, 1>({rows(r + k)}, job.n, {m.hi[k]}, of_row[0], of_row[1], [](int64_t) {});
    s[k] = of_row[0][0];
    q[k] = of_row[1][0];
  }
  settle_rows<T, Center, R>(job, r, s, q, m);
}

// The constants of a row, broadcast.
template <class T> struct Row {
  Vector<T> hi, shift, rstd;
  INLINE void set(Scalar<T> h, Scalar<T> l, Scalar<T> r) {
    hi = broadcast(h);
    shift = broadcast(-l * r);
    rstd = broadcast(r);
  }
};

// ((x - hi) - lo) * rstd. The product lo * rstd is at most 1, so rounding it once for the whole row
// costs no more than rounding the second difference would; x - hi comes first, so that large means
// cancel exactly.
template <class T, bool Center> INLINE Vector<T> standardize(Vector<T> x, const Row<T> &row) {
  return Center ? fma(x - row.hi, row.rstd, row.shift) : x * row.rstd;
}

// dx from gw = grad * weight; mean and slope are minus mean(gw) and minus sum(gw * xhat) / divisor. The
// products of what a group has in common are made once.
template <class T> struct Derivative {
  Vector<T> hi, rstd, mean, by_slope, at_hi;
  INLINE void set(const Row<T> &row, Vector<T> minus_mean, Vector<T> minus_slope) {
    hi = row.hi;
    rstd = row.rstd;
    mean = minus_mean;
    by_slope = rstd * minus_slope;
    at_hi = row.shift * minus_slope;
  }
  template <bool Center> INLINE Vector<T> of(Vector<T> x, Vector<T> gw) const {
    return fma(Center ? x - hi : x, by_slope, Center ? gw + mean + at_hi : gw) * rstd;
  }
};

// ---- the slow path: any finite row, in double

inline double get(const double *p) { return *p; }
inline double get(const float *p) { return *p; }
template <class T> __attribute__((noinline)) double get(const T *p) { return load(p, 1)[0]; }
inline void put(double *p, double v) { *p = v; }
inline void put(float *p, double v) { *p = (float)v; }
template <class T> __attribute__((noinline)) void put(T *p, double v) {
  store(p, broadcast((float)v), 1);
}
template <class T> double round_as(double v) {
  T t;
  put(&t, v);
  return get(&t);
}

inline double power_of_two(int e) {  // -1022 <= e <= 1023
  const uint64_t bits = (uint64_t)(e + 1023) << 52;
  double v;
  memcpy(&v, &bits, sizeof v);
  return v;
}
inline double scale(double v, int e) {  // v * 2^e for any e
  for (; e > 1000; e -= 1000) v *= 0x1p1000;
  for (; e < -1000; e += 1000) v *= 0x1p-1000;
  return v * power_of_two(e);
}
inline int exponent(double v) {  // |v| < 2^exponent; 0 for 0, infinity and NaN
  if (v == 0 || !finite(v)) return 0;
  int shift = 0;
  if (v < 0x1p-1000 && v > -0x1p-1000) v *= 0x1p1000, shift = 1000;
  uint64_t bits;
  memcpy(&bits, &v, sizeof v);
  return (int)(bits >> 52 & 0x7ff) - 1022 - shift;
}

struct Compensated {
  double s = 0, rest = 0;
  void add(double v) {
    const double t = s + v, z = t - s;
    rest += (s - (t - z)) + (v - z);
    s = t;
  }
  double value() const { return finite(s) ? s + rest : s; }
};

// A sum whose result is rounded to C: a sum in double is no better than its result.
template <class C> struct SumFor {
  double s = 0;
  void add(double v) { s += v; }
  double value() const { return s; }
};
template <> struct SumFor<double> : Compensated {};

// A row scaled by 2^-e, so that its squares neither overflow nor underflow. An infinity or a NaN in
// the row leaves it unscaled and gives what the formula gives.
template <class T> struct Exact {
  int e = 0;
  double hi = 0, lo = 0;
  double rstd;      // of the scaled row, without a factor of 2^rstd_e
  int rstd_e = 0;   // 0, or e where eps outgrows the variance beyond all scaling
  double var, plain;  // of the unscaled row: its variance, and rstd is plain * 2^plain_e
  int plain_e;

  Exact(const Job &job, const T *x)
      : Exact(job, (double)job.n, job.divisor, [&](const auto &take) __attribute__((always_inline)) {
          for (int64_t i = 0; i < job.n; i++) take(get(x + i));
        }) {}

  // each(take) calls take(value) for each of the n elements.
  template <class Each> Exact(const Job &job, double n, double divisor, const Each &each) {
    double largest = 0, k = 0;
    bool any = false;
    each([&](double v) {
      if (!any) k = v;
      any = true;
      v = __builtin_fabs(v);
      if (!(v <= largest)) largest = v;
    });
    e = exponent(largest);
    k = scale(k, -e);
    Compensated q;
    if (job.center) {
      Compensated s, t;
      each([&](double v) { s.add(scale(v, -e) - k); });
      hi = k + s.value() / n;
      each([&](double v) {
        const double d = scale(v, -e) - hi;
        t.add(d);
        q.add(d * d);
      });
      lo = t.value() / n;
      var = (q.value() - t.value() * lo) / divisor;
      if (var < 0) var = 0;
    } else {
      each([&](double v) {
        const double d = scale(v, -e);
        q.add(d * d);
      });
      var = q.value() / divisor;
    }
    const double scaled_eps = scale(job.eps, -2 * e);
    // Either eps is so large beside the variance that it stands alone, or the row is constant and so
    // large that eps has underflowed.
    if (scaled_eps > 0x1p900 || var + scaled_eps == 0) {
      rstd = plain = reciprocal_root(job.eps);
      rstd_e = e;
      plain_e = 0;
    } else {
      rstd = plain = reciprocal_root(var + scaled_eps);
      plain_e = -e;
    }
    var = scale(var, 2 * e);
  }

  double standardized(double x) const {
    const double d = ((scale(x, -e) - hi) - lo) * rstd;
    return rstd_e ? scale(d, rstd_e) : d;
  }

  void save(Scalar<T> *high, Scalar<T> *low, Scalar<T> *root) const {
    typedef Scalar<T> C;
    const double mean = scale(hi, e);
    *high = (C)mean;
    *low = (C)((mean - (double)*high) + scale(lo, e));
    // Not both zero unless the mean is: then backward sees that it has to redo the row, too.
    if (*high == 0 && *low == 0 && (hi != 0 || lo != 0))
      *low = same<C, float> ? (C)0x1p-149 : (C)0x1p-1074;
    *root = (C)scale(plain, plain_e);
  }
};

template <class T>
__attribute__((noinline)) void forward_exact(const Job &job, const Affine &affine, int64_t r,
                                             Moments<T, 1> &m) {
  const T *x = (const T *)job.x + r * job.x_stride;
  const Exact<T> exact(job, x);
  exact.save(m.hi, m.lo, m.rstd);
  m.var[0] = exact.var;
  if (!job.y) return;
  T *y = (T *)job.y + r * job.y_stride;
  const T *grad = job.grad ? (const T *)job.grad + r * job.grad_stride : nullptr;
  const Scalar<T> *w = (const Scalar<T> *)affine.weight, *b = (const Scalar<T> *)affine.bias;
  for (int64_t i = 0; i < job.n; i++) {
    double v = exact.standardized(get(x + i));
    if (job.rounded) v = round_as<T>(v);
    v = v * (double)w[i * affine.weight_step] + (double)b[i * affine.bias_step];
    put(y + i, finished(job, v, grad ? get(grad + i) : 0));
  }
}

// ---- forward

template <class T> INLINE void prefetch(const T *p, int64_t i) {
  if (i % (64 / (int)sizeof(T)) == 0) __builtin_prefetch(p + i);
}

// Writes R rows, which share the loads of weight and bias.
template <class T, bool Center, bool Rounded, int R> struct Writer {
  typedef Vector<T> V;
  typedef Scalar<T> C;
  static constexpr int W = lanes<T>;
  const C *const w, *const b;
  const int64_t n, w_mask, b_mask;
  const T *x[R];
  T *y[R];
  Row<T> row[R];
  INLINE Writer(const Job &job, const Affine &affine, int64_t r, const Moments<T, R> &m)
      : w((const C *)affine.weight), b((const C *)affine.bias), n(job.n),
        w_mask(-affine.weight_step), b_mask(-affine.bias_step) {
    for (int k = 0; k < R; k++) {
      x[k] = row_of<T>(job, r + k);
      y[k] = (T *)job.y + (r + k) * job.y_stride;
      row[k].set(m.hi[k], m.lo[k], m.rstd[k]);
    }
  }
  INLINE V value(V x, const Row<T> &row, V weight, V bias) const {
    V v = standardize<T, Center>(x, row);
    if (Rounded) v = round_as<T>(v);
    return fma(v, weight, bias);
  }
  INLINE void four(int64_t i) const {
    const C *const weights = w + (i & w_mask), *const biases = b + (i & b_mask);
    for (int j = 0; j < 4 * W; j += W) {
      const V weight = load(weights + j), bias = load(biases + j);
      for (int k = 0; k < R; k++)
        store(y[k] + i + j, value(load(x[k] + i + j), row[k], weight, bias));
    }
  }
  INLINE void part(int64_t i, int64_t count) const {
    const V weight = load(w + (i & w_mask), count), bias = load(b + (i & b_mask), count);
    for (int k = 0; k < R; k++)
      store(y[k] + i, value(load(x[k] + i, count), row[k], weight, bias), count);
  }
  INLINE void rest(int64_t i, int64_t ahead, bool streamed) const {
    for (; i + W <= n; i += W) {
      const V weight = load(w + (i & w_mask)), bias = load(b + (i & b_mask));
      for (int k = 0; k < R; k++) {
        if (ahead) prefetch(x[k] + ahead, i);
        write(y[k] + i, value(load(x[k] + i), row[k], weight, bias), streamed);
      }
    }
    if (i < n) part(i, n - i);
  }
};
// Whether whole vectors of each row are written within lines of the caches, or rows are so short that it
// matters less than what two of them share.
template <class T> INLINE bool begin_lines(const T *rows, int64_t stride, int64_t n) {
  return n < 32 * lanes<T> || (!head_of(rows, n) && !head_of(rows + stride, n));
}
// Whether what follows the head of a row is written past the caches. Vectors of halves fill half a line: only
// every other row could be, which took up to half as long again.
template <class T> INLINE bool streams(const Job &job, const T *out, int64_t head) {
  return job.streamed && (!head || lanes<T> * (int)sizeof(T) == VB) && can_stream(out + head);
}
// A row that does not begin a line. Two such rows begin at different weights.
template <class T, bool Center, bool Rounded>
NOINLINE void apply_one(const Job &job, const Affine &affine, int64_t r, const Moments<T, 1> &m) {
  const Writer<T, Center, Rounded, 1> writer(job, affine, r, m);
  const int64_t head = head_of(writer.y[0], job.n);
  if (head) writer.part(0, head);
  writer.rest(head, job.singly ? 0 : job.x_stride, streams(job, writer.y[0], head));
}
// Not inline: its loop needs all general registers. While these rows are written, the next ones are
// fetched: up to a fifth faster where x is in no cache. The address may lie behind the last row, which a
// prefetch may.
template <class T, bool Center, bool Rounded, int R>
NOINLINE void apply(const Job &job, const Affine &affine, int64_t r, const Moments<T, R> &m) {
  if (!begin_lines((const T *)job.y + r * job.y_stride, R > 1 ? job.y_stride : 0, job.n)) {
    for (int k = 0; k < R; k++)
      apply_one<T, Center, Rounded>(job, affine, r + k, {{m.hi[k]}, {m.lo[k]}, {m.rstd[k]}, {}, false});
    return;
  }
  const Writer<T, Center, Rounded, R> writer(job, affine, r, m);
  bool streamed = true;
  for (int k = 0; k < R; k++) streamed &= streams(job, writer.y[k], 0);
  writer.rest(0, job.singly ? 0 : R * job.x_stride, streamed);
}
// The same, and the moments of the next rows: the one waits for memory, the other computes. m.hi is
// a guess for those behind then, if there are more.
template <class T, bool Center, bool Rounded, int R>
NOINLINE void apply_and_measure(const Job &job, const Affine &affine, int64_t r, Moments<T, R> &m,
                                Moments<T, R> &next, bool more) {
  const Writer<T, Center, Rounded, R> writer(job, affine, r, m);
  const T *x[R];
  for (int k = 0; k < R; k++) x[k] = row_of<T>(job, r + R + k);
  Total<Vector<T>> s[R] = {}, q[R] = {};
  add_rows<T, Center, R>(x, job.n, next.hi, s, q, [&](int64_t i) __attribute__((always_inline)) {
    writer.four(i);
  });
  if (more) guess<T, Center, R>(job, r + 2 * R, m.hi);
  settle_rows<T, Center, R>(job, r + R, s, q, next);
  writer.rest(job.n & -4 * lanes<T>, 0, false);
}

template <class T, int R> INLINE void save(const Job &job, int64_t r, const Moments<T, R> &m) {
  for (int k = 0; job.stats && k < R; k++) {
    Scalar<T> *stats = (Scalar<T> *)job.stats + r + k;
    stats[0] = m.hi[k];
    stats[job.rows] = m.lo[k];
    stats[2 * job.rows] = m.rstd[k];
  }
  for (int k = 0; job.var && k < R; k++) job.var[r + k] = m.var[k];
}

// R rows whose moments are known.
template <class T, bool Center, bool Rounded, int R>
INLINE void finish_block(const Job &job, const Affine &affine, int64_t r, Moments<T, R> &m);
template <class T, bool Center, bool Rounded, int R, class Rows>
NOINLINE void forward_block(const Job &job, const Rows &rows, const Affine &affine, int64_t r) {
  Moments<T, R> m;
  measure<T, Center, R>(job, rows, r, m);
  finish_block<T, Center, Rounded, R>(job, affine, r, m);
}
template <class T, bool Center, bool Rounded, int R>
INLINE void finish_block(const Job &job, const Affine &affine, int64_t r, Moments<T, R> &m) {
  if constexpr (R > 1) {
    if (__builtin_expect(m.redo, 0)) {
      for (int k = 0; k < R; k++)
        forward_block<T, Center, Rounded, 1>(job, StoredRows<T>{job}, affine, r + k);
      return;
    }
  } else if (m.redo) {
    forward_exact<T>(job, affine, r, m);
  }
  if (job.y && !m.redo) apply<T, Center, Rounded, R>(job, affine, r, m);
  save(job, r, m);
}

// Blocks of R rows; the moments of the next one are taken while one is written. To the first row that
// is left.
template <class T, bool Center, bool Rounded, int R>
int64_t forward_overlapped(const Job &job, const Affine &affine, int64_t r, int64_t end) {
  const int64_t last = end - (end - r) % R - R;
  Moments<T, R> of[2];  // this block and the next one: to copy them would be to wait for them
  bool known = false;
  for (int now = 0; r <= last; r += R, now = !now) {
    Moments<T, R> &m = of[now], &next = of[!now];
    if (!known) {
      measure<T, Center, R>(job, StoredRows<T>{job}, r, m);
      if (r < last) guess<T, Center, R>(job, r + R, next.hi);
    }
    known = r < last && !m.redo;
    if (known) {
      save(job, r, m);
      apply_and_measure<T, Center, Rounded, R>(job, affine, r, m, next, r + R < last);
    } else {
      finish_block<T, Center, Rounded, R>(job, affine, r, m);
    }
  }
  return r;
}
template <class T, bool Center, bool Rounded, class Rows>
void forward_blocks(const Job &job, const Rows &rows, const Affine &affine, int64_t r, int64_t end) {
  constexpr int R = 2;
  for (; r + R <= end && !job.singly; r += R)
    forward_block<T, Center, Rounded, R>(job, rows, affine, r);
  for (; r < end; r++) forward_block<T, Center, Rounded, 1>(job, rows, affine, r);
}
template <class T, bool Center, bool Rounded>
void forward_rows(const Job &job, const Affine &affine, int64_t r, int64_t end) {
  if (job.overlapped && begin_lines((const T *)job.y, job.y_stride, job.n))
    r = forward_overlapped<T, Center, Rounded, 2>(job, affine, r, end);
  forward_blocks<T, Center, Rounded>(job, StoredRows<T>{job}, affine, r, end);
}

template <class T, bool Center, bool Rounded>
void forward_activated(const Job &job, const Affine &affine, int64_t r, int64_t end);

// The norm of a sum. The rows of h come to stand where they are to be, or in place of y: as their moments
// are taken, or where that takes longer, two at a time before.
template <class T, bool Center, bool Rounded>
void forward_sums(const Job &job, const Affine &affine, int64_t r, int64_t end) {
  constexpr int R = 2;
  Job norm = job;
  norm.singly = norm.overlapped = 0;      // once made, they are in the cache
  norm.streamed = job.streamed && job.h;  // in place of h, y is in the cache
  norm.x = job.h ? job.h : job.y;
  norm.x_stride = job.h ? job.h_stride : job.y_stride;
  const bool plain = !(job.dropout_p > 0) && !job.activation;
  if (plain && begin_lines((const T *)norm.x, norm.x_stride, job.n))
    return forward_blocks<T, Center, Rounded>(norm, SummedRows<T>{job, norm}, affine, r, end);
  const Dropout dropout(job);
  for (; r < end; r += R) {
    const int64_t stop = smaller(end, r + R);
    for (int64_t k = r; k < stop; k++)
      add_row(job, job.dropout_p > 0 ? &dropout : nullptr, k, (T *)norm.x + k * norm.x_stride);
    if (job.activation) forward_activated<T, Center, Rounded>(norm, affine, r, stop);
    else forward_rows<T, Center, Rounded>(norm, affine, r, stop);
  }
}

// ---- backward

enum Wanted { NOTHING, WEIGHT, WEIGHT_AND_BIAS };  // of the sums over rows

template <class T> struct RowSums { Scalar<T> *weight, *bias; };

template <class T>
void store_gradient(const Job &job, const Dropout &dropout, int64_t r, int64_t i, double v) {
  if (job.grad_h) v += get((const T *)job.grad_h + r * job.grad_h_stride + i);
  if (job.dx) put((T *)job.dx + r * job.dx_stride + i, v);
  if (job.dropped_dx)
    put((T *)job.dropped_dx + r * job.dropped_dx_stride + i, dropout.apply(r, i, v));
}

template <class T>
__attribute__((noinline)) void backward_exact(const Job &job, const Affine &affine,
                                              const RowSums<T> &sums, int64_t r, bool dx_only) {
  const int64_t n = job.n;
  const T *x = (const T *)job.x + r * job.x_stride, *g = (const T *)job.grad + r * job.grad_stride;
  const Scalar<T> *w = (const Scalar<T> *)affine.weight;
  const Exact<T> exact(job, x);
  for (int64_t i = 0; i < n && !dx_only; i++) {
    double v = exact.standardized(get(x + i));
    if (job.rounded) v = round_as<T>(v);
    if (sums.weight) sums.weight[i] += (Scalar<T>)(get(g + i) * v);
    if (sums.bias) sums.bias[i] += (Scalar<T>)get(g + i);
  }
  if (!job.dx && !job.dropped_dx) return;
  double largest_g = 0, largest_w = 0;
  for (int64_t i = 0; i < n; i++) {
    const double a = __builtin_fabs(get(g + i));
    const double b = __builtin_fabs((double)w[i * affine.weight_step]);
    if (!(a <= largest_g)) largest_g = a;
    if (!(b <= largest_w)) largest_w = b;
    if (!finite(a) || !finite(b)) break;
  }
  const int eg = exponent(largest_g), ew = exponent(largest_w);
  Compensated s1, s2;
  const double first = scale(get(g), -eg) * scale((double)w[0], -ew);  // as in backward_block
  for (int64_t i = 0; i < n; i++) {
    const double gw = scale(get(g + i), -eg) * scale((double)w[i * affine.weight_step], -ew);
    s1.add(gw - first);
    s2.add(gw * exact.standardized(get(x + i)));
  }
  const double m1 = job.center ? first + s1.value() / (double)n : 0;
  const double m2 = s2.value() / job.divisor;
  const Dropout dropout(job);
  for (int64_t i = 0; i < n; i++) {
    const double gw = scale(get(g + i), -eg) * scale((double)w[i * affine.weight_step], -ew);
    const double v = exact.plain * ((gw - m1) - exact.standardized(get(x + i)) * m2);
    store_gradient<T>(job, dropout, r, i, scale(v, eg + ew + exact.plain_e));
  }
}

// The second sweep over a row of a sum, where more than dx is wanted.
template <class T, bool Center>
__attribute__((noinline)) void derivative_of_sum(const Job &job, const Affine &affine, int64_t r,
                                                 const Derivative<T> &derivative) {
  const int64_t w_mask = -affine.weight_step;
  const T *x = (const T *)job.x + r * job.x_stride, *g = (const T *)job.grad + r * job.grad_stride;
  const Scalar<T> *w = (const Scalar<T> *)affine.weight;
  store_gradients<T>(job, r, [&](int64_t i, int64_t k) __attribute__((always_inline)) {
    return derivative.template of<Center>(load_part(x + i, k),
                                          load_part(g + i, k) * load_part(w + (i & w_mask), k));
  });
}

// R rows at once share the loads of the weight and the loads and stores of the sums over rows.
// First sweep: all sums. Second sweep: dx.
template <class T, bool Center, bool Rounded, Wanted P, int R>
INLINE void backward_block(const Job &job, const Affine &affine, const RowSums<T> &over_rows,
                           int64_t r) {
  constexpr int W = lanes<T>;
  typedef Vector<T> V;
  const int64_t n = job.n, w_mask = -affine.weight_step;
  const Scalar<T> *stats = (const Scalar<T> *)job.stats + r;
  const T *x[R], *g[R];
  Row<T> row[R];
  const Scalar<T> *w = (const Scalar<T> *)affine.weight;
  Scalar<T> first[R];  // of grad * weight: the shift that makes the mean of equal ones exact
  for (int k = 0; k < R; k++) {
    x[k] = (const T *)job.x + (r + k) * job.x_stride;
    g[k] = (const T *)job.grad + (r + k) * job.grad_stride;
    row[k].set(stats[k], stats[job.rows + k], stats[2 * job.rows + k]);
    first[k] = (Scalar<T>)get(g[k]) * w[0];
  }

  Scalar<T> *const dw = over_rows.weight, *const db = over_rows.bias;
  Total<V> total1[R] = {}, total2[R] = {};
  const auto step = [&](int64_t i, int64_t tail, V *s1, V *s2) __attribute__((always_inline)) {
    const V weight = tail ? load(w + (i & w_mask), tail) : load(w + (i & w_mask));
    V by_weight = {}, by_bias = {};
    for (int k = 0; k < R; k++) {
      const V grad = tail ? load(g[k] + i, tail) : load(g[k] + i);
      V v = standardize<T, Center>(tail ? load(x[k] + i, tail) : load(x[k] + i), row[k]);
      if (tail) v = keep(v, tail);  // 0 * infinity, where hi * rstd overflows
      const V gw = grad * weight;
      if (Center) s1[k] += tail ? keep(gw - first[k], tail) : gw - first[k];
      s2[k] = fma(v, gw, s2[k]);
      if (P != NOTHING) {
        if (Rounded) v = round_as<T>(v);
        by_weight = k == 0 ? grad * v : fma(grad, v, by_weight);
      }
      if (P == WEIGHT_AND_BIAS) by_bias = k == 0 ? grad : by_bias + grad;
    }
    if (P != NOTHING) store(dw + i, load(dw + i) + by_weight);
    if (P == WEIGHT_AND_BIAS) store(db + i, load(db + i) + by_bias);
  };
  // Without weight and bias in the order of flat_sums: such rows may be lines in another batch.
  const bool flat = P == NOTHING && !job.weight && !job.bias;
  int64_t i = 0;
  do {
    const int64_t end = smaller(n, i + (flat ? FLAT<T> : BLOCK * W));
    V s1[2][R] = {}, s2[2][R] = {};
    for (; flat && i + 2 * W <= end; i += 2 * W)
      step(i, 0, s1[0], s2[0]), step(i + W, 0, s1[1], s2[1]);
    for (; i + W <= end; i += W) step(i, 0, s1[0], s2[0]);
    if (i < end) {
      step(i, end - i, s1[flat], s2[flat]);
      i = end;
    }
    for (int k = 0; k < R; k++) {
      if (flat && n <= FLAT<T>) {
        if (Center) total1[k].add_only(s1[0][k] + s1[1][k]);
        total2[k].add_only(s2[0][k] + s2[1][k]);
      } else {
        if (Center) total1[k].add(s1[0][k] + s1[1][k]);
        total2[k].add(s2[0][k] + s2[1][k]);
      }
    }
  } while (i < n);
  if (!job.dx && !job.dropped_dx) return;

  T *dx[R];
  Derivative<T> of_row[R];
  bool redo[R];
  for (int k = 0; k < R; k++) {
    const Scalar<T> m1 =
        Center ? (Scalar<T>)((double)first[k] + total1[k].value() / (double)n) : Scalar<T>(0);
    const Scalar<T> m2 = (Scalar<T>)(total2[k].value() / job.divisor);
    of_row[k].set(row[k], broadcast(-m1), broadcast(-m2));
    redo[k] = !finite(m1) || !finite(of_row[k].by_slope[0]);
    dx[k] = (T *)job.dx + (r + k) * job.dx_stride;
  }
  const auto derivative = [&](V grad, V v, V weight, int k) __attribute__((always_inline)) {
    return of_row[k].template of<Center>(v, grad * weight);
  };
  if (job.grad_h || job.dropped_dx) {
    for (int k = 0; k < R; k++) derivative_of_sum<T, Center>(job, affine, r + k, of_row[k]);
    i = n;
  } else {
    i = 0;
  }
  const auto write_part = [&](int k, int64_t at, int64_t count, V weight) __attribute__((always_inline)) {
    store(dx[k] + at, derivative(load(g[k] + at, count), load(x[k] + at, count), weight, k), count);
  };
  const auto write_rows = [&](int64_t head, int begin, int end) __attribute__((always_inline)) {
    bool streamed = true;
    for (int k = begin; k < end; k++) streamed &= streams(job, dx[k], head);
    int64_t at = head;
    for (; at + W <= n; at += W) {
      const V weight = load(w + (at & w_mask));
      for (int k = begin; k < end; k++)
        write(dx[k] + at, derivative(load(g[k] + at), load(x[k] + at), weight, k), streamed);
    }
    if (at == n) return;
    const V weight = load(w + (at & w_mask), n - at);
    for (int k = begin; k < end; k++) write_part(k, at, n - at, weight);
  };
  if (i < n && !begin_lines(dx[0], R > 1 ? job.dx_stride : 0, n)) {
    for (int k = 0; k < R; k++) {
      const int64_t head = head_of(dx[k], n);
      if (head) write_part(k, 0, head, load(w, head));
      write_rows(head, k, k + 1);
    }
  } else if (i < n) {
    write_rows(0, 0, R);
  }
  for (int k = 0; k < R; k++)
    if (__builtin_expect(redo[k], 0))
      backward_exact<T>(job, affine, over_rows, r + k, true);
}

// Whether the saved statistics of row r have all their digits. Otherwise it is redone from x.
template <class T> inline bool stats_are_safe(const Job &job, int64_t r) {
  const Scalar<T> *stats = (const Scalar<T> *)job.stats + r;
  return !is_unsafe<Scalar<T>, double>(stats[0], stats[job.rows], stats[2 * job.rows]);
}

template <class T, bool Center, bool Rounded, Wanted P>
void backward_chunks(const Job &job, const Affine &affine, const Chunks &chunks, int64_t c,
                     int64_t c_end) {
  constexpr int R = 2;  // 4 are no faster in the L1 cache and a fifth slower outside L2
  for (; c < c_end; c++) {
    RowSums<T> sums = {};
    if (P != NOTHING) {
      sums.weight = (Scalar<T> *)chunks.sums + 2 * c * chunks.pitch;
      if (P == WEIGHT_AND_BIAS) sums.bias = sums.weight + chunks.pitch;
      memset(sums.weight, 0, (P == WEIGHT ? 1 : 2) * (size_t)chunks.pitch * sizeof(Scalar<T>));
    }
    int64_t r = c * chunks.rows;
    const int64_t end = smaller(job.rows, r + chunks.rows);
    while (r < end) {
      const int count = end - r >= R && !job.singly ? R : 1;
      bool safe = true;
      for (int k = 0; k < count; k++) safe &= stats_are_safe<T>(job, r + k);
      if (safe && count == R) {
        backward_block<T, Center, Rounded, P, R>(job, affine, sums, r);
      } else {
        for (int k = 0; k < count; k++)
          if (stats_are_safe<T>(job, r + k))
            backward_block<T, Center, Rounded, P, 1>(job, affine, sums, r + k);
          else
            backward_exact<T>(job, affine, sums, r + k, false);
      }
      r += count;
    }
  }
}

}  // namespace

#include "nest.h"
#include "lines.h"
#include "lanes.h"

namespace {

// Rows with an activation.
template <class T, bool Center, bool Rounded>
void forward_activated(const Job &job, const Affine &affine, int64_t r, int64_t end) {
  typedef Scalar<T> C;
  // Where only one of weight and bias is there, the other one is as long.
  const bool per_element = affine.weight_step || affine.bias_step;
  C missing[STAGED];
  if (affine.weight_step != affine.bias_step)
    for (int64_t i = 0; i < smaller(STAGED, job.n); i++) missing[i] = affine.weight_step ? 0 : 1;
  const auto parameter = [&](const void *p, int64_t step, int64_t i) {
    return step || !per_element ? (const C *)p + i * step : missing;
  };
  const int64_t ahead = job.singly ? 0 : job.x_stride;
  for (; r < end; r++) {
    Moments<T, 1> m;
    if (job.grad) {
      const C *stats = (const C *)job.stats + r;
      m.hi[0] = stats[0], m.lo[0] = stats[job.rows], m.rstd[0] = stats[2 * job.rows];
      m.redo = !stats_are_safe<T>(job, r);
    } else {
      measure<T, Center, 1>(job, StoredRows<T>{job}, r, m);
    }
    if (m.redo) {
      forward_exact<T>(job, affine, r, m);
    } else {
      const T *x = (const T *)job.x + r * job.x_stride;
      const T *grad = job.grad ? (const T *)job.grad + r * job.grad_stride : nullptr;
      T *y = (T *)job.y + r * job.y_stride;
      const C shift = -m.lo[0] * m.rstd[0];
      const Constants<C> constants = {m.hi, &shift, m.rstd};
      each_strip(job, grad, y, job.n, [&](int64_t i, int64_t n, C *z) {
        const C *w = parameter(affine.weight, affine.weight_step, i);
        const C *b = parameter(affine.bias, affine.bias_step, i);
        if (per_element)
          apply_line<T, false, true>(x + i, z, n, constants, false, Rounded, w, b, ahead, false);
        else
          apply_line<T, false, false>(x + i, z, n, constants, false, Rounded, w, b, ahead, false);
      });
    }
    if (!job.grad) save(job, r, m);
  }
}

// ---- the nests: whole units, or steps of them

// body(units, those that come next), for up to `most` units at a time. Without `looks` none come next.
template <class Of, class Body>
INLINE void each_batch(const Of &of, int64_t unit, int64_t end, int most, bool looks,
                       const Body &body) {
  Units<Of::TOGETHER> batch[2];
  const auto take = [&](Units<Of::TOGETHER> &units, int64_t first) {
    units.first = first;
    units.count = (int)smaller(most, end - first);
    if (units.count) of.places(first, units.count, units.at);
  };
  batch[1].count = 0;
  int b = 0;
  for (take(batch[b], unit); batch[b].count;) {
    const int64_t behind = batch[b].first + batch[b].count;
    if (looks) take(batch[!b], behind);
    body(batch[b], batch[!b]);
    if (looks) b = !b;
    else take(batch[b], behind);
  }
}
// From x of these units to that of the next ones, which is to be fetched meanwhile; 0: nothing is.
template <int N> int64_t distance(bool fetches, const Units<N> &units, const Units<N> &next) {
  return fetches && next.count ? next.at[0].at[X] - units.at[0].at[X] : 0;
}

template <class Of> void forward_all(const Task &task, int64_t unit, int64_t end, void *slot) {
  const Of of{task};
  if (task.nest->in_order) return of.forward_in_order(unit, end);
  const int64_t parts = task.nest->measured.parts;
  const bool known = knows_statistics(task), fetches = !known && of.fetches();
  const auto one = [&](const Place &at, int64_t unit, int64_t ahead) {
    auto &u = of.unit_in(slot, unit);
    u.ahead = ahead;
    const auto measure = [&] {
      for (int64_t p = 0; p < parts && !known; p++) of.sum(at, u, p);
    };
    of.start(at, u);
    measure();
    while (!known && of.finish(at, u) == 1) measure();
    // Backwards: what was read last is near.
    for (int64_t p = task.nest->applied.parts; p-- > 0;) of.apply(at, u, p);
    if (u.repair) of.repair(at, u);
  };
  typename Of::Guesses guesses = {};
  each_batch(of, unit, end, of.together(), !known, [&](const auto &units, const auto &next) {
    const int64_t ahead = distance(fetches, units, next);
    if (of.forward_together(units, next, ahead, guesses)) return;
    for (int k = 0; k < units.count; k++) one(units.at[k], units.first + k, ahead);
  });
}
template <class Of> void backward_all(const Task &task, int64_t unit, int64_t end, void *slot) {
  const Of of{task};
  const int64_t parts = task.nest->applied.parts;
  // x and the gradient have the same strides in most cases; where not, nothing is lost.
  const bool fetches = !task.running_mean && of.fetches();
  const auto one = [&](const Place &at, int64_t unit, int64_t ahead) {
    auto &u = of.unit_in(slot, unit);
    u.ahead = ahead;
    of.start_backward(at, u);
    for (int64_t p = 0; p < parts && (task.sums || !task.running_mean); p++)
      of.sum_backward(at, u, p, unit);
    of.finish_backward(at, u, unit);
    for (int64_t p = parts; p-- > 0;) of.apply_backward(at, u, p);
    if (u.repair) of.repair_backward(at, u);
  };
  each_batch(of, unit, end, of.together(), fetches, [&](const auto &units, const auto &next) {
    const int64_t ahead = distance(fetches, units, next);
    if (of.backward_together(units.at, units.count, ahead)) return;
    for (int k = 0; k < units.count; k++) one(units.at[k], units.first + k, ahead);
  });
}

template <class Of> int forward_one(const Task &task, int step, int64_t unit, int64_t part) {
  const Of of{task};
  void *slot = task.slots + unit * task.slot;
  const Place at = of.place(unit);
  auto &u = step == START ? of.unit_in(slot, unit) : Of::unit_again(slot);
  switch (step) {
    case START: of.start(at, u); return u.repair ? 2 : 0;
    case SUM: of.sum(at, u, part); return 0;
    case FINISH: return of.finish(at, u);
    case APPLY: of.apply(at, u, part); return 0;
    default: if (u.repair) of.repair(at, u); return 0;
  }
}
template <class Of> int backward_one(const Task &task, int step, int64_t unit, int64_t part) {
  const Of of{task};
  void *slot = task.slots + unit * task.slot;
  const Place at = of.place(unit);
  auto &u = step == START ? of.unit_in(slot, unit) : Of::unit_again(slot);
  switch (step) {
    case START: of.start_backward(at, u); return 0;
    case SUM: of.sum_backward(at, u, part, unit); return 0;
    case FINISH: return of.finish_backward(at, u, unit);
    case APPLY: of.apply_backward(at, u, part); return 0;
    default: if (u.repair) of.repair_backward(at, u); return 0;
  }
}

int64_t slot(const Nest *nest) {
  return nest->lanes ? lane_slot(*nest) : line_slot(*nest);
}

// Sums of large terms may overflow on the way though they cancel in the end. Where one for an element
// of the weight is not finite, it is taken again, in double and scaled. By xhat: of grad * xhat, else
// of grad.
template <class T>
NOINLINE double sum_again(const Task &task, int64_t a, bool by_xhat) {
  typedef Scalar<T> C;
  const Nest &nest = *task.nest;
  const Job &job = *task.job;
  Compensated sum;
  for (int64_t unit = 0; unit < nest.units; unit++) {
    const Place at = nest.lanes ? OfLanes<T>{task}.place(unit) : OfLines<T>{task}.place(unit);
    const int64_t begin = unit % nest.tiles * nest.tile;
    const int64_t n = nest.lanes ? smaller(nest.tile, nest.width - begin) : nest.applied.n;
    const int64_t fold = nest.lanes ? nest.fold : n;  // elements of a line that share a group
    // xhat(x) of a group, by what normalizes it.
    const auto each_in_group = [&](int64_t group, const auto &each) {
      if (!by_xhat) return each([](double) { return 1.0; });
      const auto rounded = [&](double v) { return job.rounded ? round_as<T>(v) : v; };
      if (task.running_mean) {
        const Given given(task, at.at[RUNNING] + group * nest.running_step);
        return each([&](double v) { return rounded(given.standardized(v)); });
      }
      const C *stats = (const C *)job.stats + at.at[STATS] + group * nest.stats_step;
      const double hi = stats[0], lo = stats[nest.groups], rstd = stats[2 * nest.groups];
      if (!is_unsafe<C>(hi, lo, rstd))
        return each([&](double v) { return rounded(((v - hi) - lo) * rstd); });
      double count = 0;
      each_valid(task, at, group * fold, fold, [&](const Place &, int64_t) { count++; });
      const Exact<T> exact = exact_group<T>(task, at, group * fold, fold, count);
      each([&](double v) { return rounded(exact.standardized(v)); });
    };
    for (int64_t first = 0; first < n; first += fold) {
      const int64_t lane = a - at.at[AFFINE];
      if (nest.lanes && nest.per_element && !nest.mixed && (lane < first || lane >= first + fold))
        continue;
      each_in_group(first / fold, [&](const auto &xhat) {
        each_line(nest.applied, at, 0, nest.applied.count, [&](const Place &p, int64_t) {
          // The weight is that of one element of the line, or of all of them.
          const int64_t own = a - p.at[AFFINE];
          if (!nest.per_element && own != 0) return;
          int64_t i = first, end = first + fold;
          if (nest.per_element) {
            if (own < i || own >= end) return;
            i = own, end = own + 1;
          }
          for (; i < end; i++) {
            if (task.mask && !task.mask[p.at[MASK] + i * nest.mask_step]) continue;
            const double v = get((const T *)job.x + p.at[X] + i);
            sum.add(0x1p-64 * get((const T *)job.grad + p.at[GRAD] + i) * xhat(v));
          }
        });
      });
    }
  }
  return 0x1p64 * sum.value();
}
double sum_again(const Task &task, int64_t a, bool by_xhat) {
  return by_type(task.job->dtype, [&](auto type) {
    return sum_again<decltype(type)>(task, a, by_xhat);
  });
}

// The loops that are left when those of the weight stand at an index, and where they begin then.
struct Rest {
  Lines loops;  // no more than is used: to clear all of it takes as long as to add up what is found
  Place at = {};
  int64_t follow = 1, step = 0;  // so many indices follow each other, so many pieces apart
  Rest(const Nest &nest, int64_t index) {
    loops.loops = 0;
    loops.count = 1;
    const auto see = [&](const Loop &loop) {
      if (loop.step[AFFINE]) {
        const int64_t i = index / loop.step[AFFINE] % loop.size;
        advance(at, loop, i);
        if (loop.step[AFFINE] == 1) follow = loop.size - i, step = loop.step[PIECE];
      } else {
        loops.loop[loops.loops++] = loop;
        loops.count *= loop.size;
      }
    };
    for (int l = 0; l < nest.kept_loops; l++) see(nest.kept[l]);
    for (int l = 0; !nest.lanes && l < nest.applied.loops; l++) see(nest.applied.loop[l]);
  }
};

// dweight and dbias from the sums of all units, each of the next three for another kind of them.
// Lanes with weights of their own: n that follow each other in one tile.
void merge_lanes(const Task &task, int64_t a, int64_t n, double *by_xhat, double *by_grad) {
  const Nest &nest = *task.nest;
  const int64_t lane = a % nest.width, tile = lane / nest.tile, first = lane % nest.tile;
  const int64_t pitch = lane_pitch(nest);
  const Rest rest(nest, a - lane);
  memset(by_xhat, 0, (size_t)n * sizeof *by_xhat);
  memset(by_grad, 0, (size_t)n * sizeof *by_grad);
  each_line(rest.loops, rest.at, 0, rest.loops.count, [&](const Place &p, int64_t) {
    const double *sums = (const double *)task.sums + (p.at[PIECE] * nest.tiles + tile) * 2 * pitch;
    for (int64_t j = 0; j < n; j++) by_xhat[j] += sums[first + j];
    for (int64_t j = 0; j < n; j++) by_grad[j] += sums[pitch + first + j];
  });
}
// Lines with one weight each: up to n of them that follow each other along a loop. Returns how many.
int64_t merge_lines(const Task &task, int64_t a, int64_t n, double *by_xhat, double *by_grad) {
  const Nest &nest = *task.nest;
  const Rest rest(nest, a);
  constexpr int64_t MOST = 16;
  double xhat[MOST] = {}, grad[MOST] = {};
  n = smaller(smaller(n, MOST), rest.follow);
  each_line(rest.loops, rest.at, 0, rest.loops.count, [&](const Place &p, int64_t) {
    const double *sums = (const double *)task.sums + 2 * p.at[PIECE];
    for (int64_t j = 0; j < n; j++, sums += 2 * rest.step)
      for (int64_t i = 0; i < nest.applied.split; i++) {
        xhat[j] += sums[2 * i];
        grad[j] += sums[2 * i + 1];
      }
  });
  memcpy(by_xhat, xhat, (size_t)n * sizeof *xhat);
  memcpy(by_grad, grad, (size_t)n * sizeof *grad);
  return n;
}
// All others: chunks of units have added to arrays of their own.
void merge_chunks(const Task &task, int64_t a, double *by_xhat, double *by_grad) {
  const Nest &nest = *task.nest;
  const int64_t width = nest.lanes && !nest.mixed ? 16 : 1;
  double total[2] = {};
  for (int64_t c = 0; c * task.chunk < nest.units; c++)
    for (int i = 0; i < 2; i++) {
      const double *sums = (const double *)task.sums + (2 * c + i) * task.pitch + a * width;
      vd wide = {};
      for (int64_t j = 0; width > 1 && j < width; j += lanes<double>) wide += load(sums + j);
      total[i] += width > 1 ? sum(wide) : *sums;
    }
  *by_xhat = total[0];
  *by_grad = total[1];
}
void merge_affine(const Task *task, double *dweight, double *dbias, int64_t begin, int64_t end) {
  const Nest &nest = *task->nest;
  for (int64_t a = begin, n = 1; a < end; a += n) {
    if (!nest.lanes && !nest.per_element) {
      n = merge_lines(*task, a, end - a, dweight + a, dbias + a);
    } else if (nest.lanes && nest.per_element && !nest.mixed) {
      const int64_t lane = a % nest.width, tile_end = (lane / nest.tile + 1) * nest.tile;
      n = smaller(end - a, smaller(tile_end, nest.width) - lane);
      merge_lanes(*task, a, n, dweight + a, dbias + a);
    } else {
      n = 1;
      merge_chunks(*task, a, dweight + a, dbias + a);
    }
  }
  for (int64_t a = begin; a < end; a++) {
    if (task->job->dweight && __builtin_expect(!finite(dweight[a]), 0))
      dweight[a] = sum_again(*task, a, true);
    if (task->job->dbias && __builtin_expect(!finite(dbias[a]), 0))
      dbias[a] = sum_again(*task, a, false);
  }
}

// ---- weight and bias: to and from the compute type

// Halves are widened a vector at a time: one by one would take longer than a short row.
template <class P> void widen_halves(const P *p, int64_t n, float offset, float *out) {
  constexpr int W = lanes<P>;
  int64_t i = 0;
  for (; i + W <= n; i += W) store(out + i, load(p + i) + offset);
  if (i < n) store(out + i, load(p + i, n - i) + offset, n - i);
}
template <class P> void widen_halves(const P *p, int64_t n, double offset, double *out) {
  constexpr int W = lanes<P>, D = lanes<double>;
  for (int64_t i = 0; i < n; i += W) {
    const int64_t k = smaller(W, n - i);
    double part[W];
    vd half[2];
    widen(k == W ? load(p + i) : load(p + i, k), half);
    store(part, half[0] + offset);
    store(part + D, half[1] + offset);
    memcpy(out + i, part, (size_t)k * sizeof *out);
  }
}
template <class P, class C> void widen(const P *p, int64_t n, double offset, C *out) {
  if constexpr (can_round<P>) widen_halves(p, n, (C)offset, out);
  else
    for (int64_t i = 0; i < n; i++) out[i] = (C)(get(p + i) + offset);
}
template <class C> void widen(int32_t dtype, const void *p, int64_t n, double offset, C *out) {
  by_type(dtype, [&](auto type) { widen((const decltype(type) *)p, n, offset, out); });
}

// Four vectors are read at once.
template <class C> struct Ones {
  C v[4 * lanes<C>];
  constexpr Ones() : v() {
    for (C &one : v) one = 1;
  }
};
alignas(VB) constexpr Ones<float> float_ones;
alignas(VB) constexpr Ones<double> double_ones;
alignas(VB) constexpr double zeros[4 * lanes<double>] = {};

bool weight_changes(const Job &job) {
  const int32_t computed_in = job.dtype == F64 ? F64 : F32;
  return job.weight && (job.weight_dtype != computed_in || job.weight_offset != 0);
}
bool bias_changes(const Job &job) {
  return job.bias && job.bias_dtype != (job.dtype == F64 ? F64 : F32);
}
int64_t scratch(const Job *job) {
  return (weight_changes(*job) + bias_changes(*job)) * job->n * (job->dtype == F64 ? 8 : 4);
}

template <class C> void prepare(const Job &job, C *scratch, const C *ones, Affine &affine) {
  affine = {job.weight, job.bias, 1, 1};
  if (!job.weight) {
    affine.weight = ones;
    affine.weight_step = 0;
  } else if (weight_changes(job)) {
    widen(job.weight_dtype, job.weight, job.n, job.weight_offset, scratch);
    affine.weight = scratch;
    scratch += job.n;
  }
  if (!job.bias) {
    affine.bias = zeros;
    affine.bias_step = 0;
  } else if (bias_changes(job)) {
    widen(job.bias_dtype, job.bias, job.n, 0, scratch);
    affine.bias = scratch;
  }
}
void prepare(const Job *job, void *scratch, Affine *affine) {
  if (job->dtype == F64) prepare(*job, (double *)scratch, double_ones.v, *affine);
  else prepare(*job, (float *)scratch, float_ones.v, *affine);
}

// Columns merged at once. The pitch is a multiple of it, so that the last ones need no tail.
constexpr int COLUMNS = 16;

// The first n columns, rounded to the type of the parameter.
void narrow(const double *v, int64_t n, double *out) { memcpy(out, v, (size_t)n * sizeof(double)); }
template <class P> void narrow(const double *v, int64_t n, P *out) {
  constexpr int W = lanes<P>;
  float part[COLUMNS];
  for (int j = 0; j < COLUMNS; j++) part[j] = (float)v[j];
  for (int j = 0; j < COLUMNS; j += W)
    if (j + W <= n) store(out + j, load(part + j));
    else if (j < n) store(out + j, load(part + j), n - j);
}

template <class C> bool all_finite(const C *v, int64_t n) {
  constexpr int W = lanes<C>;
  typename Compute<C>::vector difference = {};  // of each element and itself: 0, or not a number
  const auto see = [&](typename Compute<C>::vector x) { difference += x - x; };
  int64_t j = 0;
  for (; j + W <= n; j += W) see(load(v + j));
  if (j < n) see(load(v + j, n - j));
  return sum(difference) == 0;
}

// As for the nests: those of n columns of rows that are not finite are taken again.
template <class T>
__attribute__((noinline)) void sum_again(const Job &job, int64_t i, int64_t n, bool by_xhat,
                                         double *total) {
  Compensated sums[COLUMNS];
  for (int64_t r = 0; r < job.rows; r++) {
    const T *x = (const T *)job.x + r * job.x_stride;
    const T *g = (const T *)job.grad + r * job.grad_stride + i;
    const auto add = [&](const auto &xhat) {
      for (int64_t j = 0; j < n; j++)
        if (!finite(total[j])) sums[j].add(0x1p-64 * get(g + j) * xhat(get(x + i + j)));
    };
    const auto rounded = [&](double v) { return job.rounded ? round_as<T>(v) : v; };
    if (!by_xhat) {
      add([](double) { return 1.0; });
    } else if (stats_are_safe<T>(job, r)) {
      const Scalar<T> *stats = (const Scalar<T> *)job.stats + r;
      const double hi = stats[0], lo = stats[job.rows], rstd = stats[2 * job.rows];
      add([&](double v) { return rounded(((v - hi) - lo) * rstd); });
    } else {
      const Exact<T> exact(job, x);
      add([&](double v) { return rounded(exact.standardized(v)); });
    }
  }
  for (int64_t j = 0; j < n; j++)
    if (!finite(total[j])) total[j] = 0x1p64 * sums[j].value();
}
void sum_again(const Job &job, int64_t i, int64_t n, bool by_xhat, double *total) {
  return by_type(job.dtype, [&](auto type) {
    return sum_again<decltype(type)>(job, i, n, by_xhat, total);
  });
}

// One parameter; the sums of successive chunks are `stride` apart.
template <class C>
void merge_columns(const Job &job, const C *sums, int64_t stride, int64_t count, int64_t i,
                   int64_t end, bool by_xhat, int32_t dtype, void *out) {
  // Few rows: there is nothing to add and nothing to round.
  if (count == 1 && dtype == (sizeof(C) == sizeof(double) ? F64 : F32) &&
      all_finite(sums + i, end - i)) {
    memcpy((C *)out + i, sums + i, (size_t)(end - i) * sizeof(C));
    return;
  }
  for (; i < end; i += COLUMNS) {
    double total[COLUMNS] = {};
    for (int64_t c = 0; c < count; c++)
      for (int j = 0; j < COLUMNS; j++) total[j] += (double)sums[c * stride + i + j];
    const int64_t n = smaller(COLUMNS, end - i);
    if (__builtin_expect(!all_finite(total, n), 0)) sum_again(job, i, n, by_xhat, total);
    by_type(dtype, [&](auto type) { narrow(total, n, (decltype(type) *)out + i); });
  }
}
template <class C> void merge(const Job &job, const Chunks &chunks, int64_t i, int64_t end) {
  const C *sums = (const C *)chunks.sums;
  const int64_t stride = 2 * chunks.pitch;
  if (job.dweight)
    merge_columns(job, sums, stride, chunks.count, i, end, true, job.weight_dtype, job.dweight);
  if (job.dbias)
    merge_columns(job, sums + chunks.pitch, stride, chunks.count, i, end, false, job.bias_dtype,
                  job.dbias);
}
void merge(const Job *job, const Chunks *chunks, int64_t i, int64_t end) {
  if (job->dtype == F64) merge<double>(*job, *chunks, i, end);
  else merge<float>(*job, *chunks, i, end);
}

// ---- from run-time values to template arguments

template <class T, bool Center, bool Rounded>
void backward_of(const Job *job, const Affine *affine, const Chunks *chunks, int64_t c,
                 int64_t end) {
  // Rounding concerns the weight only. A centred norm without a bias is too rare for its own copy.
  if (!chunks->sums)
    backward_chunks<T, Center, false, NOTHING>(*job, *affine, *chunks, c, end);
  else if (!Center && !job->dbias)
    backward_chunks<T, Center, Rounded, Center ? WEIGHT_AND_BIAS : WEIGHT>(*job, *affine, *chunks,
                                                                           c, end);
  else
    backward_chunks<T, Center, Rounded, WEIGHT_AND_BIAS>(*job, *affine, *chunks, c, end);
}

// At the end of what writes.
struct Fence {
  const Job &job;
  ~Fence() {
    if (job.streamed) end_of_stream();
  }
};

#define BY_CENTER(F, ROUNDED, ...) \
  (job->center ? F<T, true, ROUNDED>(__VA_ARGS__) : F<T, false, ROUNDED>(__VA_ARGS__))
#define BY_TYPE(F, ...)                                        \
  by_type(job->dtype, [&](auto type) {                         \
    typedef decltype(type) T;                                  \
    job->rounded ? BY_CENTER(F, can_round<T>, __VA_ARGS__)     \
                 : BY_CENTER(F, false, __VA_ARGS__);           \
  });

void forward(const Job *job, const Affine *affine, int64_t r, int64_t end) {
  const Fence fence{*job};
  if (job->residual) BY_TYPE(forward_sums, *job, *affine, r, end)
  else if (job->activation) BY_TYPE(forward_activated, *job, *affine, r, end)
  else BY_TYPE(forward_rows, *job, *affine, r, end)
}
void backward(const Job *job, const Affine *affine, const Chunks *chunks, int64_t c, int64_t end) {
  const Fence fence{*job};
  BY_TYPE(backward_of, job, affine, chunks, c, end)
}

#define NEST_BY_TYPE(F, ...)                                                        \
  return by_type(task->job->dtype, [&](auto type) {                                 \
    typedef decltype(type) T;                                                       \
    return task->nest->lanes ? F<OfLanes<T>>(__VA_ARGS__) : F<OfLines<T>>(__VA_ARGS__); \
  });

void forward_units(const Task *task, int64_t unit, int64_t end, void *slot) {
  const Fence fence{*task->job};
  NEST_BY_TYPE(forward_all, *task, unit, end, slot)
}
void backward_units(const Task *task, int64_t unit, int64_t end, void *slot) {
  const Fence fence{*task->job};
  NEST_BY_TYPE(backward_all, *task, unit, end, slot)
}
int forward_step(const Task *task, int step, int64_t unit, int64_t part) {
  const Fence fence{*task->job};
  NEST_BY_TYPE(forward_one, *task, step, unit, part)
}
int backward_step(const Task *task, int step, int64_t unit, int64_t part) {
  const Fence fence{*task->job};
  NEST_BY_TYPE(backward_one, *task, step, unit, part)
}

// The elements of a parameter in the order of the loops, in the compute type.
template <class C>
void gather(int32_t dtype, const void *p, const Lines &order, double offset, C *out) {
  if (order.loops == 0) return widen(dtype, p, order.n, offset, out);
  const int64_t size = dtype == F64 ? 8 : dtype == F32 ? 4 : 2;
  each_run(order, Place{}, 0, order.count,
           [&](Place &at, int64_t i, int64_t stop, const Loop &along) {
             const int64_t n = stop - i, step = along.step[AFFINE], from = at.at[AFFINE];
             if (step == 1) {
               widen(dtype, (const char *)p + from * size, n, offset, out + i);
             } else if (step == 0) {
               const C v = (C)(as_double(dtype, p, from) + offset);
               for (int64_t k = 0; k < n; k++) out[i + k] = v;
             } else {
               for (int64_t k = 0; k < n; k++)
                 out[i + k] = (C)(as_double(dtype, p, from + k * step) + offset);
             }
             advance(at, along, n - 1);
           });
}
void gather(int32_t compute, int32_t dtype, const void *p, const Lines *order, double offset,
            void *out) {
  if (compute == F64) gather(dtype, p, *order, offset, (double *)out);
  else gather(dtype, p, *order, offset, (float *)out);
}

void put(int32_t dtype, void *p, int64_t i, double v) {
  by_type(dtype, [&](auto type) { put((decltype(type) *)p + i, v); });
}

// The inverse: dimensions along which the parameter does not vary are summed over.
void scatter(int32_t dtype, const double *values, const Lines *order, int64_t size, double *sums,
             void *out) {
  if (order->loops) {
    memset(sums, 0, (size_t)size * sizeof *sums);
    each_run(*order, Place{}, 0, order->count,
             [&](Place &at, int64_t i, int64_t stop, const Loop &along) {
               const int64_t n = stop - i, step = along.step[AFFINE];
               double *const sum = sums + at.at[AFFINE];
               for (int64_t k = 0; k < n; k++) sum[k * step] += values[i + k];
               advance(at, along, n - 1);
             });
    values = sums;
  }
  for (int64_t i = 0; i < size; i++) put(dtype, out, i, values[i]);
}

int64_t given_bytes(const Task *task) {
  const int64_t pitch = given_pitch(*task->nest);
  return 3 * pitch * (task->job->dtype == F64 ? 8 : 4) + 2 * pitch * 8;  // and what it is made of
}
template <class C> void give(const Task &task, C *hi) {
  const int64_t channels = task.nest->channels, pitch = given_pitch(*task.nest);
  C *const lo = hi + pitch, *const rstd = lo + pitch;
  double *const mean = (double *)(rstd + pitch), *const var = mean + pitch;
  memset(mean, 0, (size_t)(2 * pitch) * sizeof *mean);
  if (task.job->center) widen(task.running_mean_dtype, task.running_mean, channels, 0, mean);
  widen(task.running_var_dtype, task.running_var, channels, task.job->eps, var);
  const vd zero = {}, one = broadcast(1.0);
  for (int64_t j = 0; j < pitch; j += lanes<double>) {
    const vd m = load(mean + j), v = load(var + j);
    store_rounded(lo + j, m - store_rounded(hi + j, m));
    store_rounded(rstd + j, v == zero ? zero : one / square_root(v));
  }
}
void give(const Task *task, void *given) {
  if (task->job->dtype == F64) give(*task, (double *)given);
  else give(*task, (float *)given);
}

void move(const Running *running) {
  const Running &r = *running;
  const int32_t type = r.dtype == F64 ? F64 : F32;
  const int64_t groups = r.channels * r.averaged, outer = r.averaged / r.inner;
  // One group a channel, BatchNorm: nothing is to be averaged, which takes five divisions.
  const bool alone = r.averaged == 1 && !r.count;
  const double share = (r.group_size - r.correction) / (r.group_size - r.running_correction);
  for (int64_t channel = 0; channel < r.channels; channel++) {
    double mean = 0, var = 0, valid = 0, free = 0;
    // By shares: the product of a value and a count may overflow.
    const auto include = [](double &average, double &count, double value, double n) {
      average = average * (count / (count + n)) + value * (n / (count + n));
      count += n;
    };
    const auto mean_of = [&](int64_t g) {
      return as_double(type, r.stats, g) + as_double(type, r.stats, groups + g);
    };
    if (alone) {
      mean = mean_of(channel);
      var = r.group_var[channel] * share;
      valid = r.group_size;
      free = r.group_size - r.running_correction;
    }
    for (int64_t o = 0; o < outer && !alone; o++)
      for (int64_t i = 0; i < r.inner; i++) {
        const int64_t g = (o * r.channels + channel) * r.inner + i;
        const double n = r.count ? r.count[g] : r.group_size;
        if (n == 0) continue;
        include(mean, valid, mean_of(g), n);
        const double freedom = n - r.running_correction;
        if (freedom > 0) include(var, free, r.group_var[g] * ((n - r.correction) / freedom), n);
      }
    const auto step = [&](int32_t dtype, void *p, double now) {
      const double old = as_double(dtype, p, channel);
      put(dtype, p, channel, (1 - r.momentum) * old + r.momentum * now);
    };
    if (valid > 0) step(r.mean_dtype, r.mean, mean);
    if (free > 0) step(r.var_dtype, r.var, var);
  }
}

}  // namespace

#define STRING_(x) #x
#define STRING(x) STRING_(x)
#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)

extern "C" const Table JOIN(table_, ISA);
extern "C" const Table JOIN(table_, ISA) = {
    STRING(ISA),    scratch,      prepare,       forward, backward, merge, forward_units,
    backward_units, forward_step, backward_step, slot,    gather,   scatter, merge_affine, move,
    given_bytes,    give};
