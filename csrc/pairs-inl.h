// Part of attention-inl.h, included within its namespace, for targets without a matrix unit that multiply pairs of
// bfloat16 (LINBIAS_BF16 without LINBIAS_AMX).
//
// What matrix-inl.h offers, on an instruction that adds 16 sums of two products, of pairs of bfloat16, to 16 numbers of
// float32. Factors lie as the unit wants them; any even depth will do.

constexpr int64_t kSide = 16, kDeep = 16;  // 16 queries fill a vector; the depth that keys and queries are padded to

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
    for (int j = 0; j < kVectors; ++j) columns[j] = (__m512bh)_mm512_loadu_si512(b + k / 2 * b_row + j * 16);
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
      float* to = c + i * c_row + j * 16;
      _mm512_storeu_ps(to, add ? _mm512_loadu_ps(to) + sums[i][j] : sums[i][j]);
    }
  }
}

// c[rows, 16] (+)= a[rows, depth] b[depth, 16], c and b without gaps between rows, which are a multiple of 16.
inline void multiply_column(MatrixUnit&, int64_t rows, int64_t depth, const uint16_t* a, int64_t a_row,
                            const uint32_t* b, float* c, bool add) {
  for (int64_t i = 0; i < rows; i += kSide) {
    block_of_pairs<kSide, 1>(depth, a + i * a_row, a_row, b, kSide, c + i * kSide, kSide, add);
  }
}

// c[rows, columns] += a[rows, depth] b[depth, columns]: rows and columns multiples of 16.
inline void add_product(MatrixUnit&, int64_t rows, int64_t columns, int64_t depth, const uint16_t* a, int64_t a_row,
                        const uint32_t* b, int64_t b_row, float* c, int64_t c_row) {
  for (int64_t j = 0; j < columns; j += 32) {
    for (int64_t i = 0; i < rows; i += 8) {
      const uint16_t* a_i = a + i * a_row;
      float* c_ij = c + i * c_row + j;
      if (columns - j > 16) block_of_pairs<8, 2>(depth, a_i, a_row, b + j, b_row, c_ij, c_row, true);
      else block_of_pairs<8, 1>(depth, a_i, a_row, b + j, b_row, c_ij, c_row, true);
    }
  }
}
