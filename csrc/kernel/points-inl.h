// Attention over points (linbias/points.h). A tile of queries visits blocks of keys from near to far, by the least
// distance between the boxes around their points, and is done with a head when all blocks not yet visited cannot hold
// more than `tolerance` of any row's probability. With the boxes at distance g_b, for a vector c,
//
//     score <= scale q . c + |scale q| r_b - slope g_b        r_b = max |k_s - c| over the keys of block b
//
// so that the blocks from the i-th on together weigh at most the sum over them of exp(that) times their keys.
//
// Keys and values are packed in the order of the points. Forward: a task is a tile, for all heads. It finds its
// distances to kBlocksAtOnce blocks, and with these goes through one head after the other, whose queries and sums then
// stay in the first cache. Backward visits the same blocks: a task is a few heads, which share distances, and adds to
// gradients of keys and values of its own, tile after tile. Results do not depend on the number of threads.
// Memory above inputs and results: packed keys and values, in backward those of a few heads per thread together with
// their gradients; and per thread a tile of all heads. No term in N x N.
#pragma once

#include "boxes.h"
#include "kernel/backward-inl.h"
#include "kernel/packing-inl.h"
#include "kernel/products-inl.h"
#include "kernel/tile-inl.h"
#include "linbias/points.h"
#include "parallel.h"

namespace linbias::LINBIAS_TARGET {
namespace {

constexpr int64_t kBlocksAtOnce = 8;

// One query head of a tile.
template <typename W>
struct PointsHead : Rows<W> {
  int64_t b, h, slot;  // slot: where the keys and values that it reads are packed
  W slope;
  double top[2];  // the logarithms of the units of the tails
  double dslope;  // of all tiles so far
};

// What a worker needs for one tile, of as many heads as a task has.
template <typename W, typename In>
struct PointsScratch {
  Near* near;     // [num_blocks]
  int64_t* open;  // [heads]: those that read on
  In* gathered;   // [kKeys, larger of D, E]
  W* measured;    // [D + kKeys, kKeys]
  W* distances;   // [kBlocksAtOnce, kRows, kKeys]
  W *score, *dweight;
  PointsHead<W>* heads;
  W *q, *acc, *dout;  // [heads, kRows, padded_D or padded_E]
  double* tails;      // [heads, 2, num_blocks]

  template <typename Shared, typename Take>
  void each_buffer(const Shared& shared, const Take& take) {
    const int64_t num = shared.heads_of_task, D = shared.call.D, E = shared.call.E;
    take(near, shared.num_blocks);
    take(open, num);
    take(gathered, kKeys * larger_of(D, E));
    take(measured, (D + kKeys) * kKeys);
    take(distances, kBlocksAtOnce * kRows * kKeys);
    take(score, kRows * kKeys);
    take(dweight, kRows * kKeys);
    take(heads, num);
    take(q, num * kRows * shared.padded_D);
    take(acc, num * shared.acc_step());
    take(dout, num * kRows * shared.padded_E);
    take(tails, num * 2 * shared.tails_step());
  }
};

// What the tasks of a call share.
template <typename W, typename In>
struct PointsTask {
  using Scratch = PointsScratch<W, In>;
  const Call& call;
  Points points;
  const bool backward;
  const int64_t N, num_blocks, num_tiles, padded_D, padded_E, rows_of_cloud, readers;  // readers: of a key/value head
  int64_t heads_of_task = 0;                                                           // query heads
  Buffer<Box> tiles, blocks;              // [clouds, num_tiles or num_blocks]
  Buffer<Head<W>> packed;                 // [slots]
  Buffer<W> key_columns, values;          // [slots, num_blocks * kKeys, D or E], as Head says, and so on
  Buffer<W> keys, value_columns, dk, dv;  // backward only
  Buffer<W> center, radius, spread;       // forward only
  Scratches<Scratch> scratches;

  PointsTask(const Call& c, const Points& p, bool for_backward)
      : call(c),
        points(p),
        backward(for_backward),
        N(c.T),
        num_blocks(round_up(N, kKeys) / kKeys),
        num_tiles(round_up(N, kRows) / kRows),
        padded_D(round_up(c.D, Simd<W>::kLanes)),
        padded_E(round_up(c.E, Simd<W>::kLanes)),
        rows_of_cloud(c.B / p.clouds),
        readers(c.H / c.G) {
    points.axes = clamp(points.axes, 1, kMostAxes);
    points.global_tokens = clamp(points.global_tokens, 0, N);
  }

