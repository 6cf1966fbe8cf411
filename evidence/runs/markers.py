"""The parts of documents that scripts write: what stands between `<!-- name: command -->` and `<!-- /name -->`.

The command is the one that writes the part, from records; tests/project/test_docs.py holds each of them to it.

To add a table of measured numbers: the measurement appends a line of JSON per case to a file in evidence/records/ (evidence/benchmarks/record.py); the
page gets the two lines; update_readme.py gets a function that makes the table of the records as text, and a line in
`written_parts()`. A script that measures and writes by itself calls `fill`.
"""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def fill(document: str | Path, parts: dict[str, str]) -> None:
    """Replace parts of a document.

    Args:
        document: A path, that of the repository or below it.
        parts: By name, what is to stand there.
    """
    path = ROOT / document
    text = path.read_text(encoding="utf-8")
    for name, content in parts.items():
        part = re.compile(rf"(<!-- {name}: [^\n]*? -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        text, found = part.subn(lambda m, new=content: f"{m[1]}{minus(new)}\n{m[2]}", text)
        assert found == 1, f"{path}: {name} must stand there once, got {found} times"
    path.write_text(text, encoding="utf-8")


def minus(text: str) -> str:
    """Write the minus sign of negative numbers, but not in code."""
    code = re.compile(r"(```.*?```|`[^`\n]*`)", re.DOTALL)
    negative = re.compile(r"(?<![\w./=-])-(?=\d)")
    parts = code.split(text)  # prose and code by turns
    parts[::2] = [negative.sub("\N{MINUS SIGN}", prose) for prose in parts[::2]]
    return "".join(parts)
