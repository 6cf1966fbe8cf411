"""Check and measure the Triton kernels on one CUDA GPU, peers interleaved; stages with time limits of their own, 10 minutes in all.

    python benchmarks/bench_gpu.py                          # all but tiles; records to records
    PYTHONPATH=src:tests:benchmarks python3 benchmarks/bench_gpu.py --output DIR      # on a bare machine, nothing installed
    python benchmarks/bench_gpu.py --stages model speed --shapes 16x64 --lengths 4096 16384
    python benchmarks/bench_gpu.py --stages tiles           # other tile sizes beside those of linbias/kernels/triton/sizes.py
    python benchmarks/bench_gpu.py --dry-run                # the whole script at tiny sizes in Triton's interpreter

    contract    the contract suite, compiled for the device
    sanitizer   a few cases of it under compute-sanitizer
    model       train a language model with the kernels; its queries and keys serve as inputs
    speed       attention and its peers, checked, then timed; what the device reaches in products and copies
    decode      one token against a long cache
    accuracy    the error at great length beside the form slope * key_index
    tiles       forward and backward with other tile sizes

A stage that fails or hangs costs the others nothing: each is a process. Each writes DIR/<stage>.log, and all together
DIR/<machine>-<date>.jsonl in the format of record.py. Peers, where they are to be had: FlexAttention with an ALiBi score_mod, and that with
a window per head as BlockMask; SDPA with two more columns that carry the bias, with the bias as a mask, and without a bias (for
scale only: it computes something else); the Forgetting Transformer's kernel with adaptive pruning, if its one file lies in
.external/forgetting_attention.py; flash_attn with alibi_slopes. A peer that is wrong is left out, and said to be.
"""

import argparse
import contextlib
import importlib.util
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import linbias
import linbias.torch
import record
from linbias.kernels.triton.sizes import Sizes, Tile, forced
from linbias.torch import triton

ROOT = Path(__file__).resolve().parents[1]
# Seconds.
STAGES = {
    "contract": 150,
    "sanitizer": 50,
    "model": 40,
    "speed": 280,
    "decode": 40,
    "accuracy": 30,
}
STAGES |= {"tiles": 240}
MODEL = Path(tempfile.gettempdir()) / "linbias-bench-model"
PROCESSES = 8  # that compile and test at once
MASK_LIMIT_BYTES = 8 * 2**30
PYTEST = [sys.executable, "-m", "pytest", "-q", "-W", "default", "-p", "no:cacheprovider"]
FOX = ROOT / ".external" / "forgetting_attention.py"


