"""`torch.nn.TransformerEncoder` with linear biases: trained on short text, tested on long text.

    python examples/encoder.py                         # two minutes
    python examples/encoder.py --variant asymmetric    # learned slopes, apart for left and right

`linbias.torch.MultiheadAttention` takes the place of each layer's `self_attn`; all else is
PyTorch's, and there is no position embedding. The model sees text in which one byte of seven is
masked, and names these bytes from both sides. The table shows bits per masked byte on text that it
has not seen, at and beyond the training length.
"""

import math
import sysconfig
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from linbias.torch import MultiheadAttention

MASK = 0  # a byte that Python's source does not use


def encoder(width: int, num_heads: int, num_layers: int, variant: str) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(
        width, num_heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True
    )
    stack = nn.TransformerEncoder(
        layer, num_layers, nn.LayerNorm(width), enable_nested_tensor=False
    )
    for layer in stack.layers:
        layer.self_attn = MultiheadAttention(width, num_heads, batch_first=True, variant=variant)
    return stack


class MaskedModel(nn.Module):
    """Bytes [B, T], some of them masked -> logits [B, T, 256] of what they are."""

    def __init__(self, width: int, num_heads: int, num_layers: int, variant: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.encoder = encoder(width, num_heads, num_layers, variant)
        self.out = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.encoder(self.embed(tokens)))


def read() -> tuple[Tensor, Tensor]:
    """Modules of the standard library as bytes: nine in ten to train on, the rest to test."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    rest = b"".join(f.read_bytes() for number, f in enumerate(files) if number % 10)
    tests = b"".join(f.read_bytes() for f in files[::10])
    train, test = (torch.frombuffer(bytearray(t), dtype=torch.uint8) for t in (rest, tests))
    return train, test


def loss_of(model: MaskedModel, tokens: Tensor, generator: torch.Generator) -> Tensor:
    """Mean cross-entropy in nats of the masked bytes of tokens [B, T]."""
    masked = torch.rand(tokens.shape, generator=generator) < 1 / 7
    logits = model(tokens.masked_fill(masked, MASK))
    return cross_entropy(logits[masked], tokens[masked])


def train(model: MaskedModel, text: Tensor, length: int, batch: int, steps: int) -> None:
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    for step in range(steps):
        starts = torch.randint(len(text) - length, (batch, 1), generator=generator)
        loss = loss_of(model, text[starts + torch.arange(length)].long(), generator)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"step {step}: {loss.item() / math.log(2):.2f} bits per masked byte", flush=True)


@torch.no_grad()
def test(model: MaskedModel, text: Tensor, length: int, num_bytes: int) -> float:
    """Bits per masked byte over pieces of this length."""
    model.eval()
    generator = torch.Generator().manual_seed(1)
    pieces = text[:num_bytes].unfold(0, length, length).long()
    batches = pieces.split(max(1, 4096 // length))
    losses = [loss_of(model, batch, generator).item() * len(batch) for batch in batches]
    return sum(losses) / len(pieces) / math.log(2)


def main(arguments: Sequence[str] | None = None) -> dict[int, float]:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    variants = ("symmetric", "directional", "asymmetric", "none")
    parser.add_argument("--variant", choices=variants, default="symmetric")
    sizes = {"steps": 600, "length": 64, "batch": 32, "width": 96, "heads": 4, "layers": 3}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--test-lengths", type=int, nargs="+", default=[64, 128, 256, 512, 1024])
    parser.add_argument("--test-bytes", type=int, default=32768)
    chosen = parser.parse_args(arguments)
    torch.manual_seed(0)
    train_text, test_text = read()
    model = MaskedModel(chosen.width, chosen.heads, chosen.layers, chosen.variant)
    train(model, train_text, chosen.length, chosen.batch, chosen.steps)
    results = {n: test(model, test_text, n, chosen.test_bytes) for n in chosen.test_lengths}
    print(f"trained on {chosen.length} bytes at a time; bits per masked byte on unseen text:")
    for length, bits in results.items():
        print(f"{length:>8}  {bits:.3f}")
    return results


if __name__ == "__main__":
    main()
