"""What was here is in `linbias.models`."""

raise ImportError(
    "linbias.transformers: its names are those of linbias.models now (from linbias.models import fuse)",
    name="linbias.transformers",
)