def peers(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, plain: bool
) -> dict[str, Callable[[], Callable[[], Tensor]]]:
    """What makes each peer that can run here; `plain` asks for those of slope-free attention only."""
    torch.compiler.reset()  # else the second length is compiled for all lengths, and is slower
    T, scale = q.shape[2], q.shape[-1] ** -0.5
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def flex(window: Tensor | None) -> Callable[[], Tensor]:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        def near(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return i >= j if window is None else (i >= j) & (i - j <= window[h])

        def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return s - slopes[h] * (i - j)

        heads = None if window is None else len(slopes)
        mask = torch.compile(create_block_mask)(near, None, heads, T, T, device=q.device)
        run, score_mod = torch.compile(flex_attention), None if plain else score
        return lambda: run(q, k, v, score_mod=score_mod, block_mask=mask)

    def columns() -> Callable[[], Tensor]:
        wide_q, wide_k = with_bias_columns(q, k, slopes)
        return lambda: sdpa(wide_q, wide_k, v, is_causal=True, scale=scale)

    def mask() -> Callable[[], Tensor]:
        away = torch.arange(T, device=q.device)
        bias = slopes[:, None, None] * (away - away[:, None])
        bias = bias.masked_fill(away > away[:, None], -math.inf).to(q.dtype)
        return lambda: sdpa(q, k, v, attn_mask=bias)

    def fox() -> Callable[[], Tensor]:
        forget = load(FOX).forgetting_attention
        gates = -slopes[None, :, None].expand(q.shape[0], -1, T).float().contiguous()
        options = {"head_first": True, "sm_scale": scale, "adaptive_threshold": "auto"}
        return lambda: forget(q, k, v, gates, **options)

    def flash() -> Callable[[], Tensor]:
        from flash_attn import flash_attn_func  # type: ignore[import-not-found]

        turned = [x.transpose(1, 2) for x in (q, k, v)]
        return lambda: flash_attn_func(*turned, causal=True, alibi_slopes=slopes).transpose(1, 2)

    found: dict[str, Callable[[], Callable[[], Tensor]]] = {
        "sdpa, no bias": lambda: lambda: sdpa(q, k, v, is_causal=True)
    }
    if q.is_cuda:
        found["flex"] = lambda: flex(None)
    if q.is_cuda and not plain:
        from bench_attention import window_per_head

        found["flex, window mask"] = lambda: flex(window_per_head(q, k, slopes))
    if not plain:
        found["sdpa, bias columns"] = columns
        if slopes.numel() * T * T * q.element_size() < MASK_LIMIT_BYTES:
            found["sdpa, mask"] = mask
        if FOX.exists():
            found["fox + acp"] = fox
        if importlib.util.find_spec("flash_attn"):
            found["flash_attn"] = flash
    return found


def with_bias_columns(q: Tensor, k: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
    """q and k with 8 more columns whose products are slope * key / scale: the position in two digits, exact in 16 bits."""
    B, H, T, D = q.shape
    position = torch.arange(T, device=q.device)
    digits = torch.stack((position // 256 * 256, position % 256), -1).to(q.dtype)
    columns = q.new_zeros(2, B, H, T, 8)
    columns[0, ..., :2] = (slopes * D**0.5)[:, None, None]
    columns[1, ..., :2] = digits
    return torch.cat((q, columns[0]), -1), torch.cat((k, columns[1]), -1)


def load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rates(options: argparse.Namespace) -> tuple[float, float]:
    """What the device reaches in plain matrix products and copies, per second: limits to hold the rest against."""
    n = 64 if options.dry_run else 8192
    a, b = torch.randn(2, n, n, device=options.device, dtype=options.dtype)
    source = torch.zeros(n * n * 8, dtype=torch.uint8, device=options.device)
    target = torch.empty_like(source)
    functions = {"matrix product": lambda: a @ b, "copy": lambda: target.copy_(source)}
    reached = []
    for name, times in record.interleave(functions, options.repeats).items():
        work = {"flop": 2 * n**3} if name != "copy" else {"bytes": 2 * source.numel()}
        line = {"case": "rates", "implementation": name, "dtype": str(options.dtype)[6:], **work}
        line |= {**record.spread(times), "repeats": options.repeats, **record.here(options.device)}
        record.write(line, options.records)
        reached.append(next(iter(work.values())) / max(line["p50_ms"], 1e-6) * 1e3)
        unit = "TB/s" if name == "copy" else "TFLOP/s"
        print(f"{name}: {reached[-1] / 1e12:.2f} {unit}", flush=True)
    return reached[0], reached[1]


def work_kept(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> float:
    """The share of the causal pairs that the Triton kernels read."""
    found = linbias.torch.visited(q, k, v, slopes, implementation="triton")
    return round(found.work_kept.mean().item(), 4)


def model(options: argparse.Namespace) -> None:
    """A small language model, trained with the kernels."""
    from linbias.data.corpus import load_corpus
    from linbias.lm.training import TrainSettings, train

    shutil.rmtree(MODEL, ignore_errors=True)
    sizes = {"hidden_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 16}
    amount = {"length": 512, "batch_size": 32, "steps": 200, "precision": "bf16"}
    if options.dry_run:
        sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
        amount = {"length": 8, "batch_size": 1, "steps": 2, "device": "cpu"}
    fields = {**sizes, "intermediate_size": 2 * sizes["hidden_size"], "position": "alibi"}
    settings = TrainSettings(model={**fields, "attention_implementation": "triton"}, **amount)
    train(settings, load_corpus("stdlib"), MODEL, progress=False)
    print((MODEL / "metrics.json").read_text())


def inputs(T: int, H: int, D: int, options: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """Random normal q, k and v, and those of the model where it has so many heads of that size."""
    torch.manual_seed(0)
    yield "random normal", torch.randn(3, 1, H, T, D, device=options.device, dtype=options.dtype)
    if (MODEL / "metrics.json").exists() and T >= 16384:
        config = json.loads((MODEL / "config.json").read_text())
        heads = config["num_attention_heads"]
        if (heads, config["hidden_size"] // heads) == (H, D):
            from bench_attention import trained_inputs

            yield "trained model", trained_inputs(MODEL, T, options.device, options.dtype)[-1]


def speed(options: argparse.Namespace) -> None:
    limits = rates(options)
    for T in options.lengths:
        for H, D in options.shapes:
            slopes = torch.tensor(linbias.slopes(H), dtype=torch.float32, device=options.device)
            if T <= 4096:
                arrays = next(inputs(T, H, D, options))[1]
                compare("random normal", arrays, slopes * 0, limits, options)
            if T >= 4096 or options.dry_run:
                for kind, arrays in inputs(T, H, D, options):
                    compare(kind, arrays, slopes, limits, options)


def compare(
    kind: str,
    arrays: Any,
    slopes: Tensor,
    limits: tuple[float, float],
    options: argparse.Namespace,
) -> None:
    """Check, then time, every implementation of one case, forward and with backward."""
    q, k, v = leaves = [x.detach().requires_grad_() for x in arrays]
    _, H, T, D = q.shape
    dout = torch.randn_like(q)
    plain = not slopes.any()
    attend = partial(linbias.torch.attention, q, k, v, slopes, implementation="triton")
    makers: dict[str, Callable[[], Callable[[], Tensor]]] = {
        "triton": lambda: attend,
        "triton, tolerance 0": lambda: partial(attend, tolerance=0.0),
        **peers(q, k, v, slopes, plain),
    }
    functions: dict[str, Callable[[], Tensor]] = {}
    expected = rows_by_definition(q, k, v, slopes)
    for name, make in makers.items():
        try:
            function = make()
            with torch.no_grad():
                out = function()[:, :, -8:].double().cpu()
            torch.autograd.grad(function(), leaves, dout)
            error = ((out - expected).abs().max() / expected.abs().max()).item()
            assert error < 2e-2 or (name == "sdpa, no bias" and not plain), f"off by {error:.3g}"
            functions[name] = function
        except Exception as problem:  # a peer that cannot run is no reason to lose the others
            if name.startswith("triton"):
                raise
            print(f"{T} {H} {D} {name} is left out: {problem!s:.200}", flush=True)
    case = f"{'zero-slopes' if plain else 'causal'}-{T}"
    sizes = {"B": 1, "H": H, "G": H, "T": T, "S": T, "D": D, "dtype": str(options.dtype)[6:]}
    kept = work_kept(q, k, v, slopes)
    for backward in (False, True):
        timed = functions
        if backward:
            timed = {
                n: lambda f=f: torch.autograd.grad(f(), leaves, dout) for n, f in functions.items()
            }
        with torch.set_grad_enabled(backward):
            write_times(case, timed, sizes, backward, options, kind, kept, limits)


def rows_by_definition(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
    """The last 8 rows in float64."""
    with torch.no_grad():
        wide = [x.double() for x in (q[:, :, -8:], k, v)]
        return linbias.torch.attention(*wide, slopes.double(), implementation="dense").cpu()


def peak_memory(function: Callable[[], Any]) -> int | None:
    """Bytes that a call takes on the device at most, above what is there."""
    if not torch.cuda.is_available():
        return None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def write_times(
    case: str,
    functions: dict[str, Callable[[], Any]],
    sizes: dict[str, Any],
    backward: bool,
    options: argparse.Namespace,
    kind: str = "random normal",
    kept: float | None = None,
    limits: tuple[float, float] | None = None,
) -> None:
    """Time, record and print; beside the first function, and beside what the device could do at best with the work kept."""
    times = record.interleave(functions, options.repeats)
    B, H, G, T, S, D = (sizes[letter] for letter in "BHGTSD")
    first = record.spread(next(iter(times.values())))["p50_ms"]
    for name, values in times.items():
        line = {
            "case": case, "implementation": name, "mode": "forward+backward" if backward else "forward", **sizes,
            **record.spread(values), "repeats": options.repeats, "peak_memory_bytes": peak_memory(functions[name]),
            "flop": record.flop(B, H, T, S, D) * (7 if backward else 2) // 2,
            "bytes": record.moved_bytes(B, H, G, T, S, D, 2) * (3 if backward else 1),
            "work_kept": kept if name == "triton" else None,
            "inputs": kind, **record.here(options.device),
        }  # fmt: skip
        record.write(line, options.records)
        text = f"{case:18} H={H} D={D} {kind[:7]:7} {line['mode']:16} {name:22} {line['p50_ms']:9.3f} ms"
        text += f" {line['p50_ms'] / max(first, 1e-9):6.2f}"
        if limits is not None and line["work_kept"]:
            least = max(line["flop"] * line["work_kept"] / limits[0], line["bytes"] / limits[1])
            text += f"   {line['p50_ms'] / least / 1e3:.2f} times the limit, {kept:.1%} kept"
        print(text, flush=True)


def tiles(options: argparse.Namespace) -> None:
    """Each kernel's tile exchanged for others, the rest as it is; the first line is the choice of sizes.py."""
    for H, D in options.shapes:
        compare_tiles(sorted(options.lengths)[len(options.lengths) // 2], H, D, options)


def compare_tiles(T: int, H: int, D: int, options: argparse.Namespace) -> None:
    q, k, v = (x.requires_grad_() for x in next(inputs(T, H, D, options))[1])
    slopes = torch.tensor(linbias.slopes(H), dtype=torch.float32, device=options.device)

    def run(sizes: Sizes, backward: bool) -> Any:
        with forced(sizes), torch.set_grad_enabled(backward):
            out = linbias.torch.attention(q, k, v, slopes, implementation="triton")
            return torch.autograd.grad(out.sum(), (q, k, v)) if backward else out

    sizes = {"B": 1, "H": H, "G": H, "T": T, "S": T, "D": D, "dtype": str(options.dtype)[6:]}
    chosen = triton._sizes(q, v)
    for kernel, choices in tile_choices(chosen, options).items():
        backward = kernel != "forward"
        functions = {f"triton, {kernel} as chosen": partial(run, chosen, backward)}
        for tile in choices:
            choice = partial(run, chosen._replace(**{kernel: tile}), backward)
            try:
                choice()
                functions[f"triton, {kernel} {tuple(tile)}"] = choice
            except Exception as problem:  # too large for the device, most likely
                print(f"{kernel} {tuple(tile)} is left out: {problem!s:.100}", flush=True)
        write_times(f"tiles-{T}", functions, sizes, backward, options)


def tile_choices(chosen: Sizes, options: argparse.Namespace) -> dict[str, list[Tile]]:
    """Other tiles for each kernel, such that those of backward still divide forward's."""
    if options.dry_run:
        return {"forward": [], "dkv": []}
    found = {}
    for kernel, rows in {"forward": (128,), "dq": (64, 128), "dkv": (32, 64)}.items():
        least = chosen.dq.keys if kernel == "forward" else 32
        most = chosen.forward.keys if kernel == "dq" else 128
        sizes = product(rows, (32, 64, 128), (4, 8), (2, 3))
        tiles = [Tile(*size) for size in sizes if least <= size[1] <= most]
        found[kernel] = [tile for tile in tiles if tile != getattr(chosen, kernel)]
    return found


def decode(options: argparse.Namespace) -> None:
    for batch in options.batches:
        decode_step(batch, options)


def decode_step(B: int, options: argparse.Namespace) -> None:
    """One token against a cache, with and without a bound on its norms."""
    (H, D), S = options.shapes[-1], max(options.lengths)
    torch.manual_seed(0)
    q = torch.randn(B, H, 1, D, device=options.device, dtype=options.dtype)
    k, v = torch.randn(2, B, H, S, D, device=options.device, dtype=options.dtype)
    bound = torch.linalg.vector_norm(k, dim=-1, dtype=torch.float32).amax(-1) * 1.001
    zero = torch.zeros(H, device=options.device)

    def ours(slopes: Tensor | None, bound: Tensor | None) -> Tensor:
        return linbias.torch.attention(q, k, v, slopes, key_bound=bound, implementation="triton")

    functions = {
        "triton, key_bound": lambda: ours(None, bound),
        "triton": lambda: ours(None, None),
        "triton, slopes 0": lambda: ours(zero, bound),
        "sdpa, no bias": lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v),
    }
    sizes = {"B": B, "H": H, "G": H, "T": 1, "S": S, "D": D, "dtype": str(options.dtype)[6:]}
    with torch.no_grad():
        write_times(f"decode-{S}", functions, sizes, False, options)


def accuracy(options: argparse.Namespace) -> None:
    """The error at great length beside the form slope * key_index, relative to float64."""
    for S in options.long:
        torch.manual_seed(0)
        q, k, v = (torch.randn(1, 2, n, 64, device=options.device) for n in (64, S, S))
        slopes = torch.tensor([0.5, 2.0**-8], device=options.device)
        truth = linbias.torch.attention(
            *(x.double() for x in (q, k, v)), slopes, implementation="dense"
        )
        ours = linbias.torch.attention(q, k, v, slopes, implementation="triton")
        at = torch.arange(S, device=options.device)
        score = q @ k.mT / 8 + slopes[:, None, None] * at
        other = score.masked_fill(at > at[-64:, None], -math.inf).softmax(-1) @ v
        for name, out in (("triton", ours), ("slope * key_index", other)):
            error = ((out - truth).abs().amax((0, 2, 3)) / truth.abs().amax((0, 2, 3))).tolist()
            line = {
                "case": f"accuracy-{S}", "implementation": name, "mode": "forward", "S": S, "dtype": "float32",
                "relative_error": {"slope 1/2": error[0], "slope 1/256": error[1]}, **record.here(options.device),
            }  # fmt: skip
            record.write(line, options.records)
            print(f"{line['case']} {name:20} {error[0]:.2e} {error[1]:.2e}", flush=True)


def contract(options: argparse.Namespace) -> None:
    """The contract suite, compiled for the device: in several processes, as most of the time goes into compiling."""
    if options.dry_run:
        raise SystemExit(run([*PYTEST, "tests/test_triton_gpu.py", "-k", "cannot_run"]))
    listed = subprocess.run(
        [*PYTEST, "tests/test_triton_gpu.py", "-m", "gpu", "--collect-only"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    ).stdout  # fmt: skip
    tests = [line for line in listed.splitlines() if "::" in line and " " not in line]
    print(f"{len(tests)} tests", flush=True)
    shares = [tests[n::PROCESSES] for n in range(PROCESSES)]
    processes = [subprocess.Popen([*PYTEST, *share], cwd=ROOT) for share in shares if share]
    codes = [process.wait() for process in processes]
    raise SystemExit(max(codes, default=1))


def sanitizer(options: argparse.Namespace) -> None:
    """A few cases of the contract under memcheck, each array an allocation of its own."""
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if options.dry_run or not Path(tool).exists():
        print("compute-sanitizer is not here")
        return
    cases = (
        "T-below-S or range-symmetric or range-per-head or start-far-away or dropout or long-cache"
    )
    names = f"on_a_gpu and bfloat16 and ({cases})"
    tests = [*PYTEST, "-x", "tests/test_triton_gpu.py", "-m", "gpu", "-k", names]
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    raise SystemExit(run([tool, "--tool", "memcheck", "--error-exitcode", "9", *tests]))


def run(command: list[str]) -> int:
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def run_stages(options: argparse.Namespace) -> None:
    """Each stage in a process of its own, with its limit; says in the end how they fared."""
    fared = {}
    for stage in options.stages:
        log = options.output / f"{stage}.log"
        command = [sys.executable, __file__, *sys.argv[1:], "--only", stage]
        with log.open("w") as file:
            process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                code = process.wait(timeout=STAGES[stage])
                fared[stage] = "ok" if code == 0 else f"exit status {code}"
            except subprocess.TimeoutExpired:
                fared[stage] = f"stopped after {STAGES[stage]} s"
            finally:  # with all that it started, or the next stage would share the device
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        print(f"== {stage}: {fared[stage]}\n{log.read_text()[-6000:]}", flush=True)
    print(json.dumps(fared))
    if set(fared.values()) != {"ok"}:
        raise SystemExit(1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    usual = [stage for stage in STAGES if stage != "tiles"]
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=usual)
    parser.add_argument("--only", choices=STAGES, help=argparse.SUPPRESS)
    parser.add_argument("--lengths", nargs="+", type=int, default=[4096, 16384, 65536, 2048])
    parser.add_argument(
        "--shapes", nargs="+", default=["16x64", "32x128"], help="heads x size of a head"
    )
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--long", nargs="+", type=int, default=[262_144, 1_048_576])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--output", type=Path, default=record.RECORDS)
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    options.device = "cpu" if options.dry_run else "cuda"
    options.dtype = (
        torch.float16 if options.dry_run else torch.bfloat16
    )  # the interpreter has no bfloat16
    options.shapes = [tuple(map(int, shape.split("x"))) for shape in options.shapes]
    if options.dry_run:
        options.lengths, options.shapes = [16], [(1, 16)]
        options.batches, options.long, options.repeats = [1], [96], 1
    options.output.mkdir(parents=True, exist_ok=True)
    options.records = options.output / record.default_path(options.device).name
    if options.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"
    if options.only is None:
        run_stages(options)
    else:
        globals()[options.only](options)


if __name__ == "__main__":
    main()
