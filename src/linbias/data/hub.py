"""The Hugging Face Hub: whether it answers, and its text data sets, by splits named as everywhere here."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# The text as it was written, and with rare words replaced by <unk>, as the paper uses it.
WIKITEXT = {
    "wikitext-2": "Salesforce/wikitext:wikitext-2-raw-v1",
    "wikitext-103": "Salesforce/wikitext:wikitext-103-raw-v1",
}
WIKITEXT_WORDS = {name: id.replace("-raw", "") for name, id in WIKITEXT.items()}


@contextmanager
def caches_if_unreachable() -> Iterator[None]:
    """Within the block, where the Hub does not answer at once, only what was fetched before is looked at.

    Else a folder that is not there, which may be the name of something on the Hub, is looked for in vain for half
    a minute.
    """
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


def open_data_set(
    id: str, *, stream: bool, cache_dir: str | os.PathLike[str] | None = None
) -> dict[str, Any]:
    """Opens a data set.

    Args:
        id: "owner/name" or "owner/name:configuration".
        stream: Read it over the network, without storing it.
        cache_dir: Folder for what is stored; None is the default of the `datasets` library.

    Returns:
        The rows by split; the validation split is "valid".

    Raises:
        ValueError: There is no such data set, or it cannot be reached.
    """
    import datasets  # takes a second to import, and most texts do without

    path, _, configuration = id.partition(":")
    folder = None if cache_dir is None else str(cache_dir)
    try:
        with caches_if_unreachable():
            data = datasets.load_dataset(
                path, configuration or None, streaming=stream, cache_dir=folder
            )
    except (OSError, ValueError) as error:
        raise ValueError(str(error)) from error
    return {"valid" if split == "validation" else split: data[split] for split in data}


def as_line(text: str) -> bytes:
    """A row's text as UTF-8 with a line end; WikiText has rows with and without one."""
    return text.removesuffix("\n").encode() + b"\n"