  int64_t acc_step() const { return kRows * larger_of(padded_D, padded_E); }
  int64_t tails_step() const { return round_up(num_blocks, Simd<double>::kLanes); }
  int64_t packed_rows() const { return num_blocks * kKeys; }

  bool allocate(int64_t slots) {
    const int64_t rows = packed_rows();
    if (!tiles.allocate(points.clouds, num_tiles) || !blocks.allocate(points.clouds, num_blocks)) return false;
    for (int64_t cloud = 0; cloud < points.clouds; ++cloud) {
      find_boxes(points, N, cloud, kRows, tiles.data + cloud * num_tiles);
      find_boxes(points, N, cloud, kKeys, blocks.data + cloud * num_blocks);
    }
    return scratches.allocate(call, *this) && packed.allocate(slots) && key_columns.allocate(slots, rows, call.D) &&
           (backward ? value_columns.allocate(slots, rows, call.E) && keys.allocate(slots, rows, padded_D) &&
                           dk.allocate(slots, rows, padded_D) && dv.allocate(slots, rows, padded_E)
                     : values.allocate(slots, rows, padded_E) && center.allocate(slots, padded_D) &&
                           radius.allocate(slots, num_blocks) && spread.allocate(slots, num_blocks));
  }

  // The token that stands at a place of the order.
  int64_t token(int64_t cloud, int64_t place) const { return clamp(points.order[cloud * N + place], 0, N - 1); }
  // Where a row of a query head lies in [B, H, N].
  int64_t row(int64_t b, int64_t h, int64_t place) const {
    return (b * call.H + h) * N + token(b / rows_of_cloud, place);
  }

  // Rows of an input in the order of the points, without gaps.
  void gather(const Array& array, int64_t b, int64_t head, int64_t first, int64_t count, int64_t size, In* to) const {
    for (int64_t place = first; place < first + count; ++place, to += size) {
      const In* from = row_of<In>(array, b, head, token(b / rows_of_cloud, place));
      __builtin_memcpy(to, from, sizeof(In) * static_cast<size_t>(size));
    }
  }

  // Say where key/value head `index` of [B, G] is packed.
  void set_up_head(int64_t index, int64_t slot) const {
    Head<W>& head = packed.data[slot];
    head = {};
    head.num_keys = N;
    head.num_blocks = num_blocks;
    head.key_columns = key_columns.data + slot * packed_rows() * call.D;
    if (backward) {
      head.value_columns = value_columns.data + slot * packed_rows() * call.E;
      head.keys = keys.data + slot * packed_rows() * padded_D;
      return;
    }
    head.values = values.data + slot * packed_rows() * padded_E;
    head.radius = radius.data + slot * num_blocks;
    head.spread = spread.data + slot * num_blocks;
    head.center = center.data + slot * padded_D;
    head.center_norm = center_of([&](int64_t s) { return row_of<In>(call.k, index / call.G, index % call.G, s); }, N,
                                 call.D, padded_D, head.center);
  }

  void pack_block(int64_t index, int64_t slot, int64_t block, const Scratch& scratch) const {
    const int64_t b = index / call.G, g = index % call.G, D = call.D, E = call.E, first = block * kKeys;
    const int64_t count = smaller_of(kKeys, N - first);
    const Head<W>& head = packed.data[slot];
    gather(call.k, b, g, first, count, D, scratch.gathered);
    pack_columns<W>(scratch.gathered, D, count, D, head.key_columns + first * D);
    if (backward) {
      pack_rows<W>(scratch.gathered, D, count, D, W{1}, kKeys, padded_D,
                   keys.data + (slot * packed_rows() + first) * padded_D);
    }
    gather(call.v, b, g, first, count, E, scratch.gathered);
    if (backward) {
      pack_columns<W>(scratch.gathered, E, count, E, head.value_columns + first * E);
      return;
    }
    pack_rows<W>(scratch.gathered, E, count, E, W{1}, kKeys, padded_E,
                 values.data + (slot * packed_rows() + first) * padded_E);
    measure_block<W>(call, head, block, padded_E, false, slack_of<W>(call.D), scratch.measured);
  }

