"""What the processes of `test_context_parallel` run: attention and models on their piece of a sequence."""

import os
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from linbias.torch import context_parallel


class Sent:
    """Counts bytes that leave this process, and collectives, while it is entered."""

    def __enter__(self) -> "Sent":
        self.bytes, self.exchanges, self.gathers = 0, 0, 0
        self._patches = [
            mock.patch.object(dist, name, self._counting(name, getattr(dist, name)))
            for name in ("all_to_all_single", "all_gather")
        ]
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        for patch in self._patches:
            patch.stop()

    def _counting(self, name: str, function: Any) -> Any:
        def counted(first: Any, second: Any, *rest: Any, **options: Any) -> Any:
            if name == "all_to_all_single":
                self.exchanges += 1
                self.bytes += second.nbytes
            else:
                self.gathers += 1
                self.bytes += second.nbytes * (len(first) - 1)
            return function(first, second, *rest, **options)

        return counted


def attend(
    arrays: dict[str, np.ndarray], dtype: str, options: dict[str, Any], backward: bool = True
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], tuple[int, int, int]]:
    """Results and gradients of a piece, and what was sent: bytes, exchanges, gathers."""
    narrow = getattr(torch, dtype)
    wide = torch.float64 if dtype == "float64" else torch.float32
    seed = options.pop("seed", None)
    leaves = {
        name: torch.tensor(arrays[name], dtype=narrow if name in "qkv" else wide).requires_grad_(
            backward
        )
        for name in ("q", "k", "v", "left", "right")
        if arrays.get(name) is not None
    }
    options = {n: torch.tensor(x) if isinstance(x, np.ndarray) else x for n, x in options.items()}
    sides = {"slopes": leaves.get("left"), "right_slopes": leaves.get("right")}
    draw = (lambda device: torch.tensor(seed + dist.get_rank())) if seed is not None else None
    with Sent() as sent, mock.patch("linbias.torch.call.draw_seed", draw):
        out, lse = context_parallel.attention(
            leaves["q"], leaves["k"], leaves["v"], **sides, return_lse=True, **options
        )
        told = sent.bytes, sent.exchanges, sent.gathers
        if backward:
            seen = lse.detach() > -torch.inf
            dlse = torch.tensor(arrays["dlse"], dtype=wide) * seen
            torch.autograd.backward((out, lse), (torch.tensor(arrays["dout"], dtype=narrow), dlse))
    gradients = {name: leaf.grad for name, leaf in leaves.items() if backward}
    return _numpy({"out": out, "lse": lse}), _numpy(gradients), told


def _numpy(tensors: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {name: x.detach().double().numpy() for name, x in tensors.items()}


def attend_or_die(arrays: dict[str, np.ndarray], dies: bool) -> None:
    if dies:
        os._exit(1)
    attend(arrays, "float32", {}, False)


def sent_in_a_step(
    arrays: dict[str, np.ndarray], dtype: str, options: dict[str, Any]
) -> tuple[int, int]:
    """Bytes that this process sends forward, and forward and backward."""
    q, k, v = (
        torch.tensor(arrays[n], dtype=getattr(torch, dtype)).requires_grad_() for n in "qkv"
    )
    with Sent() as sent:
        out = context_parallel.attention(q, k, v, **options)
        forward = sent.bytes
        out.sum().backward()
    return forward, sent.bytes
