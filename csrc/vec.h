// The vector vocabulary of kernels.cpp: load, store, tails, fused multiply-add, sums. Included by
// nothing else. One vector is as wide as the instruction set that the file is compiled for; the code
// above it is the same for all of them.
//
// A storage type is one pair of functions, unpack and pack; the rest follows from them.
#pragma once
#include <stdint.h>
#include <string.h>

#if defined(__GNUC__) && !defined(__clang__)
// GCC 12 takes the undefined vectors inside its own AVX512 intrinsics for mistakes.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define VB 64
#elif defined(__AVX__)
#define VB 32
#else
#define VB 16
#endif

#define INLINE inline __attribute__((always_inline))
#define NOINLINE __attribute__((noinline))

namespace {

typedef float vf __attribute__((vector_size(VB)));
typedef double vd __attribute__((vector_size(VB)));
typedef int32_t vi __attribute__((vector_size(VB)));
typedef uint32_t vu __attribute__((vector_size(VB)));
typedef int64_t vl __attribute__((vector_size(VB)));
typedef uint16_t vh __attribute__((vector_size(VB / 2)));  // as many halves as a vf has lanes

struct f16 { uint16_t bits; };
struct bf16 { uint16_t bits; };

// What a storage type is computed in.
template <class T> struct Compute { typedef float scalar; typedef vf vector; };
template <> struct Compute<double> { typedef double scalar; typedef vd vector; };

template <class T> constexpr int lanes = VB / int(sizeof(typename Compute<T>::scalar));

// s - 0 is s for every s, also for -0, so this is a plain broadcast.
INLINE vf broadcast(float s) { return s - vf{}; }
INLINE vd broadcast(double s) { return s - vd{}; }

INLINE vf fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}
INLINE vd fma(vd a, vd b, vd c) {
#if defined(__AVX512F__)
  return (vd)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
#elif defined(__FMA__)
  return (vd)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
#elif defined(__aarch64__)
  return (vd)vfmaq_f64((float64x2_t)c, (float64x2_t)a, (float64x2_t)b);
#else
  return a * b + c;
#endif
}

// ---- storage types: unpack and pack

// 16 bits to 32, and back where the upper 16 bits are to be dropped. GCC 12 has no good code for
// __builtin_convertvector here.
INLINE vu widen(vh h) {
#if defined(__AVX512F__)
  return (vu)_mm512_cvtepu16_epi32((__m256i)h);
#elif defined(__AVX2__)
  return (vu)_mm256_cvtepu16_epi32((__m128i)h);
#elif VB == 16 && defined(__SSE2__)
  return (vu)_mm_unpacklo_epi16((__m128i)_mm_loadl_epi64((const __m128i *)&h), _mm_setzero_si128());
#else
  return __builtin_convertvector(h, vu);
#endif
}
INLINE vh narrow(vu u) {
#if defined(__AVX512F__)
  return (vh)_mm512_cvtepi32_epi16((__m512i)u);
#elif defined(__AVX2__)
  const __m256i s = _mm256_srai_epi32(_mm256_slli_epi32((__m256i)u, 16), 16);
  // packs works within 128 bits: gather the two useful quarters.
  return (vh)_mm256_castsi256_si128(_mm256_permute4x64_epi64(_mm256_packs_epi32(s, s), 0x08));
#elif VB == 16 && defined(__SSE2__)
  const __m128i s = _mm_srai_epi32(_mm_slli_epi32((__m128i)u, 16), 16);
  vh h;
  _mm_storel_epi64((__m128i *)&h, _mm_packs_epi32(s, s));
  return h;
#else
  return __builtin_convertvector(u, vh);
#endif
}

INLINE vf unpack(bf16, vh h) { return (vf)(widen(h) << 16); }

