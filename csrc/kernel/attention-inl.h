// The kernel body, compiled once per CPU target (target_*.cpp) in a namespace of its own.
//
// Computes DESIGN section 1 for [B, heads, length, size] arrays; the certificate is derived in docs/math.md.
//
// Order: keys and values are packed once per key/value head (wide, keys transposed in blocks of 64); then one task
// per (batch, head, tile of 48 query rows) visits key blocks from the nearest outwards, left and right in turn, with
// an online softmax, until the certificate lets it stop. Backward visits the same blocks; a task is a head, or a slice
// of one where heads are few, and adds to gradients of keys and values of its own, summed in a fixed order afterwards.
// Results do not depend on the number of threads.
//
// Keys that stand at given positions (positions-inl.h) go the same ways: a block's distances are read from one row of
// numbers instead of being counted, and the tables of the certificate from sums over the keys instead of a series.
//
// Products: one register block of 6 rows x 4 vectors (2 where registers are few) serves all of them.
// Memory above inputs and results: wide packed keys and values, and per thread a few tiles; in backward also one
// gradient of keys and values per task. No term in T x S.
// bfloat16: where the CPU multiplies pairs of them (LINBIAS_BFLOAT16), these inputs take a way of their own,
// kernel/bfloat16: on a matrix unit (LINBIAS_AMX), together with most calls of float32, or on vectors. Weights of
// bfloat16, summed in float32, are rounded to one, or, for a result that will be differentiated (call.precise), to the
// sum of two: backward takes differences from `out`, and one would cost the gradients of slopes two digits.
// Only C functions and templates of these files are used: an inline function of the standard library, compiled here
// with the target's flags, could be linked into code that runs everywhere.
#pragma once

#include "kernel/backward-inl.h"
#include "kernel/decode-inl.h"
#include "kernel/forward-inl.h"
#include "kernel/points-inl.h"
#include "kernel/reach-inl.h"
#include "kernel/sequences-inl.h"
#if defined(LINBIAS_BFLOAT16)
#include "kernel/bfloat16/backward-inl.h"
#include "kernel/bfloat16/forward-inl.h"
#endif

namespace linbias::LINBIAS_TARGET {
namespace {

// Whether these inputs can be multiplied in pairs: float32 in three terms each, which pays on a matrix unit only.
template <typename In>
constexpr bool kInBfloat16 = false;
#if defined(LINBIAS_BFLOAT16)
template <>
constexpr bool kInBfloat16<Bfloat16> = true;
#endif
#if defined(LINBIAS_AMX)
template <>
constexpr bool kInBfloat16<float> = true;
#endif

// Whether a call is computed in pairs. A matrix unit makes six products for one of float32, of numbers that have to be
// split first: that pays where heads fill the depth of its products and there are several blocks to visit (measured:
// even at 160 tokens, a tenth faster at 192). With the model of the unit every call is, so that tests of it can be
// small.
template <typename In>
[[maybe_unused]] bool pays_in_bfloat16(const Call& call) {
#if defined(LINBIAS_AMX_EMULATED)
  return true;
#endif
  constexpr int64_t kFewest = 192, kNarrowest = 32;
  return sizeof(In) == 2 || (smaller_of(call.T, call.S) >= kFewest && smaller_of(call.D, call.E) >= kNarrowest);
}

template <typename W, typename In>
Status forward_as(const Call& call, const Forward& results) {
  const bool small = call.T <= kFewQueries && call.D <= kLargestSize && call.E <= kLargestSize;
  if (small && !call.precise && !(call.dropout > 0)) return decode_as<W, In>(call, results);
  return within_reach<W, In>(call, [&](const Call& narrowed) {
#if defined(LINBIAS_BFLOAT16)
    if constexpr (kInBfloat16<In>) {
      if (pays_in_bfloat16<In>(narrowed)) return forward_with<Bfloat16ForwardWork<In>>(narrowed, results);
    }
#endif
    return forward_with<ForwardWork<W, In>>(narrowed, results);
  });
}

template <typename W, typename In>
Status backward_as(const Call& call, const Backward& results) {
#if defined(LINBIAS_BFLOAT16)
  if constexpr (kInBfloat16<In>) {
    if (pays_in_bfloat16<In>(call)) return backward_with<Bfloat16BackwardWork<In>>(call, results);
  }
#endif
  return backward_with<BackwardWork<W, In>>(call, results);
}

// Run compute for the types of a call: the wide one, and that of its inputs.
template <typename Compute>
Status with_types(const Call& call, const Compute& compute) {
  switch (call.dtype) {
    case DType::float32: return compute(float{}, float{});
    case DType::float64: return compute(double{}, double{});
    case DType::float16: return compute(float{}, Float16{});
    case DType::bfloat16: return compute(float{}, Bfloat16{});
  }
  return Status::ok;
}

}  // namespace

Status forward(const Call& call, const Forward& results) {
  return with_types(call, [&]<typename W, typename In>(W, In) { return forward_as<W, In>(call, results); });
}

Status forward(const Call& call, const NewTokens& tokens, const Forward& results) {
  return with_types(call, [&]<typename W, typename In>(W, In) {
    append_as<W, In>(call, tokens);
    return forward_as<W, In>(call, results);
  });
}

Status write(const Call& call, const NewTokens& tokens, const int64_t* slots) {
  return with_types(call, [&]<typename W, typename In>(W, In) {
    write_as<W, In>(call, tokens, slots);
    return Status::ok;
  });
}

Status backward(const Call& call, const Backward& results) {
  return with_types(call, [&]<typename W, typename In>(W, In) { return backward_as<W, In>(call, results); });
}

Status forward(const Call& call, const Sequences& sequences, const Forward& results) {
  return with_types(call, [&]<typename W, typename In>(W, In) {
    return each_sequence<W, In>(call, sequences, results, forward_as<W, In>);
  });
}

Status backward(const Call& call, const Sequences& sequences, const Backward& results) {
  return with_types(call, [&]<typename W, typename In>(W, In) {
    return each_sequence<W, In>(call, sequences, results, backward_as<W, In>);
  });
}

Status forward(const Call& call, const Points& points, const Forward& results) {
  return with_types(call, [&]<typename W, typename In>(W, In) { return forward_points<W, In>(call, points, results); });
}

Status backward(const Call& call, const Points& points, const Backward& results) {
  return with_types(call,
                    [&]<typename W, typename In>(W, In) { return backward_points<W, In>(call, points, results); });
}

}  // namespace linbias::LINBIAS_TARGET
