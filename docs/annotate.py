"""Annotated code: pages that put a module's comments and docstrings beside its code, line for line.

    python docs/annotate.py        # writes docs/annotated/*.md, which git ignores

Everything on a page comes from the source itself and from a run of it. The source is cut into rows: a comment on
lines of its own, or the docstring of a function, stands on the left of the code that follows it. The run passes the
five tokens of `linbias explain` through the module, and each row shows what its lines made of them. A page can
therefore not say anything that the code does not.

The pages are MyST: prose is Markdown, code is HTML with the classes of Pygments, so that both follow the site's theme.
"""

import ast
import html
import io
import math
import re
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from follow import TOKENS, Shown, record
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

HERE = Path(__file__).parent
MOST_BESIDE = 600  # characters about a module or a class that stand beside its first lines, and not above them


@dataclass(frozen=True)
class Page:
    """A module, and a run of it that is worth looking at."""

    name: str
    source: Path
    title: str
    introduction: str
    run: Callable[[], str]  # returns what else the introduction should say


@dataclass
class Row:
    """Prose, and the lines of code that it is about: ranges of 1-based line numbers, both ends included."""

    prose: str = ""
    heading: str = ""
    code: list[tuple[int, int]] = field(default_factory=list)
    above: bool = False  # the prose stands above the code, in all the width


# Cutting a source into rows


def rows(source: str) -> list[Row]:
    """Cut a module: a row begins at a comment on lines of its own, at a class or function, and after one."""
    lines = source.splitlines()
    comments = _own_comments(source)
    docstrings, headings, starts = _definitions(ast.parse(source))
    found = [Row()]
    number = 1
    while number <= len(lines):
        row = found[-1]
        if number in docstrings:
            end, text = docstrings[number]
            of_function = row.code and not lines[row.code[-1][1] - 1].startswith("class ")
            row.above = not of_function and len(text) > MOST_BESIDE
            row.prose += markdown(text)
            number = end + 1
        elif number in comments:
            end = number
            while end + 1 in comments:
                end += 1
            if row.code:
                found.append(row := Row())
            row.prose += markdown("\n".join(comments[i] for i in range(number, end + 1)))
            number = end + 1
        elif not lines[number - 1].strip():
            number += 1
        else:
            left_a_body = (
                row.code
                and lines[row.code[-1][1] - 1][0].isspace()
                and not lines[number - 1][0].isspace()
            )
            closes = re.match(
                r"[)\]}]", lines[number - 1]
            )  # a signature, say, that took several lines
            if row.code and (number in starts or (left_a_body and not closes)):
                found.append(row := Row())
            row.heading = row.heading or headings.get(number, "")
            _extend(row.code, number)
            number += 1
    return [row for row in found if row.code or row.prose]


