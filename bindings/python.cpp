// Python binding of the CPU core: the structs of attention.h as classes, and its functions. Pointers are addresses, as
// integers, and 0 is null. The caller (linbias/kernels/core.py) keeps the arrays alive; the interpreter lock is
// released while the core works.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>

#include "linbias/attention.h"
#include "linbias/points.h"

namespace nb = nanobind;
using namespace linbias;

namespace {

// What Python gives for a member: an address for a pointer, and else the member itself.
template <class Member>
using Given = std::conditional_t<std::is_pointer_v<Member>, std::uintptr_t, Member>;

template <class Member>
Member member_from(Given<Member> given) {
  if constexpr (std::is_pointer_v<Member>) return reinterpret_cast<Member>(given);
  else return given;
}

// A field of a struct: its name in Python, and whether it may be left out.
template <class RecordType, class MemberType, bool optional>
struct Field {
  using Record = RecordType;
  using Member = MemberType;
  const char* name;
  Member Record::* member;

  auto argument() const {
    if constexpr (optional) return nb::arg(name) = (Given<Member>)(Record{}.*member);
    else return nb::arg(name);
  }
};

template <class Record, class Member>
Field<Record, Member, false> required(const char* name, Member Record::* member) {
  return {name, member};
}
template <class Record, class Member>
Field<Record, Member, true> optional(const char* name, Member Record::* member) {
  return {name, member};
}

// Bind a struct as a class whose constructor takes the fields by name.
template <class Record, class... Fields>
void bind_record(nb::module_& m, const char* name, Fields... fields) {
  nb::class_<Record>(m, name).def(
      "__init__",
      [fields...](Record* self, Given<typename Fields::Member>... given) {
        new (self) Record{};
        ((self->*fields.member = member_from<typename Fields::Member>(given)), ...);
      },
      nb::kw_only(), fields.argument()...);
}

template <class Compute>
void run(Compute compute) {
  Status status;
  {
    nb::gil_scoped_release release;
    status = compute();
  }
  if (status != Status::out_of_memory) return;
  PyErr_SetString(PyExc_MemoryError, "attention: no memory for the packed keys and values of this call");
  throw nb::python_error();
}

}  // namespace