// Rounds to nearest even: the upper 16 bits are those of a bf16, the lower ones anything. A NaN stays: the
// rounding could carry it into infinity, and every NaN that arithmetic returns has its highest
// fraction bit set.
INLINE vu round_up_to_bf16(vf v) {
#if defined(__AVX512F__)
  // A third fewer instructions than the line below, which is a tenth of a forward pass.
  const __mmask16 number = _mm512_cmp_ps_mask((__m512)v, (__m512)v, _CMP_ORD_Q);
  const __mmask16 odd = _mm512_mask_test_epi32_mask(number, (__m512i)v, _mm512_set1_epi32(0x10000));
  const __m512i u = _mm512_mask_add_epi32((__m512i)v, number, (__m512i)v, _mm512_set1_epi32(0x7fff));
  return (vu)_mm512_mask_add_epi32(u, odd, u, _mm512_set1_epi32(1));
#else
  const vu u = (vu)v;
  return u + ((0x7fffu + ((u >> 16) & 1u)) & (vu)(v == v));
#endif
}
#if defined(__AVX512BF16__)
INLINE bool has_denormal(vf v) { return _mm512_fpclass_ps_mask((__m512)v, 0x20); }
INLINE bool has_denormal(vf a, vf b) {
  return _mm512_fpclass_ps_mask((__m512)a, 0x20) | _mm512_fpclass_ps_mask((__m512)b, 0x20);
}
#endif
INLINE vh pack(bf16, vf v) {
#if defined(__AVX512BF16__)
  // The instruction takes denormal numbers for zero.
  if (__builtin_expect(!has_denormal(v), 1)) return (vh)_mm512_cvtneps_pbh((__m512)v);
#endif
  const vu u = round_up_to_bf16(v);
#if defined(__AVX512F__)
  const __m512i upper = _mm512_set_epi16(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,  //
                                         31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
  return (vh)_mm512_castsi512_si256(_mm512_permutexvar_epi16(upper, (__m512i)u));
#else
  return narrow(u >> 16);
#endif
}

INLINE vf unpack(f16, vh h) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtph_ps((__m256i)h);
#elif defined(__F16C__)
  return (vf)_mm256_cvtph_ps((__m128i)h);
#elif defined(__aarch64__)
  return (vf)vcvt_f32_f16((float16x4_t)h);
#else
  // The exponent is 112 too small, which a multiplication corrects, exactly and for denormals too.
  const vu u = widen(h);
  const vu magnitude = u & 0x7fffu;
  const vf scaled = (vf)(magnitude << 13) * 0x1p112f;
  const vu special = (vu)((vi)magnitude >= 0x7c00) & 0x7f800000u;  // infinity and NaN
  return (vf)((vu)scaled | special | ((u & 0x8000u) << 16));
#endif
}

INLINE vh pack(f16, vf v) {
#if defined(__AVX512F__)
  return (vh)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__F16C__)
  return (vh)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__aarch64__)
  return (vh)vcvt_f16_f32((float32x4_t)v);
#else
  const vu sign = (vu)v & 0x80000000u;
  const vi a = (vi)((vu)v ^ sign);
  // Below 2^-14 the result is denormal: adding 0.5 puts its last bit at the last bit of a float.
  const vi denormal = (vi)((vf)a + 0.5f) - 0x3f000000;
  // Otherwise move the exponent and round to nearest even; 65520 and above carry into infinity.
  const vi normal = (a + (((15 - 127) * (1 << 23)) + 0xfff) + ((a >> 13) & 1)) >> 13;
  const vi special = ((a > 0x7f800000) & 0x7e00) | (~(a > 0x7f800000) & 0x7c00);
  const vi is_denormal = a < 0x38800000, is_special = a >= 0x47800000;
  const vi bits = (denormal & is_denormal) | (special & is_special) |
                  (normal & ~(is_denormal | is_special));
  return narrow((vu)bits | (sign >> 16));
#endif
}

// ---- whole vectors

