"""Full masks [B, 1, T, S], of draft trees: each branch as that branch decoded by itself."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, StaticCache

from linbias.models import LinbiasForMaskedLM, WindowCache, unfuse
from small_models import (
    assert_near,
    assert_same,
    both_families,
    build,
    each_existing,
    fused,
    settings,
    tokens,
)

pytestmark = pytest.mark.usefixtures("same_start")

PROMPT = 9
# The parent of each drafted token; -1 is the end of the prompt.
TREES = {"breadth first": [-1, -1, 0, 0, 1, 2], "depth first": [-1, 0, 1, 0, -1, 4]}
each_tree = pytest.mark.parametrize("parents", TREES.values(), ids=TREES)


def tree(parents: list[int], pad: int = 0) -> tuple[Tensor, Tensor, list[list[int]]]:
    """Mask [S, S] and numbers [S] of a prompt and its drafts, and the branch of each of these."""
    branches: list[list[int]] = []
    for i, parent in enumerate(parents):
        branches.append([*(branches[parent] if parent >= 0 else []), i])
    S = PROMPT + len(parents)
    seen = torch.ones(S, S).tril() == 1
    seen[PROMPT:, PROMPT:] = False
    for i, branch in enumerate(branches):
        seen[PROMPT + i, [PROMPT + j for j in branch]] = True
    seen[:, :pad] = False
    depths = torch.tensor([len(branch) - 1 for branch in branches])
    numbers = torch.cat([torch.arange(PROMPT), PROMPT + depths]) - pad
    return seen, numbers.clamp(min=0), branches


def as_numbers(seen: Tensor, low: float = -torch.inf) -> Tensor:
    return torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, low)


def alone(model: PreTrainedModel, ids: Tensor, branch: list[int]) -> Tensor:
    """The logits of a branch's last token [B, vocabulary], without any other."""
    prompt, drafts = ids[:, :PROMPT], ids[:, PROMPT:]
    return model(torch.cat([prompt, drafts[:, branch]], dim=1), use_cache=False).logits[:, -1]


@each_tree
@both_families
@torch.no_grad()
def test_each_branch_is_read_as_if_alone(
    make: Any, position: str, draw: Any, parents: list[int]
) -> None:
    seen, numbers, branches = tree(parents)
    model, ids = make(position=position, num_hidden_layers=1), draw(2, len(numbers))
    mask, steps = seen[None, None], numbers[None]
    if position in ("forget", "cable"):
        with pytest.raises(ValueError, match=r"Model: attention_mask must .* with learned steps"):
            model(ids, mask, steps)
        return
    whole = model(ids, mask, steps, output_attentions=True)
    cache = model(ids[:, :PROMPT], use_cache=True).past_key_values
    numeric = as_numbers(mask[:, :, PROMPT:], -1e4)
    behind = model(ids[:, PROMPT:], numeric, steps[:, PROMPT:], cache)
    kept = model(ids, mask, steps, logits_to_keep=2).logits
    assert not whole.attentions[0].masked_select(~mask).any()
    assert_same(whole.attentions[0].sum(-1), torch.ones_like(whole.attentions[0][..., 0]))
    for i, branch in enumerate(branches):
        expected = alone(model, ids, branch)
        assert_same(whole.logits[:, PROMPT + i], expected)
        assert_same(behind.logits[:, i], expected)
    assert_same(kept, whole.logits[:, -2:])


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo, where a graph breaks
@torch.no_grad()
def test_a_compiled_fused_model_reads_trees() -> None:
    seen, numbers, _ = tree(TREES["depth first"])
    model, ids = fused("bloom"), tokens(1, len(numbers))
    given: Any = {"attention_mask": seen[None, None], "position_ids": numbers[None]}
    compiled = torch.compile(model, backend="eager")
    assert_same(compiled(ids, **given).logits, model(ids, **given).logits)


