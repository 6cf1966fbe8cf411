"""Masked and sequence-to-sequence models: what they train on, what is scored, gaps filled."""

import json
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer

from linbias.data.segments import (
    MaskedSegments,
    MaskTokens,
    Spans,
    SpanSegments,
    SpanTokens,
    draw_spans,
    span_batch,
    span_row,
)
from linbias.data.tokenizers import Tokenizer, byte_tokenizer, train_bpe
from linbias.explore import model as explored
from linbias.lm import generate
from linbias.lm.evaluation import evaluate
from linbias.lm.hidden import (
    evaluate_hidden,
    masked_blocks,
    masked_positions,
    span_blocks,
    spans_of_text,
)
from linbias.lm.initial import with_tokenizer_of
from linbias.lm.settings import TrainSettings
from linbias.lm.training import train
from linbias.models import (
    LinbiasConfig,
    LinbiasForConditionalGeneration,
    LinbiasForMaskedLM,
    LinbiasSeq2SeqConfig,
)
from linbias.models.loading import load
from lm_training import SETTINGS, TINY, assert_same_run, interrupt, metrics, train_into
from test_cli import run

MASK = MaskTokens(begin=2, mask=26)
TOKENS = SpanTokens(begin=2, end=3, sentinels=range(256, 263))
ASYMMETRIC = {**SETTINGS.model, "encoder_position": "asymmetric"}
MASKED = replace(SETTINGS, task="masked", model=ASYMMETRIC)
SPANS = replace(SETTINGS, task="seq2seq", model=ASYMMETRIC)


def test_sequences_hold_every_token_once_a_pass_and_mask_others_each_time():
    ids = np.arange(100, 200, dtype=np.uint8)
    segments = MaskedSegments(ids, length=21, num_segments=8, seed=3, tokens=MASK)
    batch = segments.__getitems__(list(range(8)))  # two passes of four sequences
    read, labels = batch["input_ids"], batch["labels"]
    chosen = labels != -100
    assert (read[:, 0] == 2).all() and not chosen[:, 0].any()
    assert (chosen.sum(1) == 3).all()  # 15 % of 20
    assert (read[chosen] == 26).all() and (read != 26)[~chosen].all()
    text = torch.where(chosen, labels, read)[:, 1:]
    for one in (text[:4], text[4:]):
        assert sorted(one.flatten().tolist()) == list(range(100, 180))
    assert not torch.equal(chosen[:4], chosen[4:])
    again = segments.__getitems__([5, 2])
    assert torch.equal(again["labels"], labels[[5, 2]])


@pytest.mark.parametrize("stride", [None, 1, 4, 7])
@pytest.mark.parametrize("num_tokens", [1, 9, 10, 11, 40])
def test_every_token_is_scored_once_amid_others(num_tokens, stride):
    width = min(9, num_tokens)
    found = list(masked_blocks(num_tokens, width, stride and min(stride, width)))
    assert [t for b in found for t in range(b.first, b.end)] == list(range(num_tokens))
    assert all(b.stop - b.start == width and 0 <= b.start <= b.first for b in found)
    margin = (9 - (stride or 9)) // 2
    for block in found:
        assert block.first == 0 or block.first - block.start >= margin
        assert block.end == num_tokens or block.stop - block.end >= margin


@pytest.fixture(scope="module")
def masked_model():
    torch.manual_seed(0)
    config = LinbiasConfig(**TINY, encoder_position="directional", initializer_range=0.3)
    return LinbiasForMaskedLM(config).eval()


@pytest.mark.parametrize("stride", [None, 3])
def test_the_same_tokens_are_masked_and_scored_at_every_length(masked_model, stride):
    ids = np.random.default_rng(1).integers(97, 122, 50).astype(np.uint8)
    masked = masked_positions(50)
    assert np.array_equal(masked_positions(30), masked[:30])
    losses = {}
    for length in (8, 21, 51, 200):
        result = evaluate_hidden(
            masked_model, ids, length=length, tokens=MASK, stride=stride, batch_tokens=30
        )
        assert (result.num_tokens, result.num_scored) == (50, masked.sum())
        losses[length] = result.nll
        total, right = 0.0, 0
        for block in masked_blocks(50, min(length - 1, 50), stride):
            read = np.where(masked, 26, ids)[block.start : block.stop]
            logits = masked_model(torch.tensor([[2, *read]])).logits[0, 1:].detach()
            for token in range(block.first, block.end):
                if masked[token]:
                    says = logits[token - block.start]
                    total += float(cross_entropy(says, torch.tensor(int(ids[token]))))
                    right += int(says.argmax()) == ids[token]
        assert result.nll == pytest.approx(total / masked.sum(), rel=1e-5)
        assert result.accuracy == pytest.approx(right / masked.sum())
    assert losses[51] == pytest.approx(losses[200], rel=1e-6) and losses[8] != losses[51]
    short = evaluate_hidden(masked_model, ids, length=8, tokens=MASK, limit_tokens=30)
    assert (short.num_tokens, short.num_scored) == (30, masked[:30].sum())


