"""What the records of an experiment say, and that the figure can be read."""

import math
import re

import pytest

from linbias.lm.evaluation import Evaluation
from linbias.lm.report import figures, findings
from linbias.lm.report.records import EvaluationRecord, ExtrapolationResults, TrainingRecord
from linbias.lm.settings import ExtrapolateSettings, TrainSettings
from linbias.lm.training import LanguageModelMetrics
from linbias.methods import METHODS


def record(method: str, test_length: int, bits: float, seed: int = 0) -> EvaluationRecord:
    """Tokens are bytes, each of them predicted with so many bits."""
    nats = bits * math.log(2.0)
    return by_position([nats] * test_length, [10] * test_length, method=method, seed=seed)


def by_position(
    losses: list[float | None],
    counts: list[int],
    method: str = "alibi",
    seed: int = 0,
    bytes_per_token: int = 1,
) -> EvaluationRecord:
    total = sum((loss or 0.0) * count for loss, count in zip(losses, counts, strict=True))
    evaluation = Evaluation(
        length=len(losses),
        stride=None,
        num_tokens=sum(counts),
        num_bytes=sum(counts) * bytes_per_token,
        nll=total / sum(counts),
        tokens_per_second=1.0,
        peak_memory_bytes=1,
        loss_by_position=tuple(losses),
        count_by_position=tuple(counts),
    )
    return EvaluationRecord(method, 4, seed, evaluation, date="today")


def test_findings_compare_the_longest_test_with_the_training_length():
    records = [
        *(record("alibi", 4, 3.0), record("alibi", 64, 2.97)),
        *(record("rotary", 4, 2.9), record("rotary", 64, 3.48)),
        *(record("t5", 4, 3.0), record("t5", 64, 3.01)),
        record("learned", 4, 3.2),
    ]
    verdicts = {found.method: found.verdict for found in findings.findings(records)}
    assert verdicts == {
        "alibi": "no worse",
        "rotary": "clearly worse",
        "t5": "slightly worse",
        "learned": "limited to its training length",
    }
    alibi = findings.findings(records)[0]
    assert str(alibi) == (
        "no worse at 16x the training length of 4: 3.000 to 2.970 bits per byte (-1.0%, one seed)"
    )
    assert "--seeds 0,1,2" in cautions(records)[-1]


def test_a_mean_of_seeds_says_so_and_needs_no_caution():
    records = [record("t5", n, 3.0, seed=seed) for n in (4, 64) for seed in (0, 1)]
    (found,) = findings.findings(records)
    assert str(found).endswith("3.000 to 3.000 bits per byte (0.0%, mean of 2 seeds)")
    assert cautions(records) == []
    # One method with one seed is enough for it.
    assert len(cautions([*records, record("alibi", 4, 3.0)])) == 1


def cautions(records):
    results = ExtrapolationResults({}, ExtrapolateSettings(), (), tuple(records))
    return findings.cautions(results)


def trained(tokens, num_parameters=1_000_000):
    metrics = LanguageModelMetrics(
        **{"steps": 1, "seconds": 1.0, "peak_memory_bytes": 1, "num_processes": 1, "loss": 1.0},
        tokens=tokens,
        num_parameters=num_parameters,
    )
    return TrainingRecord("alibi", 4, 0, metrics, date="today")


def test_a_short_training_says_what_it_cannot_show():
    said = findings.scope([trained(250_000, 500_000), trained(250_000)])
    assert "have 1.00 M parameters and read 0.5 tokens for each parameter" in said
    assert "It cannot show which method is best after a full training" in said
    assert findings.scope([trained(20_000_000)]) is None
    assert findings.scope([]) is None


def test_a_change_that_rounds_to_zero_has_no_sign():
    changes = [findings.change_in_words(c) for c in (-0.0004, 0.0004, -0.0006, 0.05)]
    assert changes == ["0.0%", "0.0%", "-0.1%", "+5.0%"]


def test_a_curve_is_the_mean_and_range_over_seeds():
    records = [record("alibi", 4, 3.0), record("alibi", 4, 2.0, seed=1), record("none", 4, 9.0)]
    (point,) = findings.curve(records, "alibi", 4)
    assert point == pytest.approx((4, 2.5, 2.0, 3.0))