  // The distances of a tile to a block: to[kRows, kKeys].
  void find_distances(int64_t cloud, int64_t tile, int64_t block, W* to) const {
    const int64_t nowhere = points.global_tokens, axes = points.axes, first = block * kKeys;
    const bool squared = !points.manhattan && axes > 1;
    const double* at = points.at + cloud * (N - nowhere) * axes;
    double keys_at[kMostAxes][kKeys] = {};
    for (int64_t j = larger_of(0, nowhere - first); j < smaller_of(kKeys, N - first); ++j) {
      for (int64_t axis = 0; axis < axes; ++axis) keys_at[axis][j] = at[(first + j - nowhere) * axes + axis];
    }
    for (int64_t i = 0; i < smaller_of(kRows, N - tile * kRows); ++i, to += kKeys) {
      const int64_t place = tile * kRows + i;
      double total[kKeys] = {};
      for (int64_t axis = 0; axis < axes && place >= nowhere; ++axis) {
        const double x = at[(place - nowhere) * axes + axis];
        if (squared) {
          for (int64_t j = 0; j < kKeys; ++j) total[j] += (x - keys_at[axis][j]) * (x - keys_at[axis][j]);
        } else {
          for (int64_t j = 0; j < kKeys; ++j) total[j] += __builtin_fabs(x - keys_at[axis][j]);
        }
      }
      if (squared) {
        for (int64_t j = 0; j < kKeys; ++j) to[j] = static_cast<W>(square_root(total[j]));
      } else {
        for (int64_t j = 0; j < kKeys; ++j) to[j] = static_cast<W>(total[j]);
      }
      for (int64_t j = 0; j < smaller_of(kKeys, nowhere - first); ++j) to[j] = 0;
    }
  }

  // Let the first `num_heads` heads of a scratch visit blocks: reads(x, step) says whether head x reads the block at a
  // step from near to far, and visit(x, block, distances) reads it.
  template <typename Reads, typename Visit>
  void walk(int64_t cloud, int64_t tile, int64_t num_heads, const Scratch& scratch, const Reads& reads,
            const Visit& visit) const {
    int64_t num_open = num_heads;
    for (int64_t x = 0; x < num_heads; ++x) scratch.open[x] = x;
    order_blocks(points, tiles.data[cloud * num_tiles + tile], tile * kRows / kKeys, blocks.data + cloud * num_blocks,
                 num_blocks, scratch.near);
    for (int64_t step = 0; step < num_blocks && num_open > 0; step += kBlocksAtOnce) {
      const int64_t end = smaller_of(step + kBlocksAtOnce, num_blocks), count = num_open;
      for (int64_t j = step; j < end; ++j) {
        find_distances(cloud, tile, scratch.near[j].block, scratch.distances + (j - step) * kRows * kKeys);
      }
      num_open = 0;
      for (int64_t i = 0; i < count; ++i) {
        const int64_t x = scratch.open[i];
        int64_t j = step;
        for (; j < end && reads(x, j); ++j) {
          visit(x, scratch.near[j].block, scratch.distances + (j - step) * kRows * kKeys);
        }
        if (j == end) scratch.open[num_open++] = x;
      }
    }
  }

  // Query head h of batch row b, of whose scratch it is head x.
  void load_head(int64_t b, int64_t h, int64_t slot, int64_t tile, int64_t x, const Scratch& scratch) const {
    PointsHead<W>& head = scratch.heads[x];
    head.b = b;
    head.h = h;
    head.slot = slot;
    head.slope = slope_of<W>(call, kLeft, b, h);
    const int64_t rows = smaller_of(kRows, N - tile * kRows);
    gather(call.q, b, h, tile * kRows, rows, call.D, scratch.gathered);
    pack_rows<W>(scratch.gathered, call.D, rows, call.D, static_cast<W>(call.scale), round_up(rows, kBlockRows),
                 padded_D, scratch.q + x * kRows * padded_D);
    __builtin_memset(scratch.acc + x * acc_step(), 0, sizeof(W) * static_cast<size_t>(acc_step()));
  }

