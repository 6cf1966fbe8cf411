// The inputs as sums of bfloat16, which is all that these targets multiply: one for bfloat16 itself, and three for
// float32, whose 24 bits are three times 8. Of the nine products of two such sums six are made, those of terms i and j
// with i + j < 3: what is left out is below 2^-24 of the product, of either sign, and about 2^-28 in the mean, less
// than a float32 sum loses by rounding. Blocks that weigh little make do with the first terms (precision-inl.h). Terms
// below 2^-126 count as 0: numbers below 2^-103 lose digits. Where it is multiplied, an infinity becomes NaN, but for
// one term.
#pragma once

#include "kernel/bfloat16/pairs-inl.h"

namespace linbias::LINBIAS_TARGET {
namespace {

constexpr int kMostTerms = 3;  // of a number
template <typename In>
constexpr int kTermsOf = kMostTerms;
template <>
constexpr int kTermsOf<Bfloat16> = 1;

constexpr int64_t kLanes16 = 16;  // of a vector of float32: queries of a group, and rows of a register of the unit

// A factor of a product: the sum of `count` matrices of bfloat16 (uint16_t, in rows) or of pairs of them (uint32_t),
// each `step` elements after the one before.
template <typename X>
struct Terms {
  X* data;
  int64_t row;
  int count = 1;
  int64_t step = 0;

  Terms at(int64_t offset) const { return {data + offset, row, count, step}; }
  Terms first(int terms) const { return {data, row, terms < count ? terms : count, step}; }
};

// Where a product of float32 sums over queries, each pair that the unit multiplies holds two terms of one number, so
// that 16 queries fill the depth of a product. x = x0 + x1 + x2 is then stored in two kinds of pairs, (x0, x1) and (x0,
// x2), and the other factor in three, (y0, y1), (y1, y0) and (y2, y0). add_groups draws how they make the six products.
constexpr int kPairKinds = 2, kOtherPairKinds = 3;

constexpr uint32_t kUpperHalf = 0xffff0000u;

#if defined(__AVX512BW__)
// Which of 64 halves are the upper ones of 32 words.
LINBIAS_INLINE Words upper_halves_in_order() {
  return (Words)_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0) * 0x40004u + 0x30001u;
}
#endif

// The upper halves of two vectors side by side in words: `even` below, `odd` above.
LINBIAS_INLINE Words side_by_side(Words even, Words odd) { return even >> 16 | (odd & kUpperHalf); }

// The same one after the other, 16 and 16 numbers, the second ones `apart` after the first.
LINBIAS_INLINE void store_upper_halves(Words first, Words second, uint16_t* to, int64_t apart = 16) {
#if defined(__AVX512BW__)
  const __m512i both = _mm512_permutex2var_epi16((__m512i)first, (__m512i)upper_halves_in_order(), (__m512i)second);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_castsi512_si256(both));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + apart), _mm512_extracti64x4_epi64(both, 1));
#else
  const HalfWords one = __builtin_convertvector(first >> 16, HalfWords),
                  two = __builtin_convertvector(second >> 16, HalfWords);
  __builtin_memcpy(to, &one, sizeof one);
  __builtin_memcpy(to + apart, &two, sizeof two);
#endif
}

// Words whose upper halves are the nearest bfloat16, but of the largest numbers, which would become infinite.
LINBIAS_INLINE Words nearest_upper_half(Words x) { return x + ((Words)((x & 0x7fffffffu) < 0x7f7f8000u) & 0x8000u); }

// Two vectors in three terms: put(term, first, second) gets words whose upper halves are the numbers of a term. Two
// terms are rounded, and the third is what is left.
template <typename Put>
LINBIAS_INLINE void split(Floats first, Floats second, const Put& put) {
  const Words high = nearest_upper_half((Words)first), higher = nearest_upper_half((Words)second);
  put(0, high, higher);
  first -= (Floats)(high & kUpperHalf);
  second -= (Floats)(higher & kUpperHalf);
  const Words one = (Words)first + 0x8000u, two = (Words)second + 0x8000u;
  put(1, one, two);
  put(2, (Words)(first - (Floats)(one & kUpperHalf)), (Words)(second - (Floats)(two & kUpperHalf)));
}

// Two vectors as pairs, in kTerms terms `step` words apart; fewer than three are rounded.
template <int kTerms>
LINBIAS_INLINE void store_pairs(Floats even, Floats odd, uint32_t* to, int64_t step) {
  if constexpr (kTerms == kMostTerms) {
    split(even, odd, [&](int term, Words first, Words second) __attribute__((always_inline)) {
      store_words(to + term * step, side_by_side(first, second));
    });
  } else {
    for (int term = 0; term < kTerms; ++term) {
      const Words pairs = round_to_pairs<false>(even, odd);
      store_words(to + term * step, pairs);
      even -= even_of_pairs(pairs);
      odd -= odd_of_pairs(pairs);
    }
  }
}

// 16 numbers in two kinds of pairs, `step` words apart, of which fewer than three terms need the first kind alone.
LINBIAS_INLINE void store_kinds(int terms, Floats x, uint32_t* to, int64_t step) {
  const Words first = nearest_upper_half((Words)x);
  x -= (Floats)(first & kUpperHalf);
  const Words second = (Words)x + 0x8000u;
  store_words(to, side_by_side(first, second));
  if (terms < kMostTerms) return;
  const Words third = (Words)(x - (Floats)(second & kUpperHalf));
  store_words(to + step, side_by_side(first, third));
}

