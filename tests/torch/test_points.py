"""`linbias.torch.attention_points`: its implementations against the definition in NumPy."""

import math
import os
import signal
from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import linbias.torch
from budget import assert_within_budget
from cases import round_to
from contract import spread
from linbias._request import TOLERANCE
from linbias.kernels import core
from linbias.torch.points import blocked as points_blocked
from linbias.torch.points import cpu as points_cpu
from linbias.torch.points import functional as points
from linbias.torch.points.geometry import along_a_curve

IMPLEMENTATIONS = ("dense", "blocked", "cpu")
NEAR_TO_FAR = {"blocked": points_blocked, "cpu": points_cpu}
DTYPES = ("float64", "float32", "bfloat16", "float16")
METRICS = ("euclidean", "manhattan")
attention_points = linbias.torch.attention_points


@dataclass(frozen=True)
class Case:
    name: str
    N: int
    A: int = 2
    place: str = "anywhere"
    metric: str = "euclidean"
    global_tokens: int = 0
    B: int = 2
    H: int = 3
    G: int = 3
    per_batch: bool = False  # slopes and points
    scale: float | None = None
    slopes: tuple[float, ...] = (2.0, 0.25, 0.0)
    D: int = 5
    E: int = 7

    def __str__(self) -> str:
        return self.name

    def make(self, dtype: str) -> dict[str, np.ndarray]:
        """q, k, v, dout and dlse, slopes and points: float64 arrays whose values fit the dtype."""
        rng = np.random.default_rng(self.N + 7 * self.A)
        size, rows = (self.B, self.H, self.N), (self.B, self.G, self.N)
        shapes = {"q": (*size, self.D), "k": (*rows, self.D), "v": (*rows, self.E)}
        shapes |= {"dout": (*size, self.E), "dlse": size}
        arrays = {name: round_to(rng.normal(size=shape), dtype) for name, shape in shapes.items()}
        slopes = np.resize(self.slopes, self.H)
        if self.per_batch:
            slopes = np.stack([slopes / (b + 1) for b in range(self.B)])
        arrays["slopes"] = slopes
        shape = (self.B, self.N, self.A) if self.per_batch else (self.N, self.A)
        arrays["points"] = stand(self.place, shape, rng)
        return arrays


PLACES = ("few places", "on a line", "clusters")


