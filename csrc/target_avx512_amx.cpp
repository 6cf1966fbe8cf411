// The kernel for avx512 with tiles of bfloat16 (AMX): compiled with that target's flags (CMakeLists.txt).
#define LINBIAS_TARGET avx512_amx
#define LINBIAS_VECTOR_BYTES 64
#define LINBIAS_BFLOAT16
#define LINBIAS_AMX
#include "kernel/attention-inl.h"
