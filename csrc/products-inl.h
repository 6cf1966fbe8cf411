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

// Whether the products of these inputs are made of pairs.
template <typename In>
constexpr bool kPairs = false;

#if defined(LINBIAS_BF16)
template <>
constexpr bool kPairs<Bfloat16> = true;

// c[MR, NV vectors] (+)= a[MR, depth] b[depth, NV vectors], a word of a and b being two bfloat16 side by side.
template <int MR, int NV>
LINBIAS_INLINE void register_block_of_pairs(int64_t depth, const uint32_t* a, int64_t a_row, const uint32_t* b,
                                            int64_t b_row, float* c, int64_t c_row, bool add) {
  __m512 sums[MR][NV];
#pragma GCC unroll 8
  for (int i = 0; i < MR; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) sums[i][j] = _mm512_setzero_ps();
  }
  for (int64_t k = 0; k < depth; ++k) {
    __m512bh columns[NV];
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) columns[j] = (__m512bh)_mm512_loadu_si512(b + k * b_row + j * 16);
#pragma GCC unroll 8
    for (int i = 0; i < MR; ++i) {
      const __m512bh row = (__m512bh)_mm512_set1_epi32(static_cast<int>(a[i * a_row + k]));
#pragma GCC unroll 4
      for (int j = 0; j < NV; ++j) sums[i][j] = _mm512_dpbf16_ps(sums[i][j], row, columns[j]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < MR; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) {
      float* to = c + i * c_row + j * 16;
      _mm512_storeu_ps(to, add ? _mm512_loadu_ps(to) + sums[i][j] : sums[i][j]);
    }
  }
}

// rows a multiple of kBlockRows, columns of 16.
void multiply_pairs(int64_t rows, int64_t columns, int64_t depth, const uint32_t* a, int64_t a_row, const uint32_t* b,
                    int64_t b_row, float* c, int64_t c_row, bool add) {
  for (int64_t j = 0; j < columns; j += 64) {
    const int64_t vectors = (columns - j) / 16;
    for (int64_t i = 0; i < rows; i += kBlockRows) {
      const uint32_t* a_i = a + i * a_row;
      float* c_i = c + i * c_row + j;
      if (vectors >= 4) {
        register_block_of_pairs<kBlockRows, 4>(depth, a_i, a_row, b + j, b_row, c_i, c_row, add);
      } else if (vectors == 3) {
        register_block_of_pairs<kBlockRows, 3>(depth, a_i, a_row, b + j, b_row, c_i, c_row, add);
      } else if (vectors == 2) {
        register_block_of_pairs<kBlockRows, 2>(depth, a_i, a_row, b + j, b_row, c_i, c_row, add);
      } else {
        register_block_of_pairs<kBlockRows, 1>(depth, a_i, a_row, b + j, b_row, c_i, c_row, add);
      }
    }
  }
}

// high <- from, rounded to bfloat16; from <- what that lost.
void split_weights(int64_t count, float* from, uint32_t* high) {
  for (int64_t i = 0; i < count; i += 16) {
    const __m512 x = _mm512_loadu_ps(from + i);
    const __m256i rounded = (__m256i)_mm512_cvtneps_pbh(x);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(high + i / 2), rounded);
    const __m512i widened = _mm512_slli_epi32(_mm512_cvtepu16_epi32(rounded), 16);
    _mm512_storeu_ps(from + i, _mm512_sub_ps(x, _mm512_castsi512_ps(widened)));
  }
}
#else  // named in branches that are never taken
[[maybe_unused]] void multiply_pairs(int64_t, int64_t, int64_t, const uint32_t*, int64_t, const uint32_t*, int64_t,
                                     float*, int64_t, bool) {}
[[maybe_unused]] void split_weights(int64_t, float*, uint32_t*) {}
#endif
