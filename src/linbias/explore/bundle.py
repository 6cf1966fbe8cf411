"""Join the page's modules into one script, without a bundler.

A module in `js/` is plain JavaScript in a form that is easy to join: it imports with lines such as
`import { a, b } from "./x.js";`, exports with `export` in front of a function, class or constant,
and names things at its top level as no other module does. Joined in the order in which they need
each other, without those two words, the modules share one scope and need no loader.

To change the page: `linbias explore` shows a change at once. Text from users becomes a text node and
never markup (`dom.js`). tests/explore/test_explore.py opens the page in Chromium (Debian: `apt-get
install chromium`); test_jupyterlab.py opens the widget in a real JupyterLab, where that is installed.
"""

import json
import re
from collections.abc import Callable, Iterable
from importlib import resources

from linbias.schedules import SCHEDULES, slopes

MOST_HEADS = 16  # of a list of slopes
_IMPORT = re.compile(r'import \{ *([\w, \n]+?),? *\} from "\./([\w.]+\.js)";\n', re.MULTILINE)
_NAME = re.compile(r"^(export )?(?:async )?(?:function\*?|class|const|let) (\w+)", re.MULTILINE)


def bundle(entry: str, read: Callable[[str], str] | None = None) -> str:
    """Join a module and all that it imports, those first that others need.

    Args:
        entry: Name of a file in `js/`.
        read: Gives the text of a file by its name; those of the package by default, and
            `slopes.js`, which Python writes.

    Returns:
        JavaScript without imports and exports.

    Raises:
        ValueError: A module imports what is not there, two modules import each other, two use the
            same name at their top level, or a line has a form that joining does not know.

    Example:
        >>> files = {"a.js": 'import { b } from "./b.js";\\nb();\\n'}
        >>> files["b.js"] = "export function b() {}\\n"
        >>> print(bundle("a.js", files.__getitem__))
        // b.js
        function b() {}
        <BLANKLINE>
        // a.js
        b();
        <BLANKLINE>
    """
    read = read or read_module
    texts: dict[str, str] = {}
    for name in _in_order(entry, read):
        texts[name] = read(name)
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


def _in_order(entry: str, read: Callable[[str], str]) -> Iterable[str]:
    """The names of all modules that the entry needs, each after those that it imports."""
    done: list[str] = []
    above: list[str] = []

    def visit(name: str) -> None:
        if name in above:
            circle = " -> ".join([*above[above.index(name) :], name])
            raise ValueError(f"bundle: modules must not import each other, got {circle}")
        if name in done:
            return
        above.append(name)
        for names, target in _IMPORT.findall(read(name)):
            exported = {found for export, found in _NAME.findall(read(target)) if export}
            for wanted in filter(None, re.split(r"[,\s]+", names)):
                if wanted not in exported:
                    raise ValueError(
                        f"bundle: {name} imports {wanted}, which {target} does not export"
                    )
            visit(target)
        done.append(above.pop())

    visit(entry)
    return done


def _check_names(texts: dict[str, str]) -> None:
    """Refuse two modules that use one name, since joined they share a scope."""
    owners: dict[str, str] = {}
    for module, text in texts.items():
        for _, name in _NAME.findall(text):
            if name in owners:
                raise ValueError(
                    f"bundle: names must be unique, got {name} in {owners[name]} and {module}"
                )
            owners[name] = module


def _without_words(name: str, text: str) -> str:
    text = _IMPORT.sub("", text).lstrip("\n")
    text = _NAME.sub(lambda found: found[0].removeprefix("export "), text)
    unknown = re.search(r"^(?:import|export|var|(?:const|let) *[{[]).*$|.*</script.*", text, re.M)
    if unknown:
        raise ValueError(f"bundle: {name} has a line that cannot be joined, got {unknown[0]!r}")
    return text
