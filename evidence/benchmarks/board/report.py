"""Write the tables of docs/results/board.md from evidence/records/board/MACHINE.jsonl.

python evidence/benchmarks/board/report.py
"""

import statistics
import sys
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
sys.path.append(str(ROOT / "evidence" / "runs"))

from markers import RECORDS, fill, read, unique  # noqa: E402
from markers import Record as Row  # noqa: E402
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
    "vllm": "vLLM",
}
LOST = "Lost: time (memory) of the best other / that of linbias"
MODELS = {
    "bloom-560m": "BLOOM-560m",
    "mpt": "MPT (12 layers)",
    "falcon-alibi": "Falcon (12 layers)",
    "jina-base": "jina-embeddings-v2-base",
    "jina-small": "jina-embeddings-v2-small",
}
JINA = ("jina-base", "jina-small")
Write = Callable[[float], str]


@dataclass(frozen=True)
class Race:
    """One case: what the best of the others takes, in what linbias takes."""

    ratio: float
    best: str
    row: Row  # linbias'


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


GOALS = (
    Goal("time to read 512 tokens", "read_s", 1 / 1.05, longest=512),
    Goal("time to read 1,024 or more", "read_s", 1, shortest=1024),
    Goal("time of a token after 512 or more", "token_ms", 1),
    Goal("time of BLOOM for 8,192", "read_s", 2, 8192, 8192, ("bloom-560m",)),
    Goal("time of jina for 8,192, ONNX Runtime", "read_s", 3, 8192, 8192, JINA, ("onnx",)),
    Goal("memory of jina for 8,192, ONNX Runtime", "peak_mb", 10, 8192, 8192, JINA, ("onnx",)),
)


def made(rows: Sequence[Row]) -> str:
    """On what, when, and with which versions."""
    runs = [row for row in rows if "made" in row]
    versions: dict[str, str] = {}
    for row in rows:
        versions |= row.get("versions", {})
    days = " and ".join(unique(runs, "made"))
    commits = ", ".join(unique(runs, "commit"))
    packages = ", ".join(f"{name} {versions[name]}" for name in sorted(versions))
    return f"{runs[-1]['threads']} threads, {days}, commit {commits}; {packages}."


def machine(rows: Iterable[Row]) -> str:
    return str(unique(rows, "machine")[0])


def races(rows: Iterable[Row], field: str, rivals: Container[str] = NAMES) -> list[Race]:
    """For each model, type and length that linbias and another engine ran."""
    cases: dict[tuple[str, str, int], dict[str, Row]] = {}
    for row in rows:
        if field in row:
            cases.setdefault((row["model"], row["dtype"], row["length"]), {})[row["engine"]] = row
    found = []
    for case in cases.values():
        theirs = [name for name in case if name in rivals and name not in OURS]
        if "linbias" in case and theirs:
            others, own = {name: middle(case[name][field]) for name in theirs}, case["linbias"]
            best = min(others, key=others.__getitem__)
            found.append(Race(others[best] / middle(own[field]), best, own))
    return found


def where(row: Row) -> str:
    return f"{MODELS.get(row['model'], row['model'])}, {row['dtype']}, {row['length']:,}"


def verdict(machines: Sequence[Sequence[Row]]) -> str:
    """How often linbias was the fastest on each machine, and every case where it was not."""
    names = [machine(rows) for rows in machines]
    wins, lost = {}, {}
    asked = {"read_s": "reading or embedding a text", "token_ms": "a generated token"}
    for rows in machines:
        for field, what in asked.items():
            found = races(rows, field)
            behind = [race for race in found if race.ratio < 1]
            wins.setdefault(what, []).append(f"{len(found) - len(behind)} of {len(found)} cases")
            for race in behind:
                cell = f"{race.ratio:.2f} {NAMES[race.best]}"
                lost.setdefault(f"{what}: {where(race.row)}", {})[machine(rows)] = cell
    won = ([what, *cells] for what, cells in wins.items())
    parts = [markdown(["linbias is the fastest in", *names], won)]
    if lost:
        behind = ([case, *(lost[case].get(name, "") for name in names)] for case in sorted(lost))
        parts.append(markdown([f"**{LOST}**", *names], behind))
    return "\n\n".join(parts)


def goals(machines: Sequence[Sequence[Row]]) -> str:
    """What is asked of linbias, and the least that each machine gave; in bold where too little."""
    what = "Time (memory) of another engine / that of linbias: above 1, linbias is ahead"
    lines = []
    for goal, dtype in product(GOALS, ("float32", "bfloat16")):
        found = [
            [r for r in races(rows, goal.field, goal.rivals) if concerns(r.row, goal, dtype)]
            for rows in machines
        ]
        if any(found):
            cells = (least(of, goal) for of in found)
            lines.append([f"{goal.what}, {dtype}", f"{goal.least:.2g}", *cells])
    return markdown([what, "goal", *map(machine, machines)], lines)


def concerns(row: Row, goal: Goal, dtype: str) -> bool:
    is_long = goal.shortest <= row["length"] <= goal.longest
    return is_long and row["dtype"] == dtype and row["model"] in goal.models


