// Vectors of 16 numbers on their way into and out of products of pairs: rounding to pairs of bfloat16, transposing,
// 2^x. The emulated target has the same in plain C++.
#pragma once

#include "kernel/simd-inl.h"

namespace linbias::LINBIAS_TARGET {
namespace {

static_assert(Simd<float>::kLanes == 16);
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t HalfWords __attribute__((vector_size(32)));  // 16 bfloat16
using Floats = Vector<float>;
using Lanes = Simd<float>::Integers;  // what a comparison gives: -1 or 0

LINBIAS_INLINE Words load_words(const void* from) {
  Words x;
  __builtin_memcpy(&x, from, sizeof x);
  return x;
}
LINBIAS_INLINE void store_words(void* to, Words x) { __builtin_memcpy(to, &x, sizeof x); }

// Whether a comparison held in every lane.
LINBIAS_INLINE bool in_all_lanes(Lanes x) {
#if defined(__AVX512DQ__)
  return _mm512_movepi32_mask((__m512i)x) == 0xffff;
#else
  int all = -1;
  for (int i = 0; i < 16; ++i) all &= x[i];
  return all != 0;
#endif
}

// 2^x to 2e-7, or to 7e-8 where kFine: 2^(x - floor x) as a polynomial (minimax, exact at 0 and 1); 0 below the
// smallest normal number.
template <bool kFine = false>
LINBIAS_INLINE Floats power_of_two(Floats x) {
#if defined(__AVX512DQ__)
  const Floats r = (Floats)_mm512_reduce_ps((__m512)x, 0x09);  // x - floor x
#else
  const Floats lowest = broadcast(-127.0f), highest = broadcast(128.0f);
  Floats inside = x < lowest ? lowest : x;
  inside = inside > highest ? highest : inside;
  const Floats rounded = (inside - 0.5f) + Simd<float>::kRound;
  const Floats r = inside - (rounded - Simd<float>::kRound);
#endif
  constexpr int kCoefficients = kFine ? 7 : 6;
  static constexpr float
      kCoarse[] = {0.001879318617f, 0.008990994655f, 0.05581867695f, 0.2401592731f, 0.6931517124f, 1.0f},
      kExact[] = {2.17150053e-4f, 1.24408817e-3f, 9.67806391e-3f, 5.54841533e-2f, 0.240229517f, 0.693147004f, 1.0f};
  constexpr const float* kCoefficient = kFine ? kExact : kCoarse;
  Floats y = broadcast(kCoefficient[0]);
#pragma GCC unroll 8
  for (int i = 1; i < kCoefficients; ++i) y = y * r + kCoefficient[i];
#if defined(__AVX512DQ__)
  return (Floats)_mm512_scalef_ps((__m512)y, (__m512)x);
#else
  const Lanes exponent = ((Lanes)rounded + Simd<float>::kExponentBias) << Simd<float>::kMantissaBits;
  y = y * (Floats)exponent;
  return x < -126.0f ? Floats{} : y;
#endif
}

// 16 halves and 16 more, side by side in words: the first below.
LINBIAS_INLINE Words interleave(HalfWords low, HalfWords high) {
#if defined(__AVX512BW__)
  const __m512i order =
      (__m512i)((Words)_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0) * 0x10001u + 0x100000u);
  return (Words)_mm512_permutexvar_epi16(order,
                                         _mm512_inserti64x4(_mm512_castsi256_si512((__m256i)low), (__m256i)high, 1));
#else
  return __builtin_convertvector(low, Words) | __builtin_convertvector(high, Words) << 16;
#endif
}

// Two vectors rounded to bfloat16, side by side in words: `even` below, `odd` above. Where rows are wanted, too, they
// go to even_row and odd_row, 16 numbers each.
template <bool kRowsToo>
LINBIAS_INLINE Words round_to_pairs(Floats even, Floats odd, uint16_t* even_row = nullptr,
                                    uint16_t* odd_row = nullptr) {
#if defined(__AVX512BF16__)
  const __m512i one_after_other = (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
  if constexpr (kRowsToo) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(even_row), _mm512_castsi512_si256(one_after_other));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(odd_row), _mm512_extracti64x4_epi64(one_after_other, 1));
  }
  const __m512i order =
      (__m512i)((Words)_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0) * 0x10001u + 0x100000u);
  return (Words)_mm512_permutexvar_epi16(order, one_after_other);
