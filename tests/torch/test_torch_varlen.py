"""`attention_varlen`: packed sequences, each as if it were alone."""

import subprocess
import sys

import numpy as np
import pytest
import torch

import linbias.torch


@pytest.mark.parametrize("causal", [True, False])
def test_packed_sequences_equal_each_alone(causal):
    # The last two run together, with as many queries and padding behind the keys of one.
    lengths_q, lengths_k = (3, 0, 5, 2, 90, 70, 66, 1, 7, 7), (3, 4, 7, 0, 90, 101, 40, 1, 70, 80)
    q, k, v = (
        torch.randn(sum(lengths), heads, 8, dtype=torch.float64, requires_grad=True)
        for lengths, heads in ((lengths_q, 4), (lengths_k, 2), (lengths_k, 2))
    )
    offsets = [torch.tensor([0, *np.cumsum(lengths)]) for lengths in (lengths_q, lengths_k)]
    left = torch.rand(10, 4)
    options = {"causal": causal, "return_lse": True}
    out, lse = linbias.torch.attention_varlen(q, k, v, *offsets, left, **options)
    weights = torch.randn_like(out)
    gradients = torch.autograd.grad(out, (q, k, v), weights)
    for b in range(10):
        mine, keys = (slice(o[b], o[b + 1]) for o in offsets)
        alone, alone_lse = linbias.torch.attention(
            *(x.transpose(0, 1)[None] for x in (q[mine], k[keys], v[keys])), left[b], **options
        )
        one = alone[0].transpose(0, 1)
        torch.testing.assert_close(out[mine], one, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(lse[mine], alone_lse[0].T, rtol=1e-13, atol=1e-13)
        for g, x in zip(
            gradients, torch.autograd.grad(one, (q, k, v), weights[mine]), strict=True
        ):
            own = mine if g is gradients[0] else keys
            torch.testing.assert_close(g[own], x[own], rtol=1e-12, atol=1e-12)


def test_packed_sequences_do_not_see_a_neighbours_nan():
    q, k, v = torch.randn(3, 30, 2, 8)
    q[:10], k[:10], v[:10] = torch.nan, torch.inf, torch.nan
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    offsets = torch.tensor([0, 10, 13, 30])
    out = linbias.torch.attention_varlen(q, k, v, offsets, offsets)
    assert out[10:].isfinite().all()
    for gradient in torch.autograd.grad(out[10:].sum(), (q, k, v)):
        assert gradient[10:].isfinite().all()


@pytest.mark.parametrize("num_keys", [0, 5])
def test_a_packing_without_queries_has_gradients_of_zeros(num_keys):
    q = torch.randn(0, 2, 4, requires_grad=True)
    k, v = (torch.full((num_keys, 2, 4), np.nan, requires_grad=True) for _ in range(2))
    left = torch.tensor([0.5, np.inf], requires_grad=True)
    offsets = torch.tensor([0, 0]), torch.tensor([0, num_keys])
    out, lse = linbias.torch.attention_varlen(q, k, v, *offsets, left, return_lse=True)
    assert out.shape == (0, 2, 4) and lse.shape == (0, 2)
    for result in (out, lse):
        gradients = torch.autograd.grad(result.sum(), (q, k, v, left), retain_graph=True)
        for leaf, gradient in zip((q, k, v, left), gradients, strict=True):
            assert torch.equal(gradient, torch.zeros_like(leaf))


def test_packed_sequences_take_placement_of_their_own():
    lengths_q, lengths_k = (3, 5, 2), (6, 5, 9)
    q, k, v = (
        torch.randn(sum(n), heads, 8, dtype=torch.float64)
        for n, heads in ((lengths_q, 4), (lengths_k, 2), (lengths_k, 2))
    )
    offsets = [torch.tensor([0, *np.cumsum(n)]) for n in (lengths_q, lengths_k)]
    ranges = torch.tensor([[[1, 5], [0, 2]], [[0, 5], [5, 5]], [[3, 9], [0, 9]]])
    starts = torch.tensor([-1, 0, 12])
    for placement in (
        {"key_range": ranges},
        {"query_start": starts},
        {"key_range": ranges[:, 0], "query_start": starts},
    ):
        out = linbias.torch.attention_varlen(q, k, v, *offsets, causal=False, **placement)
        for b in range(3):
            mine, keys = (slice(o[b], o[b + 1]) for o in offsets)
            alone = linbias.torch.attention(
                *(x.transpose(0, 1)[None] for x in (q[mine], k[keys], v[keys])),
                causal=False,
                **{name: x[b : b + 1] for name, x in placement.items()},
            )
            torch.testing.assert_close(out[mine], alone[0].transpose(0, 1))


def run_packed(q, k, v, left, right, offsets, **options):
    options |= {"right_slopes": right, "causal": False, "return_lse": True}
    out, lse = linbias.torch.attention_varlen(q, k, v, offsets, offsets, left, **options)
    return out.square().sum() + lse.sin().sum()


# What the compiler itself warns of on the way.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("implementation", ("auto", "dense"))
def test_packed_sequences_compile_whole(implementation):
    offsets = torch.tensor([0, 10, 10, 13, 30])
    arrays = (*torch.randn(3, 30, 4, 8), torch.rand(4, 4), torch.rand(4))
    gradients, compiled = [], torch.compile(run_packed, fullgraph=True, backend="aot_eager")
    for function in (run_packed, compiled):
        leaves = [x.clone().requires_grad_() for x in arrays]
        loss = function(*leaves, offsets, implementation=implementation)
        gradients.append(torch.autograd.grad(loss, leaves))
    for eager, whole in zip(*gradients, strict=True):
        torch.testing.assert_close(whole, eager)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_packed_sequences_compile_with_dropout_that_backward_draws_again():
    """Backward hands a gradient to the keys that were kept."""
    offsets, v = torch.tensor([0, 8, 20]), torch.ones(20, 1, 1, requires_grad=True)
    q = torch.zeros(20, 1, 4)
    run = torch.compile(linbias.torch.attention_varlen, fullgraph=True, backend="aot_eager")
    out = run(q, q, v, offsets, offsets, [0.0], dropout=0.5)
    (dv,) = torch.autograd.grad(out.sum(), v)
    torch.testing.assert_close(dv.sum(), out.sum().detach())  # linear in v, which is all ones


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("mode", (torch.inference_mode, lambda: torch.autocast("cpu")))
def test_compiled_packed_sequences_have_their_gradients_in_any_mode_of_backward(mode):
    offsets, x = torch.tensor([0, 2, 5]), torch.randn(5, 2, 4, requires_grad=True)
    run = torch.compile(linbias.torch.attention_varlen, fullgraph=True, backend="aot_eager")
    wanted = torch.autograd.grad(run(x, x, x, offsets, offsets).sum(), x)[0]
    out = run(x, x, x, offsets, offsets).sum()
    with mode():
        found = torch.autograd.grad(out, x)[0]
    assert wanted.any() and torch.equal(found, wanted)


IMPORT = """
import torch
with {}:
    import linbias.torch
x = torch.randn(5, 2, 4, requires_grad=True)
compiled = torch.compile(linbias.torch.attention_varlen, backend="aot_eager")
for attend in (linbias.torch.attention_varlen, compiled):
    out = attend(x, x, x, *[torch.tensor([0, 2, 5])] * 2)
    print(torch.autograd.grad(out.sum(), x)[0].norm().item())
"""


@pytest.mark.processes
@pytest.mark.parametrize("mode", ("inference_mode()", "autocast('cpu')", "device('meta')"))
def test_gradients_do_not_depend_on_the_mode_of_the_first_import(mode):
    code = IMPORT.format(f"torch.{mode}")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    eager, compiled = map(float, done.stdout.split())
    assert eager > 0 and compiled == pytest.approx(eager)


def test_nested_tensors_run_as_packed_sequences():
    lengths, key_lengths = (3, 7, 5), (4, 7, 1)
    parts = [torch.randn(n, 4, 8, dtype=torch.float64) for n in lengths]
    key_parts = [torch.randn(n, 2, 8, dtype=torch.float64) for n in key_lengths]
    q, k = (
        torch.nested.nested_tensor(x, layout=torch.jagged, requires_grad=True)
        for x in (parts, key_parts)
    )
    out, lse = linbias.torch.attention(
        q.transpose(1, 2), k.transpose(1, 2), k.transpose(1, 2) * 2, causal=False, return_lse=True
    )
    assert out.is_nested and out.shape[:2] == (3, 4)
    (out.values().square().sum() + lse.values().sum()).backward()
    for b, (rows, keys) in enumerate(zip(parts, key_parts, strict=True)):
        leaves = [x.transpose(0, 1)[None].requires_grad_() for x in (rows, keys)]
        alone, alone_lse = linbias.torch.attention(
            *leaves, leaves[1] * 2, causal=False, return_lse=True
        )
        torch.testing.assert_close(out.unbind()[b], alone[0])
        torch.testing.assert_close(lse.unbind()[b], alone_lse[0])
        gradients = torch.autograd.grad(alone.square().sum() + alone_lse.sum(), leaves)
        for leaf, gradient in zip((q, k), gradients, strict=True):
            torch.testing.assert_close(leaf.grad.unbind()[b], gradient[0].transpose(0, 1))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_other_nested_tensors_are_refused_with_the_way_out():
    parts = [torch.randn(n, 2, 8) for n in (3, 7)]
    jagged = torch.nested.nested_tensor(parts, layout=torch.jagged)
    ready, plain = jagged.transpose(1, 2), torch.randn(2, 2, 7, 8)
    strided = torch.nested.nested_tensor(parts)
    other = torch.nested.nested_tensor(parts[::-1], layout=torch.jagged).transpose(1, 2)
    run, mask = linbias.torch.attention, torch.ones(1, 1, dtype=torch.bool)
    not_jagged = "q must be a contiguous jagged tensor .*: use torch.nested"
    refused = [
        (lambda: run(jagged, ready, ready), TypeError, not_jagged),
        (lambda: run(strided, ready, ready), TypeError, not_jagged),
        (lambda: run(ready, ready, plain), TypeError, "v is not: use .*attention_varlen"),
        (lambda: run(ready, ready, ready, mask=mask), ValueError, "mask cannot be given with"),
        (lambda: run(ready, ready, other), ValueError, "k and v .* sequences differ in length"),
        (lambda: linbias.torch.attention_weights(ready, ready), TypeError, "q is a nested tensor"),
    ]
    for call, error, words in refused:
        with pytest.raises(error, match=words):
            call()


class Packed(torch.nn.Module):
    def forward(self, q, k, v, offsets):
        window = q.shape[0] // 2, 0
        return linbias.torch.attention_varlen(q, k, v, offsets, offsets, window=window)


def draw_packed(total):
    rows = (torch.randn(total, heads, 8) for heads in (4, 2, 2))
    return *rows, torch.tensor([0, 4, total])


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_packed_sequences_export_with_a_free_total(strict):
    total = torch.export.Dim("total", min=2, max=4096)
    free = ({0: total},) * 3 + (None,)
    program = torch.export.export(Packed(), draw_packed(11), dynamic_shapes=free, strict=strict)
    longer = draw_packed(200)
    torch.testing.assert_close(program.module()(*longer), Packed()(*longer))


@pytest.mark.thorough
def test_one_compiled_program_runs_packed_sequences_of_all_totals():
    torch._dynamo.reset()
    programs = []

    def keep(program, _):
        programs.append(program)
        return program

    compiled = torch.compile(Packed(), fullgraph=True, dynamic=True, backend=keep)
    for total in (11, 30, 77, 100):
        arrays = draw_packed(total)
        torch.testing.assert_close(compiled(*arrays), Packed()(*arrays))
    assert len(programs) == 1


STAMPS = np.random.default_rng(3).uniform(0, 9, (28, 4))
PLACES = {
    "of-all-heads": {"positions": np.sort(STAMPS[:, 0])},
    "of-heads": {"positions": np.sort(STAMPS, 0)},
    "integers": {"positions": np.arange(28) * 3 + 1_700_000_000_000_000_000},
    "in-any-order": {"positions": STAMPS, "causal": False},
    "clocks": {"positions": STAMPS[:, 0], "query_positions": STAMPS[4:22, 1], "causal": False},
    "queries-at-keys": {"positions": np.sort(STAMPS[:, 0]), "query_start": np.array([2, 0, 0, 4])},
    "ranges": {"positions": np.sort(STAMPS[:, 0]),
               "key_range": np.array([[1, 8], [0, 3], [0, 5], [2, 12]])},
}  # fmt: skip


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("name", PLACES)
def test_positions_of_packed_sequences_are_those_of_each_alone(name, compiled):
    lengths_q, lengths_k = (5, 3, 5, 5), (8, 3, 5, 12)
    q, k, v = (
        torch.randn(sum(n), heads, 8, dtype=torch.float64, requires_grad=True)
        for n, heads in ((lengths_q, 4), (lengths_k, 2), (lengths_k, 2))
    )
    options = {n: x if n == "causal" else torch.tensor(x) for n, x in PLACES[name].items()}
    leaves = [q, k, v]
    for x in options.values():
        if torch.is_tensor(x) and x.is_floating_point():
            leaves.append(x.requires_grad_())
    offsets = [torch.tensor([0, *np.cumsum(n)]) for n in (lengths_q, lengths_k)]
    attend = linbias.torch.attention_varlen
    if compiled:
        attend = torch.compile(attend, backend="aot_eager", fullgraph=True)
    out = attend(q, k, v, *offsets, [0.5, 0.1, 2.0, 0.0], **options)
    alone = []
    for b in range(4):
        mine, keys = (slice(o[b], o[b + 1]) for o in offsets)
        own = {}
        for n, x in options.items():
            if n in ("positions", "query_positions"):
                x = x[keys if n == "positions" else mine].movedim(0, -1)[None]
            own[n] = x if n == "causal" or "positions" in n else x[b : b + 1]
        arrays = (x.transpose(0, 1)[None] for x in (q[mine], k[keys], v[keys]))
        one = linbias.torch.attention(*arrays, [0.5, 0.1, 2.0, 0.0], **own)
        alone.append(one[0].transpose(0, 1))
    alone = torch.cat(alone)
    torch.testing.assert_close(out, alone, rtol=1e-13, atol=1e-13)
    weights = torch.randn_like(out)
    gradients = (torch.autograd.grad(x, leaves, weights) for x in (out, alone))
    for ours, true in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, true, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("of_heads", [False, True])
def test_nested_tensors_take_nested_positions(of_heads):
    lengths = (7, 1, 12)
    parts = [torch.randn(n, 4, 8, dtype=torch.float64) for n in lengths]
    x = [torch.rand(n, *[4] * of_heads, dtype=torch.float64).cumsum(0) for n in lengths]

    def jagged(rows):
        made = torch.nested.nested_tensor(rows, layout=torch.jagged)
        return made.transpose(1, 2) if made.dim() > 2 else made

    q = jagged(parts)
    out = linbias.torch.attention(q, q, q, positions=jagged(x))
    for part, own, found in zip(parts, x, out.unbind(), strict=True):
        one = part.transpose(0, 1)[None]
        alone = linbias.torch.attention(one, one, one, positions=own.movedim(0, -1)[None])
        torch.testing.assert_close(found, alone[0])
    for wrong, kind, words in (
        (x[0], TypeError, "positions of nested tensors must be a contiguous jagged tensor"),
        (jagged(x[::-1]), ValueError, "positions is a nested tensor whose sequences differ"),
    ):
        with pytest.raises(kind, match=words):
            linbias.torch.attention(q, q, q, positions=wrong)


@pytest.mark.parametrize(("options", "words"), (
    ({"positions": [0, 1]}, r"positions must have shape \[total_k\] = \[5\] or \[total_k, H\]"
     r" = \[5, 2\], got \[2\]"),
    ({"query_positions": [0, 1]}, "query_positions lie among positions of keys; give positions"),
    ({"positions": [0, 1, 0, 2, 1]}, r"positions must not fall, got 1 after 2 at \[0, 2\]"),
    ({"positions": torch.ones(5, device="meta")}, "positions is on meta but q is on cpu"),
))  # fmt: skip
def test_positions_that_do_not_fit_a_packing_are_refused(options, words):
    q = torch.ones(5, 2, 4)
    offsets = torch.tensor([0, 2, 5])
    with pytest.raises(ValueError, match=words):
        linbias.torch.attention_varlen(q, q, q, offsets, offsets, **options)


def test_packed_time_stamps_of_numpy_count_in_their_own_unit():
    q = torch.randn(5, 2, 4)
    offsets = torch.tensor([0, 2, 5])
    seconds = np.array([[0, 7, 1, 2, 4], [3, 4, 0, 1, 9]]).T
    out, exact = (
        linbias.torch.attention_varlen(q, q, q, offsets, offsets, positions=x)
        for x in ((seconds + 17 * 10**17).astype("datetime64[ns]"), seconds)
    )
    torch.testing.assert_close(out, exact)