INLINE vf load(const float *p) { vf v; memcpy(&v, p, sizeof v); return v; }
INLINE vd load(const double *p) { vd v; memcpy(&v, p, sizeof v); return v; }
template <class T> INLINE vf load(const T *p) {
  vh h;
  memcpy(&h, p, sizeof h);
  return unpack(T{}, h);
}

INLINE void store(float *p, vf v) { memcpy(p, &v, sizeof v); }
INLINE void store(double *p, vd v) { memcpy(p, &v, sizeof v); }
template <class T> INLINE void store(T *p, vf v) {
  const vh h = pack(T{}, v);
  memcpy(p, &h, sizeof h);
}

// Past the caches, where p stands at a multiple of the vector's bytes in memory.
INLINE bool can_stream(const void *p) { return (uintptr_t)p % VB == 0; }
#if defined(__AVX512F__)
INLINE void stream(float *p, vf v) { _mm512_stream_ps(p, (__m512)v); }
INLINE void stream(double *p, vd v) { _mm512_stream_pd(p, (__m512d)v); }
template <class T> INLINE void stream(T *p, vf v) {
  _mm256_stream_si256((__m256i *)p, (__m256i)pack(T{}, v));
}
#elif defined(__AVX__)
INLINE void stream(float *p, vf v) { _mm256_stream_ps(p, (__m256)v); }
INLINE void stream(double *p, vd v) { _mm256_stream_pd(p, (__m256d)v); }
template <class T> INLINE void stream(T *p, vf v) {
  _mm_stream_si128((__m128i *)p, (__m128i)pack(T{}, v));
}
#else
template <class T> INLINE void stream(T *p, typename Compute<T>::vector v) { store(p, v); }
#endif
// What was streamed is seen by other threads as what was stored is.
INLINE void end_of_stream() {
#if defined(__AVX__)
  _mm_sfence();
#endif
}
template <class T> INLINE void write(T *p, typename Compute<T>::vector v, bool streamed) {
  if (__builtin_expect(streamed, 0)) stream(p, v);  // a store is not to wait for a jump
  else store(p, v);
}

// ---- two vectors at once

template <class T> INLINE void load_two(const T *p, typename Compute<T>::vector v[2]) {
  v[0] = load(p);
  v[1] = load(p + lanes<T>);
}

template <class T> INLINE void store_two(T *p, const typename Compute<T>::vector v[2]) {
  store(p, v[0]);
  store(p + lanes<T>, v[1]);
}

// Two bf16 side by side lie in the halves of a float already. Vectors of such pairs have those at even
// places first, those at odd ones second; `deal` brings two vectors from the order of memory into that,
// `collect` brings them back.
template <class T> constexpr bool in_pairs = false;
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
template <> constexpr bool in_pairs<bf16> = true;
INLINE void load_two(const bf16 *p, vf v[2]) {
  vu u;
  memcpy(&u, p, sizeof u);
  v[0] = (vf)(u << 16);
  v[1] = (vf)(u & 0xffff0000u);
}
INLINE void write_two(bf16 *p, const vf v[2], bool streamed) {
#if defined(__AVX512BF16__)
  // The instruction takes denormal numbers for zero.
  if (__builtin_expect(!has_denormal(v[0], v[1]), 1)) {
    const __m512i packed = (__m512i)_mm512_cvtne2ps_pbh((__m512)v[1], (__m512)v[0]);
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,
                                           23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return write((float *)p, (vf)_mm512_permutexvar_epi16(order, packed), streamed);
  }
#endif
  const vu even = round_up_to_bf16(v[0]) >> 16, odd = round_up_to_bf16(v[1]) & 0xffff0000u;
  write((float *)p, (vf)(even | odd), streamed);
}
INLINE void store_two(bf16 *p, const vf v[2]) { write_two(p, v, false); }
// The j-th of both vectors is the from(j)-th of one after the other.
template <class From> INLINE vf choose(const vf v[2], const From &from) {
#if defined(__clang__)
  vf chosen;
  for (int j = 0; j < lanes<float>; j++) chosen[j] = v[from(j) / lanes<float>][from(j) % lanes<float>];
  return chosen;
#else
  vi order;
  for (int j = 0; j < lanes<float>; j++) order[j] = from(j);
  return __builtin_shuffle(v[0], v[1], order);
#endif
}
INLINE void deal(vf v[2]) {
  const vf even = choose(v, [](int j) { return 2 * j; });
  v[1] = choose(v, [](int j) { return 2 * j + 1; });
  v[0] = even;
}
INLINE void collect(vf v[2]) {
  constexpr int W = lanes<float>;
  const vf first = choose(v, [](int j) { return j / 2 + j % 2 * W; });
  v[1] = choose(v, [](int j) { return W / 2 + j / 2 + j % 2 * W; });
  v[0] = first;
}
#endif

