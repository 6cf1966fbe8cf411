"""What the processes of `test_context_parallel` run on their shard of a sequence."""

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

import linbias.models
import linbias.torch
import small_models
from linbias.models import LinbiasForMaskedLM
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
    """Results and gradients of a shard, and what was sent: bytes, exchanges, gathers.

    With cu_seqlens among the options, of packed documents.
    """
    narrow = getattr(torch, dtype)
    wide = torch.float64 if dtype == "float64" else torch.float32
    seed = options.pop("seed", None)
    types = dict.fromkeys("qkv", narrow) | {"left": wide, "right": wide}
    leaves = {
        name: torch.tensor(arrays[name], dtype=dtype, requires_grad=backward)
        for name, dtype in types.items()
        if arrays.get(name) is not None
    }
    options = {n: torch.tensor(x) if isinstance(x, np.ndarray) else x for n, x in options.items()}
    if (places := options.get("positions")) is not None and places.is_floating_point():
        leaves["positions"] = places.requires_grad_(backward)
    sides = {"slopes": leaves.get("left"), "right_slopes": leaves.get("right")}
    draw = (lambda device: torch.tensor(seed + dist.get_rank())) if seed is not None else None
    function: Any = context_parallel.attention
    if "cu_seqlens" in options:
        function = context_parallel.attention_varlen
    with Sent() as sent, mock.patch("linbias.torch.call.draw_seed", draw):
        out, lse = function(
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


def read(
    build: tuple[str, dict[str, Any]], ids: torch.Tensor, rows: slice, options: dict[str, Any]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits of a model's shard, and gradients of its weights, added up over the processes."""
    model = small(*build)
    given = {name: x[:, rows] if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    with context_parallel.use():
        logits = model(input_ids=ids[:, rows], **given).logits
        (logits * weigh(ids, logits.shape[-1])[:, rows]).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for gradient in gradients.values():
        dist.all_reduce(gradient)
    return logits.detach(), gradients


def weigh(ids: torch.Tensor, size: int) -> torch.Tensor:
    """Some gradient of the logits [B, T, size]."""
    n = ids.numel() * size
    return torch.linspace(-1, 1, n, dtype=torch.float64).sin().view(*ids.shape, size)


def small(kind: str, changes: dict[str, Any]) -> Any:
    """The same small model in every process."""
    torch.manual_seed(0)
    if kind == "own":
        return small_models.build(**changes)
    if kind == "paper":
        return small_models.build_paper(**changes)
    if kind == "masked":
        return LinbiasForMaskedLM(small_models.settings(**changes)).double().eval()
    config = AutoConfig.for_model(kind, vocab_size=61, hidden_size=32, **changes)
    return linbias.models.fuse(AutoModelForCausalLM.from_config(config).double().eval())


def generate_in_shards() -> None:
    with context_parallel.use():
        small("own", {}).generate(torch.tensor([[1, 2, 3]]), max_new_tokens=3, do_sample=False)


def not_linbias() -> None:
    config = AutoConfig.for_model("bloom", vocab_size=61, hidden_size=32, n_layer=1, n_head=2)
    with context_parallel.use():
        AutoModelForCausalLM.from_config(config)(torch.tensor([[1, 2, 3]]))


def attend_in_two_threads(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A whole sequence before a block, and within one by another thread; and what the own gets."""
    q = torch.randn(1, 2, 50, 8, generator=torch.Generator().manual_seed(seed))
    alone, own = linbias.torch.attention(q, q, q), []
    with context_parallel.use():
        own.append(linbias.torch.attention(q, q, q))
        with ThreadPoolExecutor(1) as other:
            beside = other.submit(linbias.torch.attention, q, q, q).result()
            other.submit(linbias.torch.attention_weights, q, q).result()
        own.append(linbias.torch.attention(q, q, q))
    assert torch.equal(*own)
    return alone, beside, own[0]
