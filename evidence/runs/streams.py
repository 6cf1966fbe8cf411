"""Endless texts measured: what `WindowCache` keeps, how exact, large and fast it is, and attacks.

    python evidence/runs/streams.py "450 steps"=output/longer/models/alibi-L128-s0
    python evidence/runs/streams.py "450 steps"=FOLDER --only score --only decode # a stage or two,
    anew python evidence/runs/streams.py --only write # docs/guides/endless-texts.md, from records

    windows   what the weights say, beside the worst input that a search finds
    adaptive  what a cache keeps that follows a text of 32,768 tokens
    score     200,000 tokens in chunks of 512 beside one full pass
    memory    a million tokens: resident memory, and the time of a chunk at the end
    decode    a step after 1,024, 16,384 and a million tokens, beside the growing cache
    same      the likeliest token in 2,500 steps after 262,144 tokens, with both caches
    attack    hostile streams: what was really missing in each row, beside the bound

A stage that is run again replaces what the records say of it. Models are given as NAME=FOLDER.
"""

import copy
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
ELSEWHERE = ("evidence/benchmarks", "tests/support", "tests/fused", "tests/models")
sys.path[:0] = [str(ROOT / x) for x in ELSEWHERE]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402
from transformers import DynamicCache  # noqa: E402

import record  # noqa: E402
from linbias._run.files import write_whole  # noqa: E402
from linbias.data.corpus import load_corpus  # noqa: E402
from linbias.models.decoder.cache import use_growing_layers  # noqa: E402
from linbias.models.decoder.layout import TokenLayout  # noqa: E402
from linbias.models.loading import load  # noqa: E402
from linbias.models.window_cache.cache import WindowCache  # noqa: E402
from linbias.models.window_cache.certificate import Settings  # noqa: E402
from linbias.models.window_cache.layer import WindowLayer  # noqa: E402
from linbias.models.window_cache.questions import Questions  # noqa: E402
from linbias.models.window_cache.reach import heads_of_layer, reach_of_weights  # noqa: E402
from markers import RECORDS, Record, fill, parser_of, read, table, unique  # noqa: E402
from test_models_windows import worst_input  # noqa: E402

PATH, DOCUMENT = RECORDS / "streams.jsonl", "docs/guides/endless-texts.md"
CHUNK, TOLERANCE = 512, 2.0**-24


