// The backward pass: how the tiles of a call are shared out, in which order each takes the blocks that forward visited,
// and the sums over tasks. What is computed for a block is in BackwardWork, on vectors, or Bfloat16BackwardWork, in
// pairs.
#pragma once

#include "kernel/certificate-inl.h"
#include "kernel/packing-inl.h"
#include "kernel/products-inl.h"
#include "kernel/tile-inl.h"
#include "parallel.h"

namespace linbias::LINBIAS_TARGET {
namespace {

template <typename W>
LINBIAS_INLINE W lse_gradient(const Backward& results, int64_t at) {
  return results.dlse ? static_cast<const W*>(results.dlse)[at] : W{0};
}

// Blocks [first, end) of a head.
struct Blocks {
  int64_t first, end;
  bool holds(int64_t block) const { return first <= block && block < end; }
};

// The blocks that forward visited for a tile.
template <typename W>
Blocks visited_blocks(const Tile<W>& tile, const Forward& saved) {
  const int64_t at = (tile.b * tile.call->H + tile.h) * saved.visited_tiles + tile.start / kRows;
  const int32_t* counts = saved.visited + at * 2;
  const int64_t first = tile.near_first, last = tile.near_last;
  return {tile.hidden[kLeft] ? first : clamp(first - counts[kLeft], 0, first),
          (tile.hidden[kRight] ? last : clamp(last + counts[kRight], last, tile.head->num_blocks - 1)) + 1};
}

// The smallest range of blocks that holds all that some tiles of a head visited.
template <typename W>
Blocks visited_blocks(const Call& call, const Packed<W>& packed, const Forward& saved, int64_t b, int64_t h,
                      int64_t from, int64_t to) {
  Blocks all = {packed.num_blocks, 0};
  for (int64_t t = from; t < to; ++t) {
    const Blocks blocks = visited_blocks(Tile<W>(call, packed, b, h, t), saved);
    if (blocks.first >= blocks.end) continue;
    all = {smaller_of(all.first, blocks.first), larger_of(all.end, blocks.end)};
  }
  return all;
}

// Clear the rows of some blocks.
template <typename W>
void clear_blocks(W* rows, int64_t size, Blocks blocks) {
  const int64_t count = larger_of(blocks.end - blocks.first, 0) * kKeys * size;
  __builtin_memset(rows + blocks.first * kKeys * size, 0, sizeof(W) * static_cast<size_t>(count));
}

// Work computes one tile: begin() loads it, visit(block, negligible) adds a block, and finish() stores dq. `negligible`
// tells visit whether the blocks beyond, on the same side, had next to nothing to add, and is then the answer for this
// one.
template <typename Work>
struct BackwardTask {
  using W = typename Work::Wide;
  const Call& call;
  const Backward& results;
  const typename Work::PackedHeads& packed;
  const typename Work::Packer& pack;
  typename Work::WorkScratch* scratches;
  int64_t num_tiles, num_slices, tiles_per_slice;
  W *dk, *dv;          // [B, H, slices, rows, D or E padded], or by head [threads, rows, ...]
  double* dslopes;     // [B, H, slices, 2]
  double* dpositions;  // [B, H, slices, S], or null
  Blocks* blocks;      // those in which dk and dv hold anything: [B, H, slices] or [threads]

  // The gradients of keys and values that a task or worker adds to.
  W* keys_gradient(int64_t index) const { return dk + index * packed.rows * packed.padded_D; }
  W* values_gradient(int64_t index) const { return dv + index * packed.rows * packed.padded_E; }
  void clear_gradients(int64_t index, Blocks of) const {
    blocks[index] = of;
    clear_blocks(keys_gradient(index), packed.padded_D, of);
    clear_blocks(values_gradient(index), packed.padded_E, of);
  }

  // Compute a slice of a query head, which is some of its tiles.
  static void run(void* context, int64_t task, int worker) {
    const BackwardTask& self = *static_cast<const BackwardTask*>(context);
    const Call& call = self.call;
    const int64_t index = call.B * call.H * self.num_slices - 1 - task;  // the flattest heads first
    const int64_t slice = index % self.num_slices, b = index / self.num_slices / call.H,
                  h = index / self.num_slices % call.H;
    const int64_t from = slice * self.tiles_per_slice, to = smaller_of(from + self.tiles_per_slice, self.num_tiles);
    self.clear_gradients(index, visited_blocks<W>(call, self.packed, self.results.saved, b, h, from, to));
    self.tiles(b, h, slice, worker);
  }

