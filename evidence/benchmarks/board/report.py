"""Write the tables of docs/results/board.md from evidence/records/board/MACHINE.jsonl.

    python evidence/benchmarks/board/report.py

The first line of a file says on what, when and with which versions; each other is a case, with a
row for each engine: what it took, or why there is no number.
"""

import statistics
import sys
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
sys.path.append(str(ROOT / "evidence" / "runs"))

from markers import RECORDS, Record, fill, read, unique  # noqa: E402
from markers import table as markdown  # noqa: E402

PAGE = ROOT / "docs" / "results" / "board.md"
OURS = ("linbias", "sentence_transformers")
NAMES = {
    "linbias": "linbias",
    "eager": "Transformers, eager",
    "sdpa": "Transformers, SDPA",
    "plain_sdpa": "PyTorch's SDPA, bias as its mask",
    "flex": "FlexAttention, compiled",
    "ctranslate2": "CTranslate2",
    "onnx": "ONNX Runtime",
    "openvino": "OpenVINO",
    "llama_cpp": "llama.cpp",
    "sentence_transformers": "Sentence Transformers with linbias",
    "fastembed": "fastembed",
}
MODELS = {
    "bloom-560m": "BLOOM-560m",
    "mpt": "MPT (12 layers)",
    "falcon-alibi": "Falcon (12 layers)",
    "jina-base": "jina-embeddings-v2-base",
    "jina-small": "jina-embeddings-v2-small",
}
JINA = ("jina-base", "jina-small")
LOST = "Lost: time (memory) of the best other / that of linbias"
Write = Callable[[float], str]


@dataclass(frozen=True)
class Goal:
    """What is asked: that linbias' best rival takes `least` times what it takes in every case."""

    what: str
    field: str
    least: float
    shortest: int = 512
    longest: int = 32768
    models: Sequence[str] = tuple(MODELS)
    rivals: Sequence[str] = tuple(NAMES)

    def concerns(self, case: Record) -> bool:
        is_long = self.shortest <= case["length"] <= self.longest
        return is_long and case["model"] in self.models

    def write(self, found: Sequence["Race"]) -> str:
        """The least of some races; in bold where it is too little."""
        if not found:
            return ""
        race = min(found, key=lambda race: race.ratio)
        text = f"{race.ratio:.2f}" if race.ratio >= self.least else f"**{race.ratio:.2f}**"
        case = [NAMES[race.best]] if len(self.rivals) > 1 else []
        case += [MODELS[race.case["model"]]] if len(self.models) > 1 else []
        case += [f"{race.case['length']:,}"] if self.longest > self.shortest else []
        return f"{text} ({'; '.join(case)})" if case else text


GOALS = (
    Goal("time to read 512 tokens", "read_s", 1 / 1.05, longest=512),
    Goal("time to read 1,024 or more", "read_s", 1, shortest=1024),
    Goal("time of a token after 512 or more", "token_ms", 1),
    Goal("time of BLOOM for 8,192", "read_s", 2, 8192, 8192, ("bloom-560m",)),
    Goal("time of jina for 8,192, ONNX Runtime", "read_s", 3, 8192, 8192, JINA, ("onnx",)),
    Goal("memory of jina for 8,192, ONNX Runtime", "peak_mb", 10, 8192, 8192, JINA, ("onnx",)),
)


@dataclass(frozen=True)
class Race:
    """What the best of linbias' rivals takes in a case, in what linbias takes."""

    ratio: float
    best: str
    case: Record


@dataclass(frozen=True)
class Machine:
    """What a file says."""

    about: Record
    cases: Sequence[Record]

    @property
    def name(self) -> str:
        return str(self.about["machine"])

    @property
    def made(self) -> str:
        """On what, when, and with which versions."""
        about = self.about
        packages = ", ".join(f"{name} {of}" for name, of in sorted(about["versions"].items()))
        days, commits = " and ".join(about["days"]), ", ".join(about["commits"])
        return f"{about['threads']} threads, {days}, commit {commits}; {packages}."

    def races(self, field: str, rivals: Container[str] = NAMES) -> Iterator[Race]:
        """In each case that linbias and another engine ran."""
        for case in self.cases:
            took = {e: middle(row[field]) for e, row in case["engines"].items() if field in row}
            theirs = {e: x for e, x in took.items() if e in rivals and e not in OURS}
            if "linbias" in took and theirs:
                best = min(theirs, key=theirs.__getitem__)
                yield Race(theirs[best] / took["linbias"], best, case)


def where(case: Record) -> str:
    return f"{MODELS.get(case['model'], case['model'])}, {case['dtype']}, {case['length']:,}"


def verdict(machines: Sequence[Machine]) -> str:
    """How often linbias was the fastest on each machine, and every case where it was not."""
    names = [machine.name for machine in machines]
    wins, lost = [], {}
    asked = {"read_s": "reading or embedding a text", "token_ms": "a generated token"}
    for field, what in asked.items():
        wins.append([what])
        for machine in machines:
            found = [*machine.races(field)]
            behind = [race for race in found if race.ratio < 1]
            wins[-1].append(f"{len(found) - len(behind)} of {len(found)} cases")
            for race in behind:
                cell = f"{race.ratio:.2f} {NAMES[race.best]}"
                lost.setdefault(f"{what}: {where(race.case)}", {})[machine.name] = cell
    rows = [[case, *(lost[case].get(name, "") for name in names)] for case in sorted(lost)]
    parts = [markdown(["linbias is the fastest in", *names], wins)]
    return "\n\n".join([*parts, *([markdown([f"**{LOST}**", *names], rows)] if rows else [])])


