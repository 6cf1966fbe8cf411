"""Every model with a head in people's training loops: Transformers' Trainer."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    DataCollatorWithFlattening,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from linbias.models import (
    LinbiasBertConfig,
    LinbiasBertForMaskedLM,
    LinbiasBertForSequenceClassification,
    LinbiasBertForTokenClassification,
    LinbiasForConditionalGeneration,
    LinbiasForMaskedLM,
    LinbiasSeq2SeqConfig,
    fuse,
)
from linbias.models.decoder.baichuan import BaichuanConfig, BaichuanForCausalLM
from linbias.models.decoder.layout import MARKS
from linbias.models.fused.mpt_model import LinbiasMptConfig, LinbiasMptForCausalLM
from small_models import VOCAB, assert_same, build, build_paper, settings

pytestmark = pytest.mark.usefixtures("same_start")

ROWS, LENGTH, CLASSES = 7, 11, 3
SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1}
SIZES["initializer_range"] = 0.3
INNER = {"intermediate_size": 48}
BLOOM = {"vocab_size": VOCAB, "hidden_size": 32, "n_head": 4, "n_layer": 1}
MPT = {"vocab_size": VOCAB, "d_model": 32, "n_heads": 4, "n_layers": 1, "initializer_range": 0.3}
NO_DROPOUT = dict.fromkeys(
    ("dropout", "attention_dropout", "activation_dropout", "softmax_dropout"), 0.0
)
ROLES = {"bos_token_id": 2, "pad_token_id": 0}


def encoder(**changes: Any) -> LinbiasBertConfig:
    return LinbiasBertConfig(**SIZES, **INNER, pooler=True, hidden_dropout=0.0, **changes)


def classifier(**changes: Any) -> PreTrainedModel:
    return LinbiasBertForSequenceClassification(encoder(**changes))


class Case(NamedTuple):
    make: Callable[[], PreTrainedModel]
    labels: str = "tokens"  # of what kind
    types: bool = False  # whether it reads token types
    smooths: bool = True  # whether Trainer can smooth labels of this kind


CASES = {
    "causal": Case(build),
    "masked": Case(lambda: LinbiasForMaskedLM(settings(encoder_position="symmetric"))),
    "paper": Case(lambda: build_paper(**NO_DROPOUT)),
    "baichuan": Case(lambda: BaichuanForCausalLM(BaichuanConfig(**SIZES, **INNER))),
    "mpt": Case(
        lambda: LinbiasMptForCausalLM(
            LinbiasMptConfig(**MPT, attn_config={"alibi": True, "qk_ln": True})
        )
    ),
    "fused": Case(lambda: fuse(BloomForCausalLM(BloomConfig(**BLOOM)))),
    "seq2seq": Case(
        lambda: LinbiasForConditionalGeneration(LinbiasSeq2SeqConfig(**SIZES, **ROLES)), "written"
    ),
    "encoder": Case(lambda: LinbiasBertForMaskedLM(encoder()), types=True),
    "token": Case(
        lambda: LinbiasBertForTokenClassification(encoder(num_labels=CLASSES)), "classes", True
    ),
    "text": Case(lambda: classifier(num_labels=CLASSES), "class", True),
    "number": Case(lambda: classifier(num_labels=1), "number", True, smooths=False),
    "several": Case(
        lambda: classifier(num_labels=CLASSES, problem_type="multi_label_classification"),
        *("flags", True),
        smooths=False,
    ),
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def texts(case: Case) -> dict[str, Tensor]:
    """Padded texts, and labels of which each row scores another number."""
    ids, place = torch.randint(4, VOCAB, (ROWS, LENGTH)), torch.arange(LENGTH)
    lengths = torch.tensor([11, 3, 7, 2, 9, 5, 4])
    mask = (place < lengths[:, None]).long()
    scored = (mask == 1) & (place >= torch.tensor([0, 1, 0, 0, 5, 2, 3])[:, None])
    given = {"input_ids": ids * mask, "attention_mask": mask}
    if case.types:
        given["token_type_ids"] = (place % 2).expand(ROWS, -1)
    if case.labels == "written":
        given["decoder_input_ids"] = torch.cat([torch.full((ROWS, 1), 2), ids[:, :-1]], dim=1)
    labels = {
        "class": ids[:, 0] % CLASSES,
        "number": ids[:, 0] / VOCAB,
        "flags": (ids[:, :CLASSES] % 2).float(),
        "classes": (ids % CLASSES).masked_fill(~scored, -100),
    }
    return given | {"labels": labels.get(case.labels, ids.masked_fill(~scored, -100))}


def rows_of(batch: dict[str, Tensor]) -> Any:
    from datasets import Dataset

    return Dataset.from_dict({name: x.tolist() for name, x in batch.items()})


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    quiet = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
    step = {"learning_rate": 0.0, "max_steps": 1, "max_grad_norm": 0, "logging_strategy": "no"}
    return TrainingArguments(str(folder), **quiet, **step, **changes)


class Watch(TrainerCallback):
    """Keeps the gradient of a step."""

    gradient: Tensor

    def on_pre_optimizer_step(self, *_: Any, model: Any = None, **__: Any) -> None:
        parts = [p.grad.flatten().double() for p in model.parameters() if p.grad is not None]
        self.gradient = torch.cat(parts)


@each_case
def test_trainer_hands_a_model_all_that_it_reads(case: Case, tmp_path: Path) -> None:
    model, batch = case.make().eval(), texts(case)
    del batch["labels"]
    predicted = Trainer(model, arguments(tmp_path)).predict(rows_of(batch)).predictions
    with torch.no_grad():
        expected = model(**batch).logits
    torch.testing.assert_close(torch.tensor(predicted), expected)
    assert {"input_ids", "attention_mask", "labels"} <= {
        *inspect.signature(model.forward).parameters
    }


@each_case
def test_accumulated_parts_have_the_gradient_of_one_batch(case: Case, tmp_path: Path) -> None:
    model, batch = case.make(), texts(case)
    gradients = []
    for size, parts in ((ROWS, 1), (1, ROWS), (2, 4), (3, 3)):
        how = {"per_device_train_batch_size": size, "gradient_accumulation_steps": parts}
        watch = Watch()
        args = arguments(tmp_path, **how)
        Trainer(model, args, train_dataset=rows_of(batch), callbacks=[watch]).train()
        gradients.append(watch.gradient)
    model.zero_grad()
    model(**batch).loss.backward()
    own = [p.grad.flatten().double() for p in model.parameters() if p.grad is not None]
    for gradient in gradients:
        most = 1e-5 * float(gradient.abs().max())
        torch.testing.assert_close(gradient, torch.cat(own), rtol=0, atol=most)


@pytest.mark.parametrize(
    "case", [case for case in CASES.values() if case.smooths], ids=lambda case: case.labels
)
def test_label_smoothing_scores_what_the_loss_scores(case: Case, tmp_path: Path) -> None:
    """Hardly smoothed at all it is the loss: of causal models, that of the next token."""
    model, batch = case.make().eval(), texts(case)
    smoothing = Trainer(model, arguments(tmp_path, label_smoothing_factor=1e-9))
    with torch.no_grad():
        expected = model(**batch).loss
        smoothed = smoothing.compute_loss(model, dict(batch))
    torch.testing.assert_close(smoothed, expected, check_dtype=False)


PACKED = [name for name, case in CASES.items() if case.labels == "tokens"]


@pytest.mark.parametrize("name", PACKED)
def test_a_flattened_batch_is_read_and_learned_as_each_of_its_texts(name: str) -> None:
    model = CASES[name].make().double().eval()
    texts, weights = [torch.randint(4, VOCAB, (n,)) for n in (5, 2, 9, 5)], [*model.parameters()]
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    batch = dict(collate([{"input_ids": text.tolist()} for text in texts]))
    assert set(MARKS) < set(batch)
    # Trainer keeps their columns, and a batch without position_ids is refused, not read as one.
    assert {*MARKS, "position_ids"} <= {*inspect.signature(model.forward).parameters}
    marks = {name: batch[name] for name in ("input_ids", *MARKS)}
    with pytest.raises(ValueError, match="position_ids must be given by name beside cu_seq_lens"):
        model(**marks)
    labels = torch.cat(texts)[None].masked_fill(batch["position_ids"] == 0, -100)
    marked = model(**batch | {"labels": None})
    alone = [model(x[None]).logits for x in texts]
    assert_same(marked.logits, torch.cat(alone, dim=1))
    assert marked.get("past_key_values") is None
    each = zip(texts, labels.split([len(x) for x in texts], dim=1), strict=True)
    losses = [model(x[None], labels=y).loss * (y != -100).sum() for x, y in each]
    found = [model.train()(**batch | {"labels": labels}).loss, sum(losses) / 17]
    gradients = [
        torch.cat(
            [
                x.flatten()
                for x in torch.autograd.grad(loss, weights, allow_unused=True)
                if x is not None
            ]
        )
        for loss in found
    ]
    torch.testing.assert_close(*found, rtol=1e-5, atol=0)
    size = 1e-6 * float(gradients[1].abs().max())
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=size)
    del batch["position_ids"]
    message = r"position_ids must be given by name beside cu_seq_lens_q, .* got None"
    with pytest.raises(ValueError, match=message):
        model(**batch)


@pytest.mark.parametrize("name", [name for name in CASES if name != "fused"])
def test_unknown_arguments_are_named(name: str) -> None:
    case = CASES[name]
    model = case.make()
    for each in (model, model.get_encoder() if name == "seq2seq" else model.base_model):
        if name != "mpt" or each is model:  # whose body is Transformers' own
            with pytest.raises(TypeError, match=r"forward\(\) .* argument 'no_such'"):
                each(torch.ones(1, 3, dtype=torch.int64), no_such=1)


@pytest.mark.parametrize("name", ["causal", "masked", "seq2seq", "encoder", "token", "text"])
def test_a_subclass_of_any_name_has_the_same_loss(name: str) -> None:
    """Transformers chooses losses by the names of classes."""
    case = CASES[name]
    model, batch = case.make().eval(), texts(case)
    before = model(**batch).loss
    mine = type("Mine", (type(model),), {})(model.config).to(model.dtype).eval()
    mine.load_state_dict(model.state_dict())
    assert torch.equal(mine(**batch).loss, before)
