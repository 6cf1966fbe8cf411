"""`MultiheadAttention` with tokens at positions and points; CROMA's and TITAN's attention."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import linbias
import linbias.torch
from linbias.torch import MultiheadAttention, PointAttention


def layer(*args, **options):
    torch.manual_seed(0)
    return MultiheadAttention(*args, **{"batch_first": True} | options)


def among_points(*args, **options):
    torch.manual_seed(0)
    return PointAttention(*args, **options)


def heads_of(module, x):
    """q, k and v [B, heads, length, D]."""
    projections = module.q_proj, module.k_proj, module.v_proj
    return [p(x).unflatten(-1, (4, 3)).transpose(1, 2).detach() for p in projections]


def through(module, out):
    """The layer's output from that of its heads, [B, H, T, D]."""
    return module.out_proj(torch.as_tensor(out).float().transpose(1, 2).flatten(2))


STAMPS = torch.tensor(np.cumsum(np.random.default_rng(0).exponential(size=(2, 4, 9)), -1))


@pytest.mark.parametrize("variant", ("causal", "symmetric", "directional"))
@pytest.mark.parametrize("positions", (STAMPS, STAMPS[:, 0]), ids=("per head", "shared"))
def test_positions_are_those_of_the_definition(variant, positions):
    module, x = layer(12, 4, variant=variant), torch.randn(2, 9, 12)
    options = {"causal": variant == "causal", "positions": positions.numpy()}
    if variant != "causal":
        options["right_slopes"] = module.right_slopes.numpy()
    arrays = (array.double().numpy() for array in heads_of(module, x))
    trace = linbias.explain(*arrays, module.slopes.numpy(), **options)
    out, weights = module(x, positions=positions, need_weights=True, average_attn_weights=False)
    np.testing.assert_allclose(weights.detach(), trace.weights, atol=1e-6)
    torch.testing.assert_close(out, through(module, trace.output))


def test_positions_in_every_layout_and_with_padding():
    module, x = layer(12, 4, variant="symmetric"), torch.randn(2, 9, 12)
    out = module(x, positions=STAMPS)[0]
    assert not torch.allclose(out, module(x)[0], atol=1e-3)
    alone = module(x[0], positions=STAMPS[0])[0]
    torch.testing.assert_close(alone, out[0])
    module.batch_first = False
    turned = module(x.transpose(0, 1), positions=STAMPS)[0]
    torch.testing.assert_close(turned.transpose(0, 1), out)
    module.batch_first = True
    padding = torch.zeros(2, 9, dtype=torch.bool)
    padding[0, 6:] = True
    padded = module(x, positions=STAMPS, key_padding_mask=padding)[0]
    short = module(x[:1, :6], positions=STAMPS[:1, :, :6])[0]
    torch.testing.assert_close(padded[:1, :6], short)
    # Queries at the last of the keys: a chunk of a causal sequence.
    causal = layer(12, 4)
    chunk = causal(x[:, 6:], x, positions=STAMPS)[0]
    torch.testing.assert_close(chunk, causal(x, positions=STAMPS)[0][:, 6:])


def test_gradients_reach_positions_and_learned_slopes():
    x, stamps = torch.randn(2, 9, 12), STAMPS.clone().requires_grad_()
    module = layer(12, 4, variant="symmetric", learned=True)
    module(x, positions=stamps)[0].square().sum().backward()
    assert stamps.grad.abs().max() > 0
    module = among_points(12, 4, learned=True)
    module(x, torch.randn(9, 2))[0].square().sum().backward()
    assert module.log_left.grad.abs().min() > 0
    assert "log_right" not in module.state_dict()


@pytest.mark.parametrize("metric", ("euclidean", "manhattan"))
def test_points_go_to_attention_points_with_the_layers_slopes(metric):
    module = among_points(12, 4, metric=metric, schedule="halving", max_bias=8.0)
    x, points = torch.randn(2, 9, 12), torch.randn(2, 9, 3)
    q, k, v = heads_of(module, x)
    slopes = linbias.slopes(4, "halving")
    expected = linbias.torch.attention_points(q, k, v, points, slopes, metric=metric)
    torch.testing.assert_close(module(x, points)[0], through(module, expected))
    torch.testing.assert_close(module(x[0], points[0])[0], module(x, points)[0][0])