// v as a T would store it.
template <class T> INLINE vf round_as(vf v) { return unpack(T{}, pack(T{}, v)); }
template <> INLINE vf round_as<float>(vf v) { return v; }
template <class T> INLINE vd round_as(vd v) { return v; }

// So many elements until whole vectors are written within lines of the caches, where these are as long: a
// store across two takes twice as long. Of rows of 770 floats every eighth one begins so.
template <class T> INLINE int64_t head_of(const T *out, int64_t n) {
  constexpr int64_t W = lanes<T>, BYTES = W * (int64_t)sizeof(T);
  const int64_t before = (int64_t)((uintptr_t)out % BYTES);
  const bool pays = VB == 64 && n >= 8 * W && before && before % (int64_t)sizeof(T) == 0;
  return pays ? (BYTES - before) / (int64_t)sizeof(T) : 0;
}

// ---- tails: the first k lanes, 0 < k < lanes; the others are read as zero and not written

#if defined(__AVX512F__)

INLINE __mmask16 first(int64_t k) { return (__mmask16)((1u << k) - 1); }

INLINE vf keep(vf v, int64_t k) { return (vf)_mm512_maskz_mov_ps(first(k), (__m512)v); }
INLINE vd keep(vd v, int64_t k) {
  return (vd)_mm512_maskz_mov_pd((__mmask8)first(k), (__m512d)v);
}

INLINE vf load(const float *p, int64_t k) { return (vf)_mm512_maskz_loadu_ps(first(k), p); }
INLINE vd load(const double *p, int64_t k) {
  return (vd)_mm512_maskz_loadu_pd((__mmask8)first(k), p);
}
template <class T> INLINE vf load(const T *p, int64_t k) {
  return unpack(T{}, (vh)_mm256_maskz_loadu_epi16(first(k), p));
}
INLINE void store(float *p, vf v, int64_t k) { _mm512_mask_storeu_ps(p, first(k), (__m512)v); }
INLINE void store(double *p, vd v, int64_t k) {
  _mm512_mask_storeu_pd(p, (__mmask8)first(k), (__m512d)v);
}
template <class T> INLINE void store(T *p, vf v, int64_t k) {
  _mm256_mask_storeu_epi16(p, first(k), (__m256i)pack(T{}, v));
}

#else

INLINE vi first(vf, int64_t k) {
  vi lane;
  for (int j = 0; j < lanes<float>; j++) lane[j] = j;
  return lane < (int32_t)k;
}
INLINE vl first(vd, int64_t k) {
  vl lane;
  for (int j = 0; j < lanes<double>; j++) lane[j] = j;
  return lane < k;
}
INLINE vf keep(vf v, int64_t k) { return (vf)((vi)v & first(v, k)); }
INLINE vd keep(vd v, int64_t k) { return (vd)((vl)v & first(v, k)); }

