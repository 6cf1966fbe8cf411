// Part of attention-inl.h, included within its namespace.
//
// Matrix products: one register block of 6 rows x 4 vectors (2 where registers are few) serves all of them.

// c[MR, NV vectors] (+)= a[MR, depth] b[depth, NV vectors]; a may lie transposed.
template <typename W, int MR, int NV>
LINBIAS_INLINE void register_block(int64_t depth, const W* a, int64_t a_row, int64_t a_column, const W* b,
                                   int64_t b_row, W* c, int64_t c_row, bool add) {
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
    for (int j = 0; j < NV; ++j) columns[j] = load(b + k * b_row + j * kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < MR; ++i) {
      const Vector<W> row = broadcast(a[i * a_row + k * a_column]);
#pragma GCC unroll 4
      for (int j = 0; j < NV; ++j) sums[i][j] += row * columns[j];
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < MR; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) {
      // Added last: short sums of sums round less than one long sum.
      W* to = c + i * c_row + j * kLanes;
      store<W>(to, add ? load(to) + sums[i][j] : sums[i][j]);
    }
  }
}

template <typename W, int NV>
void column_strip(int64_t rows, int64_t depth, const W* a, int64_t a_row, int64_t a_column, const W* b, int64_t b_row,
                  W* c, int64_t c_row, bool add) {
  int64_t i = 0;
  for (; i + kBlockRows <= rows; i += kBlockRows) {
    register_block<W, kBlockRows, NV>(depth, a + i * a_row, a_row, a_column, b, b_row, c + i * c_row, c_row, add);
  }
  for (; i + 2 <= rows; i += 2) {  // kKeys rows leave 4
    register_block<W, 2, NV>(depth, a + i * a_row, a_row, a_column, b, b_row, c + i * c_row, c_row, add);
  }
}

template <typename W>
void multiply_short(int64_t rows, int64_t columns, int64_t depth, const W* a, int64_t a_row, int64_t a_column,
                    const W* b, int64_t b_row, W* c, int64_t c_row, bool add) {
  constexpr int kLanes = Simd<W>::kLanes;
  for (int64_t j = 0; j < columns; j += kBlockVectors * kLanes) {
    const int64_t vectors = (columns - j) / kLanes;
    if (vectors >= kBlockVectors) {
      column_strip<W, kBlockVectors>(rows, depth, a, a_row, a_column, b + j, b_row, c + j, c_row, add);
    } else if (vectors == 3) {
      column_strip<W, 3>(rows, depth, a, a_row, a_column, b + j, b_row, c + j, c_row, add);
    } else if (vectors == 2) {
      column_strip<W, 2>(rows, depth, a, a_row, a_column, b + j, b_row, c + j, c_row, add);
    } else {
      column_strip<W, 1>(rows, depth, a, a_row, a_column, b + j, b_row, c + j, c_row, add);
    }
  }
}

// c[rows, columns] (+)= a[rows, depth] b[depth, columns]; rows even, columns a multiple of the lanes. Products are
// summed 64 at a time: sums of short sums lose fewer digits than one long sum.
constexpr int64_t kDepth = 64;

template <typename W>
void multiply(int64_t rows, int64_t columns, int64_t depth, const W* a, int64_t a_row, int64_t a_column, const W* b,
              int64_t b_row, W* c, int64_t c_row, bool add) {
  for (int64_t k = 0; k < depth; k += kDepth) {
    multiply_short<W>(rows, columns, smaller_of(kDepth, depth - k), a + k * a_column, a_row, a_column, b + k * b_row,
                      b_row, c, c_row, add || k > 0);
  }
}
