// Part of attention-inl.h, included within its namespace, for targets with a matrix unit (LINBIAS_AMX).
//
// The matrix unit: 8 registers that hold a tile of 16 rows of 64 bytes each, and one instruction,
// C[16, 16] += A[16, 32] B[32, 16], of bfloat16 products summed in float32. A lies in rows; B lies in pairs: row k / 2
// holds B[k, n] and B[k + 1, n] side by side for each column n. This file is all that knows the instructions;
// LINBIAS_AMX_EMULATED puts a model in plain C++ in their place, so that what is built on them can be tested anywhere.

// A product is made where it is needed; the model of it would take minutes to compile so, under sanitizers.
#if defined(LINBIAS_AMX_EMULATED)
#define LINBIAS_PRODUCT __attribute__((noinline, unused)) static
#else
#define LINBIAS_PRODUCT LINBIAS_INLINE
#endif

constexpr int64_t kDeep = 32;  // of one product, on tiles of kSide x kSide sums

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
  template <int kSum, int kA, int kB>
  void multiply_add() {
    for (int64_t i = 0; i < kSide; ++i) {
      Floats total{};
      for (int64_t k = 0; k < kSide; ++k) {
        const Words a = Words{} + registers[kA].words[i][k], b = load_words(registers[kB].words[k]);
        total += even_of_pairs(a) * even_of_pairs(b);
        total += odd_of_pairs(a) * odd_of_pairs(b);
      }
      total += (Floats)load_words(registers[kSum].words[i]);
      store_words(registers[kSum].words[i], (Words)total);
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
LINBIAS_INLINE void multiply_strip(MatrixUnit& unit, int64_t depth, Parts<uint16_t> a, Parts<uint32_t> b, float* c,
                                   bool add) {
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
  const int64_t a_bytes = a.row * 2;
  for_pairs_of_parts(a, b, [&](const uint16_t* from, const uint32_t* with) __attribute__((always_inline)) {
    for (int64_t k = 0; k < depth; k += kDeep) {
      unit.load<4>(with + k / 2 * kSide, kRowBytes);
      unit.load<5>(from + k, a_bytes);
      unit.multiply_add<0, 5, 4>();
      if constexpr (kTiles > 1) {
        unit.load<6>(from + kSide * a.row + k, a_bytes);
        unit.multiply_add<1, 6, 4>();
      }
      if constexpr (kTiles > 2) {
        unit.load<7>(from + 2 * kSide * a.row + k, a_bytes);
        unit.multiply_add<2, 7, 4>();
      }
      if constexpr (kTiles > 3) {
        unit.load<5>(from + 3 * kSide * a.row + k, a_bytes);
        unit.multiply_add<3, 5, 4>();
      }
    }
  });
  unit.store<0>(c, kRowBytes);
  if constexpr (kTiles > 1) unit.store<1>(c + kSums, kRowBytes);
  if constexpr (kTiles > 2) unit.store<2>(c + 2 * kSums, kRowBytes);
  if constexpr (kTiles > 3) unit.store<3>(c + 3 * kSums, kRowBytes);
}

// The same for any multiple of 16 rows.
LINBIAS_PRODUCT void multiply_column(MatrixUnit& unit, int64_t rows, int64_t depth, Parts<uint16_t> a,
                                     Parts<uint32_t> b, float* c, bool add) {
  int64_t i = 0;
  for (; i + 4 * kSide <= rows; i += 4 * kSide) {
    multiply_strip<4>(unit, depth, a.at(i * a.row), b, c + i * kSide, add);
  }
  for (; i + 2 * kSide <= rows; i += 2 * kSide) {
    multiply_strip<2>(unit, depth, a.at(i * a.row), b, c + i * kSide, add);
  }
  if (i < rows) multiply_strip<1>(unit, depth, a.at(i * a.row), b, c + i * kSide, add);
}

// kColumns products at once, which read `a` once: c_j[rows, 16] (+)= a[rows, depth] b_j[depth, 16], j < kColumns, with
// b_column elements of b from one to the next, and c_column of c. rows is a multiple of 16.
template <int kColumns>
LINBIAS_PRODUCT void multiply_columns(MatrixUnit& unit, int64_t rows, int64_t depth, Parts<uint16_t> a,
                                      Parts<uint32_t> b, int64_t b_column, float* c, int64_t c_column, bool add) {
  static_assert(kColumns >= 1 && kColumns <= 3);
  constexpr int64_t kRowBytes = kSide * 4;
  const int64_t a_bytes = a.row * 2;
  for (int64_t i = 0; i < rows; i += kSide, c += kSide * kSide) {
    if (add) {
      unit.load<0>(c, kRowBytes);
      if constexpr (kColumns > 1) unit.load<1>(c + c_column, kRowBytes);
      if constexpr (kColumns > 2) unit.load<2>(c + 2 * c_column, kRowBytes);
    } else {
      unit.zero<0>();
      if constexpr (kColumns > 1) unit.zero<1>();
      if constexpr (kColumns > 2) unit.zero<2>();
    }
    for (int64_t k = 0; k < depth; k += kDeep) {
      for (int part = b.count - 1; part >= 0; --part) {
        const uint32_t* with = b.data + part * b.step + k / 2 * kSide;
        unit.load<4>(with, kRowBytes);
        if constexpr (kColumns > 1) unit.load<5>(with + b_column, kRowBytes);
        if constexpr (kColumns > 2) unit.load<6>(with + 2 * b_column, kRowBytes);
        for (int other = (a.count < kMostParts - part ? a.count : kMostParts - part) - 1; other >= 0; --other) {
          unit.load<3>(a.data + other * a.step + i * a.row + k, a_bytes);
          unit.multiply_add<0, 3, 4>();
          if constexpr (kColumns > 1) unit.multiply_add<1, 3, 5>();
          if constexpr (kColumns > 2) unit.multiply_add<2, 3, 6>();
        }
      }
    }
    unit.store<0>(c, kRowBytes);
    if constexpr (kColumns > 1) unit.store<1>(c + c_column, kRowBytes);
    if constexpr (kColumns > 2) unit.store<2>(c + 2 * c_column, kRowBytes);
  }
}

// c[32, 16 * kColumns] += a[32, depth] b[depth, 16 * kColumns], of all stretches.
template <int kColumns, int kStretches>
LINBIAS_INLINE void add_square(MatrixUnit& unit, const Stretch (&stretches)[kStretches], const uint16_t* a,
                               int64_t a_row, const uint32_t* b, int64_t b_row, float* c, int64_t c_row) {
  const int64_t a_bytes = a_row * 2, b_bytes = b_row * 4, c_bytes = c_row * 4;
  unit.load<0>(c, c_bytes);
  unit.load<1>(c + kSide * c_row, c_bytes);
  if constexpr (kColumns > 1) {
    unit.load<2>(c + kSide, c_bytes);
    unit.load<3>(c + kSide * c_row + kSide, c_bytes);
  }
  for (const Stretch& stretch : stretches) {
    const uint16_t* a_k = a + stretch.a;
    const uint32_t* b_k = b + stretch.b;
    for (int64_t k = 0; k < stretch.depth; k += kDeep, a_k += kDeep, b_k += kDeep / 2 * b_row) {
      unit.load<4>(a_k, a_bytes);
      unit.load<5>(a_k + kSide * a_row, a_bytes);
      unit.load<6>(b_k, b_bytes);
      unit.multiply_add<0, 4, 6>();
      unit.multiply_add<1, 5, 6>();
      if constexpr (kColumns > 1) {
        unit.load<7>(b_k + kSide, b_bytes);
        unit.multiply_add<2, 4, 7>();
        unit.multiply_add<3, 5, 7>();
      }
    }
  }
  unit.store<0>(c, c_bytes);
  unit.store<1>(c + kSide * c_row, c_bytes);
  if constexpr (kColumns > 1) {
    unit.store<2>(c + kSide, c_bytes);
    unit.store<3>(c + kSide * c_row + kSide, c_bytes);
  }
}

// c[rows, columns] += a[rows, depth] b[depth, columns], b and c without gaps: rows a multiple of 32, columns of 16,
// depths of 32.
template <int kStretches>
LINBIAS_PRODUCT void add_product(MatrixUnit& unit, int64_t rows, int64_t columns,
                                 const Stretch (&stretches)[kStretches], const uint16_t* a, int64_t a_row,
                                 const uint32_t* b, float* c) {
  for (int64_t j = 0; j < columns; j += 2 * kSide) {
    for (int64_t i = 0; i < rows; i += 2 * kSide) {
      const uint16_t* a_i = a + i * a_row;
      float* c_ij = c + i * columns + j;
      if (columns - j > kSide) add_square<2>(unit, stretches, a_i, a_row, b + j, columns, c_ij, columns);
      else add_square<1>(unit, stretches, a_i, a_row, b + j, columns, c_ij, columns);
    }
  }
}