def stand(place: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    if place == "few places":
        return rng.integers(0, 5, size=shape).astype(float)
    if place == "on a line":
        return rng.uniform(0, 60, size=(*shape[:-1], 1)) * [0.6, -0.8]
    if place == "clusters":
        return rng.normal(size=shape) + 1e6 * rng.integers(-1, 2, size=shape)
    return rng.uniform(-20, 40, size=shape)


CASES = [
    Case("plane", 337),
    Case("plane-manhattan", 263, metric="manhattan", B=1),
    Case("line-per-batch", 269, A=1, per_batch=True),
    Case("line-manhattan", 131, A=1, metric="manhattan"),
    Case("space", 277, A=3, scale=0.7),
    Case("space-manhattan-global", 293, A=3, metric="manhattan", global_tokens=2, per_batch=True),
    Case("global-beyond-a-block", 311, global_tokens=131, B=1),
    Case("all-global", 139, global_tokens=139),
    Case("grouped", 271, H=6, G=2, global_tokens=1),
    Case("grouped-per-batch", 173, H=4, G=1, per_batch=True, slopes=(4.0, 1.0, 0.5, 0.25)),
    Case("equal-points", 283, place="few places"),
    Case("points-on-a-line", 281, place="on a line"),
    Case("clusters", 307, place="clusters"),
    Case("one-point", 1),
    Case("one-global-token", 1, global_tokens=1),
]


def by_hand(arrays: dict[str, np.ndarray], case: Case, wide: type) -> dict[str, np.ndarray]:
    """out, lse and the gradients of q, k, v and slopes, head by head."""
    q, k, v, dout, dlse, slopes, places = (
        arrays[name].astype(wide) for name in ("q", "k", "v", "dout", "dlse", "slopes", "points")
    )
    like = {"q": q, "k": k, "v": v, "slopes": slopes, "out": dout, "lse": dlse}
    found = {name: np.zeros_like(x) for name, x in like.items()}
    scale = wide(case.D) ** wide(-0.5) if case.scale is None else wide(case.scale)
    for b, h in np.ndindex(case.B, case.H):
        g, of_head = h // (case.H // case.G), (b, h) if slopes.ndim == 2 else h
        apart = places[b] if places.ndim == 3 else places
        apart = np.abs(apart[:, None] - apart)
        apart = apart.sum(2) if case.metric == "manhattan" else np.sqrt((apart**2).sum(2))
        apart[: case.global_tokens] = apart[:, : case.global_tokens] = 0
        score = scale * (q[b, h] @ k[b, g].T) - slopes[of_head] * apart
        row_max = score.max(1, keepdims=True)
        weight = np.exp(score - row_max)
        row_sum = weight.sum(1, keepdims=True)
        weight /= row_sum
        found["lse"][b, h] = (row_max + np.log(row_sum))[:, 0]
        found["out"][b, h] = out = weight @ v[b, g]
        delta = (dout[b, h] * out).sum(1) - dlse[b, h]
        dscore = weight * (dout[b, h] @ v[b, g].T - delta[:, None])
        found["q"][b, h] = scale * dscore @ k[b, g]
        found["k"][b, g] += scale * dscore.T @ q[b, h]
        found["v"][b, g] += weight.T @ dout[b, h]
        found["slopes"][of_head] -= (dscore * apart).sum()
    return found


def plain(arrays: dict[str, np.ndarray], case: Case, dtype: torch.dtype, order: np.ndarray):
    """The same in PyTorch operations of one precision, the keys in another order."""
    names = ("q", "k", "v", "slopes")
    leaves = {n: torch.tensor(arrays[n], dtype=dtype, requires_grad=True) for n in names}
    places, power = torch.tensor(arrays["points"]), 1 if case.metric == "manhattan" else 2
    apart = torch.cdist(places, places, power, compute_mode="donot_use_mm_for_euclid_dist")
    apart = apart if apart.dim() == 3 else apart[None]
    apart[:, : case.global_tokens] = apart[:, :, : case.global_tokens] = 0
    apart = apart[:, None, :, order].to(dtype)
    n, columns = case.H // case.G, torch.as_tensor(order)
    k, v = (leaves[x][:, :, columns].repeat_interleave(n, 1) for x in "kv")
    slopes = leaves["slopes"] if leaves["slopes"].dim() == 2 else leaves["slopes"][None]
    scale = case.D**-0.5 if case.scale is None else case.scale
    score = scale * (leaves["q"] @ k.mT) - slopes[..., None, None] * apart
    out, lse = score.softmax(-1) @ v, score.logsumexp(-1)
    given = [torch.tensor(arrays[n], dtype=dtype) for n in ("dout", "dlse")]
    torch.autograd.backward((out, lse), given)
    return {"out": out, "lse": lse} | {n: x.grad for n, x in leaves.items()}


def run(arrays, case, dtype, implementation):
    narrow = getattr(torch, dtype)
    wide = torch.float64 if dtype == "float64" else torch.float32
    leaves = {name: torch.tensor(arrays[name], dtype=narrow, requires_grad=True) for name in "qkv"}
    leaves["slopes"] = torch.tensor(arrays["slopes"], dtype=wide, requires_grad=True)
    options = {"metric": case.metric, "global_tokens": case.global_tokens, "scale": case.scale}
    options |= {"implementation": implementation, "return_lse": True}
    out, lse = attention_points(
        *(leaves[n] for n in "qkv"), arrays["points"], leaves["slopes"], **options
    )
    assert (out.dtype, lse.dtype) == (narrow, wide)
    given = torch.tensor(arrays["dout"], dtype=narrow), torch.tensor(arrays["dlse"], dtype=wide)
    torch.autograd.backward((out, lse), given)
    return numpy({"out": out, "lse": lse} | {n: x.grad for n, x in leaves.items()})


def numpy(results):
    return {name: x.detach().double().numpy() for name, x in results.items()}


def check_definition(case, dtype, implementation, orders):
    arrays = case.make(dtype)
    truth = by_hand(arrays, case, np.longdouble if dtype == "float64" else np.float64)
    wide = "float64" if dtype == "float64" else "float32"
    kinds = {name: wide if name in ("lse", "slopes") else dtype for name in truth}
    plains = []
    for order in orders:
        found = numpy(plain(arrays, case, getattr(torch, wide), order))
        plains.append({name: round_to(x, kinds[name]) for name, x in found.items()})
    if case.N == 1:  # autograd subtracts a sum over one key from itself and loses nothing
        plains.append(by_hand(arrays, case, np.dtype(wide).type))
    for name, actual in run(arrays, case, dtype, implementation).items():
        others = [x[name] for x in plains]
        assert_within_budget(name, actual, truth[name], others, kinds[name], TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("case", "dtype", "implementation"), spread(7, *product(CASES, DTYPES, IMPLEMENTATIONS))
)
def test_it_computes_the_definition(case, dtype, implementation):
    tokens, rng = np.arange(case.N), np.random.default_rng(0)
    orders = tokens, tokens[::-1].copy(), rng.permutation(tokens), rng.permutation(tokens)
    check_definition(case, dtype, implementation, orders)


@pytest.mark.thorough
def test_five_thousand_points_are_within_the_budget():
    case = Case("slide", 5000, B=1, H=2, G=2, global_tokens=1, slopes=(0.7, 0.02), D=16, E=16)
    orders = np.arange(case.N), np.arange(case.N)[::-1].copy()
    check_definition(case, "float32", "cpu", orders)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", [(2, 3, 0), (0, 3, 5), (2, 0, 5)])
def test_what_is_empty_stays_empty(shape, implementation):
    B, H, N = shape
    q, k, v = (torch.ones(B, H, N, size, requires_grad=True) for size in (4, 4, 3))
    out, lse = attention_points(
        q, k, v, torch.zeros(N, 2), implementation=implementation, return_lse=True
    )
    assert out.shape == (B, H, N, 3) and lse.shape == (B, H, N)
    out.sum().backward()
    assert q.grad.shape == q.shape


@pytest.mark.parametrize("implementation", NEAR_TO_FAR)
def test_a_repeated_call_gives_the_same_bits_on_any_number_of_threads(implementation):
    q, k, v = (torch.randn(1, 5, 401, 8, requires_grad=True) for _ in "qkv")
    slopes = torch.tensor([2.0, 1.0, 0.5, 0.25, 0.0], requires_grad=True)
    places = torch.rand(401, 2) * 30

    def results():
        out = attention_points(q, k, v, places, slopes, implementation=implementation)
        return (out, *torch.autograd.grad(out.square().sum(), (q, k, v, slopes)))

    before = torch.get_num_threads()
    expected = results()
    try:
        for threads in (before, 1) if implementation == "cpu" else (before,):
            torch.set_num_threads(threads)
            assert all(map(torch.equal, results(), expected))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("implementation", "global_tokens", "metric"),
    spread(3, *product(NEAR_TO_FAR, (0, 2), METRICS)),
)
def test_gradients_agree_with_finite_differences(
    metric, global_tokens, implementation, monkeypatch
):
    monkeypatch.setattr(points_blocked, "SIZE", 4)
    torch.manual_seed(0)
    options = {"dtype": torch.float64, "requires_grad": True}
    q, k, v = (
        torch.randn(1, 2, 7, 3, **options),
        *(torch.randn(1, 1, 7, 3, **options) for _ in "kv"),
    )
    slopes = torch.tensor([8.0, 0.5], **options)
    places = torch.rand(7, 2) * 9

    def call(q, k, v, slopes):
        options = {"metric": metric, "global_tokens": global_tokens, "return_lse": True}
        return attention_points(q, k, v, places, slopes, implementation=implementation, **options)

    assert torch.autograd.gradcheck(call, (q, k, v, slopes))


