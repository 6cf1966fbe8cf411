"""Train a small Flax language model on short text and test it on long text.

    python examples/flax_extrapolation.py                      # a few minutes on two cores
    python examples/flax_extrapolation.py --steps 2000 --width 128

The text is the source of Python's standard library, read as bytes. The table shows bits per byte
(lower is better) on text that no model has seen. With ALiBi it stays level or falls as the text
grows; sinusoids fail beyond the training length. The attention never builds a bias:
`linbias.jax.flax` passes the slopes to the kernel.
"""

import math
import sysconfig
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from linbias.jax.flax import attention_fn

POSITIONS = {"alibi": "causal", "sinusoidal": "none_causal", "none": "none_causal"}


class Block(nnx.Module):
    def __init__(self, width: int, num_heads: int, variant: str, rngs: nnx.Rngs) -> None:
        self.attention = nnx.MultiHeadAttention(
            num_heads, width, attention_fn=attention_fn(variant), decode=False, rngs=rngs
        )
        self.norms = nnx.List([nnx.LayerNorm(width, rngs=rngs) for _ in range(2)])
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norms[0](x))
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class LanguageModel(nnx.Module):
    """Bytes [B, T] -> logits [B, T, 256] of the next byte."""

    def __init__(self, position: str, width: int, num_heads: int, num_layers: int) -> None:
        rngs = nnx.Rngs(0)
        self.position = position
        self.embed = nnx.Embed(256, width, rngs=rngs)
        variant = POSITIONS[position]
        self.blocks = nnx.List([Block(width, num_heads, variant, rngs) for _ in range(num_layers)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.out = nnx.Linear(width, 256, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        if self.position == "sinusoidal":
            x = x + sinusoids(*x.shape[1:])
        for block in self.blocks:
            x = block(x)
        return self.out(self.norm(x))


def sinusoids(length: int, width: int) -> jax.Array:
    """[length, width]: sines and cosines at wavelengths from 2 pi to 10,000 * 2 pi."""
    rates = 10_000.0 ** -(jnp.arange(width // 2) / (width // 2))
    angles = jnp.arange(length)[:, None] * rates
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=1)


def read_corpus() -> tuple[np.ndarray, np.ndarray]:
    """The standard library's modules as bytes: 19 of 20 files to train on, the rest to test."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    rest = b"".join(f.read_bytes() for number, f in enumerate(files) if number % 20)
    tests = b"".join(f.read_bytes() for f in files[::20])
    return np.frombuffer(rest, np.uint8), np.frombuffer(tests, np.uint8)


def loss_of(model: LanguageModel, tokens: jax.Array) -> jax.Array:
    """Mean cross-entropy in nats of tokens [B, T + 1], each from those before."""
    logits = model(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def train(model: LanguageModel, text: np.ndarray, length: int, batch: int, steps: int) -> None:
    schedule = optax.warmup_cosine_decay_schedule(0, 3e-3, max(1, steps // 10), steps)
    optimizer = nnx.Optimizer(model, optax.adamw(schedule), wrt=nnx.Param)

    @nnx.jit
    def step(model: LanguageModel, optimizer: nnx.Optimizer, tokens: jax.Array) -> None:
        optimizer.update(model, nnx.grad(loss_of)(model, tokens))

    rng = np.random.default_rng(0)
    for _ in range(steps):
        starts = rng.integers(len(text) - length - 1, size=(batch, 1))
        step(model, optimizer, jnp.asarray(text[starts + np.arange(length + 1)], jnp.int32))


def test(model: LanguageModel, text: np.ndarray, length: int, num_bytes: int) -> float:
    """Bits per byte over pieces of this length."""
    num_pieces = max(1, num_bytes // length)
    pieces = text[: num_pieces * length + 1]
    tokens = np.stack([pieces[i * length : (i + 1) * length + 1] for i in range(num_pieces)])
    evaluate = nnx.jit(loss_of)
    return float(evaluate(model, jnp.asarray(tokens, jnp.int32))) / math.log(2)


def main(arguments: Sequence[str] | None = None) -> dict[str, list[float]]:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--length", type=int, default=64, help="bytes per training sequence")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--test-lengths", type=int, nargs="+", default=[64, 128, 256, 512, 1024])
    parser.add_argument("--test-bytes", type=int, default=32768)
    options = parser.parse_args(arguments)
    train_text, test_text = read_corpus()
    print(f"bits per byte after {options.steps} steps on {options.length} bytes each")
    print("position  " + "".join(f"{length:>9}" for length in options.test_lengths))
    results = {}
    for position in POSITIONS:
        model = LanguageModel(position, options.width, options.heads, options.layers)
        train(model, train_text, options.length, options.batch, options.steps)
        found = [test(model, test_text, n, options.test_bytes) for n in options.test_lengths]
        print(f"{position:<10}" + "".join(f"{bits:9.3f}" for bits in found), flush=True)
        results[position] = found
    return results


if __name__ == "__main__":
    main()
