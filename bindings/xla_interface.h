// What XLA hands to a foreign function: the part of its C interface, version 0.1, that xla.cpp reads.
//
// It is written out here because every build would otherwise have to fetch jaxlib (90 MB) for one header. XLA keeps
// these layouts stable: records only grow at their end. tests/jax/test_jax_interface.py compares each with the header
// in the jaxlib that is installed, xla/ffi/api/c_api.h, where they are explained.
#pragma once

#include <cstddef>
#include <cstdint>

namespace linbias::xla {

constexpr int interface_major = 0, interface_minor = 1;  // of JAX 0.7, older than the oldest that is supported

enum class Stage : int { execute = 3 };
enum class ErrorCode : int { invalid_argument = 3, resource_exhausted = 8, internal = 13 };
enum class Type : int { boolean = 1, int32 = 4, float16 = 10, float32 = 11, float64 = 12, bfloat16 = 16 };
enum class AttributeKind : int { scalar = 3 };
enum class ExtensionKind : int { metadata = 1 };

struct Error;  // XLA's own
struct Extension;

// How a record begins.
struct Record {
  std::size_t struct_size;
  Extension* extension;
};

struct Extension {
  std::size_t struct_size;
  ExtensionKind kind;
  Extension* next;
};

struct Version : Record {
  int major, minor;
};

// What XLA asks of a handler before it calls it: for which version it was written.
struct Metadata {
  std::size_t struct_size;
  Version version;
  std::uint32_t traits;
};

struct MetadataExtension {
  Extension base;
  Metadata* metadata;
};

struct ErrorArguments : Record {
  const char* message;
  ErrorCode code;
};

// The first of XLA's functions; more follow.
struct Functions : Record {
  Version version;
  void* internal;
  Error* (*create_error)(ErrorArguments*);
};

struct Buffer : Record {
  Type type;
  void* data;
  std::int64_t rank;
  std::int64_t* sizes;  // [rank]
};

struct Text {
  const char* data;
  std::size_t size;
};

struct Scalar {
  Type type;
  void* value;
};

// Arguments or results.
struct Buffers : Record {
  std::int64_t size;
  int* kinds;
  Buffer** items;
};

struct Attributes : Record {
  std::int64_t size;
  AttributeKind* kinds;
  Text** names;
  void** items;  // Scalar*, where the kind is scalar
};

struct CallFrame : Record {
  const Functions* functions;
  void* context;
  Stage stage;
  Buffers arguments, results;
  Attributes attributes;
};

}  // namespace linbias::xla
