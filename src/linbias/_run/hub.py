"""Whether the Hugging Face Hub answers."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# A Hub that takes longer to answer is taken for one that cannot be reached.
_PATIENCE_SECONDS = 2.0


@contextmanager
def caches_if_unreachable(path: str | os.PathLike[str] | None = None) -> Iterator[bool]:
    """Within the block, where the Hub does not answer at once, only what was fetched before is looked at.

    Else a folder that is not there, which may be the name of something on the Hub, is looked for in vain for half
    a minute.

    Args:
        path: What is looked for; where it is here, the Hub is not asked.

    Yields:
        False where the Hub was asked and does not answer.
    """
    if path is not None and Path(path).exists():
        yield True
        return
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    answers = not before and _hub_answers()
    constants.HF_HUB_OFFLINE = not answers
    try:
        yield answers
    finally:
        constants.HF_HUB_OFFLINE = before


def _hub_answers() -> bool:
    """Asks in a thread: the look-up of a name may wait much longer than any time limit of a request."""
    from huggingface_hub import constants, get_session

    answered = threading.Event()

    def ask() -> None:
        try:
            get_session().head(constants.ENDPOINT, timeout=_PATIENCE_SECONDS)
            answered.set()
        except Exception:  # of whatever library it uses for requests
            return

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_PATIENCE_SECONDS)
    return answered.is_set()
