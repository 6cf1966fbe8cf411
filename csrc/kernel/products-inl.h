// Matrix products: one register block of 6 rows x 4 vectors (2 where registers are few) serves all of them.
#pragma once

#include "kernel/simd-inl.h"

namespace linbias::LINBIAS_TARGET {
namespace {

constexpr int kBlockRows = 6;
constexpr int kBlockVectors = LINBIAS_VECTOR_BYTES == 64 ? 4 : 2;  // 24 of 32 registers, or 12 of 16

// Where a matrix lies: entry [i, j] at data[i * row + j * column].
template <typename X>
struct Matrix {
  X* data;
  int64_t row, column = 1;

  X* at(int64_t i, int64_t j) const { return data + i * row + j * column; }
  Matrix from(int64_t i, int64_t j) const { return {at(i, j), row, column}; }
};

// c[MR, NV vectors] (+)= a[MR, depth] b[depth, NV vectors]; a may lie transposed.
template <typename W, int MR, int NV>
LINBIAS_INLINE void register_block(int64_t depth, Matrix<const W> a, Matrix<const W> b, Matrix<W> c, bool add) {
  constexpr int kLanes = Simd<W>::kLanes;
  Vector<W> sums[MR][NV];
#pragma GCC unroll 8
  for (int i = 0; i < MR; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) sums[i][j] = Vector<W>{};
  }
  for (int64_t k = 0; k < depth; ++k) {
    Vector<W> columns[NV];
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) columns[j] = load(b.data + k * b.row + j * kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < MR; ++i) {
      const Vector<W> row = broadcast(*a.at(i, k));
#pragma GCC unroll 4
      for (int j = 0; j < NV; ++j) sums[i][j] += row * columns[j];
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < MR; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) {
      // Added last: short sums of sums round less than one long sum.
      W* to = c.data + i * c.row + j * kLanes;
      store<W>(to, add ? load(to) + sums[i][j] : sums[i][j]);
    }
  }
}

template <typename W, int NV>
LINBIAS_INLINE void column_strip(int64_t rows, int64_t depth, Matrix<const W> a, Matrix<const W> b, Matrix<W> c,
                                 bool add) {
  int64_t i = 0;
  for (; i + kBlockRows <= rows; i += kBlockRows) {
    register_block<W, kBlockRows, NV>(depth, a.from(i, 0), b, c.from(i, 0), add);
  }
  for (; i + 2 <= rows; i += 2) {  // kKeys rows leave 4
    register_block<W, 2, NV>(depth, a.from(i, 0), b, c.from(i, 0), add);
  }
}

template <typename W>
void multiply_short(int64_t rows, int64_t columns, int64_t depth, Matrix<const W> a, Matrix<const W> b, Matrix<W> c,
                    bool add) {
  constexpr int kLanes = Simd<W>::kLanes;
  for (int64_t j = 0; j < columns; j += kBlockVectors * kLanes) {
    const int64_t vectors = (columns - j) / kLanes;
    const Matrix<const W> b_j = b.from(0, j);
    const Matrix<W> c_j = c.from(0, j);
    if (vectors >= kBlockVectors) column_strip<W, kBlockVectors>(rows, depth, a, b_j, c_j, add);
    else if (vectors == 3) column_strip<W, 3>(rows, depth, a, b_j, c_j, add);
    else if (vectors == 2) column_strip<W, 2>(rows, depth, a, b_j, c_j, add);
    else column_strip<W, 1>(rows, depth, a, b_j, c_j, add);
  }
}

// c[rows, columns] (+)= a[rows, depth] b[depth, columns]; rows even, columns a multiple of the lanes; only a may lie
// transposed. Products are summed 64 at a time: sums of short sums lose fewer digits than one long sum.
constexpr int64_t kDepth = 64;

template <typename W>
void multiply(int64_t rows, int64_t columns, int64_t depth, Matrix<const W> a, Matrix<const W> b, Matrix<W> c,
              bool add) {
  for (int64_t k = 0; k < depth; k += kDepth) {
    multiply_short<W>(rows, columns, smaller_of(kDepth, depth - k), a.from(0, k), b.from(k, 0), c, add || k > 0);
  }
}

}  // namespace
}  // namespace linbias::LINBIAS_TARGET
