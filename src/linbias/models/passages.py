"""`embed`: vectors of whole documents and of their passages, on top of sentence-transformers.

sentence-transformers has the model, the tokenizer and the batches. Here is what it has not: a
document is read whole, and its passages are means over the tokens of that one pass, each of which
has seen all of the document ("late chunking").
"""

from collections.abc import Iterable, Sequence
from itertools import compress, pairwise
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from linbias import _extras
from linbias.models.encoders.bert import LinbiasBertModel
from linbias.models.families import install

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

Span = tuple[int, int]  # first and one past the last
Spans = int | Sequence[Iterable[Span]]


class Embedded(NamedTuple):
    """What `embed` made of a document."""

    vector: NDArray[np.float32]  # [size], of the whole document
    num_tokens: int  # that were read, special tokens included
    spans: tuple[Span, ...] = ()  # of its characters, if any were asked for
    span_vectors: NDArray[np.float32] | None = None  # [len(spans), size]


def embed(
    model: "SentenceTransformer | str | Path",
    documents: Sequence[str],
    *,
    spans: Spans | None = None,
    max_length: int | None = None,
    normalize: bool = False,
    batch_size: int = 8,
    device: str | None = None,
    progress: bool = False,
) -> list[Embedded]:
    """Turn documents, and spans of them, into vectors with an ALiBi encoder.

        span:  vector = mean over the tokens of a span of the model's token embeddings

    A document is read whole, however long, with its special tokens; so each of its spans has seen
    all of it. A span `(begin, end)` is of characters of the text, from 0, end excluded. It holds
    each token that shares a character with it, and no special token; spans may overlap. The
    document's own vector is the model's pooling, for jina-embeddings-v2 the mean over all tokens.

    Args:
        model: A `SentenceTransformer` of an encoder of linbias, or the folder of one, as `convert`
            writes it.
        documents: Texts.
        spans: A number: of so many tokens each, the last of a document perhaps of fewer; pairs for
            each document, such as `[list(span_tokenize(text)) for text in documents]` of NLTK's
            sentence tokenizers; or None.
        max_length: Read at most so many tokens of each document; None: all. What is not read is
            not split either.
        normalize: Divide each vector by its Euclidean norm.
        batch_size: Documents of like length that share a forward pass.
        device: As for `SentenceTransformer.encode`. For several processes there is
            `examples/embed_many.py`.
        progress: Show the bars of sentence-transformers.

    Returns:
        A record for each document, in order: its vector in float32, num_tokens, and with spans
        these pairs, and their vectors.

    Raises:
        ValueError: An argument breaks a rule above, the model is no encoder of linbias or has no
            fast tokenizer, a document has no tokens, or a vector is not finite. A span is empty,
            not within what is read of its document, or holds no token; or a document has none.
        TypeError: documents are no texts, or a span no pair of integers.
        ModuleNotFoundError: sentence-transformers is not installed.

    Example:
        >>> from linbias.data.tokenizers import byte_tokenizer
        >>> from linbias.models import LinbiasBertConfig
        >>> sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
        >>> folder = tempfile.mkdtemp()
        >>> LinbiasBertModel(LinbiasBertConfig(vocab_size=256, **sizes)).save_pretrained(folder)
        >>> byte_tokenizer().save(folder)
        >>> near, far = embed(folder, ["So near. So far away.", "far"], spans=12)
        >>> near.vector.shape, near.spans, near.span_vectors.shape, far.num_tokens
        ((32,), ((0, 12), (12, 21)), (2, 32), 3)

    Source of late chunking: Guenther et al., arXiv 2409.04701.
    """
    _extras.require("linbias.models.passages")
    if isinstance(documents, str) or not all(isinstance(text, str) for text in documents):
        raise TypeError("embed: documents must be a sequence of texts")
    for name, number in (("max_length", max_length), ("batch_size", batch_size)):
        if number is not None and number < 1:
            raise ValueError(f"embed: {name} must be at least 1, got {number}")
    if not isinstance(device, str | torch.device | None):
        raise TypeError(f"embed: device must be one device or None, got {device!r}")
    if spans is not None:
        spans = _checked_spans(spans, documents)
    encoder = _encoder(model, max_length)
    cut = {"truncation": max_length is not None, "max_length": max_length}
    text = {"return_offsets_mapping": True, **cut}
    options: dict[str, Any] = {"batch_size": batch_size, "show_progress_bar": progress}
    options |= {"device": device, "output_value": None, "processing_kwargs": {"text": text}}
    group = 4 * batch_size  # token embeddings are large: those of a few batches at a time
    made: list[Embedded] = []
    for first in range(0, len(documents), group):
        some = list(documents[first : first + group])
        for words, output in zip(some, encoder.encode(some, **options), strict=True):
            made.append(_embedded(output, words, len(made), spans, max_length, normalize))
    return made


