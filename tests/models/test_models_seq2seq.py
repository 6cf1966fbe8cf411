"""Sequence-to-sequence models: their definition, caches, padding, and Transformers' tools.

Models run in float64, so that two ways to the same number agree to 1e-12.
"""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, gelu, layer_norm
from transformers import (
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    DynamicCache,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)
from transformers.modeling_outputs import BaseModelOutput

from linbias.data.tokenizers import byte_tokenizer
from linbias.models import (
    LinbiasForConditionalGeneration,
    LinbiasSeq2SeqConfig,
    LinbiasSeq2SeqModel,
    load,
)
from linbias.models.decoder.config import ENCODER_POSITIONS, POSITIONS
from small_models import VOCAB, assert_same, left_padded, start_checkpointing, tokens

pytestmark = pytest.mark.usefixtures("same_start")
SMALL = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
IDS = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}


def build(**changes: Any) -> LinbiasForConditionalGeneration:
    fit = {**SMALL, **IDS, "train_length": 48, "initializer_range": 0.3, "window": 5}
    model = LinbiasForConditionalGeneration(LinbiasSeq2SeqConfig(**{**fit, **changes}))
    return model.double().eval()


def right_padded(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    ids, mask = left_padded([row.flip(0) for row in rows])
    return ids.flip(1), mask.flip(1)


def plain_logits(model: LinbiasForConditionalGeneration, read: Tensor, said: Tensor) -> Tensor:
    """The logits of one text [T] given another [S], by the formulas: 4 heads of 8."""
    w = dict(model.named_parameters())
    slopes = torch.tensor([1 / 4, 1 / 16, 1 / 64, 1 / 256]).double()[:, None, None]

    def norm(x: Tensor, name: str) -> Tensor:
        return layer_norm(x, (32,), w[f"{name}.weight"], w[f"{name}.bias"])

    def heads(x: Tensor) -> Tensor:
        return torch.stack(x.split(8, dim=-1))

    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | float) -> Tensor:
        q, k, v = heads(q), heads(k)[[0, 0, 1, 1]], heads(v)[[0, 0, 1, 1]]  # two heads share a key
        return torch.cat([*((q @ k.mT / 8**0.5 + bias).softmax(-1) @ v)], dim=-1)

    def own(x: Tensor, name: str, causal: bool) -> Tensor:
        place = torch.arange(len(x))
        distance = place[:, None] - place
        bias = -slopes * distance.abs()
        if causal:
            bias = bias.masked_fill(distance < 0, -math.inf)
        q, k, v = (norm(x, f"{name}.norm") @ w[f"{name}.attention.qkv.weight"].T).split(
            [32, 16, 16], dim=-1
        )
        return x + attend(q, k, v, bias) @ w[f"{name}.attention.out.weight"].T

    def fed(x: Tensor, name: str) -> Tensor:
        wide = norm(x, f"{name}.feed_forward_norm") @ w[f"{name}.feed_forward.0.weight"].T
        return x + gelu(wide) @ w[f"{name}.feed_forward.2.weight"].T

    table = w["model.encoder.embed_tokens.weight"]
    memory = table[read]
    for layer in range(2):
        name = f"model.encoder.layers.{layer}"
        memory = fed(own(memory, name, causal=False), name)
    memory = norm(memory, "model.encoder.norm")
    x = table[said]
    for layer in range(3):
        name = f"model.decoder.layers.{layer}"
        x = own(x, name, causal=True)
        q = norm(x, f"{name}.cross_norm") @ w[f"{name}.cross_attention.q.weight"].T
        k, v = (memory @ w[f"{name}.cross_attention.kv.weight"].T).split(16, dim=-1)
        x = x + attend(q, k, v, 0.0) @ w[f"{name}.cross_attention.out.weight"].T
        x = fed(x, name)
    return norm(x, "model.decoder.norm") @ table.T


