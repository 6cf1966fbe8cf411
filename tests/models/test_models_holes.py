"""Masks with holes: tokens of a row that do not stand together attend as if they did.

Models of Transformers are held against its own results, in float32, since in float64 it has NaN at
padding; ours are held against their tokens alone, in float64.
"""

import copy
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, StaticCache

from contract import rows
from linbias.models import (
    LinbiasForConditionalGeneration,
    LinbiasForMaskedLM,
    LinbiasSeq2SeqConfig,
    WindowCache,
    fuse,
)
from linbias.models.decoder.baichuan import BaichuanConfig, BaichuanForCausalLM
from linbias.models.decoder.config import ENCODER_POSITIONS, POSITIONS
from linbias.models.decoder.rows import find_texts
from linbias.models.fused.mpt_model import LinbiasMptConfig, LinbiasMptForCausalLM
from small_models import (
    EXISTING,
    GREEDY,
    VOCAB,
    assert_near,
    assert_same,
    build,
    each_existing,
    existing,
    settings,
    tokens,
)

pytestmark = pytest.mark.usefixtures("same_start")
# A hole in the middle, at the left end and in the middle, two holes, none.
MASK = torch.tensor(
    [
        [1, 1, 1, 1, 0, 0, 0, 1, 1, 1, 1, 1],
        [0, 0, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1],
        [1, 0, 1, 1, 1, 1, 0, 0, 0, 0, 1, 1],
        [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1],
    ]
)
SHOWN = MASK.bool()


def in_index(model: Any, ids: Tensor, mask: Tensor) -> list[Tensor]:
    """The logits of each row's tokens, with the distances of their places in the row."""
    position, found = model.base_model.position, []
    for row, shown in zip(ids, mask.bool(), strict=True):
        (places,) = shown.nonzero(as_tuple=True)
        with patch.object(position, "attend", partial(attend_at, places, position.attend)):
            found.append(model(row[shown][None], use_cache=False).logits[0])
    return found


def attend_at(
    places: Tensor, attend: Any, q: Tensor, k: Tensor, v: Tensor, options: Any
) -> Tensor:
    return attend(q, k, v, options._replace(positions=places))


def alone(model: Any, ids: Tensor, mask: Tensor = MASK) -> Tensor:
    """The logits of all tokens, each row's read without what its mask hides."""
    parts = zip(ids, mask.bool(), strict=True)
    return torch.cat([model(row[shown][None]).logits[0] for row, shown in parts])


# Existing models, beside Transformers' own result.


@each_existing
@torch.no_grad()
def test_a_fused_model_says_what_transformers_says(family: str) -> None:
    model, ids = existing(family), tokens(4, 12)
    expected = model(ids, attention_mask=MASK, use_cache=False).logits
    found = fuse(model)(ids, attention_mask=MASK).logits
    assert found.isfinite().all()
    assert_near(found[SHOWN], expected[SHOWN])


@each_existing
def test_gradients_with_holes_are_those_of_transformers(family: str) -> None:
    model, ids = existing(family), tokens(4, 12)
    # A label is scored at the token before it, which must be shown.
    labels = ids.masked_fill(~SHOWN | ~SHOWN.roll(1, 1), -100)
    found = []
    for each in (model, fuse(copy.deepcopy(model))):
        each.train()(ids, attention_mask=MASK, labels=labels, use_cache=False).loss.backward()
        found.append(torch.cat([p.grad.flatten() for p in each.parameters()]))
    assert_near(found[1], found[0])


@each_existing
@torch.no_grad()
def test_holes_in_the_cache_and_among_new_tokens(family: str) -> None:
    """In parts whose borders lie in holes, beside them, and far from them."""
    model, ids = existing(family), tokens(4, 12)
    expected = model(ids, attention_mask=MASK, use_cache=False).logits
    fuse(model)
    for parts in ([5, 7], [6, 4, 1, 1], [1] * 12):
        cache, done, found = DynamicCache(), 0, []
        for part in parts:
            mask = MASK[:, : done + part]
            new = ids[:, done : done + part]
            found.append(model(new, attention_mask=mask, past_key_values=cache).logits)
            done += part
        assert_near(torch.cat(found, 1)[SHOWN], expected[SHOWN])


@each_existing
@pytest.mark.parametrize("options", rows("{}", ({},), ({"cache_implementation": "static"},)))
@torch.no_grad()
def test_generated_tokens_are_those_of_transformers(family: str, options: Any) -> None:
    model, ids = existing(family), tokens(4, 12)
    greedy = {**GREEDY, "attention_mask": MASK}
    expected = model.generate(ids, **greedy)
    assert fuse(model).generate(ids, **greedy, **options).equal(expected)