template <class T> INLINE typename Compute<T>::vector load(const T *p, int64_t k) {
  T part[lanes<T>] = {};
  for (int j = 0; j < lanes<T> - 1; j++) if (j < k) part[j] = p[j];
  return load(part);
}
template <class T> INLINE void store(T *p, typename Compute<T>::vector v, int64_t k) {
  T part[lanes<T>];
  store(part, v);
  for (int j = 0; j < lanes<T> - 1; j++) if (j < k) p[j] = part[j];
}
#if defined(__AVX2__)
INLINE vf load(const float *p, int64_t k) {
  return (vf)_mm256_maskload_ps(p, (__m256i)first(vf{}, k));
}
INLINE vd load(const double *p, int64_t k) {
  return (vd)_mm256_maskload_pd(p, (__m256i)first(vd{}, k));
}
INLINE void store(float *p, vf v, int64_t k) {
  _mm256_maskstore_ps(p, (__m256i)first(v, k), (__m256)v);
}
INLINE void store(double *p, vd v, int64_t k) {
  _mm256_maskstore_pd(p, (__m256i)first(v, k), (__m256d)v);
}
#endif
#endif

// ---- doubles that are kept in the compute type

typedef float vg __attribute__((vector_size(VB / 2)));  // as many floats as a vd has lanes

INLINE vd load_as_double(const double *p) { return load(p); }
INLINE vd load_as_double(const float *p) {
  vg v;
  memcpy(&v, p, sizeof v);
  return __builtin_convertvector(v, vd);
}
// Stores v, and returns what stands there then.
INLINE vd store_rounded(double *p, vd v) {
  store(p, v);
  return v;
}
INLINE vd store_rounded(float *p, vd v) {
  const vg rounded = __builtin_convertvector(v, vg);
  memcpy(p, &rounded, sizeof rounded);
  return __builtin_convertvector(rounded, vd);
}

template <class C> INLINE vd rounded_to(vd v);
template <> INLINE vd rounded_to<double>(vd v) { return v; }
template <> INLINE vd rounded_to<float>(vd v) {
  return __builtin_convertvector(__builtin_convertvector(v, vg), vd);
}
// f(lane) in each lane. Numbers that were just written one by one cannot be read as one vector before
// all that was written earlier has reached the cache.
template <class F> INLINE vd each_lane(const F &f) {
#if VB == 64
  return vd{f(0), f(1), f(2), f(3), f(4), f(5), f(6), f(7)};
#elif VB == 32
  return vd{f(0), f(1), f(2), f(3)};
#else
  return vd{f(0), f(1)};
#endif
}

INLINE vd square_root(vd v) {
#if defined(__AVX512F__)
  return (vd)_mm512_sqrt_pd((__m512d)v);
#elif defined(__AVX__)
  return (vd)_mm256_sqrt_pd((__m256d)v);
#elif defined(__SSE2__)
  return (vd)_mm_sqrt_pd((__m128d)v);
#elif defined(__aarch64__)
  return (vd)vsqrtq_f64((float64x2_t)v);
#else
  for (int j = 0; j < lanes<double>; j++) v[j] = __builtin_sqrt(v[j]);
  return v;
#endif
}
INLINE vd magnitude(vd v) { return (vd)((vl)v & INT64_MAX); }

// Whether a comparison holds in any lane.
INLINE bool any(vl v) {
#if defined(__AVX512F__)
  return _mm512_test_epi64_mask((__m512i)v, (__m512i)v);
#elif defined(__AVX__)
  return !_mm256_testz_si256((__m256i)v, (__m256i)v);
#else
  for (int j = 1; j < lanes<double>; j++) v[0] |= v[j];
  return v[0] != 0;
#endif
}

// ---- sums