// The sum of the terms of 16 numbers.
template <int kTerms>
LINBIAS_INLINE Floats sum_of_terms(const uint16_t* from, int64_t step) {
  Floats total{};
  for (int term = kTerms - 1; term >= 0; --term) {
    HalfWords half;
    __builtin_memcpy(&half, from + term * step, sizeof half);
    total += even_of_pairs(__builtin_convertvector(half, Words));
  }
  return total;
}

// Rows of inputs in terms, to `rows` rows without gaps, zeros behind each and in those that are missing.
template <typename In>
LINBIAS_INLINE void pack_terms(const In* from, int64_t from_row, int64_t count, int64_t size, int64_t rows,
                               Terms<uint16_t> to) {
  if constexpr (kTermsOf<In> == 1) {
    pack_rows(reinterpret_cast<const uint16_t*>(from), from_row, count, size, rows, to.row, to.data);
    return;
  }
  for (int64_t i = 0; i < rows; ++i, from += from_row, to.data += to.row) {
    for (int64_t d = 0; d < to.row; d += 32) {
      Floats x[2] = {};
      if (i < count && d + 32 <= size) {
        x[0] = load_wide(from + d);
        x[1] = load_wide(from + d + 16);
      } else if (i < count && d < size) {
        In some[32] = {};
        __builtin_memcpy(some, from + d, sizeof(In) * static_cast<size_t>(size - d));
        x[0] = load_wide(some);
        x[1] = load_wide(some + 16);
      }
      split(x[0], x[1], [&](int term, Words first, Words second) __attribute__((always_inline)) {
        store_upper_halves(first, second, to.data + term * to.step + d);
      });
    }
  }
}

// Rows in three kinds of pairs: rows[count, row] to to[count, columns] words of each kind.
LINBIAS_INLINE void pack_kinds(Terms<uint16_t> rows, int64_t count, int64_t columns, Terms<uint32_t> to) {
  constexpr int kLow[] = {0, 1, 2}, kHigh[] = {1, 0, 0};
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t d = 0; d < columns; d += kLanes16) {
      HalfWords term[kMostTerms];
      for (int j = 0; j < kMostTerms; ++j) {
        __builtin_memcpy(&term[j], rows.data + j * rows.step + i * rows.row + d, sizeof term[j]);
      }
      for (int kind = 0; kind < kOtherPairKinds; ++kind) {
        store_words(to.data + kind * to.step + i * to.row + d, interleave(term[kLow[kind]], term[kHigh[kind]]));
      }
    }
  }
}

LINBIAS_INLINE void pack_transposed(Terms<uint16_t> rows, int64_t columns, Terms<uint16_t> to) {
  for (int term = 0; term < rows.count; ++term) {
    pack_transposed(rows.data + term * rows.step, rows.row, columns, to.data + term * to.step);
  }
}

// Rows of inputs transposed, in terms: to[columns, kKeys], zeros for keys that are missing. For one term `room` is
// kKeys rows.
template <typename In>
LINBIAS_INLINE void pack_transposed(const In* from, int64_t from_row, int64_t count, int64_t size, int64_t columns,
                                    Terms<uint16_t> room, Terms<uint16_t> to) {
  if constexpr (kTermsOf<In> == 1) {
    pack_terms(from, from_row, count, size, kKeys, room);
    pack_transposed(room, columns, to);
    return;
  }
  for (int64_t d = 0; d < columns; d += 16) {
    for (int64_t s = 0; s < kKeys; s += 32) {
      Floats x[2][16] = {};
      for (int half = 0; half < 2; ++half) {
        for (int64_t i = 0; i < 16 && s + 16 * half + i < count; ++i) {
          const In* row = from + (s + 16 * half + i) * from_row + d;
          if (d + 16 <= size) {
            x[half][i] = load_wide(row);
          } else {
            In some[16] = {};
            __builtin_memcpy(some, row, sizeof(In) * static_cast<size_t>(size - d));
            x[half][i] = load_wide(some);
          }
        }
        transpose(x[half]);
      }
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) {
        split(x[0][i], x[1][i], [&](int term, Words first, Words second) __attribute__((always_inline)) {
          store_upper_halves(first, second, to.data + term * to.step + (d + i) * kKeys + s);
        });
      }
    }
  }
}

LINBIAS_INLINE void pack_pairs(Terms<uint16_t> rows, int64_t count, int64_t columns, Terms<uint32_t> to) {
  for (int term = 0; term < rows.count; ++term) {
    pack_pairs(rows.data + term * rows.step, rows.row, count, columns, to.data + term * to.step);
  }
}

// Rows to [count / 16, row / 2, 16]: each 16 of them to the second factor of a product with their transpose.
LINBIAS_INLINE void pack_column_pairs(Terms<uint16_t> rows, int64_t count, Terms<uint32_t> to) {
  for (int term = 0; term < rows.count; ++term) {
    for (int64_t i = 0; i < count; i += kLanes16) {
      pack_column_pairs(rows.data + term * rows.step + i * rows.row, rows.row,
                        to.data + term * to.step + i * rows.row / 2);
    }
  }
}

}  // namespace
}  // namespace linbias::LINBIAS_TARGET
