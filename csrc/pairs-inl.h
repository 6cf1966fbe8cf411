// Part of attention-inl.h, included within its namespace, for targets without a matrix unit that multiply pairs of
// bfloat16 (LINBIAS_ACROSS without LINBIAS_AMX).
//
// What matrix-inl.h offers, on an instruction that adds 16 sums of two products, of pairs of bfloat16, to 16 numbers of
// float32. Factors lie as the unit wants them. A word of the first factor is loaded once for several vectors of the
// second, because loads set the pace. Of float32 no parts come here: vectors multiply it faster as it is.

constexpr int64_t kDeep = kSide;  // groups of queries as they come; any even depth would do

struct MatrixUnit {};  // nothing to hold

// c[kAtOnce, 16 * kVectors] (+)= a[kAtOnce, depth] b[depth, 16 * kVectors].
template <int kAtOnce, int kVectors>
LINBIAS_INLINE void block_of_pairs(int64_t depth, const uint16_t* a, int64_t a_row, const uint32_t* b, int64_t b_row,
                                   float* c, int64_t c_row, bool add) {
  __m512 sums[kAtOnce][kVectors];
#pragma GCC unroll 16
  for (int i = 0; i < kAtOnce; ++i) {
#pragma GCC unroll 2
    for (int j = 0; j < kVectors; ++j) sums[i][j] = _mm512_setzero_ps();
  }
  for (int64_t k = 0; k < depth; k += 2) {
    __m512bh columns[kVectors];
#pragma GCC unroll 2
    for (int j = 0; j < kVectors; ++j) columns[j] = (__m512bh)_mm512_loadu_si512(b + k / 2 * b_row + j * kSide);
#pragma GCC unroll 16
    for (int i = 0; i < kAtOnce; ++i) {
      int pair;
      __builtin_memcpy(&pair, a + i * a_row + k, sizeof pair);
#pragma GCC unroll 2
      for (int j = 0; j < kVectors; ++j) {
        sums[i][j] = _mm512_dpbf16_ps(sums[i][j], columns[j], (__m512bh)_mm512_set1_epi32(pair));
      }
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < kAtOnce; ++i) {
#pragma GCC unroll 2
    for (int j = 0; j < kVectors; ++j) {
      float* to = c + i * c_row + j * kSide;
      _mm512_storeu_ps(to, add ? _mm512_loadu_ps(to) + sums[i][j] : sums[i][j]);
    }
  }
}

// The same for any multiple of 16 rows.
template <int kVectors>
LINBIAS_INLINE void strip_of_pairs(int64_t rows, int64_t depth, const uint16_t* a, int64_t a_row, const uint32_t* b,
                                   int64_t b_row, float* c, int64_t c_row, bool add) {
  constexpr int kAtOnce = kVectors > 1 ? 8 : 16;
  for (int64_t i = 0; i < rows; i += kAtOnce) {
    block_of_pairs<kAtOnce, kVectors>(depth, a + i * a_row, a_row, b, b_row, c + i * c_row, c_row, add);
  }
}

// c[rows, 16] (+)= a[rows, depth] b[depth, 16], c without gaps between rows. rows is a multiple of 16.
inline void multiply_column(MatrixUnit&, int64_t rows, int64_t depth, Parts<uint16_t> a, Parts<uint32_t> b, float* c,
                            bool add) {
  for (int part = b.count - 1; part >= 0; --part) {
    strip_of_pairs<1>(rows, depth, a.data, a.row, b.data + part * b.step, b.row, c, kSide, add || part < b.count - 1);
  }
}

// c[rows, columns] += a[rows, depth] b[depth, columns], b and c without gaps: rows and columns multiples of 16.
inline void add_product(MatrixUnit&, int64_t rows, int64_t columns, int64_t depth, const uint16_t* a, int64_t a_row,
                        const uint32_t* b, float* c) {
  for (int64_t j = 0; j < columns; j += 2 * kSide) {
    if (columns - j > kSide) strip_of_pairs<2>(rows, depth, a, a_row, b + j, columns, c + j, columns, true);
    else strip_of_pairs<1>(rows, depth, a, a_row, b + j, columns, c + j, columns, true);
  }
}
