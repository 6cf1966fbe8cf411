"""`linbias.compat.chapter` and `chapter_torch` print the book chapter's tables, to the digit."""

import contextlib
import io
import subprocess
import sys

import numpy as np
import pytest
import torch

from chapter import HEADS, OUTPUT, SCALED, numbers
from linbias.compat import chapter, chapter_torch
from linbias.example import TOKENS, K, Q, V

pytestmark = pytest.mark.usefixtures("same_start")

ARRAYS = [np.array(matrix, dtype=float) for matrix in (Q, K, V)]


def printed(matrix):
    """As the chapter prints it."""
    return [[f"{x:.4f}" for x in row] for row in np.asarray(matrix).tolist()]


def chapters(table):
    return [[f"{x:.4f}" for x in row] for row in numbers(table)]


@pytest.fixture(params=["numpy", "torch"])
def chapter_result(request):
    if request.param == "numpy":
        return chapter.ALiBiAttention(d_model=4, n_heads=2).forward(*ARRAYS)
    return chapter_torch.ALiBiAttention(4, 2)(*map(torch.tensor, ARRAYS))


def test_the_chapters_tables_to_the_digit(chapter_result):
    output, weights = chapter_result
    tables = HEADS.strip().split("\n\n")
    assert isinstance(weights, list) and len(weights) == 2
    assert printed(output) == chapters(OUTPUT)
    for matrix, table in zip([*weights, (weights[0] + weights[1]) / 2], tables, strict=True):
        assert printed(matrix) == chapters(table)


def test_the_chapters_steps_lead_to_its_results():
    alibi = chapter.ALiBiAttention(4, 2)
    assert (alibi.slopes, alibi.d_k) == ([0.5, 0.25], 2)
    assert alibi.scale == np.sqrt(2)
    output, weights = alibi.forward(*ARRAYS)
    for h in range(2):
        q, k, v = (x[:, 2 * h : 2 * h + 2] for x in ARRAYS)
        scaled = alibi.scale_scores(alibi.compute_scores(q, k))
        if h == 0:
            assert printed(scaled) == chapters(SCALED)
        found = alibi.compute_weights(alibi.apply_alibi_bias(scaled, alibi.slopes[h]))
        np.testing.assert_allclose(found, weights[h])
        np.testing.assert_allclose(alibi.compute_output(found, v), output[:, 2 * h : 2 * h + 2])


def test_the_chapters_slopes_can_be_set():
    alibi = chapter.ALiBiAttention(4, 2)
    alibi.slopes = [0.0, 0.0]
    assert printed(alibi.forward(*ARRAYS)[1][0])[3] == ["0.2000"] * 5  # "on" has no preference
    module = chapter_torch.ALiBiAttention(4, 2)
    module.load_state_dict({"slopes": torch.zeros(2)})
    assert printed(module(*map(torch.tensor, ARRAYS))[1][0])[3] == ["0.2000"] * 5


def test_the_chapters_trace():
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        chapter.ALiBiAttention(4, 2).explain(*ARRAYS, TOKENS, query_idx=1)
    lines = text.getvalue().split("\n")
    assert lines[1] == "=== ALiBi trace for 'cat' (row 1) ==="
    assert lines[3:5] == ["--- Head 1 (slope=0.5) ---", "Q_h1[cat] = [0. 2.]"]
    assert lines[5] == "  score[The] = 1.4142  penalty = -0.5000  alibi = 0.9142"
    assert lines[9] == "  score[mat] = 0.0000  penalty = -1.5000  alibi = -1.5000"
    assert lines[10:12] == [
        "  softmax = [0.3791 0.152  0.3791 0.0559 0.0339]",
        "  output = [0.3961 0.1689]",
    ]
    assert lines[13] == "--- Head 2 (slope=0.25) ---"


def plain_chapter(Q, K, V, slopes, mask=None):
    """The chapter's formula, written once more."""
    size = Q.shape[1] // len(slopes)
    place = torch.arange(len(Q))
    outputs = []
    for h, slope in enumerate(slopes):
        q, k, v = (x[:, h * size : (h + 1) * size] for x in (Q, K, V))
        scores = q @ k.T / size**0.5 - slope * (place[:, None] - place).abs()
        if mask is not None:
            scores = scores.masked_fill(mask, -torch.inf)
        outputs.append(scores.softmax(-1) @ v)
    return torch.cat(outputs, dim=1)


@pytest.mark.parametrize("masked", [False, True])
def test_the_chapters_torch_class_with_masks_and_gradients(masked):
    mask = torch.ones(7, 7, dtype=torch.bool).triu(2) if masked else None
    alibi = chapter_torch.ALiBiAttention(12, 3).double()
    inputs = torch.randn(3, 7, 12, dtype=torch.float64, requires_grad=True)
    dout = torch.randn(7, 12, dtype=torch.float64)
    got, want = alibi(*inputs, mask)[0], plain_chapter(*inputs, [0.5, 0.25, 0.125], mask)
    torch.testing.assert_close(got, want)
    (found,), (expected,) = (torch.autograd.grad(x, inputs, dout) for x in (got, want))
    torch.testing.assert_close(found, expected)
    assert [name for name, _ in alibi.named_buffers()] == ["slopes"]
    assert not list(alibi.parameters())


@pytest.mark.processes
def test_the_chapters_numpy_class_loads_no_torch():
    code = "import sys, linbias; linbias.compat.chapter; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


X = torch.zeros(5, 2, 8)


def trace(tokens=TOKENS, query_idx=0):
    return chapter.ALiBiAttention(4, 2).explain(*ARRAYS, tokens, query_idx)


def other_rows():
    return chapter.ALiBiAttention(4, 2).forward(Q, K[1:], V)


def words():
    return chapter.ALiBiAttention(4, 2).forward("The", K, V)


def other_shape():
    return chapter_torch.ALiBiAttention(8, 2)(X[0], X[:, 0], X[1])


def numbers_as_mask():
    return chapter_torch.ALiBiAttention(8, 2)(*X[:3], mask=torch.ones(2, 2))


SHAPE = r"K must have shape \[N, d_model = {}\], the same N for all, got {}"
MESSAGES = [
    (lambda: chapter.ALiBiAttention(4, 3), ValueError, ": d_model must be .* n_heads = 3, got 4"),
    (other_rows, ValueError, ".forward: " + SHAPE.format(4, r"\[4, 4\]")),
    (words, TypeError, ".forward: Q must hold real numbers"),
    (lambda: trace(tokens=["The"]), ValueError, ".explain: tokens must be 5 names, got 1"),
    (lambda: trace(query_idx=-1), ValueError, r".explain: query_idx must be in \[0, 5\), got -1"),
    (lambda: chapter_torch.ALiBiAttention(0, 1), ValueError, ": d_model must be .* 1, got 0"),
    (other_shape, ValueError, ": " + SHAPE.format(8, r"\[5, 8\]")),
    (numbers_as_mask, TypeError, ": mask must hold bool, True for what is hidden, got float32"),
]


@pytest.mark.parametrize(("call", "error", "message"), MESSAGES)
def test_bad_input_is_refused_by_name(call, error, message):
    with pytest.raises(error, match="^ALiBiAttention" + message):
        call()