@each_existing
@pytest.mark.parametrize("rounding", ["exact", "checkpoint"])
@torch.no_grad()
def test_each_branch_of_a_fused_model_is_read_as_if_alone(family: str, rounding: Any) -> None:
    seen, numbers, branches = tree(TREES["depth first"])
    model, ids = fused(family, rounding=rounding), tokens(2, len(numbers))
    mask, steps = seen[None, None], numbers[None]
    whole = model(ids, attention_mask=mask, position_ids=steps, output_attentions=True)
    assert not whole.attentions[1].masked_select(~mask).any()
    cache = model(ids[:, :PROMPT], use_cache=True).past_key_values
    numeric = as_numbers(mask[:, :, PROMPT:], torch.finfo(torch.float32).min)
    given = {"attention_mask": numeric, "position_ids": steps[:, PROMPT:]}
    behind = model(ids[:, PROMPT:], past_key_values=cache, **given).logits
    assert cache.get_seq_length() == len(numbers)
    reference = unfuse(copy.deepcopy(model)).float()  # of Transformers; Falcon's rounds slopes
    for i, branch in enumerate(branches):
        expected = alone(model, ids, branch)
        assert_same(whole.logits[:, PROMPT + i], expected)
        assert_same(behind[:, i], expected)
        if family != "falcon":
            assert_near(whole.logits[:, PROMPT + i], alone(reference, ids, branch), 1e-4)


@each_tree
@torch.no_grad()
def test_rows_have_padding_of_their_own(parents: list[int]) -> None:
    model, ids = build(num_key_value_heads=2), tokens(2, PROMPT + len(parents))
    seen, numbers, branches = tree(parents)
    padded, fewer, _ = tree(parents, pad=3)
    mask, steps = torch.stack([padded, seen])[:, None], torch.stack([fewer, numbers])
    is_token = torch.ones(2, PROMPT, dtype=torch.int64)
    is_token[0, :3] = 0
    cache = model(ids[:, :PROMPT], is_token, use_cache=True).past_key_values
    behind = model(ids[:, PROMPT:], mask[:, :, PROMPT:], steps[:, PROMPT:], cache).logits
    for logits in (behind, model(ids, mask, steps).logits[:, PROMPT:]):
        for i, branch in enumerate(branches):
            assert_same(logits[1:, i], alone(model, ids[1:], branch))
            text = torch.cat([ids[:1, 3:PROMPT], ids[:1, PROMPT:][:, branch]], dim=1)
            assert_same(logits[0, i], model(text).logits[0, -1])


@torch.no_grad()
def test_slopes_that_depend_on_length_follow_the_longest_branch() -> None:
    model = build(slope_scale="interpolate", train_length=5)
    seen, numbers, branches = tree([-1, 0, -1, 2, 0])
    ids = tokens(1, len(numbers))
    logits = model(ids, seen[None, None], numbers[None]).logits
    for i in (1, 3, 4):  # the ends of three long ones
        assert_same(logits[:, PROMPT + i], alone(model, ids, branches[i]))


@torch.no_grad()
def test_drafts_may_stay_in_the_cache_where_numbers_say_where_all_stand() -> None:
    """Level by level, and then on from the branch that is taken, with a plain call."""
    seen, numbers, branches = tree(TREES["breadth first"])
    model, ids = build(), tokens(1, PROMPT + 6)
    cache = model(ids[:, :PROMPT], use_cache=True).past_key_values
    for first, end in ((0, 2), (2, 5), (5, 6)):
        rows = slice(PROMPT + first, PROMPT + end)
        mask, steps = seen[None, None, rows, : rows.stop], numbers[None, : rows.stop]
        output = model(ids[:, rows], mask, steps, cache)
        for i in range(first, end):
            assert_same(output.logits[:, i - first], alone(model, ids, branches[i]))
    taken, new = [*range(PROMPT), *(PROMPT + i for i in branches[5])], tokens(1, 1)
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:, :, taken], layer.values[:, :, taken]
    expected = model(torch.cat([ids[:, taken], new], dim=1)).logits[:, -1:]
    assert_same(model(new, past_key_values=cache).logits, expected)