// The lower and the upper half of the lanes, in double.
INLINE void widen(vf v, vd half[2]) {
#if defined(__AVX512F__)
  half[0] = (vd)_mm512_cvtps_pd(_mm512_castps512_ps256((__m512)v));
  half[1] = (vd)_mm512_cvtps_pd(_mm512_extractf32x8_ps((__m512)v, 1));
#elif defined(__AVX__)
  half[0] = (vd)_mm256_cvtps_pd(_mm256_castps256_ps128((__m256)v));
  half[1] = (vd)_mm256_cvtps_pd(_mm256_extractf128_ps((__m256)v, 1));
#elif defined(__SSE2__)
  half[0] = (vd)_mm_cvtps_pd((__m128)v);
  half[1] = (vd)_mm_cvtps_pd(_mm_movehl_ps((__m128)v, (__m128)v));
#elif defined(__aarch64__)
  half[0] = (vd)vcvt_f64_f32(vget_low_f32((float32x4_t)v));
  half[1] = (vd)vcvt_high_f64_f32((float32x4_t)v);
#else
  for (int j = 0; j < lanes<double>; j++) {
    half[0][j] = (double)v[j];
    half[1][j] = (double)v[j + lanes<double>];
  }
#endif
}

// Half as many lanes: each float lane is added to another one, in double.
INLINE vd fold(vf v) {
  vd half[2];
  widen(v, half);
  return half[0] + half[1];
}
INLINE vd fold(vd v) { return v; }

INLINE double sum(vd v) {
#if defined(__AVX512F__)
  const __m256d a = _mm256_add_pd(_mm512_castpd512_pd256((__m512d)v),
                                  _mm512_extractf64x4_pd((__m512d)v, 1));
#elif defined(__AVX__)
  const __m256d a = (__m256d)v;
#endif
#if defined(__AVX__)
  const __m128d b = _mm_add_pd(_mm256_castpd256_pd128(a), _mm256_extractf128_pd(a, 1));
  return b[0] + b[1];
#else
  return v[0] + v[1];
#endif
}
INLINE double sum(vf v) { return sum(fold(v)); }

// The sums of as many vectors as one has lanes, each to the bits of sum(vd).
INLINE vd sum_each(const vd v[lanes<double>]) {
#if defined(__AVX512F__)
  const auto halves = [](vd a, vd b) __attribute__((always_inline)) {
    return _mm512_add_pd(_mm512_shuffle_f64x2((__m512d)a, (__m512d)b, 0x44),
                         _mm512_shuffle_f64x2((__m512d)a, (__m512d)b, 0xee));
  };
  const auto quarters = [](__m512d a, __m512d b) __attribute__((always_inline)) {
    return _mm512_add_pd(_mm512_shuffle_f64x2(a, b, 0x88), _mm512_shuffle_f64x2(a, b, 0xdd));
  };
  const __m512d even = quarters(halves(v[0], v[2]), halves(v[4], v[6]));
  const __m512d odd = quarters(halves(v[1], v[3]), halves(v[5], v[7]));
  return (vd)_mm512_add_pd(_mm512_unpacklo_pd(even, odd), _mm512_unpackhi_pd(even, odd));
#elif defined(__AVX__)
  const auto halves = [](vd a, vd b) __attribute__((always_inline)) {
    return _mm256_add_pd(_mm256_permute2f128_pd((__m256d)a, (__m256d)b, 0x20),
                         _mm256_permute2f128_pd((__m256d)a, (__m256d)b, 0x31));
  };
  return (vd)_mm256_hadd_pd(halves(v[0], v[2]), halves(v[1], v[3]));
#else
  vd sums;
  for (int j = 0; j < lanes<double>; j++) sums[j] = sum(v[j]);
  return sums;
#endif
}

// ---- a double, and two of them: what two rows have

INLINE double store_rounded(double *p, double v) { return *p = v; }
INLINE double store_rounded(float *p, double v) { return *p = (float)v; }
INLINE double square_root(double v) { return __builtin_sqrt(v); }
INLINE double magnitude(double v) { return __builtin_fabs(v); }
INLINE bool any(bool v) { return v; }
template <int R> struct Each { typedef double type; };