@pytest.mark.parametrize("pad", [left_padded, right_padded])
def test_padded_texts_equal_the_formulas_one_by_one_and_so_do_all_gradients(pad: Any) -> None:
    model = build(num_key_value_heads=2, decoder_layers=3, hidden_dropout=0.5)
    reads, says = [tokens(11), tokens(4)], [tokens(3), tokens(7)]
    (ids, mask), (said, said_mask) = pad(reads), pad(says)
    logits = model(ids, mask, said, said_mask).logits
    expected = torch.cat([plain_logits(model, *pair) for pair in zip(reads, says, strict=True)])
    assert_same(logits[said_mask.bool()], expected)

    direction, weights = torch.randn_like(expected), list(model.parameters())
    found = torch.autograd.grad((logits[said_mask.bool()] * direction).sum(), weights)
    wanted = torch.autograd.grad((expected * direction).sum(), weights)
    for actual, gradient in zip(found, wanted, strict=True):
        assert gradient.any()
        torch.testing.assert_close(actual, gradient, rtol=1e-9, atol=1e-9)


def decoded(model: LinbiasForConditionalGeneration, chunks: list[Tensor], **given: Any) -> Tensor:
    """The logits of tokens that come in chunks, with a cache."""
    cache, logits, mask = None, [], given.pop("decoder_attention_mask")
    for chunk in chunks:
        done = sum(part.shape[1] for part in logits) + chunk.shape[1]
        out = model(
            **given,
            decoder_input_ids=chunk,
            decoder_attention_mask=mask[:, :done],
            past_key_values=cache,
            use_cache=True,
        )
        cache = out.past_key_values
        logits.append(out.logits)
    return torch.cat(logits, dim=1)


@torch.no_grad()
@pytest.mark.parametrize(
    "positions",
    [{"encoder_position": name} for name in ENCODER_POSITIONS]
    + [{"position": name} for name in POSITIONS],
    ids=lambda positions: "-".join(*positions.items()),
)
def test_any_positions_bear_padding_caches_and_greater_length(positions: dict[str, str]) -> None:
    table = "learned" in positions.values()  # which ends with the trained length
    model = build(**positions, num_key_value_heads=2, train_length=40 if table else 8)
    reads, says = [tokens(40), tokens(13)], [tokens(9), tokens(5)]
    (ids, mask), (said, said_mask) = right_padded(reads), left_padded(says)
    logits = model(ids, mask, said, said_mask).logits
    for row, (read, say) in enumerate(zip(reads, says, strict=True)):
        assert_same(logits[row, -len(say) :], model(read[None], None, say[None]).logits[0])
    other = tokens(40)
    other[1:] = reads[0][1:]  # the first token tells
    assert not torch.allclose(model(other[None], None, says[0][None]).logits, logits[:1])
    memory = model.get_encoder()(ids, mask)
    given = {"encoder_outputs": memory, "attention_mask": mask}
    parts = said.split([4, 1, 1, 3], dim=1)
    found = decoded(model, list(parts), **given, decoder_attention_mask=said_mask)
    assert_same(found[said_mask.bool()], logits[said_mask.bool()])


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": False},
        {"do_sample": True, "top_k": 9},
        {"num_beams": 3, "num_return_sequences": 2},
        {"do_sample": False, "cache_implementation": "static"},
    ],
    ids=["greedy", "sampling", "beams", "static"],
)
def test_a_cache_generates_the_same_tokens(options: dict[str, Any]) -> None:
    model = build(decoder_layers=3)  # more than the encoder has
    with torch.no_grad():
        model.lm_head.weight[3] *= 2  # some rows end early
    ids, mask = left_padded([tokens(9), tokens(4), tokens(7)])

    def generate(**more: Any) -> Tensor:
        torch.manual_seed(5)
        return model.generate(ids, attention_mask=mask, max_new_tokens=12, **more)

    made = generate(**options)
    options.pop("cache_implementation", None)
    assert torch.equal(made, generate(**options, use_cache=False))
    assert (made[:, 0] == 2).all() and made.shape[1] > 2
    assert len({tuple(row) for row in made.tolist()}) > 1
    alone = model.generate(ids[1:2, -4:], max_new_tokens=12, do_sample=False)[0]
    if options == {"do_sample": False}:
        assert torch.equal(made[1, : len(alone)], alone)