def _own_comments(source: str) -> dict[int, str]:
    """Line number -> text of the comments that stand on lines of their own."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {
        token.start[0]: token.string.lstrip("#").removeprefix(" ")
        for token in tokens
        if token.type == tokenize.COMMENT
        and token.line[: token.start[1]].isspace() | (token.start[1] == 0)
    }


def _definitions(
    tree: ast.Module,
) -> tuple[dict[int, tuple[int, str]], dict[int, str], set[int]]:
    """Docstrings by first line (last line, text), headings of top-level definitions, and lines where any begins."""
    docstrings, headings, starts = {}, {}, set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            continue
        if not isinstance(node, ast.Module):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            starts.add(first)
            if node in tree.body:
                headings[first] = node.name
        if (text := ast.get_docstring(node)) is not None:
            string = node.body[0]
            docstrings[string.lineno] = (string.end_lineno or string.lineno, text)
    return docstrings, headings, starts


def _extend(code: list[tuple[int, int]], number: int) -> None:
    if code and code[-1][1] == number - 1:
        code[-1] = (code[-1][0], number)
    else:
        code.append((number, number))


# From docstrings and comments to Markdown


def markdown(text: str) -> str:
    """Paragraphs, tables, formulas (indented), sections such as Args, and examples, as Markdown."""
    out: list[str] = []
    for block in re.split(r"\n\s*\n", text.strip("\n")):
        lines = block.splitlines()
        section = re.fullmatch(
            r"(Args|Returns|Raises|Attributes|Example|Source):(.*)", lines[0].strip()
        )
        if section and not lines[0][0].isspace():
            out.append(f"**{section[1]}**")
            lines = (
                [section[2].strip(), *_dedent(lines[1:])]
                if section[2].strip()
                else _dedent(lines[1:])
            )
            if section[1] == "Example":
                out.append("```text\n" + "\n".join(lines) + "\n```")
                continue
            if section[1] in ("Args", "Attributes", "Raises"):
                out.append(_list(lines))
                continue
        if not lines:
            continue
        out.extend(_blocks(lines))
    return "\n\n".join(out) + "\n\n"


def _blocks(lines: list[str]) -> Iterator[str]:
    """The parts of a block without empty lines: a paragraph, then perhaps a table, a formula or an example."""
    kinds = [_kind(line) for line in lines]
    start = 0
    for end in range(1, len(lines) + 1):
        if end < len(lines) and kinds[end] == kinds[start]:
            continue
        part = lines[start:end]
        if kinds[start] == "table":
            yield _table(part)
        elif kinds[start] == "literal":
            yield "```text\n" + "\n".join(_dedent(part)) + "\n```"
        else:
            yield _escape(" ".join(line.strip() for line in part))
        start = end


def _kind(line: str) -> str:
    if line.lstrip().startswith("|"):
        return "table"
    return "literal" if line.startswith("    ") or line.startswith((">>>", "...")) else "text"


def _list(lines: list[str]) -> str:
    """`name: text` with indented continuations, as a list; other lines are paragraphs."""
    items: list[str] = []
    for line in lines:
        named = re.match(r"([\w, ]+): (.*)", line)
        if named and not line[0].isspace():
            items.append(f"- **{named[1]}**: {_escape(named[2])}")
        elif items:
            items[-1] += " " + _escape(line.strip())
        else:
            items.append(_escape(line.strip()))
    return "\n".join(items)


def _table(lines: list[str]) -> str:
    """A table; a row whose first cell is empty continues the row above."""
    table: list[list[str]] = []
    for line in lines:
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if table and not cells[0]:
            table[-1] = [f"{a} {b}".strip() for a, b in zip(table[-1], cells, strict=True)]
        else:
            table.append(cells)
    rule = ["---"] * len(table[0])
    table[1:2] = [rule] if set("".join(table[1])) <= set("-:") else [rule, table[1]]
    return "\n".join("| " + " | ".join(map(_escape, row)) + " |" for row in table)


def _escape(text: str) -> str:
    """Text outside `code` means itself."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(
        part if part.startswith("`") else re.sub(r"([*<\[\]${}|])", r"\\\1", part)
        for part in parts
    )


def _dedent(lines: list[str]) -> list[str]:
    margin = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
    return [line[margin:] for line in lines]


# Writing a page

STYLE = (HERE / "annotate.css").read_text(encoding="utf-8").strip()


def render(page: Page) -> str:
    """The page in MyST."""
    source = page.source.read_text(encoding="utf-8")
    lines = highlight(source, PythonLexer(stripnl=False), HtmlFormatter(nowrap=True)).splitlines()
    said: list[str] = []
    found = _once(record(page.source, lambda: said.append(page.run())))
    parts = [
        "---",
        "hide-toc: true",
        "---",
        f"# {page.title}",
        "",
        f"{page.introduction} {said[0]}".strip(),
        "",
    ]
    parts += ["```{raw} html", "<style>", STYLE, "</style>", "```", ""]
    headed: set[str] = set()
    for row in rows(source):
        if row.heading and row.heading not in headed:
            headed.add(row.heading)
            parts += [f"## `{row.heading}`", ""]
        pieces = "\n".join(_pieces(row, lines, found))
        wide = " wide" if row.above else ""
        parts += [
            f"``````{{container}} annotated{wide}",
            "`````{container} prose",
            row.prose.strip() or "&nbsp;",
            "`````",
        ]
        parts += ["```{raw} html", f'<div class="code">{pieces}</div>', "```", "``````", ""]
    return "\n".join(parts)


def _once(found: dict[int, list[Shown]]) -> dict[int, list[Shown]]:
    """Without values that stand further up under the same name."""
    seen: set[str] = set()
    kept: dict[int, list[Shown]] = {}
    for line in sorted(found):
        kept[line] = [shown for shown in found[line] if str(shown) not in seen]
        seen |= {str(shown) for shown in found[line]}
    return kept


def _pieces(row: Row, lines: list[str], found: dict[int, list[Shown]]) -> Iterator[str]:
    """Code and values in turn. Values of one line wait for the next that takes more, or for the end of the row."""
    waiting: list[tuple[int, Shown]] = []
    for first, last in row.code:
        start = first
        for line in range(first, last + 1):
            here = found.get(line, [])
            waiting += [(line, shown) for shown in here]
            if line == last or any(not shown.one_line for shown in here):
                yield _code(lines, start, line)
                start = line + 1
                if waiting and (line != last or (first, last) == row.code[-1]):
                    yield _values(waiting)
                    waiting = []


