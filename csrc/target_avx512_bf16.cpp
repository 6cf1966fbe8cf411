// The kernel for avx512 with products of bfloat16 pairs: compiled with that target's flags (CMakeLists.txt).
#define LINBIAS_TARGET avx512_bf16
#define LINBIAS_VECTOR_BYTES 64
#define LINBIAS_BFLOAT16
#include "kernel/attention-inl.h"
