"""What one model makes of one text: weights, departure of heads from their bias, losses, guesses.

A weight travels in 16 bits, integer / 65535, so that what the page prints is within 1 / 131,070 of
what the model computed. Only the lower triangle of a causal model's matrices is kept.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel

from linbias import definition
from linbias.definition import Float64
from linbias.models.decoder.bidirectional import LittleBird
from linbias.models.decoder.positions import AttendOptions, Biased, Stepped
from linbias.models.decoder.slopes import ModelSlopes
from linbias.models.limits import able_to_read

_NUM_GUESSES = 5
_MAX_LOGITS = 2**22  # whose logarithms are taken at once, in float64

Ids = npt.NDArray[np.int64]
Weights = npt.NDArray[np.float32]


def run(model: PreTrainedModel, ids: Ids) -> tuple[Weights, Tensor | None]:
    """Weights [layers, heads, T, T] of a model on ids [T], and its logits [T, vocabulary]."""
    if model.config._attn_implementation not in ("eager", "linbias"):
        model.set_attn_implementation("eager")  # the other ways have no weights to give
    with able_to_read(model, len(ids)), torch.inference_mode():
        inputs = torch.from_numpy(ids)[None]
        output = model(inputs, output_attentions=True, return_dict=True)
    given = getattr(output, "attentions", None) or ()
    square = (len(ids), len(ids))
    if not given or any(layer is None or layer.shape[-2:] != square for layer in given):
        kind = type(model).__name__
        raise ValueError(f"explore: model must give the weights of its attention, got a {kind}")
    weights = torch.cat([layer.float() for layer in given]).numpy()
    if not np.isfinite(weights).all():
        raise ValueError("explore: model must have finite attention weights, got nan")
    logits = getattr(output, "logits", None)
    return weights, None if logits is None else logits[0]


def shape_of(model: PreTrainedModel, ids: Ids) -> tuple[int, bool]:
    """How many matrices of weights a model has, and whether no query sees a later key."""
    weights, _ = run(model, np.resize(ids, 2))  # from one token it could not be told
    return weights.shape[0] * weights.shape[1], not np.triu(weights, 1).any()


def slopes_of(model: PreTrainedModel, num_tokens: int) -> tuple[Float64, Float64 | None] | None:
    """Slopes [H] of scores as softmax sees them: to earlier and, if others, to later keys.

    A side that is hidden has inf. None: no linear biases, or more than slopes, such as a window.
    """
    position = getattr(model.base_model, "position", None)
    if isinstance(position, Biased):
        fall = position.fall(torch.zeros(1, 1, num_tokens, 1), num_tokens, AttendOptions())
        if isinstance(position, LittleBird | Stepped) or fall.keys() & {"mask", "window"}:
            return None
        left, right = fall["slopes"], fall.get("right_slopes", fall["slopes"])
    else:
        fused = (getattr(module, "fused_bias", module) for module in model.modules())
        kept = (getattr(bias, "slopes", None) for bias in fused)
        slopes = next((one for one in kept if isinstance(one, ModelSlopes)), None)
        if slopes is None:
            return None
        left = right = slopes.left(torch.zeros(1, 1, 1, 1), num_tokens)
    earlier, later = (side.detach().double().numpy() for side in (left, right))
    return earlier, None if np.array_equal(earlier, later) else later


def weights_of_bias(
    left: Float64, right: Float64 | None, num_tokens: int, causal: bool
) -> Float64:
    """The weights [H, T, T] of heads whose bias alone decides."""
    nothing = np.zeros((len(left), num_tokens, 1))
    right = None if causal else right
    return definition.attention_weights(nothing, nothing, left, causal=causal, right_slopes=right)


def departure(weights: npt.NDArray[Any], alone: Float64) -> Float64:
    """The share of weight that lies elsewhere than the bias alone would put it, [L, H].

    Of weights [L, H, T, T], on average over the later half of queries, which have many keys.
    """
    rows = slice(weights.shape[-1] // 2, None)
    moved = np.abs(weights[..., rows, :] - alone[..., rows, :]).sum(-1) / 2
    return moved.mean(-1)


def reach(weights: npt.NDArray[Any]) -> list[list[float]]:
    """[L][H]: the mean distance of each head's weight, over the later half of the queries."""
    T = weights.shape[-1]
    rows = np.arange(T // 2, T)
    distance = np.abs(rows[:, None] - np.arange(T))
    parts = weights[..., rows, :].astype(np.float64)
    mean = (parts * distance).sum((-1, -2)) / parts.sum((-1, -2))
    found: list[list[float]] = mean.tolist()
    return found


def pack(weights: Weights, causal: bool) -> str:
    """Matrices [L, H, T, T] as base64, row after row, of causal ones up to the diagonal."""
    T = weights.shape[-1]
    kept = weights[..., *np.tril_indices(T)] if causal else weights
    return base64.b64encode(np.rint(kept * 65535).astype("<u2").tobytes()).decode()


def forecast(logits: Tensor, ids: Ids) -> tuple[Float64, Ids, Float64]:
    """The bits [T - 1] that tokens cost, and the likeliest [T, guesses] after each of ids [T].

    With the probabilities of those.
    """
    next_ids = torch.from_numpy(np.append(ids[1:], 0))
    bits, guesses, probabilities = [], [], []
    rows = max(1, _MAX_LOGITS // logits.shape[-1])
    for part, targets in zip(logits.split(rows), next_ids.split(rows), strict=True):
        log_p = part.double().log_softmax(-1)
        best = log_p.topk(min(_NUM_GUESSES, log_p.shape[-1]))
        bits.append(-log_p.gather(1, targets[:, None])[:, 0] / math.log(2))
        guesses.append(best.indices)
        probabilities.append(best.values.exp())
    best_ids, chances = torch.cat(guesses), torch.cat(probabilities)
    return torch.cat(bits)[:-1].numpy(), best_ids.numpy(), chances.numpy()


def losses(
    bits: Float64, sizes: Sequence[int], train_length: int | None
) -> dict[str, float | None]:
    """Bits per byte: of all tokens, of those within the training length, and of those beyond.

    bits [T - 1] are of the tokens after the first, sizes [T] of all; None: there is no token.
    """

    def mean(part: slice) -> float | None:
        size = sum(sizes[1:][part])
        return float(bits[part].sum() / size) if size else None

    within = beyond = None
    if train_length is not None:
        within, beyond = mean(slice(train_length)), mean(slice(train_length, None))
    return {"all": mean(slice(None)), "within": within, "beyond": beyond}
