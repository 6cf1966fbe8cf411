// XLA binding of the CPU core: foreign function handlers for jax.ffi, handed to Python as capsules.
//
// Arrays are [B, length, heads, size] for q, k, v and [B, heads, length, size] for all that the core writes. Under
// jax.vmap every array has further leading axes: they fold into B, unless there is dropout, whose mask counts B from
// 0 in each call of its own. The caller (linbias/jax/impl/cpu.py) has checked everything.
#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <exception>
#include <new>
#include <numeric>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "linbias/attention.h"
#include "xla_interface.h"

namespace nb = nanobind;
namespace xla = linbias::xla;
using namespace linbias;

namespace {

// What XLA hands over, or takes, as one array.
class Any {
 public:
  explicit Any(const xla::Buffer* from) : buffer(from) {}

  char* data() const { return static_cast<char*>(buffer->data); }
  std::int64_t rank() const { return buffer->rank; }
  std::int64_t size(std::int64_t axis) const { return buffer->sizes[axis]; }
  std::int64_t from_end(std::int64_t axis) const { return size(rank() - axis); }
  std::int64_t count() const {
    std::int64_t product = 1;
    for (std::int64_t i = 0; i < rank(); ++i) product *= size(i);
    return product;
  }
  std::int64_t bytes() const { return count() * item_bytes(); }
  DType dtype() const {
    switch (buffer->type) {
      case xla::Type::float64: return DType::float64;
      case xla::Type::float16: return DType::float16;
      case xla::Type::bfloat16: return DType::bfloat16;
      default: return DType::float32;
    }
  }
  // The part that belongs to one of several calls.
  void* part(std::int64_t index, std::int64_t num_calls) const { return data() + index * bytes() / num_calls; }

 private:
  const xla::Buffer* buffer;

  std::int64_t item_bytes() const {
    switch (buffer->type) {
      case xla::Type::float64: return 8;
      case xla::Type::float16:
      case xla::Type::bfloat16: return 2;
      default: return 4;
    }
  }
};

// The numbers of a call: the attributes of the custom call. What a call is without (not ranged, started, bounded,
// placed, limited) is there but not read.
struct Numbers {
  bool causal, ranged, started, bounded, placed, limited, precise;
  double scale, dropout, tolerance;
  std::int32_t num_threads;
};

template <class Number>
constexpr xla::Type type_of = std::is_same_v<Number, bool>     ? xla::Type::boolean
                              : std::is_same_v<Number, double> ? xla::Type::float64
                                                               : xla::Type::int32;

template <class Number>
void read(const xla::Attributes& from, const char* name, Number& to) {
  for (std::int64_t i = 0; i < from.size; ++i) {
    const xla::Text& found = *from.names[i];
    if (found.size != std::strlen(name) || std::memcmp(found.data, name, found.size) != 0) continue;
    const auto* scalar = static_cast<const xla::Scalar*>(from.items[i]);
    if (from.kinds[i] != xla::AttributeKind::scalar || scalar->type != type_of<Number>) break;
    to = *static_cast<const Number*>(scalar->value);
    return;
  }
  throw std::invalid_argument(std::string("attention: no usable attribute ") + name);
}

Numbers read_numbers(const xla::Attributes& from) {
  Numbers n;
  read(from, "causal", n.causal);
  read(from, "ranged", n.ranged);
  read(from, "started", n.started);
  read(from, "bounded", n.bounded);
  read(from, "placed", n.placed);
  read(from, "limited", n.limited);
  read(from, "precise", n.precise);
  read(from, "scale", n.scale);
  read(from, "dropout", n.dropout);
  read(from, "tolerance", n.tolerance);
  read(from, "num_threads", n.num_threads);
  return n;
}

// The arrays of a call, in the order in which they come.
struct Operands {
  Any q, k, v, left, right, key_range, query_start, key_bound, positions, query_positions, query_range, seed;
};
struct Kept {  // by forward, for backward
  Any out, row_max, log_sum, visited;
};
struct Cotangents {
  Any dout, dlse;
};
struct Gradients {
  Any dq, dk, dv, dleft, dright, dpositions, dquery_positions;
};

// Takes the next arrays of a list for the fields of a struct of arrays.
class Reader {
 public:
  explicit Reader(const xla::Buffers& from) : list(from) {}