  // Compute all query heads that read one key/value head.
  static void run_head(void* context, int64_t task, int worker) {
    const BackwardTask& self = *static_cast<const BackwardTask*>(context);
    const int64_t index = self.call.B * self.call.G - 1 - task;
    const Readers readers(self.call, index);
    pack_head(self.pack, index, worker, worker);
    self.clear_gradients(worker, {0, self.packed.num_blocks});
    for (int64_t h = readers.first; h < readers.end; ++h) self.tiles(readers.b, h, 0, worker);
    self.collect_rows(index, 0, self.call.S, worker, 1);
  }

  // Compute the tiles of a slice of a query head.
  void tiles(int64_t b, int64_t h, int64_t slice, int worker) const {
    const int64_t index = (b * call.H + h) * num_slices + slice, gradients = packed.by_head ? worker : index;
    const int64_t from = slice * tiles_per_slice, to = smaller_of(from + tiles_per_slice, num_tiles);
    double* dslopes_of = dslopes + 2 * index;
    dslopes_of[kLeft] = dslopes_of[kRight] = 0;
    double* dpositions_of = dpositions ? dpositions + index * call.S : nullptr;
    if (dpositions) __builtin_memset(dpositions_of, 0, sizeof(double) * static_cast<size_t>(call.S));
    for (int64_t t = from; t < to; ++t) {
      const Tile<W> tile(call, packed, b, h, t);
      Work work{call,
                results,
                packed,
                tile,
                packed.slot_of(call, b, h, worker),
                scratches[worker],
                keys_gradient(gradients),
                values_gradient(gradients),
                dpositions ? dpositions_of + tile.head->first : nullptr};
      work.begin();
      const Blocks visited = visited_blocks(tile, results.saved);
      // From either end inwards, as the outer blocks may turn out to be negligible.
      typename Work::Negligible negligible[2] = {typename Work::Negligible(true), typename Work::Negligible(true)};
      for (int64_t block = visited.first; block <= tile.near_last; ++block) {
        if (tile.is_seen(block)) work.visit(block, negligible[kLeft]);
      }
      for (int64_t block = visited.end - 1; block > tile.near_last; --block) {
        if (tile.is_seen(block)) work.visit(block, negligible[kRight]);
      }
      add_slope_gradients(work, dslopes_of);
      for (int64_t i = 0; dpositions && i < tile.rows; ++i) {
        static_cast<W*>(results.dquery_positions)[tile.index(i)] = -work.scratch.pull_sum[i];
      }
      work.finish();
      if (packed.skips && static_cast<W>(call.tolerance) > kUnitRoundoff<W>) add_missing_gradients(work);
    }
  }

  // The gradients of a row's scores would sum up to dlse, had backward left out the blocks that forward did. Where it
  // left out others, what keys share would stay in dq times the difference. That goes to the key nearest to the row, so
  // that dq loses what the keys left out differ by from this one (docs/math.md, section 5). A difference below rounding
  // says nothing.
  void add_missing_gradients(const Work& work) const {
    const Tile<W>& tile = work.tile;
    for (int64_t i = 0; i < tile.rows; ++i) {
      if (!work.has_keys(i)) continue;
      const int64_t at = tile.index(i), key = tile.key_nearest_to(i);
      const W missing = lse_gradient<W>(results, at) - work.scratch.dscore_sum[i];
      const auto* k = row_of<typename Work::Input>(call.k, tile.b, tile.h / (call.H / call.G), tile.head->first + key);
      W* dq = static_cast<W*>(results.dq) + at * call.D;
      for (int64_t d = 0; d < call.D; ++d) dq[d] += static_cast<W>(call.scale) * missing * static_cast<W>(widen(k[d]));
      if (!dpositions) continue;
      static_cast<W*>(results.dquery_positions)[at] -=
          missing * (tile.orders[i] >= key ? tile.slope[kLeft] : -tile.slope[kRight]);
    }
  }

  // dslope = -sum dscore |distance| is a sum of large numbers that cancel. In exact arithmetic sum dscore is dlse; the
  // difference is rounding error, mostly that of delta, of which every dscore has a share in proportion to its weight.
  void add_slope_gradients(const Work& work, double* dslopes_of) const {
    const Rows<W>& rows = work.scratch;
    for (int64_t i = 0; i < work.tile.rows; ++i) {
      if (!work.has_keys(i)) continue;
      const W error = (rows.dscore_sum[i] - lse_gradient<W>(results, work.tile.index(i))) / rows.row_sum[i];
      for (int side = kLeft; side <= kRight; ++side) {
        if (work.tile.hidden[side]) continue;
        dslopes_of[side] -= static_cast<double>(rows.slope_sum[side][i] - error * rows.distance_sum[side][i]);
      }
    }
  }

