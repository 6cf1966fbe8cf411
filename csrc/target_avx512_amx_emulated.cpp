// The kernel for avx512_amx with a model of the matrix unit, for tests on machines without one: compiled for any CPU.
#define LINBIAS_TARGET avx512_amx_emulated
#define LINBIAS_VECTOR_BYTES 64
#define LINBIAS_ACROSS
#define LINBIAS_AMX
#define LINBIAS_AMX_EMULATED
#include "attention-inl.h"
