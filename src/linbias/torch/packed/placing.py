"""Where packed sequences begin and end, and which of its keys each query sees."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from linbias import _request
from linbias._request import Rule, axes, checks, seen
from linbias.torch.call import describe, last_end
from linbias.torch.packed.sequences import Packed


class Placed(NamedTuple):
    """Where the queries and keys of B sequences are: int64, on the CPU."""

    offsets: Tensor  # [B + 1]: where the queries of each begin, and those of the last end
    lengths_k: Tensor  # [B]
    key_range: Tensor | None = None  # [B, G, 2]; None: all keys
    query_start: Tensor | None = None  # [B]; None: the last query stands at the last key

    def copy(self) -> "Placed":
        key_range, start = (x if x is None else x.clone() for x in self[2:])
        return Placed(self.offsets.clone(), self.lengths_k, key_range, start)

    def starts(self) -> Tensor:
        """[B]: the key at which query 0 of each sequence stands."""
        given = self.query_start
        return self.lengths_k - self.offsets.diff() if given is None else given

    def ranges(self, num_key_heads: int) -> Tensor:
        """[B, G, 2]: the keys of each sequence that may be seen."""
        if self.key_range is not None:
            return self.key_range
        whole = torch.stack([torch.zeros_like(self.lengths_k), self.lengths_k], dim=1)
        return whole[:, None].expand(-1, num_key_heads, 2)


_RANGES = Rule(axes("total_q 2"), "integers")


def offsets(function: str, name: str, given: Any, total: int | None) -> Tensor:
    """Checked offsets, int64 on the CPU: from 0 to total, None for any, and they do not fall."""
    described = describe(name, given, function)
    if not described.dtype.startswith(("int", "uint")) or len(described.shape) != 1:
        raise ValueError(
            f"{function}: {name} must be a row of integers, got {described.dtype} {described}"
        )
    starts: list[int] = given.tolist()
    end = starts[-1] if starts and total is None else total
    if not starts or starts[0] != 0 or starts[-1] != end or starts != sorted(starts):
        rule = (
            "start at 0 and never fall"
            if total is None
            else f"start at 0, never fall and end at {total}"
        )
        raise ValueError(f"{function}: {name} must {rule}, got {starts}")
    return given.cpu().long()


def ends(lengths: Tensor) -> Tensor:
    """Where sequences of these lengths begin, and the last ends: [B + 1]."""
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def place(function: str, call: Packed, offsets: Tensor, lengths_k: Tensor) -> Placed:
    """Check what a call says of each sequence by itself."""
    B, G = len(lengths_k), call.k.shape[-2]
    H = call.q.shape[1]
    for name, slopes in (("slopes", call.left), ("right_slopes", call.right)):
        if slopes is None or slopes.shape in ((H,), (B, H)):
            continue
        if slopes.dim() == 2 and len(slopes) != B:
            raise ValueError(f"{function}: {name} has {len(slopes)} rows for {B} sequences")
        rule = _request.RULES["slopes"]
        _request.check_array(
            function, name, describe(name, slopes, function), rule, {"B": B, "H": H}
        )
    seen.check_window(function, call.window, call.causal)
    if call.query_range is not None:
        _check_ranges(function, call.query_range, offsets.diff(), lengths_k)
    ranges, start = call.key_range, call.query_start
    for name, x in (("key_range", ranges), ("query_start", start)):
        if x is not None:
            described = describe(name, x, function)
            rule = _request.RULES[name]
            _request.check_array(function, name, described, rule, {"B": B, "G": G})
    if ranges is not None:
        ranges = ranges.cpu()
        ranges = ranges[:, None] if ranges.dim() == 2 else ranges
        for b, length in enumerate(lengths_k.tolist()):
            for first, end in ranges[b].tolist():
                if not 0 <= first <= end <= length:
                    raise ValueError(
                        f"{function}: key_range must be 0 <= first <= end <= {length},"
                        f" the keys of sequence {b}, got [{first}, {end}]"
                    )
        ranges = ranges.expand(B, G, 2)
        if start is None:
            start = last_end(ranges) - offsets.diff()
    if start is not None:
        start = start.cpu()
        checks.check_query_start_values(function, start.detach().numpy())
    return Placed(offsets, lengths_k, ranges, start)


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
    lengths = placed.offsets.diff()
    num_keys, begin, start = (
        x.repeat_interleave(lengths)
        for x in (placed.lengths_k, placed.offsets[:-1], placed.starts())
    )
    first, end = torch.zeros_like(num_keys), num_keys
    if call.query_range is not None:
        first, end = call.query_range.cpu().unbind(1)
    own_key = start + torch.arange(len(num_keys)) - begin
    if left >= 0:
        first = torch.maximum(first, own_key.clamp(min=0) - min(left, seen.LARGEST_WINDOW))
    if right >= 0:
        last = torch.minimum(own_key, num_keys) + min(right, seen.LARGEST_WINDOW)
        end = torch.minimum(end, last + 1)
    return torch.stack([first, torch.maximum(first, end)], 1)