  template <class Record>
  Record next() {
    constexpr std::int64_t num = sizeof(Record) / sizeof(Any);
    if (at + num > list.size) throw std::invalid_argument("attention: arrays are missing");
    return next<Record>(std::make_index_sequence<num>());
  }

 private:
  const xla::Buffers& list;
  std::int64_t at = 0;

  template <class Record, std::size_t... index>
  Record next(std::index_sequence<index...>) {
    const std::int64_t from = std::exchange(at, at + std::int64_t(sizeof...(index)));
    return {Any(list.items[from + index])...};
  }
};

// Calls of the core that one call of the handler becomes, and the batch rows of each.
struct Fold {
  std::int64_t num_calls, B;

  Fold(const Any& q, bool apart) : num_calls(1), B(1) {
    for (std::int64_t i = 0; i + 3 < q.rank(); ++i) (apart && i + 4 < q.rank() ? num_calls : B) *= q.size(i);
  }
};

// [B, length, heads, size], contiguous.
Array array(void* data, std::int64_t length, std::int64_t heads, std::int64_t size) {
  return {data, length * heads * size, size, heads * size};
}

// The integers of a batch row, as the core wants them.
std::vector<std::int64_t> integers(const Any& array) {
  const auto* values = reinterpret_cast<const std::int32_t*>(array.data());
  return {values, values + array.count()};
}

// Where keys or queries stand, each the sum of its parts (linbias/jax/standing.py).
template <class Number>
std::vector<double> summed(const Any& array) {
  const auto* parts = reinterpret_cast<const Number*>(array.data());
  const std::int64_t num_parts = array.from_end(1);
  std::vector<double> sums;
  sums.reserve(1);  // no address would say that there are no positions, where there are no keys
  sums.resize(array.count() / num_parts);
  for (double& sum : sums) sum = std::accumulate(parts, parts + num_parts, 0.0), parts += num_parts;
  return sums;
}

std::vector<double> positions(const Any& array) {
  return array.dtype() == DType::float64 ? summed<double>(array) : summed<float>(array);
}

// What the core wants wider than it comes.
struct Widened {
  std::vector<std::int64_t> key_range, query_start, query_range;
  std::vector<double> positions, query_positions;
};

Call call(const Operands& from, Widened& widened, const Numbers& n, const Fold& fold, std::int64_t index) {
  const auto of = [&](const Any& x) { return x.part(index, fold.num_calls); };
  Call c;
  c.dtype = from.q.dtype();
  c.B = fold.B;
  c.T = from.q.from_end(3), c.H = from.q.from_end(2), c.D = from.q.from_end(1);
  c.S = from.v.from_end(3), c.G = from.v.from_end(2), c.E = from.v.from_end(1);
  c.q = array(of(from.q), c.T, c.H, c.D);
  c.k = array(of(from.k), c.S, c.G, c.D);
  c.v = array(of(from.v), c.S, c.G, c.E);
  c.left = of(from.left);
  if (!n.causal) c.right = of(from.right);
  if (n.ranged) c.key_range = widened.key_range.data() + index * c.B * c.G * 2;
  if (n.started) c.query_start = widened.query_start.data() + index * c.B;
  if (n.placed) {
    c.positions = {widened.positions.data() + index * c.B * c.H * c.S, c.H * c.S, c.S};
    c.query_positions = {widened.query_positions.data() + index * c.B * c.H * c.T, c.H * c.T, c.T};
  }
  if (n.limited) c.query_range = widened.query_range.data() + index * c.B * c.T * 2;
  if (n.bounded) c.key_bound = of(from.key_bound);
  if (n.dropout > 0) c.seed = *static_cast<std::uint32_t*>(of(from.seed));
  c.scale = n.scale;
  c.dropout = n.dropout;
  c.tolerance = n.tolerance;
  c.num_threads = n.num_threads;
  c.precise = n.precise;
  return c;
}

// Run `compute` (call, index, num_calls) for each call of the core.
template <class Compute>
void run(const Operands& from, const Numbers& n, Compute compute) {
  const Fold fold(from.q, n.dropout > 0);
  Widened wide;
  if (n.ranged) wide.key_range = integers(from.key_range);
  if (n.started) wide.query_start = integers(from.query_start);
  if (n.limited) wide.query_range = integers(from.query_range);
  if (n.placed) wide.positions = positions(from.positions), wide.query_positions = positions(from.query_positions);
  for (std::int64_t i = 0; i < fold.num_calls; ++i) {
    if (compute(call(from, wide, n, fold, i), i, fold.num_calls) != Status::ok) throw std::bad_alloc();
  }
}

Forward forward_results(const Kept& to, std::int64_t i, std::int64_t n) {
  return {to.out.part(i, n), to.row_max.part(i, n), to.log_sum.part(i, n),
          static_cast<std::int32_t*>(to.visited.part(i, n)), to.visited.from_end(2)};
}

void run_forward(const xla::CallFrame& frame) {
  const auto operands = Reader(frame.arguments).next<Operands>();
  const auto to = Reader(frame.results).next<Kept>();
  run(operands, read_numbers(frame.attributes),
      [&](const Call& c, std::int64_t i, std::int64_t n) { return forward(c, forward_results(to, i, n)); });
}

void run_backward(const xla::CallFrame& frame) {
  Reader reader(frame.arguments);
  const auto operands = reader.next<Operands>();
  const auto kept = reader.next<Kept>();
  const auto given = reader.next<Cotangents>();
  const auto to = Reader(frame.results).next<Gradients>();
  run(operands, read_numbers(frame.attributes), [&](const Call& c, std::int64_t i, std::int64_t n) {
    Backward b;
    b.dout = given.dout.part(i, n);
    b.dlse = given.dlse.part(i, n);
    b.saved = forward_results(kept, i, n);
    b.dq = to.dq.part(i, n);
    b.dk = to.dk.part(i, n);
    b.dv = to.dv.part(i, n);
    b.dleft = to.dleft.part(i, n);
    b.dright = to.dright.part(i, n);
    if (c.positions.data != nullptr) {
      b.dpositions = to.dpositions.part(i, n);
      b.dquery_positions = to.dquery_positions.part(i, n);
    }
    return backward(c, b);
  });
}

xla::Error* fail(const xla::CallFrame& frame, xla::ErrorCode code, const char* message) {
  xla::ErrorArguments arguments{{sizeof(xla::ErrorArguments), nullptr}, message, code};
  return frame.functions->create_error(&arguments);
}

// What XLA calls: it asks for the version of the interface once, then calls for each execution. Errors are XLA's.
template <void (*body)(const xla::CallFrame&)>
xla::Error* handler(xla::CallFrame* frame) noexcept {
  if (frame->extension != nullptr && frame->extension->kind == xla::ExtensionKind::metadata) {
    xla::Metadata& metadata = *reinterpret_cast<xla::MetadataExtension*>(frame->extension)->metadata;
    metadata.version = {{sizeof(xla::Version), nullptr}, xla::interface_major, xla::interface_minor};
    metadata.traits = 0;
    return nullptr;
  }
  try {
    if (frame->struct_size < sizeof(xla::CallFrame) || frame->stage != xla::Stage::execute) {
      throw std::invalid_argument("attention: not a call of an interface that this was written for");
    }
    body(*frame);
    return nullptr;
  } catch (const std::bad_alloc&) {
    return fail(*frame, xla::ErrorCode::resource_exhausted,
                "attention: no memory for the packed keys and values of this call");
  } catch (const std::invalid_argument& error) {
    return fail(*frame, xla::ErrorCode::invalid_argument, error.what());
  } catch (const std::exception& error) {
    return fail(*frame, xla::ErrorCode::internal, error.what());
  }
}

}  // namespace

NB_MODULE(_xla, m) {
  m.attr("forward") = nb::capsule(reinterpret_cast<void*>(&handler<run_forward>));
  m.attr("backward") = nb::capsule(reinterpret_cast<void*>(&handler<run_backward>));
}
