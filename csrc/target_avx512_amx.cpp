// The kernel for avx512 with tiles of bfloat16 (AMX): compiled with that target's flags (CMakeLists.txt).
#define LINBIAS_TARGET avx512_amx
#define LINBIAS_VECTOR_BYTES 64
#define LINBIAS_BF16
#define LINBIAS_AMX
#define LINBIAS_ACROSS
#include "attention-inl.h"
