"""Which positions an encoder should have: masked models trained at 64 tokens, tested up to 1,024.

    python evidence/runs/encoders.py --text FILE --text-name WikiText-2   # a second corpus; may be left out
    python evidence/runs/encoders.py --only models                        # some stages; all of them go on where they were
    python evidence/runs/encoders.py --only write                         # docs/results/encoders.md from evidence/records/encoders.jsonl

    tune     a learning rate for all methods alike: the least mean validation loss of some of them, on the first corpus
    models   one per corpus, seed and method, each in a process of its own: trained, its slopes kept, and tested at
             every length, in blocks and with tokens on either side of what is scored
    write    tables, claims and the plot, from the records alone

Models that are compared read the same sequences in the same order, with the same tokens masked, from weights drawn by
the same seed. What was measured is a line of the records.
"""

import argparse
import math
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

import torch

import encoders_report
from linbias import _machine
from linbias._run.files import JsonLog, Record
from linbias.data.corpus import Corpus, load_corpus
from linbias.data.segments import MaskTokens
from linbias.lm.hidden import evaluate_hidden
from linbias.lm.settings import TrainSettings
from linbias.lm.training import train
from linbias.models.decoder.config import ENCODER_POSITIONS
from linbias.models.limits import position_limit
from linbias.models.loading import load
from paper_small import in_processes

ROOT = Path(__file__).parents[2]
STAGES = ("tune", "models", "write")
TUNED = ("symmetric", "asymmetric", "rotary", "t5", "learned")
MODEL = {"hidden_size": 96, "num_hidden_layers": 4, "num_attention_heads": 8}


