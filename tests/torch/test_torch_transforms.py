"""`linbias.torch.attention` under `torch.func`, forward mode and second derivatives."""

import functools
import warnings
from itertools import product

import pytest
import torch
import torch._functorch.config
from torch.autograd import forward_ad

import linbias.torch
from contract import rows

# PyTorch's own forward mode, when it is first used.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is:DeprecationWarning")

NEAR_TO_FAR = ("blocked", "cpu")
NO_TANGENT = "attention: {} has no forward-mode derivative; implementation='dense' has it"
ONCE = "attention: {} gives first derivatives only; implementation='dense' gives all"


def arguments(T=9, S=70, B=2, H=4, G=2):
    generator = torch.Generator().manual_seed(0)
    normal = functools.partial(torch.randn, generator=generator, dtype=torch.float64)
    return {
        "q": normal(B, H, T, 8),
        "k": normal(B, G, S, 8),
        "v": normal(B, G, S, 3),
        "slopes": normal(B, H).abs(),
        "right_slopes": normal(H).abs(),
        "key_range": torch.tensor([[[0, S], [3, S - 2]]] * B),
        "query_start": torch.arange(B) * 7 + S - T,
    }


def run(implementation, **given):
    options = {"causal": False, "implementation": implementation, "return_lse": True}
    out, lse = linbias.torch.attention(**given, **options)
    return torch.cat([out, lse[..., None]], -1)


def weighed(implementation, **given):
    """A loss that weighs every output differently."""
    result = run(implementation, **given)
    weights = torch.linspace(-1, 1, result.numel(), dtype=result.dtype)
    return (result.flatten() * weights).sum()


NAMES = ("q", "k", "v", "slopes", "right_slopes", "key_range", "query_start")


def transforms(implementation):
    """Every way of `torch.func` to first derivatives in reverse, as functions of the arguments."""

    def loss(*given):
        return weighed(implementation, **dict(zip(NAMES, given, strict=True)))

    def some_rows(*given):
        return run(implementation, **dict(zip(NAMES, given, strict=True)))[:, 1, :2, 1:]

    wanted = (0, 1, 2, 3, 4)
    return {
        "grad": torch.func.grad(loss, wanted),
        "vjp": lambda *x: torch.func.vjp(lambda *leaves: loss(*leaves, *x[5:]), *x[:5])[1](
            torch.tensor(2.0, dtype=torch.float64)
        ),
        "jacrev": torch.func.jacrev(some_rows, wanted),
        "grad of vmap": torch.func.grad(
            lambda *x: torch.func.vmap(loss)(*(torch.stack([y, y]) for y in x)).sum(), wanted
        ),
        "vmap of grad": lambda *x: torch.func.vmap(torch.func.grad(loss, wanted))(
            *(torch.stack([y, y.flip(0)]) for y in x)
        ),
    }


@pytest.mark.parametrize(
    ("how", "T"),  # with 2 queries the core would decode, and keep nothing for backward
    rows(lambda how, T: T == 9 or how == "grad", *product(transforms("dense"), (2, 9))),
)
@pytest.mark.parametrize("implementation", ("dense", *NEAR_TO_FAR))
def test_reverse_mode_of_torch_func_gives_the_gradients_of_autograd(implementation, how, T):
    given = arguments(T=T, S=600 if how != "jacrev" else 70)
    found = transforms(implementation)[how](*given.values())
    if how in ("grad", "vjp"):
        leaves = {n: x.requires_grad_(x.is_floating_point()) for n, x in given.items()}
        wanted = torch.autograd.grad(weighed("dense", **leaves), [*leaves.values()][:5])
        factor = 2 if how == "vjp" else 1
        torch.testing.assert_close(found, tuple(factor * x for x in wanted))
    else:
        torch.testing.assert_close(found, transforms("dense")[how](*given.values()))


def vmap_of_vjp(f, x):
    out, back = torch.func.vjp(f, x)
    seeds = torch.eye(out.numel(), dtype=x.dtype).view(-1, *out.shape)
    return torch.func.vmap(back)(seeds)[0].view(*out.shape, *x.shape)


@torch._functorch.config.patch(donated_buffer=False)  # backward runs once for each number
def compiled_jacobian(f, x):
    return torch.autograd.functional.jacobian(torch.compile(f, backend="aot_eager"), x)