@pytest.mark.parametrize("family", ["bloom", "mpt"])
@torch.no_grad()
def test_weights_of_attention_return_to_their_places(family: str) -> None:
    """Not Falcon's: where Transformers shows weights, it adds the bias twice."""
    model, ids = existing(family), tokens(4, 12)
    model.config._attn_implementation = "eager"
    expected = model(ids, attention_mask=MASK, output_attentions=True).attentions
    found = fuse(model)(ids, attention_mask=MASK, output_attentions=True).attentions
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape
        assert_near(ours.transpose(1, 2)[SHOWN], theirs.transpose(1, 2)[SHOWN])


# Models of ours, beside their tokens alone.


@pytest.mark.parametrize("position", POSITIONS)
@torch.no_grad()
def test_tokens_around_a_hole_are_read_as_one_text(position: str) -> None:
    model, ids = build(position=position), tokens(4, 12)
    expected = alone(model, ids)
    assert_same(model(ids, MASK).logits[SHOWN], expected)
    cache, found = DynamicCache(), []
    for first, end in ((0, 6), (6, 9), (9, 10), (10, 12)):
        new, mask = ids[:, first:end], MASK[:, :end]
        found.append(model(new, mask, past_key_values=cache).logits)
    assert_same(torch.cat(found, 1)[SHOWN], expected)
    for keep in (1, 5):
        last = model(ids, MASK, logits_to_keep=keep).logits[SHOWN[:, -keep:]]
        assert_same(last, model(ids, MASK).logits[:, -keep:][SHOWN[:, -keep:]])


@pytest.mark.parametrize("position", ENCODER_POSITIONS)
@torch.no_grad()
def test_a_masked_model_reads_on_both_sides_of_a_hole(position: str) -> None:
    config = settings(encoder_position=position, window=5)
    model, ids = LinbiasForMaskedLM(config).double().eval(), tokens(4, 12)
    assert_same(model(ids, MASK).logits[SHOWN], alone(model, ids))


@torch.no_grad()
def test_generate_goes_on_behind_a_hole_as_without_it() -> None:
    model, ids = build(), tokens(4, 12)
    for options in ({}, {"cache_implementation": "static"}):
        written = model.generate(ids, attention_mask=MASK, **GREEDY, **options)[:, 12:]
        for row, shown, found in zip(ids, SHOWN, written, strict=True):
            text = row[shown][None]
            expected = model.generate(text, attention_mask=torch.ones_like(text), **GREEDY)
            assert found.equal(expected[0, text.shape[1] :])


@torch.no_grad()
def test_both_texts_of_a_seq2seq_model_may_have_holes() -> None:
    """As if what the masks hide were not there, read at once and in parts."""
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "num_attention_heads": 4}
    config = LinbiasSeq2SeqConfig(**sizes, num_hidden_layers=2, initializer_range=0.3)
    model: Any = LinbiasForConditionalGeneration(config).double().eval()
    ids, said = tokens(4, 12), tokens(4, 12)
    masks = {"attention_mask": MASK, "decoder_attention_mask": MASK.flip(0)}
    found = model(ids, decoder_input_ids=said, **masks, output_attentions=True)
    for n, (text, answer) in enumerate(zip(SHOWN, SHOWN.flip(0), strict=True)):
        row, start = ids[n, text][None], said[n, answer][None]
        expected = model(row, decoder_input_ids=start, output_attentions=True)
        assert_same(found.logits[n, answer], expected.logits[0])
        for cross, other in zip(found.cross_attentions, expected.cross_attentions, strict=True):
            assert_same(cross[n, :, answer][:, :, text], other[0])
    cache, parts = None, []
    for first, end in ((0, 6), (6, 12)):
        options = {**masks, "decoder_attention_mask": MASK.flip(0)[:, :end]}
        new = said[:, first:end]
        out = model(ids, decoder_input_ids=new, past_key_values=cache, **options, use_cache=True)
        cache = out.past_key_values
        parts.append(out.logits)
    shown = SHOWN.flip(0)
    assert_same(torch.cat(parts, 1)[shown], found.logits[shown])


