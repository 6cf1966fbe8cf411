"""Where packed sequences begin and end, and which of its keys each query sees."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from linbias import _request
from linbias._request import Rule, axes, seen
from linbias.torch.call import describe, last_end
from linbias.torch.packed.sequences import Packed


class Placed(NamedTuple):
    """Where the queries and keys of B sequences are, on the CPU."""

    lengths_q: Tensor  # [B]
    lengths_k: Tensor
    ranges: Tensor  # [B, G, 2]
    starts: Tensor  # [B]: the key at which query 0 of each stands
    given: bool  # the call says ranges or starts


_RANGES = Rule(axes("total_q 2"), "integers")


def offsets(function: str, name: str, given: Any, total: int) -> list[int]:
    """Checked offsets: integers from 0 to total that do not fall."""
    described = describe(name, given, function)
    if not described.dtype.startswith(("int", "uint")) or len(described.shape) != 1:
        raise ValueError(
            f"{function}: {name} must be a row of integers, got {described.dtype} {described}"
        )
    starts: list[int] = given.tolist()
    if not starts or starts[0] != 0 or starts[-1] != total or starts != sorted(starts):
        raise ValueError(
            f"{function}: {name} must start at 0, never fall and end at {total}, got {starts}"
        )
    return starts


def ends(lengths: Tensor) -> Tensor:
    """Where sequences of these lengths begin, and the last ends: [B + 1]."""
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def place(function: str, call: Packed, lengths_q: Tensor, lengths_k: Tensor) -> Placed:
    """Check what a call says of each sequence by itself, and fill in what it leaves open."""
    B, num_key_heads = len(lengths_k), call.k.shape[-2]
    for name, slopes in (("slopes", call.left), ("right_slopes", call.right)):
        if slopes is not None and slopes.dim() == 2 and len(slopes) != B:
            raise ValueError(f"{function}: {name} has {len(slopes)} rows for {B} sequences")
    seen.check_window(function, call.window, call.causal)
    if call.query_range is not None:
        _check_ranges(function, call.query_range, lengths_q, lengths_k)
    key_range, query_start = call.key_range, call.query_start
    sizes = {"B": B, "G": num_key_heads}
    for name, x in (("key_range", key_range), ("query_start", query_start)):
        if x is not None:
            described = describe(name, x, function)
            _request.check_array(function, name, described, _request.RULES[name], sizes)
    ranges = torch.stack([torch.zeros_like(lengths_k), lengths_k], dim=1)[:, None]
    if key_range is not None:
        ranges = key_range.cpu()
        ranges = ranges[:, None] if ranges.dim() == 2 else ranges
        for b, length in enumerate(lengths_k.tolist()):
            for first, end in ranges[b].tolist():
                if not 0 <= first <= end <= length:
                    raise ValueError(
                        f"{function}: key_range must be 0 <= first <= end <= {length},"
                        f" the keys of sequence {b}, got [{first}, {end}]"
                    )
    ranges = ranges.expand(B, num_key_heads, 2)
    starts = last_end(ranges) - lengths_q if query_start is None else query_start.cpu()
    given = key_range is not None or query_start is not None
    return Placed(lengths_q, lengths_k, ranges, starts, given)


def _check_ranges(function: str, ranges: Tensor, lengths_q: Tensor, lengths_k: Tensor) -> None:
    """query_range is [total_q, 2], of each query within the keys of its sequence."""
    described = describe("query_range", ranges, function)
    sizes = {"total_q": int(lengths_q.sum())}
    _request.check_array(function, "query_range", described, _RANGES, sizes)
    own = lengths_k.repeat_interleave(lengths_q)
    first, end = ranges.cpu().unbind(1)
    for row in (~((first >= 0) & (first <= end) & (end <= own))).nonzero()[:1, 0].tolist():
        raise ValueError(
            f"{function}: query_range must be 0 <= first <= end <= {own[row]}, the keys of the"
            f" sequence, got {[int(first[row]), int(end[row])]} in row {row}"
        )


def ranges_of_queries(call: Packed, placed: Placed) -> Tensor | None:
    """The keys that window and query_range leave of each query, [total_q, 2]; None: all."""
    left, right = seen.check_window("", call.window, call.causal)
    if call.query_range is None and left < 0 and right < 0:
        return None
    lengths_q, lengths_k, _, starts, _ = placed
    num_keys = lengths_k.repeat_interleave(lengths_q)
    first, end = torch.zeros_like(num_keys), num_keys
    if call.query_range is not None:
        first, end = call.query_range.cpu().unbind(1)
    row = torch.arange(len(num_keys)) - ends(lengths_q)[:-1].repeat_interleave(lengths_q)
    own_key = starts.repeat_interleave(lengths_q) + row
    if left >= 0:
        first = torch.maximum(first, own_key.clamp(min=0) - min(left, seen.LARGEST_WINDOW))
    if right >= 0:
        last = torch.minimum(own_key, num_keys) + min(right, seen.LARGEST_WINDOW)
        end = torch.minimum(end, last + 1)
    return torch.stack([first, torch.maximum(first, end)], 1)
