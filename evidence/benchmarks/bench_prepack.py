"""Time a fused model as it is, prepacked, and compiled with frozen weights, interleaved.

    python evidence/benchmarks/bench_prepack.py

BLOOM-560m's shape with random weights, without gradients: reading texts, and one token after a
text of 512. `torch._inductor.config.freezing` has the compiler take weights for constants: it
orders them for oneDNN as `prepack` does, and joins what comes before and after the products.
"""

import argparse
import tempfile
from collections.abc import Callable
from functools import partial

import torch
from torch._inductor import config as inductor
from transformers import BloomConfig, BloomForCausalLM

import record
from linbias.models import fuse, prepack

CONFIG = BloomConfig(vocab_size=8192, hidden_size=1024, n_layer=24, n_head=16)


@torch.no_grad()
def compare_ways(dtype: str, folder: str, options: argparse.Namespace) -> None:
    def load() -> BloomForCausalLM:
        return fuse(BloomForCausalLM.from_pretrained(folder, dtype=dtype).eval())

    def compare(case: str, ways: dict[str, Callable[[], object]]) -> None:
        torch.compiler.reset()
        for run in ways.values():  # compile, and see that it runs
            run()
            run()
        record.compare({"case": case, "dtype": dtype}, ways, options)

    models = {"fused": load(), "prepacked": prepack(load())}
    models["compiled, frozen"] = torch.compile(load(), dynamic=True)
    for length in (512, 2048):
        text = torch.randint(CONFIG.vocab_size, (1, length))
        read = {"use_cache": False, "logits_to_keep": 1}
        compare(f"model-{length}", {n: partial(run, text, **read) for n, run in models.items()})
    text = torch.randint(CONFIG.vocab_size, (1, 512))
    after = {name: models["fused"](text).past_key_values for name in models}
    ways = {
        name: partial(run, text[:, :1], past_key_values=after[name], logits_to_keep=1)
        for name, run in models.items()
    }
    compare("model-1-after-512", ways)


def main() -> None:
    options = record.parser(__doc__, repeats=9).parse_args()
    torch.manual_seed(0)
    inductor.freezing = True
    for dtype in ("float32", "bfloat16"):
        with tempfile.TemporaryDirectory() as folder:
            BloomForCausalLM(CONFIG).to(getattr(torch, dtype)).save_pretrained(folder)
            compare_ways(dtype, folder, options)


if __name__ == "__main__":
    main()
