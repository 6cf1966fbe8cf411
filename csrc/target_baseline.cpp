// The kernel for baseline: compiled with that target's flags (CMakeLists.txt), in a namespace of its own.
#define LINBIAS_TARGET baseline
#define LINBIAS_VECTOR_BYTES 16
#include "kernel/attention-inl.h"
