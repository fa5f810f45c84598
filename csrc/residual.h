// The sum before a norm, h = residual + dropout(x), and the way of its gradient back. Included by
// kernels.cpp alone.
#pragma once
#include "norm.h"
#include "philox.h"
#include "vec.h"

namespace {

// The first columns of a row that are whole vectors need no tail.
template <class T> INLINE typename Compute<T>::vector load_part(const T *p, int64_t k) {
  return k >= lanes<T> ? load(p) : load(p, k);
}
template <class T> INLINE void store_part(T *p, typename Compute<T>::vector v, int64_t k) {
  if (k >= lanes<T>) store(p, v);
  else store(p, v, k);
}

// The elements of residual + x, in their type. Writes: they are written to h as they are read.
template <class T, bool Writes> struct Sums {
  const T *x, *residual;
  T *h;
  INLINE Sums operator+(int64_t i) const { return {x + i, residual + i, h + i}; }
};
template <class T, bool Writes> INLINE typename Compute<T>::vector load(const Sums<T, Writes> &p) {
  const typename Compute<T>::vector v = load(p.residual) + load(p.x);
  if (Writes) store(p.h, v);
  return round_as<T>(v);
}
template <class T, bool Writes>
INLINE typename Compute<T>::vector load(const Sums<T, Writes> &p, int64_t k) {
  const typename Compute<T>::vector v = load(p.residual, k) + load(p.x, k);
  if (Writes) store(p.h, v, k);
  return round_as<T>(v);
}
template <class T> INLINE void load_two(const Sums<T, true> &p, typename Compute<T>::vector v[2]) {
  typename Compute<T>::vector x[2];
  load_two(p.x, x);
  load_two(p.residual, v);
  for (int j = 0; j < 2; j++) v[j] = v[j] + x[j];
  store_two(p.h, v);
  // What was rounded once is read again, in less time than it is rounded in.
  if (in_pairs<T>) return load_two(p.h, v);
  for (int j = 0; j < 2; j++) v[j] = round_as<T>(v[j]);
}

// What dropout does with an element: 0, or a factor of 1 / (1 - p). Which of both follows from the
// seed and the element's row and column alone, so backward finds it again.
class Dropout {
 public:
  explicit Dropout(const Job &job)
      : random_(job.seed), threshold_(threshold(job.dropout_p)), factor_(1 / (1 - job.dropout_p)) {}

  // The random bits of the columns from a multiple of Philox::COLUMNS on.
  struct Bits {
    vu words[Philox::VECTORS];
  };
  INLINE Bits bits(int64_t row, int64_t column) const {
    Bits b;
    random_.words((uint64_t)row, (uint64_t)column / Philox::COLUMNS, b.words);
    return b;
  }

  // The i-th vector of these columns, dropped or scaled.
  INLINE vf apply(const Bits &b, int i, vf v) const {
    v *= (float)factor_;
#if defined(__AVX512F__)
    const __m512i threshold = _mm512_set1_epi32((int)threshold_);
    return (vf)_mm512_maskz_mov_ps(_mm512_cmpge_epu32_mask((__m512i)b.words[i], threshold),
                                   (__m512)v);
#else
    return (vf)((vu)v & (vu)(b.words[i] >= threshold_));
#endif
  }
  INLINE vd apply(const Bits &b, int i, vd v) const {
    typedef uint32_t half __attribute__((vector_size(VB / 2)));
    half words;
    memcpy(&words, (const char *)b.words + i * (VB / 2), sizeof words);
    return (vd)((vq)(v * factor_) &
                (vq)(__builtin_convertvector(words, vq) >= (uint64_t)threshold_));
  }

  // One element.
  __attribute__((noinline)) double apply(int64_t row, int64_t column, double v) const {
    const Bits b = bits(row, column);
    uint32_t words[Philox::COLUMNS];
    memcpy(words, b.words, sizeof words);
    return words[column % Philox::COLUMNS] >= threshold_ ? v * factor_ : 0;
  }

 private:
  // An element is dropped where its 32 bits are below this.
  static uint32_t threshold(double p) {
    const double t = p * 0x1p32 + 0.5;
    return t >= 0x1p32 ? 0xffffffffu : (uint32_t)t;
  }

  Philox random_;
  uint32_t threshold_;
  double factor_;
};

// One row of h, rounded to its type. Without fused multiply-adds, so that every instruction set
// rounds alike.
template <class T>
__attribute__((noinline)) void add_row(const Job &job, const Dropout *dropout, int64_t r, T *h) {
  constexpr int W = lanes<T>;
  typedef typename Compute<T>::vector V;
  const T *x = (const T *)job.x + r * job.x_stride;
  const T *residual = (const T *)job.residual + r * job.residual_stride;
  const int64_t n = job.n;
  int64_t i = 0;
  if (!dropout) {
    const auto part = [&](int64_t count) __attribute__((always_inline)) {
      store(h + i, load(residual + i, count) + load(x + i, count), count);
    };
    if (const int64_t head = head_of(h, n)) part(head), i = head;
    for (; i + W <= n; i += W) store(h + i, load(residual + i) + load(x + i));
    if (i < n) part(n - i);
    return;
  }
  for (; i < n; i += Philox::COLUMNS) {
    const Dropout::Bits bits = dropout->bits(r, i);
    if (i + Philox::COLUMNS <= n) {
      for (int k = 0; k < Philox::COLUMNS / W; k++) {
        const int64_t c = i + k * W;
        store(h + c, load(residual + c) + dropout->apply(bits, k, load(x + c)));
      }
    } else {
      for (int64_t c = i; c < n; c += W) {
        const V v = dropout->apply(bits, (int)((c - i) / W), load_part(x + c, n - c));
        store_part(h + c, load_part(residual + c, n - c) + v, n - c);
      }
    }
  }
}

// Writes the gradients of one row: those of h and, behind dropout, of x. derivative(i, k) is the
// norm's part, of the columns from i on; the last k of them where they are fewer than a vector.
template <class T, class Derivative>
INLINE void store_gradients(const Job &job, int64_t r, const Derivative &derivative) {
  constexpr int W = lanes<T>;
  typedef typename Compute<T>::vector V;
  const int64_t n = job.n;
  const T *grad_h = job.grad_h ? (const T *)job.grad_h + r * job.grad_h_stride : nullptr;
  T *dh = job.dx ? (T *)job.dx + r * job.dx_stride : nullptr;
  const auto total = [&](int64_t c, int64_t k) __attribute__((always_inline)) {
    V v = derivative(c, k);
    if (grad_h) v += load_part(grad_h + c, k);
    if (dh) store_part(dh + c, v, k);
    return v;
  };
  if (!job.dropped_dx) {
    const int64_t head = head_of(dh, n);
    if (head) total(0, head);
    for (int64_t c = head; c < n; c += W) total(c, n - c);
    return;
  }
  T *dx = (T *)job.dropped_dx + r * job.dropped_dx_stride;
  const Dropout dropout(job);
  for (int64_t i = 0; i < n; i += Philox::COLUMNS) {
    const Dropout::Bits bits = dropout.bits(r, i);
    for (int64_t c = i; c < n && c < i + Philox::COLUMNS; c += W)
      store_part(dx + c, dropout.apply(bits, (int)((c - i) / W), total(c, n - c)), n - c);
  }
}

}  // namespace