  // Add up what the readers of a key/value head, and the slices of each, found for one block.
  static void collect(void* context, int64_t task, int) {
    const BackwardTask& self = *static_cast<const BackwardTask*>(context);
    const int64_t block = task % self.packed.num_blocks, index = task / self.packed.num_blocks;
    const Readers readers(self.call, index);
    self.collect_rows(index, block * kKeys, (block + 1) * kKeys,
                      (readers.b * self.call.H + readers.first) * self.num_slices,
                      (readers.end - readers.first) * self.num_slices);
  }

  void collect_rows(int64_t index, int64_t from, int64_t to, int64_t first, int64_t count) const {
    const Head<W>& head = packed.heads.data[index];
    const SeenKeys<W> seen(call, index);
    for (int64_t s = larger_of(from, seen.first - head.first); s < smaller_of(to, seen.end - head.first); ++s) {
      const auto add_up = [&](const W* gradients, int64_t padded, int64_t size, W factor, void* to_rows) {
        W* to_row = static_cast<W*>(to_rows) + key_at(call, call.G, index, head.first + s) * size;
        for (int64_t x = 0; x < size; ++x) to_row[x] = 0;
        for (int64_t source = first; source < first + count; ++source) {
          if (!blocks[source].holds(s / kKeys)) continue;
          const W* row = gradients + (source * packed.rows + s) * padded;
          for (int64_t x = 0; x < size; ++x) to_row[x] += row[x];
        }
        for (int64_t x = 0; factor != 1 && x < size; ++x) to_row[x] *= factor;
      };
      add_up(dk, packed.padded_D, call.D, Work::kScaledQueries ? W{1} : static_cast<W>(call.scale), results.dk);
      add_up(dv, packed.padded_E, call.E, W{1}, results.dv);
    }
  }
};

template <typename Work>
Status backward_with(const Call& call, const Backward& results) {
  using W = typename Work::Wide;
  // Enough tasks to share out, whatever the number of threads: the sums must not depend on it.
  constexpr int64_t kEnoughTasks = 16;
  const int64_t num_tiles = round_up(call.T, kRows) / kRows, num_heads = call.B * call.H;
  for (int64_t head = 0; results.dleft && head < num_heads; ++head) {
    static_cast<W*>(results.dleft)[head] = static_cast<W*>(results.dright)[head] = 0;
  }
  const bool positions_asked = results.dpositions || results.dquery_positions;  // either may be empty
  W* dpositions = static_cast<W*>(results.dpositions);
  for (int64_t at = 0; dpositions && at < num_heads * call.S; ++at) dpositions[at] = 0;
  clear_unseen_gradients<W>(call, results);
  if (num_heads == 0 || num_tiles == 0) return Status::ok;
  typename Work::PackedHeads packed(call, true);
  typename Work::Packer pack(call, packed);
  packed.by_head = packed.is_small(packed.bytes_per_key()) && call.B * call.G >= kEnoughTasks;
  int64_t num_slices = packed.by_head ? 1 : smaller_of(round_up(kEnoughTasks, num_heads) / num_heads, num_tiles);
  const int64_t tiles_per_slice = round_up(num_tiles, num_slices) / num_slices;
  num_slices = round_up(num_tiles, tiles_per_slice) / tiles_per_slice;

  const int64_t sums = packed.by_head ? smaller_of(call.num_threads, call.B * call.G) : num_heads * num_slices;
  Scratches<typename Work::WorkScratch> scratches;
  Buffer<W> dk, dv;
  Buffer<double> dslopes, position_sums;
  Buffer<Blocks> blocks;
  if (!packed.allocate(call) || !scratches.allocate(call, packed) || !dk.allocate(sums, packed.rows, packed.padded_D) ||
      !dv.allocate(sums, packed.rows, packed.padded_E) || !dslopes.allocate(num_heads * num_slices, 2) ||
      !blocks.allocate(sums) || (positions_asked && !position_sums.allocate(num_heads * num_slices, call.S))) {
    return Status::out_of_memory;
  }
  BackwardTask<Work> task{call,       results,         packed,  pack,    scratches.each.data, num_tiles,
                          num_slices, tiles_per_slice, dk.data, dv.data, dslopes.data,        position_sums.data,
                          blocks.data};
  if (packed.by_head) {
    parallel(call, call.B * call.G, BackwardTask<Work>::run_head, &task);
  } else {
    pack_all(pack);
    parallel(call, num_heads * num_slices, BackwardTask<Work>::run, &task);
    parallel(call, call.B * call.G * packed.num_blocks, BackwardTask<Work>::collect, &task);
  }
  for (int64_t head = 0; results.dleft && head < num_heads; ++head) {
    for (int side = kLeft; side <= kRight; ++side) {
      double total = 0;
      for (int64_t slice = 0; slice < num_slices; ++slice) {
        total += dslopes.data[(head * num_slices + slice) * 2 + side];
      }
      static_cast<W*>(side == kLeft ? results.dleft : results.dright)[head] = static_cast<W>(total);
    }
  }
  for (int64_t at = 0; dpositions && at < num_heads * call.S; ++at) {
    const double* of_slices = position_sums.data + at / call.S * num_slices * call.S + at % call.S;
    double total = 0;
    for (int64_t slice = 0; slice < num_slices; ++slice) total += of_slices[slice * call.S];
    dpositions[key_at(call, call.H, at / call.S, at % call.S)] = static_cast<W>(total);
  }
  return Status::ok;
}

// The backward pass of one tile on vectors.
template <typename WideType, typename In>
struct BackwardWork {
  using Wide = WideType;
  using W = Wide;
  using Input = In;
  using PackedHeads = Packed<W>;
  using Packer = PackTask<W, In>;
  using WorkScratch = Scratch<W>;
  using Negligible = bool;
  static constexpr bool kScaledQueries = true;
  static constexpr int kLanes = Simd<W>::kLanes, kVectors = Biased<W>::kVectors;
  const Call& call;
  const Backward& results;
  const PackedHeads& packed;
  const Tile<W>& tile;
  int64_t slot;
  WorkScratch& scratch;
  W *dk, *dv;          // of the head, to add to
  double* dpositions;  // likewise, or null

