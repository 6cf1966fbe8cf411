"""`embed`: a vector for each document, however long, and for spans of it.

Which documents share a batch depends on the documents alone, so that a run that was killed and
continued writes the same numbers as one that was not.
"""

import base64
import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from linbias._run.files import JsonLog
from linbias._run.folders import hold_run_folder, open_run_folder
from linbias.models.embedding.documents import Document
from linbias.models.embedding.spans import (
    Passages,
    Span,
    Spans,
    find_passages,
    read_spans,
    settings_of,
)
from linbias.models.embedding.vectors import (
    WRITERS,
    Embedded,
    Vectors,
    check_output,
    partial_folder,
    read_finished,
    split_rows,
)
from linbias.models.encoders.bert import LinbiasBertModel
from linbias.models.loading import Files, load, load_tokenizer
from linbias.models.prepacked import prepack

_POOLINGS = ("mean", "cls")
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

Tokens = NDArray[np.int32]


def embed(
    folder: str | Path,
    documents: Sequence[Document | str],
    output: str | Path | None = None,
    *,
    pooling: str = "mean",
    normalize: bool = False,
    spans: Spans | None = None,
    max_length: int | None = None,
    batch_tokens: int = 16384,
    device: torch.device | str | None = None,
    precision: str | None = None,
    progress: Callable[[int, int], None] | None = None,
    **settings: Any,
) -> Embedded:
    """Turn documents, and spans of them, into vectors with an ALiBi encoder.

        mean:  vector = mean over the tokens of a document of last_hidden_state
        cls:   vector = last_hidden_state of the first token
        span:  vector = mean over the tokens of a span of last_hidden_state

    A document is read whole, however long, with its special tokens; so each of its spans has seen
    all of it ("late chunking"). A span `(begin, end)` is of characters of the text, from 0, end
    excluded. It holds each token that shares a character with it, and no special token; spans may
    overlap.

    With an output, each batch is kept in the folder `<output>.partial`, and the same call
    continues after a kill; one that is finished is returned as it is. At the end `.npy` holds the
    vectors [N, hidden_size], with ids, spans and settings in `<output without .npy>.ids.json` and
    the vectors of all spans in `.spans.npy`; `.jsonl`, with settings in `.settings.json`, and
    `.parquet` hold `id`, `num_tokens`, `vector`, and with spans `spans` and `span_vectors` of
    each.

    Args:
        folder: An encoder as `load` reads it, with its tokenizer.
        documents: With ids that differ, as `read_documents` returns them; the id of a plain text
            is its number, from 0.
        output: File to write, which must not exist or be of the very same run; None: none.
        pooling: "mean" or "cls". jina-embeddings-v2 were trained with the mean.
        normalize: Divide each vector by its Euclidean norm.
        spans: "sentences", which end at . ! ? before white space, unless a small letter follows,
            at those of other scripts, and before an empty line; a number: of so many tokens each,
            the last of a document perhaps of fewer; a function from a text to its pairs; the pairs
            themselves, for each document; or None.
        max_length: Read at most so many tokens of each document; None: all. What is not read is
            not split either.
        batch_tokens: Tokens per forward pass, padding included; a longer document makes a batch of
            its own.
        device: None means the first CUDA device, or else the CPU.
        precision: "fp32", "bf16", or on a GPU "fp16", of the weights; None: as they are stored.
            Means are float32.
        progress: Called with (tokens read, tokens to read) after each batch.
        settings: Fields of `LinbiasBertConfig` to change, such as slope_scale.

    Returns:
        A record with vectors [N, hidden_size] in float32, ids and num_tokens, in the order of the
        documents, and num_shortened, how many documents max_length has shortened. `spans[i]` are
        the pairs of document i, without those of a splitter that hold no token, and
        `span_vectors[i]` [len(spans[i]), hidden_size]; both are () without spans.

    Raises:
        ValueError: An argument breaks a rule above, the folder has no such model or no tokenizer,
            a document has no tokens or one beyond the vocabulary, a vector is not finite, or the
            output or `<output>.partial` is of another run. A span is empty, not within what is
            read of its document, or one of those given that holds no token; a document has no
            span; or there are spans with pooling "cls" or without a fast tokenizer.
        TypeError: A document is neither a text nor a Document, or a span no pair of integers.
        ModuleNotFoundError: A `.parquet` file needs pyarrow.

    Example:
        >>> from linbias.data.tokenizers import byte_tokenizer
        >>> from linbias.models import LinbiasBertConfig
        >>> sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
        >>> folder = tempfile.mkdtemp()
        >>> LinbiasBertModel(LinbiasBertConfig(vocab_size=256, **sizes)).save_pretrained(folder)
        >>> byte_tokenizer().save(folder)
        >>> result = embed(folder, [Document("a", "near"), Document("b", "far, far away")])
        >>> result.vectors.shape, result.ids, result.num_tokens
        ((2, 32), ('a', 'b'), (4, 13))
        >>> result = embed(folder, ["So near. So far away."], spans="sentences")
        >>> result.spans, result.span_vectors[0].shape
        ((((0, 8), (9, 21)),), (2, 32))
    """
    target = None if output is None else Path(output)
    documents = _with_ids(documents)
    _check(documents, pooling, max_length, batch_tokens, precision)
    if spans is not None:
        spans = read_spans(spans, documents, pooling)
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if precision == "fp16" and where.type == "cpu":
        raise ValueError("embed: precision 'fp16' must have a GPU, got a CPU")
    if target is not None:
        check_output(target)
    source = Files.at("embed", folder)
    tokenizer = _load_tokenizer(source)
    dtype = None if precision is None else _DTYPES[precision]
    model = load(source, task="base", dtype=dtype, device=where, **settings)
    if not isinstance(model, LinbiasBertModel):
        got = f"got {source.name!r} with a {type(model).__name__}"
        raise ValueError(f"embed: folder must hold an encoder, {got}")
    if spans is not None and not tokenizer.is_fast:
        got = f"got {source.name!r} with a {type(tokenizer).__name__}"
        raise ValueError(f"embed: folder must hold a fast tokenizer with spans, {got}")
    tokens, passages, num_shortened = _tokenize(
        tokenizer, documents, spans, max_length, model.config.vocab_size
    )
    batches = plan_batches([len(row) for row in tokens], batch_tokens)
    made_by = {
        "pooling": pooling,
        "normalize": normalize,
        "max_length": max_length,
        "batch_tokens": batch_tokens,
        "precision": str(model.dtype).removeprefix("torch."),
        "slope_scale": model.config.slope_scale,
        "model": _fingerprint_of_model(model),
        "documents": _fingerprint_of_documents(documents, tokens),
        **settings_of(spans, passages),
    }
    if target is not None and target.exists():
        return read_finished(target, made_by, num_shortened)
    prepack(model)  # now that all of it has been read
    compute, size = partial(_compute, model, pooling, normalize), model.config.hidden_size

    def run(log: JsonLog | None) -> Embedded:
        vectors, span_vectors = _run(
            compute, documents, tokens, passages, batches, size, log, progress
        )
        return Embedded(
            vectors=vectors,
            ids=tuple(document.id for document in documents),
            num_tokens=tuple(map(len, tokens)),
            num_shortened=num_shortened,
            spans=() if spans is None else tuple(passage.spans for passage in passages),
            span_vectors=() if spans is None else span_vectors,
        )

    if target is None:
        return run(None)
    kept = partial_folder(target)
    with hold_run_folder(kept, "embed"):
        open_run_folder(kept / "settings.json", made_by, "embed")
        made = run(JsonLog(kept / "log.jsonl"))
        WRITERS[target.suffix](target, made, made_by)
    shutil.rmtree(kept)
    return made


