"""Marks of packed texts beside `position_ids`, as Transformers' collator hands them to models."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DataCollatorWithFlattening, PreTrainedModel

from linbias.models import LinbiasBertConfig, LinbiasBertForMaskedLM, LinbiasForMaskedLM
from linbias.models.decoder.text_marks import MARKS
from linbias.paper.config import POSITIONS as PAPER_POSITIONS
from small_models import EXISTING, assert_same, build, build_paper, fused, settings, tokens

pytestmark = pytest.mark.usefixtures("same_start")

ENCODER = LinbiasBertConfig(
    vocab_size=61,
    hidden_size=36,
    num_hidden_layers=2,
    num_attention_heads=6,
    intermediate_size=40,
    initializer_range=0.3,
    query_key_norm=True,
    slope_scale="interpolate",
    train_length=4,
)
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "alibi": build,
    "sinusoidal": lambda: build(position="sinusoidal"),
    "body": lambda: build(position="rotary").model,
    "masked": lambda: LinbiasForMaskedLM(settings(encoder_position="symmetric")).double().eval(),
    **{f"paper-{p}": partial(build_paper, position=p) for p in PAPER_POSITIONS},
    "encoder": lambda: LinbiasBertForMaskedLM(ENCODER).double().eval(),
    **{family: partial(fused, family) for family in EXISTING},
    "encoder's body": lambda: LinbiasBertForMaskedLM(ENCODER).encoder.double().eval(),
}
each_model = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)


def collated(texts: list[Tensor]) -> dict[str, Any]:
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    batch = dict(collate([{"input_ids": text.tolist()} for text in texts]))
    assert set(MARKS) < set(batch)
    del batch["labels"]
    return batch


@each_model
@pytest.mark.parametrize("left_out", [(), MARKS, ("position_ids",), ("position_ids", "seq_idx")])
@torch.no_grad()
def test_marked_texts_are_read_as_each_alone(make: Any, left_out: tuple[str, ...]) -> None:
    model, texts = make(), [tokens(n) for n in (5, 1, 9, 5)]
    batch = collated(texts)
    for name in left_out:
        del batch[name]
    alone = torch.cat([model(text[None])[0] for text in texts], dim=1)
    assert_same(model(**batch)[0], alone)
    assert model(**batch).get("past_key_values") is None
    ids = batch.pop("input_ids")
    batch = {name: batch[name] for name in batch if name != "cu_seq_lens_k"}
    assert_same(model(ids, None, **batch)[0], alone)


NO_DROPOUT = dict.fromkeys(
    ("dropout", "attention_dropout", "activation_dropout", "softmax_dropout"), 0.0
)
CAUSAL = [
    build,
    partial(build_paper, **NO_DROPOUT),
    *(partial(fused, family) for family in EXISTING),
]


@pytest.mark.parametrize("make", CAUSAL, ids=["alibi", "paper", *EXISTING])
def test_marked_texts_teach_what_each_alone_teaches(make: Any) -> None:
    model, texts = make(), [tokens(n).clamp(min=2) for n in (5, 2, 9, 5)]  # 1 may be <pad>
    batch, parameters = collated(texts), list(model.parameters())
    labels = torch.cat(texts)[None].masked_fill(batch["position_ids"] == 0, -100)
    losses = [model(x[None], labels=x[None]).loss * (len(x) - 1) for x in texts]
    found = model.train()(**batch, labels=labels).loss
    assert found.item() == pytest.approx(sum(losses).item() / 17, rel=1e-5)
    actual, expected = (  # in one row, since those of the paper's key biases are rounding
        torch.cat([x.flatten() for x in torch.autograd.grad(loss, parameters)])
        for loss in (found, sum(losses) / 17)
    )
    size = 1e-6 * float(expected.abs().max())
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=size)
    wrong = batch | {"seq_idx": torch.zeros_like(batch["seq_idx"])}
    with pytest.raises(ValueError, match=r"ForCausalLM: .* must mark the same texts as"):
        model(**wrong)


@torch.no_grad()
def test_rows_have_marks_of_their_own_and_padding_has_none() -> None:
    model = build(position="sinusoidal")
    texts = [[tokens(3), tokens(4)], [tokens(2), tokens(2), tokens(1)]]
    ids, mask = torch.zeros(2, 2, 7, dtype=torch.int64).unbind()
    index = torch.full((2, 7), -1)
    for b, row in enumerate(texts):
        ids[b, -sum(map(len, row)) :] = torch.cat(row)
        mask[b, -sum(map(len, row)) :] = 1
        index[b, -sum(map(len, row)) :] = torch.cat(
            [torch.full((len(text),), i) for i, text in enumerate(row)]
        )
    alone = torch.cat([model(text[None]).logits[0] for row in texts for text in row])
    for padding in (-1, 0):  # a number of its own, or that of the text beside it
        output = model(ids, mask, seq_idx=index.masked_fill(index < 0, padding))
        assert_same(output.logits[mask.bool()], alone)
    model.config.use_cache = False
    bounds = torch.tensor([0, 3, 7, 9, 9, 14])  # of both rows, one after the other
    two = model(ids, cu_seq_lens_q=bounds).logits[0]
    assert_same(two, torch.cat([model(text[None]).logits[0] for text in texts[0]]))


def test_trainer_keeps_columns_with_marks() -> None:
    for make in MODELS.values():
        taken = inspect.signature(make().forward).parameters
        assert {"input_ids", "position_ids", *MARKS} <= set(taken)


def test_marks_that_contradict_are_explained() -> None:
    model, ids = build(), tokens(1, 5)
    numbers, two = torch.tensor([[0, 1, 2, 0, 1]]), tokens(2, 5)
    same, longer = torch.tensor([0, 3, 5]), torch.tensor([0, 4, 5])
    index = torch.tensor([[0, 0, 0, 1, 1]])
    for given, message in (
        (
            {"position_ids": numbers, "cu_seq_lens_q": longer},
            r"cu_seq_lens_q must mark the same texts as position_ids, got a start at \[0, 3\] of "
            "position_ids alone",
        ),
        (
            {"position_ids": torch.arange(5)[None], "seq_idx": index},
            r"seq_idx must mark .* as position_ids, got a start at \[0, 3\] of seq_idx alone",
        ),
        (
            {"cu_seq_lens_q": same, "cu_seq_lens_k": longer},
            "cu_seq_lens_k must mark the same texts as cu_seq_lens_q",
        ),
        ({"cu_seq_lens_q": same, "max_length_q": 2}, "max_length_q .* longest text, 3, got 2"),
        ({"max_length_k": 4}, "max_length_k must be one number, .* text, 5, got 4"),
        (
            {"cu_seq_lens_q": same[:2]},
            r"cu_seq_lens_q must count up from 0 to .* = 5, got \[0, 3\]",
        ),
        ({"cu_seq_lens_k": same.flip(0)}, r"cu_seq_lens_k must count up .* got \[5, 3, 0\]"),
        ({"cu_seq_lens_k": same[None]}, r"cu_seq_lens_k must count up .* got \[\[0, 3, 5\]\]"),
        ({"seq_idx": index[:, 1:]}, r"seq_idx must have shape .* = \[1, 5\], got \[1, 4\]"),
        ({"position_ids": numbers[:, 1:], "seq_idx": index}, "position_ids must have shape"),
        ({"cu_seq_lens_q": same, "use_cache": True}, "position_ids must count on .* a cache"),
        (
            {"cu_seq_lens_q": same, "attention_mask": torch.ones(1, 1, 5, 5) == 1},
            r"cu_seq_lens_q must be None where attention_mask is not \[B, S\]",
        ),
        ({"input_ids": None, "seq_idx": index}, "give either input_ids or inputs_embeds"),
    ):
        with pytest.raises(ValueError, match=rf"^Linbias(ForCausalLM|Model): .*{message}"):
            model(**{"input_ids": ids, **given})
    with pytest.raises(ValueError, match="cu_seq_lens_q must have a bound where row 1 starts, 5"):
        model(two, cu_seq_lens_q=torch.tensor([0, 4, 10]))
    with pytest.raises(ValueError, match="cu_seq_lens_q must be None while a model is exported"):
        torch.export.export(model, (ids,), {"cu_seq_lens_q": same}, strict=False)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo, where a graph breaks
@pytest.mark.parametrize("make", [partial(build, num_hidden_layers=1), partial(fused, "bloom")])
@torch.no_grad()
def test_a_compiled_model_reads_marks(make: Any) -> None:
    model = make()
    batch = collated([tokens(5), tokens(9)])
    compiled = torch.compile(model, backend="eager")
    assert_same(compiled(**batch).logits, model(**batch).logits)
    del batch["position_ids"]
    assert_same(compiled(**batch).logits, model(**batch).logits)
