// Choose the CPU target once, at the top.
//
// To add a target: csrc/target_NAME.cpp, as target_avx2.cpp; NAME among `targets` and `flags_NAME` in CMakeLists.txt;
// here its declaration, what it asks of the processor (has_NAME) and its row in kTargets, where the best stands first;
// its row in _KINDS of src/linbias/_machine.py, in release/wheels.py, release/smoke.py and docs/kernels.md. The core's
// own test of one target builds in a minute or two:
//   cmake -S . -B build/one -DLINBIAS_TEST=ON '-DLINBIAS_TARGETS=baseline;NAME' -DCMAKE_CXX_FLAGS_RELEASE=-O1
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <string>

#if defined(LINBIAS_X86)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

#include "linbias/attention.h"
#include "linbias/points.h"

namespace linbias {

#define LINBIAS_DECLARE(name)                                       \
  namespace name {                                                  \
  Status forward(const Call&, const Forward&);                      \
  Status forward(const Call&, const NewTokens&, const Forward&);    \
  Status write(const Call&, const NewTokens&, const std::int64_t*); \
  Status backward(const Call&, const Backward&);                    \
  Status forward(const Call&, const Sequences&, const Forward&);    \
  Status backward(const Call&, const Sequences&, const Backward&);  \
  Status forward(const Call&, const Points&, const Forward&);       \
  Status backward(const Call&, const Points&, const Backward&);     \
  }
LINBIAS_DECLARE(avx512_amx)
LINBIAS_DECLARE(avx512_bf16)
LINBIAS_DECLARE(avx512)
LINBIAS_DECLARE(avx2)
LINBIAS_DECLARE(baseline)
LINBIAS_DECLARE(avx512_amx_emulated)

namespace {

bool always() { return true; }

struct Target {
  const char* name;
  bool (*runs_here)();
  Status (*forward)(const Call&, const Forward&);
  Status (*forward_appended)(const Call&, const NewTokens&, const Forward&);
  Status (*write)(const Call&, const NewTokens&, const std::int64_t*);
  Status (*backward)(const Call&, const Backward&);
  Status (*forward_sequences)(const Call&, const Sequences&, const Forward&);
  Status (*backward_sequences)(const Call&, const Sequences&, const Backward&);
  Status (*forward_points)(const Call&, const Points&, const Forward&);
  Status (*backward_points)(const Call&, const Points&, const Backward&);
  bool (*pays)() = always;  // where not, only force_target chooses it
};

[[maybe_unused]] bool never() { return false; }
#if defined(LINBIAS_X86)
// What the processor has, and which registers the system saves (XCR0). CPUID is asked directly, because not every
// compiler's runtime fills in what __builtin_cpu_supports reads: Zig's, which builds the wheels, leaves it zero.
struct Cpu {
  unsigned features_c = 0, extended_b = 0, extended_d = 0, later_a = 0, saved = 0;

  Cpu() {
    constexpr unsigned kSavesExtended = 1u << 27;
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &features_c, &d) || !(features_c & kSavesExtended)) return;
    asm("xgetbv" : "=a"(saved), "=d"(d) : "c"(0));
    if (!__get_cpuid_count(7, 0, &a, &extended_b, &c, &extended_d) || a < 1) return;
    __get_cpuid_count(7, 1, &later_a, &b, &c, &d);
  }
  static constexpr bool all(unsigned word, unsigned bits) { return (word & bits) == bits; }
};

const Cpu& cpu() {
  static const Cpu asked;
  return asked;
}

[[maybe_unused]] bool has_avx2() {
  constexpr unsigned kFma = 1u << 12, kAvx = 1u << 28, kAvx2 = 1u << 5, kVectors = 3u << 1;
  return Cpu::all(cpu().saved, kVectors) && Cpu::all(cpu().features_c, kFma | kAvx) &&
         Cpu::all(cpu().extended_b, kAvx2);
}
[[maybe_unused]] bool has_avx512() {
  constexpr unsigned kF = 1u << 16, kDq = 1u << 17, kBw = 1u << 30, kVl = 1u << 31, kWideVectors = 7u << 5;
  return has_avx2() && Cpu::all(cpu().saved, kWideVectors) && Cpu::all(cpu().extended_b, kF | kDq | kBw | kVl);
}
[[maybe_unused]] bool has_avx512_bf16() {
  constexpr unsigned kBf16 = 1u << 5;
  return has_avx512() && Cpu::all(cpu().later_a, kBf16);
}

// AMD's cores multiply pairs at twice the rate of float32, those with a matrix unit at half of it (32 products in 2
// cycles against 2 x 16 in one, on a Xeon with AMX): where the system does not grant the unit, float32 is faster.
[[maybe_unused]] bool multiplies_pairs_fast() {
  constexpr unsigned kAmxBf16 = 1u << 22;
  return !Cpu::all(cpu().extended_d, kAmxBf16);
}

