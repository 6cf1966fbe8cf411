// What matrix_unit-inl.h offers, on an instruction that adds 16 sums of two products, of pairs of bfloat16, to 16
// numbers of float32. Factors lie as the unit wants them. A word of the first factor is loaded once for several vectors
// of the second, because loads set the pace. float32 does not come here: vectors multiply it faster without terms.
#pragma once

#include <immintrin.h>

#include "kernel/bfloat16/terms-inl.h"

namespace linbias::LINBIAS_TARGET {
namespace {

constexpr int64_t kDeep = kLanes16;  // groups of queries as they come; any even depth would do

struct MatrixUnit {};  // nothing to hold

// c_j[kAtOnce, 16] (+)= a[kAtOnce, depth] b_j[depth, 16] for every j < kVectors, which lie b_step and c_step apart.
template <int kAtOnce, int kVectors>
LINBIAS_INLINE void block_of_pairs(int64_t depth, const uint16_t* a, int64_t a_row, const uint32_t* b, int64_t b_row,
                                   int64_t b_step, float* c, int64_t c_row, int64_t c_step, bool add) {
  __m512 sums[kAtOnce][kVectors];
#pragma GCC unroll 16
  for (int i = 0; i < kAtOnce; ++i) {
#pragma GCC unroll 3
    for (int j = 0; j < kVectors; ++j) sums[i][j] = _mm512_setzero_ps();
  }
  for (int64_t k = 0; k < depth; k += 2) {
    __m512bh columns[kVectors];
#pragma GCC unroll 3
    for (int j = 0; j < kVectors; ++j) columns[j] = (__m512bh)_mm512_loadu_si512(b + k / 2 * b_row + j * b_step);
#pragma GCC unroll 16
    for (int i = 0; i < kAtOnce; ++i) {
      int pair;
      __builtin_memcpy(&pair, a + i * a_row + k, sizeof pair);
#pragma GCC unroll 3
      for (int j = 0; j < kVectors; ++j) {
        sums[i][j] = _mm512_dpbf16_ps(sums[i][j], columns[j], (__m512bh)_mm512_set1_epi32(pair));
      }
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < kAtOnce; ++i) {
#pragma GCC unroll 3
    for (int j = 0; j < kVectors; ++j) {
      float* to = c + i * c_row + j * c_step;
      _mm512_storeu_ps(to, add ? _mm512_loadu_ps(to) + sums[i][j] : sums[i][j]);
    }
  }
}

// The same for any multiple of 16 rows.
template <int kVectors>
LINBIAS_INLINE void strip_of_pairs(int64_t rows, int64_t depth, const uint16_t* a, int64_t a_row, const uint32_t* b,
                                   int64_t b_row, int64_t b_step, float* c, int64_t c_row, int64_t c_step, bool add) {
  constexpr int kAtOnce = kVectors > 1 ? 8 : 16;
  for (int64_t i = 0; i < rows; i += kAtOnce) {
    block_of_pairs<kAtOnce, kVectors>(depth, a + i * a_row, a_row, b, b_row, b_step, c + i * c_row, c_row, c_step, add);
  }
}

// c_j[rows, 16] (+)= a[rows, depth] b_j[depth, 16] for every j < count, with b_column elements of b from one to the
// next, and c_column of c. rows is a multiple of 16.
inline void multiply_columns(MatrixUnit&, int64_t count, int64_t rows, int64_t depth, Terms<uint16_t> a,
                             Terms<uint32_t> b, int64_t b_column, float* c, int64_t c_column, bool add) {
  for (int term = b.count - 1; term >= 0; --term, add = true) {
    const uint32_t* with = b.data + term * b.step;
    for (int64_t j = 0; j < count; j += count == 3 ? 3 : 1) {
      float* to = c + j * c_column;
      if (count == 3)
        strip_of_pairs<3>(rows, depth, a.data, a.row, with, kLanes16, b_column, to, kLanes16, c_column, add);
      else strip_of_pairs<1>(rows, depth, a.data, a.row, with + j * b_column, kLanes16, 0, to, kLanes16, 0, add);
    }
  }
}

inline int64_t columns_at_once(int64_t) { return 3; }

// c[rows, columns] += a[rows, depth] b[depth, columns], b and c without gaps: rows and columns multiples of 16.
inline void add_product(MatrixUnit&, int64_t rows, int64_t columns, int64_t depth, const uint16_t* a, int64_t a_row,
                        const uint32_t* b, float* c) {
  for (int64_t j = 0; j < columns; j += 2 * kLanes16) {
    if (columns - j > kLanes16)
      strip_of_pairs<2>(rows, depth, a, a_row, b + j, columns, kLanes16, c + j, columns, kLanes16, true);
    else strip_of_pairs<1>(rows, depth, a, a_row, b + j, columns, kLanes16, c + j, columns, kLanes16, true);
  }
}

}  // namespace
}  // namespace linbias::LINBIAS_TARGET
