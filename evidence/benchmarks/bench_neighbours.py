"""Time models beside busy processes, by how long OpenMP's threads spin before they sleep.

    python evidence/benchmarks/bench_neighbours.py          # a quarter of an hour on 2 cores
    python evidence/benchmarks/bench_neighbours.py --spins 0 1000 --works token --neighbours 0 1

read: 512 tokens, by four layers of the shape of BLOOM-560m, fused. token: one more, after them.
train: a step of a model of `make run`. run: that command as a whole, shortened, "watched" alone.
Every setting has a process of its own, since libgomp reads GOMP_SPINCOUNT when it is loaded;
"watched" is what the command line does (linbias._run.neighbours), "passive"
OMP_WAIT_POLICY=PASSIVE; processes take turns, and those that wait sleep. A neighbour is a process
that computes without end. A measurement during which anything else took more than a twentieth of
the cores is repeated.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

import record
from linbias._run.neighbours import considerate
from load import Load

WORKS = ("read", "token", "train", "run")
RUN = "extrapolate --methods alibi --steps 100 --limit-tokens 4096 --quiet --output".split()
SPINS = ("default", "watched", "passive", "one thread", "0", "1000", "10000", "100000")
VARIABLES = {
    **{"default": {}, "watched": {}, "passive": {"OMP_WAIT_POLICY": "PASSIVE"}},
    "one thread": {"OMP_NUM_THREADS": "1"},
}
BUSY = [sys.executable, "-c", "while True: pass"]
MOST_LOAD, TRIES = 0.05, 20


def main() -> None:
    parser = record.parser(__doc__)
    parser.add_argument("--spins", nargs="+", default=SPINS, help="numbers: GOMP_SPINCOUNT")
    parser.add_argument("--works", nargs="+", default=WORKS, choices=WORKS)
    parser.add_argument("--neighbours", type=int, nargs="+", default=(0, 1, 2))
    parser.add_argument("--work", choices=WORKS, help=argparse.SUPPRESS)  # what a worker does
    options = parser.parse_args()
    if options.work:
        with considerate() if options.spins == ["watched"] else nullcontext():
            return serve(options.work)
    for work in options.works:
        measure(work, ["watched"] if work == "run" else options.spins, options)


def measure(work: str, spins: Sequence[str], options: argparse.Namespace) -> None:
    mode = record.FORWARD if work in ("read", "token") else record.BACKWARD
    with ExitStack() as stack:
        workers = {spin: stack.enter_context(worker(work, spin)) for spin in spins}
        hosts = {spin: json.loads(process.stdout.readline()) for spin, process in workers.items()}
        for neighbours in options.neighbours:
            busy = [subprocess.Popen(BUSY) for _ in range(neighbours)]
            times: dict[str, list[float]] = {spin: [] for spin in spins}
            for _ in range(options.repeats):
                for spin, process in workers.items():
                    times[spin].append(ask(process, busy))
            for process in busy:
                process.kill()
                process.wait()
            for spin, found in times.items():
                line = {"case": f"{work} beside {neighbours} busy", "mode": mode}
                line |= {"implementation": f"spins {spin}", **record.spread(found), **hosts[spin]}
                record.write(line | {"repeats": len(found)}, options.records)
                print(line["case"], line["implementation"], f"{line['p50_ms']} ms", flush=True)


def worker(work: str, spin: str) -> subprocess.Popen[str]:
    kept = {n: value for n, value in os.environ.items() if not n.startswith(("OMP_", "GOMP_"))}
    command = [sys.executable, __file__, "--work", work, "--spins", spin]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    environment = kept | VARIABLES.get(spin, {"GOMP_SPINCOUNT": spin})
    return subprocess.Popen(command, env=environment, **pipes)


def ask(process: subprocess.Popen[str], busy: list[subprocess.Popen[bytes]]) -> float:
    """Milliseconds of one item of work, with nothing beside it but the neighbours."""
    for _ in range(TRIES):
        time.sleep(0.05)  # until threads of the one before sleep
        with Load([process.pid, *(other.pid for other in busy)]) as load:
            process.stdin.write("\n")
            process.stdin.flush()
            milliseconds = float(process.stdout.readline())
        if load.share <= MOST_LOAD:
            return milliseconds
    raise SystemExit(f"bench_neighbours: others took {load.share:.0%} of it {TRIES} times")


def serve(work: str) -> None:
    """Do the work for some seconds by each line of input, and print the ms of one item."""
    run, count = prepare(work)
    run()
    print(json.dumps(record.here()), flush=True)
    for _ in sys.stdin:
        # Threads get used to their neighbours first; a whole command counts from its start.
        for seconds in (1.0,) if work == "run" else (0.6, 1.0):
            start, items = time.perf_counter(), 0
            while time.perf_counter() - start < seconds:
                run()
                items += count
        print((time.perf_counter() - start) / items * 1e3, flush=True)


def command() -> None:
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "linbias", *RUN, folder]
        subprocess.run(words, stdout=subprocess.DEVNULL, check=True)


def prepare(work: str) -> tuple[Callable[[], Any], int]:
    """What to run, and how many items of work that is."""
    if work == "run":
        return command, 1
    import torch
    from transformers import BloomConfig, BloomForCausalLM, DynamicCache

    from linbias.models import LinbiasConfig, LinbiasForCausalLM, fuse

    torch.manual_seed(0)
    if work == "train":
        model = LinbiasForCausalLM(LinbiasConfig(train_length=128))
        optimizer, ids = torch.optim.AdamW(model.parameters()), torch.randint(256, (16, 129))

        def step() -> None:
            optimizer.zero_grad()
            model(ids, labels=ids).loss.backward()
            optimizer.step()

        return step, 1
    config = BloomConfig(vocab_size=1000, hidden_size=1024, n_head=16, n_layer=4)
    bloom, ids = fuse(BloomForCausalLM(config).eval()), torch.randint(1000, (1, 512))
    if work == "read":
        return torch.inference_mode()(lambda: bloom(ids, use_cache=False)), 1

    @torch.inference_mode()
    def tokens() -> None:
        for _ in range(8):
            bloom(ids[:, :1], past_key_values=cache, use_cache=True)
        cache.crop(-8)

    cache = DynamicCache()
    with torch.inference_mode():
        bloom(ids, past_key_values=cache, use_cache=True)
    return tokens, 8


if __name__ == "__main__":
    main()