def put_back(read: list[int], said: list[int]) -> list[int]:
    """The text, from what is read and what is said of it."""
    spans: dict[int, list[int]] = {}
    for token in said[:-1]:
        if token in TOKENS.sentinels:
            spans[token] = span = []
        else:
            span.append(token)
    assert read[0] == 2 and said[-1] == 3 and 3 not in said[:-1]
    return [new for token in read[1:] for new in spans.get(token, [token])]


def rows_of(batch: dict[str, torch.Tensor]) -> list[tuple[list[int], list[int]]]:
    """What is read and said of each sequence, without padding."""
    mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    rows = zip(batch["input_ids"], mask, batch["labels"], strict=True)
    return [(read[seen].tolist(), said[said != -100].tolist()) for read, seen, said in rows]


def test_sequences_hold_every_token_once_a_pass_and_take_out_others_each_time():
    ids = np.arange(100, 221, dtype=np.uint8)
    segments = SpanSegments(ids, length=41, num_segments=300, seed=3, tokens=TOKENS)
    batch = segments.__getitems__(list(range(300)))  # a hundred passes of three sequences
    rows = rows_of(batch)
    for (read, said), fed in zip(rows, batch["decoder_input_ids"].tolist(), strict=True):
        assert fed[: len(said)] == [2, *said[:-1]]
        sentinels = [token for token in read if token in TOKENS.sentinels]
        assert sentinels == [token for token in said if token in TOKENS.sentinels]
        around = {(b - a) % 7 for a, b in pairwise(sentinels)}
        assert around <= {1}
    texts = [put_back(*row) for row in rows]
    for first in (0, 3, 297):
        assert sorted(chain(*texts[first : first + 3])) == list(range(100, 220))
    counts = [sum(token < 256 for token in said[:-1]) for _, said in rows]
    assert sum(counts) / (300 * 40) == pytest.approx(0.14, abs=0.01) and len(set(counts)) > 10
    assert {said[0] for _, said in rows} == {3, *TOKENS.sentinels}  # some have no span
    assert {(read[1] >= 256, read[-1] >= 256) for read, _ in rows} >= {(1, 0), (0, 1)}
    again = segments.__getitems__([5, 2])
    assert rows_of(again) == [rows[5], rows[2]]


def test_rows_of_unequal_length_are_padded_behind():
    text = np.arange(10, 20, dtype=np.uint8)
    rows = [
        span_row(text, Spans(np.array([0, 4]), np.array([3, 5])), 6, TOKENS),
        span_row(text, Spans(np.array([9]), np.array([10])), 0, TOKENS),
    ]
    batch = {name: value.tolist() for name, value in span_batch(rows, TOKENS).items()}
    assert batch["input_ids"][0] == [2, 262, 13, 256, 15, 16, 17, 18, 19, 3, 3]
    assert batch["input_ids"][1] == [2, 10, 11, 12, 13, 14, 15, 16, 17, 18, 256]
    assert batch["attention_mask"] == [[1] * 9 + [0] * 2, [1] * 11]
    assert batch["labels"] == [[262, 10, 11, 12, 256, 14, 3], [256, 19, 3, -100, -100, -100, -100]]
    assert batch["decoder_input_ids"][1][:3] == [2, 256, 19]
    assert "attention_mask" not in span_batch(rows[:1], TOKENS)


def test_the_spans_of_a_text_do_not_depend_on_what_follows():
    long = spans_of_text(20_000)
    assert (long.stops - long.starts).sum() / 20_000 == pytest.approx(0.145, abs=0.01)
    assert (long.starts[1:] > long.stops[:-1]).all() and (long.stops - long.starts).max() == 10
    for length in range(80):
        whole = long.stops[long.stops <= length]
        assert np.array_equal(spans_of_text(length).stops, whole)
    assert draw_spans(40, (1,)).stops.tolist() != draw_spans(40, (2,)).stops.tolist()
    assert any(0 in draw_spans(40, (1, i)).starts for i in range(99))
    # Results are compared: the draws stay.
    assert draw_spans(50, (0,)).starts.tolist() == [11, 34, 38]
    assert np.flatnonzero(masked_positions(5)).tolist() == [2, 3]