@torch.no_grad()
def test_what_is_not_scored_changes_nothing() -> None:
    model, ids = build(), tokens(2, 9)
    read = torch.tensor([[2, 5, 6, 7], [2, 8, 0, 0]])
    logits = model(ids, None, read).logits
    wanted = cross_entropy(torch.cat([logits[0], logits[1, :2]]), torch.tensor([5, 6, 7, 3, 8, 3]))
    right = torch.tensor([[5, 6, 7, 3], [8, 3, -100, -100]])
    left = torch.tensor([[5, 6, 7, 3], [-100, -100, 8, 3]])
    shifted = model.prepare_decoder_input_ids_from_labels(right)
    assert shifted.tolist() == [[2, 5, 6, 7], [2, 8, 3, 0]]
    shifted = model.prepare_decoder_input_ids_from_labels(left)
    assert shifted.tolist() == [[2, 5, 6, 7], [0, 0, 2, 8]]
    for labels in (right, left):
        assert float(model(ids, labels=labels).loss) == pytest.approx(float(wanted), rel=1e-6)
    collated = model(ids, labels=left, decoder_input_ids=shifted).loss
    assert float(collated) == pytest.approx(float(wanted), rel=1e-6)
    total = model(ids, labels=left, num_items_in_batch=12).loss
    assert float(total) == pytest.approx(float(wanted) / 2, rel=1e-6)
    nothing = torch.full((2, 3), -100)
    assert model.prepare_decoder_input_ids_from_labels(nothing).tolist() == [[2, 0, 0]] * 2


@torch.no_grad()
def test_a_row_without_memory_gathers_zeros() -> None:
    model, said = build(), tokens(1, 5)
    ids, mask = tokens(2, 6), torch.ones(2, 6)
    mask[1] = 0
    logits = model(ids, mask, said.expand(2, -1)).logits
    empty = BaseModelOutput(torch.zeros(1, 1, 32, dtype=torch.float64))
    assert_same(logits[1:], model(encoder_outputs=empty, decoder_input_ids=said).logits)
    assert logits.isfinite().all()


@torch.no_grad()
def test_attentions_and_states_are_those_of_both_sides() -> None:
    model = build(decoder_layers=1)
    ids, mask = left_padded([tokens(6), tokens(4)])
    output = model(ids, mask, tokens(2, 3), output_attentions=True, output_hidden_states=True)
    assert [a.shape for a in output.encoder_attentions] == [(2, 4, 6, 6)] * 2
    assert [a.shape for a in output.decoder_attentions] == [(2, 4, 3, 3)]
    (cross,) = output.cross_attentions
    assert cross.shape == (2, 4, 3, 6) and not cross[1, ..., :2].any()
    assert_same(cross.sum(-1), torch.ones(2, 4, 3, dtype=torch.float64))
    assert len(output.encoder_hidden_states) == 3 and len(output.decoder_hidden_states) == 2
    assert torch.equal(output.encoder_hidden_states[-1], output.encoder_last_hidden_state)


def test_checkpointing_gives_the_same_gradients() -> None:
    model, ids, labels = build().train(), tokens(2, 9), tokens(2, 5)

    def gradients() -> list[Tensor]:
        return list(torch.autograd.grad(model(ids, labels=labels).loss, list(model.parameters())))

    expected = gradients()
    for reentrant in (False, True):
        start_checkpointing(model, use_reentrant=reentrant)
        model.zero_grad()
        model(ids, labels=labels).loss.backward()
        for weight, gradient in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(weight.grad, gradient, rtol=1e-9, atol=1e-12)


