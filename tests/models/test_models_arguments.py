"""What the decoders of all families say of masks, marks and caches that they cannot read."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, EncoderDecoderCache, StaticCache

from linbias.models import WindowCache, fuse
from small_models import build, tokens
from test_models_fields import SUBJECTS

pytestmark = pytest.mark.usefixtures("same_start")

SEQ2SEQ, ROOM = "linbias-seq2seq", 24
DECODERS = [family for family in SUBJECTS if "bert" not in family.lower() and "jina" not in family]
CAUSAL = [family for family in DECODERS if family != SEQ2SEQ]


def small(family: str) -> Any:
    model = SUBJECTS[family][1]()
    for name, p in model.named_parameters():
        if "slopes" not in name:
            nn.init.normal_(p, std=0.3)
    if family in ("bloom", "falcon", "mpt"):
        fuse(model)
    return model.eval()


def empty(kind: str, model: Any) -> Cache:
    config, is_pair = model.config, model.config.is_encoder_decoder
    if kind == "window":
        return WindowCache.for_model(model)
    room = {"max_cache_len": ROOM} if kind == "static" else {}
    own = {"static": StaticCache, "dynamic": DynamicCache}[kind](config=config, **room)
    return EncoderDecoderCache(own, DynamicCache(config=config)) if is_pair else own


def call(model: Any, ids: Tensor, **given: Any) -> Tensor:
    if model.config.is_encoder_decoder:
        given |= {"decoder_input_ids": ids, "input_ids": ids[:, :1]}
        given["decoder_attention_mask"] = given.pop("attention_mask", None)
        return model(**given).logits
    return model(ids, **given).logits


@pytest.mark.parametrize("kind", ["dynamic", "static", "window"])
@pytest.mark.parametrize("family", DECODERS)
def test_a_given_cache_holds_each_token_once_whatever_the_configuration_says(
    family: str, kind: str
) -> None:
    if (family, kind) == (SEQ2SEQ, "window"):
        pytest.skip("it takes pairs of caches alone")
    model, ids = small(family), tokens(1, 7).clamp(min=3, max=60)
    for config in (model.config, model.generation_config):
        config.use_cache = False
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 1, None
    options: Any = {"do_sample": False, "max_new_tokens": 6}
    if family == SEQ2SEQ:
        options["decoder_input_ids"] = ids
    cache = empty(kind, model)
    found = model.generate(ids, past_key_values=cache, **options)
    assert torch.equal(found, model.generate(ids, **options))
    assert int(cache.get_seq_length()) == found.shape[1] - 1
    with pytest.raises(ValueError, match=r"use_cache must be True where a cache is given, got Fa"):
        model.generate(ids, past_key_values=cache, use_cache=False, **options)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("family", DECODERS)
@torch.no_grad()
def test_a_cache_of_other_rows_or_without_room_is_refused(family: str, kind: str) -> None:
    model, ids = small(family), tokens(2, 30)
    for rows, length in ((1, 2), (2, 1), (1, 12)):
        cache = empty(kind, model)
        call(model, ids[:rows, :4], past_key_values=cache)
        others = 3 - rows
        with pytest.raises(ValueError, match=rf"past_key_values .* rows .*, {others}, got {rows}"):
            call(model, ids[:others, :length], past_key_values=cache)
    if kind == "static":
        with pytest.raises(ValueError, match=r"have room for 34 tokens, got a static cache of 24"):
            call(model, ids[:1], past_key_values=cache)


MASKS = [
    ([[1] * 8] * 2, TypeError, "must be a tensor, got list"),
    (torch.ones(8), ValueError, r"must have shape \[B, S\], got \[8\]"),
    (torch.ones(2, 8, 8), ValueError, r"must have shape \[B, S\], got \[2, 8, 8\]"),
    (torch.tensor([[0.0] * 8, [0.0] * 7 + [-math.inf]]), ValueError, "0 at padding .*, got -inf"),
    (torch.full((2, 8), math.nan), ValueError, "must be 0 at padding .*, got nan"),
]


@pytest.mark.parametrize("family", DECODERS)
def test_a_mask_that_is_none_of_tokens_is_refused(family: str) -> None:
    model, ids = small(family), tokens(2, 8)
    for mask, error, message in MASKS:
        with pytest.raises(error, match=f"attention_mask .*{message}"):
            call(model, ids, attention_mask=mask)


FULL = torch.ones(2, 1, 8, 8, dtype=torch.bool).tril()
NUMBERS = [
    ({"position_ids": [[0] * 8]}, TypeError, "position_ids must be a tensor, got list"),
    ({"position_ids": torch.arange(8)}, ValueError, r"\[1 or B, 8\], B = 2, got \[8\]"),
    ({"position_ids": torch.arange(3)[None]}, ValueError, r"\[1 or B, 8\], .* got \[1, 3\]"),
    ({"position_ids": torch.zeros(3, 2, 8).long()}, ValueError, r"got \[3, 2, 8\]"),
    ({"position_ids": torch.arange(8)[None] / 2}, TypeError, "hold integers, got torch.float32"),
    ({"position_ids": torch.ones(2, 8) > 0}, TypeError, "hold integers, got torch.bool"),
    ({"position_ids": [[0]], "attention_mask": FULL}, TypeError, "must be a tensor, got list"),
    ({"position_ids": torch.ones(1, 8), "attention_mask": FULL}, TypeError, "hold integers"),
]


@pytest.mark.parametrize("family", CAUSAL)
def test_numbers_that_are_no_integers_of_tokens_are_refused(family: str) -> None:
    model, ids = small(family), tokens(2, 8)
    for numbers, error, message in NUMBERS:
        with pytest.raises(error, match=message):
            call(model, ids, **numbers, use_cache=False)


def test_a_table_has_no_negative_positions() -> None:
    with pytest.raises(ValueError, match="position_ids must be at least 0 for a table, got -5"):
        build(position="learned")(tokens(1, 8), position_ids=torch.arange(8)[None] - 5)
