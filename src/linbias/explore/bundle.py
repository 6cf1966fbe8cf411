"""Join the page's modules into one script, without a bundler.

A module in `js/` imports with lines such as `import { a, b } from "./x.js";`, exports with
`export` in front of a function, class or constant, and names things at its top level as no other
does. Without those two words, and in the order of their needs, the modules share one scope.
`linbias explore` shows a change at once.
"""

import json
import re
from collections.abc import Callable
from importlib import resources

from linbias.schedules import SCHEDULES, slopes

MOST_HEADS = 16  # of a list of slopes
_IMPORT = re.compile(r'import \{ *([\w, \n]+?),? *\} from "\./([\w.]+\.js)";\n', re.MULTILINE)
_NAME = re.compile(r"^(export )?(?:async )?(?:function\*?|class|const|let) (\w+)", re.MULTILINE)
_UNKNOWN = re.compile(  # but not Python in a template: `import torch`
    r"^(?:import\b.*[\"'{*]|export|var|(?:const|let) *[{[]).*$|.*</script.*", re.MULTILINE
)


def bundle(entry: str, read: Callable[[str], str] | None = None) -> str:
    """Join a module and all that it imports, those first that others need.

    `read` gives the text of a file by its name; `slopes.js` is one that Python writes.
    """
    texts = _in_order(entry, read or read_module)
    _check_names(texts)
    return "\n".join(f"// {name}\n{_without_words(name, text)}" for name, text in texts.items())


def style() -> str:
    """The page's look: of all of it, of the story that it opens with, of the views."""
    return "\n".join(map(read_style, ("style.css", "story.css", "views.css")))


def read_style(name: str) -> str:
    """The text of a style sheet of the package."""
    return resources.files("linbias.explore").joinpath(name).read_text(encoding="utf-8")


def read_module(name: str) -> str:
    """The text of a module of the package."""
    if name == "slopes.js":
        return _slopes()
    return resources.files("linbias.explore").joinpath("js", name).read_text(encoding="utf-8")


def _slopes() -> str:
    """A module with the slopes of every schedule, since only `linbias.schedules` defines them."""
    lists = {
        name: [slopes(num_heads, name).tolist() for num_heads in range(1, MOST_HEADS + 1)]
        for name in SCHEDULES
    }
    return f"export const SLOPES = {json.dumps(lists, separators=(',', ':'))};\n"


def _in_order(entry: str, read: Callable[[str], str]) -> dict[str, str]:
    """The texts of all modules that the entry needs, each after those that it imports."""
    texts: dict[str, str] = {}
    above: list[str] = []

    def visit(name: str) -> None:
        if name in above:
            circle = " -> ".join([*above[above.index(name) :], name])
            raise ValueError(f"bundle: modules must not import each other, got {circle}")
        if name in texts:
            return
        above.append(name)
        text = read(name)
        for names, target in _IMPORT.findall(text):
            exported = {known for export, known in _NAME.findall(read(target)) if export}
            for wanted in re.findall(r"\w+", names):
                if wanted not in exported:
                    rule = f"{name} imports {wanted}, which {target} does not export"
                    raise ValueError(f"bundle: {rule}")
            visit(target)
        texts[above.pop()] = text

    visit(entry)
    return texts


def _check_names(texts: dict[str, str]) -> None:
    """Refuse two modules that use one name, since joined they share a scope."""
    owners: dict[str, str] = {}
    for module, text in texts.items():
        for _, name in _NAME.findall(text):
            if owners.setdefault(name, module) != module:
                both = f"{name} in {owners[name]} and {module}"
                raise ValueError(f"bundle: names must be unique, got {both}")


def _without_words(name: str, text: str) -> str:
    text = _IMPORT.sub("", text).lstrip("\n")
    text = _NAME.sub(lambda line: line[0].removeprefix("export "), text)
    if unknown := _UNKNOWN.search(text):
        raise ValueError(f"bundle: {name} has a line that cannot be joined, got {unknown[0]!r}")
    return text