  bool has_keys(int64_t i) const { return scratch.row_sum[i] != 0; }  // NaN counts

  void begin() {
    load_queries<W, In>(tile, packed.padded_D, scratch.q);
    load_output_gradient();
    for (int64_t i = 0; i < tile.padded_rows * packed.padded_D; ++i) scratch.acc[i] = 0;
  }

  void finish() const {
    const W scale = static_cast<W>(call.scale);
    for (int64_t i = 0; i < tile.rows; ++i) {
      W* to = static_cast<W*>(results.dq) + tile.index(i) * call.D;
      for (int64_t d = 0; d < call.D; ++d) to[d] = scratch.acc[i * packed.padded_D + d] * scale;
    }
  }

  // Load dout and delta divided by the row's sum, so that weights need not be.
  void load_output_gradient() {
    scratch.clear_gradients();
    for (int64_t i = 0; i < tile.padded_rows; ++i) {
      W* dout = scratch.dout + i * packed.padded_E;
      scratch.row_sum[i] = 0;
      scratch.row_max[i] = kInfinity<W>;  // exp(score - inf) = 0: no weight in a row without keys
      const int64_t at = tile.index(i);
      const W log_sum = i < tile.rows ? static_cast<const W*>(results.saved.log_sum)[at] : -kInfinity<W>;
      if (log_sum == -kInfinity<W>) {
        for (int64_t e = 0; e < packed.padded_E; ++e) dout[e] = 0;
        continue;
      }
      scratch.row_max[i] = static_cast<const W*>(results.saved.row_max)[at];
      scratch.row_sum[i] = natural_exp(log_sum);
      const W per_sum = 1 / scratch.row_sum[i];
      const W* given = static_cast<const W*>(results.dout) + at * call.E;
      const W* out = static_cast<const W*>(results.saved.out) + at * call.E;
      Vector<W> products{};
      int64_t e = 0;
      for (; e + kLanes <= call.E; e += kLanes) {
        const Vector<W> x = load(given + e);
        products += x * load(out + e);
        store<W>(dout + e, x * per_sum);
      }
      W delta = sum<W>(products);
      for (; e < call.E; ++e) {
        delta += given[e] * out[e];
        dout[e] = given[e] * per_sum;
      }
      for (; e < packed.padded_E; ++e) dout[e] = 0;
      scratch.delta[i] = (delta - lse_gradient<W>(results, at)) * per_sum;
    }
  }

