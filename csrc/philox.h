// Philox4x32-10 (Salmon, Moraes, Dror and Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3"):
// random numbers as a function of a counter and a key, so that any element's can be computed anywhere
// and computed again. Included by residual.h alone.
//
// The element in column c of row r is decided by word c / 16 % 4 of the counter (c / 64 * 16 + c % 16,
// r), two numbers of 64 bits; the key is the seed. 64 columns are 16 successive counters, first their
// first words, then their second ones: so no vector width has to rearrange anything.
#pragma once
#include "vec.h"

namespace {

typedef uint64_t vq __attribute__((vector_size(VB)));

// Numbers of 32 bits stand in the lower halves of lanes of 64, where their products need no
// unpacking. What stands in the upper halves has no influence.

INLINE vq times(vq a, uint32_t b) {
#if defined(__AVX512F__)
  return (vq)_mm512_mul_epu32((__m512i)a, _mm512_set1_epi64(b));
#elif defined(__AVX2__)
  return (vq)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi64x(b));
#elif VB == 16 && defined(__SSE2__)
  return (vq)_mm_mul_epu32((__m128i)a, _mm_set1_epi64x(b));
#else
  return (a & 0xffffffffu) * (uint64_t)b;
#endif
}

INLINE vq upper_half(vq a) {
#if defined(__AVX512F__)
  return (vq)_mm512_shuffle_epi32((__m512i)a, (_MM_PERM_ENUM)0xf5);  // a shift has but one port
#else
  return a >> 32;
#endif
}

INLINE vq exclusive_or(vq a, vq b, vq c) {
#if defined(__AVX512F__)
  return (vq)_mm512_ternarylogic_epi64((__m512i)a, (__m512i)b, (__m512i)c, 0x96);
#else
  return a ^ b ^ c;
#endif
}

// The lower halves of two vectors, alternating.
INLINE vu interleave(vq even, vq odd) {
#if defined(__AVX512F__)
  return (vu)_mm512_mask_shuffle_epi32((__m512i)even, 0xaaaa, (__m512i)odd, (_MM_PERM_ENUM)0xa0);
#elif defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
  return (vu)(even << 32 | (odd & 0xffffffffu));
#else
  return (vu)((even & 0xffffffffu) | odd << 32);
#endif
}

INLINE vq broadcast(uint64_t v) { return v - vq{}; }

class Philox {
 public:
  // Computed at once. A vector of counters goes through a chain of dependent operations; four chains
  // side by side keep the multipliers busy.
  static constexpr int COLUMNS = VB == 64 ? 128 : 64;
  static constexpr int VECTORS = COLUMNS * 4 / VB;

  explicit Philox(uint64_t seed) {
    uint32_t key0 = (uint32_t)seed, key1 = (uint32_t)(seed >> 32);
    for (int i = 0; i < ROUNDS; i++) {
      keys_[i][0] = broadcast((uint64_t)key0);
      keys_[i][1] = broadcast((uint64_t)key1);
      key0 += 0x9e3779b9u;
      key1 += 0xbb67ae85u;
    }
  }

  // The words of the columns from COLUMNS * part on, in order.
  INLINE void words(uint64_t row, uint64_t part, vu out[VECTORS]) const {
    // The counters of 64 columns fill so many pairs of vectors: even ones and odd ones.
    constexpr int LANES = VB / 8, PAIRS = 8 / LANES;
    vq lane;
    for (int j = 0; j < LANES; j++) lane[j] = (uint64_t)(2 * j);
    const vq first = lane + part * (COLUMNS / 4);
    for (int pair = 0; pair < COLUMNS / 64 * PAIRS; pair += 2) {
      vq c[4][4];
      for (int j = 0; j < 4; j++) {
        c[j][0] = first + (uint64_t)(2 * LANES * (pair + j / 2) + j % 2);
        c[j][1] = upper_half(c[j][0]);
        c[j][2] = broadcast(row);
        c[j][3] = broadcast(row >> 32);
      }
      for (int i = 0; i < ROUNDS; i++)
        for (int j = 0; j < 4; j++) turn(c[j], keys_[i]);
      for (int j = 0; j < 2; j++) {
        vu *block = out + (pair + j) / PAIRS * (VECTORS * 64 / COLUMNS) + (pair + j) % PAIRS;
        for (int k = 0; k < 4; k++) block[k * PAIRS] = interleave(c[2 * j][k], c[2 * j + 1][k]);
      }
    }
  }

 private:
  static constexpr int ROUNDS = 10;

  static INLINE void turn(vq c[4], const vq key[2]) {
    const vq first = times(c[0], 0xd2511f53u), second = times(c[2], 0xcd9e8d57u);
    c[0] = exclusive_or(upper_half(second), c[1], key[0]);
    c[1] = second;
    c[2] = exclusive_or(upper_half(first), c[3], key[1]);
    c[3] = first;
  }

  vq keys_[ROUNDS][2];
};

}  // namespace
