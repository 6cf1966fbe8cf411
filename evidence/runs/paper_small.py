"""The paper's comparison in small: trained at L and 4 L, tested up to 16 L, on two corpora.

    python evidence/runs/paper_small.py --wikitext-2 FOLDER      # its three texts
    python evidence/runs/paper_small.py --only train --only test # all stages go on where they were
    python evidence/runs/paper_small.py --only speed --only write # replaces what is said of speed
    alone
    python evidence/runs/paper_small.py --only write             # docs/paper.md from the records

    tune     a learning rate for all positions alike, by mean validation loss on the first corpus
    train    a model per corpus, seed, training length and position, each in a process of its own
    test     each of them without overlap, and with a sliding window, at every length from its own
    speed    training and inference, positions in turn; trains the models that it reads with
    write    tables, claims and plots, from the records alone

Everything is done by `linbias.paper`; what was measured is a line of results.jsonl in the output
folder.
"""

import math
import re
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from numpy.typing import NDArray

import paper_report
from experiment import add_plan_options, made_here, measure, plan_of
from linbias._run.files import JsonLog
from linbias._run.folders import open_run_folder
from linbias.data import SPLITS
from linbias.data.corpus import load_corpus
from linbias.paper.checkpoint import load
from linbias.paper.model import PaperForCausalLM
from linbias.paper.prepare import prepare
from linbias.paper.recipe import Recipe
from linbias.paper.score import Scores, score
from linbias.paper.store import read_data
from linbias.paper.train import train
from markers import ROOT, Record, parser_of

STAGES = ("tune", "train", "test", "speed", "write")
POSITIONS = ("alibi", "sinusoidal", "rotary", "t5")
MODEL = {
    **{"hidden_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4},
    **{"intermediate_size": 384, "cutoffs": [1000, 8000]},
    **dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.0),
    "softmax_dropout": 0.0,  # a run reads no text twice
}


