"""Attention over points with the whole bias in memory: the definition in PyTorch operations."""

from torch import Tensor
from torch.nn import functional as F

from linbias._dispatch import Abilities
from linbias.torch.points.geometry import PointInputs, distances

NAME = "dense"
ABILITIES = Abilities(
    runs_on="any PyTorch device",
    how="the whole score matrix, for reading and checking",
    memory="length x length",
    has=("dropout", "transformed"),
    higher_derivatives=True,
)
why_not = ABILITIES.lacks


def attention(inputs: PointInputs) -> tuple[Tensor, Tensor]:
    """Return out [B, H, N, E] in q's dtype and lse [B, H, N], wide."""
    wide = inputs.slopes.dtype
    apart = distances(inputs.points, inputs.points, inputs.manhattan).to(wide)
    nowhere = inputs.global_tokens  # they come first, and lie at distance 0 of everything
    apart = F.pad(apart, (nowhere, 0, nowhere, 0))
    n = inputs.q.shape[1] // max(1, inputs.k.shape[1])
    k, v = (x.to(wide).repeat_interleave(n, dim=1) for x in (inputs.k, inputs.v))
    score = inputs.q.to(wide) @ k.mT * inputs.scale
    score = score - inputs.slopes[:, :, None, None] * apart[:, None]
    lse = score.logsumexp(-1) if score.shape[-1] else score.sum(-1)
    return (score.softmax(-1) @ v).to(inputs.q.dtype), lse
