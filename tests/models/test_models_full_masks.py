"""Full masks [B, 1, T, S], of draft trees: each branch as that branch decoded by itself."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, StaticCache

from linbias.models import LinbiasForMaskedLM
from small_models import (
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
# The parent of each drafted token; -1 is the end of the prompt. Depth first, positions fall.
PARENTS = [-1, 0, 1, 0, -1, 4]


def tree() -> tuple[Tensor, Tensor, list[list[int]]]:
    """Mask [1, 1, S, S] and numbers [1, S] of prompt and drafts, and the branch of each draft."""
    branches: list[list[int]] = []
    for i, parent in enumerate(PARENTS):
        branches.append([*(branches[parent] if parent >= 0 else []), i])
    S = PROMPT + len(PARENTS)
    seen = torch.ones(S, S).tril() == 1
    seen[PROMPT:, PROMPT:] = False
    for i, branch in enumerate(branches):
        seen[PROMPT + i, [PROMPT + j for j in branch]] = True
    depths = torch.tensor([len(branch) - 1 for branch in branches])
    return seen[None, None], torch.cat([torch.arange(PROMPT), PROMPT + depths])[None], branches


def as_numbers(seen: Tensor, low: float) -> Tensor:
    return torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, low)


def alone(model: PreTrainedModel, ids: Tensor, branch: list[int]) -> Tensor:
    """The logits of a branch's last token [B, vocabulary], without any other."""
    prompt, drafts = ids[:, :PROMPT], ids[:, PROMPT:]
    return model(torch.cat([prompt, drafts[:, branch]], dim=1), use_cache=False).logits[:, -1]


def check(model: PreTrainedModel, ids: Tensor) -> None:
    """At once and behind a cache, with weights, and of the last tokens alone."""
    seen, numbers, branches = tree()
    given: Any = {"attention_mask": seen, "position_ids": numbers}
    whole = model(ids, **given, output_attentions=True)
    cache = model(ids[:, :PROMPT], use_cache=True).past_key_values
    given["attention_mask"] = as_numbers(seen[:, :, PROMPT:], -1e4)
    behind = model(ids[:, PROMPT:], **given, past_key_values=cache)
    assert cache.get_seq_length() == numbers.shape[1]
    assert not whole.attentions[0].masked_select(~seen).any()
    assert_same(whole.attentions[0].sum(-1), torch.ones_like(whole.attentions[0][..., 0]))
    for i, branch in enumerate(branches):
        expected = alone(model, ids, branch)
        assert_same(whole.logits[:, PROMPT + i], expected)
        assert_same(behind.logits[:, i], expected)


@both_families
@torch.no_grad()
def test_each_branch_is_read_as_if_alone(make: Any, position: str, draw: Any) -> None:
    model, ids = make(position=position, num_hidden_layers=1), draw(2, PROMPT + len(PARENTS))
    seen, numbers, _ = tree()
    if position in ("forget", "cable"):
        with pytest.raises(ValueError, match=r"Model: attention_mask must .* with learned steps"):
            model(ids, seen, numbers)
        return
    check(model, ids)
    kept = model(ids, seen, numbers, logits_to_keep=2).logits
    assert_same(kept, model(ids, seen, numbers).logits[:, -2:])


@each_existing
@torch.no_grad()
def test_each_branch_of_a_fused_model_is_read_as_if_alone(family: str) -> None:
    check(fused(family), tokens(2, PROMPT + len(PARENTS)))


def test_gradients_are_those_of_the_branch() -> None:
    seen, numbers, branches = tree()
    model, ids = build(num_hidden_layers=1), tokens(1, numbers.shape[1])
    whole = model(ids, seen, numbers).logits[:, -1]
    both = [
        torch.autograd.grad(logits.logsumexp(-1).sum(), list(model.parameters()))
        for logits in (whole, alone(model, ids, branches[-1]))
    ]
    for ours, expected in zip(*both, strict=True):
        assert_same(ours, expected)


@torch.no_grad()
def test_slopes_that_depend_on_length_follow_the_longest_branch() -> None:
    model = build(slope_scale="interpolate", train_length=5, num_hidden_layers=1)
    seen, numbers, branches = tree()
    ids = tokens(1, numbers.shape[1])
    logits = model(ids, seen, numbers).logits
    longest = max(map(len, branches))
    for i, branch in enumerate(branches):
        if len(branch) == longest:
            assert_same(logits[:, PROMPT + i], alone(model, ids, branch))


@torch.no_grad()
def test_rows_have_masks_and_padding_of_their_own() -> None:
    model, ids = build(num_key_value_heads=2), tokens(2, 7)
    mask, numbers = (
        (torch.ones(2, 1, 7, 7).tril() == 1),
        torch.arange(7) - torch.tensor([[0], [3]]),
    )
    mask[1, ..., :3] = False
    logits = model(ids, mask, numbers).logits
    assert_same(logits[:1], model(ids[:1]).logits)
    assert_same(logits[1, 3:], model(ids[1:, 3:]).logits[0])
    assert_same(model(ids, mask).logits[:, 3:], logits[:, 3:])  # each at its index: as far apart


def test_calls_with_bad_masks_are_explained() -> None:
    model, ids = build(), tokens(1, 4)
    mask, numbers = torch.ones(4, 4).tril()[None, None] == 1, torch.arange(4)[None]
    half = as_numbers(mask, -torch.inf)
    half[0, 0, 2, 1] = -0.5
    later = mask.clone()
    later[0, 0, 1, 3] = True
    cache = model(ids[:, :3], use_cache=True).past_key_values
    behind: Any = (ids[:, 3:], mask[:, :, 3:], numbers[:, 3:], cache)
    static = StaticCache(config=model.config, max_cache_len=9)
    for given, message in (
        ((ids, mask[..., 1:]), r"attention_mask must .* = \[1, 1, 4, 4\], got \[1, 1, 4, 3\]"),
        ((ids, mask.expand(1, 4, 4, 4)), r"attention_mask must .* got \[1, 4, 4, 4\]"),
        ((ids, half), r"at most -10000 elsewhere, got -0\.5 at \[0, 0, 2, 1\]"),
        ((ids, later), r"shows a key at \[0, 0, 1, 3\], 2 behind it"),
        ((ids, mask, numbers[:, 1:]), r"position_ids of all tokens, .*, 4\], B = 1, got \[1, 3\]"),
        (behind, r"position_ids of all tokens, the cached .*, 4\], B = 1, got \[1, 1\]"),
        ((ids, mask, None, static), r"must have shape \[B, S\] for a StaticCache"),
    ):
        with pytest.raises(ValueError, match=rf"^LinbiasModel: .*{message}"):
            model(*given)
    with pytest.raises(TypeError, match=r"must be bool or floating point, got torch\.int64"):
        model(ids, mask.long())
    rounded = fused("bloom", rounding="checkpoint")
    with pytest.raises(ValueError, match=r"attention_mask must .* with rounding='checkpoint'"):
        rounded(ids, attention_mask=mask)
    masked = LinbiasForMaskedLM(settings(encoder_position="symmetric"))
    with pytest.raises(ValueError, match=r"must have shape \[B, S\], got \[1, 1, 4, 4\]"):
        masked(ids, mask)