@pytest.mark.parametrize("stride", [10, 17, 30])
@pytest.mark.parametrize("num_tokens", [7, 30, 31, 400])
def test_every_span_is_whole_and_scored_once_amid_others(num_tokens, stride):
    width, spans = min(30, num_tokens), spans_of_text(num_tokens)
    found = list(span_blocks(num_tokens, width, min(stride, width), spans))
    assert [t for b in found for t in range(b.first, b.end)] == list(range(num_tokens))
    inside = np.zeros(num_tokens + 1, bool)
    for start, stop in zip(*spans, strict=True):
        inside[start + 1 : stop] = True
    for block in found:
        assert 0 <= block.start <= block.first < block.end <= block.stop <= num_tokens
        assert not inside[list(block)].any() and block.stop - block.start <= width
        margin = (30 - stride) // 2 - 10  # the longest span may be missing
        assert block.first == 0 or block.first - block.start >= margin
        assert block.end == num_tokens or block.stop - block.end >= margin


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LinbiasSeq2SeqConfig(**TINY, vocab_size=263, initializer_range=0.3)
    return LinbiasForConditionalGeneration(config).eval()


@torch.no_grad()
@pytest.mark.parametrize("stride", [None, 10])
def test_the_same_spans_are_scored_at_every_length(model, stride):
    ids = np.random.default_rng(1).integers(97, 122, 250).astype(np.uint8)
    spans = spans_of_text(250)
    num_scored = (spans.stops - spans.starts).sum()
    losses = {}
    for length in (21, 64, 251, 900):
        result = evaluate_hidden(
            model, ids, length=length, tokens=TOKENS, stride=stride, batch_tokens=150
        )
        assert (result.num_tokens, result.num_scored) == (250, num_scored)
        assert result.num_spans == len(spans.starts) == 9
        losses[length] = result.nll
        total, right, width = 0.0, 0, min(length - 1, 250)
        for block in span_blocks(250, width, min(stride or width, width), spans):
            read, said, scored = [2], [], []
            for place in range(block.start, block.stop):
                number = int(np.searchsorted(spans.starts, place, side="right")) - 1
                taken = number >= 0 and place < spans.stops[number]
                if taken and place == spans.starts[number]:
                    read.append(256 + number % 7)
                    said.append(256 + number % 7)
                if taken:
                    if block.first <= spans.starts[number] < block.end:
                        scored.append(len(said))
                    said.append(int(ids[place]))
                else:
                    read.append(int(ids[place]))
            fed = torch.tensor([[2, *said]])
            logits = model(torch.tensor([read]), decoder_input_ids=fed).logits[0]
            targets = torch.tensor(said, dtype=torch.int64)[scored]
            total += float(cross_entropy(logits[scored], targets, reduction="sum"))
            right += int((logits[scored].argmax(-1) == targets).sum())
        assert result.nll == pytest.approx(total / num_scored, rel=1e-5)
        assert result.accuracy == pytest.approx(right / num_scored)
    assert losses[251] == pytest.approx(losses[900], rel=1e-6) and losses[21] != losses[251]


