// Part of attention-inl.h, included within its namespace.
//
// When a tile may leave out a block, or all that lies beyond.

// A row may lose `tolerance` of its probability: this share of it to keys that are not read, and the rest to blocks
// whose scores turn out too low once they are there (the bound of the first has to assume that norms align).
constexpr double kTailShare = 0.75;

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
  for (int64_t i = 0; i < kRows; i += kLanes) {
    const Vector<W> weight = exponential<W>(load(highest + i) - load(scratch.row_max + i));
    store<W>(total + i, load(scratch.left_out + i) + weight * static_cast<W>(kKeys));
  }
  int matters = 0;
  for (int64_t i = 0; i < rows; ++i) {
    matters |= !(highest[i] <= scratch.row_max[i]) | !(total[i] <= allowance * scratch.row_sum[i]);
  }
  if (matters) return false;
  __builtin_memcpy(scratch.left_out, total, sizeof total);
  return true;
}

// Find the entry of a row's norm in the tables of its head; a norm beyond the last one is not known: NaN.
template <typename W>
void find_entry(const Head<W>& head, Scratch<W>& scratch, int64_t i) {
  const double a = static_cast<double>(scratch.norm[i]) * (head.largest > 0 ? static_cast<double>(head.largest) : 1);
  const double entry = a > kShortest ? 2 * __builtin_log2(a / kShortest) : 0;
  const bool known = entry < kEntries - 1;
  scratch.entry[i] = static_cast<int16_t>(known ? entry : 0);
  scratch.fraction[i] = known ? static_cast<W>(entry - scratch.entry[i]) : static_cast<W>(__builtin_nan(""));
}

// May this tile leave out every key from block `nearest` outwards? Comparisons with NaN say no.
template <typename W>
bool is_covered(const Tile<W>& tile, Scratch<W>& scratch, Side side, int64_t nearest, const W* table, W slack) {
  const W m = tile.slope[side];
  if (!(m > 0)) return false;
  const Call& call = *tile.call;
  const W share = static_cast<W>(__builtin_log(kTailShare * (call.right ? call.tolerance / 2 : call.tolerance)));
  const int64_t key = side == kLeft ? nearest * kKeys + kKeys - 1 : nearest * kKeys;
  const W distance = static_cast<W>(side == kLeft ? tile.position - key : key - tile.position);
  const W away = side == kLeft ? W{1} : W{-1}, step = m * (1 - slack);
  const W* tails = table + nearest * kEntries;
  for (int64_t n = 0, i = scratch.open_row; n < tile.rows; ++n, i = i + 1 < tile.rows ? i + 1 : 0) {
    const W* lower = tails + scratch.entry[i];
    const W far = lower[0] + scratch.fraction[i] * (lower[1] - lower[0]);
    const W tail = scratch.base[i] + far - step * (distance + away * static_cast<W>(i)) - share;
    if (!(tail <= scratch.row_max[i] + log_from_below(scratch.row_sum[i]))) {
      scratch.open_row = i;
      return false;
    }
  }
  return true;
}
