"""What the decoders of all families say of masks, marks and caches that they cannot read."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import Cache, DynamicCache, EncoderDecoderCache, StaticCache

from linbias.models import WindowCache, fuse
from small_models import tokens
from test_models_fields import SUBJECTS

pytestmark = pytest.mark.usefixtures("same_start")

SEQ2SEQ, ROOM = "linbias-seq2seq", 24
DECODERS = [family for family in SUBJECTS if "bert" not in family.lower() and "jina" not in family]


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
