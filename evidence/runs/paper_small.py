"""The paper's comparison in small: trained at L and 4 L, tested up to 16 L, on two corpora.

    python evidence/runs/paper_small.py --wikitext-2 FOLDER      # train.txt, valid.txt and test.txt; may be left out
    python evidence/runs/paper_small.py --only train --only test # some stages; all of them go on where they were
    python evidence/runs/paper_small.py --only speed --only write    # on a quiet machine: replaces the measurements of speed alone
    python evidence/runs/paper_small.py --only write             # docs/paper.md from the records of evidence/records/paper_small.jsonl

    tune     a learning rate for all positions alike: the least mean validation loss, on the first corpus
    train    a model per corpus, seed, training length and position, each in a process of its own
    test     each of them without overlap, and with a sliding window, at every length from its own
    speed    training and inference, positions in turn; trains the models that it reads with, where they are missing
    write    tables, claims and plots, from the records alone

Everything is done by `linbias.paper`; what was measured is a line of results.jsonl in the output folder.
"""

import argparse
import math
import re
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from numpy.typing import NDArray

import paper_report
from linbias import _machine
from linbias._run.files import JsonLog
from linbias._run.folders import open_run_folder
from linbias.data import SPLITS
from linbias.data.corpus import load_corpus
from linbias.lm.watch import StopWatch
from linbias.paper.checkpoint import load
from linbias.paper.model import PaperForCausalLM
from linbias.paper.prepare import prepare
from linbias.paper.recipe import Recipe
from linbias.paper.score import Scores, score
from linbias.paper.store import read_data
from linbias.paper.train import train
from workers import in_processes

ROOT = Path(__file__).parents[2]
STAGES = ("tune", "train", "test", "speed", "write")
POSITIONS = ("alibi", "sinusoidal", "rotary", "t5")
MODEL = {
    "hidden_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 384,
    "cutoffs": [1000, 8000],
    **dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.0),
    "softmax_dropout": 0.0,  # a run reads no text twice
}

