"""What a measurement was made on: processor, cores, versions."""

import os
import platform
import re
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

PACKAGES = ("linbias", "numpy", "torch", "jax", "transformers", "accelerate", "datasets", "triton")

# Of the many flags, those for which kernels are compiled apart.
_FEATURES = ("avx2", "fma", "f16c", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve")


def processor() -> str:
    """The processor's name, as the system tells it, and what that may hide: "Zen 5", or "with AMX" for a matrix unit."""
    match = re.search(r"^model name\s*:\s*(.+)$", _cpuinfo(), re.MULTILINE)
    name = match[1] if match else platform.processor() or platform.machine()
    name = " ".join(name.replace("(R)", "").replace("(TM)", "").split())
    if made_by_amd() and re.search(r"^cpu family\s*:\s*26$", _cpuinfo(), re.MULTILINE):
        return f"{name} Zen 5"  # which multiplies twice as fast as the one before it
    return f"{name} with AMX" if "amx_bf16" in cpu_features() else name


def cpu_features() -> list[str]:
    """The instruction sets that matter here and are present, as far as the system tells."""
    match = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", _cpuinfo(), re.MULTILINE)
    flags = match[1].split() if match else []
    return [feature for feature in _FEATURES if feature in flags]


def made_by_amd() -> bool:
    """Whether the processor is one of AMD's, as far as the system tells."""
    return "AuthenticAMD" in (_cpuinfo() or platform.processor())


def num_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def versions() -> dict[str, str | None]:
    """Versions of the packages that results depend on; None for one that is not installed."""
    return {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}}


def now() -> str:
    """The time in UTC, to the minute."""
    return f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpuinfo() -> str:
    path = Path("/proc/cpuinfo")
    return path.read_text() if path.exists() else ""
