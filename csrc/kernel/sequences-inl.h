// Sequences of lengths of their own in one call: each is a call by itself, of rows of the same arrays. One that is a
// large part of all work is shared out over all threads; of the others each is a task for one thread, so that a
// thousand short texts wait for each other once.
#pragma once

#include "kernel/bounds-inl.h"
#include "kernel/head-inl.h"
#include "parallel.h"

namespace linbias::LINBIAS_TARGET {
namespace {

// Rows [first, end) of the sequence `index`, of which there are `total`.
struct OffsetRange {
  int64_t first, end;

  OffsetRange(const int64_t* offsets, int64_t index, int64_t total)
      : first(clamp(offsets[index], 0, total)), end(clamp(offsets[index + 1], first, total)) {}
};

// Sequences have so many tiles before that of this index at most.
inline int64_t first_tile_of(int64_t first_query, int64_t index) { return first_query / kRows + index; }

template <typename X>
X* behind(X* data, int64_t count) {
  return data ? data + count : nullptr;
}
template <typename X>
void* behind(void* data, int64_t count) {
  return behind(static_cast<X*>(data), count);
}
template <typename X>
const void* behind(const void* data, int64_t count) {
  return behind(static_cast<const X*>(data), count);
}
template <typename X>
Array behind(Array array, int64_t rows) {
  array.data = behind<X>(array.data, rows * array.row);
  return array;
}

// One sequence of a call: the call that it is, and where its rows lie among those of all.
template <typename W, typename In>
struct Sequence {
  const int64_t index;
  const Call& all;
  Call call;
  int64_t first_query, first_key = 0;

  Sequence(const Call& of_all, const Sequences& sequences, int64_t at) : index(at), all(of_all), call(of_all) {
    const OffsetRange queries(sequences.query_offsets, index, all.T);
    first_query = queries.first;
    call.T = queries.end - queries.first;
    if (sequences.key_offsets) {
      const OffsetRange keys(sequences.key_offsets, index, all.S);
      first_key = keys.first;
      call.S = keys.end - keys.first;
    } else {
      call.S = clamp(sequences.key_counts[index], 0, all.num_pages > 0 ? all.pages_row * all.page_keys : 0);
      call.pages = all.pages + index * all.pages_row;
    }
    call.q = behind<In>(all.q, first_query);
    call.k = behind<In>(all.k, first_key);
    call.v = behind<In>(all.v, first_key);
    call.left = behind<W>(all.left, index * all.H);
    call.right = behind<W>(all.right, index * all.H);
    call.key_range = behind(all.key_range, index * all.G * 2);
    call.query_start = behind(all.query_start, index);
    call.own_key = behind(all.own_key, first_query * all.H);
    call.query_range = behind(all.query_range, first_query * 2);
    call.key_bound = behind<W>(all.key_bound, index * all.G);
    call.positions.data = behind<double>(all.positions.data, first_key);
    call.query_positions.data = behind<double>(all.query_positions.data, first_query);
    call.first_query += static_cast<uint32_t>(first_query);
    call.first_key += static_cast<uint32_t>(first_key);
    call.by_row = true;
  }

  Forward of(Forward results) const {
    const int64_t rows = first_query * all.H;
    results.out = results.narrow ? behind<Bfloat16>(results.out, rows * all.E) : behind<W>(results.out, rows * all.E);
    results.row_max = behind<W>(results.row_max, rows);
    results.log_sum = behind<W>(results.log_sum, rows);
    results.visited = behind(results.visited, 2 * first_tile_of(first_query, index) * 2);
    return results;
  }

  Backward of(Backward results) const {
    const int64_t rows = first_query * all.H, key_rows = first_key * all.G;
    results.saved = of(results.saved);
    results.dout = behind<W>(results.dout, rows * all.E);
    results.dlse = behind<W>(results.dlse, rows);
    results.dq = behind<W>(results.dq, rows * all.D);
    results.dk = behind<W>(results.dk, key_rows * all.D);
    results.dv = behind<W>(results.dv, key_rows * all.E);
    results.dleft = behind<W>(results.dleft, index * all.H);
    results.dright = behind<W>(results.dright, index * all.H);
    results.dpositions = behind<W>(results.dpositions, first_key * all.H);
    results.dquery_positions = behind<W>(results.dquery_positions, rows);
    return results;
  }

  double work() const { return static_cast<double>(call.T) * static_cast<double>(call.S + 1); }
};

// The largest |k| of the pages of each sequence, [count, G].
template <typename W>
void bound_keys(const Call& call, const Sequences& sequences, W* bounds) {
  for (int64_t index = 0; index < sequences.count; ++index) {
    const int64_t most = call.num_pages > 0 ? call.pages_row * call.page_keys : 0;
    const int64_t keys = clamp(sequences.key_counts[index], 0, most);
    for (int64_t g = 0; g < call.G; ++g) {
      W& bound = bounds[index * call.G + g] = 0;
      for (int64_t j = 0; j * call.page_keys < keys; ++j) {
        const int64_t page = clamp(call.pages[index * call.pages_row + j], 0, call.num_pages - 1);
        bound = larger_or_nan(bound, static_cast<const W*>(sequences.page_norms)[page * call.G + g]);
      }
    }
  }
}

// Compute all sequences; run(call, results) computes one.
template <typename W, typename In, typename Results, typename Run>
struct SequencesTask {
  const Call& call;
  const Sequences& sequences;
  const Results& results;
  const Run& run;
  const int64_t* small;  // those that take one thread each
  bool failed;

  void compute(int64_t index, int num_threads) {
    Sequence<W, In> sequence(call, sequences, index);
    sequence.call.num_threads = num_threads;
    if (run(sequence.call, sequence.of(results)) != Status::ok) __atomic_store_n(&failed, true, __ATOMIC_RELAXED);
  }

  static void one(void* context, int64_t task, int) {
    SequencesTask& self = *static_cast<SequencesTask*>(context);
    self.compute(self.small[task], 1);
  }
};

template <typename W, typename In, typename Results, typename Run>
Status each_sequence(Call call, const Sequences& sequences, const Results& results, const Run& run) {
  constexpr double kLargePart = 0.25;  // of what a thread has to do
  Buffer<int64_t> small;
  Buffer<W> bounds;
  if (!small.allocate(sequences.count)) return Status::out_of_memory;
  if (sequences.page_norms) {
    if (!bounds.allocate(sequences.count, call.G)) return Status::out_of_memory;
    bound_keys(call, sequences, bounds.data);
    call.key_bound = bounds.data;
  }
  double total = 0;
  for (int64_t i = 0; i < sequences.count; ++i) total += Sequence<W, In>(call, sequences, i).work();
  SequencesTask<W, In, Results, Run> task{call, sequences, results, run, small.data, false};
  int64_t num_small = 0;
  for (int64_t i = 0; i < sequences.count; ++i) {
    const bool is_large = Sequence<W, In>(call, sequences, i).work() * call.num_threads > total * kLargePart;
    if (is_large) task.compute(i, call.num_threads);
    else small.data[num_small++] = i;
  }
  parallel(call, num_small, task.one, &task);
  return task.failed ? Status::out_of_memory : Status::ok;
}

}  // namespace
}  // namespace linbias::LINBIAS_TARGET
