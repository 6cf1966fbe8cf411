"""The paper's recipe: blocks, batches, optimizer, schedule and presets equal the original's."""

import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from linbias.data.segments import InShards
from linbias.paper.blocks import Batches, batch_order, block_tokens, blocks
from linbias.paper.config import PaperConfig
from linbias.paper.recipe import PRESETS, Recipe
from linbias.paper.step import NAG
from linbias.paper.store import read_data
from paper_training import GOLDEN, ORIGINAL, RECIPE

BATCHES = json.loads((GOLDEN / "paper_batch_order.json").read_text())


@given(num_ids=st.integers(0, 60), length=st.integers(1, 20))
def test_blocks_ask_for_every_id_once_after_the_id_before_it(num_ids, length):
    ids = np.arange(3, 3 + num_ids, dtype=np.uint16)
    spans = blocks(num_ids, length)
    assert len(spans) == -(-num_ids // length)
    assert all(stop - start == length for start, stop in spans[:-1])
    parts = [block_tokens(ids, start, stop) for start, stop in spans]
    assert [id for _, targets in parts for id in targets] == list(ids)
    assert [id for inputs, _ in parts for id in inputs] == [2, *ids][:num_ids]
    assert all(part.dtype == np.int64 for pair in parts for part in pair)


def oracle_batches(sizes: list[int], max_tokens: int, multiple: int) -> list[list[int]]:
    """Places in `sizes`, gathered one by one: what makes no full multiple waits in a tail."""
    batches: list[list[int]] = []
    ready: list[int] = []
    tail: list[int] = []
    for place in range(len(sizes)):
        tail.append(place)
        rows = ready + tail
        if len(rows) * max(sizes[row] for row in rows) > max_tokens:
            batches.append(ready)
            ready, rows = [], tail
        if len(rows) < multiple or len(rows) % multiple == 0:
            ready, tail = rows, []
    return [batch for batch in [*batches, ready, tail] if batch]


@given(
    num_ids=st.integers(0, 300),
    length=st.integers(1, 9),
    more=st.integers(0, 100),
    multiple=st.sampled_from([1, 2, 3, 8]),
    seed=st.integers(0, 9),
    epoch=st.integers(1, 3),
)
def test_batches_are_those_of_the_greedy_rule_shuffled(
    num_ids, length, more, multiple, seed, epoch
):
    sizes = [int(stop - start) for start, stop in blocks(num_ids, length)]
    shuffled = np.random.RandomState(seed).permutation(len(sizes))
    order = sorted(range(len(sizes)), key=lambda block: (sizes[block], shuffled[block]))
    frozen = [
        [order[place] for place in batch]
        for batch in oracle_batches([sizes[block] for block in order], length + more, multiple)
    ]
    found = batch_order(num_ids, length, length + more, seed, epoch, multiple=multiple)
    assert sorted(found) == sorted(frozen)
    legacy = np.random.RandomState(seed + epoch)
    legacy.shuffle(frozen)
    assert found == frozen


def test_order_of_training_batches_is_the_original_s():
    setting = {name: BATCHES[name] for name in ("num_ids", "length", "max_tokens", "seed")}
    spans = blocks(BATCHES["num_ids"], BATCHES["length"])
    assert len(spans) == BATCHES["n_blocks"]
    assert spans[-1, 1] - spans[-1, 0] == BATCHES["last_block_len"]
    batches = batch_order(**setting, epoch=1)
    assert len(batches) == BATCHES["n_batches"]
    assert batches[:10] == BATCHES["first_10_batches_epoch1"]
    assert BATCHES["first_frozen_batch"] in batches
    assert batch_order(**setting, epoch=2) != batches


@pytest.mark.skipif(not ORIGINAL.exists(), reason="no ../shared/golden/fairseq")
def test_first_training_row_reads_the_original_s_ids():
    golden = json.loads((ORIGINAL / "train" / "batch_order_A.json").read_text())
    _, ids = read_data(ORIGINAL / "data" / "wikitext-2", "train")
    number = golden["first_10_batches_epoch1"][0][0]
    start, stop = blocks(len(ids), 64)[number]
    inputs, _ = block_tokens(ids, start, stop)
    assert inputs.tolist() == golden["first_batch_first_row_input_ids"]


@pytest.mark.parametrize("shards", [2, 3, 7])
def test_shards_of_batches_make_the_batches(shards):
    """Also of the short block and of the empty batch, which are narrower than seven."""
    ids = np.arange(4, 27, dtype=np.uint16)

    def order(number: int) -> list[list[int]]:
        return batch_order(len(ids), 5, 10, seed=1, epoch=number)

    whole = Batches(ids, 5, order, per_step=2, steps=4)
    cut = InShards(Batches(ids, 5, order, per_step=2, steps=4, least_width=shards), shards, 1)
    assert len(cut) == shards * len(whole)
    for number in range(len(whole)):
        parts = [cut.__getitems__([shards * number + shard]) for shard in range(shards)]
        batch = whole.__getitems__([number])
        count = batch["num_items_in_batch"]
        assert [part["num_items_in_batch"] for part in parts] == [count] * shards
        for name, padding in {"input_ids": 1, "targets": -100}.items():
            joined = torch.cat([part[name] for part in parts], 1)
            assert all(part[name].shape[1] for part in parts)
            more = joined.shape[1] - batch[name].shape[1]
            padded = torch.nn.functional.pad(batch[name], (0, more), value=padding)
            assert torch.equal(joined, padded)


def test_nag_takes_the_steps_of_the_original():
    """To the last bit where PyTorch adds the squares of gradients in the original's order."""
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


def test_nag_decays_weights_and_leaves_those_without_a_gradient_alone():
    decayed, idle = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
    decayed.grad = torch.zeros(1)
    optimizer = NAG([decayed, idle], lr=0.5, weight_decay=0.1)
    assert optimizer.step(lambda: 7.0) == 7.0
    assert (decayed.item(), idle.item()) == (pytest.approx(0.95), 1.0)
    assert idle not in optimizer.state


@pytest.mark.parametrize("flags", ["readme_flags", "checkpoint_A_flags"])
def test_schedule_has_the_values_of_the_original(flags):
    golden = json.loads((GOLDEN / "cosine_lr.json").read_text())[flags]
    flags = golden["cfg"]
    recipe = Recipe(
        initial_learning_rate=flags["warmup_init_lr"],
        learning_rate=flags["lr"][0],
        min_learning_rate=flags["min_lr"],
        warmup_steps=flags["warmup_updates"],
        period=flags["lr_period_updates"],
        t_mult=flags["t_mult"],
        shrink=flags["lr_shrink"],
    )
    for n, value in golden["lr_after_n_updates"].items():
        assert recipe.learning_rate_after(int(n)) == value, n


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_makes_a_model_and_reads_its_blocks(name):
    recipe = PRESETS[name]
    length, max_tokens = recipe.length, recipe.max_tokens
    vocab_size = 267_744 if name.startswith("L") else 33_280
    PaperConfig(**recipe.model, vocab_size=vocab_size, train_length=length)
    assert recipe.warmup_steps < recipe.steps
    if name.startswith("L"):
        sizes = {"max_tokens": max_tokens, "batches_per_step": recipe.batches_per_step}
        assert recipe == replace(PRESETS["L512"], length=int(name[1:]), **sizes)
        assert max_tokens * recipe.batches_per_step == 9216 * 8
        order = batch_order(100_000, length, max_tokens, 1, 1, multiple=recipe.rows_multiple)
        # --required-batch-size-multiple 1: as many rows as the tokens allow
        assert max(map(len, order)) == max_tokens // length


def test_recipe_of_another_duration_keeps_the_shares_of_warmup_and_cosine():
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
def test_bad_recipe_is_refused(message, change):
    with pytest.raises(ValueError, match=f"Recipe: {message}"):
        replace(RECIPE, **change)