  // The products of the queries of head x and a block's keys, -inf for keys that are missing.
  void find_scores(int64_t x, int64_t block, int64_t padded_rows, const Scratch& scratch) const {
    const Head<W>& head = packed.data[scratch.heads[x].slot];
    multiply<W>(padded_rows, kKeys, call.D, {scratch.q + x * kRows * padded_D, padded_D},
                {head.key_columns + block * kKeys * call.D, kKeys}, {scratch.score, kKeys}, false);
    for (int64_t j = N - block * kKeys; j < kKeys; ++j) {
      for (int64_t i = 0; i < padded_rows; ++i) scratch.score[i * kKeys + j] = -kInfinity<W>;
    }
  }
};

// The forward pass.
template <typename W, typename In>
struct PointsForward : PointsTask<W, In> {
  using Shared = PointsTask<W, In>;
  using Shared::call, Shared::packed, Shared::padded_D, Shared::padded_E, Shared::num_blocks, Shared::N;
  using typename Shared::Scratch;
  static constexpr int kLanes = Simd<W>::kLanes, kVectors = kKeys / kLanes;
  const Forward& results;
  const W slack;

  PointsForward(const Call& c, const Points& p, const Forward& to)
      : Shared(c, p, false), results(to), slack(slack_of<W>(c.D)) {}

  Status run() {
    constexpr int64_t kPackedAtOnce = 16;  // blocks
    const int64_t num_heads = call.B * call.G;
    this->heads_of_task = this->rows_of_cloud * call.H;
    if (!this->allocate(num_heads)) return Status::out_of_memory;
    for (int64_t index = 0; index < num_heads; ++index) this->set_up_head(index, index);
    const auto pack = [](void* context, int64_t task, int worker) {
      const PointsForward& self = *static_cast<const PointsForward*>(context);
      const int64_t steps = round_up(self.num_blocks, kPackedAtOnce) / kPackedAtOnce, index = task / steps,
                    from = task % steps * kPackedAtOnce;
      for (int64_t block = from; block < smaller_of(from + kPackedAtOnce, self.num_blocks); ++block) {
        self.pack_block(index, index, block, self.scratches.each.data[worker]);
      }
    };
    parallel(call, num_heads * (round_up(num_blocks, kPackedAtOnce) / kPackedAtOnce), pack, this);
    for (int64_t index = 0; index < num_heads; ++index) {
      Head<W>& head = packed.data[index];
      for (int64_t block = 0; block < num_blocks; ++block)
        head.largest = larger_or_nan(head.largest, head.radius[block]);
    }
    const auto tile = [](void* context, int64_t task, int worker) {
      const PointsForward& self = *static_cast<const PointsForward*>(context);
      self.tile(task / self.num_tiles, task % self.num_tiles, self.scratches.each.data[worker]);
    };
    parallel(call, this->points.clouds * this->num_tiles, tile, this);
    return Status::ok;
  }

  void tile(int64_t cloud, int64_t tile, const Scratch& scratch) const {
    const int64_t rows = smaller_of(kRows, N - tile * kRows), padded_rows = round_up(rows, kBlockRows);
    const auto visited = [&](int64_t x) -> int32_t& {
      const PointsHead<W>& head = scratch.heads[x];
      return results.visited[(head.b * call.H + head.h) * this->num_tiles + tile];
    };
    const auto reads = [&](int64_t x, int64_t step) {
      if (step == 0) find_tails(x, rows, scratch);
      else if (is_covered(x, rows, step, scratch)) return false;
      visited(x) = static_cast<int32_t>(step + 1);
      return true;
    };
    const auto visit = [&](int64_t x, int64_t block, const W* distances) {
      PointsHead<W>& head = scratch.heads[x];
      W* acc = scratch.acc + x * this->acc_step();
      this->find_scores(x, block, padded_rows, scratch);
      for (int64_t i = 0; i < rows; ++i) {
        online_softmax(head, i, distances + i * kKeys, scratch.score + i * kKeys, acc + i * padded_E);
      }
      multiply<W>(padded_rows, padded_E, kKeys, {scratch.score, kKeys},
                  {packed.data[head.slot].values + block * kKeys * padded_E, padded_E}, {acc, padded_E}, true);
    };
    for (int64_t x = 0; x < this->heads_of_task; ++x) {
      const int64_t b = cloud * this->rows_of_cloud + x / call.H, h = x % call.H;
      this->load_head(b, h, b * call.G + h / this->readers, tile, x, scratch);
      measure_queries(x, rows, scratch);
    }
    this->walk(cloud, tile, this->heads_of_task, scratch, reads, visit);
    for (int64_t x = 0; x < this->heads_of_task; ++x) finish(x, tile * kRows, rows, scratch);
  }

