"""The paper's recipe: optimizer, schedule and presets equal the original's."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import pytest
import torch

from linbias.paper.blocks import batch_order
from linbias.paper.config import PaperConfig
from linbias.paper.optimizer import NAG, cosine_lr
from linbias.paper.recipe import PRESETS
from paper_training import GOLDEN, RECIPE


def test_nag_takes_the_steps_of_the_original() -> None:
    """To the last bit where PyTorch adds the squares of gradients in the original's order, which the processor decides."""
    equal = partial(torch.testing.assert_close, rtol=1e-6, atol=1e-7)
    golden = json.loads((GOLDEN / "nag_toy.json").read_text())
    params = [torch.nn.Parameter(torch.tensor(values)) for values in golden["params0"]]
    optimizer = NAG(params, lr=golden["construct_lr"], momentum=golden["momentum"])
    for step in golden["steps"]:
        for p, gradient in zip(params, step["raw_grads"], strict=True):
            p.grad = torch.tensor(gradient)
        norm = torch.nn.utils.clip_grad_norm_(params, golden["clip_norm"])
        equal(norm, torch.tensor(step["grad_norm"]))
        (group,) = optimizer.param_groups
        group["lr"] = step["lr"]
        optimizer.step()
        assert group["lr_old"] == step["lr_old_after"]
        for p, values, v in zip(params, step["params"], step["momentum_buffers"], strict=True):
            equal(p.detach(), torch.tensor(values))
            equal(optimizer.state[p]["momentum_buffer"], torch.tensor(v))


def test_nag_is_nesterov_sgd_in_exact_arithmetic() -> None:
    ours, theirs = (torch.nn.Parameter(torch.ones(7, dtype=torch.float64)) for _ in range(2))
    nag = NAG([ours], lr=1.0, momentum=0.9)
    sgd = torch.optim.SGD([theirs], lr=1.0, momentum=0.9, nesterov=True)
    for lr in (1e-7, 0.3, 1.0, 0.2, 0.75):
        gradient = torch.randn(7, dtype=torch.float64, generator=torch.manual_seed(round(9 * lr)))
        for p, optimizer in ((ours, nag), (theirs, sgd)):
            p.grad = gradient.clone()
            optimizer.param_groups[0]["lr"] = lr
            optimizer.step()
        torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-13)
        buffer = -sgd.state[theirs]["momentum_buffer"] * lr
        torch.testing.assert_close(nag.state[ours]["momentum_buffer"], buffer, rtol=1e-13, atol=0)


def test_nag_decays_weights_and_leaves_those_without_a_gradient_alone() -> None:
    decayed, idle = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
    decayed.grad = torch.zeros(1)
    optimizer = NAG([decayed, idle], lr=0.5, weight_decay=0.1)
    assert optimizer.step(lambda: 7.0) == 7.0
    assert (decayed.item(), idle.item()) == (pytest.approx(0.95), 1.0)
    assert idle not in optimizer.state


@pytest.mark.parametrize("flags", ["readme_flags", "checkpoint_A_flags"])
def test_schedule_has_the_values_of_the_original(flags: str) -> None:
    golden = json.loads((GOLDEN / "cosine_lr.json").read_text())[flags]
    flags = golden["cfg"]
    for n, value in golden["lr_after_n_updates"].items():
        lr = cosine_lr(
            int(n),
            init=flags["warmup_init_lr"],
            lr=flags["lr"][0],
            warmup=flags["warmup_updates"],
            period=flags["lr_period_updates"],
            min_lr=flags["min_lr"],
            t_mult=flags["t_mult"],
            shrink=flags["lr_shrink"],
        )
        assert lr == value, n


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_makes_a_model_and_reads_its_blocks(name: str) -> None:
    recipe = PRESETS[name]
    vocab_size = 267_744 if name.startswith("L") else 33_280
    PaperConfig(
        **recipe.model,
        vocab_size=vocab_size,
        position=recipe.position,
        train_length=recipe.length,
    )
    assert recipe.warmup_steps < recipe.steps
    if name.startswith("L"):
        assert recipe == replace(
            PRESETS["L512"],
            length=int(name[1:]),
            max_tokens=recipe.max_tokens,
            batches_per_step=recipe.batches_per_step,
        )
        assert recipe.max_tokens * recipe.batches_per_step == 9216 * 8
        order = batch_order(
            100_000, recipe.length, recipe.max_tokens, 1, 1, multiple=recipe.rows_multiple
        )
        # --required-batch-size-multiple 1: as many rows as the tokens allow
        assert max(map(len, order)) == recipe.max_tokens // recipe.length


def test_recipe_of_another_duration_keeps_the_shares_of_warmup_and_cosine() -> None:
    shorter = PRESETS["L512"].lasting(2860)
    assert (shorter.steps, shorter.warmup_steps, shorter.cosine_period) == (2860, 160, 2700)
    assert replace(RECIPE, period=7).lasting(28).period == 14


BAD_RECIPES = [
    ("length must be at least 1, got 0", {"length": 0}),
    ("max_tokens must be at least 16, got 15", {"max_tokens": 15}),
    ("rows_multiple must be at least 1", {"rows_multiple": 0}),
    ("batches_per_step must be at least 1", {"batches_per_step": 0}),
    ("steps must be at least 1, got 0", {"steps": 0}),
    ("period must be at least 1, got 0", {"period": 0}),
    ("save_steps must be a multiple of log_steps, 2, got 5", {"log_steps": 2}),
    ("warmup_steps must be at least 0", {"warmup_steps": -1}),
    ("validate_steps must be at least 0", {"validate_steps": -1}),
    ("learning_rate must be above 0, got 0", {"learning_rate": 0}),
    ("clip must be above 0", {"clip": 0}),
    ("t_mult must be at least 1", {"t_mult": 0.5}),
    ("weight_decay must be at least 0", {"weight_decay": -0.1}),
    (r"momentum must be in \[0, 1\), got 1", {"momentum": 1}),
    ("precision must be one of .* got 'fp8'", {"precision": "fp8"}),
    ("device must be 'auto' or 'cpu', got 'tpu'", {"device": "tpu"}),
    (r"model must be without \['vocab_size'\]", {"model": {"vocab_size": 3}}),
]


@pytest.mark.parametrize(("message", "change"), BAD_RECIPES)
def test_bad_recipe_is_refused(message: str, change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"Recipe: {message}"):
        replace(RECIPE, **change)