#else
  const auto rounded = [](Floats x) {
    const Words bits = (Words)x, nearest = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    return x == x ? nearest : bits >> 16 | 0x40u;
  };
  const Words low = rounded(even), high = rounded(odd);
  if constexpr (kRowsToo) {
    const HalfWords even_half = __builtin_convertvector(low, HalfWords),
                    odd_half = __builtin_convertvector(high, HalfWords);
    __builtin_memcpy(even_row, &even_half, sizeof even_half);
    __builtin_memcpy(odd_row, &odd_half, sizeof odd_half);
  }
  return low | high << 16;
#endif
}

LINBIAS_INLINE Floats even_of_pairs(Words x) { return (Floats)(x << 16); }
LINBIAS_INLINE Floats odd_of_pairs(Words x) { return (Floats)(x & 0xffff0000u); }

// Rows of bfloat16 to rows of `padded` without gaps, zeros behind each and in the rows that are missing.
LINBIAS_INLINE void pack_rows(const uint16_t* from, int64_t from_row, int64_t count, int64_t size, int64_t rows,
                              int64_t padded, uint16_t* to) {
  for (int64_t i = 0; i < rows; ++i, to += padded) {
    if (i >= count) {
      __builtin_memset(to, 0, static_cast<size_t>(padded) * 2);
      continue;
    }
    int64_t d = 0;
    for (; d + 32 <= size; d += 32) store_words(to + d, load_words(from + i * from_row + d));
    for (; d < size; ++d) to[d] = from[i * from_row + d];
    for (; d < padded; ++d) to[d] = 0;
  }
}

// 16 rows of words, from_row apart, to 16 columns: to[16, 16], to_row apart.
LINBIAS_INLINE void transpose_words(const uint32_t* from, int64_t from_row, uint32_t* to, int64_t to_row) {
  Words x[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) x[i] = load_words(from + i * from_row);
  transpose(x);
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) store_words(to + i * to_row, x[i]);
}

// Rows of bfloat16 to the second factor of a product with their transpose: rows[16, padded] to to[padded / 2, 16]
// words.
LINBIAS_INLINE void pack_column_pairs(const uint16_t* rows, int64_t padded, uint32_t* to) {
  for (int64_t pair = 0; pair < padded / 2; pair += 16) {
    transpose_words(reinterpret_cast<const uint32_t*>(rows) + pair, padded / 2, to + pair * 16, 16);
  }
}

// Rows of bfloat16 to the second factor of a product: rows[count, padded] to to[count / 2, columns] words.
LINBIAS_INLINE void pack_pairs(const uint16_t* rows, int64_t padded, int64_t count, int64_t columns, uint32_t* to) {
  for (int64_t i = 0; i < count; i += 2) {
    for (int64_t d = 0; d < columns; d += 16) {
      HalfWords even, odd;
      __builtin_memcpy(&even, rows + i * padded + d, sizeof even);
      __builtin_memcpy(&odd, rows + (i + 1) * padded + d, sizeof odd);
      store_words(to + i / 2 * columns + d, interleave(even, odd));
    }
  }
}

// Rows of bfloat16 transposed: rows[kKeys, padded] to to[columns, kKeys]; columns a multiple of 16.
LINBIAS_INLINE void pack_transposed(const uint16_t* rows, int64_t padded, int64_t columns, uint16_t* to) {
  for (int64_t d = 0; d < columns; d += 16) {
    for (int64_t s = 0; s < kKeys; s += 32) {
      uint32_t pairs[16 * 16];
      for (int64_t i = 0; i < 16; ++i) pack_pairs(rows + (s + 2 * i) * padded + d, padded, 2, 16, pairs + i * 16);
      transpose_words(pairs, 16, reinterpret_cast<uint32_t*>(to + d * kKeys + s), kKeys / 2);
    }
  }
}

}  // namespace
}  // namespace linbias::LINBIAS_TARGET