  // Add what a block gives, unless those beyond were negligible and it is, too.
  void visit(int64_t block, bool& negligible) {
    const Head<W>& head = *tile.head;
    const int64_t rows = tile.padded_rows, D = packed.padded_D, E = packed.padded_E;
    // Keys that no row sees are left out of every product.
    const int64_t shown = tile.shown(block), columns = round_up(shown, kLanes), even = round_up(shown, 2);
    multiply<W>(rows, columns, call.D, {scratch.q, D}, {head.key_columns + block * call.D * kKeys, kKeys},
                {scratch.score, kKeys}, false);
    const Biased<W> biased(tile, block);
    negligible = negligible && packed.skips && biased.far && head.radius[block] == head.radius[block] &&
                 is_negligible(biased, static_cast<W>(call.tolerance * (1 - kTailShare)), scratch);
    if (negligible) return;
    multiply<W>(rows, columns, call.E, {scratch.dout, E}, {head.value_columns + block * call.E * kKeys, kKeys},
                {scratch.dweight, kKeys}, false);
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = columns; j < kKeys; ++j) scratch.dweight[i * kKeys + j] = 0;
      Vector<W> x[kVectors];
      W* row = scratch.score + i * kKeys;
      biased.row(i, row, x);
#pragma GCC unroll 16
      for (int j = 0; j < kVectors; ++j) store<W>(row + j * kLanes, exponential<W>(x[j] - scratch.row_max[i]));
    }
    const W* dropped = scratch.score;
    if (call.dropout > 0) {
      const Dropout dropout(tile);
      dropout.apply(tile, block, scratch.score, scratch.dropped);
      dropout.apply(tile, block, scratch.dweight, scratch.dweight);
      dropped = scratch.dropped;
    }
    multiply<W>(even, E, tile.rows, {dropped, 1, kKeys}, {scratch.dout, E}, {dv + block * kKeys * E, E}, true);
    W pulls[kKeys] = {};
    for (int64_t i = 0; i < rows; ++i) score_gradients(biased, i, pulls);
    for (int64_t s = 0; dpositions && s < shown; ++s) dpositions[block * kKeys + s] += static_cast<double>(pulls[s]);
    multiply<W>(rows, D, shown, {scratch.dweight, kKeys}, {head.keys + block * kKeys * head.key_row, head.key_row},
                {scratch.acc, D}, true);
    multiply<W>(even, D, tile.rows, {scratch.dweight, 1, kKeys}, {scratch.q, D}, {dk + block * kKeys * D, D}, true);
  }

  // Turn the gradients of the weights of row i into those of its scores, and sum what slopes and positions need.
  LINBIAS_INLINE void score_gradients(const Biased<W>& biased, int64_t i, W (&pulls)[kKeys]) {
    Vector<W> total{}, slope[2] = {}, weighted[2] = {};
#pragma GCC unroll 16
    for (int j = 0; j < kVectors; ++j) {
      W* at = scratch.dweight + i * kKeys + j * kLanes;
      const Vector<W> weight = load(scratch.score + i * kKeys + j * kLanes);
      const Vector<W> dscore = weight * (load(at) - scratch.delta[i]), distance = biased.distances(i, j);
      store<W>(at, dscore);
      total += dscore;
      const Vector<W> left = distance > W{0} ? distance : Vector<W>{}, right = left - distance;
      slope[kLeft] += dscore * left;
      weighted[kLeft] += weight * left;
      slope[kRight] += dscore * right;
      weighted[kRight] += weight * right;
    }
    scratch.dscore_sum[i] += sum<W>(total);
    if (dpositions) pull_at_positions(biased, i, pulls);
    for (int side = kLeft; side <= kRight; ++side) {
      if (biased.tile.hidden[side]) continue;
      scratch.slope_sum[side][i] += sum<W>(slope[side]);
      scratch.distance_sum[side][i] += sum<W>(weighted[side]);
    }
  }

  // What the gradients of the scores of row i ask of the positions of keys and of its own.
  void pull_at_positions(const Biased<W>& biased, int64_t i, W (&pulls)[kKeys]) {
    Vector<W> total{};
    for (int j = 0; j < kVectors; ++j) {
      const Vector<W> pull = biased.pull(i, j) * load(scratch.dweight + i * kKeys + j * kLanes);
      store<W>(pulls + j * kLanes, load(pulls + j * kLanes) + pull);
      total += pull;
    }
    scratch.pull_sum[i] += sum<W>(total);
  }
};

}  // namespace
}  // namespace linbias::LINBIAS_TARGET
