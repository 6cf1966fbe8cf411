"""Rewrite the tables of docs/conformance.md from the vectors' rows and from what adapters gave.

python conformance/run.py && python evidence/runs/conformance_page.py
"""

import json

from markers import RECORDS, ROOT, Record, fill, read, table


def rows_table() -> str:
    """Each row, what it says, and the bugs that it tells from the right answer."""
    rows = json.loads((ROOT / "conformance" / "rows.json").read_text(encoding="utf-8"))
    bugs = ("; ".join(bug["name"] for bug in row["bugs"]) for row in rows)
    cells = [[f"`{r['name']}`", r["meaning"], b] for r, b in zip(rows, bugs, strict=True)]
    return table(["row", "what is right", "wrong answers that it knows"], cells)


def results_table() -> str:
    """Right rows of those that each implementation claims, and what the others look like."""
    records = read(RECORDS / "conformance.jsonl")
    abouts = [record for record in records if "runs" in record]
    cells = []
    for about in sorted(abouts, key=lambda x: x["implementation"].startswith("linbias")):
        rows, what = about["rows"], [about["implementation"], about["version"] or ""]
        right = f"{sum(row['verdict'] == 'right' for row in rows)} of {len(rows)}"
        name = " ".join(filter(None, what))
        cells.append([name, about["runs"], about["dtype"], right, others(rows)])
    missing = [r for r in records if "not_run" in r]
    cells += [[r["implementation"], "nothing", "-", "-", r["not_run"]] for r in missing]
    where = "; ".join(sorted({f"{about['machine']}, {about['date']}" for about in abouts}))
    head = ["implementation", "what is run", "type", "right", "other rows"]
    return f"{table(head, cells)}\n\n{where}."


def others(rows: list[Record]) -> str:
    """The rows that are not right, together where they look alike."""
    alike: dict[str, list[str]] = {}
    for record in rows:
        if record["verdict"] != "right":
            note = record.get("note") or "unlike any bug by itself"
            kind = f"{record['verdict']}: " if record["verdict"] == "another convention" else ""
            alike.setdefault(kind + note.replace("|", "/"), []).append(record["row"])
    cells = []
    for note, names in sorted(alike.items(), key=lambda item: -len(item[1])):
        few = ", ".join(f"`{row}`" for row in names)
        cells.append(f"{note} ({few if len(names) < 4 else f'{len(names)} rows'})")
    return "; ".join(cells) or "-"


def written_parts() -> dict[str, str]:
    """What rows and records say, by part of the page."""
    return {"rows": rows_table(), "results": results_table()}


if __name__ == "__main__":
    fill("docs/conformance.md", written_parts())