def least(found: Sequence[Race], goal: Goal) -> str:
    if not found:
        return ""
    race = min(found, key=lambda race: race.ratio)
    text = f"{race.ratio:.2f}" if race.ratio >= goal.least else f"**{race.ratio:.2f}**"
    case = [NAMES[race.best]] if len(goal.rivals) > 1 else []
    case += [MODELS[race.row["model"]]] if len(goal.models) > 1 else []
    case += [f"{race.row['length']:,}"] if goal.longest > goal.shortest else []
    return f"{text} ({'; '.join(case)})" if case else text


def tables(machines: Sequence[Sequence[Row]]) -> str:
    """A section for each machine."""
    parts = []
    for rows in machines:
        parts += [f"## {machine(rows)}", made(rows)]
        for model in unique([row for row in rows if "model" in row], "model"):
            own = by_type_and_length(row for row in rows if row.get("model") == model)
            title = MODELS.get(model, model)
            generates = any("token_ms" in row for row in chain(*own.values()))
            until = "until the first token" if generates else "for a vector"
            parts.append(table(f"{title}: seconds {until}", own, "read_s", seconds))
            after = f"{title}: ms for a token after these"
            parts.append(table(after, own, "token_ms", "{:.1f}".format))
        parts.append(by_model("peak memory in GB", rows, "peak_mb", gigabytes))
        parts.append(by_model("largest error", rows, "error", "{:.1e}".format))
        parts.append(reasons(rows))
    return "\n\n".join(part for part in parts if part)


def by_type_and_length(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """float32 before bfloat16, and short texts before long ones."""
    found: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        found.setdefault((row["dtype"], row["length"]), []).append(row)
    ordered = sorted(found, key=lambda case: (case[0] != "float32", case))
    return {f"{dtype}, {length:,}": found[dtype, length] for dtype, length in ordered}


def by_model(title: str, rows: Sequence[Row], field: str, write: Write) -> str:
    """Engines by models and types, each at the longest text that three engines could read."""
    columns = {}
    measured = [row for row in rows if field in row]
    for model, dtype in product(unique(measured, "model"), unique(measured, "dtype")):
        own = [r for r in measured if (r["model"], r["dtype"]) == (model, dtype)]
        counts = Counter(r["length"] for r in own)
        several = [n for n, count in counts.items() if count >= 3]
        if longest := max(several or counts, default=0):
            columns[f"{model}, {dtype}, {longest:,}"] = [r for r in own if r["length"] == longest]
    return table(title, columns, field, write)


def table(title: str, columns: dict[str, list[Row]], field: str, write: Write) -> str:
    """Engines by columns, the best of each in bold; empty where there is no number."""
    engines = {n: {r["engine"]: r[field] for r in of if field in r} for n, of in columns.items()}
    engines = {name: found for name, found in engines.items() if found}
    if not engines:
        return ""
    lines = []
    for engine in NAMES:
        if any(engine in found for found in engines.values()):
            shown = (cell(engine, found, write) for found in engines.values())
            lines.append([NAMES[engine], *shown])
    return markdown([title, *engines], lines)


def cell(engine: str, column: dict[str, Any], write: Write) -> str:
    """The median with half the range, if there was more than one round."""
    if engine not in column:
        return ""
    found, best = column[engine], min(map(middle, column.values()))
    text = f"**{write(middle(found))}**" if middle(found) == best else write(middle(found))
    several = isinstance(found, list) and len(found) > 1
    return f"{text} ± {write((max(found) - min(found)) / 2)}" if several else text


def middle(found: Any) -> float:
    return float(statistics.median(found)) if isinstance(found, list) else float(found)


def seconds(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"


def gigabytes(value: float) -> str:
    return f"{value / 1024:.1f}"


def reasons(rows: Sequence[Row]) -> str:
    """Why there is no number, said once, and what could not be measured quietly."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if "failed" in row and not row["failed"].startswith("not asked: failed"):
            general = row["failed"].startswith("refused")
            case = where(row).rpartition(", ")[0] if general else where(row)
            cases = found.setdefault((row["failed"], NAMES[row["engine"]]), [])
            if case not in cases:
                cases.append(case)
    together: dict[tuple[str, str], list[str]] = {}
    for (why, engine), cases in found.items():
        together.setdefault((why.replace("|", " "), "; ".join(cases)), []).append(engine)
    absent = [row for row in rows if "absent" in row]
    cells = [[NAMES[row["engine"]], f"not here: `{row['absent']}`", ""] for row in absent]
    cells += [[" and ".join(engines), why, cases] for (why, cases), engines in together.items()]
    parts = [markdown(["engine", "why there is no number", "where"], cells)] if cells else []
    beside = [row for row in rows if row.get("others", 0) > 0.05]
    if beside:
        count, most = sum("read_s" in row for row in rows), max(row["others"] for row in beside)
        parts.append(
            f"{len(beside)} of {count} cells were measured while others used more than 5% of the"
            f" cores (at most {most:.0%})."
        )
    return "\n\n".join(parts)


def parts(records: Path) -> dict[str, str]:
    """What stands between the markers of the page."""
    machines = [read(path) for path in sorted((records / "board").glob("*.jsonl"), reverse=True)]
    return {
        "goals": goals(machines),
        "verdict": verdict(machines),
        "tables": tables(machines),
    }


if __name__ == "__main__":
    fill(PAGE, parts(RECORDS))
