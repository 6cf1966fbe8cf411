"""Time linear layers of a model as PyTorch computes them and through oneDNN, interleaved in one run.

    python benchmarks/bench_linear.py

Layers of BLOOM-560m's width, without gradients, for 1, 8 and 512 tokens: `linbias.models.linear` takes the second way on
processors of AMD. Records go to records, or where --records says.
"""

import argparse
from pathlib import Path

import torch
from torch import nn

import record
from linbias.models import linear

SHAPES = ((1024, 3072), (1024, 4096), (4096, 1024))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=(1, 8, 512))
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--records", type=Path, help="default: records/...")
    options = parser.parse_args()
    path = options.records or record.default_path()
    torch.manual_seed(0)
    for dtype in ("float32", "bfloat16"):
        for inputs, outputs in SHAPES:
            layer = nn.Linear(inputs, outputs).to(getattr(torch, dtype))
            for tokens in options.tokens:
                x = torch.randn(1, tokens, inputs).to(layer.weight.dtype)
                with torch.no_grad():
                    times = record.interleave(
                        {
                            "PyTorch": lambda x=x, layer=layer: layer(x),
                            "oneDNN": lambda x=x, layer=layer: linear._read(layer, x, "none", ""),
                        },
                        options.repeats,
                    )
                spreads = {name: record.spread(values) for name, values in times.items()}
                for name, spread in spreads.items():
                    case = f"linear-{inputs}-{outputs}-{tokens}"
                    line = {"case": case, "implementation": name, "dtype": dtype, **spread, **record.here()}  # fmt: skip
                    record.write(line, path)
                ratio = spreads["PyTorch"]["p50_ms"] / spreads["oneDNN"]["p50_ms"]
                print(f"{dtype:9} {inputs} -> {outputs}, {tokens:3} tokens: {spreads['oneDNN']['p50_ms']:7.3f} ms, {ratio:.2f} times as fast as PyTorch")  # fmt: skip


if __name__ == "__main__":
    main()
