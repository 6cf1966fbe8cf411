"""Several texts in a row of fused models: what their heads do not pass on."""

import copy
import pickle

import pytest
import torch
from transformers import FalconForCausalLM

from linbias.models import unfuse
from small_models import assert_same, each_existing, fused, tokens

pytestmark = pytest.mark.usefixtures("same_start")


@each_existing
@torch.no_grad()
def test_every_copy_and_entry_of_a_model_reads_texts(family):
    model, packed = fused(family), torch.tensor([[0, 1, 2, 0, 1]])
    ids = tokens(2, 5)
    expected = model(ids, position_ids=packed).logits
    assert_same(expected[:, 3:], model(ids[:, 3:]).logits)
    again = pickle.loads(pickle.dumps(model))
    for call in (copy.deepcopy(model), again, model.forward):
        assert torch.equal(call(ids, position_ids=packed).logits, expected)
    states = model.base_model(ids, position_ids=packed)[0]
    assert_same(model.lm_head(states), expected)
    if isinstance(model, FalconForCausalLM):  # the others take them by name alone
        assert torch.equal(model.base_model(ids, None, None, packed)[0], states)
    plain = unfuse(model)(ids).logits
    assert torch.equal(model(ids, position_ids=torch.arange(5)[None]).logits, plain)


@each_existing
@torch.no_grad()
def test_padding_may_stand_beside_texts(family):
    model, ids = fused(family), tokens(2, 6)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    numbers = torch.tensor([[1, 1, 0, 1, 0, 1], [0, 1, 2, 3, 0, 1]])
    output = model(ids, attention_mask=mask, position_ids=numbers, output_attentions=True)
    assert_same(output.logits[0, 2:4], model(ids[:1, 2:4]).logits[0])
    assert_same(output.logits[0, 4:], model(ids[:1, 4:]).logits[0])
    assert_same(output.logits[1, :4], model(ids[1:, :4]).logits[0])
    assert not output.attentions[1][1, :, 4:, :4].any()
    counted = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)  # one text each
    plain = model(ids, attention_mask=mask).logits
    assert torch.equal(model(ids, attention_mask=mask, position_ids=counted).logits, plain)


@torch.no_grad()
def test_what_cannot_be_read_is_explained():
    model, ids = fused("bloom"), tokens(1, 4)
    packed, mask = torch.tensor([[0, 1, 0, 1]]), torch.ones(4, 4).tril()[None, None] == 1
    cache = model(ids[:, :2], use_cache=True).past_key_values
    for given, message in (
        ({"position_ids": packed, "use_cache": True}, "position_ids must count .* is a cache"),
        (
            {"input_ids": ids[:, 2:], "position_ids": packed[:, 1:3], "past_key_values": cache},
            "position_ids must count .* is a cache",
        ),
        ({"attention_mask": mask}, r"\[B, S\], got \[1, 1, 4, 4\] \(linbias\.torch\.attention"),
        ({"seq_idx": packed}, "position_ids must be given by name beside seq_idx"),
    ):
        with pytest.raises(ValueError, match=f"^BloomForCausalLM: .*{message}"):
            model(**{"input_ids": ids, **given})