@dataclass(frozen=True)
class Plan:
    """What is compared."""

    corpora: tuple[str, ...]  # the first one is tuned and timed on
    length: int = 64  # L; models are trained at L and 4 L, with the same tokens per step
    steps: int = 2500  # of the training of every model; tuning takes a quarter
    max_tokens: int = 512  # per step
    rates: tuple[float, ...] = (0.1, 0.3, 1.0, 3.0)
    seeds: tuple[int, ...] = (1, 2, 3)  # one model of each kind per seed
    test_tokens: int = 65536  # scored without overlap at every length
    sliding_tokens: int = 2048  # scored with a sliding window: the same ones at every length
    stride: int = 4  # of it: every prediction has length - stride to length - 1 tokens before
    rounds: int = 3  # of the measurements of speed

    @property
    def test_lengths(self) -> list[int]:
        return [self.length * times for times in (1, 2, 4, 8, 16)]

    def recipe(self, position: str, length: int, seed: int, rate: float, steps: int) -> Recipe:
        """Recipes that are compared differ in position, length and seed alone."""
        return Recipe(
            position=position, length=length, model=MODEL, max_tokens=self.max_tokens,
            rows_multiple=1, batches_per_step=1, steps=steps, learning_rate=rate,
            warmup_steps=max(1, steps // 10), precision="fp32", seed=seed, validate_steps=0,
            save_steps=500, log_steps=50, device="cpu",
        )  # fmt: skip


def prepare_data(corpus: str, wikitext_2: Path | None, output: Path) -> Path:
    """The corpus as ids, with at most 16,384 types of Python's source."""
    data = output / "data" / corpus
    if not data.exists():
        if corpus == "wikitext-2":
            prepare({split: wikitext_2 / f"{split}.txt" for split in SPLITS}, data)
        else:
            prepare(write_texts(corpus, output / "text"), data, nwords=16384)
    return data


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


def train_model(data: Path, home: Path, recipe: Recipe) -> Record:
    """Trains it, or finds it trained; memory is what came on top of the imports."""
    before = psutil.Process().memory_info().rss
    metrics = train(data, home, recipe, progress=False)
    kept = ("loss_base2", "tokens", "num_parameters")
    found = {name: getattr(metrics, name) for name in kept}
    found["seconds"] = round(metrics.seconds, 1)
    return found | {"memory_bytes": metrics.peak_memory_bytes - before}


def validation_loss(data: Path, home: Path, recipe: Recipe) -> float:
    """Bits per word of a model after training, on the validation text."""
    train(data, home, recipe, progress=False)
    ids = read_data(data, "valid")[1][:65536]
    return score(load(home), ids, length=recipe.length).loss_base2


def test_model(data: Path, home: Path, lengths: list[int], plan: Plan) -> list[Record]:
    """Bits per word at each length, without overlap and with a sliding window."""
    model, ids = load(home), read_data(data, "test")[1]
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


@dataclass
class Run:
    """A plan, its texts as ids, where its models lie, and its records."""

    plan: Plan
    data: dict[str, Path]
    output: Path
    log: JsonLog
    jobs: int

    def tune(self) -> None:
        plan, calls = self.plan, []
        for lr, position in product(plan.rates, POSITIONS):
            recipe = plan.recipe(position, plan.length, 0, lr, plan.steps // 4)
            home = self.output / "tune" / f"{position}-{lr}"
            call = (validation_loss, self.data[plan.corpora[0]], home, recipe)
            calls.append(({"position": position, "lr": lr}, call))
        for key, loss in measure("tune", calls, self.log, self.jobs):
            self.log.append({"kind": "tune", **key, "loss_base2": loss})

    def tuned_rate(self) -> float:
        """The rate of the least mean validation loss: of this run, or of the one that is kept."""
        tuned = [r for r in self.log.records if r["kind"] == "tune"]
        tuned = tuned or paper_report.read_kept().of("tune")

        def mean_loss(lr: float) -> float:
            return statistics.fmean(r["loss_base2"] for r in tuned if r["lr"] == lr)

        return min(self.plan.rates, key=mean_loss)

    def models(self) -> Iterator[tuple[Record, Path]]:
        """Every model's key and folder; whole seeds of a corpus first."""
        plan, lengths = self.plan, (self.plan.length, 4 * self.plan.length)
        every = product(plan.corpora, plan.seeds, lengths, POSITIONS)
        for corpus, seed, length, position in every:
            key = {"corpus": corpus, "position": position, "train_length": length, "seed": seed}
            yield key, self.output / "models" / f"{corpus}-{position}-L{length}-s{seed}"

    def train(self, wanted: Iterable[tuple[Record, Path]] | None = None) -> None:
        lr, calls = self.tuned_rate(), []
        for key, home in wanted or self.models():
            made = (key["position"], key["train_length"], key["seed"], lr, self.plan.steps)
            call = (train_model, self.data[key["corpus"]], home, self.plan.recipe(*made))
            calls.append((key, call))
        for key, found in measure("train", calls, self.log, self.jobs):
            self.log.append({"kind": "train", **key, "lr": lr, **found})

    def test(self) -> None:
        plan, calls = self.plan, []
        for key, home in self.models():
            lengths = [length for length in plan.test_lengths if length >= key["train_length"]]
            last = {"test_length": lengths[-1], "stride": plan.stride}
            if self.log.find(kind="train", **key) is not None:
                call = (test_model, self.data[key["corpus"]], home, lengths, plan)
                calls.append((key | last, call))
        for key, found in measure("test", calls, self.log, self.jobs):
            for record in found:
                self.log.append({"kind": "test", **key, **record})

    def speed(self) -> None:
        """Each round measures all once, so that a slow moment of the machine hits all alike."""
        plan, seed, data = self.plan, self.plan.seeds[0], self.data[self.plan.corpora[0]]
        readers = {"corpus": plan.corpora[0], "train_length": plan.length, "seed": seed}.items()
        wanted = [(key, home) for key, home in self.models() if key.items() >= readers]
        self.train(wanted)
        ids = read_data(data, "test")[1][:16384]
        loaded = {key["position"]: load(home) for key, home in wanted}
        if self.log.find(kind="speed made") is None:
            self.log.append({"kind": "speed made", **made_here()})

        def once(kind: str, position: str, length: int, run: Callable[[], float]) -> None:
            key = {"kind": kind, "position": position, "length": length, "round": number}
            if self.log.find(**key) is None:
                threads = {"threads": torch.get_num_threads()}
                self.log.append({**key, **threads, "tokens_per_second": round(run(), 1)})

        for number in range(plan.rounds):
            for length, position in product((plan.length, 4 * plan.length), POSITIONS):
                recipe = plan.recipe(position, length, seed, 0.1, 100)
                once("training speed", position, length, lambda r=recipe: training_speed(data, r))
            for length, position in product(plan.test_lengths, POSITIONS):
                given = (loaded[position], ids, length)
                once("inference speed", position, length, lambda x=given: reading_speed(*x))
            print(f"speed {number + 1}/{plan.rounds}", flush=True)


def training_speed(data: Path, recipe: Recipe) -> float:
    """Tokens per second of the median step."""
    with tempfile.TemporaryDirectory() as home:
        return train(data, home, recipe, progress=False).tokens_per_second


def reading_speed(model: PaperForCausalLM, ids: NDArray[Any], length: int) -> float:
    """Tokens per second of the median of five passes, after one that is not timed."""
    speeds = [score(model, ids, length=length).tokens_per_second for _ in range(6)]
    return statistics.median(speeds[1:])


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--wikitext-2", type=Path, metavar="FOLDER")
    parser.add_argument("--output", type=Path, default=ROOT / "output" / "paper_small")
    parser.add_argument("--only", choices=STAGES, action="append", help="repeatable")
    parser.add_argument("--jobs", type=int, default=2, help="models at a time, a thread each")
    names = ("steps", "test_tokens", "sliding_tokens", "rounds", "seeds")
    add_plan_options(parser, Plan, *names)
    parser.add_argument("--document", type=Path, default=ROOT / "docs" / "paper.md")
    options = parser.parse_args()
    stages, output = options.only or STAGES, options.output
    plan = plan_of(options, Plan(("wikitext-2", "stdlib")[options.wikitext_2 is None :]))
    if set(stages) != {"write"}:
        open_run_folder(output / "plan.json", asdict(plan), "paper_small")
        wikitext_2 = options.wikitext_2
        data = {corpus: prepare_data(corpus, wikitext_2, output) for corpus in plan.corpora}
        log = JsonLog(output / "results.jsonl")
        if log.find(kind="made") is None:
            log.append({"kind": "made", **made_here(), "model": MODEL, "plan": asdict(plan)})
        run = Run(plan, data, output, log, options.jobs)
        for stage in STAGES[:-1]:
            if stage in stages:
                getattr(run, stage)()
    if "write" in stages:
        paper_report.write(output / "results.jsonl", options.document)


if __name__ == "__main__":
    sys.exit(main())
