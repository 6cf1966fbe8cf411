"""Time linear-bias attention and the peers that a user can write today, interleaved in one run.

    python evidence/benchmarks/bench_attention.py                  # the usual cases, and memory
    python evidence/benchmarks/bench_attention.py --sets short     # half an hour on 2 cores
    python evidence/benchmarks/bench_attention.py --sets positions # keys at given positions
    python evidence/benchmarks/bench_attention.py --cases causal-8192 zero-slopes-4096 --repeats 9

Peers: PyTorch's scaled_dot_product_attention with the bias as a mask, the same without a bias (for
scale only: it computes something else), FlexAttention with an ALiBi score_mod, and that with a
BlockMask of a window per head, as wide as a bound from the norms allows. Every result is checked
before it is timed. `short` asks at about 4,096 tokens in all; `sdpa` is the mask as an
implementation of ours. `positions` are those that every call has by default (counted: what it
costs to read them), or sums of -log f over forget gates f = sigmoid(N(4, 1.5)), about 0.98, with
slope 1. On a CPU with a matrix unit, both sides without it:

    ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 MKL_ENABLE_INSTRUCTIONS=AVX512_E3 \\
        python evidence/benchmarks/bench_attention.py --sets short --target avx512_bf16
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, scaled_dot_product_attention

import linbias
import linbias.torch
import record
from gpu import peers
from linbias.kernels import core

ALLOWED_ERROR = {"float32": 2e-5, "bfloat16": 2e-2}
SDPA = ("sdpa mask", "sdpa, no bias")
FLEX = ("flex", "flex, window mask")
COUNTED, PLACED, LEARNED = "cpu, counted", "cpu, positions", "cpu, learned"
MEMORY_LENGTH = 32768


@dataclass(frozen=True)
class Case:
    name: str
    T: int
    ours: tuple[str, ...] = ("cpu", "blocked")
    peers: tuple[str, ...] = (*SDPA, *FLEX)
    B: int = 1
    D: int = 64
    dtype: str = "float32"
    backward: bool = False
    causal: bool = True
    slopes: str = "paper"  # or zero, or one
    gates: bool = False


USUAL = [
    Case("short-256", 256, ("cpu", "blocked", "dense"), B=8),
    Case("causal-2048", 2048, ("cpu", "blocked", "dense")),
    Case("causal-8192", 8192),
    Case("causal-32768", 32768, ("cpu",), FLEX),
    Case("causal-16384", 16384, ("cpu",), ()),
    Case("causal-131072", 131072, ("cpu",), ()),
    Case("bfloat16-8192", 8192, dtype="bfloat16"),
    Case("symmetric-8192", 8192, causal=False),
    Case("zero-slopes-4096", 4096, ("cpu",), SDPA[1:], slopes="zero"),
    Case("zero-slopes-bfloat16-4096", 4096, ("cpu",), SDPA[1:], dtype="bfloat16", slopes="zero"),
    # FlexAttention has no backward pass here.
    Case("training-4096", 4096, peers=SDPA, backward=True),
    Case("training-512", 512, peers=SDPA, B=4, backward=True),
]
# Beyond 2,048 tokens the mask is several times slower than no bias.
SHORT = [
    Case(
        f"{dtype}-{mode}-D{D}-{T}",
        T,
        ("cpu", "sdpa")[: 1 + (T <= 2048)],
        SDPA[T > 2048 :],
        B=4096 // T or 1,
        D=D,
        dtype=dtype,
        backward=mode == "backward",
    )
    for dtype, mode, D in product(("float32", "bfloat16"), ("forward", "backward"), (64, 32))
    for T in (64, 128, 256, 512, 1024, 2048, 4096, 8192)
]
POSITIONS = [
    Case(
        f"positions-{kind}-{T}{'-bfloat16' * (dtype != 'float32')}{'-training' * backward}",
        T,
        (COUNTED, PLACED) if kind == "counted" else (PLACED, LEARNED)[: 1 + backward],
        SDPA[:1] * (kind == "gates"),
        dtype=dtype,
        backward=backward,
        slopes="one" if kind == "gates" else "paper",
        gates=kind == "gates",
    )
    for kind, T in (("counted", 2048), ("counted", 8192), ("gates", 4096), ("gates", 8192))
    for dtype in ("float32", "bfloat16")
    for backward in (False, True)
]
SETS = {"usual": USUAL, "short": SHORT, "positions": POSITIONS, "memory": []}


def functions(
    case: Case, q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, x: Tensor
) -> dict[str, Callable[[], Tensor]]:
    """Everything that can run this case, by name; x are the positions, [1, H, T]."""
    attend = partial(linbias.torch.attention, q, k, v, slopes, causal=case.causal)
    plain = partial(scaled_dot_product_attention, q, k, v)
    fall = peers.falling(slopes, causal=case.causal)
    flex = partial(peers.flex, q, k, v, fall, causal=case.causal)
    special: dict[str, Callable[[], Callable[[], Tensor]]] = {
        COUNTED: lambda: partial(attend, implementation="cpu"),
        PLACED: lambda: partial(attend, implementation="cpu", positions=x.detach()),
        LEARNED: lambda: partial(attend, implementation="cpu", positions=x),
        "sdpa mask": lambda: partial(plain, attn_mask=mask(case, q, slopes, x)),
        "sdpa, no bias": lambda: partial(plain, is_causal=case.causal),
        "flex": flex,
        "flex, window mask": lambda: flex(window=peers.window_per_head(q, k, slopes)),
    }
    found = {name: partial(attend, implementation=name) for name in case.ours}
    return found | {n: special[n]() for n in (*case.ours, *case.peers) if n in special}


def mask(case: Case, q: Tensor, slopes: Tensor, x: Tensor) -> Tensor:
    """The bias, [1, H, T, T]: with three axes PyTorch leaves its fused way and is slower."""
    H, T = q.shape[1:3]
    bias, future = q.new_empty(1, H, T, T), torch.ones(T, T, dtype=torch.bool).triu_(1)
    for h in range(H):  # one at a time, since float64 of all heads would be 4 GB
        bias[0, h] = (x[0, h, :, None] - x[0, h]).abs() * -float(slopes[h])
        if case.causal:
            bias[0, h].masked_fill_(future, -torch.inf)
    return bias


def check(
    case: Case, name: str, out: Tensor, arrays: list[Tensor], slopes: Tensor, x: Tensor
) -> None:
    """Compare a few rows with the definition; the peer without a bias computes something else."""
    if name == "sdpa, no bias" and case.slopes != "zero":
        return
    q, k, v = (array.detach().double().numpy() for array in arrays)
    for t in (0, case.T // 3, case.T - 1):
        stop = t + 1 if case.causal else case.T
        call: dict[str, Any] = {"positions": x.detach()[..., :stop].numpy()}
        if not case.causal:
            call = {"causal": False, "query_start": [t] * case.B}
        rows = (q[:, :, t : t + 1], k[:, :, :stop], v[:, :, :stop])
        expected = linbias.attention(*rows, slopes.tolist(), **call)
        error = (out[:, :, t : t + 1].detach().double() - torch.from_numpy(expected)).abs().max()
        # Where positions are not whole, the mask rounds them to bfloat16.
        if not error < ALLOWED_ERROR[case.dtype] * (10 if case.gates and name in SDPA else 1):
            raise SystemExit(f"{case.name}: {name} is wrong: row {t} is off by {error:.3g}")


def bench(case: Case, options: argparse.Namespace) -> None:
    """Time everything that can run a case, and write the records."""
    H, paper, dtype = 8, linbias.slopes(8), getattr(torch, case.dtype)
    q, k, v = arrays = list(torch.randn(3, case.B, H, case.T, case.D).to(dtype))
    slopes = torch.tensor({"paper": paper, "zero": [0.0] * H, "one": [1.0] * H}[case.slopes])
    x = torch.arange(case.T, dtype=torch.float64).expand(1, H, -1)
    if case.gates:
        x = -logsigmoid(torch.randn(1, H, case.T, dtype=torch.float64) * 1.5 + 4).cumsum(-1)
    x = x.clone().requires_grad_(case.backward)
    runnable = functions(case, q, k, v, slopes.float(), x)
    with torch.no_grad():
        for name, function in runnable.items():
            check(case, name, function(), arrays, slopes, x)
    more = {name: {"target": core.target() if "cpu" in name else None} for name in runnable}
    for name in more:
        if (ours := name.partition(",")[0]) in ("cpu", "blocked"):
            call = {"causal": case.causal, "implementation": ours}
            if name in (COUNTED, PLACED, LEARNED):
                call["positions"] = x.detach()
            seen = linbias.torch.visited(q, k, v, slopes.float(), **call)
            more[name]["work_kept"] = round(seen.work_kept.mean().item(), 4)
    timed: dict[str, Callable[[], Any]] = dict(runnable)
    if case.backward:
        dout, leaves = torch.randn_like(q), [array.requires_grad_() for array in arrays]
        of = {name: [*leaves, x] if name == LEARNED else leaves for name in runnable}
        timed = {n: lambda n=n: torch.autograd.grad(runnable[n](), of[n], dout) for n in runnable}
    mode = record.BACKWARD if case.backward else record.FORWARD
    given = record.fields(case.name, q.shape, k.shape, case.dtype, mode, case.causal)
    with torch.set_grad_enabled(case.backward):
        record.compare(given, timed, options, more)


def prepare_memory(name: str, T: int) -> Callable[[], Any]:
    """One forward and backward pass, whose memory is measured."""
    q, k, v, dout = torch.randn(4, 1, 8, T, 64)
    small = [x[:, :, :64].clone().requires_grad_() for x in (q, k, v)]
    linbias.torch.attention(*small, implementation=name).sum().backward()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    return lambda: linbias.torch.attention(*leaves, implementation=name).backward(dout)


def trained_inputs(folder: Path, length: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """q, k and v of each layer of a model trained here, reading its own corpus."""
    from linbias.data.corpus import load_corpus
    from linbias.models import LinbiasForCausalLM

    model = LinbiasForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.from_numpy(load_corpus("stdlib").test[:length].astype("int64"))[None]
    return inputs_of(model, ids)


def inputs_of(model: torch.nn.Module, ids: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """q, k and v of each layer of a model that reads these tokens."""
    from linbias.models.decoder import positions

    caught = []

    def catch(q, k, v, *args, **kwargs):
        caught.append((q, k, v))
        return linbias.torch.attention(q, k, v, *args, **kwargs)

    positions.attention = catch
    with torch.no_grad():
        model(ids, use_cache=False, logits_to_keep=1)
    positions.attention = linbias.torch.attention
    return caught


def main() -> None:
    parser = record.parser(__doc__, repeats=7)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=["usual", "memory"])
    parser.add_argument("--cases", nargs="+", help="only these of the sets")
    parser.add_argument("--target", choices=core.targets(), help="of ours; default: the best here")
    options = parser.parse_args()
    core.force_target(options.target)
    torch.manual_seed(0)
    for case in (case for name in options.sets for case in SETS[name]):
        if not options.cases or case.name in options.cases:
            bench(case, options)
    if "memory" in options.sets and not options.cases:
        shape = (1, 8, MEMORY_LENGTH, 64)
        given = record.fields(f"memory-{MEMORY_LENGTH}", shape, shape, "float32", record.BACKWARD)
        names = ("cpu", "blocked")
        record.measure_memory(given, options, prepare_memory, names, MEMORY_LENGTH)


if __name__ == "__main__":
    main()
