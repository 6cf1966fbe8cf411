"""The parts of documents that scripts write, between `<!-- name: command -->` and `<!-- /name
-->`.

The command is the one that writes the part, from records; tests/project/test_docs.py holds each to
it.

To add a table of measured numbers: the measurement appends a line of JSON per case to a file in
evidence/records/ (evidence/benchmarks/record.py); the page gets the two lines; update_readme.py
gets a function that makes the table of the records as text, and a line in `written_parts()`. A
script that measures and writes by itself calls `fill`.
"""

import argparse
import json
import re
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "evidence" / "records"
Record = dict[str, Any]


def parser_of(words: str | None) -> argparse.ArgumentParser:
    """Whose help is the docstring of a script."""
    form = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=words, formatter_class=form)


def fill(document: str | Path, parts: dict[str, str]) -> None:
    """Replace parts of a document, given by name."""
    path = ROOT / document
    text = path.read_text(encoding="utf-8")
    for name, content in parts.items():
        part = re.compile(rf"(<!-- {name}: [^\n]*? -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        text, count = part.subn(lambda m, new=content: f"{m[1]}{minus(new)}\n{m[2]}", text)
        assert count == 1, f"{path}: {name} must stand there once, got {count} times"
    path.write_text(text, encoding="utf-8")


def minus(text: str) -> str:
    """Write the minus sign of negative numbers, but not in code."""
    code = re.compile(r"(```.*?```|`[^`\n]*`)", re.DOTALL)
    negative = re.compile(r"(?<![\w./=-])-(?=\d)")
    parts = code.split(text)  # prose and code by turns
    parts[::2] = [negative.sub("\N{MINUS SIGN}", prose) for prose in parts[::2]]
    return "".join(parts)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """In Markdown."""
    first, *rest = ("| " + " | ".join(cells) + " |" for cells in (head, *rows))
    return "\n".join([first.replace("|  |", "| |"), "|---" * len(head) + "|", *rest])


def cell(values: Sequence[float], form: str = ".1f") -> str:
    """The mean, and half the range."""
    if not values:
        return ""
    half = (max(values) - min(values)) / 2
    return f"{statistics.fmean(values):,{form}} ± {half:,{form}}"


def read(path: Path) -> list[Record]:
    """The records of a file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def unique(records: Iterable[Record], field: str) -> list[Any]:
    """The different values of a field, in order of appearance."""
    return list(dict.fromkeys(record[field] for record in records if field in record))
