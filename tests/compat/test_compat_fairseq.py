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


def plain_block(block, x):
    """The block with its scores in memory."""
    mean = x.square().mean(-1, keepdim=True)
    normed = x * (mean + 1e-5).rsqrt() * block.norm.gamma
    fused = normed @ block.fused_attn_ff_proj.weight.T
    q, k, v, ff = fused.split(block.fused_dims, dim=-1)
    heads, n = block.heads, x.shape[1]
    q = q.reshape(*q.shape[:2], heads, -1).transpose(1, 2) * k.shape[-1] ** -0.5
    bias = fairseq.buffered_future_mask(x, heads)
    out = (q @ k[:, None].mT + bias).softmax(-1) @ v[:, None]
    inner, gate = ff.chunk(2, -1)
    ff = inner * gate * torch.sigmoid(gate)
    out = out.transpose(1, 2).reshape(len(x), n, -1)
    return out @ block.attn_out.weight.T + ff @ block.ff_out[1].weight.T


@pytest.mark.parametrize("heads", [4, 6])
def test_the_parallel_block(heads):
    block = fairseq.ParallelAttentionBlock(dim=20, dim_head=8, heads=heads, ff_mult=3)
    torch.nn.init.normal_(block.norm.gamma)
    x = torch.randn(2, 33, 20, requires_grad=True)
    dout = torch.randn(2, 33, 20)
    got, want = block(x), plain_block(block, x)
    torch.testing.assert_close(got, want)
    leaves = [x, *block.parameters()]
    gradients = (torch.autograd.grad(out, leaves, dout) for out in (got, want))
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    shapes = {name: tuple(weight.shape) for name, weight in block.state_dict().items()}
    assert shapes == {
        "norm.gamma": (20,),
        "fused_attn_ff_proj.weight": (8 * heads + 16 + 120, 20),
        "attn_out.weight": (20, 8 * heads),
        "ff_out.1.weight": (20, 60),
    }


X = torch.zeros(5, 2, 8)


WRONG_VALUES = [
    (lambda: fairseq.get_slopes(-1), "get_slopes: n must be at least 1, got -1"),
    (lambda: fairseq.calc_alibi_bias(0, 2), "calc_alibi_bias: seq_len must be at least 1, got 0"),
    (
        lambda: fairseq.buffered_future_mask(X[0, 0], 2),
        r"_mask: tensor must have .*, got \[8\]",
    ),
    (lambda: fairseq.ParallelAttentionBlock(8, heads=0), "Block: heads must be at least 1, got 0"),
    (lambda: fairseq.ParallelAttentionBlock(8)(X[0]), r"^ParallelA.*: x must .* \[2, 8\]"),
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
