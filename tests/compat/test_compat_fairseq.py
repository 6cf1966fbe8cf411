"""`linbias.compat.fairseq` gives what the paper's repository and its discussions compute."""

import pytest
import torch

import linbias
from linbias.compat import fairseq
from linbias.torch import attention_weights

pytestmark = pytest.mark.usefixtures("same_start")


@pytest.mark.parametrize("heads", [1, 3, 12])
def test_fairseqs_slopes_are_the_papers(heads):
    """The authors' recursion: test_slopes.py."""
    assert fairseq.get_slopes(heads) == linbias.slopes(heads).tolist()


def test_the_bias_by_key_number_and_the_future_mask():
    bias = fairseq.calc_alibi_bias(6, 3)
    assert bias.shape == (3, 1, 6) and bias.dtype == torch.float32
    torch.testing.assert_close(bias[1, 0, 5].item(), 5 * fairseq.get_slopes(3)[1])
    mask = fairseq.buffered_future_mask(torch.zeros(2, 6, 5, dtype=torch.bfloat16), 3)
    assert mask.shape == (3, 6, 6) and mask.dtype == torch.bfloat16
    for i in range(6):
        assert (mask[:, i, i + 1 :] == -torch.inf).all()
        assert torch.equal(mask[:, i, : i + 1], bias[:, 0, : i + 1].bfloat16())


def test_scores_with_the_future_mask_have_the_softmax_of_ours():
    q, k = torch.randn(2, 2, 4, 30, 8)
    mask = fairseq.buffered_future_mask(q[:, 0], 4)
    weights = (q @ k.mT / 8**0.5 + mask).softmax(-1)
    torch.testing.assert_close(weights, attention_weights(q, k))


def test_the_parallel_block_is_answered_with_the_models():
    with pytest.raises(ImportError, match="ParallelAttentionBlock went; LinbiasConfig"):
        from linbias.compat.fairseq import ParallelAttentionBlock  # noqa: F401


X = torch.zeros(5, 2, 8)


WRONG_VALUES = [
    (lambda: fairseq.get_slopes(-1), "get_slopes: n must be at least 1, got -1"),
    (lambda: fairseq.calc_alibi_bias(0, 2), "calc_alibi_bias: seq_len must be at least 1, got 0"),
    (
        lambda: fairseq.buffered_future_mask(X[0, 0], 2),
        r"_mask: tensor must have .*, got \[8\]",
    ),
]
WRONG_KINDS = [
    (
        lambda: fairseq.calc_alibi_bias(2, "2"),
        "^calc_alibi_bias: heads must be an integer, got '2'",
    ),
    (lambda: fairseq.buffered_future_mask(X.long(), 2), "_mask: tensor must hold .*, got int64"),
]


@pytest.mark.parametrize("error", [ValueError, TypeError])
def test_bad_input_is_refused_by_name(error):
    for call, message in WRONG_VALUES if error is ValueError else WRONG_KINDS:
        with pytest.raises(error, match=message):
            call()