NB_MODULE(_cpu, m) {
  m.attr("TILE_ROWS") = kTileRows;
  m.attr("BLOCK_KEYS") = kBlockKeys;

  nb::enum_<DType>(m, "DType")
      .value("float32", DType::float32)
      .value("float64", DType::float64)
      .value("float16", DType::float16)
      .value("bfloat16", DType::bfloat16);
  nb::class_<Array>(m, "Array")
      .def(
          "__init__",
          [](Array* self, std::uintptr_t data, std::int64_t batch, std::int64_t head, std::int64_t row) {
            new (self) Array{reinterpret_cast<void*>(data), batch, head, row};
          },
          nb::arg("data"), nb::arg("batch"), nb::arg("head"), nb::arg("row"));
  // clang-format off
  bind_record<Call>(m, "Call",
      required("dtype", &Call::dtype),
      required("B", &Call::B), required("H", &Call::H), required("G", &Call::G), required("T", &Call::T),
      required("S", &Call::S), required("D", &Call::D), required("E", &Call::E),
      required("q", &Call::q), required("k", &Call::k), required("v", &Call::v),
      required("left", &Call::left),
      optional("right", &Call::right),
      optional("key_range", &Call::key_range),
      optional("query_start", &Call::query_start),
      optional("own_key", &Call::own_key),
      optional("query_range", &Call::query_range),
      optional("key_bound", &Call::key_bound),
      optional("positions", &Call::positions),
      optional("query_positions", &Call::query_positions),
      optional("pages", &Call::pages), optional("pages_row", &Call::pages_row),
      optional("page_keys", &Call::page_keys), optional("num_pages", &Call::num_pages),
      required("scale", &Call::scale),
      optional("dropout", &Call::dropout),
      required("tolerance", &Call::tolerance),
      optional("seed", &Call::seed), optional("first_query", &Call::first_query), optional("first_key", &Call::first_key),
      optional("num_threads", &Call::num_threads),
      optional("team", &Call::team),
      optional("precise", &Call::precise));
  bind_record<Forward>(m, "Forward",
      required("out", &Forward::out),
      optional("row_max", &Forward::row_max),
      optional("log_sum", &Forward::log_sum),
      optional("visited", &Forward::visited),
      optional("visited_tiles", &Forward::visited_tiles),
      optional("narrow", &Forward::narrow));
  bind_record<NewTokens>(m, "NewTokens",
      required("k", &NewTokens::k), required("v", &NewTokens::v),
      required("key_bound", &NewTokens::key_bound));
  bind_record<Backward>(m, "Backward",
      required("dout", &Backward::dout),
      optional("dlse", &Backward::dlse),
      required("saved", &Backward::saved),
      required("dq", &Backward::dq), required("dk", &Backward::dk), required("dv", &Backward::dv),
      optional("dleft", &Backward::dleft), optional("dright", &Backward::dright),
      optional("dpositions", &Backward::dpositions),
      optional("dquery_positions", &Backward::dquery_positions));
  bind_record<Sequences>(m, "Sequences",
      required("count", &Sequences::count),
      required("query_offsets", &Sequences::query_offsets),
      optional("key_offsets", &Sequences::key_offsets),
      optional("key_counts", &Sequences::key_counts),
      optional("page_norms", &Sequences::page_norms));
  bind_record<Points>(m, "Points",
      required("at", &Points::at),
      required("order", &Points::order),
      required("clouds", &Points::clouds), required("axes", &Points::axes),
      required("global_tokens", &Points::global_tokens),
      required("manhattan", &Points::manhattan));
  // clang-format on

  m.def(
      "forward", [](const Call& call, const Forward& results) { run([&] { return forward(call, results); }); },
      nb::arg("call"), nb::arg("results"));
  m.def(
      "forward",
      [](const Call& call, const NewTokens& tokens, const Forward& results) {
        run([&] { return forward(call, tokens, results); });
      },
      nb::arg("call"), nb::arg("tokens"), nb::arg("results"));
  m.def(
      "write",
      [](Call call, NewTokens tokens, std::uintptr_t slots, std::uintptr_t k, std::uintptr_t v, std::uintptr_t k_pages,
         std::uintptr_t v_pages, std::uintptr_t page_norms) {
        tokens.k.data = reinterpret_cast<void*>(k);
        tokens.v.data = reinterpret_cast<void*>(v);
        tokens.key_bound = reinterpret_cast<void*>(page_norms);
        call.k.data = reinterpret_cast<void*>(k_pages);
        call.v.data = reinterpret_cast<void*>(v_pages);
        run([&] { return write(call, tokens, reinterpret_cast<const std::int64_t*>(slots)); });
      },
      nb::arg("call"), nb::arg("tokens"), nb::arg("slots"), nb::arg("k"), nb::arg("v"), nb::arg("k_pages"),
      nb::arg("v_pages"), nb::arg("page_norms"));
  m.def(
      "backward", [](const Call& call, const Backward& results) { run([&] { return backward(call, results); }); },
      nb::arg("call"), nb::arg("results"));
  m.def(
      "forward",
      [](const Call& call, const Sequences& sequences, const Forward& results) {
        run([&] { return forward(call, sequences, results); });
      },
      nb::arg("call"), nb::arg("sequences"), nb::arg("results"));
  // The same for a further layer, whose arrays differ in nothing but where they lie.
  m.def(
      "forward_layer",
      [](Call call, Sequences sequences, Forward results, std::uintptr_t q, std::uintptr_t k, std::uintptr_t v,
         std::uintptr_t left, std::uintptr_t page_norms, std::uintptr_t out) {
        call.q.data = reinterpret_cast<void*>(q);
        call.k.data = reinterpret_cast<void*>(k);
        call.v.data = reinterpret_cast<void*>(v);
        call.left = reinterpret_cast<void*>(left);
        sequences.page_norms = reinterpret_cast<void*>(page_norms);
        results.out = reinterpret_cast<void*>(out);
        run([&] { return forward(call, sequences, results); });
      },
      nb::arg("call"), nb::arg("sequences"), nb::arg("results"), nb::arg("q"), nb::arg("k"), nb::arg("v"),
      nb::arg("left"), nb::arg("page_norms"), nb::arg("out"));
  m.def(
      "backward",
      [](const Call& call, const Sequences& sequences, const Backward& results) {
        run([&] { return backward(call, sequences, results); });
      },
      nb::arg("call"), nb::arg("sequences"), nb::arg("results"));
  m.def(
      "forward",
      [](const Call& call, const Points& points, const Forward& results) {
        run([&] { return forward(call, points, results); });
      },
      nb::arg("call"), nb::arg("points"), nb::arg("results"));
  m.def(
      "backward",
      [](const Call& call, const Points& points, const Backward& results) {
        run([&] { return backward(call, points, results); });
      },
      nb::arg("call"), nb::arg("points"), nb::arg("results"));
  m.def("target", [] { return std::string(target()); });
  m.def("targets", [] { return std::string(targets()); });
  m.def(
      "force_target", [](const std::string& name) { return force_target(name.empty() ? nullptr : name.c_str()); },
      nb::arg("name"));
}
