// XLA binding of the CPU core: foreign function handlers for jax.ffi, handed to Python as capsules.
//
// Arrays are [B, length, heads, size] for q, k, v and [B, heads, length, size] for all that the core writes. Under
// jax.vmap every array has further leading axes: they fold into B, unless there is dropout, whose mask counts B from
// 0 in each call of its own. The caller (linbias/jax/cpu.py) has checked everything.
#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstdint>
#include <new>
#include <vector>

#include "linbias/attention.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;
namespace nb = nanobind;
using namespace linbias;

namespace {

using Any = ffi::AnyBuffer;
using Result = ffi::Result<ffi::AnyBuffer>;

// The numbers of a call, decoded from the attributes of the custom call.
struct Numbers {
  bool causal, ranged, bounded, precise;
  double scale, dropout, tolerance;
  std::int32_t num_threads;
};

struct Operands {
  Any q, k, v, left, right, key_range, key_bound, seed;
};

DType dtype_of(const Any& array) {
  switch (array.element_type()) {
    case ffi::DataType::F64: return DType::float64;
    case ffi::DataType::F16: return DType::float16;
    case ffi::DataType::BF16: return DType::bfloat16;
    default: return DType::float32;
  }
}

// Calls of the core that one call of the handler becomes, and the batch rows of each.
struct Fold {
  std::int64_t num_calls, B;

  Fold(const Any& q, bool apart) : num_calls(1), B(1) {
    const auto n = q.dimensions();
    for (std::size_t i = 0; i + 3 < n.size(); ++i) (apart && i + 4 < n.size() ? num_calls : B) *= n[i];
  }
};

// The part of an array that belongs to one call.
void* part(const Any& array, std::int64_t index, std::int64_t num_calls) {
  return static_cast<char*>(array.untyped_data()) + index * static_cast<std::int64_t>(array.size_bytes()) / num_calls;
}
void* part(Result& array, std::int64_t index, std::int64_t num_calls) { return part(*array, index, num_calls); }

std::int64_t from_end(const Any& array, std::size_t axis) { return array.dimensions()[array.dimensions().size() - axis]; }

// [B, length, heads, size], contiguous.
Array array(void* data, std::int64_t length, std::int64_t heads, std::int64_t size) {
  return {data, length * heads * size, size, heads * size};
}

Call call(const Operands& from, const Numbers& n, const std::vector<std::int64_t>& key_range, const Fold& fold,
          std::int64_t index) {
  const std::int64_t T = from_end(from.q, 3), H = from_end(from.q, 2), D = from_end(from.q, 1);
  const std::int64_t S = from_end(from.v, 3), G = from_end(from.v, 2), E = from_end(from.v, 1);
  const auto of = [&](const Any& x) { return part(x, index, fold.num_calls); };
  return {dtype_of(from.q),
          fold.B, H, G, T, S, D, E,
          array(of(from.q), T, H, D), array(of(from.k), S, G, D), array(of(from.v), S, G, E),
          of(from.left), n.causal ? nullptr : of(from.right),
          n.ranged ? key_range.data() + index * fold.B * 2 : nullptr,
          n.bounded ? of(from.key_bound) : nullptr,
          n.scale, n.dropout, n.tolerance,
          n.dropout > 0 ? *static_cast<std::uint32_t*>(of(from.seed)) : 0,
          std::max(1, n.num_threads), n.precise};
}

// Run `compute` (call, index, num_calls) for each call of the core; what fails becomes an error of XLA.
template <class Compute>
ffi::Error run(const Operands& from, const Numbers& n, Compute compute) {
  try {
    const Fold fold(from.q, n.dropout > 0);
    std::vector<std::int64_t> key_range;
    if (n.ranged) {
      const auto* values = static_cast<const std::int32_t*>(from.key_range.untyped_data());
      key_range.assign(values, values + from.key_range.element_count());
    }
    for (std::int64_t i = 0; i < fold.num_calls; ++i) {
      if (compute(call(from, n, key_range, fold, i), i, fold.num_calls) != Status::ok) throw std::bad_alloc();
    }
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted,
                      "attention: no memory for the packed keys and values of this call");
  }
  return ffi::Error::Success();
}

ffi::Error run_forward(Any q, Any k, Any v, Any left, Any right, Any key_range, Any key_bound, Any seed, Result out,
                       Result row_max, Result log_sum, Result visited, bool causal, bool ranged, bool bounded,
                       bool precise, double scale, double dropout, double tolerance, std::int32_t num_threads) {
  const Numbers numbers = {causal, ranged, bounded, precise, scale, dropout, tolerance, num_threads};
  return run({q, k, v, left, right, key_range, key_bound, seed}, numbers,
             [&](const Call& c, std::int64_t i, std::int64_t n) {
               return forward(c, {part(out, i, n), part(row_max, i, n), part(log_sum, i, n),
                                  static_cast<std::int32_t*>(part(visited, i, n)), from_end(*visited, 2)});
             });
}

ffi::Error run_backward(Any q, Any k, Any v, Any left, Any right, Any key_range, Any key_bound, Any seed, Any out,
                        Any row_max, Any log_sum, Any visited, Any dout, Any dlse, Result dq, Result dk, Result dv,
                        Result dleft, Result dright, bool causal, bool ranged, bool bounded, bool precise,
                        double scale, double dropout, double tolerance, std::int32_t num_threads) {
  for (Result* sum : {&dk, &dv, &dleft, &dright}) {
    std::fill_n(static_cast<char*>((*sum)->untyped_data()), (*sum)->size_bytes(), 0);
  }
  const Numbers numbers = {causal, ranged, bounded, precise, scale, dropout, tolerance, num_threads};
  return run({q, k, v, left, right, key_range, key_bound, seed}, numbers,
             [&](const Call& c, std::int64_t i, std::int64_t n) {
               const Forward saved = {part(out, i, n), part(row_max, i, n), part(log_sum, i, n),
                                      static_cast<std::int32_t*>(part(visited, i, n)), from_end(visited, 2)};
               return backward(c, {part(dout, i, n), part(dlse, i, n), saved, part(dq, i, n), part(dk, i, n),
                                   part(dv, i, n), part(dleft, i, n), part(dright, i, n)});
             });
}

template <class Binding>
auto with_numbers(Binding binding) {
  return std::move(binding)
      .template Attr<bool>("causal").template Attr<bool>("ranged").template Attr<bool>("bounded")
      .template Attr<bool>("precise").template Attr<double>("scale").template Attr<double>("dropout")
      .template Attr<double>("tolerance").template Attr<std::int32_t>("num_threads");
}

auto with_operands() {
  return ffi::Ffi::Bind().Arg<Any>().Arg<Any>().Arg<Any>().Arg<Any>().Arg<Any>().Arg<Any>().Arg<Any>().Arg<Any>();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(linbias_forward, run_forward,
                              with_numbers(with_operands().Ret<Any>().Ret<Any>().Ret<Any>().Ret<Any>()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    linbias_backward, run_backward,
    with_numbers(with_operands()
                     .Arg<Any>().Arg<Any>().Arg<Any>().Arg<Any>().Arg<Any>().Arg<Any>()
                     .Ret<Any>().Ret<Any>().Ret<Any>().Ret<Any>().Ret<Any>()));

NB_MODULE(_xla, m) {
  m.attr("forward") = nb::capsule(reinterpret_cast<void*>(linbias_forward));
  m.attr("backward") = nb::capsule(reinterpret_cast<void*>(linbias_backward));
}
