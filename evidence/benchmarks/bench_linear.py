"""Time linear layers of a model in the ways that PyTorch has, interleaved in one run.

    python evidence/benchmarks/bench_linear.py

Without gradients, at BLOOM-560m's width: single layers for 1, 8 and 512 tokens, as PyTorch computes them, through oneDNN, and
through oneDNN from weights that `prepack` ordered for it; the weights of all 24 blocks, which come from memory as in a model, for one
token also as products of a matrix and a vector; and the layer before a GELU, with that apart and in one step. Then a whole model of
that shape, as Transformers has it, fused, and fused and prepacked, from a folder with random weights: a forward pass over 512 tokens,
and over one more. `linbias.models.linear.layers` chooses among these by the processor. Records go to records, or where --records says.
"""

import argparse
import copy
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu
from transformers import BloomConfig, BloomForCausalLM

import record
from linbias.models import fuse, prepack
from linbias.models.linear import layers as linear

SHAPES = ((1024, 3072), (1024, 4096), (4096, 1024))
BLOCK = ((1024, 3072), (1024, 1024), (1024, 4096), (4096, 1024))
NUM_BLOCKS = 24


def by_onednn(layer: nn.Linear, x: Tensor) -> Tensor:
    return linear.read(x, layer.weight, layer.bias)


def prepacked(layer: nn.Linear) -> nn.Module:
    return prepack(copy.copy(layer))


def by_vector(layer: nn.Linear, x: Tensor) -> Tensor:
    return torch.addmv(layer.bias, layer.weight, x.view(-1))


def through_all(way: Callable[..., Tensor], layers: list[nn.Linear], inputs: dict[int, Tensor]) -> None:  # fmt: skip
    for layer in layers:
        way(layer, inputs[layer.in_features])


def compare(case: str, dtype: str, ways: dict[str, Callable[[], object]], options: argparse.Namespace) -> None:  # fmt: skip
    with torch.no_grad():
        times = record.interleave(ways, options.repeats)
    spreads = {name: record.spread(values) for name, values in times.items()}
    for name, spread in spreads.items():
        line = {"case": case, "implementation": name, "dtype": dtype, **spread, **record.here()}
        record.write(line, options.records or record.default_path())
    medians = ", ".join(f"{name} {spread['p50_ms']:.3f} ms" for name, spread in spreads.items())
    print(f"{dtype:9} {case}: {medians}")


def compare_models(dtype: str, options: argparse.Namespace) -> None:
    config = BloomConfig(vocab_size=8192, hidden_size=1024, n_layer=NUM_BLOCKS, n_head=16)
    with tempfile.TemporaryDirectory() as folder:
        BloomForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(folder)
        models = {
            name: change(BloomForCausalLM.from_pretrained(folder, dtype=dtype).eval())
            for name, change in (
                ("Transformers", lambda model: model),
                ("fused", fuse),
                ("fused, prepacked", lambda model: prepack(fuse(model))),
            )
        }
        text = torch.randint(config.vocab_size, (1, 512))
        compare("model-512", dtype, {
            name: lambda model=model: model(text, use_cache=False) for name, model in models.items()
        }, options)  # fmt: skip
        with torch.no_grad():
            caches = {name: model(text).past_key_values for name, model in models.items()}
        compare("model-1-after-512", dtype, {
            name: lambda name=name, model=model: model(text[:, :1], past_key_values=caches[name])
            for name, model in models.items()
        }, options)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=(1, 8, 512))
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--records", type=Path, help="default: evidence/records/...")
    options = parser.parse_args()
    torch.manual_seed(0)
    for name in ("float32", "bfloat16"):
        dtype = getattr(torch, name)
        for inputs, outputs in SHAPES:
            layer = nn.Linear(inputs, outputs, dtype=dtype)
            for tokens in options.tokens:
                x = torch.randn(1, tokens, inputs, dtype=dtype)
                packed = prepacked(layer)
                ways = {
                    "PyTorch": lambda x=x, layer=layer: layer(x),
                    "oneDNN": lambda x=x, layer=layer: by_onednn(layer, x),
                    "oneDNN, prepacked": lambda x=x, packed=packed: packed(x),
                }
                compare(f"linear-{inputs}-{outputs}-{tokens}", name, ways, options)
        layers = [nn.Linear(*shape, dtype=dtype) for _ in range(NUM_BLOCKS) for shape in BLOCK]
        packed = [prepacked(layer) for layer in layers]
        rows = {n: torch.randn(1, 1, n, dtype=dtype) for n in (1024, 4096)}
        compare("linear-all-1", name, {
            "PyTorch": lambda layers=layers, rows=rows: through_all(nn.Linear.__call__, layers, rows),
            "oneDNN": lambda layers=layers, rows=rows: through_all(by_onednn, layers, rows),
            "matrix and vector": lambda layers=layers, rows=rows: through_all(by_vector, layers, rows),
            "oneDNN, prepacked": lambda packed=packed, rows=rows: through_all(nn.Linear.__call__, packed, rows),
        }, options)  # fmt: skip
        rows = {n: torch.randn(1, 512, n, dtype=dtype) for n in (1024, 4096)}
        compare("linear-all-512", name, {
            "PyTorch": lambda layers=layers, rows=rows: through_all(nn.Linear.__call__, layers, rows),
            "oneDNN": lambda layers=layers, rows=rows: through_all(by_onednn, layers, rows),
            "oneDNN, prepacked": lambda packed=packed, rows=rows: through_all(nn.Linear.__call__, packed, rows),
        }, options)  # fmt: skip
        wide, x = layers[2], torch.randn(1, 512, 1024, dtype=dtype)
        compare("linear-gelu-512", name, {
            "PyTorch": lambda wide=wide, x=x: gelu(wide(x), approximate="tanh"),
            "oneDNN": lambda wide=wide, x=x: linear.read(x, wide.weight, wide.bias, "gelu", "tanh"),
        }, options)  # fmt: skip
        compare_models(name, options)


if __name__ == "__main__":
    main()