def baichuan() -> PreTrainedModel:
    """A model whose own code counts the places of a row."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    small = {"vocab_size": VOCAB, "num_attention_heads": 4, "initializer_range": 0.3}
    return BaichuanForCausalLM(BaichuanConfig(**sizes, **small)).double().eval()


@torch.no_grad()
def test_hidden_places_are_distance_where_the_original_counts_them() -> None:
    model, ids = baichuan(), tokens(4, 12)
    expected = torch.cat(in_index(model, ids, MASK))
    assert_same(model(ids, MASK).logits[SHOWN], expected)
    assert not torch.allclose(expected, alone(model, ids), atol=1e-3)


@torch.no_grad()
def test_an_mpt_of_ours_counts_hidden_places_as_that_of_transformers() -> None:
    """Slopes that are powers of two in both."""
    sizes = {"d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": VOCAB}
    model, ids = existing("mpt"), tokens(4, 12)
    config = LinbiasMptConfig(**sizes, attn_config={"alibi": True}, no_bias=True)
    ours = LinbiasMptForCausalLM(config).eval()
    ours.load_state_dict(model.state_dict())
    expected = model(ids, attention_mask=MASK, use_cache=False).logits
    assert_near(ours(ids, attention_mask=MASK).logits[SHOWN], expected[SHOWN])


@torch.no_grad()
def test_packed_rows_may_have_holes() -> None:
    """Numbers across a hole count it or not; either way it takes up no distance."""
    model, ids = build(), tokens(1, 10)
    mask = torch.tensor([[1, 1, 0, 1, 1, 1, 0, 0, 1, 1]])
    expected = torch.cat([model(ids[:, where]).logits[0] for where in ([0, 1, 3], [4, 5, 8, 9])])
    for numbers in ([0, 1, 9, 2, 0, 1, 5, 5, 2, 3], [0, 1, 2, 3, 0, 1, 2, 3, 4, 5]):
        found = model(ids, mask, torch.tensor([numbers]), output_attentions=True)
        assert_same(found.logits[mask == 1], expected)
        whole = found.attentions[0][0].sum(-1)[:, mask[0] == 1]
        assert_same(whole, torch.ones_like(whole))
    assert find_texts(torch.arange(10)[None], mask != 0) is None


@torch.no_grad()
def test_packed_rows_count_hidden_places_where_the_original_does() -> None:
    model, ids = baichuan(), tokens(1, 6)
    mask, numbers = torch.tensor([[1, 1, 1, 0, 0, 1]]), torch.tensor([[0, 0, 1, 0, 0, 2]])
    expected = in_index(model, ids[:, 1:], mask[:, 1:])[0]
    assert_same(model(ids, mask, numbers, use_cache=False).logits[0, [1, 2, 5]], expected)


# In graphs, which cannot know whether there is a hole.


@pytest.mark.parametrize(
    "family", rows("bloom", ("bloom",), ("falcon",), ("mpt",), ("alibi",), ("t5",), ("learned",))
)
@torch.no_grad()
def test_compiled_and_exported_models_say_what_eager_ones_say(family: str) -> None:
    """One graph for masks with holes, with padding on a side, and without either."""
    torch._dynamo.reset()
    is_existing = family in EXISTING
    model: Any = fuse(existing(family)) if is_existing else build(position=family)
    ids, padded = tokens(4, 12), MASK.clone()
    padded[:] = 1
    padded[0, :4] = 0
    padded[1, 9:] = 0
    given = {"input_ids": ids, "attention_mask": MASK, "use_cache": False}
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=False)
    exported = torch.export.export(model, (), given).module()
    for mask in (MASK, padded, torch.ones_like(MASK)):
        expected = model(ids, attention_mask=mask).logits[mask == 1]
        for each in (compiled, exported):
            found = each(**{**given, "attention_mask": mask}).logits
            assert found.isfinite().all()
            assert_same(found[mask == 1], expected)


@torch.no_grad()
def test_a_compiled_step_reads_a_static_cache_with_holes() -> None:
    """Of a mask as long as the room, what lies behind the new token is not looked at."""
    torch._dynamo.reset()
    model: Any = build(attention_implementation="dense", num_hidden_layers=1)
    ids, caches = tokens(4, 12), [StaticCache(model.config, max_cache_len=16) for _ in range(2)]
    room = torch.nn.functional.pad(MASK, (0, 4))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    found = []
    for run, cache in zip((model, compiled), caches, strict=True):
        model(ids[:, :6], MASK[:, :6], past_key_values=cache)
        found.append(
            [run(ids[:, n : n + 1], room, past_key_values=cache).logits for n in range(6, 12)]
        )
    eager, in_graph = (torch.cat(each, 1)[SHOWN[:, 6:]] for each in found)
    assert_same(in_graph, eager)
    assert_same(eager, model(ids, MASK).logits[:, 6:][SHOWN[:, 6:]])


# What is refused.


@torch.no_grad()
def test_a_window_cache_refuses_holes() -> None:
    model, ids = build(), tokens(4, 12)
    with pytest.raises(
        ValueError, match=r"^WindowCache: attention_mask must mark one unbroken run"
    ):
        model(ids, MASK, past_key_values=WindowCache.for_model(model))