def plan_batches(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """The numbers of the documents of each batch: of like length, the longest first.

    A batch has at most batch_tokens = rows * longest row; a longer document is one of its own.
    """
    batches: list[list[int]] = []
    for number in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= batch_tokens:
            batches[-1].append(number)
        else:
            batches.append([number])
    return batches


@torch.inference_mode()
def _compute(
    model: PreTrainedModel,
    pooling: str,
    normalize: bool,
    rows: Sequence[Tokens],
    spans: Sequence[Sequence[Span]],
) -> Vectors:
    """A vector for the tokens of each row, and then for those of each span of each row."""
    ids = pad_sequence([torch.from_numpy(row).long() for row in rows], batch_first=True)
    lengths = torch.tensor([len(row) for row in rows])
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    ids, mask = ids.to(model.device), mask.to(model.device)
    hidden: Tensor = model(ids, attention_mask=mask).last_hidden_state
    if pooling == "cls":
        vectors = hidden[:, 0].float()
    else:  # hidden is zero at padding
        vectors = hidden.sum(1, dtype=torch.float32) / mask.sum(1)[:, None]
    means = [
        row[begin:end].mean(0, dtype=torch.float32)
        for row, of_row in zip(hidden, spans, strict=True)
        for begin, end in of_row
    ]
    vectors = torch.cat([vectors, *(mean[None] for mean in means)])
    if normalize:
        vectors = torch.nn.functional.normalize(vectors, dim=-1)
    return vectors.cpu().numpy()


def _run(
    compute: Callable[[Sequence[Tokens], Sequence[Sequence[Span]]], Vectors],
    documents: Sequence[Document],
    tokens: Sequence[Tokens],
    passages: Sequence[Passages],
    batches: Sequence[Sequence[int]],
    size: int,
    log: JsonLog | None,
    progress: Callable[[int, int], None] | None,
) -> tuple[Vectors, tuple[Vectors, ...]]:
    """The vectors of all documents, and of the spans of each; batches that the log has are not
    computed again.
    """
    vectors = np.empty((len(documents), size), np.float32)
    span_vectors: dict[int, Vectors] = {}
    num_done, num_tokens = 0, sum(map(len, tokens))
    done = {} if log is None else {record.get("batch"): record for record in log.records}
    for number, batch in enumerate(batches):
        counts = [len(passages[i].spans) for i in batch]
        if number in done:
            try:
                packed = base64.b64decode(done[number]["vectors"])
                rows = np.frombuffer(packed, np.float32).reshape(len(batch) + sum(counts), size)
            except (LookupError, TypeError, ValueError) as error:
                raise ValueError(f"embed: log.jsonl is damaged ({error})") from error
        else:
            rows = compute([tokens[i] for i in batch], [passages[i].tokens for i in batch])
            if not (finite := np.isfinite(rows).all(axis=1)).all():
                owner = [*batch, *np.repeat(batch, counts)][int(np.argmin(finite))]
                got = f"got another of document {documents[owner].id!r}"
                raise ValueError(f"embed: vectors must be finite, {got}")
            if log is not None:
                encoded = base64.b64encode(rows.tobytes()).decode()
                log.append({"batch": number, "vectors": encoded})
        vectors[list(batch)] = rows[: len(batch)]
        span_vectors.update(zip(batch, split_rows(rows[len(batch) :], counts), strict=True))
        num_done += sum(len(tokens[i]) for i in batch)
        if progress is not None:
            progress(num_done, num_tokens)
    return vectors, tuple(span_vectors[i] for i in range(len(documents)))


def _with_ids(documents: Sequence[Any]) -> list[Document]:
    if isinstance(documents, str):
        raise TypeError("embed: documents must be texts or Documents, got a str alone")
    for document in documents:
        if not isinstance(document, Document | str):
            kind = type(document).__name__
            raise TypeError(f"embed: documents must be texts or Documents, got a {kind}")
    return [Document(n, d) if isinstance(d, str) else d for n, d in enumerate(documents)]


def _check(
    documents: Sequence[Document],
    pooling: str,
    max_length: int | None,
    batch_tokens: int,
    precision: str | None,
) -> None:
    if pooling not in _POOLINGS:
        raise ValueError(f"embed: pooling must be one of {_POOLINGS}, got {pooling!r}")
    if precision is not None and precision not in (known := tuple(_DTYPES)):
        raise ValueError(f"embed: precision must be one of {known}, got {precision!r}")
    for name, value in (("max_length", max_length), ("batch_tokens", batch_tokens)):
        if value is not None and value < 1:
            raise ValueError(f"embed: {name} must be at least 1, got {value}")
    if not documents:
        raise ValueError("embed: documents must be at least one, got none")
    if len({str(document.id) for document in documents}) < len(documents):
        raise ValueError("embed: documents must have ids that differ, got one twice")


def _load_tokenizer(files: Files) -> PreTrainedTokenizerBase:
    try:
        tokenizer = load_tokenizer(files)
    except ValueError as error:
        reason = str(error).partition(": ")[2]
        got = f"got {files.name!r} ({reason})"
        raise ValueError(f"embed: folder must hold a tokenizer, {got}") from error
    # Without files, Transformers makes up a tokenizer that knows its special tokens alone.
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        got = f"and {files.name!r} has no vocabulary file"
        raise ValueError(f"embed: folder must hold a tokenizer, {got}")
    return tokenizer


def _tokenize(
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[Document],
    spans: Spans | None,
    max_length: int | None,
    vocab_size: int,
) -> tuple[list[Tokens], list[Passages], int]:
    """The tokens and the passages of each document, and how many documents are shortened."""
    num_special = tokenizer.num_special_tokens_to_add()
    if max_length is not None and max_length <= num_special:
        raise ValueError(
            f"embed: max_length must be above the {num_special} special tokens, got {max_length}"
        )
    encode = partial(tokenizer, verbose=False, return_offsets_mapping=spans is not None)
    rows, passages, num_shortened = [], [], 0
    for number, document in enumerate(documents):
        encoded = encode(document.text, truncation=False)
        if is_shortened := max_length is not None and len(encoded["input_ids"]) > max_length:
            num_shortened += 1
            encoded = encode(document.text, truncation=True, max_length=max_length)
        ids = encoded["input_ids"]
        if len(ids) <= num_special:
            raise ValueError(f"embed: documents must have tokens, got none in {document.id!r}")
        if max(ids) >= vocab_size:
            got = f"got {max(ids)} in {document.id!r}"
            raise ValueError(f"embed: tokens must be below vocab_size = {vocab_size}, {got}")
        rows.append(np.asarray(ids, np.int32))
        passages.append(
            Passages((), ())
            if spans is None
            else find_passages(
                spans, number, document, encoded["offset_mapping"], is_shortened=is_shortened
            )
        )
    return rows, passages, num_shortened


def _fingerprint_of_model(model: PreTrainedModel) -> str:
    kept = {k: v for k, v in model.config.to_dict().items() if not k.startswith("_")}
    digest = hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


def _fingerprint_of_documents(documents: Sequence[Document], tokens: Sequence[Tokens]) -> str:
    """Of their ids and tokens, and so of what the tokenizer makes of them."""
    digest = hashlib.sha256()
    for document, row in zip(documents, tokens, strict=True):
        digest.update(json.dumps([document.id, len(row)]).encode())
        digest.update(row.data)
    return digest.hexdigest()[:16]
