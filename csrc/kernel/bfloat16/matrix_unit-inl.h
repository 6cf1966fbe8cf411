// The matrix unit: 8 registers of 16 rows of 64 bytes each, and one instruction, C[16, 16] += A[16, 32] B[32, 16], of
// bfloat16 products summed in float32. A lies in rows; B lies in pairs: row k / 2 holds B[k, n] and B[k + 1, n] side by
// side for each column n. This file is all that knows the instructions;
// LINBIAS_AMX_EMULATED puts a model in plain C++ in their place, so that what is built on them can be tested anywhere.
#pragma once

#include <type_traits>  // integral_constant

#include "kernel/bfloat16/terms-inl.h"

namespace linbias::LINBIAS_TARGET {
namespace {

// Products are inlined where they are made, but not those of the model, which would then take minutes to compile.
#if defined(LINBIAS_AMX_EMULATED)
#define LINBIAS_PRODUCT __attribute__((noinline, unused)) static
#else
#define LINBIAS_PRODUCT LINBIAS_INLINE
#endif

constexpr int64_t kDeep = 32;  // of one product

// The right to use the unit, for as long as it lives: a thread's tile registers hold nothing before and after.
struct MatrixUnit {
#if defined(LINBIAS_AMX_EMULATED)
  struct Register {
    uint32_t words[kLanes16][kLanes16];
  } registers[8];

