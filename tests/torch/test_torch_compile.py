"""`torch.compile`, `torch.export` and the custom operators' own checks."""

import subprocess
import sys
from itertools import cycle, product

import pytest
import torch

import linbias.torch
from contract import rows
from linbias.torch import MultiheadAttention
from linbias.torch.impl import blocked, cpu
from linbias.torch.operators.operator import Inputs

INF = float("inf")

# What the compiler itself warns of on the way.
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)


@pytest.fixture(autouse=True)
def forgotten_programs():
    torch._dynamo.reset()


@pytest.mark.thorough
@pytest.mark.parametrize(
    "far", [(2**62 + 5, -(2**62)), (2**63 - 1, -(2**63)), (2**63 + 9, 2**64 - 1)]
)
def test_compiled_blocked_takes_a_start_beyond_int64(far):
    dtype = torch.uint64 if max(far) >= 2**63 else torch.int64
    q = torch.randn(2, 2, 3, 4)
    run = torch.compile(linbias.torch.attention, fullgraph=True, backend="aot_eager")
    out = run(q, q, q, query_start=torch.tensor(far, dtype=dtype), implementation="blocked")
    assert out.isfinite().all() and out[0].any()
    assert out[1].any() == (far[1] > 0)  # before all keys a query sees none


@pytest.mark.parametrize(
    "implementation", rows("cpu", ("dense",), ("blocked",), ("cpu",), ("sdpa",))
)
def test_compiles_whole_and_gives_the_same(implementation):
    def run(q, k, v, left):
        options = {"implementation": implementation, "return_lse": True}
        out, lse = linbias.torch.attention(q, k, v, left, **options)
        return out.square().sum() + lse.sum()

    leaves = [*(torch.randn(2, n, 9, 8) for n in (4, 2, 2)), torch.rand(4)]
    gradients = []
    for function in (run, torch.compile(run, fullgraph=True, backend="aot_eager")):
        inputs = [leaf.clone().requires_grad_() for leaf in leaves]
        gradients.append(torch.autograd.grad(function(*inputs), inputs))
    for eager, compiled in zip(*gradients, strict=True):
        torch.testing.assert_close(compiled, eager)


def first_of(rows):
    """The first row, and for `make check` the others: each takes seconds to compile."""
    first, *others = (row if isinstance(row, tuple) else (row,) for row in rows)
    thorough = (pytest.param(*row, marks=pytest.mark.thorough) for row in others)
    return [pytest.param(*first), *thorough]


ARGUMENTS = {
    "as it is": {},
    "two sides": {"causal": False},
    "asymmetric": {"causal": False, "right_slopes": torch.tensor([0.3, 0.0, INF, 0.1])},
    "slopes of each row": {"slopes": torch.rand(2, 4)},
    "range": {"key_range": torch.tensor([[0, 40], [3, 50]]), "query_start": torch.tensor([3, 9])},
    "numbers": {"scale": 0.2, "tolerance": 1e-3, "return_lse": True},
    "dropout": {"dropout": 0.2},
}


@pytest.mark.parametrize(
    ("name", "implementation"),
    first_of(
        [
            *(("as it is", name) for name in ("cpu", "auto", "dense", "blocked", "sdpa")),
            *zip(list(ARGUMENTS)[1:], cycle(("cpu", "sdpa", "blocked")), strict=False),
        ]
    ),
)
def test_sizes_may_be_symbols(name, implementation):
    def run(q, k, v):
        arguments = {"implementation": implementation, **ARGUMENTS[name]}
        return linbias.torch.attention(q, k, v, **arguments)

    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="aot_eager")
    for num_kv_heads, length in ((4, 64), (4, 70), (2, 131)):
        q, k, v = (torch.randn(2, n, length, 16) for n in (4, num_kv_heads, num_kv_heads))
        results = []
        for function in (run, compiled):
            torch.manual_seed(0)
            results.append(function(q, k, v))
        torch.testing.assert_close(*results)