  // What the certificate needs of the queries.
  void measure_queries(int64_t x, int64_t rows, const Scratch& scratch) const {
    PointsHead<W>& head = scratch.heads[x];
    const Head<W>& keys = packed.data[head.slot];
    for (int64_t i = 0; i < rows; ++i) {
      const W* query = scratch.q + (x * kRows + i) * padded_D;
      Vector<W> squares{}, aligned{};
      for (int64_t d = 0; d < padded_D; d += kLanes) {
        const Vector<W> entries = load(query + d);
        squares += entries * entries;
        aligned += entries * load(keys.center + d);
      }
      head.norm[i] = length_from(sum<W>(squares), query, call.D) * (1 + slack) * (1 + slack);
      head.base[i] = sum<W>(aligned) + slack * (head.norm[i] * (keys.center_norm + keys.largest));
      head.row_max[i] = -kInfinity<W>;
      head.row_sum[i] = 0;
    }
    head.open_row = 0;
  }

  // For the shortest and the longest query, what the blocks from each step on weigh at most, in units of exp(top) and
  // without the part that keys do not change. The logarithm of such a sum is convex in the query's length: for those
  // in between a chord serves.
  void find_tails(int64_t x, int64_t rows, const Scratch& scratch) const {
    PointsHead<W>& head = scratch.heads[x];
    W lengths[2] = {kInfinity<W>, 0};
    for (int64_t i = 0; i < rows; ++i) {
      lengths[0] = head.norm[i] < lengths[0] ? head.norm[i] : lengths[0];
      lengths[1] = larger_or_nan(lengths[1], head.norm[i]);
    }
    for (int64_t i = 0; i < rows; ++i) {
      head.fraction[i] = lengths[0] < lengths[1] ? (head.norm[i] - lengths[0]) / (lengths[1] - lengths[0]) : 0;
    }
    constexpr double kLeast = Simd<double>::kLowest;  // what is below exp(this) counts as much
    const W* radius = packed.data[head.slot].radius;
    const double slope = static_cast<double>(head.slope) * (1 - static_cast<double>(slack));
    for (int end = 0; end < 2; ++end) {
      double* tail = scratch.tails + (x * 2 + end) * this->tails_step();
      double top = -kInfinity<double>, total = 0;
      for (int64_t step = 0; step < num_blocks; ++step) {
        const Near& near = scratch.near[step];
        tail[step] = static_cast<double>(lengths[end]) * static_cast<double>(radius[near.block]) - slope * near.gap;
        top = tail[step] > top ? tail[step] : top;
      }
      for (int64_t step = 0; step < num_blocks; step += Simd<double>::kLanes) {
        const Vector<double> below = load(tail + step) - top;
        store<double>(tail + step, exponential<double>(below < kLeast ? broadcast(kLeast) : below));
      }
      for (int64_t step = num_blocks - 1; step >= 0; --step) tail[step] = total += tail[step];
      head.top[end] = top + __builtin_log(static_cast<double>(kKeys));
    }
  }

  // May head x leave out the blocks from a step on? Comparisons with NaN say no.
  bool is_covered(int64_t x, int64_t rows, int64_t step, const Scratch& scratch) const {
    PointsHead<W>& head = scratch.heads[x];
    const double* tails = scratch.tails + x * 2 * this->tails_step() + step;
    const double share = __builtin_log(call.tolerance) - kSumRounding;
    const double least = head.top[0] + __builtin_log(tails[0]) - share,
                 most = head.top[1] + __builtin_log(tails[this->tails_step()]) - share;
    for (int64_t n = 0, i = head.open_row; n < rows; ++n, i = i + 1 < rows ? i + 1 : 0) {
      const double beyond = least + static_cast<double>(head.fraction[i]) * (most - least);
      const double seen = static_cast<double>(head.row_max[i]) + static_cast<double>(log_from_below(head.row_sum[i]));
      if (!(static_cast<double>(head.base[i]) + beyond <= seen)) {
        head.open_row = i;
        return false;
      }
    }
    return true;
  }