def _code(lines: list[str], first: int, last: int) -> str:
    numbered = "\n".join(
        f'<span class="line" id="L{n}"><a class="ln" href="#L{n}" aria-label="line {n}">{n}</a>{lines[n - 1]}</span>'
        for n in range(first, last + 1)
    )
    return f'<div class="highlight"><pre>{numbered}</pre></div>'


def _values(values: list[tuple[int, Shown]]) -> str:
    out = []
    for line, (name, shape, texts) in values:
        label = f'<span class="at">{line}</span> <b>{name}</b> {shape}'
        if len(texts) == 1 and "\n" not in texts[0]:
            out.append(f"<div>{label} {html.escape(texts[0])}</div>")
        else:
            blocks = "".join(f"<pre>{html.escape(text)}</pre>" for text in texts)
            out.append(f'<div>{label}<div class="texts">{blocks}</div></div>')
    return f'<div class="values">{"".join(out)}</div>'


# The three pages


def five_tokens() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q, k and v of `linbias explain`: [2 heads, 5 tokens, 2]."""
    from linbias.example import K, Q, V

    q, k, v = (np.array(x, float).reshape(5, 2, 2).swapaxes(0, 1) for x in (Q, K, V))
    return q, k, v


def _run_definition() -> str:
    from linbias import definition

    q, k, v = five_tokens()
    slopes = [0.5, 0.25]
    definition.attention(q, k, v, slopes, causal=False)
    definition.attention_weights(q, k, slopes, causal=False)
    definition.attention_backward(np.ones((2, 5, 2)), q, k, v, slopes, causal=False)
    definition.bias(slopes, 5, 5)
    halves = [
        definition.attention(
            q, k, v, slopes, causal=False, key_range=part, query_start=0, return_lse=True
        )
        for part in ([0, 3], [3, 5])
    ]
    definition.merge([out for out, _ in halves], [lse for _, lse in halves])
    return ""


def _run_near_to_far() -> str:
    from linbias import near_to_far

    q, k, v = five_tokens()
    near_to_far.window(2.0, 1.0, 1.5, scale=2**-0.5, tolerance=2.0**-6)
    slopes = [2.0, 0.25]
    visit = near_to_far.attention(q[:, -1:], k, v, slopes, tolerance=2.0**-6, rows=1, keys=1)
    tile = visit.tiles[0][0][0]
    lost = near_to_far.share_outside(q[:, -1:], k, tile.first, tile.end, slopes)[0, 0]
    steps = "; ".join(
        f"{TOKENS[step.first]}, which with all beyond it holds at most {math.exp(step.bound):.3f} of what was read,"
        f" is {'read' if step.read else 'left'}"
        for step in tile.steps
    )
    return f"On its way out from *{TOKENS[-1]}*: {steps}. What was never read holds {lost:.4f} of the probability."


def _run_layer() -> str:
    import torch

    from linbias.example import K, Q, V
    from linbias.torch import MultiheadAttention

    layer = MultiheadAttention(4, 2, variant="symmetric", schedule="halving", batch_first=True)
    with torch.no_grad():
        for projection in (layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj):
            projection.weight.copy_(torch.eye(4))
        q, k, v = (torch.tensor(x, dtype=torch.float32)[None] for x in (Q, K, V))
        layer(q, k, v, need_weights=True)
        layer(q, k, v, key_padding_mask=torch.tensor([[False] * 4 + [True]]))
    return ""


SOURCES = HERE.parent / "src" / "linbias"
PAGES = [
    Page(
        "definition",
        SOURCES / "definition.py",
        "The definition in NumPy",
        "All of `src/linbias/definition.py`. The values under the code are those of the five tokens of `linbias explain`, two"
        " heads of size 2 with slopes 1/2 and 1/4, no key hidden. For the mathematics alone, begin at [`compute`](#compute).",
        _run_definition,
    ),
    Page(
        "layer",
        SOURCES / "torch" / "nn.py",
        "The PyTorch layer",
        "All of `src/linbias/torch/nn.py`. The layer that ran has two heads of size 2 and projections that change nothing, so that"
        " its queries, keys and values are those of `linbias explain`. Its output is that of [the definition](definition.md).",
        _run_layer,
    ),
    Page(
        "near_to_far",
        SOURCES / "near_to_far.py",
        "Near to far",
        "All of `src/linbias/near_to_far.py`. The values are those of one query, the last of five tokens, whose first head has slope"
        " 2. It may leave out 1/64 of its probability, and reads key by key until the bound allows it to stop.",
        _run_near_to_far,
    ),
]


def write(folder: Path = HERE / "annotated") -> list[Path]:
    """Write all pages, each only if it changed, so that a site generator does not read it again."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for page in PAGES:
        path, text = folder / f"{page.name}.md", render(page)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
        paths.append(path)
    return paths


if __name__ == "__main__":
    for path in write():
        print(path)