@pytest.mark.parametrize("option", first_of(("scale", "dropout", "tolerance")))
@pytest.mark.parametrize("dynamic", first_of((None, True)))
def test_numbers_may_vary_from_call_to_call(option, dynamic):
    def run(q, number):
        return linbias.torch.attention(q, q, q, **{option: number})

    compiled = torch.compile(run, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    q = torch.randn(1, 2, 30, 8)
    for number in (0.1, 0.2, 0.3, 0.0):
        results = []
        for function in (run, compiled):
            torch.manual_seed(0)
            results.append(function(q, number))
        torch.testing.assert_close(*results)


# With masks of one size each, which then meets a length that is a symbol, or of the length.
@pytest.mark.parametrize(
    ("mask", "variant"),
    first_of(
        [
            ("key_padding_mask", "causal"),
            (None, "asymmetric"),
            ("attn_mask of one size", "causal"),
            ("attn_mask", "asymmetric"),
        ]
    ),
)
def test_a_layer_takes_symbols_too(variant, mask):
    layer = MultiheadAttention(32, 4, variant=variant, batch_first=True)
    fixed = torch.rand(64, 64) < 0.3

    def run(x, given):
        if mask == "attn_mask of one size":
            return layer(x, attn_mask=fixed)[0]
        return layer(x, **{mask: given} if mask else {})[0][:, :40]

    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="aot_eager")
    for B, length in ((2, 64), (3, 64)) if mask == "attn_mask of one size" else ((2, 64), (2, 70)):
        given = torch.rand(length, length) < 0.3
        if mask == "key_padding_mask":
            given = torch.arange(length) >= torch.tensor([[length], [40]])
        x = torch.randn(B, length, 32)
        torch.testing.assert_close(compiled(x, given), run(x, given))


@pytest.mark.thorough  # what generates code after the graph, which the tests above compile whole
def test_compiles_with_inductor():
    q, k, v = torch.randn(3, 1, 2, 9, 8)
    run = torch.compile(linbias.torch.attention, fullgraph=True)
    torch.testing.assert_close(run(q, k, v), linbias.torch.attention(q, k, v))


def test_module_exports_with_a_free_length():
    module, x = MultiheadAttention(16, 4, batch_first=True).eval(), torch.randn(2, 9, 16)
    length = torch.export.Dim("length", min=2, max=4096)
    exported = torch.export.export(module, (x,), dynamic_shapes={"query": {1: length}}).module()
    longer = torch.randn(2, 700, 16)
    torch.testing.assert_close(exported(longer)[0], module(longer)[0])


@pytest.mark.parametrize(
    ("variant", "implementation"),
    rows(
        "range-blocked asymmetric-cpu dropout-cpu",
        *product(("causal", "asymmetric", "range", "dropout"), ("blocked", "cpu")),
    ),
)
def test_operators_pass_opcheck(variant, implementation):
    q, k, v = (torch.randn(2, n, 9, 8, requires_grad=True) for n in (4, 2, 2))
    left = torch.rand(4, requires_grad=True)
    right = key_range = seed = None
    dropout = 0.0
    if variant == "asymmetric":
        left, right = (torch.rand(2, 4, requires_grad=True) for _ in range(2))
    if variant == "range":
        key_range = torch.tensor([[[0, 9], [2, 9]], [[3, 7], [4, 5]]])
    if variant == "dropout":
        seed, dropout = torch.tensor(7), 0.5
    arrays = q, k, v, left, right, key_range, None, None, seed
    inputs = Inputs(*arrays, scale=0.3, dropout=dropout, tolerance=1e-7, precise=True)
    operators = {"blocked": blocked, "cpu": cpu}[implementation].operators
    torch.library.opcheck(operators.forward, tuple(inputs))


class Both(torch.nn.Module):
    def forward(self, q, k, v, offsets):
        packed = (x[0].transpose(0, 1) for x in (q, k, v))
        out = linbias.torch.attention(q, k, v)
        return out, linbias.torch.attention_varlen(*packed, offsets, offsets)


@pytest.mark.processes
def test_a_saved_program_loads_where_linbias_is_imported_and_says_so_elsewhere(tmp_path):
    q, k, v = torch.randn(3, 1, 2, 9, 8)
    arguments = (q, k, v, torch.tensor([0, 4, 9]))
    torch.export.save(torch.export.export(Both(), arguments), tmp_path / "program.pt2")
    loaded = torch.export.load(tmp_path / "program.pt2").module()
    for found, wanted in zip(loaded(*arguments), Both()(*arguments), strict=True):
        torch.testing.assert_close(found, wanted)
    code = f"import torch; torch.export.load({str(tmp_path / 'program.pt2')!r})"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode and "torch.ops.linbias." in done.stderr
    assert "Please import the custom op to register it" in done.stderr