  // Turn the products of row i into weights, and what was summed before to the new maximum.
  LINBIAS_INLINE void online_softmax(PointsHead<W>& head, int64_t i, const W* distances, W* scores, W* acc) const {
    Vector<W> x[kVectors], high = broadcast(-kInfinity<W>), total{};
#pragma GCC unroll 16
    for (int j = 0; j < kVectors; ++j) {
      x[j] = load(scores + j * kLanes) - head.slope * load(distances + j * kLanes);
      high = larger<W>(x[j], high);
    }
    const W highest = largest<W>(high)[0];
    if (highest > head.row_max[i]) {
      const W shrink = exponential<W>(broadcast(head.row_max[i] - highest))[0];
      head.row_max[i] = highest;
      head.row_sum[i] *= shrink;
      for (int64_t e = 0; e < padded_E; e += kLanes) store<W>(acc + e, load(acc + e) * shrink);
    }
    // A row whose scores are all -inf has no maximum, and any finite pivot makes its weights 0.
    const W pivot = head.row_max[i] == -kInfinity<W> ? W{0} : head.row_max[i];
#pragma GCC unroll 16
    for (int j = 0; j < kVectors; ++j) {
      const Vector<W> weight = exponential<W>(x[j] - pivot);
      total += weight;
      store<W>(scores + j * kLanes, weight);
    }
    head.row_sum[i] += sum<W>(total);
  }

  void finish(int64_t x, int64_t first, int64_t rows, const Scratch& scratch) const {
    const PointsHead<W>& head = scratch.heads[x];
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t at = this->row(head.b, head.h, first + i);
      const W* acc = scratch.acc + x * this->acc_step() + i * padded_E;
      W* out = static_cast<W*>(results.out) + at * call.E;
      for (int64_t e = 0; e < call.E; ++e) out[e] = acc[e] / head.row_sum[i];
      static_cast<W*>(results.row_max)[at] = head.row_max[i];
      static_cast<W*>(results.log_sum)[at] = natural_log(head.row_sum[i]);
    }
  }
};

// The backward pass.
template <typename W, typename In>
struct PointsBackward : PointsTask<W, In> {
  using Shared = PointsTask<W, In>;
  using Shared::call, Shared::packed, Shared::padded_D, Shared::padded_E, Shared::num_blocks, Shared::N,
      Shared::readers;
  using typename Shared::Scratch;
  static constexpr int kLanes = Simd<W>::kLanes, kVectors = kKeys / kLanes;
  const Backward& results;
  int64_t heads_at_once = 1;  // key/value heads of a task

  PointsBackward(const Call& c, const Points& p, const Backward& to) : Shared(c, p, true), results(to) {}

  int64_t heads_of_cloud() const { return this->rows_of_cloud * call.G; }
  int64_t tasks_of_cloud() const { return round_up(heads_of_cloud(), heads_at_once) / heads_at_once; }

  Status run() {
    // A task of more heads has fewer distances to find; two tasks a thread even out what heads differ in.
    constexpr int64_t kMostAtOnce = 4, kTasksEach = 2;
    heads_at_once = clamp(heads_of_cloud() * this->points.clouds / (kTasksEach * call.num_threads), 1,
                          larger_of(1, smaller_of(kMostAtOnce, heads_of_cloud())));
    this->heads_of_task = heads_at_once * readers;
    const int64_t num_tasks = this->points.clouds * tasks_of_cloud();
    if (!this->allocate(smaller_of(call.num_threads, num_tasks) * heads_at_once)) return Status::out_of_memory;
    const auto some = [](void* context, int64_t task, int worker) {
      const PointsBackward& self = *static_cast<const PointsBackward*>(context);
      const int64_t cloud = task / self.tasks_of_cloud(), from = task % self.tasks_of_cloud() * self.heads_at_once;
      self.some_heads(cloud, from, smaller_of(from + self.heads_at_once, self.heads_of_cloud()), worker);
    };
    parallel(call, num_tasks, some, this);
    return Status::ok;
  }

