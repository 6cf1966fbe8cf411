// XLA binding of the CPU core: foreign function handlers for jax.ffi, handed to Python as capsules.
//
// Arrays are [B, length, heads, size] for q, k, v and [B, heads, length, size] for all that the core writes. Under
// jax.vmap every array has further leading axes: they fold into B, unless there is dropout, whose mask counts B from
// 0 in each call of its own. The caller (linbias/jax/cpu.py) has checked everything.
#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstdint>
#include <new>
#include <utility>
#include <vector>

#include "linbias/attention.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;
namespace nb = nanobind;
using namespace linbias;

namespace {

using Any = ffi::AnyBuffer;
using Result = ffi::Result<ffi::AnyBuffer>;

// The numbers of a call: the attributes of the custom call. What a call is without (not ranged, started, bounded) is
// there but not read.
struct Numbers {
  bool causal, ranged, started, bounded, precise;
  double scale, dropout, tolerance;
  std::int32_t num_threads;
};

// The arrays of a call, in the order in which they come.
struct Operands {
  Any q, k, v, left, right, key_range, query_start, key_bound, seed;
};
struct Kept {  // by forward, for backward
  Any out, row_max, log_sum, visited;
};
struct Cotangents {
  Any dout, dlse;
};
struct Outputs {
  Result out, row_max, log_sum, visited;
};
struct Gradients {
  Result dq, dk, dv, dleft, dright;
};

// Take the next arrays of a list for the fields of a struct of arrays.
template <class List>
class Reader {
 public:
  explicit Reader(const List& from) : list(from) {}

  template <class Record, class Item>
  Record next() {
    return next<Record>(std::make_index_sequence<sizeof(Record) / sizeof(Item)>());
  }

 private:
  const List& list;
  std::size_t at = 0;

  template <class Record, std::size_t... index>
  Record next(std::index_sequence<index...>) {
    const std::size_t from = std::exchange(at, at + sizeof...(index));
    return {list.template get<Any>(from + index).value()...};
  }
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

std::int64_t from_end(const Any& array, std::size_t axis) {
  return array.dimensions()[array.dimensions().size() - axis];
}
std::int64_t from_end(Result& array, std::size_t axis) { return from_end(*array, axis); }

// [B, length, heads, size], contiguous.
Array array(void* data, std::int64_t length, std::int64_t heads, std::int64_t size) {
  return {data, length * heads * size, size, heads * size};
}

// The integers of a batch row, as the core wants them.
std::vector<std::int64_t> widened(const Any& array) {
  const auto* values = static_cast<const std::int32_t*>(array.untyped_data());
  return {values, values + array.element_count()};
}

struct Integers {
  std::vector<std::int64_t> key_range, query_start;
};

Call call(const Operands& from, const Integers& integers, const Numbers& n, const Fold& fold, std::int64_t index) {
  const auto of = [&](const Any& x) { return part(x, index, fold.num_calls); };
  Call c;
  c.dtype = dtype_of(from.q);
  c.B = fold.B;
  c.T = from_end(from.q, 3), c.H = from_end(from.q, 2), c.D = from_end(from.q, 1);
  c.S = from_end(from.v, 3), c.G = from_end(from.v, 2), c.E = from_end(from.v, 1);
  c.q = array(of(from.q), c.T, c.H, c.D);
  c.k = array(of(from.k), c.S, c.G, c.D);
  c.v = array(of(from.v), c.S, c.G, c.E);
  c.left = of(from.left);
  if (!n.causal) c.right = of(from.right);
  if (n.ranged) c.key_range = integers.key_range.data() + index * c.B * c.G * 2;
  if (n.started) c.query_start = integers.query_start.data() + index * c.B;
  if (n.bounded) c.key_bound = of(from.key_bound);
  if (n.dropout > 0) c.seed = *static_cast<std::uint32_t*>(of(from.seed));
  c.scale = n.scale;
  c.dropout = n.dropout;
  c.tolerance = n.tolerance;
  c.num_threads = n.num_threads;
  c.precise = n.precise;
  return c;
}

// Run `compute` (call, index, num_calls) for each call of the core; what fails becomes an error of XLA.
template <class Compute>
ffi::Error run(const Operands& from, const Numbers& n, Compute compute) {
  try {
    const Fold fold(from.q, n.dropout > 0);
    Integers integers;
    if (n.ranged) integers.key_range = widened(from.key_range);
    if (n.started) integers.query_start = widened(from.query_start);
    for (std::int64_t i = 0; i < fold.num_calls; ++i) {
      if (compute(call(from, integers, n, fold, i), i, fold.num_calls) != Status::ok) throw std::bad_alloc();
    }
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted,
                      "attention: no memory for the packed keys and values of this call");
  }
  return ffi::Error::Success();
}

template <class Arrays>
Forward forward_results(Arrays& to, std::int64_t i, std::int64_t n) {
  return {part(to.out, i, n), part(to.row_max, i, n), part(to.log_sum, i, n),
          static_cast<std::int32_t*>(part(to.visited, i, n)), from_end(to.visited, 2)};
}

ffi::Error run_forward(ffi::RemainingArgs arguments, ffi::RemainingRets results, Numbers numbers) {
  const auto operands = Reader(arguments).next<Operands, Any>();
  auto to = Reader(results).next<Outputs, Result>();
  return run(operands, numbers,
             [&](const Call& c, std::int64_t i, std::int64_t n) { return forward(c, forward_results(to, i, n)); });
}

ffi::Error run_backward(ffi::RemainingArgs arguments, ffi::RemainingRets results, Numbers numbers) {
  Reader reader(arguments);
  const auto operands = reader.next<Operands, Any>();
  const auto kept = reader.next<Kept, Any>();
  const auto given = reader.next<Cotangents, Any>();
  auto to = Reader(results).next<Gradients, Result>();
  return run(operands, numbers, [&](const Call& c, std::int64_t i, std::int64_t n) {
    Backward b;
    b.dout = part(given.dout, i, n);
    b.dlse = part(given.dlse, i, n);
    b.saved = forward_results(kept, i, n);
    b.dq = part(to.dq, i, n);
    b.dk = part(to.dk, i, n);
    b.dv = part(to.dv, i, n);
    b.dleft = part(to.dleft, i, n);
    b.dright = part(to.dright, i, n);
    return backward(c, b);
  });
}

}  // namespace

// clang-format off
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    Numbers,
    ffi::StructMember<bool>("causal"),
    ffi::StructMember<bool>("ranged"),
    ffi::StructMember<bool>("started"),
    ffi::StructMember<bool>("bounded"),
    ffi::StructMember<bool>("precise"),
    ffi::StructMember<double>("scale"),
    ffi::StructMember<double>("dropout"),
    ffi::StructMember<double>("tolerance"),
    ffi::StructMember<std::int32_t>("num_threads"));
// clang-format on

XLA_FFI_DEFINE_HANDLER_SYMBOL(linbias_forward, run_forward,
                              ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attrs<Numbers>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(linbias_backward, run_backward,
                              ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attrs<Numbers>());

NB_MODULE(_xla, m) {
  m.attr("forward") = nb::capsule(reinterpret_cast<void*>(linbias_forward));
  m.attr("backward") = nb::capsule(reinterpret_cast<void*>(linbias_backward));
}
