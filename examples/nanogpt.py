"""A small GPT on `linbias.torch.attention`: trained on short text, tested on long text.

    python examples/nanogpt.py                  # a minute, on Python's standard library as text
    python examples/nanogpt.py --text book.txt --steps 2000 --width 256 --layers 6

There is no position embedding anywhere: the slopes inside `attention` are all that tells positions
apart, and so the model reads any length. The table shows bits per byte on text that it has not
seen, at and beyond the training length.
"""

import math
import sysconfig
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu

from linbias.torch import attention


class Block(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        heads = self.qkv(self.norms[0](x)).view(B, T, 3, self.num_heads, -1)
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # each [B, H, T, D]
        mixed = attention(q, k, v)  # causal, the paper's slopes for so many heads
        x = x + self.out(mixed.transpose(1, 2).reshape(B, T, -1))
        return x + self.down(gelu(self.up(self.norms[1](x))))


class GPT(nn.Module):
    """Bytes [B, T] -> logits [B, T, 256] of the next byte."""

    def __init__(self, width: int, num_heads: int, num_layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.blocks = nn.Sequential(*(Block(width, num_heads) for _ in range(num_layers)))
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, 256, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.out.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.norm(self.blocks(self.embed(tokens))))


def read(path: Path | None) -> tuple[Tensor, Tensor]:
    """A file, or the standard library, as bytes: nine tenths to train on, the rest to test."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = [path] if path else sorted(folder.glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)
    return text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]


def loss_of(model: GPT, tokens: Tensor) -> Tensor:
    """Mean cross-entropy in nats of tokens [B, T + 1], each from those before."""
    logits = model(tokens[:, :-1])
    return cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def train(model: GPT, text: Tensor, length: int, batch: int, steps: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    for step in range(steps):
        starts = torch.randint(len(text) - length, (batch, 1))
        loss = loss_of(model, text[starts + torch.arange(length + 1)].long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"step {step}: {loss.item() / math.log(2):.2f} bits per byte", flush=True)


@torch.no_grad()
def test(model: GPT, text: Tensor, length: int, num_bytes: int) -> float:
    """Bits per byte over pieces of this length."""
    pieces = text[: num_bytes + 1].unfold(0, length + 1, length).long()
    return sum(loss_of(model, piece[None]).item() for piece in pieces) / len(pieces) / math.log(2)


@torch.no_grad()
def write(model: GPT, prompt: str, num_bytes: int) -> str:
    """Continue a prompt; every step reads all that was written (trainer.py uses a cache)."""
    tokens = torch.tensor([list(prompt.encode())])
    for _ in range(num_bytes):
        chances = (model(tokens)[0, -1] / 0.8).softmax(-1)
        tokens = torch.cat([tokens, torch.multinomial(chances, 1)[None]], dim=1)
    return bytes(tokens[0].tolist()).decode(errors="replace")


def main(arguments: Sequence[str] | None = None) -> dict[int, float]:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="a file to train and test on")
    sizes = {"steps": 600, "length": 64, "batch": 32, "width": 128, "heads": 4, "layers": 3}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--test-lengths", type=int, nargs="+", default=[64, 128, 256, 512, 1024])
    parser.add_argument("--test-bytes", type=int, default=32768)
    chosen = parser.parse_args(arguments)
    torch.manual_seed(0)
    train_text, test_text = read(chosen.text)
    model = GPT(chosen.width, chosen.heads, chosen.layers)
    train(model, train_text, chosen.length, chosen.batch, chosen.steps)
    results = {n: test(model, test_text, n, chosen.test_bytes) for n in chosen.test_lengths}
    print(f"trained on {chosen.length} bytes at a time; bits per byte on unseen text:")
    for length, bits in results.items():
        print(f"{length:>8}  {bits:.3f}")
    print(write(model, "def ", 100))
    return results


if __name__ == "__main__":
    main()
