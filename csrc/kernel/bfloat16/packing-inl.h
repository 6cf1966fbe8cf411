// Keys and values as products of bfloat16 want them, in terms, with what the certificate needs of them.
#pragma once

#include "kernel/bfloat16/terms-inl.h"
#include "kernel/packing-inl.h"
#if defined(LINBIAS_AMX)
#include "kernel/bfloat16/matrix_unit-inl.h"
#else
#include "kernel/bfloat16/vector_unit-inl.h"
#endif

namespace linbias::LINBIAS_TARGET {
namespace {

// A tolerance below rounding asks for all terms everywhere.
inline bool may_take_fewer_terms(const Call& call) {
  return call.tolerance >= static_cast<double>(kUnitRoundoff<float>) && !(call.dropout > 0);
}

// Keys and values as products want them, in terms; deep_D and deep_E are multiples of 32, the deepest product.
template <typename In>
struct Bfloat16Packed : Packed<float> {
  static constexpr int terms = kTermsOf<In>;
  const int64_t deep_D, deep_E;
  Buffer<uint16_t> key_rows;           // [slots, blocks, terms, kKeys, deep_D]
  Buffer<uint16_t> values_transposed;  // [slots, blocks, terms, padded_E, kKeys], forward only
  Buffer<uint16_t> value_rows;         // [slots, blocks, terms, kKeys, deep_E], backward only
  Buffer<uint16_t> keys_transposed;    // [slots, blocks, terms, padded_D, kKeys], backward only
  Buffer<uint16_t> rows_room;          // [threads, kKeys, deep_E], forward only
  Buffer<uint32_t> keys_room;          // [threads, terms, deep_D / 2, 16], with a certificate

  Bfloat16Packed(const Call& call, bool for_backward)
      : Packed<float>(call, for_backward), deep_D(round_up(call.D, 32)), deep_E(round_up(call.E, 32)) {
    measures = certify || (skips && terms > 1 && may_take_fewer_terms(call));  // which depends on how large scores are
  }

  int64_t groups_at_once() const { return columns_at_once(2 * terms * kKeys * larger_of(deep_D, deep_E)); }

  // Heads of float32 leave the second cache at a sixth of this, but fresh memory for all of them would cost more.
  int64_t bytes_per_key() const { return (terms > 1 ? 1 : 2) * (deep_D + deep_E); }

  bool allocate(const Call& call) {
    const int64_t slots = num_slots(call);
    return heads.allocate(call.B * call.G) && radius.allocate(slots, num_blocks) &&
           key_rows.allocate(slots, rows, terms * deep_D) &&
           (backward ? value_rows.allocate(slots, rows, terms * deep_E) &&
                           keys_transposed.allocate(slots, rows, terms * padded_D)
                     : values_transposed.allocate(slots, rows, terms * padded_E) &&
                           rows_room.allocate(call.num_threads, kKeys, deep_E)) &&
           (!measures || (center.allocate(slots, padded_D) && spread.allocate(slots, num_blocks))) &&
           (!certify ||
            (allocate_tails(call, slots) && keys_room.allocate(call.num_threads, terms * kLanes16, deep_D / 2)));
  }

  Terms<uint16_t> in_block(const Buffer<uint16_t>& of, int64_t slot, int64_t block, int64_t size, int64_t row) const {
    return {of.data + (slot * num_blocks + block) * terms * size, row, terms, size};
  }
  Terms<uint16_t> keys_at(int64_t slot, int64_t block) const {
    return in_block(key_rows, slot, block, kKeys * deep_D, deep_D);
  }
  Terms<uint16_t> values_at(int64_t slot, int64_t block) const {
    return in_block(value_rows, slot, block, kKeys * deep_E, deep_E);
  }
  Terms<uint16_t> keys_transposed_at(int64_t slot, int64_t block) const {
    return in_block(keys_transposed, slot, block, kKeys * padded_D, kKeys);
  }
  Terms<uint16_t> values_transposed_at(int64_t slot, int64_t block) const {
    return in_block(values_transposed, slot, block, kKeys * padded_E, kKeys);
  }
};

// 0, or NaN if any of these bfloat16 is not finite; count is a multiple of 16.
inline float zero_or_nan(const uint16_t* x, int64_t count) {
  Words not_finite{};
  for (int64_t i = 0; i < count; i += 32) {
    const Words two = load_words(x + i);
    const Words low = two << 16 & 0x7fffffffu, high = two & 0x7fff0000u;
    not_finite |= (Words)(low >= 0x7f800000u) | (Words)(high >= 0x7f800000u);
  }
  return in_all_lanes((Lanes)(not_finite == 0u)) ? 0.0f : __builtin_nanf("");
}

// Pack keys and values, and measure them for the certificate.
template <typename In>
struct Bfloat16PackTask : PackTask<float, In> {
  using PackTask<float, In>::call;
  static constexpr int kTerms = kTermsOf<In>;
  Bfloat16Packed<In>& packed;  // which the base knows as Packed

