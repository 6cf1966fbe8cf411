// The kernel for avx2: compiled with that target's flags (CMakeLists.txt), in a namespace of its own.
#define LINBIAS_TARGET avx2
#define LINBIAS_VECTOR_BYTES 32
#include "kernel/attention-inl.h"
