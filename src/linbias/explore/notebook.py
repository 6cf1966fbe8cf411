"""The explorer as a widget, for notebooks; loaded when `linbias.explore.widget` is called."""

from typing import Any

import anywidget
import traitlets

from linbias.explore.bundle import bundle, style
from linbias.explore.static import picture


class Explorer(anywidget.AnyWidget):
    """The page in a cell. Its `state` follows what the reader does, and shows what Python sets."""

    _esm = f"{bundle('widget.js')}\nexport default {{ render: renderWidget }};\n"
    stylesheet = traitlets.Unicode(style()).tag(sync=True)
    data = traitlets.Unicode("{}").tag(sync=True)
    state = traitlets.Unicode("").tag(sync=True)

    def _repr_mimebundle_(self, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """What a cell keeps: the widget, and a picture for pages that cannot run it."""
        shown, metadata = super()._repr_mimebundle_(**options)
        words = "The explorer of linbias, a widget that a running notebook draws"
        return {**shown, "text/plain": words, "image/svg+xml": picture()}, metadata
