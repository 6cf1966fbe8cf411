"""The explorer as a widget, for notebooks; loaded when `linbias.explore.widget` is called."""

from importlib import resources

import anywidget
import traitlets

from linbias.explore.bundle import bundle


class Explorer(anywidget.AnyWidget):
    """The page in a cell. Its `state` follows what the reader does, and shows what Python sets."""

    _esm = f"{bundle('widget.js')}\nexport default {{ render: renderWidget }};\n"
    style = traitlets.Unicode(
        resources.files("linbias.explore").joinpath("style.css").read_text(encoding="utf-8")
    ).tag(sync=True)
    data = traitlets.Unicode("{}").tag(sync=True)
    state = traitlets.Unicode("").tag(sync=True)
