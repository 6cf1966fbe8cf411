"""Linear biases in a model that is not ours: Transformers' GPT-2, without its table of positions.

    python examples/existing_model.py                  # half a minute
    python examples/existing_model.py --steps 1000

Three steps make any decoder of Transformers that takes its attention from `AttentionInterface` an
ALiBi model: register an attention function, name it in the configuration, and silence the model's
own positions. GPT-2's table has as many rows as its longest input; without it the model reads on.
It is trained from scratch here, since weights that were trained with a table expect one.
"""

import math
import sysconfig
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, GPT2Config, GPT2LMHeadModel

from linbias.torch import attention


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, dropout: float = 0.0, **_: object,
) -> tuple[Tensor, None]:  # fmt: skip
    """What Transformers calls in every layer: [B, H, T, D] in, [B, T, H, D] out.

    The last query stands at the last key, also with the cache of generation.
    """
    placement = {}
    if attention_mask is not None:  # [B, S], as its user gave it: zeros for padding
        real, num_cached = attention_mask.int(), key.shape[2] - query.shape[2]
        first, num = real.argmax(1), real.sum(1)
        placement["key_range"] = torch.stack([first, first + num], dim=1)
        placement["query_start"] = torch.full_like(first, num_cached)
    out = attention(query, key, value, scale=scaling, dropout=dropout, **placement)
    return out.transpose(1, 2), None


def keep_mask(*_: object, attention_mask: Tensor | None = None, **__: object) -> Tensor | None:
    """No mask [T, S] is built: the kernel needs none, and padding is told by its [B, S]."""
    return attention_mask


AttentionInterface.register("linbias", attend)
AttentionMaskInterface.register("linbias", keep_mask)


class NoPositions(nn.Module):
    def forward(self, positions: Tensor) -> Tensor:
        return torch.zeros((), device=positions.device)


def build(width: int, num_layers: int, trained_length: int) -> GPT2LMHeadModel:
    config = GPT2Config(
        vocab_size=256, n_positions=trained_length, n_embd=width, n_layer=num_layers, n_head=4,
        bos_token_id=0, eos_token_id=0, attn_implementation="linbias",
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    model.transformer.wpe = NoPositions()
    return model


def read() -> tuple[Tensor, Tensor]:
    """Modules of the standard library as bytes: nine in ten to train on, the rest to test."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    rest = b"".join(f.read_bytes() for number, f in enumerate(files) if number % 10)
    tests = b"".join(f.read_bytes() for f in files[::10])
    train, test = (torch.frombuffer(bytearray(t), dtype=torch.uint8) for t in (rest, tests))
    return train, test


def train(model: GPT2LMHeadModel, text: Tensor, length: int, batch: int, steps: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model.train()
    for step in range(steps):
        starts = torch.randint(len(text) - length, (batch, 1))
        tokens = text[starts + torch.arange(length)].long()
        loss = model(tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0:
            print(f"step {step}: {loss.item() / math.log(2):.2f} bits per byte", flush=True)


@torch.no_grad()
def test(model: GPT2LMHeadModel, text: Tensor, length: int, num_bytes: int) -> float:
    """Bits per byte over pieces of this length."""
    model.eval()
    pieces = text[:num_bytes].unfold(0, length, length).long()
    losses = [model(piece[None], labels=piece[None]).loss.item() for piece in pieces]
    return sum(losses) / len(losses) / math.log(2)


def main(arguments: Sequence[str] | None = None) -> dict[int, float]:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    sizes = {"steps": 400, "length": 64, "batch": 16, "width": 96, "layers": 3}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--test-lengths", type=int, nargs="+", default=[64, 128, 256, 512])
    parser.add_argument("--test-bytes", type=int, default=16384)
    chosen = parser.parse_args(arguments)
    torch.manual_seed(0)
    train_text, test_text = read()
    model = build(chosen.width, chosen.layers, chosen.length)
    train(model, train_text, chosen.length, chosen.batch, chosen.steps)
    results = {}
    for length in chosen.test_lengths:
        results[length] = test(model, test_text, length, chosen.test_bytes)
        print(f"{length:>6} tokens: {results[length]:.3f} bits per byte")
    prompt = torch.tensor([list(b"def ")])
    written = model.generate(prompt, max_new_tokens=20, do_sample=False, pad_token_id=0)
    print(bytes(written[0].tolist()).decode(errors="replace"))
    return results


if __name__ == "__main__":
    main()