  template <int kTo>
  void zero() {
    __builtin_memset(&registers[kTo], 0, sizeof(Register));
  }
  template <int kTo>
  void load(const void* from, int64_t row_bytes) {
    for (int64_t i = 0; i < kLanes16; ++i) {
      __builtin_memcpy(registers[kTo].words[i], static_cast<const char*>(from) + i * row_bytes,
                       sizeof(uint32_t) * kLanes16);
    }
  }
  template <int kFrom>
  void store(void* to, int64_t row_bytes) const {
    for (int64_t i = 0; i < kLanes16; ++i) {
      __builtin_memcpy(static_cast<char*>(to) + i * row_bytes, registers[kFrom].words[i], sizeof(uint32_t) * kLanes16);
    }
  }
  template <int kSum, int kA, int kB>
  void multiply_add() {
    for (int64_t i = 0; i < kLanes16; ++i) {
      Floats total{};
      for (int64_t k = 0; k < kLanes16; ++k) {
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
  // The system saves 8 KiB more at every switch between threads whose registers are in use.
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

// Registers of multiply_strip: up to four of sums, one below the other, three of the second factor's terms, and one of
// 16 rows of the first factor.
constexpr int kFirstSum = 0, kSecondFactor = 4, kFirstFactor = 7;

// Run act for 0, 1 ... as constants, which registers are named by.
template <typename Act, int... i>
LINBIAS_INLINE void for_each(std::integer_sequence<int, i...>, const Act& act) {
  (act(std::integral_constant<int, i>()), ...);
}

// c[kSums * 16, 16] (+)= a[kSums * 16, depth] b[depth, 16], c without gaps between rows. depth is a multiple of 32.
template <int kSums>
LINBIAS_INLINE void multiply_strip(MatrixUnit& unit, int64_t depth, Terms<uint16_t> a, Terms<uint32_t> b, float* c,
                                   bool add) {
  static_assert(kSums >= 1 && kSums <= kSecondFactor);
  constexpr int64_t kOfSum = kLanes16 * kLanes16, kRowBytes = kLanes16 * 4;
  constexpr std::make_integer_sequence<int, kSums> kEach{};
  for_each(kEach, [&](auto i) __attribute__((always_inline)) {
    if (add) unit.load<kFirstSum + i>(c + i * kOfSum, kRowBytes);
    else unit.zero<kFirstSum + i>();
  });
  for (int64_t k = 0; k < depth; k += kDeep) {
    const uint32_t* b_k = b.data + k / 2 * b.row;
    unit.load<kSecondFactor>(b_k, b.row * 4);
    if (b.count > 1) unit.load<kSecondFactor + 1>(b_k + b.step, b.row * 4);
    if (b.count > 2) unit.load<kSecondFactor + 2>(b_k + 2 * b.step, b.row * 4);
    const int most = a.count > b.count ? a.count : b.count;
    for (int term = a.count - 1; term >= 0; --term) {
      const int count = b.count < most - term ? b.count : most - term;  // of b, to multiply this term with
      for_each(kEach, [&](auto i) __attribute__((always_inline)) {
        unit.load<kFirstFactor>(a.data + term * a.step + k + i * kLanes16 * a.row, a.row * 2);
        if (count > 2) unit.multiply_add<kFirstSum + i, kFirstFactor, kSecondFactor + 2>();
        if (count > 1) unit.multiply_add<kFirstSum + i, kFirstFactor, kSecondFactor + 1>();
        unit.multiply_add<kFirstSum + i, kFirstFactor, kSecondFactor>();
      });
    }
  }
  for_each(kEach, [&](auto i) __attribute__((always_inline)) { unit.store<kFirstSum + i>(c + i * kOfSum, kRowBytes); });
}

// The same for any multiple of 16 rows and for `count` columns of 16, b_column and c_column from one to the next. A
// panel of rows of `a` meets them all before the next: it stays in the first cache, where all of `a` may not.
LINBIAS_PRODUCT void multiply_columns(MatrixUnit& unit, int64_t count, int64_t rows, int64_t depth, Terms<uint16_t> a,
                                      Terms<uint32_t> b, int64_t b_column, float* c, int64_t c_column, bool add) {
  const int64_t panel = count > 1 ? 2 * kLanes16 : 4 * kLanes16;
  for (int64_t i = 0; i < rows; i += panel) {
    for (int64_t j = 0; j < count; ++j) {
      const Terms<uint16_t> a_i = a.at(i * a.row);
      const Terms<uint32_t> b_j = b.at(j * b_column);
      float* c_ij = c + j * c_column + i * kLanes16;
      const int64_t sums = smaller_of(rows - i, panel) / kLanes16;
      if (sums == 4) multiply_strip<4>(unit, depth, a_i, b_j, c_ij, add);
      if (sums == 3) multiply_strip<3>(unit, depth, a_i, b_j, c_ij, add);
      if (sums == 2) multiply_strip<2>(unit, depth, a_i, b_j, c_ij, add);
      if (sums == 1) multiply_strip<1>(unit, depth, a_i, b_j, c_ij, add);
    }
  }
}

// How many columns are best multiplied at once, where a block of keys has so many bytes: one, which leaves most of the
// first cache to `a`, unless `a` is too large for it (measured: heads of 32 in three terms gain by one, those of 64
// lose).
inline int64_t columns_at_once(int64_t bytes) { return bytes > 20 * 1024 ? 3 : 1; }

// Sums c[32, 16 or 32], in registers for as long as this lives.
struct Square {
  enum Register { kUpperLeft, kLowerLeft, kUpperRight, kLowerRight, kUpperRows, kLowerRows, kColumns, kMoreColumns };
  MatrixUnit& unit;
  float* c;
  int64_t row;
  bool both;  // 32 columns

  LINBIAS_INLINE Square(MatrixUnit& of, float* sums, int64_t sums_row, bool wide)
      : unit(of), c(sums), row(sums_row), both(wide) {
    unit.load<kUpperLeft>(c, row * 4);
    unit.load<kLowerLeft>(c + kLanes16 * row, row * 4);
    if (both) {
      unit.load<kUpperRight>(c + kLanes16, row * 4);
      unit.load<kLowerRight>(c + kLanes16 * row + kLanes16, row * 4);
    }
  }
  LINBIAS_INLINE ~Square() {
    unit.store<kUpperLeft>(c, row * 4);
    unit.store<kLowerLeft>(c + kLanes16 * row, row * 4);
    if (both) {
      unit.store<kUpperRight>(c + kLanes16, row * 4);
      unit.store<kLowerRight>(c + kLanes16 * row + kLanes16, row * 4);
    }
  }

  // Rows [32, 32] of the first factor, which stay in their registers.
  LINBIAS_INLINE void take(const uint16_t* a, int64_t a_row) {
    unit.load<kUpperRows>(a, a_row * 2);
    unit.load<kLowerRows>(a + kLanes16 * a_row, a_row * 2);
  }
  // Add their products with rows [32, 16 or 32] of the second, in pairs.
  LINBIAS_INLINE void add(const uint32_t* b, int64_t b_row) {
    unit.load<kColumns>(b, b_row * 4);
    unit.multiply_add<kUpperLeft, kUpperRows, kColumns>();
    unit.multiply_add<kLowerLeft, kLowerRows, kColumns>();
    if (both) {
      unit.load<kMoreColumns>(b + kLanes16, b_row * 4);
      unit.multiply_add<kUpperRight, kUpperRows, kMoreColumns>();
      unit.multiply_add<kLowerRight, kLowerRows, kMoreColumns>();
    }
  }
};

// c[rows, columns] += a[rows, depth] b[depth, columns], b and c without gaps: rows a multiple of 32, columns of 16,
// depth of 32.
LINBIAS_PRODUCT void add_product(MatrixUnit& unit, int64_t rows, int64_t columns, int64_t depth, const uint16_t* a,
                                 int64_t a_row, const uint32_t* b, float* c) {
  for (int64_t j = 0; j < columns; j += 2 * kLanes16) {
    for (int64_t i = 0; i < rows; i += 2 * kLanes16) {
      Square square(unit, c + i * columns + j, columns, columns - j > kLanes16);
      for (int64_t k = 0; k < depth; k += kDeep) {
        square.take(a + i * a_row + k, a_row);
        square.add(b + k / 2 * columns + j, columns);
      }
    }
  }
}

// A factor of add_groups: rows of 32 numbers, or of words, `row` apart, of one kind of pairs and one group; kinds and
// groups lie `kind` and `group` apart.
template <typename X>
struct Kinds {
  X* data;
  int64_t row, kind, group;

  X* at(int64_t k, int64_t g) const { return data + k * kind + g * group; }
};

// c[rows, columns] += a_g[rows, 16] b_g[16, columns] of several groups g of float32, each of which has shown[g] rows: a
// multiple of 32, as rows is. Each product of kinds adds two of the six products of terms (kPairKinds), the smallest
// first, of which terms[g] = 2 needs the last two, and 1 the last:
//
//     a, kind 1: (a0, a2)    b, kind 2: (b2, b0)    a0 b2 + a2 b0
//     a, kind 0: (a0, a1)    b, kind 1: (b1, b0)    a0 b1 + a1 b0
//     a, kind 0: (a0, a1)    b, kind 0: (b0, b1)    a0 b0 + a1 b1
LINBIAS_PRODUCT void add_groups(MatrixUnit& unit, int64_t rows, int64_t columns, int64_t groups, const int64_t* shown,
                                const int* terms, Kinds<uint16_t> a, Kinds<uint32_t> b, float* c) {
  for (int64_t j = 0; j < columns; j += 2 * kLanes16) {
    for (int64_t i = 0; i < rows; i += 2 * kLanes16) {
      Square square(unit, c + i * columns + j, columns, columns - j > kLanes16);
      for (int64_t group = 0; group < groups; ++group) {
        if (shown[group] <= i) continue;
        if (terms[group] > 2) {
          square.take(a.at(1, group) + i * a.row, a.row);
          square.add(b.at(2, group) + j, b.row);
        }
        square.take(a.at(0, group) + i * a.row, a.row);
        if (terms[group] > 1) square.add(b.at(1, group) + j, b.row);
        square.add(b.at(0, group) + j, b.row);
      }
    }
  }
}

}  // namespace
}  // namespace linbias::LINBIAS_TARGET
