"""What the explorer page shows of a trained model: the weights of all layers and heads on a text, and their reach.

A weight travels in 16 bits, weight = integer / 65535, so that what the page prints is within 1 / 131,070 of what the
model computed. Only the lower triangle of a causal model's matrices is kept.
"""

from __future__ import annotations

import base64
import codecs
import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from linbias import definition
from linbias.definition import Float64
from linbias.models.limits import able_to_read, position_limit
from linbias.models.loading import Files, encode, load, load_tokenizer
from linbias.models.positions import Alibi

MAX_WEIGHTS = 3 * 2**20  # 6 MiB, which are 8 MiB in the text of the page
MAX_TOKENS = 1024
SHARE = 0.9  # of the weight that the stated distance holds

Weights = npt.NDArray[np.float32]


def read(model: str | Path, text: Path, *, limit_tokens: int = 256) -> dict[str, Any]:
    """Do what `linbias.explore.read_model` says.

    The values: `name`, `text`, `note` and `cut` (sentences, or None); `tokens` and the `separator` between them;
    `num_layers`, `num_heads`, `causal`; `slopes` [H] or None; `weights`, in base64 the little-endian 16-bit rows
    of layer 0, head 0, then head 1 and so on; `reach` of each layer and head, and `alone`, that of each head's
    bias without any content, or None.
    """
    if not 1 <= limit_tokens <= MAX_TOKENS:
        raise ValueError(f"explore: limit_tokens must be in [1, {MAX_TOKENS}], got {limit_tokens}")
    content, has_more = _read_text(text, num_bytes=64 * limit_tokens)
    files = Files.at("explore", model)
    loaded = load(files, device="cpu").float()
    if loaded.config.is_encoder_decoder:
        raise ValueError(
            f"explore: model must read one text, got {model}, which reads one and writes another"
        )
    ids = encode(files, content)
    if not len(ids):
        raise ValueError(f"explore: text must hold at least one token, got none in {text}")
    has_more |= len(ids) > limit_tokens
    ids = ids[:limit_tokens].astype(np.int64)
    cut = f"The page shows the first {len(ids):,} tokens of the text." if has_more else None
    limit = position_limit(loaded)
    if limit is not None and len(ids) > limit:
        ids = ids[:limit]
        cut = f"The page shows the first {limit:,} tokens: the model has no rows for later positions."
    weights = attention_weights(loaded, ids)
    causal = not np.triu(weights, 1).any()
    fitting = most_tokens(weights.shape[0] * weights.shape[1], causal)
    if len(ids) > fitting:
        ids = ids[:fitting]
        cut = f"The page shows the first {fitting:,} tokens: it holds {MAX_WEIGHTS:,} weights."
        weights = attention_weights(loaded, ids)
    left = model_slopes(loaded, len(ids))
    separator = " " if loaded.config.model_type == "linbias-paper" else ""
    return {
        # A folder's name, not where it lies on somebody's machine.
        "name": Path(model).resolve().name if Path(model).is_dir() else str(model),
        "text": text.name,
        "note": _note(loaded, causal, left),
        "cut": cut,
        "tokens": token_names(files, ids),
        "separator": separator,
        "num_layers": weights.shape[0],
        "num_heads": weights.shape[1],
        "causal": causal,
        "slopes": None if left is None else left.tolist(),
        "weights": pack(weights, causal),
        "reach": reach(weights),
        "alone": None if left is None else _reach_of_bias(left, len(ids), causal),
    }


def _read_text(path: Path, num_bytes: int) -> tuple[bytes, bool]:
    """The beginning of a text in whole characters, and whether there is more of it."""
    try:
        with open(path, "rb") as file:
            data = file.read(num_bytes + 1)
    except OSError as error:
        raise ValueError(
            f"explore: text must be a file that can be read, got {path} ({error.strerror or error})"
        ) from error
    has_more = len(data) > num_bytes
    try:
        decoder = codecs.getincrementaldecoder("utf-8")()
        text = decoder.decode(data[:num_bytes], final=not has_more)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"explore: text must be UTF-8, got another byte at {error.start} of {path}"
        ) from error
    if not text:
        raise ValueError(f"explore: text must hold at least one token, got the empty file {path}")
    return text.encode(), has_more


def most_tokens(num_matrices: int, causal: bool) -> int:
    """How many tokens the page can hold of so many matrices, at least 1."""
    each = MAX_WEIGHTS / num_matrices  # T (T + 1) / 2 or T^2
    return max(1, int((math.sqrt(8 * each + 1) - 1) / 2 if causal else math.sqrt(each)))


