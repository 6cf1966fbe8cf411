"""The code in README and docs: the blocks of a document follow each other, in a folder where a converted checkpoint lies."""

import ast
import io
import re
from contextlib import redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
_GENERATED = {
    ROOT / f"docs/annotated/{name}.md" for name in ("definition", "layer", "near_to_far")
}
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(set((ROOT / "docs").rglob("*.md")) - _GENERATED),
]


def blocks(document: Path, language: str) -> list[str]:
    text = document.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


@np.printoptions()  # those that a document sets are its own
def run_python(document: Path) -> int:
    """Run the blocks whose packages are installed, in the current folder; return how many these are.

    What a block prints must be what the page shows: the block of text that follows it at once, if one does.
    """
    names: dict[str, Any] = {}
    num_run = 0
    text = document.read_text(encoding="utf-8")
    pattern = r"^```python\n(.*?)^```$(?:\n+```text\n(.*?)^```$)?"
    for block, shown in re.findall(pattern, text, re.DOTALL | re.MULTILINE):
        tree = ast.parse(block)
        if all(find_spec(package) is not None for package in _packages(tree)):
            with redirect_stdout(io.StringIO()) as printed:
                exec(compile(tree, document.name, "exec"), names)
            if shown and printed.getvalue() != shown:
                raise AssertionError(
                    f"{document.name} shows\n{shown}but prints\n{printed.getvalue()}"
                )
            num_run += 1
    return num_run


def _packages(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return {name.split(".")[0] for name in found}


def write_paper_model(folder: Path) -> None:
    """What `linbias paper convert` would have written to the folder of docs/paper.md."""
    from linbias.data.dictionary import Dictionary
    from linbias.models import PaperConfig, PaperForCausalLM
    from linbias.paper.checkpoint import add_words

    config = PaperConfig(
        vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, cutoffs=[20],
    )  # fmt: skip
    PaperForCausalLM(config).save_pretrained(folder / "alibi-512")
    add_words(Dictionary.from_counts({f"w{i}": 1 for i in range(36)}), folder / "alibi-512")
