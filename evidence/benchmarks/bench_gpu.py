"""Check and measure the Triton kernels on one CUDA GPU, beside peers, in 10 minutes: a page.

    python evidence/benchmarks/bench_gpu.py               # all but tiles
    python3 evidence/benchmarks/bench_gpu.py --output DIR # likewise, from a bare checkout
    python evidence/benchmarks/bench_gpu.py --stages speed --shapes 16x64 --lengths 4096 16384
    python evidence/benchmarks/bench_gpu.py --stages tiles # beside those of triton/sizes.py
    python evidence/benchmarks/bench_gpu.py --dry-run      # at tiny sizes, in Triton's interpreter

It needs PyTorch, Triton, NumPy, pytest and (training) Transformers. Stages, in order of worth:

    contract    the contract suite, forward and backward, compiled for the device
    speed       attention and its peers, checked, then timed; rates of products and copies
    decode      one token against a long cache
    training    attention of a small model that is trained here
    gates       keys at positions: forget gates
    sanitizer   a few cases of the contract under compute-sanitizer
    tiles       forward and backward with other tile sizes

A stage that fails or hangs costs the others nothing: each is a process, with a time by which it
must end; what one saves, the next have. Each record is appended to DIR/<machine>-<date>.jsonl as
it is measured (record.py), and DIR/page.md is written anew after each stage: a run may be cut at
any moment. Peers are those of gpu/peers.py that are to be had; one that is wrong is left out, and
said to be.
"""

import argparse
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# For every process that a stage starts, too. What is installed goes first: it may be compiled.
FOLDERS = [str(ROOT / x) for x in ("tests/support", "tests/torch", "evidence/benchmarks")]
if importlib.util.find_spec("linbias") is None:
    FOLDERS.insert(0, str(ROOT / "src"))
sys.path += FOLDERS
GIVEN = filter(None, [os.environ.get("PYTHONPATH")])
os.environ["PYTHONPATH"] = os.pathsep.join([*GIVEN, *FOLDERS])

import torch  # noqa: E402

import record  # noqa: E402
from gpu import stages, suite  # noqa: E402
from gpu.page import page  # noqa: E402
from gpu.timing import AGAIN, lines_so_far  # noqa: E402

# What runs, and how many seconds it has: 440 in all but tiles.
STAGES = {
    "contract": (suite.contract, 120),
    "speed": (stages.speed, 190),
    "decode": (stages.decode, 35),
    "training": (stages.training, 25),
    "gates": (stages.gates, 35),
    "sanitizer": (suite.sanitizer, 35),
    "tiles": (stages.tiles, 240),
}
WARM = "warm"  # beside the contract, as long as that runs; it may fail


def run_stages(options: argparse.Namespace) -> None:
    """Each stage in a process of its own; a page of how it went after each."""
    fared = dict.fromkeys(options.stages, "not begun")
    end = time.monotonic()
    for stage in options.stages:
        end += 1000 if options.dry_run else STAGES[stage][1]
        begun = time.monotonic()
        with_warm = stage == "contract" and "speed" in options.stages and not options.dry_run
        with started(WARM, options) if with_warm else nullcontext():
            how = wait_for(stage, end, options)
        fared[stage] = f"{how}, {time.monotonic() - begun:.0f} s"
        log = (options.output / f"{stage}.log").read_text()[-3000:]
        print(f"== {stage}: {fared[stage]}\n{log}", flush=True)
        text = page(lines_so_far(options), fared)
        (options.output / "page.md").write_text(text)
    print(text)
    if not all(how.startswith("ok") for how in fared.values()):
        raise SystemExit(1)


def wait_for(stage: str, end: float, options: argparse.Namespace) -> str:
    """Run a stage until it ends or must end; again where it says that the device is in error."""
    while True:
        with started(stage, options) as process:
            try:
                code = process.wait(timeout=max(1.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                return "stopped, its time was up"
        if code != AGAIN:
            return "ok" if code == 0 else f"exit status {code}"


@contextmanager
def started(stage: str, options: argparse.Namespace) -> Iterator[subprocess.Popen[bytes]]:
    """The process of a stage; it ends with all that it started, or the next would share the device
    with them.
    """
    command = [sys.executable, __file__, *sys.argv[1:], "--only", stage]
    command += ["--start", str(options.start)]
    with (options.output / f"{stage}.log").open("a") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    usual = [stage for stage in STAGES if stage != "tiles"]
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=usual)
    parser.add_argument("--only", choices=[*STAGES, WARM], help=argparse.SUPPRESS)
    parser.add_argument("--start", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--lengths", nargs="+", type=int, default=[16384, 4096, 65536, 32768])
    parser.add_argument("--shapes", nargs="+", default=["32x128", "16x64"], help="heads x size")
    caches = ["1x65536", "16x16384"]
    parser.add_argument("--caches", nargs="+", default=caches, help="batch x keys")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, default=record.RECORDS)
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    options.failed = False
    options.device = "cpu" if options.dry_run else "cuda"
    options.dtype = torch.float16 if options.dry_run else torch.bfloat16
    if options.dry_run:
        options.lengths, options.shapes, options.caches = [16], ["1x16"], ["1x16"]
        options.repeats = 1
    elif not torch.cuda.is_available():
        raise SystemExit("bench_gpu: there is no CUDA device; --dry-run tries it without one")
    options.shapes, options.caches = (
        [tuple(map(int, pair.split("x"))) for pair in pairs]
        for pairs in (options.shapes, options.caches)
    )
    os.environ["TRITON_INTERPRET"] = str(int(options.dry_run))
    options.output = options.output.resolve()
    options.output.mkdir(parents=True, exist_ok=True)
    options.records = options.output / record.default_path(options.device).name
    if options.only is None:
        options.start = options.records.stat().st_size if options.records.exists() else 0
        for stage in [*STAGES, WARM]:
            (options.output / f"{stage}.log").unlink(missing_ok=True)
        run_stages(options)
        return
    from interpreter import repaired  # after what says that kernels are interpreted

    with repaired() if options.dry_run else nullcontext():
        (stages.warm if options.only == WARM else STAGES[options.only][0])(options)
    if options.failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