JACOBIANS = {
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "vmap of vjp": vmap_of_vjp,
    "compiled": compiled_jacobian,
    "vectorized": lambda f, x: torch.autograd.functional.jacobian(f, x, vectorize=True),
}
LAYOUTS = {
    "one row for all": lambda x: x[:1].expand(x.shape),
    "one head for all": lambda x: x[:, :1].expand(x.shape),
    "one token for all": lambda x: x[..., :1, :].expand(x.shape),
    "one number for all": lambda x: x[..., :1].expand(x.shape),
    "any stride where there is one": lambda x: x.as_strided(
        x.shape, [7 if n == 1 else step for n, step in zip(x.shape, x.stride(), strict=True)]
    ),
}
ONE_OF_EACH = ((1, 1, 1), (1, 1, 4), (1, 3, 1), (2, 1, 1), (2, 2, 3))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("how", "implementation"),
    rows(
        lambda how, implementation: how != "compiled" and implementation == "cpu",
        *product(JACOBIANS, NEAR_TO_FAR),
    ),
)
def test_jacobians_of_one_of_each_axis_and_of_expanded_arrays(how, implementation, layout):
    compiles = how == "compiled"  # which takes seconds
    for B, H, T in ONE_OF_EACH[1:2] if compiles else ONE_OF_EACH:
        shapes = {"q": (B, H, T, 3), "k": (B, H, 6, 3), "v": (B, H, 6, 2), "slopes": (B, H)}
        given = {n: torch.rand(shape, dtype=torch.float64) for n, shape in shapes.items()}
        given |= {n: LAYOUTS[layout](given[n]) for n in "qkv"}
        for name, x in [*given.items()][compiles and 3 :]:
            found, wanted = (
                way(lambda x, who=who, name=name: run(who, **given | {name: x}), x)  # noqa: B023
                for way, who in (
                    (JACOBIANS[how], implementation),
                    (torch.autograd.functional.jacobian, "dense"),
                )
            )
            torch.testing.assert_close(found, wanted)


NOT_MAPPED = dict.fromkeys(NAMES)
MAPPED = {
    "all": dict.fromkeys(NAMES, 0),
    "q": NOT_MAPPED | {"q": 2},
    "slopes": NOT_MAPPED | {"slopes": 1, "right_slopes": 1},
    "places": NOT_MAPPED | {"key_range": 3, "query_start": 1},
}


@pytest.mark.parametrize("mapped", MAPPED)
@pytest.mark.parametrize("implementation", ("dense", *NEAR_TO_FAR))
def test_vmap_equals_one_call_after_the_other(implementation, mapped):
    given, axes = arguments(), MAPPED[mapped]
    shift = {"key_range": 2, "query_start": -5}
    varied = {
        n: x if axes[n] is None else torch.stack([x, abs(x + shift.get(n, 1.0))], axes[n])
        for n, x in given.items()
    }
    if axes["key_range"] is not None:
        varied["key_range"] = varied["key_range"].clamp(max=70)

    def call(*x):
        return run(implementation, **dict(zip(given, x, strict=True)))

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of PyTorch, where it runs an operator element by element
        together = torch.func.vmap(call, tuple(axes.values()))(*varied.values())
    for i in range(2):
        one = [x if axes[n] is None else x.select(axes[n], i) for n, x in varied.items()]
        torch.testing.assert_close(together[i], call(*one))


@pytest.mark.parametrize("randomness", ("same", "different"))
@pytest.mark.parametrize("implementation", NEAR_TO_FAR)
def test_vmap_with_dropout_draws_the_masks_that_dense_draws(implementation, randomness):
    q, k, v = torch.randn(3, 2, 1, 2, 9, 8)

    def call(implementation):
        torch.manual_seed(3)
        options = {"dropout": 0.5, "implementation": implementation}
        attention = functools.partial(linbias.torch.attention, **options)
        return torch.func.vmap(attention, randomness=randomness)(q, k, v)

    torch.testing.assert_close(call(implementation), call("dense"))


def dual(function, x):
    with forward_ad.dual_level():
        result = function(forward_ad.make_dual(x, torch.ones_like(x)))
        return forward_ad.unpack_dual(result).tangent


FORWARD_MODES = {
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),))[1],
    "dual": dual,
    "dual that requires a gradient": lambda f, x: dual(f, x.clone().requires_grad_()),
    "jvp of vmap": lambda f, x: torch.func.jvp(
        lambda x: torch.func.vmap(f)(x[None]).sum(), (x,), (torch.ones_like(x),)
    )[1],
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x).sum(),
}


@pytest.mark.parametrize("name", ("q", "k", "v", "slopes", "right_slopes"))
@pytest.mark.parametrize("how", FORWARD_MODES)
def test_forward_mode_comes_from_dense_and_is_refused_elsewhere(how, name):
    given = arguments(T=3, S=7)

    def loss(x, implementation):
        return weighed(implementation, **given | {name: x})

    leaf = given[name].clone().requires_grad_()
    wanted = torch.autograd.grad(loss(leaf, "dense"), leaf)[0].sum()
    ways = FORWARD_MODES[how]
    torch.testing.assert_close(ways(lambda x: loss(x, "dense"), given[name]), wanted)
    for implementation in (*NEAR_TO_FAR, "auto"):
        words = NO_TANGENT.format("cpu" if implementation == "auto" else implementation)
        with pytest.raises(NotImplementedError, match=words):
            ways(functools.partial(loss, implementation=implementation), given[name])


