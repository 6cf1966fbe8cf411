"""Whether the Hugging Face Hub answers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def caches_if_unreachable(path: str | os.PathLike[str] | None = None) -> Iterator[None]:
    """Within the block, where the Hub does not answer at once, only what was fetched before is looked at.

    Else a folder that is not there, which may be the name of something on the Hub, is looked for in vain for half
    a minute.

    Args:
        path: What is looked for; where it is here, the Hub is not asked.
    """
    if path is not None and Path(path).exists():
        yield
        return
    from huggingface_hub import constants, get_session

    before = constants.HF_HUB_OFFLINE
    if not before:
        try:
            get_session().head(constants.ENDPOINT, timeout=5)
        except Exception:  # of whatever library it uses for requests
            constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before