def test_a_saved_model_comes_back_by_the_auto_classes(tmp_path: Path) -> None:
    model = build(encoder_position="littlebird", decoder_layers=1)
    with torch.no_grad():
        model.model.encoder.position.log_left.normal_()
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").exists()
    loaded = load(tmp_path)
    assert type(loaded) is LinbiasForConditionalGeneration
    assert loaded.lm_head.weight is loaded.get_input_embeddings().weight
    ids, said = tokens(1, 9), tokens(1, 3)
    assert_same(
        loaded(ids, decoder_input_ids=said).logits, model(ids, decoder_input_ids=said).logits
    )
    options = {"do_sample": False, "max_new_tokens": 5}
    assert torch.equal(loaded.generate(ids, **options), model.generate(ids, **options))
    half = load(tmp_path, task="base", dtype=torch.bfloat16)
    assert type(half) is LinbiasSeq2SeqModel and half.decoder.norm.weight.dtype == torch.bfloat16
    slopes = model.model.encoder.position.log_left  # which keep their digits
    assert torch.equal(half.encoder.position.log_left, slopes.float())
    model.resize_token_embeddings(VOCAB + 3)
    assert model(ids, decoder_input_ids=said).logits.shape[-1] == VOCAB + 3


@pytest.mark.thorough
def test_seq2seq_trainer_and_collator_train_it(tmp_path: Path) -> None:
    byte_tokenizer().save(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)  # which pads on the left
    model = LinbiasForConditionalGeneration(
        LinbiasSeq2SeqConfig(**{**SMALL, "vocab_size": 256}, **IDS)
    )
    data = [
        {**tokenizer(f"{n}" * 2 * n), "labels": [*tokenizer("c" * n)["input_ids"], 3]}
        for n in (1, 2, 3, 4)
    ]
    collate = DataCollatorForSeq2Seq(tokenizer, model)
    batch = collate(data)
    first = float(model(**batch).loss.detach())
    assert first == pytest.approx(math.log(256), abs=0.2)
    quiet = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "save_strategy": "no"}
    how = {"max_steps": 90, "learning_rate": 1e-2, "per_device_train_batch_size": 4, **quiet}
    said = {"predict_with_generate": True, "generation_max_length": 12}
    arguments = Seq2SeqTrainingArguments(str(tmp_path / "run"), **how, **said)
    data_sets = {"train_dataset": data, "eval_dataset": data}
    trainer = Seq2SeqTrainer(model, arguments, data_collator=collate, **data_sets)
    trainer.train()
    assert float(model.eval()(**batch).loss.detach()) < 0.5
    said = trainer.predict(data).predictions
    assert tokenizer.batch_decode(said, skip_special_tokens=True) == ["c", "cc", "ccc", "cccc"]


def test_what_does_not_fit_is_refused() -> None:
    model, bare, ids = build(), build(bos_token_id=None, pad_token_id=None), tokens(2, 4)
    short = torch.ones(2, 3)
    hidden = ids.masked_fill(ids == ids[0, 1], -100)
    started = copy.deepcopy(bare)
    started.config.decoder_start_token_id = 1
    assert started(ids, labels=ids).loss.isfinite()
    own, range_of = {"decoder_input_ids": ids}, {"decoder_attention_mask": short}
    for one, given, message in (
        (model, {}, "give either decoder_input_ids or decoder_inputs_embeds"),
        (model, {**own, "past_key_values": DynamicCache()}, "must be an EncoderDecoderCache"),
        (model, {**own, **range_of}, r"LinbiasDecoder: attention_mask must have shape .*2, 4"),
        (bare, {"labels": ids}, r"config\.decoder_start_token_id must be an id to shift labels"),
        (started, {"labels": hidden}, r"config\.pad_token_id must be an id where labels hold"),
    ):
        with pytest.raises(ValueError, match=message):
            one(ids, **given)