def again_by_autograd(f, x):
    x = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(f(x), x, create_graph=True)
    return torch.autograd.grad((first**2).sum(), x)[0]


def grad_of_grad(f, x):
    return torch.func.grad(lambda x: (torch.func.grad(f)(x) ** 2).sum())(x)


def jvp_of_grad(f, x):
    return torch.func.jvp(torch.func.grad(f), (x,), (torch.func.grad(f)(x) * 2,))[1]


def grad_of_jvp(f, x):
    tangent = torch.func.grad(f)(x) * 2
    return torch.func.grad(lambda y: torch.func.jvp(f, (y,), (tangent,))[1])(x)


SECOND = {
    "autograd": (again_by_autograd, ONCE),
    "grad of grad": (grad_of_grad, ONCE),
    "jvp of grad": (jvp_of_grad, NO_TANGENT),
    "grad of jvp": (grad_of_jvp, NO_TANGENT),
}


@pytest.mark.parametrize("how", SECOND)
def test_second_derivatives_come_from_dense_and_are_refused_elsewhere(how):
    given = arguments(T=3, S=7)
    second, words = SECOND[how]

    def loss(q, implementation):
        return weighed(implementation, **given | {"q": q})

    found = second(lambda q: loss(q, "dense"), given["q"])
    torch.testing.assert_close(found, again_by_autograd(lambda q: loss(q, "dense"), given["q"]))
    for implementation in NEAR_TO_FAR:
        with pytest.raises(NotImplementedError, match=words.format(implementation)):
            second(functools.partial(loss, implementation=implementation), given["q"])


def test_sdpa_gives_first_derivatives_only_and_runs_under_no_transform():
    given = arguments(T=3, S=7)

    def loss(q, implementation="sdpa"):
        return weighed(implementation, **given | {"q": q})

    with pytest.raises(NotImplementedError, match=ONCE.format("sdpa")):
        again_by_autograd(loss, given["q"])
    words = "sdpa cannot run this call: it does not run under transforms such as vmap"
    for transform in (torch.func.grad(loss), functools.partial(dual, loss)):
        with pytest.raises(NotImplementedError, match=words):
            transform(given["q"])
    mask = torch.ones(3, 7, dtype=torch.bool)
    del given["q"]
    call = functools.partial(linbias.torch.attention, **given, causal=False)
    q = torch.randn(2, 2, 4, 3, 8, dtype=torch.float64)
    masked = torch.func.vmap(functools.partial(call, mask=mask))(q)
    torch.testing.assert_close(masked[1], call(q[1]))


@pytest.mark.parametrize("how", rows("jvp", ("jvp",), ("dual",)))
def test_forward_mode_inside_compile_is_refused(how):
    """PyTorch would take an operator's tangent for zero there."""
    q, k, v = torch.randn(3, 1, 2, 5, 4)

    @functools.partial(torch.compile, backend="aot_eager")
    def compiled(q):
        return FORWARD_MODES[how](lambda q: linbias.torch.attention(q, k, v).sum(), q)

    with pytest.raises(NotImplementedError, match=NO_TANGENT.format("cpu")):
        compiled(q)
    torch._dynamo.reset()  # it no longer reads a function that raised


@pytest.mark.parametrize("implementation", rows("cpu", *((n,) for n in NEAR_TO_FAR)))
def test_vmap_inside_compile(implementation):
    q, k, v = torch.randn(3, 2, 1, 2, 5, 4)
    attention = functools.partial(linbias.torch.attention, implementation=implementation)
    compiled = torch.compile(torch.func.vmap(attention), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v)[1], attention(q[1], k[1], v[1]))


def test_values_are_checked_under_transforms_too():
    q, k, v = torch.randn(3, 1, 2, 5, 4)

    def loss(slopes, key_range):
        return linbias.torch.attention(q, k, v, slopes, key_range=key_range).sum()

    slopes, places = torch.tensor([1.0, -0.5]), torch.tensor([[0, 6]])
    with pytest.raises(ValueError, match=r"slopes must be at least 0 \(or inf\), got -0.5"):
        torch.func.grad(loss)(slopes, None)
    with pytest.raises(ValueError, match=r"first <= end <= S = 5, got \[0, 6\] in batch row 0"):
        torch.func.grad(loss)(slopes.abs(), places)


def test_a_layer_gives_gradients_per_sample():
    layer = linbias.torch.MultiheadAttention(12, 3, variant="asymmetric", batch_first=True)
    x = torch.randn(4, 6, 12)
    parameters = dict(layer.named_parameters())

    def loss(parameters, x):
        out, _ = torch.func.functional_call(layer, parameters, (x[None],) * 3)
        return (out**2).sum()

    together = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
    for i, row in enumerate(x):
        alone = torch.autograd.grad(loss(parameters, row), [*parameters.values()])
        for gradients, gradient in zip(together.values(), alone, strict=True):
            torch.testing.assert_close(gradients[i], gradient, rtol=1e-4, atol=1e-5)
