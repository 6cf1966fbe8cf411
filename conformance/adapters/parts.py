"""What adapters share: attention around a bias that somebody else builds, and a model's layer
between our arrays.
"""

import functools
import importlib.util
from importlib import metadata
from pathlib import Path

import numpy as np

import linbias

# What an implementation does whose slopes follow the paper's text, and not its code.
GEOMETRIC = {
    f"slopes-paper-{H}": "2^(-8(h+1)/H) for every H, as the paper's text has it:"
    " the schedule `geometric`"
    for H in (6, 12, 20, 71)
}


def described(name, package, runs, conventions=None, dtypes=("float32",)):
    """Say of a function what a file of its own would say."""

    def describe(function):
        function.NAME, function.PACKAGE, function.RUNS = name, package, runs
        function.CONVENTIONS, function.DTYPES = conventions or {}, dtypes
        return function

    return describe


def for_linbias(
    q, k, *, slopes, query_start=None, segments=None, schedule="paper", max_bias=8.0, **others
):
    """The arguments of a row as linbias.attention takes them."""
    if slopes is None:
        slopes = linbias.slopes(q.shape[1], schedule, max_bias)
    if query_start is None:
        query_start = np.full(len(q), k.shape[2] - q.shape[2])
    if segments is not None:
        others["mask"] = segments[:, None, :, None] == segments[:, None, None]
    return {"slopes": slopes, "query_start": query_start, **others}


def only(slopes, schedule, max_bias, num_heads, own=None):
    """Refuse slopes that an implementation was not asked to make: the paper's, or its `own`."""
    if slopes is None and schedule == own:
        return
    wanted = linbias.slopes(num_heads)
    if slopes is None and (schedule, max_bias) != ("paper", 8.0):
        raise NotImplementedError("makes the paper's slopes")
    if slopes is not None and not np.array_equal(slopes, wanted):
        raise NotImplementedError("makes its own slopes")


def square(function):
    """Let a function that takes as many queries as keys answer for the last ones: the others are
    zeros.
    """

    @functools.wraps(function)
    def attention(q, k, v, **arguments):
        enough_keys(q, k)
        missing = k.shape[2] - q.shape[2]
        whole = np.concatenate([np.zeros_like(k, shape=(*q.shape[:2], missing, q.shape[3])), q], 2)
        answer = function(whole, k, v, **arguments)
        return (
            tuple(x[:, :, missing:] for x in answer)
            if isinstance(answer, tuple)
            else answer[:, :, missing:]
        )

    return attention


def one_sided(causal):
    if not causal:
        raise NotImplementedError("causal only")


def equal_heads(q, k):
    if q.shape[1] != k.shape[1]:
        raise NotImplementedError("as many key heads as query heads")


def enough_keys(q, k):
    if q.shape[2] > k.shape[2]:
        raise NotImplementedError("no more queries than keys")


def attend(q, k, v, bias, scale, causal, hidden=None):
    """Scores, mask, softmax and product in NumPy and float64, around a bias that broadcasts to [B,
    H, T, S].
    """
    T, S, repeats = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    k, v = (np.repeat(x.astype(np.float64), repeats, 1) for x in (k, v))
    scores = scale * q.astype(np.float64) @ k.swapaxes(-1, -2) + np.asarray(bias, np.float64)
    if causal:
        scores = np.where(np.arange(S) > np.arange(T)[:, None] + S - T, -np.inf, scores)
    if hidden is not None:
        scores = np.where(hidden, -np.inf, scores)
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isneginf(top), 0, top))
    total = weights.sum(-1, keepdims=True)
    return (weights / np.where(total == 0, 1, total) @ v).astype(q.dtype)


def file_of(package, path):
    """A module of an installed package by its file, without importing the packages around it."""
    found = next(f for f in metadata.files(package) if str(f) == path)
    spec = importlib.util.spec_from_file_location(Path(path).stem, found.locate())
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def padding_mask(k, key_range):
    """[B, S], 1 for a key that counts; rows without any are not asked of models."""
    keys = np.arange(k.shape[2])
    if key_range is None:
        return np.ones((len(k), k.shape[2]), int)
    if (key_range[:, 0] >= key_range[:, 1]).any():
        raise NotImplementedError("a text of padding alone is not asked of models")
    return ((keys >= key_range[:, :1]) & (keys < key_range[:, 1:])).astype(int)


def through(model, layer, fused, dense, fuse, q, k, v, key_range, dtype):
    """The output of a Transformers model's attention, with its own masks, biases and cache.

    S - T keys lie in the cache. `fused`, the layer's projection, gives q, k and v of the T tokens
    by `fuse`, and what `dense`, its last projection, receives is the output.
    """
    import torch
    from transformers import DynamicCache

    kind = getattr(torch, dtype)
    model = model.eval().to(kind)
    mask = torch.tensor(padding_mask(k, key_range))
    given = q.dtype
    q, k, v = (torch.tensor(x).to(kind) for x in (q, k, v))
    (B, H, T, D), S = q.shape, k.shape[2]
    caught = []
    new = [x[:, :, S - T :] for x in (k, v)]
    setattr(layer, fused, Answer(lambda hidden: fuse(q, *new)))
    setattr(layer, dense, Answer(lambda x: caught.append(x) or torch.zeros_like(x)))
    cache = DynamicCache(config=model.config)
    if S > T:
        cache.update(k[:, :, : S - T], v[:, :, : S - T], 0)
    with torch.no_grad():
        model(
            inputs_embeds=torch.zeros(B, T, H * D, dtype=kind),
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
        )
    return caught[0].reshape(B, T, H, D).transpose(1, 2).float().numpy().astype(given)


def fuse_by_head(q, k, v):
    """BLOOM's and Falcon's projection: [B, T, H * 3 * D]."""
    import torch

    return torch.stack((q, k, v), 3).transpose(1, 2).flatten(2)


def Answer(function):
    """A layer that answers with a function."""
    import torch

    class Layer(torch.nn.Module):
        def forward(self, *arguments):
            return function(*arguments)

    return Layer()