def goals(machines: Sequence[Machine]) -> str:
    """What is asked of linbias, and the least that each machine gave."""
    what = "Time (memory) of another engine / that of linbias: above 1, linbias is ahead"
    lines = []
    for goal, dtype in product(GOALS, ("float32", "bfloat16")):
        found = [machine.races(goal.field, goal.rivals) for machine in machines]
        cells = [
            goal.write([r for r in races if r.case["dtype"] == dtype and goal.concerns(r.case)])
            for races in found
        ]
        if any(cells):
            lines.append([f"{goal.what}, {dtype}", f"{goal.least:.2g}", *cells])
    return markdown([what, "goal", *(machine.name for machine in machines)], lines)


def tables(machines: Sequence[Machine]) -> str:
    """A section for each machine."""
    parts = []
    for machine in machines:
        parts += [f"## {machine.name}", machine.made]
        # float32 before bfloat16, and short texts before long ones
        ordered = sorted(machine.cases, key=lambda c: (c["dtype"] != "float32", c["length"]))
        for model in unique(machine.cases, "model"):
            own = [case for case in ordered if case["model"] == model]
            columns = {f"{c['dtype']}, {c['length']:,}": c["engines"] for c in own}
            title = MODELS.get(model, model)
            after = table(f"{title}: ms for a token after these", columns, "token_ms", ".1f")
            until = "until the first token" if after else "for a vector"
            parts += [table(f"{title}: seconds {until}", columns, "read_s", seconds), after]
        parts.append(by_model("peak memory in GB", machine, "peak_mb", gigabytes))
        parts.append(by_model("largest error", machine, "error", ".1e"))
        parts.append(reasons(machine))
    return "\n\n".join(part for part in parts if part)


def by_model(title: str, machine: Machine, field: str, write: Write | str) -> str:
    """Engines by models and types, each at the longest text that three engines could read."""
    columns = {}
    for model, dtype in product(*(unique(machine.cases, name) for name in ("model", "dtype"))):
        own = [case for case in machine.cases if (case["model"], case["dtype"]) == (model, dtype)]
        counts = {c["length"]: sum(field in row for row in c["engines"].values()) for c in own}
        several = [n for n, count in counts.items() if count >= 3]
        if longest := max(several or [n for n, count in counts.items() if count], default=0):
            column = next(case["engines"] for case in own if case["length"] == longest)
            columns[f"{model}, {dtype}, {longest:,}"] = column
    return table(title, columns, field, write)


def table(
    title: str, columns: Mapping[str, dict[str, Record]], field: str, write: Write | str
) -> str:
    """Engines by columns, the best of each in bold; empty where there is no number."""
    took = {n: {e: r[field] for e, r in of.items() if field in r} for n, of in columns.items()}
    took = {name: found for name, found in took.items() if found}
    lines = []
    for engine in NAMES:
        if any(engine in found for found in took.values()):
            lines.append([NAMES[engine], *(cell(engine, of, write) for of in took.values())])
    return markdown([title, *took], lines) if took else ""


def cell(engine: str, column: dict[str, Any], write: Write | str) -> str:
    """The median with half the range, if there was more than one round."""
    if engine not in column:
        return ""
    show = (lambda x: format(x, write)) if isinstance(write, str) else write
    found, best = column[engine], min(map(middle, column.values()))
    text = f"**{show(middle(found))}**" if middle(found) == best else show(middle(found))
    several = isinstance(found, list) and len(found) > 1
    return f"{text} ± {show((max(found) - min(found)) / 2)}" if several else text


def middle(found: Any) -> float:
    return float(statistics.median(found)) if isinstance(found, list) else float(found)


def seconds(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"


def gigabytes(value: float) -> str:
    return f"{value / 1024:.1f}"


def reasons(machine: Machine) -> str:
    """Why there is no number, said once, and what could not be measured quietly."""
    found: dict[tuple[str, str], dict[str, None]] = {}
    rows = [(case, *item) for case in machine.cases for item in case["engines"].items()]
    for case, engine, row in rows:
        why = row.get("failed", "not asked: failed")
        if not why.startswith("not asked: failed"):
            words = where(case).rpartition(", ")[0] if why.startswith("refused") else where(case)
            found.setdefault((why.replace("|", " "), NAMES[engine]), {})[words] = None
    together: dict[tuple[str, str], list[str]] = {}
    for (why, engine), words in found.items():
        together.setdefault((why, "; ".join(words)), []).append(engine)
    cells = [[NAMES[e], f"not here: `{why}`", ""] for e, why in machine.about["absent"]]
    cells += [[" and ".join(engines), why, words] for (why, words), engines in together.items()]
    parts = [markdown(["engine", "why there is no number", "where"], cells)] if cells else []
    others = [row["others"] for _, _, row in rows if row.get("others", 0) > 0.05]
    if others:
        parts.append(
            f"{len(others)} of {sum('read_s' in row for _, _, row in rows)} cells were measured"
            f" while others used more than 5% of the cores (at most {max(others):.0%})."
        )
    return "\n\n".join(parts)


def parts(records: Path) -> dict[str, str]:
    """What stands between the markers of the page."""
    paths = sorted((records / "board").glob("*.jsonl"), reverse=True)
    files = (read(path) for path in paths)
    machines = [Machine(about, cases) for about, *cases in files]
    return {"goals": goals(machines), "verdict": verdict(machines), "tables": tables(machines)}


if __name__ == "__main__":
    fill(PAGE, parts(RECORDS))
