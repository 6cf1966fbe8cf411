"""From an attention mask to positions and ranges, and what models make of them."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import StaticCache

from linbias.models.decoder.layout import TokenLayout, fill_room, read_attention_mask
from small_models import assert_same, both_families, build, settings, tokens

pytestmark = pytest.mark.usefixtures("same_start")


def read(mask: list[list[int]], num_cached: int = 0, **options: Any) -> TokenLayout:
    mask = torch.tensor(mask)
    ids = torch.zeros(len(mask), mask.shape[1] - num_cached)
    return read_attention_mask("model", mask, ids, num_cached, **options)


def start_of(layout: TokenLayout) -> list[int] | None:
    start = layout.keys[0].start_of(layout.queries[0])
    return None if start is None else start.tolist()


@pytest.mark.parametrize(
    ("row", "range_", "positions"),
    [
        ([1, 1, 1, 1, 1], [0, 5], [0, 1, 2, 3, 4]),
        ([0, 0, 1, 1, 1], [2, 5], [0, 0, 0, 1, 2]),
        ([1, 1, 1, 0, 0], [0, 3], [0, 1, 2, 2, 2]),
        ([0, 1, 1, 0, 0], [1, 3], [0, 0, 1, 1, 1]),
        ([0, 0, 0, 0, 1], [4, 5], [0, 0, 0, 0, 0]),
        ([0, 0, 0, 0, 0], None, [0, 0, 0, 0, 0]),  # an empty one, wherever
    ],
    ids=str,
)
@pytest.mark.parametrize("num_cached", [0, 2, 4])
def test_each_kind_of_padding(row, range_, positions, num_cached):
    padding = read([row, [0, 0, 0, 1, 1]], num_cached)
    first, end = padding.keys[0].span[0].tolist()
    assert [first, end] == range_ or (range_ is None and first == end)
    assert start_of(padding) == [num_cached] * 2
    assert padding.positions[0].tolist() == positions[num_cached:]


def test_a_mask_may_be_as_long_as_the_room_of_a_static_cache():
    mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
    cache = StaticCache(settings(), max_cache_len=7)
    longer = fill_room(mask, cache)
    assert longer.shape == (2, 7) and fill_room(None, cache) is None
    ids = torch.zeros(2, 2)
    whole = read_attention_mask("model", longer, ids, 1, has_room=True)
    assert torch.equal(whole.keys[0].is_token(mask, 3), mask == 1)
    shape = r"attention_mask must have shape \[B, S\] = "
    for options in ({}, {"has_room": True}):
        with pytest.raises(ValueError, match=rf"{shape}\[2, 9\]"):
            read_attention_mask("model", longer, torch.zeros(2, 8), 1, **options)
    with pytest.raises(ValueError, match=rf"{shape}\[2, 3\]"):
        read_attention_mask("model", longer, ids, 1)


def test_rows_with_holes_have_an_order_in_which_tokens_stand_together():
    layout = read([[0, 1, 1, 0, 0, 1, 1], [1, 1, 1, 1, 1, 1, 0]], 2, allows_holes=True)
    assert layout.positions.tolist() == [[1, 1, 1, 2, 3], [2, 3, 4, 5, 5]]
    assert layout.keys[0].span.tolist() == [[0, 4], [0, 6]]
    assert start_of(layout) == [1, 2]
    assert layout.keys[0].places.tolist() == [[1, 2, 5, 6, 0, 3, 4], [*range(7)]]
    assert layout.queries[0].places.tolist() == [[0, 3, 4, 1, 2], [*range(5)]]
    last = layout.last_queries(2)
    assert start_of(last) == [2, 5]
    assert last.queries[0].places[0].tolist() == [0, 1]
    assert last.queries[0].places[1, 0] == 0 and last.queries[0].span.tolist() == [[0, 2], [0, 1]]
    # Without a hole there is nothing to put in order, in eager mode.
    assert read([[0, 1, 1, 1, 0], [1] * 5], allows_holes=True).keys[0].places is None


@pytest.mark.parametrize("mask", [None, torch.ones(2, 5), torch.full((2, 5), True)])
def test_without_padding_there_is_no_range(mask):
    padding = read_attention_mask("model", mask, torch.zeros(2, 3), num_cached=2)
    assert padding.are_last and start_of(padding) is None
    assert padding.positions.tolist() == [[2, 3, 4]]


def test_the_last_queries_stand_where_they_stood():
    padding = read([[0, 1, 1, 1], [1, 1, 1, 0]]).last_queries(2)
    assert padding.positions.tolist() == [[1, 2], [2, 2]]
    assert start_of(padding) == [2, 2]
    assert padding.keys[0].span.tolist() == [[1, 4], [0, 3]]


RUN = r"mark one unbroken run of tokens per row, got"
SHAPE = r"have shape \[B, S\]"


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.tensor([[1, 1, 1, 1, 1], [1, 0, 1, 1, 1]]), rf"{RUN} 2 runs in row 1$"),
        (torch.tensor([[1, 0, 1, 0, 1], [1, 0, 1, 1, 1]]), rf"{RUN} 3 runs in row 0$"),
        *((torch.ones(shape), SHAPE) for shape in ([2, 4], [1, 5], [2, 1, 5, 5], [5])),
    ],
)
def test_gaps_and_other_shapes_are_refused(mask, message):
    with pytest.raises(ValueError, match=rf"^model: attention_mask must {message}"):
        read_attention_mask("model", mask, torch.zeros(2, 3), num_cached=2)


def test_a_graph_that_allows_no_holes_refuses_them_when_it_runs():
    torch._dynamo.reset()
    ids, mask = tokens(2, 9), torch.ones(2, 9, dtype=torch.int64)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def key_range(mask: Tensor) -> Tensor | None:
        return read_attention_mask("model", mask, ids, 0).keys[0].span

    mask[1, :4] = 0
    assert key_range(mask).tolist() == [[0, 9], [4, 9]]
    mask[1, 2] = 1
    with pytest.raises(RuntimeError, match="model: attention_mask must mark one unbroken run"):
        key_range(mask)


# In models. What is said at padding on the right and the slopes tell whether it is hidden: what
# comes after a token never reaches it.


@both_families
@pytest.mark.parametrize("implementation", ["auto", "dense", "blocked"])
@torch.no_grad()
def test_padding_on_either_side_leaves_tokens_alone(make, position, draw, implementation):
    model = make(position=position, attention_implementation=implementation)
    ids, mask = draw(2, 15), torch.ones(2, 15)
    mask[0, :4] = 0
    mask[1, 9:] = 0
    logits = model(ids, mask).logits
    assert_same(logits[0, 4:], model(ids[:1, 4:]).logits[0])
    assert_same(logits[1, :9], model(ids[1:, :9]).logits[0])


@torch.no_grad()
def test_padding_on_the_right_takes_no_row_of_the_learned_table():
    model = build(position="learned", train_length=12)
    ids, mask = tokens(1, 15), torch.ones(1, 15)
    mask[:, 12:] = 0
    assert_same(model(ids, mask).logits[:, :12], model(ids[:, :12]).logits)