#if VB > 16
typedef double v2 __attribute__((vector_size(16)));
typedef int64_t l2 __attribute__((vector_size(16)));

INLINE v2 store_rounded(double *p, v2 v) {
  memcpy(p, &v, sizeof v);
  return v;
}
INLINE v2 store_rounded(float *p, v2 v) {
  typedef float f2 __attribute__((vector_size(8)));
  const f2 rounded = __builtin_convertvector(v, f2);
  memcpy(p, &rounded, sizeof rounded);
  return __builtin_convertvector(rounded, v2);
}
INLINE v2 square_root(v2 v) { return (v2)_mm_sqrt_pd((__m128d)v); }
INLINE v2 magnitude(v2 v) { return (v2)((l2)v & INT64_MAX); }
INLINE bool any(l2 v) { return (v[0] | v[1]) != 0; }
#else
typedef vd v2;
typedef vl l2;
#endif
template <> struct Each<2> { typedef v2 type; };
template <class C> INLINE double as_doubles(const C (&p)[1]) { return (double)p[0]; }
template <class C> INLINE v2 as_doubles(const C (&p)[2]) { return v2{(double)p[0], (double)p[1]}; }

// 0 of 0. Quick: two steps of Newton's method bring the 14 bits of an estimate to almost all of double's.
template <bool Quick = false, class D> INLINE D reciprocal_root(D v) {
  const D zero = {};
#if defined(__AVX512F__)
  if constexpr (Quick) {
    const vd half = v * 0.5, more = broadcast(1.5);
    vd root = (vd)_mm512_rsqrt14_pd((__m512d)v);
    for (int step = 0; step < 2; step++) root *= more - half * root * root;
    return v == zero ? zero : root;
  }
#endif
  const D root = square_root(v);
  return root == zero ? zero : 1.0 / root;
}

// The sums of two vectors, each to the bits of sum(vd).
INLINE v2 sum_two(vd a, vd b) {
#if defined(__AVX__)
#if defined(__AVX512F__)
  const auto quarters = [](vd v) __attribute__((always_inline)) {
    return _mm256_add_pd(_mm512_castpd512_pd256((__m512d)v), _mm512_extractf64x4_pd((__m512d)v, 1));
  };
#else
  const auto quarters = [](vd v) __attribute__((always_inline)) { return (__m256d)v; };
#endif
  const auto halves = [](__m256d v) __attribute__((always_inline)) {
    return _mm_add_pd(_mm256_castpd256_pd128(v), _mm256_extractf128_pd(v, 1));
  };
  return (v2)_mm_hadd_pd(halves(quarters(a)), halves(quarters(b)));
#else
  return v2{sum(a), sum(b)};
#endif
}

// The sum of a block alone, in its own type: a few errors more, but to widen the lanes of a line of 16
// elements takes as long as all the rest of it.
INLINE double block_sum(vf v) {
#if defined(__AVX512F__)
  const __m256 a = _mm256_add_ps(_mm512_castps512_ps256((__m512)v),
                                 _mm512_extractf32x8_ps((__m512)v, 1));
#elif defined(__AVX__)
  const __m256 a = (__m256)v;
#endif
#if defined(__AVX__)
  const __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
#else
  const vf b = v;
#endif
  return (double)((b[0] + b[2]) + (b[1] + b[3]));
}
INLINE double block_sum(vd v) { return sum(v); }

