"""The paper's blocks and batches: every id once, in the order of the original."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from linbias.paper.blocks import Batches, batch_order, block_tokens, blocks
from linbias.paper.store import read_data
from paper_training import ORIGINAL

BATCHES = json.loads((Path(__file__).parents[1] / "golden" / "paper_batch_order.json").read_text())


@given(num_ids=st.integers(0, 60), length=st.integers(1, 20))
def test_blocks_ask_for_every_id_once_after_the_id_before_it(num_ids: int, length: int) -> None:
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
    num_ids: int, length: int, more: int, multiple: int, seed: int, epoch: int
) -> None:
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


def test_order_of_training_batches_is_the_original_s() -> None:
    setting = {name: BATCHES[name] for name in ("num_ids", "length", "max_tokens", "seed")}
    spans = blocks(BATCHES["num_ids"], BATCHES["length"])
    assert len(spans) == BATCHES["n_blocks"]
    assert spans[-1, 1] - spans[-1, 0] == BATCHES["last_block_len"]
    batches = batch_order(**setting, epoch=1)
    assert len(batches) == BATCHES["n_batches"]
    assert batches[:10] == BATCHES["first_10_batches_epoch1"]
    assert BATCHES["first_frozen_batch"] in batches
    assert batch_order(**setting, epoch=2) != batches


def test_every_id_is_predicted_once_per_pass_in_the_order_of_the_original() -> None:
    ids = np.arange(4, 104)

    def order(number: int) -> list[list[int]]:
        return batch_order(100, 7, 21, seed=1, epoch=number)

    batches = Batches(ids, 7, order, per_step=2, steps=6)
    assert batches.steps_per_pass == 3  # of 15 blocks in 5 batches
    assert [batches.num_targets(step) for step in range(3)] == [
        sum(int((batches[index]["targets"] >= 0).sum()) for index in (2 * step, 2 * step + 1))
        for step in range(3)
    ]
    for number in (0, 1):
        firsts = []
        for index in range(6 * number, 6 * number + 5):
            batch = batches[index]
            inputs, targets = batch["input_ids"], batch["targets"]
            scored = targets[:, 1:] >= 0
            assert torch.equal(inputs[:, 1:][scored], targets[:, :-1][scored])
            assert (targets[:, 0] - inputs[:, 0] == 1).logical_or(targets[:, 0] == 4).all()
            firsts.append([(int(first) - 4) // 7 for first in targets[:, 0]])
        assert firsts == order(number + 1)
        empty = batches[6 * number + 5]
        assert empty["targets"].tolist() == [[-100]]
        assert empty["num_items_in_batch"] == batches[6 * number + 4]["num_items_in_batch"]
    assert batches.num_tokens() == 200
    longer = Batches(ids, 7, order, per_step=2, steps=4)
    assert longer.num_tokens() == 100 + longer.num_targets(3)


@pytest.mark.skipif(not ORIGINAL.exists(), reason="no ../shared/golden/fairseq")
def test_first_training_row_reads_the_original_s_ids() -> None:
    golden = json.loads((ORIGINAL / "train" / "batch_order_A.json").read_text())
    _, ids = read_data(ORIGINAL / "data" / "wikitext-2", "train")
    number = golden["first_10_batches_epoch1"][0][0]
    start, stop = blocks(len(ids.tokens), 64)[number]
    inputs, _ = block_tokens(ids.tokens, start, stop)
    assert inputs.tolist() == golden["first_batch_first_row_input_ids"]


@pytest.mark.parametrize("pieces", [2, 3, 7])
def test_pieces_of_batches_make_the_batches(pieces: int) -> None:
    """Also of the short block at a text's end and of the empty batch, which are narrower than seven."""
    ids = np.arange(4, 27, dtype=np.uint16)

    def order(number: int) -> list[list[int]]:
        return batch_order(len(ids), 5, 10, seed=1, epoch=number)

    whole = Batches(ids, 5, order, per_step=2, steps=4)
    cut = Batches(ids, 5, order, per_step=2, steps=4, pieces=pieces)
    assert len(cut) == pieces * len(whole) and cut.num_tokens() == whole.num_tokens()
    for number in range(len(whole)):
        parts = [cut[pieces * number + piece] for piece in range(pieces)]
        assert {part["num_items_in_batch"] for part in parts} == {
            whole[number]["num_items_in_batch"]
        }
        for name, padding in {"input_ids": 1, "targets": -100}.items():
            joined, expected = torch.cat([part[name] for part in parts], 1), whole[number][name]
            width = expected.shape[1]
            assert all(part[name].shape[1] for part in parts)
            assert (
                torch.equal(joined[:, :width], expected) and (joined[:, width:] == padding).all()
            )
