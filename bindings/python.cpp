// Python binding of the CPU core: numbers and addresses in, nothing else. The caller (linbias/cpu.py) has
// checked everything and keeps the arrays alive; the interpreter lock is released while the core works.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/string.h>

#include <array>
#include <cstdint>

#include "linbias/attention.h"

namespace nb = nanobind;
using namespace linbias;

namespace {

using Address = std::uintptr_t;
using Sizes = std::array<std::int64_t, 7>;    // B H G T S D E
using Strided = std::array<std::int64_t, 4>;  // address and strides of batch, head, row

void* pointer(Address address) { return reinterpret_cast<void*>(address); }

Array array(const Strided& from) {
  return {pointer(static_cast<Address>(from[0])), from[1], from[2], from[3]};
}

Call call(int dtype, const Sizes& n, const Strided& q, const Strided& k, const Strided& v, Address left, Address right,
          Address key_range, Address key_bound, double scale, double dropout, double tolerance, std::uint32_t seed,
          int num_threads, bool precise) {
  return {static_cast<DType>(dtype), n[0], n[1], n[2], n[3], n[4], n[5], n[6], array(q), array(k), array(v),
          pointer(left), pointer(right), static_cast<const std::int64_t*>(pointer(key_range)), pointer(key_bound),
          scale, dropout, tolerance, seed, num_threads < 1 ? 1 : num_threads, precise};
}

Forward forward_results(const std::array<Address, 4>& to, std::int64_t visited_tiles) {
  return {pointer(to[0]), pointer(to[1]), pointer(to[2]), static_cast<std::int32_t*>(pointer(to[3])), visited_tiles};
}

void raise_if_bad(Status status) {
  if (status != Status::out_of_memory) return;
  PyErr_SetString(PyExc_MemoryError, "attention: no memory for the packed keys and values of this call");
  throw nb::python_error();
}

}  // namespace

NB_MODULE(_cpu, m) {
  m.attr("TILE_ROWS") = kTileRows;
  m.attr("BLOCK_KEYS") = kBlockKeys;
  m.def("target", [] { return std::string(target()); });
  m.def("targets", [] { return std::string(targets()); });
  m.def("force_target", [](const std::string& name) { return force_target(name.empty() ? nullptr : name.c_str()); });
  m.def("forward", [](int dtype, const Sizes& sizes, const Strided& q, const Strided& k, const Strided& v, Address left,
                      Address right, Address key_range, Address key_bound, double scale, double dropout,
                      double tolerance, std::uint32_t seed, int num_threads, bool precise, std::int64_t visited_tiles,
                      const std::array<Address, 4>& results) {
    const Call c = call(dtype, sizes, q, k, v, left, right, key_range, key_bound, scale, dropout, tolerance, seed, num_threads, precise);
    Status status;
    {
      nb::gil_scoped_release release;
      status = forward(c, forward_results(results, visited_tiles));
    }
    raise_if_bad(status);
  });
  m.def("backward", [](int dtype, const Sizes& sizes, const Strided& q, const Strided& k, const Strided& v,
                       Address left, Address right, Address key_range, Address key_bound, double scale,
                       double dropout, double tolerance, std::uint32_t seed, int num_threads, Address dout, Address dlse,
                       std::int64_t visited_tiles,
                       const std::array<Address, 4>& saved, const std::array<Address, 5>& gradients) {
    const Call c = call(dtype, sizes, q, k, v, left, right, key_range, key_bound, scale, dropout, tolerance, seed, num_threads, true);
    const Backward results = {pointer(dout), pointer(dlse), forward_results(saved, visited_tiles), pointer(gradients[0]),
                              pointer(gradients[1]), pointer(gradients[2]), pointer(gradients[3]),
                              pointer(gradients[4])};
    Status status;
    {
      nb::gil_scoped_release release;
      status = backward(c, results);
    }
    raise_if_bad(status);
  });
}
