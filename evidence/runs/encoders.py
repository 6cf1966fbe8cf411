"""Which positions an encoder should have: masked models trained at 64 tokens, tested up to 1,024.

    python evidence/runs/encoders.py --text FILE --text-name WikiText-2 # a second corpus
    python evidence/runs/encoders.py --only models      # some stages; all go on where they were
    python evidence/runs/encoders.py --only write       # docs/results/encoders.md from the records

    tune     a learning rate for all methods alike: the least mean validation loss of some of them
    models   one per corpus, seed and method, each in a process of its own: trained, its slopes
             kept, and tested at every length, in blocks and with tokens on both sides of them
    write    tables, claims and the plot, from the records alone

Models that are compared read the same sequences in the same order, with the same tokens masked,
from weights drawn by the same seed. What was measured is a line of the records.
"""

import math
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import torch

import encoders_report
from experiment import add_plan_options, made_here, measure, plan_of
from linbias._run.files import JsonLog
from linbias.data.corpus import load_corpus
from linbias.data.segments import MaskTokens
from linbias.lm.hidden import evaluate_hidden
from linbias.lm.settings import TrainSettings
from linbias.lm.training import train
from linbias.models.decoder.config import ENCODER_POSITIONS
from linbias.models.limits import position_limit
from linbias.models.loading import load
from markers import ROOT, Record, parser_of

STAGES = ("tune", "models", "write")
TUNED = ("symmetric", "asymmetric", "rotary", "t5", "learned")


