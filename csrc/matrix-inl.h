// Part of attention-inl.h, included within its namespace, for targets with a matrix unit (LINBIAS_AMX).
//
// The matrix unit: 8 registers that hold a tile of 16 rows of 64 bytes each, and one instruction,
// C[16, 16] += A[16, 32] B[32, 16], of bfloat16 products summed in float32. A lies in rows; B lies in pairs: row k / 2
// holds B[k, n] and B[k + 1, n] side by side for each column n. This file is all that knows the instructions;
// LINBIAS_AMX_EMULATED puts a model in plain C++ in their place, so that what is built on them can be tested anywhere.

constexpr int64_t kSide = 16, kDeep = 32;  // rows and columns of a tile of sums; the depth of one product
constexpr int64_t kGroupsAtOnce = 1;

// The right to use the unit, for as long as it lives: a thread's tile registers hold nothing before and after.
struct MatrixUnit {
#if defined(LINBIAS_AMX_EMULATED)
  struct Register {
    uint32_t words[kSide][kSide];
  } registers[8];

  template <int kTo>
  void zero() {
    __builtin_memset(&registers[kTo], 0, sizeof(Register));
  }
  template <int kTo>
  void load(const void* from, int64_t row_bytes) {
    for (int64_t i = 0; i < kSide; ++i) {
      __builtin_memcpy(registers[kTo].words[i], static_cast<const char*>(from) + i * row_bytes,
                       sizeof(uint32_t) * kSide);
    }
  }
  template <int kFrom>
  void store(void* to, int64_t row_bytes) const {
    for (int64_t i = 0; i < kSide; ++i) {
      __builtin_memcpy(static_cast<char*>(to) + i * row_bytes, registers[kFrom].words[i], sizeof(uint32_t) * kSide);
    }
  }
  static Vector<float> upper_half(Words x) { return (Vector<float>)(x & 0xffff0000u); }
  static Vector<float> lower_half(Words x) { return (Vector<float>)(x << 16); }
  template <int kSum, int kA, int kB>
  void multiply_add() {
    for (int64_t i = 0; i < kSide; ++i) {
      Vector<float> total;
      __builtin_memcpy(&total, registers[kSum].words[i], sizeof total);
      for (int64_t k = 0; k < kSide; ++k) {
        Words b;
        __builtin_memcpy(&b, registers[kB].words[k], sizeof b);
        const Words a = Words{} + registers[kA].words[i][k];
        total += lower_half(a) * lower_half(b);
        total += upper_half(a) * upper_half(b);
      }
      __builtin_memcpy(registers[kSum].words[i], &total, sizeof total);
    }
  }
#else
  MatrixUnit(const MatrixUnit&) = delete;
  MatrixUnit& operator=(const MatrixUnit&) = delete;
  MatrixUnit() {
    struct {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } shape;
    static_assert(sizeof shape == 64);
    asm volatile("ldtilecfg %0" ::"m"(shape) : "memory");
  }
  // Registers in use would make every switch between threads save 8 KiB more.
  ~MatrixUnit() { asm volatile("tilerelease" ::: "memory"); }

  template <int kTo>
  LINBIAS_INLINE void zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(kTo));
  }
  template <int kTo>
  LINBIAS_INLINE void load(const void* from, int64_t row_bytes) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(row_bytes), "i"(kTo) : "memory");
  }
  template <int kFrom>
  LINBIAS_INLINE void store(void* to, int64_t row_bytes) const {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(row_bytes), "i"(kFrom) : "memory");
  }
  template <int kSum, int kA, int kB>
  LINBIAS_INLINE void multiply_add() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kA), "i"(kB));
  }
#endif
};

// c[kTiles * 16, 16] (+)= a[kTiles * 16, depth] b[depth, 16], c and b without gaps between rows. depth is a multiple
// of 32.
template <int kTiles>
LINBIAS_INLINE void multiply_strip(MatrixUnit& unit, int64_t depth, const uint16_t* a, int64_t a_row, const uint32_t* b,
                                   float* c, bool add) {
  static_assert(kTiles >= 1 && kTiles <= 4);
  constexpr int64_t kSums = kSide * kSide, kRowBytes = kSide * 4;
  if (add) {
    unit.load<0>(c, kRowBytes);
    if constexpr (kTiles > 1) unit.load<1>(c + kSums, kRowBytes);
    if constexpr (kTiles > 2) unit.load<2>(c + 2 * kSums, kRowBytes);
    if constexpr (kTiles > 3) unit.load<3>(c + 3 * kSums, kRowBytes);
  } else {
    unit.zero<0>();
    if constexpr (kTiles > 1) unit.zero<1>();
    if constexpr (kTiles > 2) unit.zero<2>();
    if constexpr (kTiles > 3) unit.zero<3>();
  }
  const int64_t a_bytes = a_row * 2;
  for (int64_t k = 0; k < depth; k += kDeep) {
    unit.load<4>(b + k / 2 * kSide, kRowBytes);
    unit.load<5>(a + k, a_bytes);
    unit.multiply_add<0, 5, 4>();
    if constexpr (kTiles > 1) {
      unit.load<6>(a + kSide * a_row + k, a_bytes);
      unit.multiply_add<1, 6, 4>();
    }
    if constexpr (kTiles > 2) {
      unit.load<7>(a + 2 * kSide * a_row + k, a_bytes);
      unit.multiply_add<2, 7, 4>();
    }
    if constexpr (kTiles > 3) {
      unit.load<5>(a + 3 * kSide * a_row + k, a_bytes);
      unit.multiply_add<3, 5, 4>();
    }
  }
  unit.store<0>(c, kRowBytes);
  if constexpr (kTiles > 1) unit.store<1>(c + kSums, kRowBytes);
  if constexpr (kTiles > 2) unit.store<2>(c + 2 * kSums, kRowBytes);
  if constexpr (kTiles > 3) unit.store<3>(c + 3 * kSums, kRowBytes);
}

