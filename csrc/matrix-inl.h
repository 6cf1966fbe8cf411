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

// Add to register kSum the products of a tile and of registers 4, 5 and 6, the first `count` of them.
template <int kSum>
LINBIAS_INLINE void add_tile(MatrixUnit& unit, int count, const uint16_t* a, int64_t a_row) {
  unit.load<7>(a, a_row * 2);
  if (count > 2) unit.multiply_add<kSum, 7, 6>();
  if (count > 1) unit.multiply_add<kSum, 7, 5>();
  unit.multiply_add<kSum, 7, 4>();
}

// c[kTiles * 16, 16] (+)= a[kTiles * 16, depth] b[depth, 16], c without gaps between rows. depth is a multiple of 32.
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
  for (int64_t k = 0; k < depth; k += kDeep) {
    const uint32_t* b_k = b.data + k / 2 * b.row;
    unit.load<4>(b_k, b.row * 4);
    if (b.count > 1) unit.load<5>(b_k + b.step, b.row * 4);
    if (b.count > 2) unit.load<6>(b_k + 2 * b.step, b.row * 4);
    for (int i = a.count - 1; i >= 0; --i) {
      const uint16_t* a_k = a.data + i * a.step + k;
      const int count = b.count < kMostParts - i ? b.count : kMostParts - i;
      add_tile<0>(unit, count, a_k, a.row);
      if constexpr (kTiles > 1) add_tile<1>(unit, count, a_k + kSide * a.row, a.row);
      if constexpr (kTiles > 2) add_tile<2>(unit, count, a_k + 2 * kSide * a.row, a.row);
      if constexpr (kTiles > 3) add_tile<3>(unit, count, a_k + 3 * kSide * a.row, a.row);
    }
  }
  unit.store<0>(c, kRowBytes);
  if constexpr (kTiles > 1) unit.store<1>(c + kSums, kRowBytes);
  if constexpr (kTiles > 2) unit.store<2>(c + 2 * kSums, kRowBytes);
  if constexpr (kTiles > 3) unit.store<3>(c + 3 * kSums, kRowBytes);
}

// The same for any multiple of 16 rows and for `count` columns of 16, b_column and c_column from one to the next. A
// panel of rows of `a` meets them all before the next: it stays in the first cache, where all of `a` may not.
LINBIAS_PRODUCT void multiply_columns(MatrixUnit& unit, int64_t count, int64_t rows, int64_t depth, Parts<uint16_t> a,
                                      Parts<uint32_t> b, int64_t b_column, float* c, int64_t c_column, bool add) {
  const int64_t panel = count > 1 ? 2 * kSide : 4 * kSide;
  for (int64_t i = 0; i < rows; i += panel) {
    for (int64_t j = 0; j < count; ++j) {
      const Parts<uint16_t> a_i = a.at(i * a.row);
      const Parts<uint32_t> b_j = b.at(j * b_column);
      float* c_ij = c + j * c_column + i * kSide;
      const int64_t tiles = smaller_of(rows - i, panel) / kSide;
      if (tiles == 4) multiply_strip<4>(unit, depth, a_i, b_j, c_ij, add);
      if (tiles == 3) multiply_strip<3>(unit, depth, a_i, b_j, c_ij, add);
      if (tiles == 2) multiply_strip<2>(unit, depth, a_i, b_j, c_ij, add);
      if (tiles == 1) multiply_strip<1>(unit, depth, a_i, b_j, c_ij, add);
    }
  }
}

// How many columns are best multiplied at once: one, which leaves most of the first cache to `a`, but where a block of
// keys, of so many bytes, is too large for that (measured: heads of 32 in three parts gain by one, those of 64 lose).
inline int64_t columns_at_once(int64_t bytes) { return bytes > 20 * 1024 ? 3 : 1; }

// Sums c[32, 16 or 32], in registers 0 to 3 for as long as this lives.
struct Square {
  MatrixUnit& unit;
  float* c;
  int64_t row;
  bool both;  // 32 columns

  LINBIAS_INLINE Square(MatrixUnit& of, float* sums, int64_t sums_row, bool wide)
      : unit(of), c(sums), row(sums_row), both(wide) {
    unit.load<0>(c, row * 4);
    unit.load<1>(c + kSide * row, row * 4);
    if (both) {
      unit.load<2>(c + kSide, row * 4);
      unit.load<3>(c + kSide * row + kSide, row * 4);
    }
  }
  LINBIAS_INLINE ~Square() {
    unit.store<0>(c, row * 4);
    unit.store<1>(c + kSide * row, row * 4);
    if (both) {
      unit.store<2>(c + kSide, row * 4);
      unit.store<3>(c + kSide * row + kSide, row * 4);
    }
  }

  // Rows [32, 32] of the first factor, which stay in registers 4 and 5.
  LINBIAS_INLINE void take(const uint16_t* a, int64_t a_row) {
    unit.load<4>(a, a_row * 2);
    unit.load<5>(a + kSide * a_row, a_row * 2);
  }
  // Add their products with rows [32, 16 or 32] of the second, in pairs.
  LINBIAS_INLINE void add(const uint32_t* b, int64_t b_row) {
    unit.load<6>(b, b_row * 4);
    unit.multiply_add<0, 4, 6>();
    unit.multiply_add<1, 5, 6>();
    if (both) {
      unit.load<7>(b + kSide, b_row * 4);
      unit.multiply_add<2, 4, 7>();
      unit.multiply_add<3, 5, 7>();
    }
  }
};

// c[rows, columns] += a[rows, depth] b[depth, columns], b and c without gaps: rows a multiple of 32, columns of 16,
// depth of 32.
LINBIAS_PRODUCT void add_product(MatrixUnit& unit, int64_t rows, int64_t columns, int64_t depth, const uint16_t* a,
                                 int64_t a_row, const uint32_t* b, float* c) {
  for (int64_t j = 0; j < columns; j += 2 * kSide) {
    for (int64_t i = 0; i < rows; i += 2 * kSide) {
      Square square(unit, c + i * columns + j, columns, columns - j > kSide);
      for (int64_t k = 0; k < depth; k += kDeep) {
        square.take(a + i * a_row + k, a_row);
        square.add(b + k / 2 * columns + j, columns);
      }
    }
  }
}

// c[rows, columns] += a_g[rows, 32] b_g[32, columns] of several groups g, each of which has shown[g] rows: a multiple
// of 32, as rows is. Both factors are in kinds of pairs, and from one group to the next a_group and b_group apart.
LINBIAS_PRODUCT void add_groups(MatrixUnit& unit, int64_t rows, int64_t columns, int64_t groups, const int64_t* shown,
                                Parts<uint16_t> a, int64_t a_group, Parts<uint32_t> b, int64_t b_group, float* c) {
  for (int64_t j = 0; j < columns; j += 2 * kSide) {
    for (int64_t i = 0; i < rows; i += 2 * kSide) {
      Square square(unit, c + i * columns + j, columns, columns - j > kSide);
      for (int64_t group = 0; group < groups; ++group) {
        if (shown[group] <= i) continue;
        const uint16_t* a_i = a.data + group * a_group + i * a.row;
        const uint32_t* b_j = b.data + group * b_group + j;
        square.take(a_i + a.step, a.row);
        square.add(b_j + 2 * b.step, b.row);
        square.take(a_i, a.row);
        square.add(b_j + b.step, b.row);
        square.add(b_j, b.row);
      }
    }
  }
}
