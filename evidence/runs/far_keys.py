"""Would far keys in fewer bits make a `WindowCache` smaller? What they would save, and cost.

    python evidence/runs/far_keys.py output/extrapolate/models/alibi-L128-s0

It reads 8,192 and 131,072 tokens with the trained model and with one of 8 heads of 64, whose
random weights give scores of a common size, and writes the table of docs/numerics.md. A key is
far where it and all beyond it hold so little of each of the last 512 rows that its rounding costs
no more than that of float32, less the margin of adaptive windows. Far keys are either read by the
core in their own type, which rounds the query as well, or widened to float32 before each call;
near and far parts are merged by their lse. Steps of all caches are timed in turn, on one thread,
in the time that the thread itself had.
"""

import copy
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "evidence" / "benchmarks"))

import record  # noqa: E402
from linbias.data.corpus import load_corpus  # noqa: E402
from linbias.models import LinbiasConfig, LinbiasForCausalLM, WindowCache  # noqa: E402
from linbias.models.loading import load  # noqa: E402
from linbias.models.window_cache.near_keys import FEWEST  # noqa: E402
from linbias.models.window_cache.pool import CHUNK, Pool, Scores  # noqa: E402
from linbias.torch.call import run  # noqa: E402
from markers import fill, parser_of, table  # noqa: E402

LENGTHS = (8192, 131_072)
MARGIN = math.exp(-3.0)  # as of adaptive windows
SCORE = 3.0  # |scale| |q| |k| of the random model, as in the trained one


class Format(NamedTuple):
    dtype: torch.dtype
    widened: bool
    error: float | None  # of a score, as a share of |scale| |q| |k|; None to measure it


FORMATS = {
    "bfloat16, read by the core": Format(torch.bfloat16, widened=False, error=2.0**-7),
    "bfloat16, widened": Format(torch.bfloat16, widened=True, error=2.0**-8),
    "float16, widened": Format(torch.float16, widened=True, error=2.0**-11),
    "8 bits and a scale, widened": Format(torch.int8, widened=True, error=None),
}


class Stored(NamedTuple):
    """Numbers [1, n, size] in fewer bits; for 8, with the scale of each key."""

    values: Tensor
    scale: Tensor | None

    @classmethod
    def of(cls, x: Tensor, dtype: torch.dtype) -> "Stored":
        if dtype != torch.int8:
            return cls(x.to(dtype), None)
        scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
        return cls((x / scale).round().to(dtype), scale)

    def widen(self, to: Tensor) -> Tensor:
        if self.scale is None:
            return to.copy_(self.values)
        return torch.mul(self.values, self.scale, out=to)

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + (0 if self.scale is None else self.scale.nbytes)


def near_keys(layer: Any, form: Format) -> list[int]:
    """How many keys of each head must stay as they are."""
    pool, rows, scores, needed = layer.pool, layer._recent, layer._scores, []
    T, D = rows.q.shape[2:]
    for g, n in enumerate(pool.counts):
        keys, values = (x[:, pool.newest(g, n)] for x in (pool.keys, pool.values))
        error = form.error
        if error is None:
            rounded = (Stored.of(x, form.dtype).widen(torch.empty_like(x)) for x in (keys, values))
            pairs = zip(rounded, (keys, values), strict=True)
            error = max(float(((x - y).norm(dim=-1) / y.norm(dim=-1)).max()) for x, y in pairs)
        at = layer.seen - T + torch.arange(T)
        distance = at[:, None] - (layer.seen - n + torch.arange(n))
        score = scores.scale * rows.q[0, g].double() @ keys[0].double().T
        score = (score - float(scores.slopes[g]) * distance).masked_fill(distance < 0, -math.inf)
        held = score.softmax(-1).cumsum(-1)  # by each key and all older ones
        may_be_far = held <= MARGIN * (D + 10) * 2.0**-24 / error
        near = distance[:, 0] + 1 - may_be_far.int().cumprod(-1).sum(-1)
        needed.append(min(n, max(FEWEST, int(near.max()))))
    return needed


