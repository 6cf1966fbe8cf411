"""Train short, test long: the comparison of README, documentation and explorer.

    python evidence/runs/extrapolation.py --corpus wikitext-2  # hours; goes on where it was
    stopped
    python evidence/runs/extrapolation.py --corpus FOLDER      # train.txt, valid.txt and test.txt
    python evidence/runs/extrapolation.py --plan learned-steps # methods whose layers learn the
    steps

    tune     a learning rate for each method: the least loss after an eighth of the tokens
    train    a model per method and seed, the first seed first; each is then tested in
             segments and with a sliding window, at every length that it reads; of linear biases
             also what near-to-far attention reads at the longest

What was measured is a line of evidence/records/PLAN.jsonl: the folder of the run may go, and
another machine may go on.
"""

import json
import math
import sys
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from experiment import made_here, measure
from linbias import near_to_far
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
from markers import RECORDS, ROOT, Record, parser_of

STAGES = ("tune", "train")


@dataclass(frozen=True)
class Plan:
    """What is compared."""

    seeds: dict[str, tuple[int, ...]]  # by method; one model for each
    length: int = 128  # tokens of a training segment
    tokens: int = 16_000_000  # of the training of each model; tuning takes an eighth
    batch_size: int = 16  # segments of a step
    rates: tuple[float, ...] = (0.002, 0.004, 0.008)  # to choose from
    test_lengths: tuple[int, ...] = (128, 256, 512, 1024, 2048, 4096)
    test_tokens: int = 131_072  # scored in segments, at every length
    sliding_tokens: int = 16_384  # scored with a sliding window, at every length; 0 for none
    stride: int = 64  # of it: every prediction reads at least length - stride + 1 tokens
    precision: str = "bf16"

    def settings(self, method: str, seed: int, rate: float, tokens: int) -> TrainSettings:
        """Models that are compared differ in method and learning rate alone."""
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


THREE = (1, 2, 3)
PLAN = Plan(
    {
        "alibi": THREE,
        "sinusoidal": THREE,
        "rotary": THREE,
        "learned": (1,),
        "t5": THREE,
        "none": (1,),
    }
)
LEARNED = dict.fromkeys(("alibi", "forget", "cable"), THREE)
PLANS = {
    "extrapolation": PLAN,
    "learned-steps": replace(PLAN, seeds=LEARNED, tokens=8_000_000, sliding_tokens=0),
}


def records_of(name: str) -> Path:
    """Where the records of a plan are."""
    return RECORDS / f"{name}.jsonl"


def train_model(corpus: str, settings: TrainSettings, folder: Path) -> Record:
    """Trains a model, or finds it trained: its measurements, and validation losses on the way."""
    metrics = train(settings, load_corpus(corpus), folder, progress=False, keep_checkpoint=False)
    tokens_per_step = settings.batch_size * settings.length
    validated = [  # bits of a byte, which is a token
        (line["step"] * tokens_per_step, round(line["validation_loss"] / math.log(2), 5))
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
    """Bits per byte at every length that a model reads: in segments, sliding, and by context."""
    text, model = load_corpus(corpus), load(folder)
    limit = position_limit(model) or math.inf
    lengths = [length for length in plan.test_lengths if length <= limit]

    # The longest are read one at a time: with positions the biases of a call are all in memory.
    def score(length: int, stride: int | None, tokens: int) -> Evaluation:
        return evaluate(
            model,
            text.test,
            length=length,
            stride=stride,
            num_bytes=text.num_bytes["test"],
            limit_tokens=tokens,
            batch_tokens=max(plan.test_lengths),
        )

    segments = [score(length, None, plan.test_tokens) for length in lengths]
    sliding = [score(n, plan.stride, plan.sliding_tokens) for n in lengths if plan.sliding_tokens]
    records = [EvaluationRecord(method, plan.length, seed, e, date="") for e in segments]
    positions = zip(*loss_by_position(records), strict=True)
    return {
        "segments": {e.length: round(e.bits_per_byte, 5) for e in segments},
        "sliding": {e.length: round(e.bits_per_byte, 5) for e in sliding},
        "positions": [(round(x, 2), round(y, 5)) for x, y in positions],
        "near_to_far": read_near_to_far(model, text.test[: lengths[-1]]),
    }


TILE = 64  # query rows, and keys, that are read at once


@torch.no_grad()
def read_near_to_far(model: Any, ids: npt.NDArray[Any]) -> Record | None:
    """What near-to-far attention reads of a text, by layer and head; None without linear biases.

    `read`: the share of pairs of a query and a key before it; `step`: the mean fall of scores from
    one token to the next; `dropped`: the most that a row's unread keys weigh, in all heads.
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
    """Of one head: the share of pairs read, the mean step, the largest share of weight left."""
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


def tune(plan: Plan, corpus: str, output: Path, log: JsonLog, jobs: int) -> None:
    calls = []
    for rate, method in product(plan.rates, plan.seeds):
        settings = plan.settings(method, 0, rate, plan.tokens // 8)
        folder = output / "tune" / f"{method}-{rate:g}"
        calls.append(({"method": method, "rate": rate}, (train_model, corpus, settings, folder)))
    for key, found in measure("tune", calls, log, jobs):
        log.append({"kind": "tune", **key, **found, **made_here()})


def tuned_rate(plan: Plan, log: JsonLog, method: str) -> float:
    """The rate with the least validation loss at the end."""
    tuned = [r for r in log.records if r["kind"] == "tune" and r["method"] == method]
    losses = {record["rate"]: record["validated"][-1][1] for record in tuned}
    return min(plan.rates, key=losses.__getitem__)


def train_all(plan: Plan, corpus: str, output: Path, log: JsonLog, jobs: int) -> None:
    calls = []
    models = ((seed, method) for method, seeds in plan.seeds.items() for seed in seeds)
    for seed, method in sorted(models, key=lambda model: model[0]):
        rate = tuned_rate(plan, log, method)
        settings = plan.settings(method, seed, rate, plan.tokens)
        folder = output / "models" / f"{method}-s{seed}"
        call = (train_and_test, corpus, settings, folder, plan, method)
        calls.append(({"method": method, "seed": seed, "rate": rate}, call))
    for key, found in measure("model", calls, log, jobs):
        log.append({"kind": "model", **key, **found, **made_here()})


def open_log(plan: Plan, corpus: Corpus, path: Path) -> JsonLog:
    """The records of this very comparison: another plan or text needs another file."""
    log = JsonLog(path)
    identity = {"kind": "plan", **asdict(plan), "corpus": corpus.fingerprint}
    identity = json.loads(json.dumps(identity))
    if not log.records:
        log.append({**identity, "bytes": corpus.num_bytes})
    differ = [name for name, value in identity.items() if log.records[0].get(name) != value]
    if differ:
        own = f"{path} must hold records of the same plan and text"
        raise ValueError(f"extrapolation: {own}, but {', '.join(differ)} differ")
    return log


def main() -> None:
    parser = parser_of(__doc__)
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
        least, got = f"{plan.test_tokens:,}", f"{len(text.test):,}"
        parser.error(f"--corpus: must have more than {least} bytes to test on, got {got}")
    output = options.output or ROOT / "output" / options.plan
    log = open_log(plan, text, options.records or records_of(options.plan))
    if "tune" in stages:
        tune(plan, options.corpus, output, log, options.jobs)
    if "train" in stages:
        train_all(plan, options.corpus, output, log, options.jobs)


if __name__ == "__main__":
    sys.exit(main())
