"""The explorer: attention with linear biases as a page to touch, one file without a network.

Its files:

    data.py      the chapter's example, the README's run; model.py, reading.py: a model on a text
    vectors.py   q, k and v for texts of the reader's
    bundle.py    the modules of js/ as one script: start.js (a file) and widget.js (a notebook)
                 start page.js, whose views are *_view.js; the documentation's first page has
                 slope_story.js alone; dom.js draws again what of a page is given by functions
    frame.py     all of it as one file, in the frame of page.html, with style.css, story.css
                 and views.css; static.py is what is left of it without scripts
    notebook.py  the page inside a notebook
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from linbias import _extras
from linbias.explore import data, frame
from linbias.explore.bundle import bundle, read_style
from linbias.explore.static import static_part
from linbias.explore.vectors import vectors

if TYPE_CHECKING:
    from linbias.explore.notebook import Explorer

__all__ = ["page", "read_model", "vectors", "widget"]


def page(
    results: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    *,
    docs: str | None = None,
) -> str:
    """Write the explorer as one HTML file: text, data, style and script, nothing left to load.

    Args:
        results: What the comparison of methods shows, from `linbias.lm.read_results`; None shows
            the README's.
        model: What the view of a trained model shows, from `read_model`; None leaves that view
            out.
        docs: Address of the documentation, for a page that stands in it.

    Returns:
        The page, below 1 MB without a model.

    Raises:
        ValueError: results or model holds a number that JSON cannot say: inf or nan.

    Example:
        >>> page()[:15]
        '<!DOCTYPE html>'
    """
    shown = frame.content_of(data.results() if results is None else results, model, docs)
    return frame.html(shown, static_part())


def widget(
    results: dict[str, Any] | None = None, model: dict[str, Any] | None = None, state: str = ""
) -> "Explorer":
    """Show the explorer inside a notebook: Jupyter, VS Code, marimo, whatever knows anywidget.

    Args:
        results, model: As for `page`.
        state: What to show first, as it stands behind # in the page's address: "view=how&head=1".

    Returns:
        A widget that draws itself; its `state` follows what its reader does, and may be set. Pages
        made of the notebook show a picture instead (nbconvert with `--execute` does so given
        `--ExecutePreprocessor.store_widget_state=False`).

    Raises:
        ModuleNotFoundError: anywidget is not installed.

    Example:
        >>> widget(state="view=how&head=1").state
        'view=how&head=1'
    """
    _extras.require("linbias.explore.notebook")
    from linbias.explore.notebook import Explorer

    shown = frame.content_of(data.results() if results is None else results, model)
    return Explorer(data=frame.to_json(shown), state=state)


def read_model(model: str | Path, text: Path, *, limit_tokens: int = 256) -> dict[str, Any]:
    """Run a model on a text and pack what it makes of it for `page` and `widget`, by PyTorch.

    Its attention weights, what each token cost it and what it expected instead. A model without
    linear biases is shown without slopes, and one that is not causal with whole matrices and
    without losses. A text with more tokens than the page holds is cut.

    Args:
        model: A folder, or the name of a model on the hub. Of a run of `linbias extrapolate` or a
            model in it, the models of the other methods, of the same length and seed, are shown
            beside it.
        text: File of UTF-8 text.
        limit_tokens: Show at most this many tokens, in [1, 1024].

    Returns:
        JSON values.

    Raises:
        ValueError: The text cannot be read or is empty, or the model cannot be read or gives no
            weights.

    Example:
        >>> page(model=read_model("output/train", Path("README.md")))  # doctest: +SKIP
    """
    from linbias.explore.model import read

    return read(model, text, limit_tokens=limit_tokens)


def slope_card(place: str) -> str:
    """A script that puts the slope over its line of words into the element of this id.

    The first page of the documentation has it.
    """
    given = ", ".join(map(frame.to_json, (data.example(), read_style("story.css"))))
    start = f"startCard(document.getElementById({frame.to_json(place)}), {given});"
    return f'"use strict";\n(() => {{\n{bundle("slope_story.js")}{start}\n}})();\n'