  // Compute all query heads that read key/value heads [from, to) of a cloud.
  void some_heads(int64_t cloud, int64_t from, int64_t to, int worker) const {
    const Scratch& scratch = this->scratches.each.data[worker];
    const int64_t first_slot = worker * heads_at_once, first_index = cloud * heads_of_cloud() + from;
    const auto clear = [&](W* gradients, int64_t size) {
      __builtin_memset(gradients + first_slot * this->packed_rows() * size, 0,
                       sizeof(W) * static_cast<size_t>((to - from) * this->packed_rows() * size));
    };
    clear(this->dk.data, padded_D);
    clear(this->dv.data, padded_E);
    for (int64_t i = 0; i < to - from; ++i) {
      this->set_up_head(first_index + i, first_slot + i);
      for (int64_t block = 0; block < num_blocks; ++block) {
        this->pack_block(first_index + i, first_slot + i, block, scratch);
      }
    }
    const int64_t num_heads = (to - from) * readers;
    for (int64_t x = 0; x < num_heads; ++x) scratch.heads[x].dslope = 0;
    for (int64_t tile = 0; tile < this->num_tiles; ++tile) {
      for (int64_t x = 0; x < num_heads; ++x) {
        const int64_t index = first_index + x / readers;  // of [B, G]
        this->load_head(index / call.G, index % call.G * readers + x % readers, first_slot + x / readers, tile, x,
                        scratch);
        load_output_gradient(x, tile, scratch);
      }
      this->tile(cloud, tile, num_heads, scratch);
    }
    for (int64_t x = 0; x < num_heads; ++x) {
      const PointsHead<W>& head = scratch.heads[x];
      static_cast<W*>(results.dleft)[head.b * call.H + head.h] = static_cast<W>(head.dslope);
    }
    for (int64_t i = 0; i < to - from; ++i) {
      put_back(this->dk.data, padded_D, call.D, first_index + i, first_slot + i, results.dk);
      put_back(this->dv.data, padded_E, call.E, first_index + i, first_slot + i, results.dv);
    }
  }

  // The rows of a slot to those of key/value head `index` of [B, G, N].
  void put_back(const W* rows, int64_t padded, int64_t size, int64_t index, int64_t slot, void* to) const {
    const int64_t cloud = index / heads_of_cloud();
    rows += slot * this->packed_rows() * padded;
    for (int64_t place = 0; place < N; ++place, rows += padded) {
      __builtin_memcpy(static_cast<W*>(to) + (index * N + this->token(cloud, place)) * size, rows,
                       sizeof(W) * static_cast<size_t>(size));
    }
  }

  // Load dout and delta divided by the rows' sums, so that weights need not be.
  void load_output_gradient(int64_t x, int64_t tile, const Scratch& scratch) const {
    PointsHead<W>& head = scratch.heads[x];
    head.clear_gradients();
    for (int64_t i = 0; i < smaller_of(kRows, N - tile * kRows); ++i) {
      const int64_t at = this->row(head.b, head.h, tile * kRows + i);
      const W log_sum = static_cast<const W*>(results.saved.log_sum)[at];
      head.row_max[i] = static_cast<const W*>(results.saved.row_max)[at];
      head.row_sum[i] = natural_exp(log_sum);
      const W per_sum = 1 / head.row_sum[i];
      const W *given = static_cast<const W*>(results.dout) + at * call.E,
              *out = static_cast<const W*>(results.saved.out) + at * call.E;
      W* dout = scratch.dout + (x * kRows + i) * padded_E;
      W delta = 0;
      for (int64_t e = 0; e < call.E; ++e) {
        delta += given[e] * out[e];
        dout[e] = given[e] * per_sum;
      }
      for (int64_t e = call.E; e < padded_E; ++e) dout[e] = 0;
      head.delta[i] = (delta - lse_gradient<W>(results, at)) * per_sum;
    }
  }