def test_points_without_slopes_change_nothing():
    x, beside = torch.randn(2, 9, 12), layer(12, 4, variant="none")
    module = among_points(12, 4, variant="none")
    torch.testing.assert_close(module(x, torch.randn(9, 2))[0], beside(x)[0])


def take_over(fused: nn.Linear, out: nn.Linear, **options) -> PointAttention:
    """Our layer with the weights of a published one, whose q, k and v come from one matrix."""
    width = out.out_features
    ours = among_points(width, options.pop("num_heads"), **options)
    bias = torch.zeros(3 * width) if fused.bias is None else fused.bias
    weights = {"in_proj_weight": fused.weight, "in_proj_bias": bias}
    ours.load_state_dict(weights | {f"out_proj.{n}": x for n, x in out.state_dict().items()})
    return ours


def softmax_of_pairs(q, k, v, bias):
    """[B, N, width] three times and [H, N, N] -> [B, N, width], the heads side by side."""
    q, k, v = (x.unflatten(-1, (len(bias), -1)) for x in (q, k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(q.shape[-1]) + bias
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v).flatten(2)


def two_series(num_heads: int) -> list[float]:
    """The slopes in both models' code: of a power of two heads, and some of twice as many."""
    power = 2 ** int(math.log2(num_heads))
    first = [2 ** (-8 * (h + 1) / power) for h in range(power)]
    others = [2 ** (-8 * (h + 1) / (2 * power)) for h in range(0, 2 * power, 2)]
    return first + others[: num_heads - power]


@pytest.mark.parametrize("implementation", ("dense", "cpu"))
def test_the_attention_of_croma(implementation):
    """Fuller, Millard and Green, 2023 (pretrain_croma.py): 16 heads over a square of patches."""
    side, width, H = 7, 64, 16
    torch.manual_seed(0)
    fused, out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
    radar, optical = torch.randn(2, 2, side**2, width)
    # Patch i lies in row i // side; the bias counts patches along the straight line.
    row, column = (torch.arange(side**2) // side, torch.arange(side**2) % side)
    apart = torch.hypot(*((x[:, None] - x).double() for x in (row, column)))
    bias = -torch.tensor(two_series(H))[:, None, None] * apart.float()
    ours = take_over(fused, out, num_heads=H, implementation=implementation)
    points = torch.stack((row, column), dim=1)
    wq, wk, wv = fused.weight.chunk(3)
    for asked in (radar, optical):
        expected = out(softmax_of_pairs(radar @ wq.T, asked @ wk.T, asked @ wv.T, bias))
        found = ours(radar, points, asked)[0]
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("implementation", ("dense", "cpu"))
def test_the_attention_of_titan(implementation):
    """Ding et al., 2024 (vision_transformer.py): 12 heads over tiles, and a class token."""
    width, H, pixels = 48, 12, 1024
    torch.manual_seed(0)
    fused, out = nn.Linear(width, 3 * width), nn.Linear(width, width)
    grid = (torch.rand(11, 17) < 0.6).nonzero()
    coordinates = torch.tensor([3517, 20011]) + pixels * grid + torch.randint(0, 9, (1, 2))
    x = torch.randn(1, 1 + len(grid), width)
    bias = torch.zeros(H, 1 + len(grid), 1 + len(grid))
    for i, a in enumerate(grid.tolist()):
        for j, b in enumerate(grid.tolist()):
            bias[:, 1 + i, 1 + j] = -math.dist(a, b) * torch.tensor(two_series(H))
    expected = out(softmax_of_pairs(*fused(x).chunk(3, dim=-1), bias))
    ours = take_over(fused, out, num_heads=H, global_tokens=1, implementation=implementation)
    places = (coordinates - coordinates.amin(0)) // pixels
    nowhere = torch.full((1, 2), -(10**6))  # not read
    for points in (places, torch.cat((nowhere, places)), places.float()[None]):
        found = ours(x, points)[0]
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6)


def by_hand(module, x, asked, places, asking, real, own):
    """out and weights [B, H, T, N] of a layer, in float64."""
    with torch.no_grad():
        w = {name: y.double() for name, y in module.state_dict().items()}
        project = lambda x, n: x.double() @ w[f"{n}_proj.weight"].T + w[f"{n}_proj.bias"]  # noqa: E731
        q, k, v = (
            project(y, n).unflatten(-1, (4, 3)).transpose(1, 2)
            for y, n in ((x, "q"), (asked, "k"), (asked, "v"))
        )
        apart = torch.cdist(asking.double(), places.double())
        bias = -module.slopes[:, None, None] * apart[..., None, :, :].expand(len(x), 1, -1, -1)
        if module.global_tokens:
            bias[..., : module.global_tokens] = 0
            if own is not None:
                bias[..., : module.global_tokens, :] = 0
        scores = q @ k.mT / math.sqrt(3) + bias
        weights = scores.masked_fill(~real[:, None, None], -torch.inf).softmax(-1).nan_to_num(0)
        if own is not None:
            weights = weights * own[:, None, :, None]
        out = (weights @ v).transpose(1, 2).flatten(2)
        return project(out, "out").float(), weights.float()


@pytest.mark.parametrize("implementation", ("dense", "cpu"))
@pytest.mark.parametrize("kind", ("right", "left", "anywhere", "numbers"))
def test_padding_among_points_may_lie_anywhere(kind, implementation):
    module = among_points(12, 4, global_tokens=1, implementation=implementation)
    x, points = torch.randn(3, 9, 12), torch.randn(3, 9, 2)
    padding = torch.zeros(3, 9, dtype=torch.bool)
    padding[1] = True
    padding[0, {"right": slice(6, 9), "left": slice(1, 5)}.get(kind, slice(2, 8, 2))] = True
    out, weights = by_hand(module, x, x, points, points, ~padding, ~padding)
    points[padding] = torch.nan
    given = padding if kind != "numbers" else torch.zeros(3, 9).masked_fill(padding, -torch.inf)
    options = {"points": points, "key_padding_mask": given}
    found = module(x, **options, need_weights=True, average_attn_weights=False)
    torch.testing.assert_close(found[0], out, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(found[1], weights, rtol=1e-5, atol=2e-6)
    mean = module(x, **options, need_weights=True)[1]
    torch.testing.assert_close(mean, weights.mean(1), rtol=1e-5, atol=2e-6)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, **options)[0], found[0])


