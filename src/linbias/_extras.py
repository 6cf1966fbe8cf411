"""The parts of linbias that need more than the base install, and how an error says so."""

import re
import sys
from functools import cache
from importlib import metadata
from importlib.util import find_spec

# A part, the extra that brings what it needs, and the packages that it imports at once.
PARTS = {
    "linbias.torch": ("torch", ("torch",)),
    "linbias.compat.fairseq": ("torch", ("torch",)),
    "linbias.compat.flash_attn": ("torch", ("torch",)),
    "linbias.compat.labml": ("torch", ("torch",)),
    "linbias.jax": ("jax", ("jax",)),
    "linbias.jax.flax": ("jax", ("jax", "flax")),
    "linbias.explore.notebook": ("notebook", ("anywidget",)),
    "linbias.models": ("lm", ("torch", "transformers", "tokenizers", "safetensors")),
    "linbias.models.passages": ("embed", ("sentence_transformers",)),
    "linbias.data": ("lm", ("tokenizers",)),
    "linbias.lm": (
        "lm",
        ("torch", "transformers", "accelerate", "tokenizers", "matplotlib"),
    ),
}


def missing(part: str) -> tuple[str, ...]:
    """The packages that a part needs and that are not installed; nothing is imported."""
    return tuple(package for package in PARTS[part][1] if not _is_installed(package))


def require(part: str) -> None:
    """Raise, with the line that installs them, unless a part's packages are there and new enough.

    Raises:
        ModuleNotFoundError: One is not installed.
        ImportError: One is older than pyproject.toml allows.
    """
    lacking = missing(part)
    install = f"pip install 'linbias[{PARTS[part][0]}]'"
    if lacking:
        words = f"{', '.join(lacking)}, which {'is' if len(lacking) == 1 else 'are'} not installed"
        for package in lacking:
            until = _asked_of(package)[1]
            if until and _numbers(until) <= sys.version_info:
                words += (
                    f"; {package} had no release for Python {until} when this linbias was made"
                )
                install = f"take an older Python, or try pip install {package}"
        raise ModuleNotFoundError(f"{part} needs {words}: {install}", name=lacking[0])
    for package in PARTS[part][1]:
        oldest, installed = _asked_of(package)[0], _version(package)
        if oldest and installed and _numbers(installed) < _numbers(oldest):
            words = f"{package} {oldest} or later, and {installed} is installed"
            raise ImportError(f"{part} needs {words}: {install}", name=package)


@cache
def _asked_of(package: str) -> tuple[str, str]:
    """What pyproject.toml asks: the oldest version, and the Python from which on there is none."""
    try:
        requirements = metadata.requires("linbias") or []
    except metadata.PackageNotFoundError:  # a checkout on the path
        requirements = []
    for words in requirements:
        if asked := re.match(rf"{package.replace('_', '-')}>=([\d.]+)", words):
            until = re.search(r'python_version < "([\d.]+)"', words)
            return asked[1], until[1] if until else ""
    return "", ""


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _numbers(version: str) -> tuple[int, ...]:
    """2.13 of "2.13.0a0+git": enough to compare what is released."""
    release = re.match(r"[\d.]*\d", version)
    return tuple(map(int, release[0].split("."))) if release else ()


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):  # refused by a hook, or half loaded
        return False
