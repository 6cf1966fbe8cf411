"""What PyTorch's FLOP counter counts for the operators: every pair of a query and a key."""

import sys
from typing import Any

from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

_registered: set[Any] = set()


def tell_counter(forward: Any, backward: Any, num_saved: int) -> None:
    """Register two operators with `torch.utils.flop_counter`, where a program has loaded it.

    A counter copies the formulas when it is made: one that counts already gets these, too.
    """
    counter: Any = sys.modules.get("torch.utils.flop_counter")
    if counter is None or forward in _registered:
        return
    _registered.add(forward)
    formulas = {}

    def count_forward(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
        return int(counter.sdpa_flop_count(q, k, v))

    def count_backward(dout: Any, dlse: Any, *shapes: Any, **__: Any) -> int:
        return int(counter.sdpa_backward_flop_count(dout, *shapes[num_saved : num_saved + 3]))

    for operator, formula in ((forward, count_forward), (backward, count_backward)):
        packet = operator._opoverload.overloadpacket
        formulas[packet] = counter.register_flop_formula(packet)(formula)
    for mode in _get_current_dispatch_mode_stack():
        active: Any = getattr(mode, "counter", None)
        if isinstance(active, counter.FlopCounterMode):
            active.flop_registry.update(formulas)
