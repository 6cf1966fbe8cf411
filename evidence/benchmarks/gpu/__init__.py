"""What bench_gpu.py is made of: the stages, the peers, how a case is checked and timed, and the page that says how it went."""

import os
from contextlib import AbstractContextManager, nullcontext


def as_on_a_gpu() -> AbstractContextManager[None]:
    """Within the block Triton's interpreter, in a dry run, computes as a GPU does, and refuses what strays."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return nullcontext()
    from interpreter import repaired

    return repaired()
