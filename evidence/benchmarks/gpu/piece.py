"""What the processes of the stage `pieces` run: attention, forward and backward, on their piece of a sequence."""

from collections.abc import Callable
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import linbias
import linbias.torch
from gpu import as_on_a_gpu
from linbias.torch import context_parallel


def attend(H: int, T: int, D: int, device: str, dtype: torch.dtype) -> tuple[float, int, int]:
    """How far off a piece's results and gradients are, as shares of the largest number; bytes that it sent, and those of all-gather."""
    torch.manual_seed(0)
    q, k, v, dout = torch.randn(4, 1, H, T, D, device=device, dtype=dtype)
    sent = 0
    exchange = dist.all_to_all_single

    def counted(received: Tensor, given: Tensor, *rest: object, **options: object) -> object:
        nonlocal sent
        sent += given.nbytes
        return exchange(received, given, *rest, **options)

    def results(
        arrays: list[Tensor], function: Callable[..., Tensor], dout: Tensor
    ) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in arrays]
        out = function(*leaves, implementation="triton")
        return [out, *torch.autograd.grad(out, leaves, dout)]

    with as_on_a_gpu():
        own = [context_parallel.shard(x, 2) for x in (q, k, v, dout)]
        with mock.patch.object(dist, "all_to_all_single", counted):
            found = results(own[:3], context_parallel.attention, own[3])
        whole = results([q, k, v], linbias.torch.attention, dout)
    expected = [context_parallel.shard(x, 2) for x in whole]
    errors = [
        ((x - true).abs().max() / true.abs().max()).item()
        for x, true in zip(found, expected, strict=True)
    ]
    others = dist.get_world_size() - 1
    return max(errors), sent, 2 * others * (own[1].nbytes + own[2].nbytes)