@pytest.mark.parametrize("padded", (False, True))
def test_points_ask_other_points(padded):
    module = among_points(12, 4, global_tokens=2)
    x, asked = torch.randn(2, 5, 12), torch.randn(2, 9, 12)
    asking, points = torch.randn(5, 2), torch.randn(2, 9, 2)
    padding = torch.zeros(2, 9, dtype=torch.bool)
    padding[:, 3:7] = padded
    out, weights = by_hand(module, x, asked, points, asking, ~padding, None)
    options = {"key_padding_mask": padding} if padded else {}
    options |= {"points": points[:, 2:], "query_points": asking}
    found = module(x, key=asked, **options, need_weights=True, average_attn_weights=False)
    torch.testing.assert_close(found[0], out, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(found[1], weights, rtol=1e-5, atol=2e-6)
    options = {"points": points[1, 2:], "query_points": asking}
    if padded:
        options["key_padding_mask"] = padding[1]
    torch.testing.assert_close(module(x[1], key=asked[1], **options)[0], found[0][1])


def test_dropout_among_points_is_that_of_attention_points():
    module, x = among_points(12, 4, dropout=0.3), torch.randn(2, 9, 12)
    points = torch.randn(9, 2)
    q, k, v = heads_of(module, x)
    for dropout in (0.3, 0.0):
        torch.manual_seed(1)
        expected = linbias.torch.attention_points(q, k, v, points, dropout=dropout)
        torch.manual_seed(1)
        found = module.train(dropout > 0)(x, points)[0]
        torch.testing.assert_close(found, through(module, expected))


X = torch.zeros(2, 5, 12)
P = torch.zeros(5, 2)
NO_SIDES = "points know no left and right: variant must be symmetric or none, got"
HIDDEN = torch.zeros(2, 5) > 0
FIRST = torch.eye(2, 5) > 0  # hides token 0 of row 0
REFUSED = [
    (dict(variant="causal"), dict(), f"{NO_SIDES} 'causal'"),
    (dict(variant="asymmetric"), dict(), f"{NO_SIDES} 'asymmetric'"),
    (
        dict(),
        dict(key_padding_mask=HIDDEN[:, 1:]),
        r"key_padding_mask must be \[B, S\] = \[2, 5\], got \[2, 4\]",
    ),
    (
        dict(global_tokens=1),
        dict(key_padding_mask=FIRST),
        "key_padding_mask must not hide the 1 global tokens of a row that has others",
    ),
    (
        dict(),
        dict(key_padding_mask=-1.0 * FIRST),
        "key_padding_mask must be bool, or hold 0 and -inf alone",
    ),
    (dict(), dict(key=X[0]), "PointAttention: query, key and value must all have 3 axes"),
    (
        dict(global_tokens=2),
        dict(points=P[:4]),
        r"points must be .* all 5 keys, or of all but the 2 global ones, got \[4, 2\]",
    ),
    (dict(implementation="sdpa"), dict(), "attention_points: implementation must be one"),
    (dict(metric="cosine"), dict(), "metric must be one of"),
]


@pytest.mark.parametrize(("settings", "arguments", "words"), REFUSED)
def test_what_does_not_go_together_is_refused(settings, arguments, words):
    with pytest.raises(ValueError, match=words):
        among_points(12, 4, **settings)(X, **{"points": P} | arguments)
    with pytest.raises(ValueError, match=r"positions must have shape \[S\] = \[5\]"):
        layer(12, 4)(X, positions=torch.zeros(2, 6))


def test_each_layer_names_the_other():
    with pytest.raises(TypeError, match="tokens; attention_points and PointAttention have it"):
        MultiheadAttention(12, 4, global_tokens=1)
    with pytest.raises(TypeError, match="no argument batch_first; the batch always comes first"):
        PointAttention(12, 4, batch_first=True)
    ragged = torch.nested.nested_tensor([torch.ones(3, 12)], layout=torch.jagged)
    with pytest.raises(TypeError, match="PointAttention: nested tensors are not built; pad them"):
        PointAttention(12, 4)(ragged, torch.zeros(3, 2))


def test_nested_tensors_are_refused_with_positions():
    ragged = torch.nested.nested_tensor([torch.ones(3, 12)], layout=torch.jagged)
    with pytest.raises(ValueError, match="neither masks nor weights or positions"):
        layer(12, 4, variant="symmetric")(ragged, positions=torch.zeros(1, 3))


def test_places_may_be_lists_and_arrays():
    layer = MultiheadAttention(8, 2, variant="symmetric", batch_first=True)
    x, stamps, points = torch.randn(1, 4, 8), [0.0, 2.0, 3.0, 7.0], torch.rand(4, 2)
    want = layer(x, positions=torch.tensor(stamps))[0]
    for given in (stamps, np.array(stamps), np.array([0, 2, 3, 7]).view("m8[s]")):
        torch.testing.assert_close(layer(x, positions=given)[0], want)
        torch.testing.assert_close(layer(x[0], positions=given)[0], want[0])
    layer, padding = PointAttention(8, 2), torch.tensor([[False, False, True, False]])
    for options in ({}, {"key_padding_mask": padding}):
        want = layer(x, points, **options)[0]
        for given in (points.tolist(), points.numpy()):
            torch.testing.assert_close(layer(x, given, **options)[0], want)
