"""The definition once more, written out by hand in NumPy in a type wider than the one under test.

float64 is the truth for the narrower types, long double for float64. It must agree with
`linbias.attention` (test_definition.py); it adds what that leaves out: key ranges and dropout.
"""

import numpy as np

from cases import Case, Inputs


def true_attention(
    inputs: Inputs,
    case: Case,
    wide: type = np.float64,
    seed: int = 0,
    order: np.ndarray | slice = np.s_[:],
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return {out, lse} and the gradients; keys are taken in the order of these indices."""
    names = ("q", "k", "v", "left", "right", "positions", "query_positions", "dout", "dlse")
    arrays = {n: getattr(inputs, n) for n in names}
    q, k, v, left, right, x, xq, dout, dlse = (
        None if array is None else array.astype(wide) for array in arrays.values()
    )
    keep = keep_mask(seed, case) if case.dropout else np.ones((case.B, case.H, 1, case.S))
    share = (keep.astype(wide) / (1 - wide(case.dropout)))[..., order]
    results = {"out": np.zeros_like(dout), "lse": np.zeros_like(dlse)}
    gradients = {
        n: np.zeros_like(a)
        for n, a in zip(arrays, (q, k, v, left, right, x, xq), strict=False)
        if a is not None
    }
    slopes_given = {"left": left} if right is None else {"left": left, "right": right}
    for b in range(case.B):
        for h in range(case.H):
            g = h // (case.H // case.G)
            of_head = {n: h if a.ndim == 1 else (b, h) for n, a in slopes_given.items()}
            slopes = [left[of_head["left"]], np.inf if case.causal else left[of_head["left"]]]
            if right is not None:
                slopes[1] = right[of_head["right"]]
            keys_in_order = np.arange(case.S)[order]
            hidden, reaches, back = _reach(case, b, g, slopes, keys_in_order)
            if x is not None:
                of_keys = (b, h) if x.ndim == 3 else b
                distance = xq[b, h][:, None] - x[of_keys][order]
                reaches = np.where(back, distance, 0), np.where(back, 0, -distance)
            keys, values = k[b, g][order], v[b, g][order]
            scale = wide(case.D) ** wide(-0.5) if case.scale is None else wide(case.scale)
            score = scale * (q[b, h] @ keys.T)
            for slope, reach in zip(slopes, reaches, strict=True):
                score = score - (0 if np.isinf(slope) else slope) * reach.astype(wide)
            score[hidden] = -np.inf
            row_max = score.max(1, keepdims=True, initial=-np.inf)
            row_max[np.isneginf(row_max)] = 0
            weight = np.exp(score - row_max)
            row_sum = weight.sum(1, keepdims=True)
            with np.errstate(divide="ignore"):
                results["lse"][b, h] = (row_max + np.log(row_sum))[:, 0]
            weight = weight / np.where(row_sum == 0, 1, row_sum)
            dropped = weight * share[b, h]
            results["out"][b, h] = dropped @ values
            dweight = (dout[b, h] @ values.T) * share[b, h]
            center = (dout[b, h] * results["out"][b, h]).sum(1) - dlse[b, h]
            dscore = weight * (dweight - center[:, None])
            gradients["q"][b, h] = scale * dscore @ keys
            gradients["k"][b, g, order] += scale * dscore.T @ q[b, h]
            gradients["v"][b, g, order] += dropped.T @ dout[b, h]
            if x is not None:
                of_left, of_right = (wide(0 if np.isinf(slope) else slope) for slope in slopes)
                pull = np.where(back, of_left, -of_right) * dscore
                gradients["query_positions"][b, h] = -pull.sum(1)
                gradients["positions"][of_keys][order] += pull.sum(0)
            names = ("left", "left" if right is None and not case.causal else "right")
            for name, slope, reach in zip(names, slopes, reaches, strict=True):
                if name in gradients and not np.isinf(slope):
                    gradients[name][of_head[name]] -= (dscore * reach).sum()
    return results, gradients


def _reach(
    case: Case, b: int, g: int, slopes: list, keys: np.ndarray
) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray], np.ndarray]:
    """Which keys are hidden, how far each lies to either side, and whether left, [T, S]."""
    first, end = case.ranges[b, g]
    distance = (np.arange(case.T)[:, None] + case.starts[b]) - keys
    reaches = np.maximum(distance, 0), np.maximum(-distance, 0)
    hidden = np.broadcast_to((keys < first) | (keys >= end), distance.shape)
    if case.rows:
        low, high = np.split(case.row_ranges[b], 2, axis=1)
        hidden = hidden | (keys < low) | (keys >= high)
    for slope, reach in zip(slopes, reaches, strict=True):
        hidden = hidden | ((reach > 0) & np.isinf(slope))
    return hidden, reaches, distance >= 0


def keep_mask(seed: int, case: Case) -> np.ndarray:
    """The dropout mask [B, H, T, S] by the rule in linbias/torch/dropout.py."""
    b_h = np.arange(case.B * case.H, dtype=np.uint32).reshape(case.B, case.H, 1, 1)
    t = np.arange(case.T, dtype=np.uint32)[:, None]
    s = np.arange(case.S, dtype=np.uint32)
    row = _mix(_mix(_mix(np.uint32([seed])) ^ b_h) ^ t)
    return _mix(row ^ _mix(s)) >= round(case.dropout * 2**32)


def _mix(x: np.ndarray) -> np.ndarray:
    x = x ^ (x >> np.uint32(16))
    x = x * np.uint32(0x7FEB352D)
    x = x ^ (x >> np.uint32(15))
    x = x * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))
