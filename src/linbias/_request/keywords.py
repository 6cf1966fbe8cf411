"""The keywords of attention: those that a signature shows, and what other libraries call them."""

import difflib
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

from linbias._request import Request

F = TypeVar("F", bound=Callable[..., Any])

_PLACING = "key_range and query_start for padding and caches"
_SLOPES = "say slopes and right_slopes, which make the bias"
# Arguments of other libraries, and what to say here instead.
ELSEWHERE = {
    "is_causal": "say causal, which is True by default",
    **dict.fromkeys(("dropout_p", "dropout_rate"), "say dropout"),
    "dropout_rng": "say dropout_key",
    "deterministic": "results repeat bit for bit without it",
    **dict.fromkeys(("softmax_scale", "sm_scale"), "say scale"),
    "alibi_slopes": "say slopes, or nothing for those of the paper",
    "left": "say slopes",
    "right": "say right_slopes",
    **dict.fromkeys(
        ("attn_mask", "attention_mask", "mask", "key_padding_mask"), f"say {_PLACING}"
    ),
    **dict.fromkeys(("attn_bias", "bias", "score_mod"), _SLOPES),
    **dict.fromkeys(("window_size", "local_window_size"), "say window"),
    "batch_first": "the batch always comes first",
    "sliding_window": "say window, (size - 1, 0)",
    "block_mask": "say window or query_range",
    "enable_gqa": "k and v may have fewer heads than q without it",
    "max_seqlen_q": "cu_seqlens_q says the lengths",
    "max_seqlen_k": "cu_seqlens_k says the lengths",
    "cache_seqlens": "say key_range, [[0, filled], ...]",
    "return_attn_probs": "say return_lse, and call attention_weights for the weights",
    "need_weights": "call attention_weights for the weights",
    "key_value_seq_lengths": (
        "say key_range, [[0, length], ...], and where padding is on the right query_start=zeros"
    ),
    "query_seq_lengths": "queries beyond a length may stay: leave their rows out of the loss",
    "return_residual": "say return_lse",
    **dict.fromkeys(
        ("query_idx", "query_index"), "leave it out and say table(query=...) of the result"
    ),
    "query": "say q",
    "key": "say k",
    "value": "say v",
    **dict.fromkeys(
        ("points", "query_points", "metric", "global_tokens"),
        "attention_points and PointAttention have it",
    ),
    **dict.fromkeys(
        ("add_bias_kv", "add_zero_attn"),
        "it adds a key that stands nowhere in the sequence, and is not built",
    ),
}
# Likewise of `attention_points`, where it has other arguments.
_AMONG_POINTS = {
    **dict.fromkeys(
        ("attn_mask", "attention_mask", "mask", "key_padding_mask", "key_range"),
        "say num_points, how many tokens of each row are no padding; masks are not built",
    ),
    **dict.fromkeys(
        ("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k", "offsets", "lengths", "seqlens"),
        "say num_points, of sets that are padded to one size",
    ),
    **dict.fromkeys(("positions", "coords", "coordinates", "pos"), "say points"),
    "query_positions": "say query_points",
    "need_weights": "PointAttention gives the weights",
}


def show_keywords(
    options: type, defaults: Mapping[str, object] = Request._field_defaults
) -> Callable[[F], F]:
    """Show keywords of a TypedDict in a function's signature; those without a default are None."""

    def show(function: F) -> F:
        own = inspect.signature(function)
        *named, _ = own.parameters.values()
        first = [p for p in named if p.kind is not p.KEYWORD_ONLY]
        keywords = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=defaults.get(name),
                annotation=hint,
            )
            for name, hint in options.__annotations__.items()
        ]
        shown = own.replace(parameters=[*first, *keywords, *named[len(first) :]])
        function.__signature__ = shown  # type: ignore[attr-defined]
        return function

    return show


def refuse_unknown(
    function: str, given: Mapping[str, object], called: Callable[..., object]
) -> NoReturn:
    """Raise for an argument that `called` does not have, with the name that it has there."""
    parameters = inspect.signature(called).parameters.values()
    known = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD and p.name != "function"]
    name = next(name for name in given if name not in known)
    near = difflib.get_close_matches(name, known, n=1)
    other = ELSEWHERE.get(name)
    if "num_points" in known:
        other = _AMONG_POINTS.get(name, other)
    said = re.match(r"say (\w+)(?: and (\w+))?", other or "")
    if name.endswith("mask") and "mask" in known:
        advice = f"say mask, or {_PLACING}"
    elif other and (said is None or {*said.groups()} <= {*known, None}):
        advice = other
    elif near:
        advice = f"did you mean {near[0]}?"
    else:
        advice = f"there are {', '.join(known)}"
    raise TypeError(f"{function}: there is no argument {name}; {advice}")
