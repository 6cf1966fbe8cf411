# Capsules around the handlers of bindings/xla.cpp, for jax.ffi.
forward: object
backward: object