@pytest.mark.parametrize(
    ("masks", "changes", "message"),
    [
        (True, {"length": 1}, "length must be at least 2, got 1"),
        (True, {"stride": 20}, r"stride must lie in \[1, length - 1 = 19\], got 20"),
        (True, {"limit_tokens": 1}, "text must be long enough to mask a token, got 1 tokens"),
        (False, {"length": 10}, "length must be at least 11, to hold the longest span, got 10"),
        (False, {"stride": 9}, r"stride must lie in \[10, length - 1 = 19\], got 9"),
        (False, {"stride": 20}, r"stride must lie in \[10, length - 1 = 19\], got 20"),
        (False, {"limit_tokens": 9}, "text must be long enough to take a span out of it, got 9 t"),
    ],
)
def test_what_cannot_be_scored_is_refused(masked_model, model, masks, changes, message):
    ids, tokens = np.full(50, 97), MASK if masks else TOKENS
    scored = masked_model if masks else model
    with pytest.raises(ValueError, match=f"evaluate: {message}"):
        evaluate_hidden(scored, ids, **{"length": 20, "tokens": tokens, **changes})
    why = "sees later" if masks else "reads one"
    with pytest.raises(ValueError, match=f"evaluate: model must be causal, got one that {why}"):
        evaluate(scored, ids, length=8)
    config = LinbiasSeq2SeqConfig(**TINY, encoder_position="learned", train_length=16)
    with pytest.raises(ValueError, match="evaluate: length must be at most 16, the rows"):
        evaluate_hidden(LinbiasForConditionalGeneration(config), ids, length=17, tokens=TOKENS)


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_sentinels_come_after_the_other_tokens(kind, tmp_path):
    text = "the cat sat on the mat\n" * 9
    plain = byte_tokenizer() if kind == "bytes" else train_bpe(text.encode(), 270)
    made = plain.with_sentinels()
    size = plain.vocab_size
    assert made.sentinel_ids == range(size, size + 100) and made.vocab_size == size + 100
    assert not plain.sentinel_ids and made.with_sentinels() is made
    assert made.encode(text).tolist() == plain.encode(text).tolist()
    if kind == "bytes":  # a text's bytes are its ids, whatever they spell
        assert made.encode("<extra_id_0>").tolist() == list(b"<extra_id_0>")
    made.save(tmp_path)
    assert Tokenizer.load(tmp_path).backend.to_str() == made.backend.to_str()
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    ids = theirs("the <extra_id_0> sat")["input_ids"]
    assert ids == [*plain.encode("the "), size, *plain.encode(" sat")]
    assert theirs.decode(ids) == "the <extra_id_0> sat"
    assert theirs.decode(ids, skip_special_tokens=True) == "the  sat"
    begin, end = (plain.special_ids[name] for name in ("bos_token_id", "eos_token_id"))
    assert SpanTokens.of(made) == (begin, end, made.sentinel_ids)
    with pytest.raises(ValueError, match=r"SpanTokens: tokenizer must have .* got .* 0 sentinels"):
        SpanTokens.of(plain)


@pytest.fixture(scope="module")
def span_run(corpus, tmp_path_factory):
    return train_into(SPANS, corpus, tmp_path_factory.mktemp("spans") / "run")


@pytest.mark.thorough
@pytest.mark.parametrize("settings", [MASKED, SPANS], ids=lambda settings: settings.task)
def test_a_run_that_was_stopped_ends_as_an_unbroken_one_and_another_goes_on_from_its_model(
    settings, span_run, corpus, tmp_path
):
    masks = settings.task == "masked"
    unbroken = train_into(settings, corpus, tmp_path / "unbroken") if masks else span_run
    interrupt(corpus, tmp_path / "run", 7, settings)
    assert_same_run(train_into(settings, corpus, tmp_path / "run"), unbroken)
    trained = load(unbroken, device="cpu")
    assert type(trained) is (LinbiasForMaskedLM if masks else LinbiasForConditionalGeneration)
    assert trained.config.vocab_size == (256 if masks else 356)
    position = (trained.model if masks else trained.model.encoder).position
    assert not torch.equal(position.log_left, position.log_right)

    going_on = {"init": str(unbroken), "steps": 1, "batch_size": 2, "length": 16}
    text = with_tokenizer_of(str(unbroken), corpus)
    assert np.array_equal(text.train, corpus.train)
    train(TrainSettings(task=settings.task, **going_on), text, tmp_path / "on", progress=False)
    for task in {"causal", "masked", "seq2seq"} - {settings.task}:
        said = f"task must be that of the model of init, got '{task}'"
        with pytest.raises(ValueError, match=said):
            train(TrainSettings(task=task, **going_on), text, tmp_path / "other", progress=False)


@pytest.mark.thorough
def test_training_learns_and_leaves_slopes_undecayed(corpus, tmp_path):
    long = {"steps": 40, "validate_steps": 40, "save_steps": 40, "learning_rate": 1e-2}
    spans = replace(SPANS, model=TINY, accumulation=1, batch_size=12, **long)
    measured = metrics(train_into(spans, corpus, tmp_path / "spans"))
    assert measured["loss"] < 3.3 and measured["validation_loss"] < 4.0  # from 5.9
    settings = replace(MASKED, model={**TINY, "encoder_position": "asymmetric"}, **long)
    measured = metrics(train_into(settings, corpus, tmp_path / "a"))
    assert measured["loss"] < 3.4 and measured["validation_loss"] < 4.5  # from 5.5
    frozen = replace(
        settings, learning_rate=1e-9, weight_decay=1e6, clip=0.0, steps=1, validate_steps=0
    )
    slopes = load(train_into(frozen, corpus, tmp_path / "b")).model.position.log_left.exp()
    torch.testing.assert_close(slopes.detach(), torch.tensor([2**-4, 2**-8]))