@dataclass(frozen=True)
class Plan:
    """What is measured. The defaults take 40 to 55 minutes on two cores, with two corpora.

    Attributes:
        corpora: Names, the embedded one ("stdlib") last.
        methods: Values of `LinbiasConfig.encoder_position`.
        length: Tokens of a training sequence.
        batch_size: Sequences of a step.
        steps: Of every model; a quarter of them to tune.
        rates: Learning rates to choose from, by models of another seed.
        seeds: A model of each kind for each.
        test_lengths: Tokens read at a time; `length` is the first.
        test_tokens: Tokens of the test text.
        margin: Tokens read at least on either side of what is scored, in the second kind of test.
        width: Of the models; None: that of MODEL.
    """

    corpora: tuple[str, ...]
    methods: tuple[str, ...] = ENCODER_POSITIONS
    length: int = 64
    batch_size: int = 8
    steps: int = 1600
    rates: tuple[float, ...] = (1e-3, 2e-3, 4e-3)
    seeds: tuple[int, ...] = (1, 2, 3)
    test_lengths: tuple[int, ...] = (64, 128, 256, 512, 1024)
    test_tokens: int = 32768
    margin: int = 24
    width: int | None = None

    def settings(self, method: str, seed: int, learning_rate: float, steps: int) -> TrainSettings:
        """How a model is trained: those that are compared differ in method and seed alone."""
        width = {} if self.width is None else {"hidden_size": self.width}
        return TrainSettings(
            {**MODEL, **width, "encoder_position": method},
            length=self.length,
            task="masked",
            batch_size=self.batch_size,
            steps=steps,
            learning_rate=learning_rate,
            seed=seed,
            save_steps=max(1, steps // 2),
            validate_steps=steps,
            threads=1,
            device="cpu",
        )


def train_model(place: str, home: Path, settings: TrainSettings) -> Record:
    """Trains it, or finds it trained."""
    metrics = train(settings, load_corpus(place), home, progress=False, keep_checkpoint=False)
    position = load(home, device="cpu").model.position
    slopes: Record = {}
    if hasattr(position, "sides"):
        left, right = position.sides(torch.float64, torch.device("cpu"))
        slopes = {"left": _numbers(left), "right": _numbers(right)}
    if hasattr(position, "first"):
        slopes["first"] = _numbers(position.first)
    return {
        "loss": metrics.loss,
        "validation_loss": metrics.validation_loss,
        "tokens": metrics.tokens,
        "seconds": round(metrics.seconds, 1),
        "num_parameters": metrics.num_parameters,
        "slopes": slopes,
    }


def _numbers(slopes: torch.Tensor) -> list[float | str]:
    """As JSON has them: it has no infinity."""
    return [x if math.isfinite(x) else "inf" for x in slopes.detach().double().tolist()]


def test_model(place: str, home: Path, plan: Plan) -> list[Record]:
    """Nats per masked token at each length that the model can read, in blocks and amid other tokens."""
    model, corpus = load(home, device="cpu"), load_corpus(place)
    limit = position_limit(model) or math.inf
    found = []
    for margin, length in product((0, plan.margin), plan.test_lengths):
        if length > limit:
            continue
        result = evaluate_hidden(
            model,
            corpus.test,
            length=length,
            tokens=MaskTokens.of(corpus.tokenizer),
            stride=length - 1 - 2 * margin if margin else None,
            limit_tokens=plan.test_tokens,
        )
        kept = ("length", "stride", "num_tokens", "num_scored", "nll", "accuracy")
        found.append({"margin": margin, **{name: getattr(result, name) for name in kept}})
    return found


def measure_model(
    place: str, home: Path, settings: TrainSettings, plan: Plan
) -> tuple[Record, list[Record]]:
    return train_model(place, home, settings), test_model(place, home, plan)


class Run:
    """A plan, where its models lie, and its records."""

    def __init__(self, plan: Plan, places: dict[str, str], output: Path, records: Path) -> None:
        self.plan, self.places, self.output = plan, places, output
        records.parent.mkdir(parents=True, exist_ok=True)
        self.log = JsonLog(records)
        made = self.log.find(kind="made")
        asked = _as_json(asdict(plan))
        if made is None:
            machine = f"{_machine.processor()}, {_machine.num_cores()} cores"
            texts = {name: _description(load_corpus(place)) for name, place in places.items()}
            made = {"kind": "made", "machine": machine, "versions": _machine.versions()}
            self.log.append({**made, "date": _machine.now(), "texts": texts, "plan": asked})
        elif made["plan"] != asked:
            raise SystemExit(f"encoders: {records} must be records of this plan, got those of {made['plan']}")  # fmt: skip

    def tune(self, jobs: int) -> None:
        plan, first = self.plan, self.plan.corpora[0]
        work = {}
        for rate, method in product(plan.rates, (m for m in TUNED if m in plan.methods)):
            if self.log.find(kind="tune", method=method, lr=rate) is None:
                settings = plan.settings(method, 0, rate, max(1, plan.steps // 4))
                home = self.output / "tune" / f"{method}-{rate}"
                work[method, rate] = (train_model, self.places[first], home, settings)
        for (method, rate), found in in_processes("tune", work, jobs):
            self.log.append({"kind": "tune", "method": method, "lr": rate, **found})

    def rate(self) -> float:
        """The one of the least mean validation loss."""

        def mean_loss(rate: float) -> float:
            tuned = [r for r in self.log.records if r["kind"] == "tune" and r["lr"] == rate]
            return statistics.fmean(r["validation_loss"] for r in tuned)

        return min(self.plan.rates, key=mean_loss)

    def all_models(self) -> Iterator[tuple[Record, Path]]:
        """Every model's key and folder; whole seeds first, so that a run that is stopped is of use."""
        plan = self.plan
        for seed, corpus, method in product(plan.seeds, plan.corpora, plan.methods):
            key = {"corpus": corpus, "method": method, "seed": seed}
            yield key, self.output / "models" / f"{corpus}-{method}-s{seed}"

    def models(self, jobs: int) -> None:
        rate, work = self.rate(), {}
        for key, home in self.all_models():
            if self.log.find(kind="model", **key) is None:
                settings = self.plan.settings(key["method"], key["seed"], rate, self.plan.steps)
                place = self.places[key["corpus"]]
                work[tuple(key.items())] = (measure_model, place, home, settings, self.plan)
        for items, (trained, tests) in in_processes("models", work, jobs):
            for test in tests:
                if self.log.find(kind="test", **dict(items), **_place(test)) is None:
                    self.log.append({"kind": "test", **dict(items), **test})
            # Last: where it is, all tests are.
            self.log.append({"kind": "model", **dict(items), "lr": rate, **trained})


def _place(test: Record) -> Record:
    return {name: test[name] for name in ("margin", "length")}


def _as_json(values: Record) -> Record:
    return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}


def _description(corpus: Corpus) -> str:
    return f"{corpus.num_bytes['train'] / 1e6:.1f} MB to train on"


def parse() -> tuple[argparse.Namespace, Plan]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, metavar="FILE", help="of the second corpus")
    parser.add_argument("--text-name", help="its name in the tables; default: that of the file")
    parser.add_argument("--output", type=Path, default=ROOT / "output" / "encoders")
    parser.add_argument(
        "--records", type=Path, default=ROOT / "evidence" / "records" / "encoders.jsonl"
    )
    parser.add_argument("--document", type=Path, default=ROOT / "docs" / "results" / "encoders.md")
    parser.add_argument("--only", choices=STAGES, action="append", help="repeatable")
    parser.add_argument("--jobs", type=int, default=2, help="models at a time, a thread each")
    for name in ("length", "batch-size", "steps", "test-tokens", "margin", "width"):
        parser.add_argument(f"--{name}", type=int, help=f"default {getattr(Plan, name.replace('-', '_'))}")  # fmt: skip
    for name, kind in (("seeds", int), ("test-lengths", int), ("rates", float), ("methods", str)):
        parser.add_argument(f"--{name}", type=kind, nargs="+", help=f"default {getattr(Plan, name.replace('-', '_'))}")  # fmt: skip
    options = parser.parse_args()
    asked = {name: getattr(options, name) for name in asdict(Plan(())) if hasattr(options, name)}
    changes = {
        k: tuple(v) if isinstance(v, list) else v for k, v in asked.items() if v is not None
    }
    if options.text is not None:
        options.text_name = options.text_name or options.text.stem
    corpora = ("stdlib",) if options.text is None else (options.text_name, "stdlib")
    return options, replace(Plan(corpora), **changes)


def main() -> None:
    options, plan = parse()
    stages = options.only or STAGES
    if set(stages) != {"write"}:
        places = {"stdlib": "stdlib"}
        if options.text is not None:
            places[options.text_name] = str(options.text.resolve())
        run = Run(plan, places, options.output, options.records)
        for stage in STAGES[:-1]:
            if stage in stages:
                getattr(run, stage)(options.jobs)
    if "write" in stages:
        encoders_report.write(options.records, options.document)


if __name__ == "__main__":
    sys.exit(main())
