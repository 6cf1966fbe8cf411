"""Rewrite the tables of docs/conformance.md from the vectors' rows and from what adapters gave.

python conformance/run.py && python evidence/runs/conformance_page.py
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from markers import fill

ROOT = Path(__file__).parents[2]
PAGE = "docs/conformance.md"


def rows_table() -> str:
    """Each row, what it says, and the bugs that it tells from the right answer."""
    rows = json.loads((ROOT / "conformance" / "rows.json").read_text(encoding="utf-8"))
    lines = ["| row | what is right | wrong answers that it knows |", "|---|---|---|"]
    for row in rows:
        bugs = "; ".join(bug["name"] for bug in row["bugs"])
        lines.append(f"| `{row['name']}` | {row['meaning']} | {bugs} |")
    return "\n".join(lines)


def results_table() -> str:
    """Right rows of those that each implementation claims, by type, and what the others look like."""
    text = (ROOT / "evidence" / "records" / "conformance.jsonl").read_text(encoding="utf-8")
    records = [json.loads(line) for line in text.splitlines()]
    abouts = [record for record in records if "runs" in record]
    lines = [
        "| implementation | what is run | type | right | other rows |",
        "|---|---|---|---|---|",
    ]
    for about in sorted(abouts, key=lambda x: (x["implementation"].startswith("linbias"), 0)):
        rows = about["rows"]
        right = sum(row["verdict"] == "right" for row in rows)
        version = f" {about['version']}" if about["version"] else ""
        lines.append(
            f"| {about['implementation']}{version} | {about['runs']} | {about['dtype']}"
            f" | {right} of {len(rows)} | {others(rows)} |"
        )
    lines += [
        f"| {r['implementation']} | nothing | - | - | {r['not_run']} |"
        for r in records
        if "not_run" in r
    ]
    where = sorted({f"{about['machine']}, {about['date']}" for about in abouts})
    return "\n".join([*lines, "", f"{'; '.join(where)}."])


def others(rows: list[dict[str, Any]]) -> str:
    """The rows that are not right, together where they look alike."""
    alike: dict[str, list[str]] = {}
    for record in rows:
        if record["verdict"] != "right":
            note = record.get("note") or "unlike any bug by itself"
            kind = f"{record['verdict']}: " if record["verdict"] == "another convention" else ""
            alike.setdefault(kind + note.replace("|", "/"), []).append(record["row"])
    counts = Counter({note: len(rows) for note, rows in alike.items()})
    cells = [
        f"{note} ({', '.join(f'`{row}`' for row in alike[note]) if count < 4 else f'{count} rows'})"
        for note, count in counts.most_common()
    ]
    return "; ".join(cells) or "-"


def written_parts() -> dict[str, str]:
    """What rows and records say, by part of the page."""
    return {"rows": rows_table(), "results": results_table()}


if __name__ == "__main__":
    fill(PAGE, written_parts())
