// The forward pass: how the tiles of a call are shared out, and how each visits its blocks near to far until the
// certificate holds. What is computed for a block is in ForwardWork, on vectors, or Bfloat16ForwardWork, in pairs.
#pragma once

#include "kernel/certificate-inl.h"
#include "kernel/packing-inl.h"
#include "kernel/products-inl.h"
#include "kernel/tile-inl.h"
#include "parallel.h"

namespace linbias::LINBIAS_TARGET {
namespace {

// Work computes one tile: begin() loads it, visit(block, negligible) adds a block, and finish() stores the results.
// `negligible` tells visit whether the block before, on the same side, had next to nothing to add, and is then the
// answer for this one. It returns whether the block was computed in full.
template <typename Work>
struct ForwardTask {
  using W = typename Work::Wide;
  const Call& call;
  const Forward& results;
  const typename Work::PackedHeads& packed;
  const typename Work::Packer& pack;
  typename Work::WorkScratch* scratches;
  int64_t num_tiles;

  static void run(void* context, int64_t task, int worker) {
    const ForwardTask& self = *static_cast<const ForwardTask*>(context);
    // The flattest heads and the last tiles of a causal call have most to do: they come first. Neighbouring tiles read
    // much the same keys, so they follow each other.
    const int64_t head = self.call.B * self.call.H - 1 - task / self.num_tiles;
    const int64_t t = self.num_tiles - 1 - task % self.num_tiles, b = head / self.call.H, h = head % self.call.H;
    self.tile(b, h, t, worker);
  }

  // Compute all query heads that read one key/value head.
  static void run_head(void* context, int64_t task, int worker) {
    const ForwardTask& self = *static_cast<const ForwardTask*>(context);
    const int64_t index = self.call.B * self.call.G - 1 - task;
    const Readers readers(self.call, index);
    pack_head(self.pack, index, worker, worker);
    for (int64_t h = readers.first; h < readers.end; ++h) {
      for (int64_t t = self.num_tiles - 1; t >= 0; --t) self.tile(readers.b, h, t, worker);
    }
  }

  void tile(int64_t b, int64_t h, int64_t t, int worker) const {
    using Negligible = typename Work::Negligible;
    const int64_t slot = packed.slot_of(call, b, h, worker);
    typename Work::WorkScratch& scratch = scratches[worker];
    const Tile<W> tile(call, packed, b, h, t);
    Work work{call, results, packed, tile, slot, scratch, slack_of<W>(call.D)};
    work.begin();
    for (int64_t block = tile.near_last; block >= tile.near_first; --block) {
      if (!tile.is_seen(block)) continue;
      Negligible unknown(false);
      work.visit(block, unknown);
    }
    int64_t next[2] = {tile.near_first - 1, tile.near_last + 1};
    int32_t* visited = results.visited + ((b * call.H + h) * results.visited_tiles + t) * 2;
    visited[kLeft] = visited[kRight] = 0;
    int32_t precise[2] = {0, 0};
    bool open[2] = {!tile.hidden[kLeft] && tile.is_seen_from(next[kLeft], kLeft),
                    !tile.hidden[kRight] && tile.is_seen_from(next[kRight], kRight)};
    Negligible negligible[2] = {Negligible(false), Negligible(false)};
    while (open[kLeft] || open[kRight]) {
      for (int turn = kLeft; turn <= kRight; ++turn) {
        const Side side = static_cast<Side>(turn);
        if (!open[side]) continue;
        if (packed.certify &&
            is_covered<W>(tile, scratch, side, next[side], packed.tails_at(call, slot, h, side), work.slack)) {
          open[side] = false;
          continue;
        }
        const bool in_full = tile.is_seen(next[side]) && work.visit(next[side], negligible[side]);
        ++visited[side];
        if (in_full) precise[side] = visited[side];
        next[side] += side == kLeft ? -1 : 1;
        open[side] = tile.is_seen_from(next[side], side);
      }
    }
    if (results.visited_tiles >= 2 * num_tiles) __builtin_memcpy(visited + 2 * num_tiles, precise, sizeof precise);
    work.finish();
  }
};

template <typename Work>
Status forward_with(const Call& call, const Forward& results) {
  constexpr int64_t kEnoughHeads = 4;  // for each thread: they differ in length
  typename Work::PackedHeads packed(call, false);
  typename Work::Packer pack(call, packed);
  Scratches<typename Work::WorkScratch> scratches;
  // Ranges of queries leave a tile so few of a head's keys that these stay in a cache however many there are.
  const bool small = call.query_range || packed.is_small(packed.bytes_per_key());
  packed.by_head = small && call.B * call.G >= kEnoughHeads * call.num_threads;
  if (!packed.allocate(call) || !pack.room.allocate(call) || !scratches.allocate(call, packed))
    return Status::out_of_memory;
  const int64_t num_tiles = round_up(call.T, kRows) / kRows;
  ForwardTask<Work> task{call, results, packed, pack, scratches.each.data, num_tiles};
  if (packed.by_head) {
    parallel(call, call.B * call.G, ForwardTask<Work>::run_head, &task);
  } else {
    pack_all(pack);
    parallel(call, call.B * call.H * num_tiles, ForwardTask<Work>::run, &task);
  }
  return Status::ok;
}

// The forward pass of one tile on vectors, with an online softmax.
template <typename WideType, typename In>
struct ForwardWork {
  using Wide = WideType;
  using W = Wide;
  using PackedHeads = Packed<W>;
  using Packer = PackTask<W, In>;
  using WorkScratch = Scratch<W>;
  using Negligible = bool;
  static constexpr int kLanes = Simd<W>::kLanes, kVectors = Biased<W>::kVectors;
  const Call& call;
  const Forward& results;
  const PackedHeads& packed;
  const Tile<W>& tile;
  int64_t slot;
  WorkScratch& scratch;
  W slack;

