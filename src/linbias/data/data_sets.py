"""The text data sets of the Hugging Face Hub, by splits named as everywhere here."""

from typing import Any

from linbias._run.hub import answers

# WikiText as it was written; WIKITEXT_WORDS below has rare words replaced by <unk>, as the paper
# uses it.
WIKITEXT = {
    "wikitext-2": "Salesforce/wikitext:wikitext-2-raw-v1",
    "wikitext-103": "Salesforce/wikitext:wikitext-103-raw-v1",
}
# The short names of all texts that can be trained on as they are.
TEXTS = {**WIKITEXT, "tiny-shakespeare": "karpathy/tiny_shakespeare"}
WIKITEXT_WORDS = {name: id.replace("-raw", "") for name, id in WIKITEXT.items()}


def open_data_set(id: str, *, stream: bool, reachable: bool | None = None) -> dict[str, Any]:
    """Opens "owner/name" or "owner/name:configuration": its rows by split; `stream` keeps none."""
    import datasets  # takes a second to import, and most texts do without

    path, _, configuration = id.partition(":")
    reachable = answers() if reachable is None else reachable
    try:
        if not reachable:  # else the library would look for it in vain for half a minute
            datasets.load.CachedDatasetModuleFactory(path).get_module()
        data = datasets.load_dataset(path, configuration or None, streaming=stream)
    except (OSError, ValueError) as error:
        if reachable:
            raise ValueError(str(error)) from error
        raise ValueError(
            "the Hugging Face Hub does not answer, and the data set was not fetched before; where "
            "its text lies on this machine, give the path: --corpus text.txt"
        ) from error
    return {"valid" if split == "validation" else split: data[split] for split in data}


def as_line(text: str) -> bytes:
    """A row's text as UTF-8 with a line end; WikiText has rows with and without one."""
    return text.removesuffix("\n").encode() + b"\n"
