"""Write the tree and the public names of DESIGN.md from the code.

    python evidence/runs/design.py

A line for each module at the root of the package and for each room below: the first sentence of
its docstring.
"""

import ast
import textwrap
from collections.abc import Iterator
from pathlib import Path

from markers import ROOT, fill

PACKAGE = ROOT / "src" / "linbias"
WIDTH = 160  # of lists, which nobody reads as prose


def first_sentence(path: Path) -> str:
    words = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n\n")[0]
    return " ".join(words.split()).split(". ")[0].rstrip(".:")


def rooms(folder: Path, depth: int = 1) -> Iterator[tuple[str, Path]]:
    """What a folder holds: its modules at the root, and rooms with their own rooms."""
    inside = sorted(folder.iterdir())
    if depth == 1:
        for path in inside:
            if path.suffix == ".py" and not path.name.startswith("__"):
                yield path.name, path
    for path in inside:
        if (path / "__init__.py").exists():
            yield "  " * (depth - 1) + path.name + "/", path / "__init__.py"
            yield from rooms(path, depth + 1)


def tree() -> str:
    lines = [f"  {name:<22}{first_sentence(path)}" for name, path in rooms(PACKAGE)]
    return "\n".join(["```", "src/linbias/", *lines, "```"])


def public_names() -> str:
    """By module, what its `__all__` names; those of `compat` are their originals'."""
    lines = []
    for path in sorted(set(PACKAGE.rglob("*.py")) - set(PACKAGE.glob("compat/*"))):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and "__all__" in map(ast.unparse, node.targets):
                parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
                module = ".".join(part for part in parts if part != "__init__")
                names = ", ".join(ast.literal_eval(node.value))
                lines += textwrap.wrap(f"- `{module}`: {names}", WIDTH, subsequent_indent="  ")
    return "\n".join(lines)


def written_parts() -> dict[tuple[str, str], str]:
    """By document and part, what is to stand there."""
    return {("DESIGN.md", "tree"): tree(), ("DESIGN.md", "names"): public_names()}


def main() -> None:
    for (document, part), text in written_parts().items():
        fill(document, {part: text})


if __name__ == "__main__":
    main()
