"""Write the tables of docs/results/board.md from evidence/records/board/MACHINE.jsonl.

python evidence/benchmarks/board/report.py
"""

import json
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
sys.path.append(str(ROOT / "evidence" / "runs"))

from markers import fill  # noqa: E402

RECORDS = ROOT / "evidence" / "records"
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
Row = dict[str, Any]
Write = Callable[[float], str]


@dataclass(frozen=True)
class Race:
    """One case: what the best of the others takes, in what linbias takes."""

    ratio: float
    best: str
    row: Row  # linbias'


@dataclass(frozen=True)
class Goal:
    """What is asked of linbias: in every case with these lengths and models, the best of its rivals takes `least` times what it takes."""

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
    Goal("time of jina for 8,192, ONNX Runtime", "read_s", 3, 8192, 8192, ("jina-base", "jina-small"), ("onnx",)),
    Goal("memory of jina for 8,192, ONNX Runtime", "peak_mb", 10, 8192, 8192, ("jina-base", "jina-small"), ("onnx",)),
)  # fmt: skip


def read(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def unique(rows: Iterable[Row], key: str) -> list[Any]:
    return list(dict.fromkeys(row[key] for row in rows if key in row))


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
        others = {name: middle(row[field]) for name, row in case.items() if name in rivals and name not in OURS}  # fmt: skip
        if "linbias" in case and others:
            best = min(others, key=others.__getitem__)
            found.append(
                Race(others[best] / middle(case["linbias"][field]), best, case["linbias"])
            )
    return found


def where(row: Row) -> str:
    return f"{MODELS.get(row['model'], row['model'])}, {row['dtype']}, {row['length']:,}"


def verdict(machines: Sequence[Sequence[Row]]) -> str:
    """How often linbias was the fastest on each machine, and a table of every case where it was not."""
    names = [machine(rows) for rows in machines]
    wins, lost = {}, {}
    for rows in machines:
        for field, what in (("read_s", "reading or embedding a text"), ("token_ms", "a generated token")):  # fmt: skip
            found = races(rows, field)
            behind = [race for race in found if race.ratio < 1]
            wins.setdefault(what, []).append(f"{len(found) - len(behind)} of {len(found)} cases")
            for race in behind:
                cell = f"{race.ratio:.2f} {NAMES[race.best]}"
                lost.setdefault(f"{what}: {where(race.row)}", {})[machine(rows)] = cell
    first = ["| linbias is the fastest in | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]  # fmt: skip
    first += [f"| {what} | " + " | ".join(cells) + " |" for what, cells in wins.items()]
    table = [f"| **{LOST}** | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    table += [f"| {case} | " + " | ".join(cells.get(name, "") for name in names) + " |" for case, cells in sorted(lost.items())]  # fmt: skip
    return "\n".join([*first, *(["", *table] if lost else [])])


def goals(machines: Sequence[Sequence[Row]]) -> str:
    """What is asked of linbias, and the least that each machine gave, with the place; in bold where that is too little."""
    lines = ["| Time (memory) of another engine / that of linbias: above 1, linbias is ahead | goal | " + " | ".join(map(machine, machines)) + " |"]  # fmt: skip
    lines.append("|---" * (len(machines) + 2) + "|")
    for goal in GOALS:
        for dtype in ("float32", "bfloat16"):
            found = [
                [race for race in races(rows, goal.field, goal.rivals)
                 if race.row["dtype"] == dtype and race.row["model"] in goal.models and goal.shortest <= race.row["length"] <= goal.longest]
                for rows in machines
            ]  # fmt: skip
            if any(found):
                lines.append(f"| {goal.what}, {dtype} | {goal.least:.2g} | " + " | ".join(least(races, goal) for races in found) + " |")  # fmt: skip
    return "\n".join(lines)


def least(found: Sequence[Race], goal: Goal) -> str:
    if not found:
        return ""
    race = min(found, key=lambda race: race.ratio)
    text = f"{race.ratio:.2f}" if race.ratio >= goal.least else f"**{race.ratio:.2f}**"
    place = [NAMES[race.best]] if len(goal.rivals) > 1 else []
    place += [MODELS[race.row["model"]]] if len(goal.models) > 1 else []
    place += [f"{race.row['length']:,}"] if goal.longest > goal.shortest else []
    return f"{text} ({'; '.join(place)})" if place else text


def tables(machines: Sequence[Sequence[Row]]) -> str:
    """A section for each machine."""
    parts = []
    for rows in machines:
        parts += [f"## {machine(rows)}", made(rows)]
        for model in unique(rows, "model"):
            for dtype in unique((r for r in rows if r.get("model") == model), "dtype"):
                own = [r for r in rows if r.get("model") == model and r["dtype"] == dtype]
                title = f"{MODELS.get(model, model)}, {dtype}:"
                generates = any("token_ms" in r for r in own)
                parts.append(by_length(f"{title} seconds until the first token" if generates else f"{title} seconds for a vector", own, "read_s", seconds))  # fmt: skip
                parts.append(by_length(f"{title} ms for a token after these", own, "token_ms", "{:.1f}".format))  # fmt: skip
        parts.append(by_model("peak memory in GB", rows, "peak_mb", gigabytes))
        parts.append(by_model("largest error", rows, "error", "{:.1e}".format))
        parts.append(reasons(rows))
    return "\n\n".join(part for part in parts if part)


def by_length(title: str, rows: Sequence[Row], field: str, write: Write) -> str:
    """Engines by lengths, for one model and type."""
    columns = {f"{n:,}": [r for r in rows if r["length"] == n] for n in sorted(unique(rows, "length"))}  # fmt: skip
    return table(title, columns, field, write)


def by_model(title: str, rows: Sequence[Row], field: str, write: Write) -> str:
    """Engines by models and types, each at the longest text that three engines could read."""
    columns = {}
    for model in unique(rows, "model"):
        for dtype in unique((r for r in rows if r.get("model") == model), "dtype"):
            own = [r for r in rows if field in r and (r["model"], r["dtype"]) == (model, dtype)]
            counts = Counter(r["length"] for r in own)
            if longest := max((n for n, count in counts.items() if count >= 3), default=max(counts, default=0)):  # fmt: skip
                columns[f"{model}, {dtype}, {longest:,}"] = [r for r in own if r["length"] == longest]  # fmt: skip
    return table(title, columns, field, write)


def table(title: str, columns: dict[str, list[Row]], field: str, write: Write) -> str:
    """Engines by columns, the best of each in bold; empty where it has no number: `reasons` says why."""
    cells = {name: {r["engine"]: r[field] for r in rows if field in r} for name, rows in columns.items()}  # fmt: skip
    cells = {name: found for name, found in cells.items() if found}
    if not cells:
        return ""
    best = {name: min(map(middle, found.values())) for name, found in cells.items()}
    lines = [f"| {title} | " + " | ".join(cells) + " |", "|---" * (len(cells) + 1) + "|"]
    for engine in NAMES:
        if any(engine in found for found in cells.values()):
            shown = (cell(found[engine], best[name], write) if engine in found else "" for name, found in cells.items())  # fmt: skip
            lines.append(f"| {NAMES[engine]} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def cell(found: Any, best: float, write: Write) -> str:
    """The median with half the range, if there was more than one round."""
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
    """Why there is no number, and what could not be measured quietly. What is not asked because it failed before is not said again."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if "failed" in row and not row["failed"].startswith("not asked: failed"):
            general = row["failed"].startswith("refused")
            place = where(row).rpartition(", ")[0] if general else where(row)
            places = found.setdefault((row["failed"], NAMES[row["engine"]]), [])
            if place not in places:
                places.append(place)
    together: dict[tuple[str, str], list[str]] = {}
    for (why, engine), places in found.items():
        together.setdefault((why, "; ".join(places)), []).append(engine)
    cells = [(NAMES[row["engine"]], f"not here: `{row['absent']}`", "") for row in rows if "absent" in row]  # fmt: skip
    cells += [(" and ".join(engines), why, places) for (why, places), engines in together.items()]
    lines = ["| engine | why there is no number | where |", "|---|---|---|"] if cells else []
    lines += [
        f"| {engine} | {why.replace('|', ' ')} | {places} |" for engine, why, places in cells
    ]
    beside = [row for row in rows if row.get("others", 0) > 0.05]
    if beside:
        most = max(row["others"] for row in beside)
        lines.append(f"\n{len(beside)} of {sum('read_s' in row for row in rows)} cells were measured while others used more than 5% of the cores (at most {most:.0%}).")  # fmt: skip
    return "\n".join(lines)


def write(records: Path = RECORDS, page: Path = PAGE) -> None:
    machines = [read(path) for path in sorted((records / "board").glob("*.jsonl"), reverse=True)]
    fill(
        page, {"goals": goals(machines), "verdict": verdict(machines), "tables": tables(machines)}
    )


if __name__ == "__main__":
    write()
