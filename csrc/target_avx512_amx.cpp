// The kernel for avx512 with tiles of bfloat16 (AMX): compiled with that target's flags (CMakeLists.txt).
#define LINBIAS_TARGET avx512_amx
#define LINBIAS_VECTOR_BYTES 64
#define LINBIAS_ACROSS
#define LINBIAS_AMX
#include "attention-inl.h"