@dataclass(frozen=True)
class Plan:
    """What is measured. The defaults take 40 to 55 minutes on two cores, with two corpora."""

    corpora: tuple[str, ...]  # names, the embedded one ("stdlib") last; the first is tuned on
    methods: tuple[str, ...] = ENCODER_POSITIONS
    length: int = 64  # tokens of a training sequence
    batch_size: int = 8
    steps: int = 1600  # of every model; a quarter of them to tune
    rates: tuple[float, ...] = (1e-3, 2e-3, 4e-3)  # to choose from, by models of another seed
    seeds: tuple[int, ...] = (1, 2, 3)
    test_lengths: tuple[int, ...] = (64, 128, 256, 512, 1024)  # tokens read at a time
    test_tokens: int = 32768
    margin: int = 24  # tokens read at least on either side of what is scored, in the second test
    width: int | None = None  # of the models, in place of 96

    def settings(self, method: str, seed: int, rate: float, steps: int) -> TrainSettings:
        """Models that are compared differ in method and seed alone."""
        model = {"hidden_size": self.width or 96, "num_hidden_layers": 4, "num_attention_heads": 8}
        model |= {"encoder_position": method}
        size = {"length": self.length, "batch_size": self.batch_size, "steps": steps}
        every = {"save_steps": max(1, steps // 2), "validate_steps": steps}
        fixed = {"task": "masked", "threads": 1, "device": "cpu"}
        return TrainSettings(model, learning_rate=rate, seed=seed, **size, **every, **fixed)


def train_model(text: str, home: Path, settings: TrainSettings) -> Record:
    """Trains it, or finds it trained."""
    metrics = train(settings, load_corpus(text), home, progress=False, keep_checkpoint=False)
    position = load(home, device="cpu").model.position
    slopes: Record = {}
    if hasattr(position, "sides"):
        left, right = position.sides(torch.float64, torch.device("cpu"))
        slopes = {"left": _numbers(left), "right": _numbers(right)}
    if hasattr(position, "first"):
        slopes["first"] = _numbers(position.first)
    kept = ("loss", "validation_loss", "tokens", "num_parameters")
    found = {name: getattr(metrics, name) for name in kept}
    return found | {"seconds": round(metrics.seconds, 1), "slopes": slopes}


def _numbers(slopes: torch.Tensor) -> list[float | str]:
    """As JSON has them: it has no infinity."""
    return [x if math.isfinite(x) else "inf" for x in slopes.detach().double().tolist()]


def test_model(text: str, home: Path, plan: Plan) -> list[Record]:
    """Nats per masked token at each length that it can read, in blocks and amid other tokens."""
    model, corpus = load(home, device="cpu"), load_corpus(text)
    limit, tokens = position_limit(model) or math.inf, MaskTokens.of(corpus.tokenizer)
    found = []
    for margin, length in product((0, plan.margin), plan.test_lengths):
        if length > limit:
            continue
        stride = length - 1 - 2 * margin if margin else None
        read = {"length": length, "stride": stride, "limit_tokens": plan.test_tokens}
        result = evaluate_hidden(model, corpus.test, tokens=tokens, **read)
        kept = ("length", "stride", "num_tokens", "num_scored", "nll", "accuracy")
        found.append({"margin": margin, **{name: getattr(result, name) for name in kept}})
    return found


def measure_model(text: str, home: Path, settings: TrainSettings, plan: Plan) -> Record:
    return {**train_model(text, home, settings), "tests": test_model(text, home, plan)}


@dataclass
class Run:
    """A plan, the texts by corpus, where its models lie, and its records."""

    plan: Plan
    texts: dict[str, str]
    output: Path
    log: JsonLog
    jobs: int

    def check(self) -> None:
        """Write down what is measured; records of another plan are refused."""
        made, plan = self.log.find(kind="made"), asdict(self.plan)
        asked = {k: list(v) if isinstance(v, tuple) else v for k, v in plan.items()}
        if made is None:
            corpora = {name: load_corpus(text) for name, text in self.texts.items()}
            sizes = {name: corpus.num_bytes["train"] / 1e6 for name, corpus in corpora.items()}
            texts = {name: f"{size:.1f} MB to train on" for name, size in sizes.items()}
            self.log.append({"kind": "made", **made_here(), "texts": texts, "plan": asked})
        elif made["plan"] != asked:
            own = f"{self.log.path} must be records of this plan"
            raise SystemExit(f"encoders: {own}, got those of {made['plan']}")

    def tune(self) -> None:
        plan, calls = self.plan, []
        for rate, method in product(plan.rates, (m for m in TUNED if m in plan.methods)):
            settings = plan.settings(method, 0, rate, max(1, plan.steps // 4))
            home = self.output / "tune" / f"{method}-{rate}"
            call = (train_model, self.texts[plan.corpora[0]], home, settings)
            calls.append(({"method": method, "lr": rate}, call))
        for key, found in measure("tune", calls, self.log, self.jobs):
            self.log.append({"kind": "tune", **key, **found})

    def rate(self) -> float:
        """The one of the least mean validation loss."""

        def mean_loss(rate: float) -> float:
            tuned = [r for r in self.log.records if r["kind"] == "tune" and r["lr"] == rate]
            return statistics.fmean(r["validation_loss"] for r in tuned)

        return min(self.plan.rates, key=mean_loss)

    def calls(self) -> Iterator[tuple[Record, tuple[object, ...]]]:
        """Whole seeds first, so that a run that is stopped is of use."""
        plan, rate = self.plan, self.rate()
        for seed, corpus, method in product(plan.seeds, plan.corpora, plan.methods):
            settings = plan.settings(method, seed, rate, plan.steps)
            home = self.output / "models" / f"{corpus}-{method}-s{seed}"
            key = {"corpus": corpus, "method": method, "seed": seed}
            yield key, (measure_model, self.texts[corpus], home, settings, plan)

    def models(self) -> None:
        for key, found in measure("model", self.calls(), self.log, self.jobs):
            self.log.append({"kind": "model", **key, "lr": self.rate(), **found})


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--text", type=Path, metavar="FILE", help="of the second corpus")
    parser.add_argument("--text-name", help="its name in the tables; default: that of the file")
    parser.add_argument("--output", type=Path, default=ROOT / "output" / "encoders")
    parser.add_argument("--records", type=Path, default=encoders_report.RECORDS)
    parser.add_argument("--document", type=Path, default=ROOT / "docs" / "results" / "encoders.md")
    parser.add_argument("--only", choices=STAGES, action="append", help="repeatable")
    parser.add_argument("--jobs", type=int, default=2, help="models at a time, a thread each")
    names = ("length", "batch_size", "steps", "test_tokens", "margin")
    add_plan_options(parser, Plan, *names, "seeds", "test_lengths", "rates", "methods")
    parser.add_argument("--width", type=int, help="of the models; default: 96")
    options = parser.parse_args()
    stages, texts = options.only or STAGES, {"stdlib": "stdlib"}
    if options.text is not None:
        name = options.text_name or options.text.stem
        texts = {name: str(options.text.resolve()), **texts}
    if set(stages) != {"write"}:
        options.records.parent.mkdir(parents=True, exist_ok=True)
        plan, log = plan_of(options, Plan(tuple(texts))), JsonLog(options.records)
        run = Run(plan, texts, options.output, log, options.jobs)
        run.check()
        for stage in STAGES[:-1]:
            if stage in stages:
                getattr(run, stage)()
    if "write" in stages:
        encoders_report.write(options.records, options.document)


if __name__ == "__main__":
    sys.exit(main())