Record = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """What is compared.

    Attributes:
        corpora: The first one is tuned and timed on.
        length: L; models are trained at L and 4 L, with the same tokens per step.
        steps: Of the training of every model; tuning takes a quarter.
        max_tokens: Tokens per step.
        rates: Learning rates to choose from.
        seeds: One model of each kind per seed.
        test_tokens: Scored without overlap at every length.
        sliding_tokens: Scored with a sliding window: the same ones at every length.
        stride: Of the sliding window; every prediction has length - stride to length - 1 tokens before.
        rounds: Of the measurements of speed.
    """

    corpora: tuple[str, ...]
    length: int = 64
    steps: int = 2500
    max_tokens: int = 512
    rates: tuple[float, ...] = (0.1, 0.3, 1.0, 3.0)
    seeds: tuple[int, ...] = (1, 2, 3)
    test_tokens: int = 65536
    sliding_tokens: int = 2048
    stride: int = 4
    rounds: int = 3

    @property
    def test_lengths(self) -> list[int]:
        return [self.length * times for times in (1, 2, 4, 8, 16)]

    def recipe(
        self, position: str, length: int, seed: int, learning_rate: float, steps: int
    ) -> Recipe:
        """What is trained: recipes that are compared differ in position, length and seed alone."""
        return Recipe(
            position=position,
            length=length,
            model=MODEL,
            max_tokens=self.max_tokens,
            rows_multiple=1,
            batches_per_step=1,
            steps=steps,
            learning_rate=learning_rate,
            warmup_steps=max(1, steps // 10),
            precision="fp32",
            seed=seed,
            validate_steps=0,
            save_steps=500,
            log_steps=50,
            device="cpu",
        )


def write_texts(corpus: str, folder: Path) -> dict[str, Path]:
    """The embedded corpus as the paper's text: a line of words and signs with spaces between."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {split: folder / f"{split}.txt" for split in SPLITS}
    source = load_corpus(corpus)
    for split, path in texts.items():
        lines = bytes(getattr(source, split)).decode().splitlines()
        words = (re.findall(r"\w+|[^\w\s]", line) for line in lines if line.strip())
        path.write_text("".join(" ".join(line) + "\n" for line in words), encoding="utf-8")
    return texts


def prepare_data(corpus: str, wikitext_2: Path | None, output: Path) -> Path:
    """The corpus as ids, with at most 16,384 types of Python's source."""
    data = output / "data" / corpus
    if not data.exists():
        if corpus == "wikitext-2":
            prepare({split: wikitext_2 / f"{split}.txt" for split in SPLITS}, data)
        else:
            prepare(write_texts(corpus, output / "text"), data, nwords=16384)
    return data


def train_model(data: Path, home: Path, recipe: Recipe) -> Record:
    """Trains it, or finds it trained; memory is what came on top of the imports."""
    before = psutil.Process().memory_info().rss
    metrics = train(data, home, recipe, progress=False)
    return {
        "loss_base2": metrics.loss_base2,
        "tokens": metrics.tokens,
        "seconds": round(metrics.seconds, 1),
        "num_parameters": metrics.num_parameters,
        "memory_bytes": metrics.peak_memory_bytes - before,
    }


def validation_loss(data: Path, home: Path, recipe: Recipe) -> float:
    """Bits per word of a model after training, on the validation text."""
    train(data, home, recipe, progress=False)
    ids = read_data(data, "valid")[1].tokens[:65536]
    return score(load(home), ids, length=recipe.length).loss_base2


def test_model(data: Path, home: Path, lengths: list[int], plan: Plan) -> list[Record]:
    """Bits per word at each length, without overlap and with a sliding window."""
    model, ids = load(home), read_data(data, "test")[1].tokens
    before = psutil.Process().memory_info().rss
    longest = plan.test_lengths[-1]
    found: list[Record] = []
    for length in lengths:
        scores = score(model, ids[: plan.test_tokens], length=length)
        record = {"test_length": length, "stride": length, "loss_base2": scores.loss_base2}
        record["memory_bytes"] = scores.peak_memory_bytes - before
        if length == longest:
            record["by_context"] = bits_by_context(scores)
        found.append(record)
    for length in lengths:
        start = longest - length  # so that the tokens scored last have whole windows before them
        text = ids[start : longest + plan.sliding_tokens]
        scores = score(model, text, length=length, context_window=length - plan.stride)
        loss = -scores.log_probs[-plan.sliding_tokens :].mean(dtype=np.float64) / math.log(2)
        found.append({"test_length": length, "stride": plan.stride, "loss_base2": float(loss)})
    return found


def bits_by_context(scores: Scores) -> list[list[float]]:
    """[[tokens of context, bits per word]...], over octaves of context from 1 token on."""
    rows = len(scores.log_probs) // scores.length
    whole = scores.log_probs[: rows * scores.length].reshape(rows, scores.length)
    bits = -whole.mean(0, dtype=np.float64) / math.log(2)
    ends = [2**k for k in range(int(math.log2(scores.length)) + 1)]
    return [[math.sqrt(a * b), float(bits[a - 1 : b - 1].mean())] for a, b in pairwise(ends)]


def tune(plan: Plan, data: dict[str, Path], output: Path, log: JsonLog, jobs: int) -> None:
    work = {}
    for lr, position in product(plan.rates, POSITIONS):
        recipe = plan.recipe(position, plan.length, 0, lr, plan.steps // 4)
        home = output / "tune" / f"{position}-{lr}"
        if log.find(kind="tune", position=position, lr=lr) is None:
            work[position, lr] = (validation_loss, data[plan.corpora[0]], home, recipe)
    for (position, lr), loss in in_processes("tune", work, jobs):
        log.append({"kind": "tune", "position": position, "lr": lr, "loss_base2": loss})


def tuned_rate(plan: Plan, log: JsonLog) -> float:
    """The rate of the least mean validation loss over the positions: of this run, or of the one that is kept."""
    tuned = [r for r in log.records if r["kind"] == "tune"] or paper_report.read_kept().of("tune")

    def mean_loss(lr: float) -> float:
        return statistics.fmean(r["loss_base2"] for r in tuned if r["lr"] == lr)

    return min(plan.rates, key=mean_loss)


def models(plan: Plan, output: Path) -> Iterator[tuple[Record, Path]]:
    """Every model's key and folder; whole seeds of a corpus first, so that a run that is stopped is of use."""
    lengths = (plan.length, 4 * plan.length)
    for corpus, seed, length, position in product(plan.corpora, plan.seeds, lengths, POSITIONS):
        key = {"corpus": corpus, "position": position, "train_length": length, "seed": seed}
        yield key, output / "models" / f"{corpus}-{position}-L{length}-s{seed}"


def train_all(
    plan: Plan,
    data: dict[str, Path],
    wanted: Iterable[tuple[Record, Path]],
    log: JsonLog,
    jobs: int,
) -> None:
    lr, work = tuned_rate(plan, log), {}
    for key, home in wanted:
        if log.find(kind="train", **key) is None:
            recipe = plan.recipe(key["position"], key["train_length"], key["seed"], lr, plan.steps)
            work[tuple(key.items())] = (train_model, data[key["corpus"]], home, recipe)
    for items, found in in_processes("train", work, jobs):
        log.append({"kind": "train", **dict(items), "lr": lr, **found})


def test_all(plan: Plan, data: dict[str, Path], output: Path, log: JsonLog, jobs: int) -> None:
    work = {}
    for key, home in models(plan, output):
        if log.find(kind="train", **key) is None:
            continue  # not yet
        lengths = [length for length in plan.test_lengths if length >= key["train_length"]]
        last = {"test_length": lengths[-1], "stride": plan.stride}
        if log.find(kind="test", **key, **last) is None:
            work[tuple(key.items())] = (test_model, data[key["corpus"]], home, lengths, plan)
    for items, found in in_processes("test", work, jobs):
        for record in found:
            log.append({"kind": "test", **dict(items), **record})


def speed_all(plan: Plan, data: dict[str, Path], output: Path, log: JsonLog, jobs: int) -> None:
    """Each round measures everything once, so that a slow moment of the machine hits all alike."""
    corpus, seed = plan.corpora[0], plan.seeds[0]
    readers = {"corpus": corpus, "train_length": plan.length, "seed": seed}.items()
    wanted = [(key, home) for key, home in models(plan, output) if key.items() >= readers]
    train_all(plan, data, wanted, log, jobs)
    folder = data[corpus]
    ids = read_data(folder, "test")[1].tokens[:16384]
    loaded = {key["position"]: load(home) for key, home in wanted}
    if log.find(kind="speed made") is None:
        log.append({"kind": "speed made", **made_here()})

    def once(mode: str, position: str, length: int, measure: Callable[[], float]) -> None:
        key = {"kind": mode, "position": position, "length": length, "round": number}
        if log.find(**key) is None:
            threads = {"threads": torch.get_num_threads()}
            log.append({**key, **threads, "tokens_per_second": round(measure(), 1)})

    for number in range(plan.rounds):
        for length, position in product((plan.length, 4 * plan.length), POSITIONS):
            recipe = plan.recipe(position, length, seed, learning_rate=0.1, steps=100)
            once("training speed", position, length, lambda r=recipe: training_speed(folder, r))
        for length, position in product(plan.test_lengths, POSITIONS):
            model = loaded[position]
            once(
                "inference speed",
                position,
                length,
                lambda m=model, n=length: reading_speed(m, ids, n),
            )
        print(f"speed {number + 1}/{plan.rounds}", flush=True)


def training_speed(data: Path, recipe: Recipe) -> float:
    """Tokens per second of the median step, without the first five."""
    watch = StopWatch()
    with tempfile.TemporaryDirectory() as home:
        train(data, home, recipe, progress=False, callbacks=[watch])
    return recipe.max_tokens / statistics.median(b - a for a, b in pairwise(watch.times[5:]))


def reading_speed(model: PaperForCausalLM, ids: NDArray[Any], length: int) -> float:
    """Tokens per second of the median of five passes, after one that is not timed."""
    speeds = [score(model, ids, length=length).tokens_per_second for _ in range(6)]
    return statistics.median(speeds[1:])


def made_here() -> Record:
    """Where and when something is measured."""
    machine = f"{_machine.processor()}, {_machine.num_cores()} cores"
    return {"machine": machine, "versions": _machine.versions(), "date": _machine.now()}


def parse() -> tuple[argparse.Namespace, Plan]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--wikitext-2", type=Path, metavar="FOLDER")
    parser.add_argument("--output", type=Path, default=ROOT / "output" / "paper_small")
    parser.add_argument("--only", choices=STAGES, action="append", help="repeatable")
    parser.add_argument("--jobs", type=int, default=2, help="models at a time, a thread each")
    for name in ("steps", "test-tokens", "sliding-tokens", "rounds"):
        parser.add_argument(f"--{name}", type=int, help=f"default {getattr(Plan, name.replace('-', '_'))}")  # fmt: skip
    parser.add_argument("--seeds", type=int, nargs="+", help=f"default {Plan.seeds}")
    parser.add_argument("--document", type=Path, default=ROOT / "docs" / "paper.md")
    options = parser.parse_args()
    asked = {name: getattr(options, name) for name in asdict(Plan(())) if hasattr(options, name)}
    changes = {k: tuple(v) if isinstance(v, list) else v for k, v in asked.items() if v}
    corpora = ("stdlib",) if options.wikitext_2 is None else ("wikitext-2", "stdlib")
    return options, replace(Plan(corpora), **changes)


def main() -> None:
    options, plan = parse()
    stages = options.only or STAGES
    if set(stages) != {"write"}:
        measure(plan, options, stages)
    if "write" in stages:
        paper_report.write(options.output / "results.jsonl", options.document)


def measure(plan: Plan, options: argparse.Namespace, stages: tuple[str, ...]) -> None:
    output, jobs = options.output, options.jobs
    open_run_folder(output / "plan.json", asdict(plan), "paper_small")
    data = {corpus: prepare_data(corpus, options.wikitext_2, output) for corpus in plan.corpora}
    log = JsonLog(output / "results.jsonl")
    if log.find(kind="made") is None:
        log.append({"kind": "made", **made_here(), "model": MODEL, "plan": asdict(plan)})
    if "tune" in stages:
        tune(plan, data, output, log, jobs)
    if "train" in stages:
        train_all(plan, data, models(plan, output), log, jobs)
    if "test" in stages:
        test_all(plan, data, output, log, jobs)
    if "speed" in stages:
        speed_all(plan, data, output, log, jobs)


if __name__ == "__main__":
    sys.exit(main())
