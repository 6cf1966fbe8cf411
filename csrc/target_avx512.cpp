// The kernel for avx512: compiled with that target's flags (CMakeLists.txt), in a namespace of its own.
#define LINBIAS_TARGET avx512
#define LINBIAS_VECTOR_BYTES 64
#include "kernel/attention-inl.h"