def _encoder(model: Any, max_length: int | None) -> Any:
    if isinstance(model, str | Path):
        from sentence_transformers import SentenceTransformer

        install()
        model = SentenceTransformer(str(model))
    inner = getattr(model[0], "auto_model", None)
    if not isinstance(inner, LinbiasBertModel):
        kind = type(inner or model[0]).__name__
        raise ValueError(
            f"embed: model must be an encoder of linbias, got a {kind} (linbias.models.convert"
            " makes one of an original folder)"
        )
    if not model.tokenizer.is_fast:
        kind = type(model.tokenizer).__name__
        raise ValueError(f"embed: model must have a fast tokenizer, got a {kind}")
    special = model.tokenizer.num_special_tokens_to_add()
    if max_length is not None and max_length <= special:
        raise ValueError(
            f"embed: max_length must be above the {special} special tokens, got {max_length}"
        )
    return model


def _embedded(
    output: dict[str, Any],
    text: str,
    number: int,
    spans: Spans | None,
    max_length: int | None,
    normalize: bool,
) -> Embedded:
    """What the model's output says of a document of this number."""
    real = output["attention_mask"].bool().cpu()
    tokens = output["token_embeddings"].cpu()[real].float()
    offsets = output["offset_mapping"].cpu()[real].numpy()
    places = np.flatnonzero(offsets[:, 0] < offsets[:, 1])  # special tokens have no characters
    if not len(places):
        raise ValueError(f"embed: documents must have tokens, got none in document {number}")
    pairs: tuple[Span, ...] = ()
    vectors = [output["sentence_embedding"].cpu().float()]
    if spans is not None:
        starts, ends = offsets[places].T
        is_cut = len(tokens) == max_length
        read = (int(starts[0]), int(ends[-1])) if is_cut else (0, len(text))
        pairs, first, end = _find(spans, number, read, starts, ends)
        held = zip(places[first], places[end - 1] + 1, strict=True)
        vectors += [tokens[begin:end].mean(0) for begin, end in held]
    rows = torch.stack(vectors)
    if not rows.isfinite().all():
        raise ValueError(f"embed: vectors must be finite, got another of document {number}")
    if normalize:
        rows = torch.nn.functional.normalize(rows, dim=-1)
    vector, *_ = whole = rows.numpy()
    return Embedded(vector, len(tokens), pairs, None if spans is None else whole[1:])


# Where passages lie


def _checked_spans(spans: Any, documents: Sequence[str]) -> Any:
    """Check what can be checked before there are tokens; pairs become lists."""
    if isinstance(spans, int) and not isinstance(spans, bool):
        if spans < 1:
            raise ValueError(f"embed: spans must be at least 1 token, got {spans}")
    elif isinstance(spans, Sequence) and not isinstance(spans, str):
        if len(spans) != len(documents):
            got = f"got those of {len(spans):,}"
            raise ValueError(f"embed: spans must be of all {len(documents):,} documents, {got}")
        return [_checked(pairs, i, (0, len(documents[i]))) for i, pairs in enumerate(spans)]
    else:
        ways = "a number of tokens, or pairs for each document"
        raise TypeError(f"embed: spans must be {ways}, got {spans!r}")
    return spans


def _find(
    spans: Any, number: int, read: Span, starts: NDArray[Any], ends: NDArray[Any]
) -> tuple[tuple[Span, ...], NDArray[np.int64], NDArray[np.int64]]:
    """The passages within the characters that are read; of each, the first and one past the last
    of the tokens that it holds, whose characters are from starts to ends.
    """
    is_given = isinstance(spans, list)
    if is_given:
        found = _checked(spans[number], number, read)
    else:  # where a character is several tokens, some of these hold none
        found = list(pairwise([*starts[::spans].tolist(), read[1]]))
    first = np.searchsorted(ends, [begin for begin, _ in found], side="right")
    end = np.searchsorted(starts, [end for _, end in found], side="left")
    holds = first < end
    if is_given and not holds.all():
        got = found[int(np.argmin(holds))]
        raise ValueError(f"embed: spans must hold a token, got {got} of document {number}")
    return tuple(compress(found, holds)), first[holds], end[holds]


def _checked(pairs: Any, number: int, read: Span) -> list[Span]:
    """Spans as pairs of int, which lie within the characters that are read."""
    of = f"of document {number}"
    if not isinstance(pairs, Iterable):
        kind = type(pairs).__name__
        raise TypeError(f"embed: spans must be pairs for each document, got a {kind} {of}")
    spans = []
    for pair in pairs:
        try:
            begin, end = map(index, pair)
        except (TypeError, ValueError) as error:
            rule = "pairs (begin, end) of integers"
            raise TypeError(f"embed: spans must be {rule}, got {pair!r} {of}") from error
        if not read[0] <= begin < end <= read[1]:
            rule = f"{read[0]} <= begin < end <= {read[1]}, the characters that are read"
            raise ValueError(f"embed: spans must have {rule}, got {begin, end} {of}")
        spans.append((begin, end))
    if not spans:
        raise ValueError(f"embed: spans must be at least one, got none {of}")
    return spans