def prepare(q, k, v, places, slopes, tolerance=None, metric="euclidean", global_tokens=0):
    arguments = (q, k, v), places, slopes, metric, global_tokens, None, tolerance
    return points._prepare("test", *arguments)[0]


def lost(implementation, *arguments, **options):
    """The share of each row's probability that was left unread, and the blocks visited."""
    inputs = prepare(*arguments, **options)
    run = NEAR_TO_FAR[implementation].operators.run
    results, whole = run(inputs), run(inputs._replace(tolerance=0.0))
    lse, full = (x.row_max + x.log_sum for x in (results, whole))
    return -torch.expm1(lse - full), results.visited, whole.visited


@pytest.mark.parametrize(
    ("implementation", "metric", "A"), spread(5, *product(NEAR_TO_FAR, METRICS, (1, 2, 3)))
)
def test_what_is_left_unread_comes_close_to_the_tolerance_and_not_beyond(
    A, metric, implementation, monkeypatch
):
    """Equal keys at places of whole blocks, where the bound is no larger than what it bounds."""
    monkeypatch.setattr(points_blocked, "SIZE", 8)
    size = 8 if implementation == "blocked" else core.BLOCK_KEYS
    side = {1: 40, 2: 7, 3: 4}[A]
    corners = torch.cartesian_prod(*[4.0 * torch.arange(side)] * A).view(-1, A)
    places = corners.repeat_interleave(size, 0)[torch.randperm(size * len(corners))]
    slopes = torch.linspace(0.3, 1.5, 12, dtype=torch.float64)
    k = torch.full((1, 12, len(places), 4), 0.7, dtype=torch.float64)
    q = 3 * torch.randn_like(k)
    share, visited, whole = lost(implementation, q, k, k, places, slopes, 2.0**-10, metric=metric)
    assert (visited < whole).any()
    assert 2.0**-10 / 4 < share.max() <= 2.0**-10 * (1 + 1e-9)


