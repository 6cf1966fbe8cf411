"""The explorer as a widget, for notebooks; loaded when `linbias.explore.widget` is called."""

import anywidget
import traitlets

from linbias.explore.bundle import bundle, style


class Explorer(anywidget.AnyWidget):
    """The page in a cell. Its `state` follows what the reader does, and shows what Python sets."""

    _esm = f"{bundle('widget.js')}\nexport default {{ render: renderWidget }};\n"
    style = traitlets.Unicode(style()).tag(sync=True)
    data = traitlets.Unicode("{}").tag(sync=True)
    state = traitlets.Unicode("").tag(sync=True)
