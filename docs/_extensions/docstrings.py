r"""Docstrings as they are written here, turned into what Sphinx reads.

In the source a docstring is plain text: code stands in single backticks, formulas and drawings are indented, and a table has
Markdown's bars. This extension, which has to be loaded before napoleon, makes of these a literal or a link, a literal
block, and a table; signs that mean something to reStructuredText only (`*`, `|`, `\`, `name_`) stay themselves. The
fields of a record are those with a comment beside them in the source.
"""

import ast
import inspect
import re
import textwrap
import tokenize
from io import StringIO
from typing import Any

from sphinx.application import Sphinx

_SECTION = re.compile(r"(Args|Returns|Raises|Example|Attributes|Fields|Yields):$")
_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$")


def setup(app: Sphinx) -> dict[str, Any]:
    app.setup_extension("sphinx.ext.autodoc")
    app.connect("autodoc-process-docstring", _process, priority=400)  # napoleon: 500
    app.connect("autodoc-process-docstring", _with_colons, priority=600)
    app.connect("autodoc-process-signature", _without_unknown)
    app.connect("autodoc-skip-member", _without_aliases)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _process(
    app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]
) -> None:
    if inspect.isclass(thing) and not any(_SECTION.match(line) for line in lines):
        lines += _fields(thing)
    if what == "property":  # of which napoleon would take "[H]: slopes" for a type
        lines[0] = lines[0].replace(": ", ", ", 1)
    lines[:] = translate(lines)


def _with_colons(
    app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]
) -> None:
    """`name: meaning` as in the source, where napoleon has written two hyphens for a dash."""
    named = re.compile(r"^((?::\w+:)?\W*\*\*.+?\*\*|:returns: .+?) -- ")
    lines[:] = [named.sub(r"\1: ", line) for line in lines]


def _without_unknown(
    app: Sphinx,
    what: str,
    name: str,
    thing: object,
    options: object,
    signature: str | None,
    returned: str | None,
) -> tuple[str | None, str | None]:
    """Leave out the parameter that only collects names to refuse."""
    return signature and signature.replace(", **unknown", ""), returned


def _without_aliases(
    app: Sphinx, what: str, name: str, thing: object, skip: bool, options: object
) -> bool | None:
    """Leave out the properties of a named tuple, which stand in its signature and among its fields."""
    return (inspect.getdoc(thing) or "").startswith("Alias for field number") or None


def translate(lines: list[str]) -> list[str]:
    """The lines of a docstring as reStructuredText with napoleon's sections."""
    result: list[str] = []
    text: list[str] = []  # prose that is not written yet: a span of code may go over a line end

    def write_text() -> None:
        if text:
            result.extend(_inline("\n".join(text)).split("\n"))
            text.clear()

    at, before = 0, ""  # before: the last line that is not empty
    while at < len(lines):
        line = lines[at]
        block = _block(lines, at, before)
        if block:
            write_text()
            body, indent = lines[at:block], " " * _indent(before)
            if line.lstrip().startswith("|"):
                result += [*_table(body, " " * _indent(line)), ""]
            elif line.lstrip().startswith(">>>"):
                result += body
            else:
                result += [f"{indent}.. code-block:: text", "", *body, ""]
            at = block
            continue
        text.append(line)
        before = line if line.strip() else before
        at += 1
    write_text()
    return result


def _block(lines: list[str], at: int, before: str) -> int:
    """One past the last line of the table, example or indented block that begins here; 0 where none does."""
    line, end = lines[at], at
    if line.lstrip().startswith("|"):
        while end < len(lines) and lines[end].lstrip().startswith("|"):
            end += 1
        return end
    if line.lstrip().startswith(">>>"):
        while end < len(lines) and lines[end].strip():
            end += 1
        return end
    after_gap = at > 0 and not lines[at - 1].strip()
    if not (line.strip() and after_gap and _indent(line) >= _indent(before) + 4):
        return 0
    if _SECTION.match(before.strip()):
        return 0
    while end < len(lines) and (not lines[end].strip() or _indent(lines[end]) > _indent(before)):
        end += 1
    while not lines[end - 1].strip():
        end -= 1
    return end


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _inline(text: str) -> str:
    """Prose with code in backticks: a link where the code is a name that has an entry, else a literal."""
    parts = re.split(r"`([^`]+)`", text)
    for at, part in enumerate(parts):
        if at % 2 == 0:
            part = re.sub(r"([\\*|])", r"\\\1", part)
            part = re.sub(r"(?<=\w)_(?!\w)", r"\\_", part)
            parts[at] = re.sub(r"(: [A-Z])\.$", r"\1\\.", part, flags=re.MULTILINE)  # no list
        elif _NAME.match(part):
            parts[at] = f":py:obj:`{part}`"
        else:
            parts[at] = f"``{part}``"
        if at % 2 == 0 and at > 0 and part[:1].isalnum():  # `name`s: no space may come between
            parts[at] = "\\ " + parts[at]
    return "".join(parts)


def _table(rows: list[str], indent: str) -> list[str]:
    """A table with Markdown's bars; a row whose first cell is empty goes on with the row above it."""
    cells = [[cell.strip() for cell in row.strip().strip("|").split("|")] for row in rows]
    head, *body = [row for row in cells if set("".join(row)) - set("-:")]
    table: list[list[str]] = [head]
    for row in body:
        if row[0]:
            table.append(row)
        else:
            pairs = zip(table[-1], row, strict=True)
            table[-1] = [f"{above} {below}".strip() for above, below in pairs]
    made = [f"{indent}.. list-table::", f"{indent}   :header-rows: 1", ""]
    for row in table:
        for number, cell in enumerate(row):
            made.append(f"{indent}   {'* -' if number == 0 else '  -'} {_inline(cell)}")
    return made


def _fields(record: type) -> list[str]:
    """The fields of a record that have a comment in its source, as a section."""
    if not hasattr(record, "_fields") and not hasattr(record, "__dataclass_fields__"):
        return []
    source = textwrap.dedent(inspect.getsource(record))
    comments = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    (parsed,) = ast.parse(source).body
    assert isinstance(parsed, ast.ClassDef)
    found = []
    for field in parsed.body:
        if not isinstance(field, ast.AnnAssign):
            continue
        said = [comments[at] for at in range(field.lineno, field.end_lineno + 1) if at in comments]
        name = ast.unparse(field.target)
        if said and not name.startswith("_"):
            found.append(f"    {name}: {' '.join(said)}")
    return ["", "Fields:", *found] if found else []