// Those of as many blocks as a vector of doubles has lanes, to the same bits.
INLINE vd block_sums(const vf v[lanes<double>]) {
#if defined(__AVX512F__)
  const auto halves = [](vf a, vf b) __attribute__((always_inline)) {
    return _mm512_add_ps(_mm512_shuffle_f32x4((__m512)a, (__m512)b, 0x44),
                         _mm512_shuffle_f32x4((__m512)a, (__m512)b, 0xee));
  };
  const auto quarters = [](__m512 a, __m512 b) __attribute__((always_inline)) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  };
  const __m512 low = quarters(halves(v[0], v[1]), halves(v[2], v[3]));
  const __m512 high = quarters(halves(v[4], v[5]), halves(v[6], v[7]));
  const __m512 pairs = _mm512_add_ps(_mm512_shuffle_ps(low, high, 0x44),
                                     _mm512_shuffle_ps(low, high, 0xee));
  const __m512 sums = _mm512_add_ps(pairs, _mm512_shuffle_ps(pairs, pairs, 0xb1));
  const __m512i order = _mm512_set_epi32(0, 0, 0, 0, 0, 0, 0, 0, 14, 10, 6, 2, 12, 8, 4, 0);
  return (vd)_mm512_cvtps_pd(_mm512_castps512_ps256(_mm512_permutexvar_ps(order, sums)));
#elif defined(__AVX2__)
  const auto halves = [](vf a, vf b) __attribute__((always_inline)) {
    return _mm256_add_ps(_mm256_permute2f128_ps((__m256)a, (__m256)b, 0x20),
                         _mm256_permute2f128_ps((__m256)a, (__m256)b, 0x31));
  };
  const __m256 low = halves(v[0], v[1]), high = halves(v[2], v[3]);
  const __m256 pairs = _mm256_add_ps(_mm256_shuffle_ps(low, high, 0x44),
                                     _mm256_shuffle_ps(low, high, 0xee));
  const __m256 sums = _mm256_add_ps(pairs, _mm256_shuffle_ps(pairs, pairs, 0xb1));
  const __m256i order = _mm256_set_epi32(0, 0, 0, 0, 6, 2, 4, 0);
  return (vd)_mm256_cvtps_pd(_mm256_castps256_ps128(_mm256_permutevar8x32_ps(sums, order)));
#else
  vd sums;
  for (int j = 0; j < lanes<double>; j++) sums[j] = block_sum(v[j]);
  return sums;
#endif
}
INLINE vd block_sums(const vd v[lanes<double>]) { return sum_each(v); }

// Sums of blocks, merged in order: floats in double, doubles with the rounding errors kept. They begin
// as {}, but for arrays that are set where they are needed.
template <class V> struct Total;
template <> struct Total<vf> {
  vd s;
  INLINE void add(vf block) { s += fold(block); }
  INLINE void add_only(vf block) { s[0] = block_sum(block); }  // where no other one comes
  INLINE double value() const { return sum(s); }
};
template <> struct Total<vd> {
  vd s, rest;
  INLINE void add(vd block) {
    const vd t = s + block, z = t - s;
    rest += (s - (t - z)) + (block - z);
    s = t;
  }
  INLINE void add_only(vd block) { s = block; }
  INLINE double value() const { return sum(s) + sum(rest); }
  // Of each lane. The error of an infinite sum is not a number.
  INLINE vd each() const { return s - s == vd{} ? s + rest : s; }
};

// The value of one, and the values of two.
template <class V> INLINE double each_value(const Total<V> (&t)[1]) { return t[0].value(); }
INLINE v2 each_value(const Total<vf> (&t)[2]) { return sum_two(t[0].s, t[1].s); }
INLINE v2 each_value(const Total<vd> (&t)[2]) {
  return sum_two(t[0].s, t[1].s) + sum_two(t[0].rest, t[1].rest);
}
// The values of as many totals as a vector of doubles has lanes.
INLINE vd values(const Total<vf> t[lanes<double>]) {
  vd s[lanes<double>];
  for (int j = 0; j < lanes<double>; j++) s[j] = t[j].s;
  return sum_each(s);
}
INLINE vd values(const Total<vd> t[lanes<double>]) {
  vd s[lanes<double>], rest[lanes<double>];
  for (int j = 0; j < lanes<double>; j++) s[j] = t[j].s, rest[j] = t[j].rest;
  return sum_each(s) + sum_each(rest);
}

}  // namespace