def attention_weights(model: PreTrainedModel, ids: npt.NDArray[np.int64]) -> Weights:
    """Compute the attention weights of every layer and head on one text.

    Args:
        model: Any causal language model, as `linbias.models.load` gives it.
        ids: [T], its tokens.

    Returns:
        [layers, heads, T, T].

    Raises:
        ValueError: The model does not give its weights, or not of every layer, or they are not finite.
    """
    inputs = torch.from_numpy(ids)[None]
    if model.config._attn_implementation not in ("eager", "linbias"):
        model.set_attn_implementation("eager")  # the other ways have no weights to give
    with able_to_read(model, len(ids)), torch.inference_mode():
        found = model(inputs, output_attentions=True, use_cache=False, return_dict=True)
    given = getattr(found, "attentions", None) or ()
    square = (len(ids), len(ids))
    if not given or any(layer is None or layer.shape[-2:] != square for layer in given):
        kind = type(model).__name__
        raise ValueError(f"explore: model must give the weights of its attention, got a {kind}")
    weights = torch.cat([layer.float() for layer in given]).numpy()
    if not np.isfinite(weights).all():
        raise ValueError("explore: model must have finite attention weights, got nan")
    return weights


def model_slopes(model: PreTrainedModel, num_tokens: int) -> Float64 | None:
    """Find the ALiBi slopes that a model applies to a text of so many tokens: [H], or None without linear biases.

    They are those of its scores as softmax sees them: of Falcon, divided by the square root of the head size.
    """
    fused = (getattr(module, "fused_bias", None) for module in model.modules())
    if (bias := next((found for found in fused if found is not None), None)) is not None:
        found = bias.slopes
    elif isinstance(position := getattr(model.base_model, "position", None), Alibi):
        found = position.slopes
    else:
        return None
    return found.left(torch.zeros(1, 1, 1, 1), num_tokens).double().numpy()


def token_names(model: str | Path | Files, ids: npt.NDArray[np.int64]) -> list[str]:
    """What each token stands for; a byte that is no character is written as in Python, \\xe2."""
    tokenizer = load_tokenizer(model)
    names = [tokenizer.decode([int(i)], clean_up_tokenization_spaces=False) for i in ids]
    bytes_only = tokenizer.vocab_size == 256
    return [
        f"\\x{int(i):02x}" if bytes_only and name == "\N{REPLACEMENT CHARACTER}" else name
        for i, name in zip(ids, names, strict=True)
    ]


def _note(model: PreTrainedModel, causal: bool, left: Float64 | None) -> str | None:
    """What to know of a model that is not what the page is made for."""
    notes = []
    if left is None:
        kind = getattr(model.config, "position", None) or model.config.model_type
        notes.append(
            f"This model ({kind}) has no linear biases, so that its heads have no slopes: "
            "what is shown is the reach that they learned."
        )
    if not causal:
        notes.append(
            "This model is not causal: a row also weighs the keys after the query, and distances count both ways."
        )
    return " ".join(notes) or None


def pack(weights: Weights, causal: bool) -> str:
    """Write matrices [L, H, T, T] as base64, row after row, each up to its diagonal where the model is causal."""
    T = weights.shape[-1]
    kept = weights[..., *np.tril_indices(T)] if causal else weights
    return base64.b64encode(np.rint(kept * 65535).astype("<u2").tobytes()).decode()


def reach(weights: npt.NDArray[Any]) -> dict[str, list[list[float]]]:
    """Measure how far each head looks, over the later half of the rows, which all have many keys to choose from.

    Args:
        weights: [L, H, T, T], rows that sum to 1.

    Returns:
        `mean`, the mean distance of the weight, and `within`, the smallest distance that holds 90% of it: [L][H].
    """
    T = weights.shape[-1]
    rows = np.arange(T // 2, T)
    distance = np.abs(rows[:, None] - np.arange(T))
    totals = [
        np.bincount(distance.ravel(), matrix[rows].ravel().astype(np.float64), minlength=T)
        for matrix in weights.reshape(-1, T, T)
    ]
    by_distance = np.stack([total / total.sum() for total in totals])
    mean = by_distance @ np.arange(T)
    within = (by_distance.cumsum(1) < SHARE).sum(1)
    shape = weights.shape[:2]
    return {"mean": mean.reshape(shape).tolist(), "within": within.reshape(shape).tolist()}


def _reach_of_bias(left: Float64, num_tokens: int, causal: bool) -> dict[str, list[float]]:
    """The reach of heads whose queries and keys say nothing, so that the bias alone decides."""
    nothing = np.zeros((len(left), num_tokens, 1))
    found = reach(definition.attention_weights(nothing, nothing, left, causal=causal)[None])
    return {name: values[0] for name, values in found.items()}