  // Add what a tile gives to the gradients of its queries, keys and values.
  void tile(int64_t cloud, int64_t tile, int64_t num_heads, const Scratch& scratch) const {
    const int64_t rows = smaller_of(kRows, N - tile * kRows), padded_rows = round_up(rows, kBlockRows);
    const auto reads = [&](int64_t x, int64_t step) {
      const PointsHead<W>& head = scratch.heads[x];
      return step < results.saved.visited[(head.b * call.H + head.h) * this->num_tiles + tile];
    };
    const auto visit = [&](int64_t x, int64_t block, const W* distances) {
      PointsHead<W>& head = scratch.heads[x];
      const Head<W>& keys = packed.data[head.slot];
      const int64_t D = padded_D, E = padded_E, first = head.slot * this->packed_rows() + block * kKeys;
      const W *q = scratch.q + x * kRows * D, *dout = scratch.dout + x * kRows * E;
      this->find_scores(x, block, padded_rows, scratch);
      multiply<W>(padded_rows, kKeys, call.E, {dout, E}, {keys.value_columns + block * kKeys * call.E, kKeys},
                  {scratch.dweight, kKeys}, false);
      for (int64_t i = 0; i < rows; ++i) score_gradients(head, i, distances + i * kKeys, scratch);
      multiply<W>(kKeys, E, rows, {scratch.score, 1, kKeys}, {dout, E}, {this->dv.data + first * E, E}, true);
      multiply<W>(padded_rows, D, kKeys, {scratch.dweight, kKeys}, {keys.keys + block * kKeys * D, D},
                  {scratch.acc + x * this->acc_step(), D}, true);
      multiply<W>(kKeys, D, rows, {scratch.dweight, 1, kKeys}, {q, D}, {this->dk.data + first * D, D}, true);
    };
    this->walk(cloud, tile, num_heads, scratch, reads, visit);
    for (int64_t x = 0; x < num_heads; ++x) finish(x, tile * kRows, rows, scratch);
  }

  // Turn the products of row i into weights, those of its dout into the gradients of its scores, and sum what the
  // slopes need.
  LINBIAS_INLINE void score_gradients(PointsHead<W>& head, int64_t i, const W* distances,
                                      const Scratch& scratch) const {
    Vector<W> total{}, slope{}, weighted{};
#pragma GCC unroll 16
    for (int j = 0; j < kVectors; ++j) {
      W *score = scratch.score + i * kKeys + j * kLanes, *dweight = scratch.dweight + i * kKeys + j * kLanes;
      const Vector<W> distance = load(distances + j * kLanes), biased = load(score) - head.slope * distance;
      const Vector<W> weight = exponential<W>(biased - head.row_max[i]);
      const Vector<W> dscore = weight * (load(dweight) - head.delta[i]);
      store<W>(score, weight);
      store<W>(dweight, dscore);
      total += dscore;
      slope += dscore * distance;
      weighted += weight * distance;
    }
    head.dscore_sum[i] += sum<W>(total);
    head.slope_sum[kLeft][i] += sum<W>(slope);
    head.distance_sum[kLeft][i] += sum<W>(weighted);
  }

  // Store the gradients of queries, and add to that of the slope, which is mended as in BackwardTask.
  void finish(int64_t x, int64_t first, int64_t rows, const Scratch& scratch) const {
    PointsHead<W>& head = scratch.heads[x];
    const W scale = static_cast<W>(call.scale);
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t at = this->row(head.b, head.h, first + i);
      const W* acc = scratch.acc + x * this->acc_step() + i * padded_D;
      W* dq = static_cast<W*>(results.dq) + at * call.D;
      for (int64_t d = 0; d < call.D; ++d) dq[d] = acc[d] * scale;
      const W error = (head.dscore_sum[i] - lse_gradient<W>(results, at)) / head.row_sum[i];
      head.dslope -= static_cast<double>(head.slope_sum[kLeft][i] - error * head.distance_sum[kLeft][i]);
    }
  }
};

template <typename W, typename In>
Status forward_points(const Call& call, const Points& points, const Forward& results) {
  return call.B * call.H * call.T > 0 ? PointsForward<W, In>(call, points, results).run() : Status::ok;
}

template <typename W, typename In>
Status backward_points(const Call& call, const Points& points, const Backward& results) {
  return call.B * call.H * call.T > 0 ? PointsBackward<W, In>(call, points, results).run() : Status::ok;
}

}  // namespace
}  // namespace linbias::LINBIAS_TARGET