@pytest.mark.thorough
def test_gaps_are_filled_with_what_the_model_writes(span_run, monkeypatch):
    asked = []

    def writes(self: object, read: torch.Tensor, **_: object) -> torch.Tensor:
        asked.append(read.tolist())
        words = (257, *b"two", 257, *b"again", 256, *b"one", 3, *b"behind")
        return torch.tensor([[2, *b"before", *words]])

    monkeypatch.setattr(LinbiasForConditionalGeneration, "generate", writes)
    text = generate(span_run, "a <extra_id_0>, <extra_id_1>; <extra_id_2>")
    assert text == "a one, two; <extra_id_2>"
    assert asked == [[[2, *b"a ", 256, *b", ", 257, *b"; ", 258]]]
    with pytest.warns(UserWarning, match="wrote nothing for any gap of the prompt"):
        assert generate(span_run, "a <extra_id_9>") == "a <extra_id_9>"
    with pytest.raises(
        ValueError, match="generate: prompt must hold <extra_id_0> where the model"
    ):
        generate(span_run, "a")
    with pytest.raises(ValueError, match="explore: model must read one text"):
        explored.read(span_run, Path(__file__))


@pytest.mark.filterwarnings("ignore:generate. the model wrote nothing for any gap")
@pytest.mark.parametrize(
    ("task", "options"),
    [
        ("masked", "--position window --set window=4"),
        ("seq2seq", "--position directional --set position=rotary"),
    ],
)
def test_the_command_line_trains_and_scores(task, options, text, tmp_path):
    said, hid, refusal = {
        "masked": ("masked", "masked", "MODEL: must hold a causal model"),
        "seq2seq": ("written", "spans", "--prompt: must hold <extra_id_0>"),
    }[task]
    folder = tmp_path / "run"
    sizes = [word for name, value in TINY.items() for word in ("--set", f"{name}={value}")]
    words = ["train", "--task", task, *options.split(), "--corpus", text, *sizes]
    words += ["--length", 16, "--steps", 2, "--batch-size", 4, "-o", folder]
    result = run(*words, "-q")
    assert result.exit_code == 0, result.stderr
    assert f"bits per {said} token" in result.stdout
    score = ("evaluate", folder, "--corpus", text, "--split", "train", "-q")
    short, long = json.loads(run(*score, "--length", "16,64", "--json").stdout)
    assert short["num_scored"] == long["num_scored"] > 30 and short["nll"] != long["nll"]
    shown = run(*score, "--length", "16").stdout
    assert f"{hid} and scored" in shown and f"{said} token" in shown and "accuracy" in shown
    assert "is for causal models, got a Linbias" in run(*score, "--slope-scale", "0.5").stderr
    refused = run("generate", folder, "-p", "a")
    assert refused.exit_code == 2 and refusal in refused.stderr
    changes = {"--position alibi": "--position: must be None or one of ('symmetric',"}
    if task == "seq2seq":
        config = json.loads((folder / "config.json").read_text())
        assert (config["encoder_position"], config["position"]) == ("directional", "rotary")
        filled = run("generate", folder, "-p", "3 times <extra_id_0> is", "-n", 9)
        assert filled.exit_code == 0 and filled.stdout.startswith("3 times ")
        changes |= {
            "--set block=parallel": "--set block: must be 'sequential'",
            "--set decoder_layers=0": "--set decoder_layers: must be an integer of at least 1",
        }
    for changed, message in changes.items():
        failed = run(*words[:-1], tmp_path / "other", *changed.split(), "-q")
        assert failed.exit_code == 2 and message in failed.stderr


@pytest.mark.thorough
def test_parts_of_a_batch_weigh_by_their_tokens(corpus, tmp_path):
    whole = replace(SPANS, model=TINY, accumulation=1, steps=1)
    losses = [
        metrics(train_into(replace(whole, accumulation=parts), corpus, tmp_path / f"{parts}"))
        for parts in (1, 6)
    ]
    assert losses[0]["loss"] == pytest.approx(losses[1]["loss"], rel=1e-6)
