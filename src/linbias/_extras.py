"""The parts of linbias that need more than the base install, and how an error says so."""

from importlib.util import find_spec

# A part, the extra that brings what it needs, and the packages that it imports at once.
PARTS = {
    "linbias.torch": ("torch", ("torch",)),
    "linbias.compat.chapter_torch": ("torch", ("torch",)),
    "linbias.compat.fairseq": ("torch", ("torch",)),
    "linbias.compat.flash_attn": ("torch", ("torch",)),
    "linbias.compat.labml": ("torch", ("torch",)),
    "linbias.jax": ("jax", ("jax",)),
    "linbias.jax.flax": ("jax", ("jax", "flax")),
    "linbias.explore.notebook": ("notebook", ("anywidget",)),
    "linbias.models": ("lm", ("torch", "transformers", "tokenizers", "safetensors")),
    "linbias.data": ("lm", ("tokenizers",)),
    "linbias.plots": ("plots", ("matplotlib",)),
    "linbias.lm": ("lm", ("torch", "transformers", "accelerate", "tokenizers", "matplotlib", "psutil")),
}  # fmt: skip


def missing(part: str) -> tuple[str, ...]:
    """The packages that a part needs and that are not installed; nothing is imported."""
    return tuple(package for package in PARTS[part][1] if not _is_installed(package))


def require(part: str) -> None:
    """Raise, with the line that installs them, unless the packages of a part are there.

    Raises:
        ModuleNotFoundError: One is not installed.
    """
    lacking = missing(part)
    if lacking:
        words = f"{', '.join(lacking)}, which {'is' if len(lacking) == 1 else 'are'} not installed"
        raise ModuleNotFoundError(
            f"{part} needs {words}: pip install 'linbias[{PARTS[part][0]}]'", name=lacking[0]
        )


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):  # refused by a hook, or half loaded
        return False
