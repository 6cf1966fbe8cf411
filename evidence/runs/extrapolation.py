"""Train short, test long: the comparison for README, documentation and explorer, with models trained past their plateaus.

    python evidence/runs/extrapolation.py --corpus wikitext-2       # hours; stopped at any moment, it goes on where it was
    python evidence/runs/extrapolation.py --corpus FOLDER           # the same, with train.txt, valid.txt and test.txt from a folder
    python evidence/runs/extrapolation.py --plan learned-steps      # ALiBi beside the methods whose layers learn its steps, with half the tokens

    tune     a learning rate for each method: the least validation loss after an eighth of the tokens, with another seed
    train    a model per method and seed, the first seed of every method first; each is then tested in segments and with a
             sliding window, at every length that it reads; of linear biases also what near-to-far attention reads at the longest

What was measured is a line of evidence/records/PLAN.jsonl: the folder of the run may go, and another machine may go on.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from linbias import _machine, near_to_far
from linbias._run.files import JsonLog
from linbias.data.corpus import Corpus, load_corpus
from linbias.lm.evaluation import Evaluation, evaluate
from linbias.lm.report.findings import loss_by_position
from linbias.lm.report.records import EvaluationRecord
from linbias.lm.settings import TrainSettings
from linbias.lm.training import train
from linbias.models.decoder.positions import AttendOptions, Biased
from linbias.models.limits import position_limit
from linbias.models.loading import load
from workers import in_processes

ROOT = Path(__file__).parents[2]
STAGES = ("tune", "train")

Record = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """What is compared.

    Attributes:
        seeds: One model per seed, by method.
        length: Tokens of a training segment.
        tokens: Of the training of each model; tuning takes an eighth.
        batch_size: Segments of a step.
        rates: Learning rates to choose from.
        test_lengths: Tokens of a test segment, or of a sliding window.
        test_tokens: Scored in segments, at every length.
        sliding_tokens: Scored with a sliding window, at every length; 0 for none.
        stride: Of the window: every prediction reads at least length - stride + 1 tokens, if the text has them.
        model: Fields of `LinbiasConfig`.
    """

    seeds: dict[str, tuple[int, ...]]
    length: int = 128
    tokens: int = 16_000_000
    batch_size: int = 16
    rates: tuple[float, ...] = (0.002, 0.004, 0.008)
    test_lengths: tuple[int, ...] = (128, 256, 512, 1024, 2048, 4096)
    test_tokens: int = 131_072
    sliding_tokens: int = 16_384
    stride: int = 64
    precision: str = "bf16"

    def settings(self, method: str, seed: int, rate: float, tokens: int) -> TrainSettings:
        """How one model is trained: models that are compared differ in method and learning rate alone."""
        steps = math.ceil(tokens / (self.batch_size * self.length))
        return TrainSettings(
            model={"position": method, "hidden_size": 128, "num_attention_heads": 4},
            length=self.length,
            batch_size=self.batch_size,
            steps=steps,
            learning_rate=rate,
            precision=self.precision,
            save_steps=500,
            seed=seed,
            validate_steps=max(1, steps // 10),
            device="cpu",
        )


PLAN = Plan(
    seeds={
        **dict.fromkeys(("alibi", "sinusoidal", "rotary"), (1, 2, 3)),
        "learned": (1,),
        "t5": (1, 2, 3),
        "none": (1,),
    }
)
PLANS = {
    "extrapolation": PLAN,
    "learned-steps": replace(
        PLAN,
        seeds=dict.fromkeys(("alibi", "forget", "cable"), (1, 2, 3)),
        tokens=8_000_000,
        sliding_tokens=0,
    ),
}


def records_of(name: str) -> Path:
    """Where the records of a plan are."""
    return ROOT / "evidence" / "records" / f"{name}.jsonl"


def train_model(corpus: str, settings: TrainSettings, folder: Path) -> Record:
    """Trains a model, or finds it trained: what it measured, and its validation losses on the way."""
    metrics = train(settings, load_corpus(corpus), folder, progress=False, keep_checkpoint=False)
    validated = [
        (line["step"] * settings.batch_size * settings.length, _bits(line["validation_loss"]))
        for line in JsonLog(folder / "history.jsonl").records
        if line.get("validation_loss") is not None
    ]
    return {
        "tokens": metrics.tokens,
        "seconds": round(metrics.seconds),
        "num_parameters": metrics.num_parameters,
        "validated": validated,
    }


def train_and_test(
    corpus: str, settings: TrainSettings, folder: Path, plan: Plan, method: str
) -> Record:
    """Everything about one model."""
    found = train_model(corpus, settings, folder)
    return {**found, **test_model(corpus, folder, plan, method, settings.seed)}


def test_model(corpus: str, folder: Path, plan: Plan, method: str, seed: int) -> Record:
    """Bits per byte of a model at every length that it reads: in segments, sliding, and by tokens of context."""
    text, model = load_corpus(corpus), load(folder)
    limit = position_limit(model) or math.inf
    lengths = [length for length in plan.test_lengths if length <= limit]

    # The longest windows are read one at a time: with positions the biases of a call are all in memory.
    def measure(length: int, stride: int | None, tokens: int) -> Evaluation:
        return evaluate(
            model,
            text.test,
            length=length,
            stride=stride,
            num_bytes=text.num_bytes["test"],
            limit_tokens=tokens,
            batch_tokens=max(plan.test_lengths),
        )

    found = [measure(length, None, plan.test_tokens) for length in lengths]
    records = [EvaluationRecord(method, plan.length, seed, e, date="") for e in found]
    return {
        "segments": {e.length: _rounded(e.bits_per_byte) for e in found},
        "sliding": {
            length: _rounded(measure(length, plan.stride, plan.sliding_tokens).bits_per_byte)
            for length in (lengths if plan.sliding_tokens else [])
        },
        "positions": [
            (round(x, 2), _rounded(y)) for x, y in zip(*loss_by_position(records), strict=True)
        ],
        "near_to_far": read_near_to_far(model, text.test[: lengths[-1]]),
    }


TILE = 64  # query rows, and keys, that are read at once


@torch.no_grad()
def read_near_to_far(model: Any, ids: npt.NDArray[Any]) -> Record | None:
    """What near-to-far attention reads of a text, for every layer and head: None without linear biases.

    `read`: the share of the pairs of a query and a key before it; `step`: how much scores fall from one token to the
    next, in the mean; `dropped`: the most that a row's unread keys weigh, in all heads.
    """
    position = model.model.position
    if not isinstance(position, Biased):
        return None
    calls: list[tuple[Any, ...]] = []
    attend = position.attend

    def watched(q: Any, k: Any, v: Any, options: AttendOptions) -> torch.Tensor:
        calls.append((q, k, v, position.fall(q, k, options)["slopes"], options.positions))
        return attend(q, k, v, options)

    position.attend = watched
    model(torch.from_numpy(ids.astype(np.int64))[None], use_cache=False)
    del position.attend
    read, step, dropped = [], [], 0.0
    for q, k, v, slopes, positions in calls:
        heads = [_read_by_head(h, q, k, v, slopes, positions) for h in range(q.shape[1])]
        read.append([round(share, 5) for share, _, _ in heads])
        step.append([round(fall, 6) for _, fall, _ in heads])
        dropped = max(dropped, *(lost for _, _, lost in heads))
    return {"length": len(ids), "read": read, "step": step, "dropped": dropped}


def _read_by_head(h: int, *arrays: torch.Tensor | None) -> tuple[float, float, float]:
    """Of one head, with keys of its own: the share of pairs that is read, the mean step, the largest share of weight left."""
    q, k, v = (x[0, h : h + 1].double().numpy() for x in arrays[:3])
    slope = arrays[3][h : h + 1].numpy()
    x = np.arange(float(k.shape[1]))[None]
    if arrays[4] is not None:
        x = arrays[4][0, h : h + 1].numpy()
    visit = near_to_far.attention(q, k, v, slope, positions=x, rows=TILE, keys=TILE)
    rows = np.arange(q.shape[1])
    first = np.array([tile.first for tile in visit.tiles[0][0]])[rows // TILE]
    lost = near_to_far.share_outside(q, k, first, rows + 1, slope, positions=x)
    pairs = (rows + 1 - first).sum() / (rows + 1).sum()
    return float(pairs), float(slope[0] * (x[0, -1] - x[0, 0]) / len(rows)), float(lost.max())


def _bits(nats: float) -> float:
    """Of a byte, whose tokens are bytes."""
    return _rounded(nats / math.log(2))


def _rounded(bits: float | None) -> float:
    assert bits is not None
    return round(bits, 5)


def tune(plan: Plan, corpus: str, output: Path, log: JsonLog, jobs: int) -> None:
    work = {}
    for rate, method in product(plan.rates, plan.seeds):
        if log.find(kind="tune", method=method, rate=rate) is None:
            settings = plan.settings(method, 0, rate, plan.tokens // 8)
            folder = output / "tune" / f"{method}-{rate:g}"
            work[method, rate] = (train_model, corpus, settings, folder)
    for (method, rate), found in in_processes("tune", work, jobs):
        log.append({"kind": "tune", "method": method, "rate": rate, **found, **made_here()})


def tuned_rate(plan: Plan, log: JsonLog, method: str) -> float:
    """The rate with the least validation loss at the end."""
    tuned = {r["rate"]: r["validated"][-1][1] for r in log.records if r["kind"] == "tune" and r["method"] == method}  # fmt: skip
    return min(plan.rates, key=lambda rate: tuned[rate])


def models(plan: Plan, output: Path) -> Iterator[tuple[str, int, Path]]:
    """Every method and seed, with the model's folder."""
    for seed in sorted({seed for seeds in plan.seeds.values() for seed in seeds}):
        for method, seeds in plan.seeds.items():
            if seed in seeds:
                yield method, seed, output / "models" / f"{method}-s{seed}"


