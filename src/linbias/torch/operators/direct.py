"""Whether a call may run directly, without the operator that stands for it.

An operator is what `torch.compile`, `torch.export`, fake tensors, profilers, and modes and
subclasses of users can see. Calling one costs about 60 us, and differentiating through it 300 us
more: more than all the work of a short call. Where nobody looks, implementations run without.
"""

import torch
from torch import Tensor

from linbias.torch.operators.transforms import forward_mode

_DispatchKey, _DispatchKeySet = torch._C.DispatchKey, torch._C.DispatchKeySet


def bits(*names: str) -> int:
    """The keys of PyTorch's dispatcher as bits."""
    found = 0
    for name in names:
        found |= _DispatchKeySet(getattr(_DispatchKey, name)).raw_repr()
    return found


# Whatever takes part in a call has a key in the dispatcher, on a tensor (a transform of
# `torch.func`, a subclass, a lazy negative) or on the thread (a mode, a tracer). These are a plain
# call's: our operators let autocast pass.
_OTHERS = ~bits(
    *("CPU", "CUDA", "MPS", "XPU"),
    *("AutogradCPU", "AutogradCUDA", "AutogradMPS", "AutogradXPU"),
    *("AutocastCPU", "AutocastCUDA", "AutocastMPS", "AutocastXPU"),
    *("BackendSelect", "ADInplaceOrView"),
)
_profiler_runs = torch._C._autograd._profiler_enabled
_compiler_of_frames = torch._C._dynamo.eval_frame.get_eval_frame_callback
PLAIN_TYPES = (Tensor, torch.nn.Parameter)


def is_plain(x: Tensor) -> bool:
    """Whether a tensor is what it seems, numbers in memory: fake, wrapped or lazy ones are not."""
    return not torch._C._dispatch_keys(x).raw_repr() & _OTHERS


def unobserved(*tensors: Tensor | None) -> bool:
    """Whether nothing but autograd would see an operator that is called on these tensors here.

    Example:
        >>> unobserved(torch.ones(2)), unobserved(torch.ones(2, dtype=torch.complex64).conj().imag)
        (True, False)
    """
    if torch.compiler.is_compiling():  # first: the compiler reads no further
        return False
    if (
        forward_mode()  # a tangent has no key
        or torch._C._len_torch_function_stack()
        or _profiler_runs()
        # between graphs it reads every function that is called
        or _compiler_of_frames() is not None
    ):
        return False
    keys = torch._C._dispatch_tls_local_include_set().raw_repr()
    for x in tensors:
        if x is not None:
            if type(x) not in PLAIN_TYPES:
                return False
            keys |= torch._C._dispatch_keys(x).raw_repr()
    return not keys & _OTHERS
