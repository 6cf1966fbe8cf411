// The kernel for avx512_amx with a model of the matrix unit, for tests on machines without one: compiled for any CPU,
// as the target that kernel/base-inl.h takes where none is named.
#include "kernel/attention-inl.h"
