// When a tile may leave out a block, or all that lies beyond.
#pragma once

#include "kernel/bounds-inl.h"
#include "kernel/tile-inl.h"

namespace linbias::LINBIAS_TARGET {
namespace {

// A row may lose `tolerance` of its probability: this share of it to keys that are not read, and the rest to blocks
// whose scores turn out too low once they are there (the bound of the first has to assume that norms align).
constexpr double kTailShare = 0.75;

// A block is to be left out whose best scores lie `high` above the pivots of some rows, one vector of them from row
// `from` on, and there weigh `weight`. Say which of these rows it matters to (-1, else 0), and in `total` what is then
// left out of each.
template <typename W>
LINBIAS_INLINE typename Simd<W>::Integers matters_to(const Rows<W>& rows, int64_t from, int64_t num_rows,
                                                     Vector<W> high, Vector<W> weight, W allowance, Vector<W>& total) {
  using Integers = typename Simd<W>::Integers;
  total = load(rows.left_out + from) + weight * static_cast<W>(kKeys);
  Integers matters = ~((Integers)(high <= W{0}) & (Integers)(total <= allowance * load(rows.row_sum + from)));
  for (int lane = 0; lane < Simd<W>::kLanes; ++lane) matters[lane] = from + lane < num_rows ? matters[lane] : 0;
  return matters;
}

// Would the block whose products are in scratch.score add next to nothing to any row? If so, add it to what is left
// out.
template <typename W>
bool is_negligible(const Biased<W>& biased, W allowance, Scratch<W>& scratch) {
  constexpr int kLanes = Simd<W>::kLanes, kVectors = Biased<W>::kVectors;
  static_assert(kRows % kLanes == 0);
  const int64_t rows = biased.tile.rows;
  W highest[kRows] = {}, total[kRows];
  for (int64_t i = 0; i < rows; ++i) {
    Vector<W> x[kVectors];
    biased.row(i, scratch.score + i * kKeys, x);
#pragma GCC unroll 16
    for (int j = 1; j < kVectors; ++j) x[0] = larger<W>(x[0], x[j]);
    highest[i] = largest<W>(x[0])[0];
  }
  typename Simd<W>::Integers matters{};
  for (int64_t i = 0; i < kRows; i += kLanes) {
    const Vector<W> high = load(highest + i) - load(scratch.row_max + i);
    Vector<W> with;
    matters |= matters_to<W>(scratch, i, rows, high, exponential<W>(high), allowance, with);
    store<W>(total + i, with);
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    if (matters[lane]) return false;
  }
  __builtin_memcpy(scratch.left_out, total, sizeof total);
  return true;
}

// Store what the certificate needs of query i: its length, its product with the center of the head, and where its norm
// lies in the head's tables of tails. Beyond the last entry of a table no bound is known: NaN.
template <typename W>
LINBIAS_INLINE void note_query(const Head<W>& head, Rows<W>& rows, int64_t i, W length, W aligned, W slack) {
  rows.norm[i] = length * (1 + slack) * (1 + slack);
  rows.base[i] = aligned + slack * (rows.norm[i] * (head.center_norm + head.largest));
  const double a = static_cast<double>(rows.norm[i]) * (head.largest > 0 ? static_cast<double>(head.largest) : 1);
  const double entry = a > kShortest ? 2 * __builtin_log2(a / kShortest) : 0;
  const bool known = entry < kEntries - 1;
  rows.entry[i] = static_cast<int16_t>(known ? entry : 0);
  rows.fraction[i] = known ? static_cast<W>(entry - rows.entry[i]) : static_cast<W>(__builtin_nan(""));
  rows.open_row = 0;
}

// May this tile leave out every key from block `nearest` outwards? Comparisons with NaN say no.
template <typename W>
bool is_covered(const Tile<W>& tile, Rows<W>& rows, Side side, int64_t nearest, const W* table, W slack) {
  const W m = tile.slope[side];
  if (!(m > 0)) return false;
  const Call& call = *tile.call;
  const W share =
      static_cast<W>(__builtin_log(kTailShare * (call.right ? call.tolerance / 2 : call.tolerance)) - kSumRounding);
  const int64_t key = side == kLeft ? nearest * kKeys + kKeys - 1 : nearest * kKeys;
  const W away = side == kLeft ? W{1} : W{-1}, step = m * (1 - slack);
  const double nearest_position = tile.positions ? tile.positions[nearest_key(side, nearest, tile.head->num_keys)] : 0;
  const W* tails = table + nearest * kEntries;
  for (int64_t n = 0, i = rows.open_row; n < tile.rows; ++n, i = i + 1 < tile.rows ? i + 1 : 0) {
    if (tile.limited && !tile.row_sees_beyond(i, side, key)) continue;
    const W* lower = tails + rows.entry[i];
    const W far = lower[0] + rows.fraction[i] * (lower[1] - lower[0]);
    W reach = away * static_cast<W>(tile.orders[i] - key);
    if (tile.positions) reach = away * static_cast<W>(tile.query_positions[i] - nearest_position);
    const W tail = rows.base[i] + far - step * reach - share;
    if (!(tail <= rows.row_max[i] + log_from_below(rows.row_sum[i]))) {
      rows.open_row = i;
      return false;
    }
  }
  return true;
}

}  // namespace
}  // namespace linbias::LINBIAS_TARGET
