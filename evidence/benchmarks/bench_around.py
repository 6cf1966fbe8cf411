"""Time what is around attention, by settings of PyTorch that docs/kernels.md and faq.md name.

    python evidence/benchmarks/bench_around.py

BLOOM-560m's shape with random weights, fused. `model-*`: reading 512 tokens, and one after them,
as it is and compiled with frozen weights, interleaved. `token beside N busy`: one token of four
layers, beside processes that compute without end, by OMP_WAIT_POLICY, which PyTorch's threads read
when they start: each in a process of its own, which take turns.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from functools import partial

import torch
from torch._inductor import config as inductor
from transformers import BloomConfig, BloomForCausalLM, DynamicCache

import record
from linbias.models import fuse

POLICIES = {"as PyTorch comes": {}, "OMP_WAIT_POLICY=PASSIVE": {"OMP_WAIT_POLICY": "PASSIVE"}}
BUSY = [sys.executable, "-c", "while True: pass"]


def build(num_layers: int) -> BloomForCausalLM:
    torch.manual_seed(0)
    config = BloomConfig(vocab_size=8192, hidden_size=1024, n_head=16, n_layer=num_layers)
    return fuse(BloomForCausalLM(config).eval())


@torch.no_grad()
def compare_compiled(options: argparse.Namespace) -> None:
    model, text = build(24), torch.randint(8192, (1, 512))
    models = {"as it is": model, "compiled, frozen": torch.compile(model, dynamic=True)}
    read = {"use_cache": False, "logits_to_keep": 1}
    caches = {name: model(text).past_key_values for name in models}
    after = {"logits_to_keep": 1}
    cases = {
        "model-512": {n: partial(run, text, **read) for n, run in models.items()},
        "model-1-after-512": {
            n: partial(run, text[:, :1], past_key_values=caches[n], **after)
            for n, run in models.items()
        },
    }
    for case, ways in cases.items():
        for run in ways.values():  # compile, and see that it runs
            run()
            run()
        record.compare({"case": case, "dtype": "float32"}, ways, options)


def compare_policies(options: argparse.Namespace) -> None:
    with ExitStack() as stack:
        workers = {name: stack.enter_context(worker(name)) for name in POLICIES}
        hosts = {name: json.loads(process.stdout.readline()) for name, process in workers.items()}
        for count in range(3):
            busy = [subprocess.Popen(BUSY) for _ in range(count)]
            times: dict[str, list[float]] = {name: [] for name in workers}
            for _ in range(options.repeats):
                for name, process in workers.items():
                    time.sleep(0.05)  # until the threads of the one before sleep
                    print(file=process.stdin, flush=True)
                    times[name].append(float(process.stdout.readline()))
            for process in busy:
                process.kill()
                process.wait()
            for name, found in times.items():
                line = {"case": f"token beside {count} busy", "dtype": "float32"}
                line |= {"implementation": name, **record.spread(found), **hosts[name]}
                record.write(line | {"repeats": len(found)}, options.records)
                print(line["case"], name, f"{line['p50_ms']:.1f} ms", flush=True)


def worker(policy: str) -> subprocess.Popen[str]:
    kept = {n: value for n, value in os.environ.items() if not n.startswith(("OMP_", "GOMP_"))}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen(
        [sys.executable, __file__, "--token"], env=kept | POLICIES[policy], **pipes
    )


@torch.inference_mode()
def serve_tokens() -> None:
    """By each line of input write tokens for a second, and print the ms of one."""
    model, text, cache = build(4), torch.randint(8192, (1, 512)), DynamicCache()
    model(text, past_key_values=cache)
    print(json.dumps(record.here()), flush=True)
    for _ in sys.stdin:
        start, count = time.perf_counter(), 0
        while time.perf_counter() - start < 1:
            model(text[:, :1], past_key_values=cache)
            cache.crop(-1)
            count += 1
        print((time.perf_counter() - start) / count * 1e3, flush=True)


def main() -> None:
    parser = record.parser(__doc__, repeats=9)
    parser.add_argument("--token", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.token:
        return serve_tokens()
    compare_policies(options)
    inductor.freezing = True
    compare_compiled(options)


if __name__ == "__main__":
    main()
