"""What bench_gpu.py is made of: stages, peers, how a case is checked and timed, and the page."""

import os
from contextlib import AbstractContextManager, nullcontext


def as_on_a_gpu() -> AbstractContextManager[None]:
    """In a dry run Triton's interpreter computes as a GPU does within the block."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return nullcontext()
    from interpreter import repaired

    return repaired()
