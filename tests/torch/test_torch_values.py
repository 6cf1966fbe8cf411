"""No value of a fake, meta or functional tensor is read, nor of one that a tracer records."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from linbias.torch import (
    MultiheadAttention,
    PointAttention,
    attention,
    attention_points,
    attention_varlen,
    attention_weights,
)
from linbias.torch.operators.values import known_values, may_read, readable

# Of PyTorch's own tracers and nested tensors.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")

LAYER = MultiheadAttention(16, 4, variant="asymmetric", batch_first=True)
AMONG_POINTS = PointAttention(16, 4, global_tokens=1)
QKV = "q", "k", "v"


def draw(n):
    """Every array that a call may take, of n tokens; a slope is 0."""
    numbers = torch.arange(n)
    return {
        "q": torch.randn(2, 4, n, 8),
        "k": torch.randn(2, 2, n, 8),
        "v": torch.randn(2, 2, n, 8),
        "slopes": torch.tensor([0.5, 0.1, 2.0, 0.0]),
        "right_slopes": torch.rand(2, 4),
        "key_range": torch.tensor([[0, n], [2, n - 2]]),
        "query_start": torch.tensor([0, 1]),
        "query_range": torch.stack([(numbers - 4).clamp(min=0), (numbers + 2).clamp(max=n)], 1),
        "positions": numbers.repeat(2, 1).float(),
        "query_positions": numbers.float(),
        "mask": torch.rand(n, n) < 0.7,
        "offsets": torch.tensor([0, 4, 4, n]),
        "points": torch.rand(2, n, 2),
        "num_points": torch.tensor([n, 5]),
        "x": torch.randn(2, n, 16),
        "key_padding_mask": numbers >= torch.tensor([[n], [5]]),
        "attn_mask": torch.rand(n, n) < 0.3,
        "layer": dict(LAYER.named_parameters()),
        "among_points": dict(AMONG_POINTS.named_parameters()),
    }


def packed(q, k, v, offsets, **options):
    rows = (x[0].transpose(0, 1) for x in (q, k, v))
    return attention_varlen(*rows, offsets, offsets, **options)


def halved(q, k, v, **options):
    """A window, and a scale, that are numbers made of sizes."""
    window = q.shape[2] // 2, 0
    return attention(q, k, v, window=window, scale=q.shape[3] ** -0.5, **options)


def nested(q, **options):
    jagged, at = (
        torch.nested.nested_tensor([x[0], x[1, :4]], layout=torch.jagged)
        for x in (q.transpose(1, 2), torch.arange(float(q.shape[2])).expand(2, -1))
    )
    q = jagged.transpose(1, 2)
    return attention(q, q, q, positions=at, **options).transpose(1, 2).values()


def layer(x, layer, points=None, **masks):
    """The layer with these weights."""
    module = LAYER
    if points is not None:
        module, masks["points"] = AMONG_POINTS, points
    return functional_call(module, layer, (x,), masks)[0]


# The function, the arrays that it takes, and what else.
CALLS = {
    "slopes": (attention, (*QKV, "slopes", "right_slopes"), {"causal": False}),
    "lists of slopes": (attention, QKV, {"slopes": [0.5] * 4, "tolerance": 0.1}),
    "range": (attention, (*QKV, "key_range"), {}),
    "start": (attention, (*QKV, "query_start"), {"causal": False}),
    "ranges of queries": (attention, (*QKV, "query_range"), {"window": (5, 0)}),
    "sizes as numbers": (halved, QKV, {}),
    "positions": (attention, (*QKV, "positions"), {}),
    "positions of queries": (attention, (*QKV, "positions", "query_positions"), {}),
    "a list of positions": (attention, (*QKV, "query_positions"), {"positions": list(range(9))}),
    "mask": (attention, (*QKV, "mask"), {}),
    "weights": (attention_weights, ("q", "k", "slopes", "key_range"), {}),
    "packed": (packed, (*QKV, "offsets", "slopes"), {"window": (3, 0)}),
    "points": (attention_points, (*QKV, "points", "num_points"), {"slopes": [0.5] * 4}),
    "layer": (layer, ("x", "layer", "key_padding_mask"), {}),
    "layer with a mask": (layer, ("x", "layer", "attn_mask"), {}),
    "layer among points": (layer, ("x", "among_points", "points", "key_padding_mask"), {}),
}
WITH_ONE_OF_ITS_OWN = {attention_weights, layer}
WITHOUT_MASKS = {"mask": ("sdpa", "dense"), "points": ("cpu", "dense")}


def taken(name, n):
    """A function of the arrays of a call, and these."""
    function, names, options = CALLS[name]
    names = ["layer" if x == "among_points" else x for x in names]
    drawn = draw(n)
    given = dict(zip(names, (drawn[x] for x in CALLS[name][1]), strict=True))
    return lambda arrays, **more: function(**arrays, **options, **more), given


def implementations():
    for name, (function, *_) in CALLS.items():
        of_all = (
            (None,) if function in WITH_ONE_OF_ITS_OWN else ("cpu", "blocked", "sdpa", "dense")
        )
        for implementation in WITHOUT_MASKS.get(name, of_all):
            yield name, {} if implementation is None else {"implementation": implementation}


def with_gradients(arrays):
    return tree_map(lambda x: x.detach().requires_grad_(x.is_floating_point()), arrays)


@pytest.mark.parametrize(("name", "options"), list(implementations()), ids=str)
def test_fake_tensors_take_the_shapes_of_a_call_and_its_gradients(name, options):
    run, arrays = taken(name, 9)
    out = run(arrays, **options)
    with FakeTensorMode() as mode:
        fake = tree_map(mode.from_tensor, arrays)
        fake = fake if "points" in fake else with_gradients(fake)
        found = run(fake, **options)
        assert (found.shape, found.dtype) == (out.shape, out.dtype)
        if found.requires_grad:
            found.sum().backward()
    leaves = [x for x in tree_leaves(fake) if x.requires_grad]
    assert all(x.grad is None or x.grad.shape == x.shape for x in leaves)


@pytest.mark.parametrize("name", [n for n in CALLS if "list of positions" not in n])
def test_meta_tensors_run_likewise(name):
    run, arrays = taken(name, 9)
    found = run(tree_map(lambda x: x.to("meta"), arrays))
    assert found.is_meta and found.shape == run(arrays).shape


def test_nested_fake_tensors_run_likewise():
    q = torch.randn(2, 4, 9, 8)
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        found = nested(mode.from_tensor(q))
    assert found.shape == nested(q).shape


TRACERS = {
    "real": lambda f, x: make_fx(f)(*x),
    "fake": lambda f, x: make_fx(f, tracing_mode="fake")(*x),
    "symbolic": lambda f, x: make_fx(f, tracing_mode="symbolic")(*x),
    "before dispatch": lambda f, x: make_fx(f, pre_dispatch=True)(*x),
    "functionalize": lambda f, x: functionalize(f),
}


@pytest.mark.parametrize("tracer", TRACERS)
@pytest.mark.parametrize("name", [n for n in CALLS if "list of positions" not in n])
def test_a_traced_program_gives_the_same_for_other_values(name, tracer):
    run, arrays = taken(name, 9)
    flat, names = tree_flatten(arrays)
    program = TRACERS[tracer](lambda *x: run(tree_unflatten(x, names)), flat)
    n = 30 if tracer in ("symbolic", "functionalize") else 9
    other = taken(name, n)[1]
    if tracer != "functionalize" and "offsets" in other:
        other["offsets"] = torch.tensor([0, 0, n - 1, n])  # others than those that were traced
    torch.testing.assert_close(program(*tree_leaves(other)), run(other))


@pytest.mark.parametrize("implementation", ["cpu", "blocked", "sdpa", "dense"])
def test_functionalize_passes_gradients_on(implementation):
    run, arrays = taken("slopes", 9)
    found = []
    for function in (run, functionalize(lambda x: run(x, implementation=implementation))):
        leaves = with_gradients(arrays)
        found.append(torch.autograd.grad(function(leaves).square().sum(), tree_leaves(leaves)))
    for ours, true in zip(*found, strict=True):
        torch.testing.assert_close(ours, true)


@pytest.mark.parametrize("wrong", [(-5, 100), (3, 1), (100, 200)])
@pytest.mark.parametrize("implementation", ["cpu", "blocked", "sdpa", "dense"])
def test_ranges_that_nobody_checked_end_with_the_keys(implementation, wrong):
    run, arrays = taken("ranges of queries", 9)
    run_on = lambda *x: run(dict(zip(arrays, x)), implementation=implementation)  # noqa
    program = make_fx(run_on)(*arrays.values())
    first, end = (min(max(x, 0), 9) for x in wrong)
    within = arrays | {"query_range": torch.tensor([[first, max(first, end)]] * 9)}
    beyond = arrays | {"query_range": torch.tensor([wrong] * 9)}
    torch.testing.assert_close(program(*beyond.values()), run(within))


def test_queries_that_look_for_their_keys_are_refused_where_values_are_unknown():
    run, arrays = taken("positions of queries", 9)
    with FakeTensorMode() as mode, pytest.raises(NotImplementedError, match="nor among fake"):
        run(tree_map(mode.from_tensor, arrays), causal=False)


def test_only_plain_numbers_are_readable():
    x = torch.tensor([0.5, 0.25])
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(x)
        assert readable(x) is None  # PyTorch refuses what is not fake within the mode
    for unknown in (fake, x.to("meta"), torch._neg_view(x)):
        assert readable(unknown) is known_values(unknown) is None and not may_read(unknown)
    assert readable(x) is x and may_read(x) and known_values(x).tolist() == [0.5, 0.25]

    def seen(y):
        found.append((known_values(y), may_read(y)))
        return y.sum()

    found = []
    torch.func.grad(seen)(x)
    torch.vmap(seen)(x[None])
    functionalize(seen)(x)
    assert found[0][0].tolist() == [0.5, 0.25]
    assert [values is None for values, _ in found] == [False, True, True]
    assert not any(may for _, may in found)