def train_all(plan: Plan, corpus: str, output: Path, log: JsonLog, jobs: int) -> None:
    work = {}
    for method, seed, folder in models(plan, output):
        if log.find(kind="model", method=method, seed=seed) is None:
            rate = tuned_rate(plan, log, method)
            settings = plan.settings(method, seed, rate, plan.tokens)
            work[method, seed, rate] = (train_and_test, corpus, settings, folder, plan, method)
    for (method, seed, rate), found in in_processes("train", work, jobs):
        key = {"kind": "model", "method": method, "seed": seed, "rate": rate}
        log.append({**key, **found, **made_here()})


def made_here() -> Record:
    """Where and when something was measured."""
    versions = {name: version for name, version in _machine.versions().items() if version}
    return {"machine": _machine.processor(), "versions": versions, "date": _machine.now()}


def open_log(plan: Plan, corpus: Corpus, path: Path) -> JsonLog:
    """The records of this very comparison: another plan or text needs another file."""
    log = JsonLog(path)
    identity = {"kind": "plan", **asdict(plan), "corpus": corpus.fingerprint}
    identity = json.loads(json.dumps(identity))
    if not log.records:
        log.append({**identity, "bytes": corpus.num_bytes})
    differ = [name for name, value in identity.items() if log.records[0].get(name) != value]
    if differ:
        raise ValueError(
            f"extrapolation: {path} must hold records of the same plan and text, but {', '.join(differ)} differ"
        )
    return log


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpus", default="wikitext-2", help="what `load_corpus` reads")
    parser.add_argument("--plan", choices=PLANS, default="extrapolation")
    parser.add_argument("--output", type=Path, help="default: output/PLAN")
    parser.add_argument("--records", type=Path, help="default: evidence/records/PLAN.jsonl")
    parser.add_argument("--only", choices=STAGES, action="append", help="repeatable")
    parser.add_argument("--jobs", type=int, default=2, help="models at a time, a thread each")
    options = parser.parse_args()
    stages = options.only or STAGES
    plan, text = PLANS[options.plan], load_corpus(options.corpus)
    if len(text.test) <= plan.test_tokens:
        parser.error(
            f"--corpus: must have more than {plan.test_tokens:,} bytes to test on, got {len(text.test):,}"
        )
    output = options.output or ROOT / "output" / options.plan
    log = open_log(plan, text, options.records or records_of(options.plan))
    if "tune" in stages:
        tune(plan, options.corpus, output, log, options.jobs)
    if "train" in stages:
        train_all(plan, options.corpus, output, log, options.jobs)


if __name__ == "__main__":
    sys.exit(main())
