"""The plain computation whose error sets the budget: the definition in PyTorch."""

import math
from dataclasses import replace

import numpy as np
import torch

from cases import Case, Inputs
from truth import keep_mask


def plain_attention(
    inputs: Inputs,
    case: Case,
    dtype: torch.dtype,
    seed: int = 0,
    turn: int = 0,
    order: np.ndarray | None = None,
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return {out, lse} and the gradients {q, k, v, left, right} as float64 arrays.

    turn rotates the entries of q and k, and the keys are taken in the order of these indices: the
    same sums in another order, as good a computation, rounded otherwise.
    """
    inputs = replace(inputs, q=np.roll(inputs.q, turn, -1), k=np.roll(inputs.k, turn, -1))
    leaves = {
        name: torch.tensor(getattr(inputs, name), dtype=dtype, requires_grad=True)
        for name in ("q", "k", "v", "left", "right")
        if getattr(inputs, name) is not None
    }
    if case.places:  # whose differences are to be right in any dtype
        leaves["positions"] = torch.tensor(inputs.positions, requires_grad=True)
        leaves["query_positions"] = torch.tensor(inputs.query_positions, requires_grad=True)
    keep = torch.from_numpy(keep_mask(seed, case)) if case.dropout else None
    keys = torch.arange(case.S) if order is None else torch.tensor(order)
    out, lse = torch.zeros(0, case.H, case.T, case.E), torch.zeros(0, case.H, case.T)
    heads = [
        _one_head(leaves, case, b, h, None if keep is None else keep[b, h], keys)
        for b, h in np.ndindex(case.B, case.H)
    ]
    if heads:
        out, lse = (
            torch.stack(x).view(case.B, *full.shape[1:])
            for x, full in zip(zip(*heads, strict=True), (out, lse), strict=True)
        )
        dlse = torch.tensor(inputs.dlse, dtype=dtype)
        loss = (out * torch.tensor(inputs.dout, dtype=dtype)).sum()
        loss = loss + (lse * dlse)[lse.detach() > -math.inf].sum()
        loss.backward()
    gradients = {
        name: (torch.zeros_like(leaf) if leaf.grad is None else leaf.grad).double().numpy()
        for name, leaf in leaves.items()
    }
    gradients |= {name: np.roll(gradients[name], -turn, -1) for name in "qk"}
    results = {"out": out.detach().double().numpy(), "lse": lse.detach().double().numpy()}
    return results, gradients


def _one_head(leaves, case, b, h, keep, keys):
    q, k, v = leaves["q"][b, h], leaves["k"][b, h // (case.H // case.G)], leaves["v"]
    k, v = k[keys], v[b, h // (case.H // case.G)][keys]
    keep = None if keep is None else keep[:, keys]
    left, right = (
        None if slope is None else slope[h] if slope.dim() == 1 else slope[b, h]
        for slope in (leaves["left"], leaves.get("right"))
    )
    if right is None and not case.causal:
        right = left
    first, end = case.ranges[b, h // (case.H // case.G)].tolist()
    position = torch.arange(case.T)[:, None] + int(case.starts[b])
    order = distance = position - keys
    if case.places:
        x = leaves["positions"][b] if leaves["positions"].dim() == 2 else leaves["positions"][b, h]
        distance = (leaves["query_positions"][b, h][:, None] - x[keys]).to(q.dtype)
    score = q @ k.T * (case.D**-0.5 if case.scale is None else case.scale)
    for slope, sign, here in ((left, 1, order >= 0), (right, -1, order < 0)):
        if slope is None or torch.isinf(slope):
            score = score.masked_fill(here & (order != 0), -math.inf)
        else:
            score = score - slope * torch.where(here, sign * distance, 0)
    inside = (keys >= first) & (keys < end)
    if case.rows:
        low, high = torch.from_numpy(case.row_ranges[b]).split(1, 1)
        inside = inside & (keys >= low) & (keys < high)
    score = score.masked_fill(~inside, -math.inf)
    rows = (score > -math.inf).any(1)
    weight = torch.softmax(score[rows], 1)
    if keep is not None:
        weight = weight * keep[rows] / (1 - case.dropout)
    out = q.new_zeros(case.T, case.E).index_put((rows,), weight @ v)
    lse = q.new_full((case.T,), -math.inf).index_put((rows,), torch.logsumexp(score[rows], 1))
    return out, lse
