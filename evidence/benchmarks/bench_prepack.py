"""Time a fused model as it is, prepacked, and compiled by PyTorch with frozen weights, interleaved in one run.

    python evidence/benchmarks/bench_prepack.py

BLOOM-560m's shape with random weights from a folder, without gradients: reading texts, and one token after a text of
512. `torch._inductor.config.freezing` has the compiler take weights for constants: it orders them for oneDNN as
`prepack` does, and joins what comes before and after the products. Records go to records, or where --records says.
"""

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch._inductor import config as inductor
from transformers import BloomConfig, BloomForCausalLM

import record
from linbias.models import fuse, prepack

CONFIG = BloomConfig(vocab_size=8192, hidden_size=1024, n_layer=24, n_head=16)


def compare(case: str, dtype: str, ways: dict[str, Callable[[], object]], options: argparse.Namespace) -> None:  # fmt: skip
    for run in ways.values():  # compile, and see that it runs
        run()
        run()
    medians = []
    for name, values in record.interleave(ways, options.repeats).items():
        spread = record.spread(values)
        line = {"case": case, "implementation": name, "dtype": dtype, **spread, **record.here()}
        record.write(line, options.records or record.default_path())
        medians.append(f"{name} {spread['p50_ms']:.1f} ms")
    print(f"{dtype:9} {case}: {', '.join(medians)}", flush=True)


@torch.no_grad()
def compare_ways(dtype: str, folder: str, options: argparse.Namespace) -> None:
    def load() -> BloomForCausalLM:
        return fuse(BloomForCausalLM.from_pretrained(folder, dtype=dtype).eval())

    models = {"fused": load(), "prepacked": prepack(load())}
    frozen = load()
    forwards = {**models, "compiled, frozen": torch.compile(frozen, dynamic=True)}
    for length in options.lengths:
        text = torch.randint(CONFIG.vocab_size, (1, length))
        torch.compiler.reset()
        ways = {
            name: lambda run=run, text=text: run(text, use_cache=False, logits_to_keep=1)
            for name, run in forwards.items()
        }
        compare(f"model-{length}", dtype, ways, options)
    torch.compiler.reset()
    text = torch.randint(CONFIG.vocab_size, (1, 512))
    caches = {name: models["fused"](text).past_key_values for name in forwards}
    ways = {
        name: lambda run=run, cache=caches[name]: run(
            text[:, :1], past_key_values=cache, logits_to_keep=1
        )
        for name, run in forwards.items()
    }
    compare("model-1-after-512", dtype, ways, options)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=(512, 2048))
    parser.add_argument("--dtypes", nargs="+", default=("float32", "bfloat16"))
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--records", type=Path, help="default: evidence/records/...")
    options = parser.parse_args()
    torch.manual_seed(0)
    inductor.freezing = True
    for dtype in options.dtypes:
        with tempfile.TemporaryDirectory() as folder:
            BloomForCausalLM(CONFIG).to(getattr(torch, dtype)).save_pretrained(folder)
            compare_ways(dtype, folder, options)


if __name__ == "__main__":
    main()