def test_gradients_are_those_of_the_branch() -> None:
    seen, numbers, branches = tree(TREES["depth first"])
    model, ids = build(num_hidden_layers=1), tokens(1, len(numbers))
    leaf = 5
    both = []
    for logits in (
        model(ids, seen[None, None], numbers[None]).logits[:, PROMPT + leaf],
        alone(model, ids, branches[leaf]),
    ):
        loss = logits.logsumexp(-1).sum()
        both.append(torch.autograd.grad(loss, list(model.parameters())))
    for ours, expected in zip(*both, strict=True):
        assert_same(ours, expected)


def test_without_numbers_tokens_stand_in_the_order_of_keys() -> None:
    model, ids = build(), tokens(2, 7)
    mask = torch.ones(7, 7).tril() == 1
    with torch.no_grad():
        expected = model(ids).logits
        assert_same(model(ids, mask[None, None]).logits, expected)
        cache = model(ids[:, :4], use_cache=True).past_key_values
        numbers = as_numbers(mask[None, None, 4:], torch.finfo(torch.float16).min)
        assert_same(model(ids[:, 4:], numbers, None, cache).logits, expected[:, 4:])


def test_calls_with_bad_masks_are_explained() -> None:
    model, ids = build(), tokens(1, 4)
    mask, numbers = torch.ones(4, 4).tril()[None, None] == 1, torch.arange(4)[None]
    half = as_numbers(mask)
    half[0, 0, 2, 1] = -0.5
    later = mask.clone()
    later[0, 0, 1, 3] = True
    cache = model(ids[:, :3], use_cache=True).past_key_values
    last, step = mask[:, :, 3:], {"past_key_values": cache}
    gap = last.clone()
    gap[..., 1] = False
    static = {"past_key_values": StaticCache(config=model.config, max_cache_len=9)}
    window = {"past_key_values": WindowCache.for_model(model, 1e-6)}
    for given, message in (
        ((ids, mask[..., 1:]), r"attention_mask must .* = \[1, 1, 4, 4\], got \[1, 1, 4, 3\]"),
        ((ids, mask.expand(1, 4, 4, 4)), r"attention_mask must .* got \[1, 4, 4, 4\]"),
        ((ids, half), r"must be 0 .* at most -10000 elsewhere, got -0.5 at \[0, 0, 2, 1\]"),
        ((ids, mask.double()), r"must be 0 where .*, got 1 at \[0, 0, 0, 0\]"),
        ((ids, later), r"shows at \[0, 0, 1, 3\] position 3 to position 1"),
        ((ids, mask, numbers[:, 1:]), r"position_ids must have .* = \[1, 4\], got \[1, 3\]"),
        ((ids[:, 3:], last, numbers[:, 2:3], step), r"got 2 at \[0, 0\], .* 3 cached .* 4 in all"),
        ((ids[:, 3:], gap, numbers[:, 2:3], step), r"got 2 at \[0, 0\], .* 2 cached .* 3 in all"),
        ((ids, mask, None, static), r"must have shape \[B, S\] for a StaticCache"),
        ((ids, mask, None, window), r"must have shape \[B, S\] for a WindowCache"),
    ):
        *places, options = given if isinstance(given[-1], dict) else (*given, {})
        with pytest.raises(ValueError, match=rf"^LinbiasModel: .*{message}"):
            model(*places, **options)
    with pytest.raises(TypeError, match=r"LinbiasModel: attention_mask .* got torch.int64"):
        model(ids, mask.long())
    masked = LinbiasForMaskedLM(settings(encoder_position="symmetric"))
    with pytest.raises(
        ValueError, match=r"attention_mask must have shape \[B, S\], got \[1, 1, 4, 4\]"
    ):
        masked(ids, mask)
