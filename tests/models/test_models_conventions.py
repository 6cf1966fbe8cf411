"""What users of Transformers expect of any causal model: packed batches, caches, collators."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import (
    AutoTokenizer,
    Cache,
    DataCollatorForLanguageModeling,
    DynamicCache,
    EncoderDecoderCache,
    PreTrainedModel,
    StaticCache,
)

from linbias.data.tokenizers import Tokenizer, byte_tokenizer, train_bpe
from linbias.models import WindowCache, fuse
from linbias.models.decoder.config import BLOCKS
from linbias.models.decoder.rows import find_texts
from small_models import (
    EXISTING,
    assert_same,
    both_families,
    build,
    build_paper,
    decode,
    every_position,
    left_padded,
    paper_tokens,
    tokens,
)
from test_models_fields import SUBJECTS

pytestmark = pytest.mark.usefixtures("same_start")


@torch.no_grad()
def test_numbers_that_count_on_are_no_packing() -> None:
    model = build(position="rotary")
    ids, mask = left_padded([tokens(9), tokens(4)])
    numbers = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)  # as many models number padding
    expected = model(ids, mask)
    output = model(ids, mask, numbers)
    assert output.past_key_values is not None
    assert_same(output.logits[0], expected.logits[0])
    assert_same(output.logits[1, 5:], expected.logits[1, 5:])
    (jump,) = find_texts(torch.tensor([[0, 1, 5, 6]]), None)  # forwards, too
    assert jump.places.tolist() == [[0, 1], [2, 3]]
    # Rotary scores see distances alone (angles are float32); sinusoids see where a text starts.
    moved = model(ids, mask, numbers + 7).logits[0]
    torch.testing.assert_close(moved, expected.logits[0], rtol=1e-4, atol=1e-4)
    shifted = build(position="sinusoidal")
    moved = shifted(ids[:1], None, numbers[:1] + 7).logits
    assert not torch.allclose(moved, shifted(ids[:1]).logits)


def test_position_numbers_are_refused_while_a_model_is_exported() -> None:
    model, ids = build(num_hidden_layers=1), tokens(1, 5)
    inputs = {"input_ids": ids, "use_cache": False}
    program = torch.export.export(model, (), inputs, strict=False)
    assert_same(program.module()(**inputs).logits, model(**inputs).logits)
    inputs["position_ids"] = torch.arange(5)[None]
    with pytest.raises(ValueError, match="LinbiasModel: position_ids must be None while a model"):
        torch.export.export(model, (), inputs, strict=False)


@pytest.mark.parametrize("make", (build, build_paper))
def test_what_a_head_tells_its_body_is_no_argument(make: Any) -> None:
    model = make(num_hidden_layers=1)
    with pytest.raises(TypeError, match=r"LM: there is no argument keep; say logits_to_keep"):
        model(torch.tensor([[5, 6]]), keep=1)


@both_families
@torch.no_grad()
def test_attentions_are_the_weights_behind_the_output(
    make: Any, position: str, draw: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: PreTrainedModel = make(position=position)
    attend, seen = model.model.position.attend, []

    def watched(q: Any, k: Any, v: Any, options: Any) -> Any:
        seen.append((v, attend(q, k, v, options)))
        return seen[-1][1]

    monkeypatch.setattr(model.model.position, "attend", watched)
    ids, mask = draw(2, 7), torch.ones(2, 7, dtype=torch.int64)
    mask[0, :2] = 0
    output = model(ids, mask, output_attentions=True, logits_to_keep=2)
    assert len(output.attentions) == 2 and output.logits.shape[1] == 2
    for weights, (v, gathered) in zip(output.attentions, seen, strict=True):
        assert weights.shape == (2, v.shape[1], 7, 7)
        assert not weights.triu(1).any() and not weights[0, :, 2:, :2].any()
        assert_same((weights @ v)[0, :, 2:], gathered[0, :, 2:])
        assert_same((weights @ v)[1], gathered[1])
    assert model(ids, mask).attentions is None


@every_position
@pytest.mark.parametrize("padded", [False, True])
def test_a_static_cache_generates_the_same_tokens(position: str, padded: bool) -> None:
    model = build(position=position, num_key_value_heads=2)
    ids, mask = left_padded([tokens(9), tokens(4 if padded else 9)])
    options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    static = model.generate(ids, cache_implementation="static", **options)
    assert torch.equal(static, model.generate(ids, **options))


@torch.no_grad()
def test_a_static_cache_gives_the_logits_of_a_whole_forward() -> None:
    model, ids = build(slope_scale="interpolate", train_length=5), paper_tokens(2, 11) % 61
    cache = StaticCache(config=model.config, max_cache_len=32)
    parts = [model(part, past_key_values=cache).logits for part in ids.split([7, 1, 3], dim=1)]
    expected = decode(model, ids, None, [7, 1, 3])  # the slopes depend on the keys of each call
    assert_same(torch.cat(parts, dim=1), expected)
    paper = build_paper()
    cache = StaticCache(config=paper.config, max_cache_len=12)
    assert_same(paper(ids, past_key_values=cache).logits, paper(ids).logits)


def test_a_compiled_step_with_a_static_cache_is_one_graph_for_all_steps() -> None:
    model, ids = build(num_hidden_layers=1), tokens(2, 9)
    expected = model(ids).logits
    with torch.no_grad():
        cache = StaticCache(config=model.config, max_cache_len=16)
        model(ids[:, :5], past_key_values=cache)
        torch._dynamo.reset()
        counter = torch._dynamo.testing.CompileCounter()
        step = torch.compile(model, backend=counter, fullgraph=True)
        for t in range(5, 9):
            numbers = torch.full((2, 1), t)
            output = step(ids[:, t : t + 1], None, numbers, cache, use_cache=True)
            assert_same(output.logits[:, 0], expected[:, t])
    assert counter.frame_count == 1


@torch.no_grad()
def test_embeddings_take_the_place_of_ids_and_hidden_states_come_for_all_tokens() -> None:
    for model, ids in ((build(), tokens(2, 7)), (build_paper(), paper_tokens(2, 7))):
        logits = model(ids).logits
        embeds = model.get_input_embeddings()(ids)
        assert torch.equal(model(inputs_embeds=embeds).logits, logits)
        out = model(ids, logits_to_keep=2, output_hidden_states=True)
        assert_same(out.logits, logits[:, -2:])
        assert [state.shape[1] for state in out.hidden_states] == [7, 7, 7]
        with pytest.raises(ValueError, match=rf"^{type(model.model).__name__}: give either input"):
            model()


def test_token_types_are_taken_and_not_used() -> None:
    for model, ids in ((build(), tokens(2, 5)), (build_paper(), paper_tokens(2, 5))):
        types = torch.ones_like(ids)
        assert torch.equal(model(ids, token_type_ids=types).logits, model(ids).logits)
        options = {"max_new_tokens": 3, "do_sample": False}
        made = model.generate(ids, token_type_ids=types, **options)
        assert torch.equal(made, model.generate(ids, **options))


# Tokenizers: padding, begin and end of a text.


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_tokenizers_pad_batches_for_collators_and_generation(kind: str, tmp_path: Path) -> None:
    words = "the cat sat on the mat\n" * 9
    made = byte_tokenizer() if kind == "bytes" else train_bpe(words.encode(), 270)
    made.save(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = {name: getattr(tokenizer, name) for name in made.special_ids}
    assert ids == made.special_ids and len(set(ids.values())) == 3 and len(ids) == 3
    assert len(tokenizer) == made.vocab_size  # a role takes no id beyond the model's
    batch = tokenizer(["the cat", "the"], padding=True, return_tensors="pt")
    assert set(batch) == {"input_ids", "attention_mask"}  # no types, which no model here uses
    assert batch["input_ids"][1, 0] == tokenizer.pad_token_id
    assert batch["attention_mask"][1, 0] == 0
    collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    labels = collate([tokenizer("the cat"), tokenizer("the")])["labels"]
    assert labels[1, 0] == -100 and (labels[0] >= 0).all()
    model = build(vocab_size=made.vocab_size, **made.special_ids)
    how = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    together = model.generate(**batch, **how)
    alone = model.generate(**tokenizer("the", return_tensors="pt"), **how)
    assert torch.equal(together[1, -4:], alone[0, -4:])


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_every_text_decodes_to_itself_whatever_characters_have_roles(kind: str) -> None:
    made = byte_tokenizer() if kind == "bytes" else train_bpe(b"the cat\n" * 9, 270)
    text = "a\0b\2\3c\1 \u0100\u0103 [PAD]<s>\n"
    ids = made.backend.encode(text).ids
    assert made.decode(ids) == text and ids == made.encode(text).tolist()
    if kind == "bytes":
        assert ids == list(text.encode())


def test_a_token_that_is_added_for_padding_fits_after_resizing(tmp_path: Path) -> None:
    """What the error of Transformers advises where a tokenizer has no padding."""
    Tokenizer(byte_tokenizer().backend).save(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    model = build(vocab_size=256)
    model.resize_token_embeddings(len(tokenizer))
    batch = tokenizer(["to be", "or"], padding=True, return_tensors="pt")
    assert batch["input_ids"].max() == 256 and model.config.vocab_size == 257
    assert model(**batch).logits.shape == (2, 5, 257)
    refused = "PaperForCausalLM: the vocabulary cannot be resized"
    with pytest.raises(NotImplementedError, match=refused):
        build_paper().resize_token_embeddings(90)


SHARDED = {
    **{block: partial(build, block=block) for block in BLOCKS},
    **{
        family: SUBJECTS[family][1]
        for family in SUBJECTS
        if "-v2" not in family and " " not in family
    },
}


@pytest.mark.parametrize("name", SHARDED)
def test_sharding_finds_the_blocks(name: str) -> None:
    model = SHARDED[name]()
    if name in EXISTING:
        fuse(model)
    policy = "transformer_based_wrap"
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy=policy)
    is_block = fsdp2_prepare_auto_wrap_policy(plugin, model)
    assert is_block is not None
    found = [type(module).__name__ for module in model.modules() if is_block(module)]
    assert len(found) >= 2
    assert set(found) == set(model._no_split_modules or ())


@pytest.mark.parametrize("position", ["alibi", "learned", "forget"])
def test_fake_tensors_run_where_they_need_no_values(position: str) -> None:
    """So PyTorch finds out what memory a model would take."""
    model = build(num_hidden_layers=1, position=position)
    ids, mask = left_padded([tokens(9), tokens(4)])
    with FakeTensorMode() as mode:
        for module in model.modules():
            for name, weight in module.named_parameters(recurse=False):
                module.register_parameter(name, mode.from_tensor(weight))
        ids, mask = mode.from_tensor(ids), mode.from_tensor(mask)
        assert model(ids, mask.float()).logits.shape == (2, 9, model.config.vocab_size)
        cache = model(ids, mask, use_cache=True).past_key_values
        longer = torch.cat([mask, mask[:, :1]], 1)
        logits = model(ids[:, :1], longer, past_key_values=cache).logits
        assert logits.shape == (2, 1, model.config.vocab_size)
        model(ids, mask, use_cache=False).logits.sum().backward()
        with pytest.raises(ValueError, match=r"^linbias: position_ids must be None among fake"):
            model(ids, mask, ids, use_cache=False)


# Masks, numbers and caches that decoders of any family cannot read.

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
    (torch.ones(2, 1, 8, 8), ValueError, r"got \[2, 1, 8, 8\] \(linbias\.torch\.attention takes"),
    (torch.tensor([[0.0] * 8, [0.0] * 7 + [-math.inf]]), ValueError, "0 at padding .*, got -inf"),
    (torch.full((2, 8), math.nan), ValueError, "must be 0 at padding .*, got nan"),
]


@pytest.mark.parametrize("family", DECODERS)
def test_a_mask_that_is_none_of_tokens_is_refused(family: str) -> None:
    model, ids = small(family), tokens(2, 8)
    for mask, error, message in MASKS:
        with pytest.raises(error, match=f"attention_mask .*{message}"):
            call(model, ids, attention_mask=mask)


NUMBERS = [
    ({"position_ids": [[0] * 8]}, TypeError, "position_ids must be a tensor, got list"),
    ({"position_ids": torch.arange(8)}, ValueError, r"\[1 or B, 8\], B = 2, got \[8\]"),
    ({"position_ids": torch.arange(3)[None]}, ValueError, r"\[1 or B, 8\], .* got \[1, 3\]"),
    ({"position_ids": torch.zeros(3, 2, 8).long()}, ValueError, r"got \[3, 2, 8\]"),
    ({"position_ids": torch.arange(8)[None] / 2}, TypeError, "hold integers, got torch.float32"),
    ({"position_ids": torch.ones(2, 8) > 0}, TypeError, "hold integers, got torch.bool"),
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