  Bfloat16PackTask(const Call& for_call, Bfloat16Packed<In>& to) : PackTask<float, In>(for_call, to), packed(to) {
    packed.in_place = false;
  }

  void pack(int64_t index, int64_t slot, int64_t from, int64_t to, int worker) const {
    const Head<float>& head = packed.heads.data[index];
    const bool measure_spread = packed.by_spread && this->has_a_long_window(index);
    MatrixUnit unit;
    for (int64_t block = from; block < smaller_of(to, head.num_blocks); ++block) {
      const typename PackTask<float, In>::Block given(*this, index, block, worker);
      const Terms<uint16_t> keys = packed.keys_at(slot, block);
      Terms<uint16_t> values;  // in which what is not finite shows in the first term
      pack_terms(given.k, given.key_row, given.count, call.D, kKeys, keys);
      if (packed.backward) {
        values = packed.values_at(slot, block);
        pack_terms(given.v, given.value_row, given.count, call.E, kKeys, values);
        pack_transposed(keys, packed.padded_D, packed.keys_transposed_at(slot, block));
      } else {
        values = packed.values_transposed_at(slot, block);
        const Terms<uint16_t> room = {packed.rows_room.data + worker * kKeys * packed.deep_E, packed.deep_E};
        pack_transposed(given.v, given.value_row, given.count, call.E, packed.padded_E, room, values);
      }
      head.radius[block] = zero_or_nan(keys.data, keys.step) + zero_or_nan(values.data, values.step);
      if (packed.measures) {
        measure(unit, head, block, given, keys, measure_spread, worker);
      }
    }
  }

  // Does what measure_block does, but takes the Gram matrix of the keys as they are, whose products are exact but for
  // the terms left out, and subtracts the center afterwards; `bound` allows for the rounding of that.
  void measure(MatrixUnit& unit, const Head<float>& head, int64_t block,
               const typename PackTask<float, In>::Block& given, Terms<uint16_t> keys, bool measure_spread,
               int worker) const {
    const int64_t count = smaller_of(kKeys, head.num_keys - block * kKeys), deep_D = packed.deep_D;
    const float slack = slack_of<float>(call.D);
    float along[kKeys], largest_square = 0;  // along: k.c
    for (int64_t s = 0; s < count; ++s) {
      Floats squares{}, products{};
      for (int64_t d = 0; d < packed.padded_D; d += kLanes16) {
        const Floats key = sum_of_terms<kTerms>(keys.data + s * deep_D + d, keys.step), center = load(head.center + d);
        squares += (key - center) * (key - center);
        products += key * center;
      }
      largest_square = larger_or_nan(largest_square, sum<float>(squares));
      along[s] = sum<float>(products);
    }
    const bool ordinary = is_ordinary(largest_square);
    const float radius = ordinary ? square_root(largest_square) : longest_from_center(head, given);
    head.radius[block] += radius;
    head.spread[block] = head.radius[block];
    if (!measure_spread || !ordinary) return;
    const float center_square = head.center_norm * head.center_norm;
    const int64_t size = kLanes16 * deep_D / 2;
    const Terms<uint32_t> columns = {packed.keys_room.data + worker * kTerms * size, kLanes16, kTerms, size};
    Floats largest_row{};
    for (int64_t t = 0; t < count; t += kLanes16) {
      float gram[kKeys * kLanes16];
      pack_column_pairs(keys.at(t * deep_D), kLanes16, columns);
      multiply_columns(unit, 1, kKeys, deep_D, keys, columns, 0, gram, 0, false);
      Floats total{}, off;
      for (int lane = 0; lane < kLanes16; ++lane) off[lane] = t + lane < count ? center_square - along[t + lane] : 0.0f;
      for (int64_t s = 0; s < count; ++s) {
        const Floats entry = load(gram + s * kLanes16) + off - along[s];
        total += entry * entry;
      }
      for (int lane = 0; lane < kLanes16; ++lane) total[lane] = t + lane < count ? total[lane] : 0.0f;
      largest_row = total <= largest_row ? largest_row : total;
    }
    const float bound = radius + 2 * head.center_norm;
    const float square =
        square_root(largest<float>(largest_row)[0] / static_cast<float>(count)) * (1 + slack) + slack * bound * bound;
    head.spread[block] = square_root(square);
  }

  // The largest |k - center| of some keys whose squares vanish or overflow.
  float longest_from_center(const Head<float>& head, const typename PackTask<float, In>::Block& given) const {
    float longest = 0, difference[kLargestSize];
    if (call.D > kLargestSize) return __builtin_nanf("");
    for (int64_t s = 0; s < given.count; ++s) {
      for (int64_t d = 0; d < call.D; ++d) difference[d] = widen(given.k[s * given.key_row + d]) - head.center[d];
      longest = larger_or_nan(longest, length_of<float>(difference, call.D, 1));
    }
    return longest;
  }
};

}  // namespace
}  // namespace linbias::LINBIAS_TARGET
