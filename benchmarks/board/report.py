"""Write the tables of docs/results/board.md from records/board.jsonl.

python benchmarks/board/report.py
"""

import json
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "runs"))

from markers import fill  # noqa: E402

RECORDS = ROOT / "records" / "board.jsonl"
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
MODELS = {
    "bloom-560m": "BLOOM-560m",
    "mpt": "MPT, 12 layers of BLOOM-560m's width",
    "falcon-alibi": "Falcon with ALiBi, 12 layers of the same width",
    "jina-base": "jina-embeddings-v2-base",
    "jina-small": "jina-embeddings-v2-small",
}
Row = dict[str, Any]


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
    days = " and ".join(dict.fromkeys(row["made"] for row in runs))
    machines = " and ".join(dict.fromkeys(row["machine"] for row in runs))
    commits = ", ".join(dict.fromkeys(row["commit"] for row in runs))
    packages = ", ".join(f"{name} {versions[name]}" for name in sorted(versions))
    return f"{machines}, {runs[-1]['threads']} threads, {days}, commit {commits}; {packages}."


def verdict(rows: Sequence[Row]) -> str:
    """How often linbias was the fastest, and every place where it was not."""
    sentences = []
    for field, what in (("read_s", "reading or embedding a text"), ("token_ms", "a generated token")):  # fmt: skip
        won, losses = 0, []
        for case in cases(rows):
            times = {r["engine"]: statistics.median(r[field]) for r in case if r.get(field)}
            if "linbias" not in times or len(times) < 2:
                continue
            others = {name: time for name, time in times.items() if name not in OURS}
            first = min(others, key=others.__getitem__)
            if times["linbias"] <= others[first]:
                won += 1
            else:
                place = f"{MODELS.get(case[0]['model'], case[0]['model'])}, {case[0]['dtype']}, {case[0]['length']:,}"
                losses.append(f"{place}: {NAMES[first]} takes {others[first] / times['linbias']:.2f} of its time")  # fmt: skip
        sentences.append(
            f"- {what}: linbias is the fastest in {won} of {won + len(losses)} cases."
        )
        sentences += [f"  - **Lost**: {loss}." for loss in losses]
    return "\n".join(sentences)


def cases(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows of each model, type and length."""
    found: dict[tuple[str, str, int], list[Row]] = {}
    for row in rows:
        if "length" in row:
            found.setdefault((row["model"], row["dtype"], row["length"]), []).append(row)
    return list(found.values())


def tables(rows: Sequence[Row]) -> str:
    parts = []
    for model in unique(rows, "model"):
        parts.append(f"## {MODELS.get(model, model)}")
        for dtype in unique((r for r in rows if r.get("model") == model), "dtype"):
            own = [r for r in rows if r.get("model") == model and r["dtype"] == dtype]
            parts.append(table(f"{dtype}, seconds until the first token" if any("token_ms" in r for r in own) else f"{dtype}, seconds for a vector", own, "read_s", seconds))  # fmt: skip
            if any("token_ms" in r for r in own):
                parts.append(table(f"{dtype}, ms for a token after these", own, "token_ms", milliseconds))  # fmt: skip
            parts.append(table(f"{dtype}, peak memory in GB", own, "peak_mb", gigabytes))
            parts.append(table(f"{dtype}, largest error", own, "error", "{:.1e}".format))
            parts.append(reasons(own))
    return "\n\n".join(part for part in parts if part)


def table(title: str, rows: Sequence[Row], field: str, write: Callable[[float], str]) -> str:
    """Engines by lengths, the best of each length in bold; empty where it has no number: `reasons` says why."""
    lengths = sorted(unique(rows, "length"))
    refused = {r["engine"] for r in rows} - {r["engine"] for r in rows if field in r}
    lines = [f"| {title} | " + " | ".join(f"{n:,}" for n in lengths) + " |", "|---" * (len(lengths) + 1) + "|"]  # fmt: skip
    best = {n: min((middle(r[field]) for r in rows if r["length"] == n and field in r), default=None) for n in lengths}  # fmt: skip
    for engine in (name for name in NAMES if name in unique(rows, "engine") and name not in refused):  # fmt: skip
        cells = []
        for n in lengths:
            found = [r[field] for r in rows if r["engine"] == engine and r["length"] == n and field in r]  # fmt: skip
            cells.append(cell(found[0], best[n], write) if found else "")
        lines.append(f"| {NAMES[engine]} | " + " | ".join(cells) + " |")
    return "\n".join(lines) if len(lines) > 2 else ""


def cell(found: Any, best: float | None, write: Callable[[float], str]) -> str:
    """The median with half the range, if there was more than one round."""
    values = found if isinstance(found, list) else [found]
    text = write(middle(found))
    if middle(found) == best:
        text = f"**{text}**"
    spread = (max(values) - min(values)) / 2
    return f"{text} ± {write(spread)}" if len(values) > 1 else text


def middle(found: Any) -> float:
    return float(statistics.median(found)) if isinstance(found, list) else float(found)


def seconds(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"


def milliseconds(value: float) -> str:
    return f"{value:.1f}"


def gigabytes(value: float) -> str:
    return f"{value / 1024:.1f}"


def reasons(rows: Sequence[Row]) -> str:
    """Why there is no number, once for each engine and reason."""
    found: dict[tuple[str, str], list[int]] = {}
    for row in rows:
        if "failed" in row:
            found.setdefault((row["engine"], row["failed"]), []).append(row["length"])
    every = len(unique(rows, "length"))
    lines = []
    for (engine, why), lengths in found.items():
        where = "" if len(lengths) == every else f" at {', '.join(f'{n:,}' for n in lengths)}"
        lines.append(f"- {NAMES[engine]}{where}: {why.replace('|', ' ')}.")
    return "\n".join(lines)


def disturbed(rows: Sequence[Row]) -> str:
    """What could not be measured quietly, and what could not be installed."""
    beside = [row for row in rows if row.get("others", 0) > 0.05]
    lines = [f"- {NAMES[row['engine']]} is not here: `{row['absent']}`." for row in rows if "absent" in row]  # fmt: skip
    if beside:
        most = max(row["others"] for row in beside)
        lines.append(f"- {len(beside)} of {sum('read_s' in row for row in rows)} cells were measured while others used more than 5% of the cores (at most {most:.0%}).")  # fmt: skip
    return "\n".join(lines)


def write(records: Path = RECORDS, page: Path = PAGE) -> None:
    if not records.exists():
        fill(page, dict.fromkeys(("made", "verdict", "absent", "tables"), "Not measured yet."))
        return
    rows = read(records)
    fill(page, {"made": made(rows), "verdict": verdict(rows), "absent": disturbed(rows), "tables": tables(rows)})  # fmt: skip


if __name__ == "__main__":
    write()