// The same for any multiple of 16 rows.
LINBIAS_INLINE void multiply_column(MatrixUnit& unit, int64_t rows, int64_t depth, const uint16_t* a, int64_t a_row,
                                    const uint32_t* b, float* c, bool add) {
  int64_t i = 0;
  for (; i + 4 * kSide <= rows; i += 4 * kSide) {
    multiply_strip<4>(unit, depth, a + i * a_row, a_row, b, c + i * kSide, add);
  }
  for (; i + 2 * kSide <= rows; i += 2 * kSide) {
    multiply_strip<2>(unit, depth, a + i * a_row, a_row, b, c + i * kSide, add);
  }
  if (i < rows) multiply_strip<1>(unit, depth, a + i * a_row, a_row, b, c + i * kSide, add);
}

// c_j[rows, 16] (+)= a[rows, depth] b_j[depth, 16] for `count` groups j, all without gaps.
LINBIAS_INLINE void multiply_columns(MatrixUnit& unit, int64_t count, int64_t rows, int64_t depth, const uint16_t* a,
                                     int64_t a_row, const uint32_t* b, float* c, bool add) {
  for (int64_t j = 0; j < count; ++j) {
    multiply_column(unit, rows, depth, a, a_row, b + j * depth / 2 * kSide, c + j * rows * kSide, add);
  }
}

// c[32, 16 * kColumns] += a[32, depth] b[depth, 16 * kColumns].
template <int kColumns>
LINBIAS_INLINE void add_square(MatrixUnit& unit, int64_t depth, const uint16_t* a, int64_t a_row, const uint32_t* b,
                               int64_t b_row, float* c, int64_t c_row) {
  const int64_t a_bytes = a_row * 2, b_bytes = b_row * 4, c_bytes = c_row * 4;
  unit.load<0>(c, c_bytes);
  unit.load<1>(c + kSide * c_row, c_bytes);
  if constexpr (kColumns > 1) {
    unit.load<2>(c + kSide, c_bytes);
    unit.load<3>(c + kSide * c_row + kSide, c_bytes);
  }
  for (int64_t k = 0; k < depth; k += kDeep) {
    unit.load<4>(a + k, a_bytes);
    unit.load<5>(a + kSide * a_row + k, a_bytes);
    unit.load<6>(b + k / 2 * b_row, b_bytes);
    unit.multiply_add<0, 4, 6>();
    unit.multiply_add<1, 5, 6>();
    if constexpr (kColumns > 1) {
      unit.load<7>(b + k / 2 * b_row + kSide, b_bytes);
      unit.multiply_add<2, 4, 7>();
      unit.multiply_add<3, 5, 7>();
    }
  }
  unit.store<0>(c, c_bytes);
  unit.store<1>(c + kSide * c_row, c_bytes);
  if constexpr (kColumns > 1) {
    unit.store<2>(c + kSide, c_bytes);
    unit.store<3>(c + kSide * c_row + kSide, c_bytes);
  }
}

// c[rows, columns] += a[rows, depth] b[depth, columns]: rows a multiple of 32, columns of 16, depth of 32.
LINBIAS_INLINE void add_product(MatrixUnit& unit, int64_t rows, int64_t columns, int64_t depth, const uint16_t* a,
                                int64_t a_row, const uint32_t* b, int64_t b_row, float* c, int64_t c_row) {
  for (int64_t j = 0; j < columns; j += 2 * kSide) {
    for (int64_t i = 0; i < rows; i += 2 * kSide) {
      const uint16_t* a_i = a + i * a_row;
      float* c_ij = c + i * c_row + j;
      if (columns - j > kSide) add_square<2>(unit, depth, a_i, a_row, b + j, b_row, c_ij, c_row);
      else add_square<1>(unit, depth, a_i, a_row, b + j, b_row, c_ij, c_row);
    }
  }
}