def test_loss_by_position_is_pooled_by_count():
    records = [
        by_position([1.0, 2.0, 6.0, None], [100, 100, 100, 0]),
        by_position([3.0, 2.0, 2.0, 4.0], [300, 100, 300, 100]),
    ]
    positions, bits = findings.loss_by_position(records)
    assert positions == pytest.approx([1.0, 2.0, 3.0, 4.0])
    nats = [(1 + 9) / 4, 2.0, (6 + 6) / 4, 4.0]
    assert bits == pytest.approx([value / math.log(2.0) for value in nats])


def test_loss_by_position_is_in_bits_per_byte_whatever_a_token_is():
    bits = [
        findings.loss_by_position([by_position([2.0, 1.0], [100, 100], bytes_per_token=size)])[1]
        for size in (1, 4)
    ]
    assert bits[0] == pytest.approx([2.0 / math.log(2.0), 1.0 / math.log(2.0)])
    assert bits[1] == pytest.approx([value / 4 for value in bits[0]])


def test_positions_come_from_the_shortest_segments_and_rare_ones_are_pooled():
    records = [by_position([1.0], [400]), by_position([9.0, 2.0, 3.0, 4.0], [60, 60, 60, 60])]
    positions, bits = findings.loss_by_position(records)
    # position 1 of the short segments; then 2 and 3 pooled; 4 alone is too rare to be shown
    assert positions == pytest.approx([1.0, math.sqrt(6)])
    assert bits == pytest.approx([1.0 / math.log(2.0), 2.5 / math.log(2.0)])


def test_slopes_that_depend_on_the_segment_leave_the_longest_segments_only():
    records = tuple(record("alibi", n, 3.0) for n in (4, 8, 16))
    for model, kept in (({}, [4, 8, 16]), ({"slope_scale": "interpolate"}, [16])):
        settings = ExtrapolateSettings(training=TrainSettings(model=model, steps=1))
        results = ExtrapolationResults({}, settings, (), records)
        assert [r.test_length for r in findings.records_by_position(results)] == kept


def test_labels_at_line_ends_do_not_overlap():
    methods = ["alibi", "sinusoidal", "rotary", "learned", "t5", "none"]
    bits = [3.0, 3.001, 3.001, 3.1, 3.1, 4.0]  # groups of lines that nearly meet
    records = [record(m, n, b) for m, b in zip(methods, bits, strict=True) for n in (4, 64)]
    figure = figures.loss_by_length(records)
    figure.draw_without_rendering()
    names = tuple(METHODS[method].label for method in methods)
    labels = [text for text in figure.axes[0].texts if text.get_text().startswith(names)]
    boxes = [label.get_window_extent() for label in labels]
    assert len(boxes) == 6
    overlaps = [(a, b) for a in boxes for b in boxes if a is not b and a.overlaps(b)]
    assert not overlaps
    (width, _) = figure.get_size_inches() * figure.dpi
    assert all(0 <= label.x0 and label.x1 <= width for label in boxes)  # nothing is cut


def test_labels_of_ticks_do_not_overlap():
    records = [record("alibi", n, 3.0) for n in (4, 1024, 1536, 2048)]
    figure = figures.loss_by_length(records)
    figure.draw_without_rendering()
    boxes = [label.get_window_extent() for label in figure.axes[0].get_xticklabels()]
    assert len(boxes) == 2  # the shortest and the longest
    assert not boxes[0].overlaps(boxes[1])


def test_what_holds_much_is_shown_in_short(corpus):
    length = 4096
    evaluation = by_position([math.log(2.0)] * length, [1] * length).evaluation
    assert repr(evaluation) == (
        "Evaluation(length=4096, stride=None, num_tokens=4096, nll=0.6931, perplexity=2.0000, "
        "bits_per_byte=1.0000)"
    )
    assert re.fullmatch(
        r"Corpus\('.*text\.txt', train=\d+ tokens, valid=\d+ tokens, test=\d+ tokens, "
        r"vocab_size=256\)",
        repr(corpus),
    )
    assert repr(corpus.tokenizer) == "Tokenizer(vocab_size=256)"