def lay_out_anew(pool: Pool) -> None:
    """Give each head the room that it has after a move, whatever it had before."""
    pool._capacities = [sys.maxsize] * len(pool.counts)
    pool.make_room(1, list(range(len(pool.counts))), is_first=False)


class NearAndFar(Pool):
    """A pool whose oldest keys lie in a store of their own, in fewer bits."""

    def divide(self, near: list[int], form: Format, scratch: dict[str, Tensor]) -> None:
        gone = [n - keep for n, keep in zip(self.counts, near, strict=True)]
        old = [slice(start, start + n) for start, n in zip(self.starts, gone, strict=True)]
        far = self.far = copy.deepcopy(self)
        far.keys, far.values = (
            torch.cat([x[:, i] for i in old], 1) for x in (far.keys, far.values)
        )
        far.counts, self.form = gone, form
        far._lay_out(gone)
        norm = far.keys.norm(dim=-1)
        far._norms = torch.stack([norm[:, far.newest(g, n)].amax() if n else norm.new_zeros(())
                                  for g, n in enumerate(gone)])  # fmt: skip
        self.stored = [Stored.of(x, form.dtype) for x in (far.keys, far.values)]
        far.keys, far.values = (x.values for x in self.stored)
        if form.widened:  # one room for all layers
            for name, stored in zip(("keys", "values"), self.stored, strict=True):
                if name not in scratch or scratch[name].numel() < stored.values.numel():
                    scratch[name] = torch.empty(stored.values.numel())
        self.scratch, self.far_call = scratch, None
        self.keep(near)
        lay_out_anew(self)
        self.begins = torch.tensor(self.starts)

    @property
    def far_bytes(self) -> int:
        return sum(x.nbytes for x in self.stored)

    def read(
        self, q: Tensor, new: Tensor, scores: Scores, padding: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        out, lse = super().read(q, new, scores, padding)
        far, T = self.far, q.shape[2]
        if self.form.widened:
            rooms = (self.scratch[name] for name in ("keys", "values"))
            far.keys, far.values = (
                x.widen(room[: x.values.numel()].view(x.values.shape))
                for x, room in zip(self.stored, rooms, strict=True)
            )
        q = q.reshape(len(self.counts), -1, *q.shape[2:]).to(far.keys.dtype)
        if self.far_call is None:
            assert far._norms is not None
            bound = far._norms[:, None] * (1 + 2**-7)
            # The far part holds less than 2^-8 of any row.
            loose = scores._replace(tolerance=2**8 * scores.tolerance)
            self.far_call = far._prepare(q, far._spans, bound, loose)
        inputs, problem = self.far_call
        behind = self._spans[:, 1] - self.begins  # near keys, new ones included
        start = far._spans[:, 1] + behind - T
        far_out, far_lse = run(inputs._replace(q=q, query_start=start), problem, "auto", True)
        far_out, far_lse = far_out.view_as(out), far_lse.view_as(lse)
        both = torch.logaddexp(lse, far_lse)
        return out.lerp(far_out.to(out.dtype), (far_lse - both).exp()[..., None]), both


def random_model(ids: Tensor) -> Any:
    """8 heads of 64 in 3 layers, whose scores are as large as those of trained heads."""
    torch.manual_seed(0)
    model = LinbiasForCausalLM(
        LinbiasConfig(vocab_size=256, hidden_size=512, num_attention_heads=8, num_hidden_layers=3)
    ).eval()
    for layer, index in zip(model.model.layers, range(3), strict=True):
        cache = WindowCache.for_model(model)
        model(ids[:, :CHUNK], past_key_values=cache)
        seen: Any = cache.layers[index]
        seen.certify()
        keys = torch.stack([seen.pool.keys[:, seen.pool.newest(g, CHUNK)] for g in range(8)])
        norms = float(keys.norm(dim=-1).mean() * seen._recent.q.norm(dim=-1).mean())
        for module in layer.modules():
            if hasattr(module, "qkv"):
                factor = math.sqrt(SCORE / (seen._scores.scale * norms))
                module.qkv.weight[: sum(module.widths[:2])] *= factor
    return model


def measure(name: str, model: Any, ids: Tensor, steps: int) -> list[list[str]]:
    rows, parts = [], ids[:, : LENGTHS[-1]].split(CHUNK, 1)
    cache = WindowCache.for_model(model)
    for number, part in enumerate(parts, 1):
        model(part, past_key_values=cache, logits_to_keep=1)
        if number * CHUNK in LENGTHS:
            rows += measure_at(name, model, cache, ids, steps)
    return rows


def measure_at(name: str, model: Any, cache: Any, ids: Tensor, steps: int) -> list[list[str]]:
    tokens, today = cache.get_seq_length(), copy.deepcopy(cache)
    for layer in today.layers:
        layer.certify()
        heads = list(range(len(layer.counts)))
        layer.drop_all_but(layer.choose(heads))
        lay_out_anew(layer.pool)
    caches, scratch = {"float32": today}, dict[str, Tensor]()
    for format_name, form in FORMATS.items():
        caches[format_name] = copy.deepcopy(today)
        for layer in caches[format_name].layers:
            near = near_keys(layer, form)
            layer.pool.__class__ = NearAndFar
            layer.pool.divide(near, form, scratch)
    num_bytes = {n: c.num_bytes for n, c in caches.items()}
    num_keys = sum(sum(layer.counts) for layer in today.layers)
    far = dict.fromkeys(caches, 0)
    for n in FORMATS:
        far[n] = sum(sum(layer.pool.far.counts) for layer in caches[n].layers)
        num_bytes[n] += sum(layer.pool.far_bytes for layer in caches[n].layers)
    times: dict[str, list[float]] = {n: [] for n in caches}
    changed = 0.0
    for step in ids[:, tokens : tokens + steps].split(1, 1):
        logits = {}
        for n, c in caches.items():
            start = time.thread_time()
            logits[n] = model(step, past_key_values=c, logits_to_keep=1).logits
            times[n].append(time.thread_time() - start)
        changed = max(
            changed, *(float((x - logits["float32"]).abs().max()) for x in logits.values())
        )
    ms = {n: 1e3 * statistics.median(found) for n, found in times.items()}
    print(f"{name}, {tokens} tokens: a logit changed by {changed:.1e} at most", flush=True)
    base = "float32"
    return [
        [f"{name}, {tokens:,}" if n == base else "", n, f"{far[n] / num_keys:.0%}",
         f"{num_bytes[n] / tokens:,.0f}", f"{num_bytes[n] / num_bytes[base]:.2f}",
         f"{ms[n]:.2f}", f"{ms[n] / ms[base]:.2f}"]
        for n in caches
    ]  # fmt: skip


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("model", help="folder of a trained model")
    parser.add_argument("--corpus", default="stdlib")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with torch.no_grad():
        text = load_corpus(options.corpus).test[: LENGTHS[-1] + options.steps]
        ids = torch.from_numpy(text.astype("int64"))[None]
        rows = measure("6 heads of 32", load(options.model).eval(), ids, options.steps)
        rows += measure("8 heads of 64", random_model(ids), ids, options.steps)
    head = ["heads, tokens", "far keys in", "of all keys", "bytes a token", "of today's"]
    lines = table([*head, "ms a token", "of today's"], rows)
    here = record.here()
    where = f"{here['machine']}, one thread"
    text = f"{lines}\n\n{where}, {here['date']}, `python evidence/runs/far_keys.py`."
    fill("docs/numerics.md", {"far keys": text})
    print(text)


if __name__ == "__main__":
    main()
