// What may follow a norm before its output is rounded: relu, silu, gelu (of erf), and their slopes.
// Included by kernels.cpp alone.
//
// With the logistic or the normal distribution function F and its density f, and a = |z|,
//
//   act(z)  = max(z, 0) - a F(-a)
//   act'(z) = h for z < 0, else 1 - h, with h = F(-a) - a f(a)
//
// Nothing here overflows, and -infinity has the limit 0.
#pragma once
#include "norm.h"
#include "vec.h"

namespace {

template <class V> struct Distribution { V below, density; };  // F(-a) and f(a)

// The lesser one. A NaN in b stays.
INLINE vf lesser(float a, vf b) {
#if defined(__AVX512F__)
  return (vf)_mm512_min_ps(_mm512_set1_ps(a), (__m512)b);  // GCC 12 compares and selects
#else
  return b > a ? broadcast(a) : b;
#endif
}

// |z|, up to where F(-a) is 0 in any case: the exponential of -88 is, and the square of 100 is finite.
// A NaN stays.
template <int Kind> INLINE vf bounded(vf z) {
  return lesser(Kind == SILU ? 88.0f : 100.0f, (vf)((vi)z & 0x7fffffff));
}
template <int Kind> INLINE vd bounded(vd z) {
  const vd a = (vd)((vl)z & 0x7fffffffffffffff);
  return a > 1000 ? broadcast(1000.0) : a;
}
template <int Kind> inline double bounded(double z) {
  const double a = __builtin_fabs(z);
  return a > 1000 ? 1000 : a;
}
// 1 / v for v from 1 to 40, with a relative error of 2^-23.
INLINE vf reciprocal(vf v) {
#if defined(__AVX512F__)
  // A fifth faster than with the division, which takes 16 cycles.
  const vf near = (vf)_mm512_rcp14_ps((__m512)v);
  return fma(near, fma(-v, near, broadcast(1.0f)), near);
#else
  return 1.0f / v;
#endif
}
INLINE vf fma(float a, vf b, vf c) { return fma(broadcast(a), b, c); }
INLINE vf fma(vf a, vf b, float c) { return fma(a, b, broadcast(c)); }

// e^x for x from -88 to 0, with a relative error of 2^-23; 0 where that is denormal: for -88, k is -127,
// a power of two without bits. x = k log(2) + r; the polynomial's own error on |r| <= log(2) / 2 is
// 2^-28.
INLINE vf exponential(vf x) {
  constexpr float to_integer = 0x1.8p23f;
  const vf shifted = fma(x, broadcast(1.44269504f), to_integer);
  const vf k = shifted - to_integer;
  const vf r = fma(2.12194440e-4f, k, fma(-0.693359375f, k, x));
  vf p = fma(broadcast(0.0013814599f), r, 0.008368717f);
  p = fma(p, r, 0.04166839f);
  p = fma(p, r, 0.16666521f);
  p = fma(p, r, 0.49999994f);
  p = fma(p, r, 1.0f);
  p = fma(p, r, 1.0f);
  return p * (vf)(((vi)shifted << 23) + (127 << 23));
}

// As above, by the series: a relative error of 2^-52.
INLINE vd exponential(vd x) {
  x = x < -709.4 ? broadcast(-709.4) : x;  // k = -1023
  constexpr double to_integer = 0x1.8p52;
  const vd shifted = fma(x, broadcast(1.44269504088896340736), broadcast(to_integer));
  const vd k = to_integer - shifted;
  const vd r = fma(k, broadcast(1.90821492927058770002e-10),
                   fma(k, broadcast(6.93147180369123816490e-01), x));
  vd p = broadcast(1.0 / 6227020800);
  p = fma(p, r, broadcast(1.0 / 479001600));
  p = fma(p, r, broadcast(1.0 / 39916800));
  p = fma(p, r, broadcast(1.0 / 3628800));
  p = fma(p, r, broadcast(1.0 / 362880));
  p = fma(p, r, broadcast(1.0 / 40320));
  p = fma(p, r, broadcast(1.0 / 5040));
  p = fma(p, r, broadcast(1.0 / 720));
  p = fma(p, r, broadcast(1.0 / 120));
  p = fma(p, r, broadcast(1.0 / 24));
  p = fma(p, r, broadcast(1.0 / 6));
  p = fma(p, r, broadcast(1.0 / 2));
  p = fma(p, r, broadcast(1.0));
  p = fma(p, r, broadcast(1.0));
  return p * (vd)(((vl)shifted << 52) + ((int64_t)1023 << 52));
}

INLINE Distribution<vf> logistic(vf a) {
  const vf e = exponential(-a), above = reciprocal(1.0f + e), below = e * above;
  return {below, below * above};
}
// F(-a) e^(a^2 / 2) is t P(t) of t = 1 / (1 + 0.35 a), fitted on 0 <= a <= 13.4, where F(-a) turns
// denormal, with a relative error of 2^-24.9; with its own roundings, F has one of 2^-22.
INLINE Distribution<vf> normal(vf a) {
  const vf square = a * a, rest = fma(a, a, -square);
  vf e = exponential(-lesser(88.0f, 0.5f * square));
  e = fma(-0.5f * rest, e, e);
  const vf t = reciprocal(fma(0.35f, a, broadcast(1.0f)));
  vf p = fma(broadcast(-0.029120674f), t, 0.1438465f);
  p = fma(p, t, -0.25545025f);
  p = fma(p, t, 0.15886581f);
  p = fma(p, t, -0.02289232f);
  p = fma(p, t, 0.10541343f);
  p = fma(p, t, 0.11985753f);
  p = fma(p, t, 0.13985835f);
  p = fma(p, t, 0.13962162f);
  return {e * (p * t), 0.398942280f * e};
}

INLINE Distribution<vd> logistic(vd a) {
  const vd e = exponential(-a), above = 1.0 / (1.0 + e), below = e * above;
  return {below, below * above};
}
INLINE Distribution<vd> normal(vd a) {
  vd below;
  for (int j = 0; j < lanes<double>; j++)
    below[j] = 0.5 * __builtin_erfc(a[j] * 0.70710678118654752440);
  return {below, 0.39894228040143267794 * exponential(-0.5 * a * a)};
}
inline Distribution<double> logistic(double a) {
  const double e = __builtin_exp(-a), above = 1 / (1 + e), below = e * above;
  return {below, below * above};
}
inline Distribution<double> normal(double a) {
  return {0.5 * __builtin_erfc(a * 0.70710678118654752440),
          0.39894228040143267794 * __builtin_exp(-0.5 * a * a)};
}

template <int Kind, class V> INLINE V activated(V z) {
  const V positive = z < 0 ? V{} : z;  // a NaN stays
  if (Kind == RELU) return positive;
  const V a = bounded<Kind>(z);
  return positive - a * (Kind == SILU ? logistic(a) : normal(a)).below;
}
// grad * act'(z)
template <int Kind, class V> INLINE V derived(V z, V grad) {
  if (Kind == RELU) return z <= 0 ? V{} : grad;
  const V a = bounded<Kind>(z);
  const Distribution<V> d = Kind == SILU ? logistic(a) : normal(a);
  const V h = d.below - a * d.density;
  return grad * (z < 0 ? h : 1 - h);
}

// One value z of the norm as it leaves the kernel; grad: that of y, read where job.grad is given.
inline double finished(const Job &job, double z, double grad) {
  const bool derive = job.grad;
  switch (job.activation) {
    case RELU: return derive ? derived<RELU>(z, grad) : activated<RELU>(z);
    case SILU: return derive ? derived<SILU>(z, grad) : activated<SILU>(z);
    case GELU: return derive ? derived<GELU>(z, grad) : activated<GELU>(z);
    default: return z;
  }
}

}  // namespace