KINDS = ("random", "large far away", "one large key", "large values", "one far out", *PLACES)


@pytest.mark.parametrize(
    ("implementation", "kind", "global_tokens", "metric"),
    spread(5, *product(NEAR_TO_FAR, KINDS, (0, 1), METRICS)),
)
def test_the_probability_left_unread_is_at_most_the_tolerance(
    implementation, kind, global_tokens, metric
):
    torch.manual_seed(1)
    N = 1500
    places = torch.rand(N, 2, dtype=torch.float64) * 200
    if kind in PLACES:
        places = torch.from_numpy(stand(kind, (N, 2), np.random.default_rng(1)))
    if kind == "one far out":
        places[7, 1] = 2.0**99
    q, k, v = torch.randn(3, 1, 4, N, 8, dtype=torch.float64)
    if kind == "large far away":
        k *= 1 + 20 * (places[:, :1] > 150)
    if kind == "one large key":
        k[:, :, N // 2] *= 300
    if kind == "large values":
        v[:, :, -1] *= 1e12
    slopes = [40.0, 1.0, 0.25, 0.0]
    for tolerance in (2.0**-4, 2.0**-24):
        arguments = q, k, v, places, slopes, tolerance, metric, global_tokens
        share, visited, whole = lost(implementation, *arguments)
        assert share.max() <= tolerance
        if kind in ("random", "large values"):
            assert (visited < whole).any()


@pytest.mark.parametrize(("implementation", "blocks"), [("blocked", 6), ("cpu", 11)])
def test_tolerance_0_reads_every_key(implementation, blocks):
    q, k, v = torch.randn(3, 1, 2, 700, 4)
    visited = lost(implementation, q, k, v, torch.rand(700, 2) * 1e5, [4.0, 1.0], 0.0)[1]
    assert (visited == blocks).all()


@pytest.mark.parametrize("implementation", NEAR_TO_FAR)
@pytest.mark.parametrize("what", ["k", "v"])
def test_a_key_that_is_not_finite_is_never_left_out(what, implementation):
    q, k, v = torch.randn(3, 1, 2, 700, 4)
    places = torch.rand(700, 2) * 1e5
    {"k": k, "v": v}[what][0, 0, 5, 2] = torch.nan
    out = attention_points(q, k, v, places, [4.0, 1.0], implementation=implementation)
    assert out[0, 0].isnan().any(-1).all() and not out[0, 1].isnan().any()


class LargestArray(TorchDispatchMode):
    """How many numbers the largest array has that an operation gives."""

    numbers = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        results = function(*arguments, **(keywords or {}))
        for x in results if isinstance(results, (tuple, list)) else (results,):
            if isinstance(x, torch.Tensor):
                self.numbers = max(self.numbers, x.untyped_storage().nbytes() // x.element_size())
        return results


@pytest.mark.thorough
def test_no_array_grows_with_the_square_of_the_points():
    N = 5000
    q, k, v = torch.randn(3, 1, 2, N, 4)
    inputs = prepare(q, k, v, torch.rand(N, 2) * 70, None, global_tokens=1)
    with LargestArray() as largest:
        results = points_blocked.operators.run(inputs)
        points_blocked._find_gradients(inputs, results.out, results.row_max, results)
    assert largest.numbers <= 3 * 2 * N * 4  # q, k and v in one
    some = (x[:, :, :500] for x in (q, k, v))
    with LargestArray() as largest:
        attention_points(*some, torch.rand(500, 2), implementation="dense")
    assert largest.numbers >= 2 * 500 * 500  # so that one would be seen


@pytest.mark.parametrize("A", [1, 2, 3])
def test_the_curve_goes_from_neighbour_to_neighbour(A):
    side = {1: 64, 2: 16, 3: 8}[A]
    grid = torch.tensor(list(product(range(side), repeat=A)), dtype=torch.float64)
    grid = grid[torch.randperm(len(grid))]
    steps = grid[along_a_curve(grid)].diff(dim=0).abs().sum(1)
    # The cells of the curve do not fall on those of the grid: few steps go farther.
    assert steps.mean() < 1.15 and steps.max() <= 2 * A


def test_large_coordinates_keep_their_distances():
    """Tiles of a slide in pixels: in float32 these distances would be off by up to 1."""
    q, k, v = torch.randn(3, 1, 2, 300, 4, dtype=torch.float64)
    places = torch.randint(0, 20, (300, 2))
    expected = attention_points(q, k, v, places, [0.5, 0.25], implementation="dense")
    for name in IMPLEMENTATIONS:
        moved = attention_points(q, k, v, places + 2**40, [0.5, 0.25], implementation=name)
        torch.testing.assert_close(moved, expected)


def test_auto_takes_the_matrix_for_few_tokens_and_under_transforms(monkeypatch):
    called = []
    for module in points.IMPLEMENTATIONS:
        call = module.attention
        monkeypatch.setattr(
            module, "attention", lambda x, m=module, call=call: called.append(m.NAME) or call(x)
        )
    for N in (5, 1500):
        x = torch.randn(1, 2, N, 4)
        places = torch.rand(N, 2)
        attention_points(x, x, x, places)
        torch.func.grad(lambda x, p=places: attention_points(x, x, x, p).sum())(x)
    assert called == ["dense", "dense", "cpu", "dense"]


def test_second_derivatives_are_those_of_dense_or_refused():
    q = torch.randn(1, 1, 5, 4, dtype=torch.float64, requires_grad=True)
    places = torch.rand(5, 2)

    def first(implementation):
        out = attention_points(q, q, q, places, implementation=implementation)
        return torch.autograd.grad(out.square().sum(), q, create_graph=True)[0].sum()

    first("dense").backward()
    assert q.grad.abs().sum() > 0
    for name in NEAR_TO_FAR:
        with pytest.raises(NotImplementedError, match=f"attention_points: {name} gives first"):
            first(name).backward()


@pytest.mark.parametrize("implementation", NEAR_TO_FAR.values())
def test_the_operators_are_as_pytorch_asks(implementation):
    q, k, v = (torch.randn(1, 2, 140, 4, requires_grad=True) for _ in "qkv")
    slopes = torch.tensor([1.0, 0.5], requires_grad=True)
    inputs = prepare(q, k, v, torch.rand(140, 2), slopes, global_tokens=3)
    checks = "test_schema", "test_faketensor", "test_autograd_registration"
    torch.library.opcheck(implementation.operators.forward, tuple(inputs), test_utils=checks)


@pytest.mark.parametrize("implementation", NEAR_TO_FAR)
def test_autocast_and_strides(implementation):
    q, k, v = torch.randn(3, 1, 300, 2, 4).transpose(2, 3)
    places = torch.rand(300, 2).t().contiguous().t() * 10
    with torch.autocast("cpu", torch.bfloat16):
        out = attention_points(q, k, v, places, implementation=implementation)
    narrow = attention_points(*(x.bfloat16() for x in (q, k, v)), places, implementation="dense")
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, narrow)


def call(q=(2, 4, 7, 8), k=(2, 2, 7, 8), v=(2, 2, 7, 3), places=(7, 2), slopes=None, **options):
    """Call with tensors of these shapes, or with what stands in a shape's place."""
    q, k, v, places = (torch.ones(x) if isinstance(x, tuple) else x for x in (q, k, v, places))
    return attention_points(q, k, v, places, slopes, **options)


NAN, INF = math.nan, math.inf


def at(value, *index, shape=(7, 2)):
    places = torch.zeros(shape, dtype=torch.float64)
    places[index] = value
    return places


WRONG_VALUES = [
    (dict(q=(4, 7, 8)), "q must have 4 axes"),
    (dict(k=(2, 2, 6, 8), v=(2, 2, 6, 3)), r"k has 6 tokens but q has 7, .*\(q \[2, 4, 7, 8\], k"),
    (
        dict(places=(7, 4)),
        r"points must have A = 1, 2 or 3 coordinates, got 4 \(points \[7, 4\]\)",
    ),
    (dict(places=(7, 0)), "points must have A = 1, 2 or 3 coordinates, got 0"),
    (dict(places=(7,)), r"shape \[N, A\] = \[7, A\] or \[B, N, A\] = \[2, 7, A\], got \[7\]"),
    (dict(places=(6, 2)), r"points must have shape .*, got \[6, 2\]"),
    (dict(places=(3, 7, 2)), r"points must have shape .*, got \[3, 7, 2\]"),
    (
        dict(places=at(NAN, 3, 1)),
        r"points must be finite, within 2\^100, got nan in token 3, axis 1",
    ),
    (
        dict(places=at(-INF, 1, 6, 0, shape=(2, 7, 2))),
        "got -inf in token 6 of batch row 1, axis 0",
    ),
    (dict(places=at(NAN, 3, 1).bfloat16(), global_tokens=2), "got nan in token 3, axis 1"),
    (dict(places=at(1e31, 2, 0)), r"within 2\^100, got 1e\+31 in token 2, axis 0"),
    (
        dict(places=at(2**53 + 1, 4, 0).long() + 1),
        r"integers within 2\^53, got 9007199254740993 in",
    ),
    (dict(places=at(-(2**60), 4, 0).long()), "got -1152921504606846976 in token 4, axis 0"),
    (dict(metric="cosine"), r"one of \('euclidean', 'manhattan'\), got 'cosine'"),
    (dict(global_tokens=8), "global_tokens must be from 0 to N = 7, got 8"),
    (dict(global_tokens=-1), "global_tokens must be from 0 to N = 7, got -1"),
    (dict(slopes=[1.0] * 3), r"slopes must have shape \[H\] = \[4\]"),
    (dict(slopes=[1.0, -0.5, 1, 1]), "slopes must be finite and at least 0, got -0.5"),
    (dict(slopes=[1.0, 1, 1, INF]), "slopes must be finite and at least 0, got inf"),
    (dict(tolerance=1.0), r"tolerance must be in \[0, 1\), got 1.0"),
    (dict(implementation="triton"), "implementation must be one of .*'blocked'.*, got 'triton'"),
]
WRONG_KINDS = [
    (dict(k=[1.0]), "k must be a torch.Tensor, got list"),
    (dict(v=torch.ones(2, 2, 7, 3).long()), "v must be one of .*, got int64"),
    (dict(places=torch.ones(7, 2) > 0), "points must hold real numbers, got bool"),
    (dict(places=torch.ones(7, 2) * 1j), "points must hold real numbers, got complex64"),
    (dict(places=[["here", "there"]] * 7), "points must hold real numbers, got <U5"),
    (dict(global_tokens=True), "global_tokens must be an integer, got True"),
    (dict(global_tokens=1.0), "global_tokens must be an integer, got 1.0"),
    (dict(causal=True), "there is no argument causal; "),
    (
        dict(mask=1),
        "there is no argument mask; there are q, k, v, points, slopes, metric, global_",
    ),
    (dict(attn_bias=1), "there is no argument attn_bias; there are q, k, v, points, "),
    (dict(is_causal=True), "there is no argument is_causal; there are q, k, v, points, "),
    (dict(softmax_scale=1), "there is no argument softmax_scale; say scale"),
    (dict(coordinates=1), "there is no argument coordinates; "),
]
LEARNED = dict(places=torch.ones(7, 2, requires_grad=True))
MESSAGES = [
    *((arguments, ValueError, words) for arguments, words in WRONG_VALUES),
    *((arguments, TypeError, words) for arguments, words in WRONG_KINDS),
    (LEARNED, NotImplementedError, r"points have no gradients, .*; pass points.detach\(\)"),
]


@pytest.mark.parametrize(("arguments", "kind", "words"), MESSAGES)
def test_what_is_wrong_is_said(arguments, kind, words):
    with pytest.raises(kind, match=f"attention_points: .*{words}"):
        call(**arguments)


def test_the_points_of_global_tokens_are_not_read():
    places = at(NAN, 0, 1)
    assert call(places=places, global_tokens=1).isfinite().all()


@pytest.mark.processes
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")  # of JAX, where a test has loaded it
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fork_after_threads_can_call_on(dtype):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    q, k, v, dout = torch.randn(4, 2, 4, 2000, 16).to(dtype)
    places = torch.rand(2000, 2)
    q.requires_grad_()

    def run() -> tuple[torch.Tensor, ...]:
        out, lse = attention_points(q, k, v, places, implementation="cpu", return_lse=True)
        # In 16 bits PyTorch itself converts dout, between our operations.
        return out, lse, *(torch.autograd.grad(out, q, dout) if dtype == torch.float32 else ())

    expected = [x.detach().double().numpy() for x in run()]
    child = os.fork()
    if child == 0:
        signal.alarm(30)  # what waits for threads that are gone waits for ever
        found = run()
        torch.set_num_threads(1)  # for what follows is PyTorch's
        pairs = zip(found, expected, strict=True)
        same = all(np.array_equal(x.detach().double(), y) for x, y in pairs)
        os._exit(0 if same and torch.get_num_threads() == 1 else 1)
    torch.set_num_threads(before)
    assert os.waitpid(child, 0)[1] == 0