  void begin() {
    load_queries<W, In>(tile, packed.padded_D, scratch.q);
    for (int64_t i = 0; i < tile.padded_rows; ++i) {
      scratch.row_max[i] = -kInfinity<W>;
      scratch.row_sum[i] = scratch.left_out[i] = 0;
    }
    if (packed.certify) measure_queries();
    for (int64_t i = 0; i < tile.padded_rows * packed.padded_E; ++i) scratch.acc[i] = 0;
  }

  // What the certificate needs of the queries.
  void measure_queries() {
    const Head<W>& head = *tile.head;
    for (int64_t i = 0; i < tile.rows; ++i) {
      const W* query = scratch.q + i * packed.padded_D;
      Vector<W> squares{}, aligned{};
      for (int64_t d = 0; d < packed.padded_D; d += kLanes) {
        const Vector<W> x = load(query + d);
        squares += x * x;
        aligned += x * load(head.center + d);
      }
      note_query<W>(head, scratch, i, length_from(sum<W>(squares), query, call.D), sum<W>(aligned), slack);
    }
  }

  // Add a block to the sums of all rows, unless the block before it was negligible and its own scores are, too: then
  // little is left to add beyond it. Returns true: it was computed in full.
  bool visit(int64_t block, bool& negligible) {
    const Head<W>& head = *tile.head;
    // What lies in `score` beyond is hidden from every row.
    const int64_t shown = tile.shown(block), columns = round_up(shown, kLanes);
    multiply<W>(tile.padded_rows, columns, call.D, {scratch.q, packed.padded_D},
                {head.key_columns + block * call.D * kKeys, kKeys}, {scratch.score, kKeys}, false);
    const Biased<W> biased(tile, block);
    const W allowance = static_cast<W>(call.tolerance * (1 - kTailShare));
    const bool may_be_left_out = negligible && packed.skips && head.radius[block] == head.radius[block];
    if (may_be_left_out && is_negligible(biased, allowance, scratch)) return true;
    int matters = 0;
    for (int64_t i = 0; i < tile.rows; ++i) {
      const W added = online_softmax(biased, i);
      matters |= !(added * 16 <= allowance * scratch.row_sum[i]);
    }
    W* weight = scratch.score;
    if (call.dropout > 0) {
      weight = scratch.dropped;
      Dropout(tile).apply(tile, block, scratch.score, weight);
    }
    multiply<W>(tile.padded_rows, packed.padded_E, shown, {weight, kKeys},
                {head.values + block * kKeys * head.value_row, head.value_row}, {scratch.acc, packed.padded_E}, true);
    negligible = !matters;
    return true;
  }

  // Turn the products of row i into weights, and what was summed before to the new maximum. Returns their sum.
  LINBIAS_INLINE W online_softmax(const Biased<W>& biased, int64_t i) {
    Vector<W> x[kVectors];
    W* row = scratch.score + i * kKeys;
    biased.row(i, row, x);
    Vector<W> high = x[0];
#pragma GCC unroll 16
    for (int j = 1; j < kVectors; ++j) high = larger<W>(high, x[j]);
    const W highest = largest<W>(high)[0];
    if (highest > scratch.row_max[i]) {
      const W shrink = exponential<W>(broadcast(scratch.row_max[i] - highest))[0];
      scratch.row_max[i] = highest;
      scratch.row_sum[i] *= shrink;
      scratch.left_out[i] *= shrink;
      W* acc = scratch.acc + i * packed.padded_E;
      for (int64_t e = 0; e < packed.padded_E; e += kLanes) store<W>(acc + e, load(acc + e) * shrink);
    }
    // A row that has seen no key has no maximum, and any finite pivot makes its weights 0.
    const W pivot = scratch.row_max[i] == -kInfinity<W> ? W{0} : scratch.row_max[i];
    Vector<W> total{};
#pragma GCC unroll 16
    for (int j = 0; j < kVectors; ++j) {
      const Vector<W> weight = exponential<W>(x[j] - pivot);
      total += weight;
      store<W>(row + j * kLanes, weight);
    }
    const W added = sum<W>(total);
    scratch.row_sum[i] += added;
    return added;
  }

  void finish() {
    for (int64_t i = 0; i < tile.rows; ++i) {
      const int64_t at = tile.index(i);
      const W row_sum = scratch.row_sum[i], share = 1 / (row_sum == 0 ? W{1} : row_sum);
      store_output<W>(results, at * call.E, call.E, scratch.acc + i * packed.padded_E, share);
      static_cast<W*>(results.row_max)[at] = scratch.row_max[i];
      static_cast<W*>(results.log_sum)[at] = natural_log(row_sum);
    }
  }
};

}  // namespace
}  // namespace linbias::LINBIAS_TARGET