def windows(model: Any, ids: Tensor) -> Record:
    start = time.perf_counter()
    found = reach_of_weights(model)
    seconds, kept = time.perf_counter() - start, found.of_heads(TOLERANCE)
    asked, shares = Questions(model), []
    for index in range(1, asked.num_layers):  # the first is asked about every pair of tokens
        layer = heads_of_layer(asked, index)
        sharing = len(layer.F) // len(layer.G)
        for head, (F, f) in enumerate(zip(layer.F, layer.f, strict=True)):
            G = layer.G[head // sharing]
            if layer.centred:
                F, G = (x - x.mean(1, keepdims=True) for x in (F, G))
            reached, *_ = worst_input(F, G, f, layer.radius, layer.scale)
            shares.append(reached / found.lead[index, head])
    return {
        "seconds": round(seconds, 2),
        "keys": int(kept.sum()),
        "heads": kept.size,
        "reached_least": round(min(shares), 5),
        "reached_most": round(max(shares), 5),
    }


def adaptive(model: Any, ids: Tensor) -> Record:
    cache = WindowCache.for_model(model)
    most = 0.0
    for chunk in ids[:, :32_768].split(CHUNK, dim=1):
        model(chunk, past_key_values=cache, logits_to_keep=1)
        most = max(most, sum(map(sum, cache.windows)))
    return {"tokens": 32_768, "keys": int(most), "uncertified": cache.uncertified}


def losses(model: Any, ids: Tensor, cache: Any = None) -> Tensor:
    """[N - 1], float64: of every token after the first, in chunks where there is a cache."""
    if cache is None:
        outputs = [model.model(ids)]
    else:
        chunks = ids.split(CHUNK, dim=1)
        outputs = [model.model(chunk, past_key_values=cache) for chunk in chunks]
    hidden, scored = torch.cat([x.last_hidden_state[0] for x in outputs]), []
    for rows, targets in zip(hidden[:-1].split(16384), ids[0, 1:].split(16384), strict=True):
        logits = model.lm_head(rows)
        wide = torch.promote_types(logits.dtype, torch.float32)
        scored.append(cross_entropy(logits.to(wide), targets, reduction="none").double())
    return torch.cat(scored)


def score(model: Any, ids: Tensor) -> Record:
    ids = ids[:, :200_001]
    times: dict[str, list[float]] = {"full": [], "stream": []}
    found: dict[str, Tensor] = {}
    for _ in range(3):
        for name in times:
            cache = None if name == "full" else WindowCache.for_model(model)
            with timed(times[name]):
                found[name] = losses(model, ids, cache)
    full, streamed = (float(x.sum()) for x in found.values())
    part = ids[:, :32_769]
    exact = losses(copy.deepcopy(model).double(), part)
    caches = {"full": None, "stream": WindowCache.for_model(model)}
    errors = {n: float((losses(model, part, c) - exact).abs().max()) for n, c in caches.items()}
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    return {
        "tokens": ids.shape[1] - 1,
        "nll": full / (ids.shape[1] - 1),
        "relative_difference": abs(streamed / full - 1),
        "largest_error_full": errors["full"],
        "largest_error_stream": errors["stream"],
        "tokens_per_second_full": round(200_000 / medians["full"]),
        "tokens_per_second_stream": round(200_000 / medians["stream"]),
        "speed": round(medians["full"] / medians["stream"], 3),
        "cache_bytes": cache.num_bytes,
        "keys": int(sum(map(sum, cache.windows))),
        "uncertified": cache.uncertified,
    }


@contextmanager
def timed(seconds: list[float]) -> Iterator[None]:
    """Append how long the block took."""
    start = time.perf_counter()
    yield
    seconds.append(time.perf_counter() - start)


def milliseconds(times: dict[str, list[float]]) -> dict[str, float]:
    return {name: round(1e3 * statistics.median(found), 3) for name, found in times.items()}


def memory(model: Any, ids: Tensor) -> Record:
    cache, early = WindowCache.for_model(model), None
    resident = []
    for number, chunk in enumerate(endless(ids, 1_000_000), 1):
        model(chunk, past_key_values=cache, logits_to_keep=1)
        if number * CHUNK == 32_768:
            early = copy.deepcopy(cache)
        if number * CHUNK % 102_400 == 0:
            resident.append(record.memory_bytes())
    times: dict[str, list[float]] = {"early": [], "late": []}
    for chunk in endless(ids, 60 * CHUNK):
        for name, which in (("early", early), ("late", cache)):
            with timed(times[name]):
                model(chunk, past_key_values=which, logits_to_keep=1)
    ms = milliseconds(times)
    return {
        "tokens": cache.get_seq_length(),
        "resident_growth_bytes": resident[-1] - resident[0],
        "resident": resident,
        "chunk_ms_at_32768": ms["early"],
        "chunk_ms_at_a_million": ms["late"],
        "ratio": round(ms["late"] / ms["early"], 3),
        "cache_bytes": cache.num_bytes,
        "uncertified": cache.uncertified,
    }


def endless(ids: Tensor, tokens: int) -> Iterator[Tensor]:
    """The text in chunks, from its start again where it ends."""
    chunks = [chunk for chunk in ids.split(CHUNK, dim=1) if chunk.shape[1] == CHUNK]
    return itertools.islice(itertools.cycle(chunks), -(-tokens // CHUNK))


def decode(model: Any, ids: Tensor) -> Record:
    growing = DynamicCache(config=model.config)
    use_growing_layers(growing)
    lengths = (1024, 16_384, 1_000_000)
    caches: dict[str, Any] = {f"window {n:,}": WindowCache.for_model(model) for n in lengths}
    caches["growing 16,384"] = growing
    for name, cache in caches.items():
        for chunk in endless(ids, int(name.split()[1].replace(",", ""))):
            model(chunk, past_key_values=cache, logits_to_keep=1)
    step = ids[:, :1]
    times: dict[str, list[float]] = {name: [] for name in caches}
    for _ in range(600):
        for name, cache in caches.items():
            with timed(times[name]):
                model(step, past_key_values=cache, logits_to_keep=1)
    generated: dict[str, list[float]] = {name: [] for name in caches}
    for _ in range(5):
        for name, cache in caches.items():
            mask = torch.ones(1, cache.get_seq_length() + 1, dtype=torch.int64)
            options = {"attention_mask": mask, "past_key_values": cache, "do_sample": False}
            new = {"min_new_tokens": 100, "max_new_tokens": 100}
            with timed(generated[name]):
                model.generate(step, **options, **new)
    ms = milliseconds(times)
    by_generate = {name: round(value / 100, 3) for name, value in milliseconds(generated).items()}
    return {
        "step_ms": ms,
        "generate_step_ms": by_generate,
        "million_over_1024": round(ms["window 1,000,000"] / ms["window 1,024"], 3),
        "window_over_growing": round(ms["window 16,384"] / ms["growing 16,384"], 3),
    }


def same(model: Any, ids: Tensor) -> Record:
    growing = DynamicCache(config=model.config)
    use_growing_layers(growing)
    caches = growing, WindowCache.for_model(model)
    for chunk in endless(ids, 262_144):
        logits = [model(chunk, past_key_values=c, logits_to_keep=1).logits[0, -1] for c in caches]
    equal = 0
    for _ in range(2500):
        best = [int(x.argmax()) for x in logits]
        equal += best[0] == best[1]
        step = torch.tensor([[best[0]]])
        logits = [model(step, past_key_values=c, logits_to_keep=1).logits[0, -1] for c in caches]
    return {"tokens": 262_144, "steps": 2500, "equal": equal}


class Watched(WindowLayer):
    """A layer that keeps the bound of every row, and which keys the row read."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.seen_rows: list[tuple[int, int, Tensor, list[int]]] = []

    def _remember(self, rows: Any, bound: Tensor | None) -> None:
        if bound is not None:
            oldest = [self.seen - n for n in self.pool.counts]
            self.seen_rows.append((rows.start, rows.q.shape[2], bound.clone(), oldest))
        super()._remember(rows, bound)


KINDS = ("normal", "outliers", "aligned", "growing", "heavy", "alike", "not finite")


def hostile(kind: str, rng: np.random.Generator, B: int, H: int, G: int, T: int, D: int) -> Any:
    """Queries and keys that try to make a far key matter."""
    q, k = rng.normal(size=(B, H, T, D)), rng.normal(size=(B, G, T, D))
    if kind == "outliers":
        k[:, :, rng.integers(T, size=5)] *= 10 ** rng.uniform(0, 3)
    elif kind == "aligned":  # the oldest keys lie along the newest queries
        k[:, :, : T // 3] = 6 * q[:, :: H // G, -1:] / np.sqrt(D)
        q[:, :, T // 2 :] = q[:, :, -1:] * 3
    elif kind == "growing":
        q *= np.geomspace(0.1, 30, T)[:, None]
        k *= np.geomspace(10, 0.1, T)[:, None]
    elif kind == "heavy":
        q, k = rng.standard_cauchy(q.shape), rng.standard_cauchy(k.shape)
    elif kind == "alike":
        k[:] = k[:, :, :1] + 1e-3 * k
    elif kind == "not finite":
        k[:, :, rng.integers(T // 2)] = rng.choice([np.nan, np.inf, -np.inf])
    return torch.from_numpy(q), torch.from_numpy(k)


def attack(rows_wanted: int) -> Record:
    rng = np.random.default_rng(0)
    rows, below, closest, certified, by_kind = 0, 0, math.inf, 0, dict.fromkeys(KINDS, 0)
    while rows < rows_wanted:
        kind = KINDS[rng.integers(len(KINDS))]
        B, G, sharing = (int(rng.integers(1, 3)) for _ in range(3))
        T, D, H = int(rng.integers(1200, 2600)), int(rng.choice([8, 32])), G * sharing
        q, k = hostile(kind, rng, B, H, G, T, D)
        slopes = torch.from_numpy(2.0 ** -rng.uniform(1, 10, size=H))
        windows = [float(rng.integers(1, 200)) for _ in range(G)]
        settings = Settings([math.inf] * G, windows, 1e-3, "count")
        layer = Watched(settings)
        layout, cuts, at = TokenLayout(torch.zeros(1, 1, dtype=torch.int64)), [], 0
        while at < T:
            cuts.append(min(T - at, int(rng.choice([1, 3, 40, 512]))))
            at += cuts[-1]
        for part_q, part_k in zip(q.split(cuts, 2), k.split(cuts, 2), strict=True):
            layer.attend(part_q, part_k, torch.ones_like(part_k), slopes, None, layout)
        layer.certify()
        scores = torch.einsum("bhtd,bhsd->bhts", q, k.repeat_interleave(sharing, 1)) * D**-0.5
        distance = torch.arange(T)[:, None] - torch.arange(T)
        scores = (scores - slopes[:, None, None] * distance).masked_fill(distance < 0, -math.inf)
        for start, count, bound, oldest in layer.seen_rows:
            for h in range(H):
                first, part = oldest[h // sharing], scores[:, h, start : start + count]
                really = part[..., :first].logsumexp(-1) - part[..., first:].logsumexp(-1)
                ours = bound[:, h]
                # NaN, where a key is not finite, must never pass; nothing dropped is nothing
                # missing.
                fine = (ours >= really - 1e-9) | really.isneginf()
                fine |= really.isnan() & ~(ours <= 0)
                below += int((~fine).sum())
                known = really.isfinite() & ours.isfinite()
                if known.any():
                    closest = min(closest, float((ours - really)[known].min()))
                certified += int((ours <= math.log(1e-3 / 2)).sum())
                rows += ours.numel()
                by_kind[kind] += ours.numel()
    found = {"rows": rows, "below": below, "closest_nats": closest, "certified": certified}
    return found | {"by_kind": by_kind}


ALL: tuple[Callable[[Any, Tensor], Record], ...]
ALL = (windows, adaptive, score, memory, decode, same)
STAGES = {stage.__name__: stage for stage in ALL}


# Of the table of the guide: a stage, what a row says, and its cells from the fields of the record.
ROWS = (
    ("windows", "keys over all heads, from the weights", "{keys:,}"),
    ("windows", "largest score that a search finds, as a share of the bound",
     "{reached_least:.2%} at least"),
    ("windows", "seconds for that", "{seconds:.1f}"),
    ("adaptive", "keys kept at most in 32,768 tokens", "{keys:,}"),
    ("adaptive", "rows of heads not certified among them", "{uncertified}"),
    ("score", "200,000 tokens: loss, relative to one pass", "{relative_difference:.0e}"),
    ("score", "largest error of a token's loss, of that of one pass", "{error:.1f}"),
    ("score", "speed, of that of one pass", "{speed:.2f} ({tokens_per_second_stream:,} tokens/s)"),
    ("score", "cache", "{cache:.1f} MiB"),
    ("memory", "resident memory from 100,000 to a million tokens", "{growth:+.1f} MiB"),
    ("memory", "rows of heads not certified, in a million tokens", "{uncertified}"),
    ("memory", "time of a chunk at a million, of that at 32,768", "{ratio:.2f}"),
    ("decode", "step at 16,384, of that with the growing cache",
     "{window_over_growing:.2f} ({step_ms[window 16,384]:.2f} ms)"),
    ("decode", "step at a million, of that at 16,384", "{late:.2f}"),
    ("decode", "the same through `generate`", "{generate_late:.2f}"),
    ("decode", "step at a million, of that at 1,024, where windows are not full",
     "{million_over_1024:.2f}"),
    ("same", "likeliest token the same, of 2,500 steps at 262,144", "{equal:,}"),
)  # fmt: skip


def with_ratios(r: Record) -> Record:
    """A record with what the table shows of its fields together."""
    more = {}
    if r["stage"] == "score":
        more["error"] = r["largest_error_stream"] / r["largest_error_full"]
        more["cache"] = r["cache_bytes"] / 2**20
    elif r["stage"] == "memory":
        more["growth"] = r["resident_growth_bytes"] / 2**20
    elif r["stage"] == "decode":
        for name, ms in (("late", r["step_ms"]), ("generate_late", r["generate_step_ms"])):
            more[name] = ms["window 1,000,000"] / ms["window 16,384"]
    return {**r, **more}


def measured() -> str:
    """The table of the guide."""
    records = read(PATH)
    found = {(r["stage"], r.get("model")): with_ratios(r) for r in records}
    models = [model for model in unique(records, "model") if model]

    def cell(stage: str, model: str, form: str) -> str:
        return form.format(**found[stage, model]) if (stage, model) in found else "-"

    lines = ([words, *(cell(stage, m, form) for m in models)] for stage, words, form in ROWS)
    last, stages = records[-1], dict[str, set[str]]()
    for r in records:
        stages.setdefault(r["machine"], set()).add(r["stage"])
    where = last["machine"]
    if len(stages) > 1:
        where = "; ".join(f"{on} ({', '.join(sorted(of))})" for on, of in sorted(stages.items()))
    text = (
        f"Chunks of 512 tokens, float32, tolerance 2^-24, {last['threads']} threads, {where},"
        f" torch {last['versions']['torch']}, {last['date']}, `python evidence/runs/streams.py`."
    )
    if r := found.get(("attack", None)):
        text += (
            " Hostile streams (outliers, far keys that lie along the query, growing norms, keys"
            f" that are not finite): in {r['rows']:,} rows of heads the bound lay below what was"
            f" really missing in {r['below']}."
        )
    return f"{table(['', *models], lines)}\n\n{text}"


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("models", nargs="*", metavar="NAME=FOLDER")
    parser.add_argument("--corpus", default="wikitext-2")
    parser.add_argument("--only", action="append", choices=[*STAGES, "attack", "write"])
    parser.add_argument("--rows", type=int, default=1_000_000, help="of heads, to attack")
    options = parser.parse_args()
    stages = options.only or [*STAGES, "attack", "write"]

    def keep(stage: str, model: str | None, found: Record) -> None:
        print(stage, model or "", json.dumps(found), flush=True)
        records = read(PATH) if PATH.exists() else []
        others = [r for r in records if (r["stage"], r["model"]) != (stage, model)]
        new = {"stage": stage, "model": model, **found, **record.here()}
        write_whole(PATH, "".join(json.dumps(r) + "\n" for r in [*others, new]).encode())

    with torch.no_grad():
        if options.models and set(stages) & set(STAGES):
            text = load_corpus(options.corpus)
            # The test split first, for what is scored; a million tokens go on with the other.
            both = np.concatenate([text.test, text.train])[:1_200_000].astype(np.int64)
            ids = torch.from_numpy(both)[None]
        for pair in options.models:
            name, _, folder = pair.partition("=")
            model = load(folder).eval()
            for stage in stages:
                if stage in STAGES:
                    keep(stage, name, STAGES[stage](model, ids))
        if "attack" in stages:
            keep("attack", None, attack(options.rows))
    if "write" in stages:
        fill(DOCUMENT, {"measured": measured()})


if __name__ == "__main__":
    main()
