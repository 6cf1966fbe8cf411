"""Follow a run of a module line by line: what its statements set, as text. `annotate` prints it beside the code."""

import ast
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import numpy as np

TOKENS = ("The", "cat", "sat", "on", "mat")
MOST_NUMBERS = 120  # of an array that is printed; of a larger one only the shape


@dataclass(frozen=True)
class Statement:
    """A statement, or the head of a compound one: its lines, and the names that it sets."""

    first: int
    last: int
    names: tuple[str, ...] = ()
    returns: bool = False


def statements(tree: ast.Module) -> dict[int, Statement]:
    """Line number -> the statement on it; of loops, functions and the like the lines before their body."""
    by_line = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.stmt):
            continue
        first, last = node.lineno, node.end_lineno or node.lineno
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.For):
            targets = [node.target]
        if hasattr(node, "body"):
            last = max(first, node.body[0].lineno - 1)
        for decorator in getattr(node, "decorator_list", []):
            first = min(first, decorator.lineno)
        names = tuple(dict.fromkeys(name for target in targets for name in _names(target)))
        statement = Statement(first, last, names, isinstance(node, ast.Return))
        by_line.update(dict.fromkeys(range(first, last + 1), statement))
    return by_line


def _names(target: ast.expr) -> Iterator[str]:
    if isinstance(target, ast.Name):
        yield target.id
    elif isinstance(target, ast.Subscript | ast.Starred):
        yield from _names(target.value)
    elif isinstance(target, ast.Tuple | ast.List):
        for part in target.elts:
            yield from _names(part)


class Shown(NamedTuple):
    """A value to print: what was set, its shape, and its numbers, in one text for each head."""

    name: str
    shape: str
    texts: list[str]

    @property
    def one_line(self) -> bool:
        return len(self.texts) == 1 and "\n" not in self.texts[0]


def record(source: Path, run: Callable[[], None]) -> dict[int, list[Shown]]:
    """Run, and return what the lines of `source` set, by the last line of the statement that did.

    A function is followed the first time that it is called, and a loop the first time around.
    """
    by_line = statements(ast.parse(source.read_text(encoding="utf-8")))
    found: dict[int, list[Shown]] = {}
    followed: set[CodeType] = set()

    def keep(line: int, values: list[tuple[str, Any]]) -> None:
        if line not in found:
            found[line] = [shown for name, value in values if (shown := show(name, value))]

    def follow(frame: FrameType, event: str, _: object) -> Any:
        code = frame.f_code
        ours = code.co_filename == str(source) and not code.co_name.startswith("<")
        if event != "call" or not ours or code in followed:
            return None
        followed.add(code)
        given = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        signature = by_line[code.co_firstlineno].last
        keep(signature, [(name, frame.f_locals.get(name)) for name in given])
        now: Statement | None = None

        def local(frame: FrameType, event: str, result: object) -> Any:
            nonlocal now
            then = by_line.get(frame.f_lineno) if event == "line" else None
            if now is not None and then is not now:
                values = [(name, frame.f_locals.get(name)) for name in now.names]
                if now.returns and event == "return":
                    fields = getattr(result, "_fields", None)  # a named tuple: by its names
                    values += zip(fields, result, strict=True) if fields else [("returns", result)]
                keep(now.last, values)
            now = then if event == "line" else now
            return local

        return local

    before = sys.gettrace()
    sys.settrace(follow)
    try:
        run()
    finally:
        sys.settrace(before)
    return found


def show(name: str, value: Any) -> Shown | None:
    """A number, a text, an array, or a few of them; None for anything else."""
    if hasattr(value, "detach"):  # a tensor
        value = value.detach().numpy()
    if isinstance(value, np.ndarray):
        return Shown(name, str(list(value.shape)) if value.shape else "", _texts(value))
    if isinstance(value, tuple | list) and value and len(value) <= 8:
        parts = [show("", part) for part in value]
        if any(part is None for part in parts):
            return None
        if all(part.one_line and not part.shape for part in parts if part):
            return Shown(name, "", [", ".join(part.texts[0] for part in parts if part)])
        return Shown(
            name,
            ", ".join(part.shape for part in parts if part),
            [text for part in parts if part for text in part.texts],
        )
    if isinstance(value, bool | np.bool_ | str | int | np.integer):
        return Shown(name, "", [str(value)])
    if isinstance(value, float | np.floating):
        return Shown(name, "", [_number(float(value), _digits(np.array(value)))])
    return None


def _texts(array: np.ndarray) -> list[str]:
    """Vectors in a line; matrices, one for each head, with the tokens beside them."""
    if array.dtype.kind not in "biuf" or array.size > MOST_NUMBERS or not array.size:
        return [""]
    digits = _digits(array)
    if array.ndim < 2 or max(array.shape) == array.size:
        return [" ".join(_number(x, digits) for x in array.ravel().tolist())]
    leading = [n for n in array.shape[:-2] if n > 1]
    array = array.reshape([*leading, *array.shape[-2:]])
    matrices = [(index, _matrix(array[index], digits)) for index in np.ndindex(*leading)]
    return [
        "\n".join(["head " + ", ".join(map(str, index)), *lines] if index else lines)
        for index, lines in matrices
    ]


def _matrix(matrix: np.ndarray, digits: int) -> list[str]:
    cells = [[_number(x, digits) for x in row] for row in matrix.tolist()]
    num_rows, num_columns = matrix.shape
    if headed := num_columns == len(TOKENS):
        cells.insert(0, list(TOKENS))
    width = max(len(cell) for row in cells for cell in row)
    lines = [" ".join(cell.rjust(width) for cell in row) for row in cells]
    if num_rows != len(TOKENS):
        return lines
    names = ["", *TOKENS] if headed else TOKENS
    return [f"{name:<3} {line}" for name, line in zip(names, lines, strict=True)]


def _digits(array: np.ndarray) -> int:
    """As few decimals as say the numbers exactly, and at most four."""
    if array.dtype.kind != "f":
        return 0
    exact = (d for d in range(4) if np.array_equal(array, np.round(array, d), equal_nan=True))
    return next(exact, 4)


def _number(value: float, digits: int) -> str:
    if isinstance(value, bool):
        return "x" if value else "."
    text = f"{value:.{digits}f}"
    if 0 < abs(value) < 1e-4:
        return f"{value:.1e}"
    return text.removeprefix("-") if float(text) == 0 else text
