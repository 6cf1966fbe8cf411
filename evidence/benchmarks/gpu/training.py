"""The stage that trains: steps beside peers, and a model whose queries and keys are inputs."""

import argparse
import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import linbias
import linbias.torch
import record
from bench_attention import inputs_of
from gpu import peers, timing
from gpu.stages import compare, slopes_of
from gpu.timing import OTHERWISE, Call


def training(options: argparse.Namespace) -> None:
    """Steps of a language model; then another is trained, whose queries and keys are inputs."""
    from linbias.data.corpus import load_corpus

    corpus = load_corpus("stdlib")
    splits = (corpus.train, corpus.test)
    train, test = (torch.from_numpy(x.astype("int64")).to(options.device) for x in splits)
    training_steps(train, options)
    model = trained(train, options)
    for T in options.lengths[::2]:
        compare_trained(model, test[:T], options)


def training_steps(ids: Tensor, options: argparse.Namespace) -> None:
    """Two layers, one long text: ours, the same with FlexAttention, one without positions."""
    (H, D), T = options.shapes[0], sorted(options.lengths)[len(options.lengths) // 2]
    dtype, shape = str(options.dtype).removeprefix("torch."), (1, H, T, D)
    case = f"training-step-{T}"
    fields = record.fields(case, shape, shape, dtype, record.BACKWARD, inputs="text")
    fields |= {"flop": None, "bytes": None}  # of the whole model
    if timing.is_measured(fields, options):
        return
    gone = timing.left_out_before(fields, options)
    makers = {"triton": lambda: training_step("alibi", ids[:T], (H, D), options)}
    if options.device == "cuda":
        like = torch.empty(shape, device=options.device, dtype=options.dtype)
        flex = flex_instead(like)
        makers["flex"] = lambda: training_step("alibi", ids[:T], (H, D), options, flex)
    makers[f"sdpa{OTHERWISE}"] = lambda: training_step("none", ids[:T], (H, D), options)
    functions: dict[str, Call] = {}
    losses: dict[str, float] = {}
    for name in [name for name in makers if name not in gone]:
        with timing.left_out_if_it_fails(fields, name, gone, options):
            function = makers[name]()
            losses[name] = function().item()
            expected = losses.get("triton", losses[name])
            if not name.endswith(OTHERWISE) and not abs(losses[name] - expected) < 0.02 * expected:
                raise AssertionError(f"its first loss is {losses[name]:.4f}, not {expected:.4f}")
            functions[name] = function
    more = {name: {"first_loss": round(losses[name], 4)} for name in functions}
    timing.write_times(fields, functions, more, options)


def training_step(
    position: str, ids: Tensor, shape: tuple[int, int], options: argparse.Namespace,
    instead: Any = None,
) -> Call:  # fmt: skip
    """Takes a step and returns the loss; `instead` stands for `linbias.torch.attention`."""
    from linbias.models import LinbiasConfig, LinbiasForCausalLM
    from linbias.models.decoder import positions

    H, D = shape
    config = LinbiasConfig(
        hidden_size=H * D, num_attention_heads=H, num_hidden_layers=2, position=position,
        attention_implementation="triton",
    )  # fmt: skip
    torch.manual_seed(0)
    model = LinbiasForCausalLM(config).to(options.device, options.dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=options.device == "cuda")

    def step() -> Tensor:
        with mock.patch.object(positions, "attention", instead or linbias.torch.attention):
            loss = model(ids[None], labels=ids[None]).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def flex_instead(like: Tensor) -> Callable[..., Tensor]:
    """FlexAttention as a model calls `linbias.torch.attention`."""
    slopes = torch.tensor(linbias.slopes(like.shape[1]), dtype=torch.float32, device=like.device)
    attend = peers.flex_like(like, like, peers.falling(slopes))
    return lambda q, k, v, **_: attend(q, k, v)


def trained(ids: Tensor, options: argparse.Namespace) -> torch.nn.Module:
    """A small language model, trained with the kernels for some seconds."""
    from linbias.models import LinbiasConfig, LinbiasForCausalLM

    (H, D), (B, T, steps) = options.shapes[-1], (1, 8, 2) if options.dry_run else (32, 512, 200)
    config = LinbiasConfig(
        hidden_size=H * D, num_attention_heads=H, num_hidden_layers=3, intermediate_size=2 * H * D,
        attention_implementation="triton",
    )  # fmt: skip
    torch.manual_seed(0)
    model = LinbiasForCausalLM(config).to(options.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        starts = torch.randint(len(ids) - T, (B, 1), device=ids.device)
        batch = ids[starts + torch.arange(T, device=ids.device)]
        with torch.autocast(options.device, options.dtype, enabled=options.device == "cuda"):
            loss = model(batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step}: {loss.item() / math.log(2):.3f} bits per byte", flush=True)
    return model.to(options.dtype).eval()


def compare_trained(model: torch.nn.Module, ids: Tensor, options: argparse.Namespace) -> None:
    """Attention as the middle layer of the model has it."""
    layers = inputs_of(model, ids[None])
    arrays = [x.contiguous() for x in layers[len(layers) // 2]]
    compare(arrays, slopes_of(arrays[0].shape[1], options), options, "trained model")
