"""Train a small GPT written for flash-attn beside the same one with its bias in memory, step by step in turn.

    python evidence/benchmarks/bench_compat.py                 # 200 steps of each, some minutes on 2 cores
    python evidence/benchmarks/bench_compat.py --steps 5

Both models begin with the same weights and see the same tokens; every step is forward, backward and optimizer. One calls
`linbias.compat.flash_attn.flash_attn_qkvpacked_func` with `alibi_slopes`. The other adds the bias as the mask of
scaled_dot_product_attention: [1, H, T, T], float32, made once for all layers and steps. The wider the model, the more of a
step is spent on what both share: --width 256 halves the weight of attention. Records go to records, or where --records says.
"""

import argparse
import copy
import statistics
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import linbias
import record
from linbias.compat.flash_attn import flash_attn_qkvpacked_func

VOCABULARY = 256


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--records", type=Path, help="default: evidence/records/...")
    options = parser.parse_args()
    torch.manual_seed(0)
    ours = GPT(options)
    peer = copy.deepcopy(ours)
    peer.keep_bias(options.tokens)
    times = train({"linbias.compat": ours, "sdpa mask": peer}, options)
    case = (
        f"train-gpt-{options.layers}-layers-{options.width}-wide-{options.heads}-heads"
        f"-{options.tokens}-tokens"
    )
    for name, found in times.items():
        line = {
            "case": case,
            "implementation": name,
            "mode": "training step",
            "repeats": len(found),
        }
        spread = record.spread(found)
        path = options.records or record.default_path()
        record.write({**line, "dtype": "float32", **spread, **record.here()}, path)
        print(f"{case} {name:14} {spread['p50_ms']:8.1f} ms", flush=True)
    pairs = zip(times["sdpa mask"], times["linbias.compat"], strict=True)
    ratio = statistics.median(theirs / own for theirs, own in pairs)
    print(f"median over {options.steps} pairs of steps: {ratio:.2f} x sdpa mask", flush=True)


def train(models: dict[str, "GPT"], options: argparse.Namespace) -> dict[str, list[float]]:
    """Milliseconds of each step of each model, after one step to warm up; both must learn the same."""
    optimizers = {name: torch.optim.AdamW(m.parameters(), lr=1e-3) for name, m in models.items()}
    times: dict[str, list[float]] = {name: [] for name in models}
    for step in range(options.steps + 1):
        tokens = torch.randint(VOCABULARY, (1, options.tokens // 2)).repeat(1, 2)
        losses = []
        for name, model in models.items():
            start = time.perf_counter()
            logits = model(tokens)
            loss = cross_entropy(logits[0, :-1], tokens[0, 1:])
            optimizers[name].zero_grad()
            loss.backward()
            optimizers[name].step()
            if step:
                times[name].append((time.perf_counter() - start) * 1e3)
            losses.append(loss.detach())
        if step < 5:  # later, rounding has taken them apart
            torch.testing.assert_close(*losses, rtol=1e-3, atol=1e-3)
    return times


class GPT(nn.Module):
    """Pre-norm blocks with packed projections, as flash-attn's own models have them."""

    bias: Tensor | None = None

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        width, self.heads = options.width, options.heads
        self.register_buffer("alibi_slopes", torch.tensor(linbias.slopes(self.heads)).float())
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm_1": nn.LayerNorm(width),
                    "qkv": nn.Linear(width, 3 * width),
                    "out": nn.Linear(width, width),
                    "norm_2": nn.LayerNorm(width),
                    "mlp": nn.Sequential(
                        nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
                    ),
                }
            )
            for _ in range(options.layers)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def keep_bias(self, length: int) -> None:
        """Make the bias, which also hides later keys, and attend with it from now on."""
        hidden = [torch.inf] * self.heads
        bias = linbias.bias(linbias.slopes(self.heads), length, length, right_slopes=hidden)
        self.bias = torch.from_numpy(bias)[None].float()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            qkv = block["qkv"](block["norm_1"](x)).view(*x.shape[:2], 3, self.heads, -1)
            x = x + block["out"](self.attend(qkv).reshape(x.shape))
            x = x + block["mlp"](block["norm_2"](x))
        return self.head(self.norm(x))

    def attend(self, qkv: Tensor) -> Tensor:
        if self.bias is None:
            return flash_attn_qkvpacked_func(qkv, causal=True, alibi_slopes=self.alibi_slopes)
        q, k, v = qkv.transpose(1, 3).unbind(2)
        return scaled_dot_product_attention(q, k, v, self.bias).transpose(1, 2)


if __name__ == "__main__":
    main()