// The tile registers are there if the CPU has them, the system saves them and, on Linux, grants them to this process,
// whose threads inherit the grant.
[[maybe_unused]] bool has_avx512_amx() {
#if defined(__linux__)
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24, kTileState = 3u << 17;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return has_avx512_bf16() && Cpu::all(cpu().extended_d, kAmxBf16 | kAmxTile) && Cpu::all(cpu().saved, kTileState) &&
         syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}
#endif

// Those that CMakeLists.txt compiles, best first. On 64-bit Arm the baseline is NEON, which every such CPU has.
#define LINBIAS_FUNCTIONS(name)                                                                            \
  name::forward, name::forward, name::write, name::backward, name::forward, name::backward, name::forward, \
      name::backward
const Target kTargets[] = {
#if defined(LINBIAS_TARGET_avx512_amx)
    {"avx512_amx", has_avx512_amx, LINBIAS_FUNCTIONS(avx512_amx)},
#endif
#if defined(LINBIAS_TARGET_avx512_bf16)
    {"avx512_bf16", has_avx512_bf16, LINBIAS_FUNCTIONS(avx512_bf16), multiplies_pairs_fast},
#endif
#if defined(LINBIAS_TARGET_avx512)
    {"avx512", has_avx512, LINBIAS_FUNCTIONS(avx512)},
#endif
#if defined(LINBIAS_TARGET_avx2)
    {"avx2", has_avx2, LINBIAS_FUNCTIONS(avx2)},
#endif
#if defined(LINBIAS_TARGET_baseline) && defined(__aarch64__)
    {"neon", always, LINBIAS_FUNCTIONS(baseline)},
#elif defined(LINBIAS_TARGET_baseline)
    {"baseline", always, LINBIAS_FUNCTIONS(baseline)},
#endif
#if defined(LINBIAS_TARGET_avx512_amx_emulated)
    {"avx512_amx_emulated", always, LINBIAS_FUNCTIONS(avx512_amx_emulated), never},
#endif
};

std::atomic<const Target*> forced{nullptr};

// The environment may name the best target to use, so that a machine with more acts as one with less.
const Target* best_allowed() {
  static const Target* const allowed = [] {
    const char* name = std::getenv("LINBIAS_MAX_CPU_TARGET");
    const Target* named = std::find_if(std::begin(kTargets), std::end(kTargets),
                                       [name](const Target& t) { return name && std::strcmp(t.name, name) == 0; });
    return named == std::end(kTargets) ? std::begin(kTargets) : named;
  }();
  return allowed;
}

const Target& best() {
  static const Target* const fits =
      std::find_if(best_allowed(), std::end(kTargets), [](const Target& t) { return t.pays() && t.runs_here(); });
  return fits == std::end(kTargets) ? fits[-1] : *fits;  // a build for tests may have no other
}

const Target& current() {
  const Target* chosen = forced.load();
  return chosen ? *chosen : best();
}

Call with_possible_threads(Call call) {
  call.num_threads = std::clamp(call.num_threads, 1, kLargestNumThreads);
  return call;
}

}  // namespace

Status forward(const Call& call, const Forward& results) {
  return current().forward(with_possible_threads(call), results);
}
Status forward(const Call& call, const NewTokens& tokens, const Forward& results) {
  return current().forward_appended(with_possible_threads(call), tokens, results);
}
Status write(const Call& call, const NewTokens& tokens, const std::int64_t* slots) {
  return current().write(call, tokens, slots);
}
Status backward(const Call& call, const Backward& results) {
  return current().backward(with_possible_threads(call), results);
}

Status forward(const Call& call, const Sequences& sequences, const Forward& results) {
  return current().forward_sequences(with_possible_threads(call), sequences, results);
}
Status backward(const Call& call, const Sequences& sequences, const Backward& results) {
  return current().backward_sequences(with_possible_threads(call), sequences, results);
}

Status forward(const Call& call, const Points& points, const Forward& results) {
  return current().forward_points(with_possible_threads(call), points, results);
}
Status backward(const Call& call, const Points& points, const Backward& results) {
  return current().backward_points(with_possible_threads(call), points, results);
}

const char* target() { return current().name; }

const char* targets() {
  static const std::string names = [] {
    std::string joined;
    for (const Target* t = best_allowed(); t != std::end(kTargets); ++t) {
      if (t->runs_here()) joined.append(joined.empty() ? "" : ",").append(t->name);
    }
    return joined;
  }();
  return names.c_str();
}

bool force_target(const char* name) {
  if (name == nullptr) {
    forced = nullptr;
    return true;
  }
  for (const Target* t = best_allowed(); t != std::end(kTargets); ++t) {
    if (std::strcmp(t->name, name) == 0 && t->runs_here()) {
      forced = t;
      return true;
    }
  }
  return false;
}

}  // namespace linbias
