"""What a measurement was made on: processor, cores, versions."""

import os
import platform
import re
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

PACKAGES = ("linbias", "numpy", "torch", "jax", "transformers", "accelerate", "datasets", "triton")

# The core's CPU targets: the flags that each has beyond the one before, as far as kernels are
# compiled for them, and what holds oneDNN, PyTorch, MKL and XLA to it.
_KINDS = {
    "baseline": ((), ("SSE41", "default", "SSE4_2", "SSE4_2")),
    "avx2": (("avx2", "fma", "f16c"), ("AVX2", "avx2", "AVX2", "AVX2")),
    "avx512": (("avx512f",), ("AVX512_CORE", "avx512", "AVX512", "AVX512")),
    "avx512_bf16": (("avx512_bf16",), ("AVX512_CORE_BF16", "avx512", "AVX512_E3", "AVX512")),
    "avx512_amx": (("amx_bf16",), ()),
}
_ARM = ("asimd", "sve")
_WORDS = {
    "amx_bf16": "AMX",
    "avx512_bf16": "AVX-512 and bfloat16",
    "avx512f": "AVX-512",
    "avx2": "AVX2",
    "asimd": "NEON",
}
# AMD's families with the same instructions, of which the later multiplies twice as fast.
_ZEN = {"25": "Zen 4", "26": "Zen 5"}
_LIMITS = (
    "ONEDNN_MAX_CPU_ISA={}",
    "ATEN_CPU_CAPABILITY={}",
    "MKL_ENABLE_INSTRUCTIONS={}",
    "XLA_FLAGS=--xla_cpu_max_isa={}",
)


def processor() -> str:
    """The processor's name, and what decides there: "Intel Xeon Processor with AMX"."""
    match = re.search(r"^model name\s*:\s*(.+)$", _cpuinfo(), re.MULTILINE)
    name = match[1] if match else platform.processor() or platform.machine()
    name = " ".join(name.replace("(R)", "").replace("(TM)", "").split())
    return f"{name} {_what_decides()}"


def cpu_features() -> list[str]:
    """The instruction sets that matter here, are present, and lie not beyond `most`."""
    match = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", _cpuinfo(), re.MULTILINE)
    flags = match[1].split() if match else []
    kinds = list(_KINDS.values())[: list(_KINDS).index(most() or "avx512_amx") + 1]
    allowed = [feature for features, _ in kinds for feature in features]
    return [feature for feature in (*allowed, *_ARM) if feature in flags]


def most() -> str | None:
    """The kind of processor to act as: the environment's LINBIAS_MAX_CPU_TARGET.

    Raises:
        ValueError: There is no such kind.
    """
    kind = os.environ.get("LINBIAS_MAX_CPU_TARGET") or None
    if kind is not None and kind not in _KINDS:
        raise ValueError(f"LINBIAS_MAX_CPU_TARGET must be one of {(*_KINDS,)}, got {kind!r}")
    return kind


def limits() -> dict[str, str]:
    """The environment that holds other libraries to `most`, if they have not been loaded."""
    kind = most()
    values = _KINDS[kind][1] if kind else ()
    return dict(
        line.format(value).split("=", 1) for line, value in zip(_LIMITS, values, strict=False)
    )


def made_by_amd() -> bool:
    """Whether the processor is one of AMD's, as far as the system tells."""
    return "AuthenticAMD" in (_cpuinfo() or platform.processor())


def kind() -> str:
    """What decides which code is fast here, in words: "AMD Zen 4", "Intel with AMX"."""
    makers = {"AuthenticAMD": "AMD", "GenuineIntel": "Intel"}
    maker = next((name for mark, name in makers.items() if mark in _cpuinfo()), "processor")
    return f"{maker} {_what_decides()}"


def _what_decides() -> str:
    if not _cpuinfo():
        return "of unknown kind"
    features = cpu_features()
    family = re.search(r"^cpu family\s*:\s*(\d+)$", _cpuinfo(), re.MULTILINE)
    if made_by_amd() and "avx512_bf16" in features and family and family[1] in _ZEN:
        return _ZEN[family[1]]
    return next(
        (f"with {words}" for name, words in _WORDS.items() if name in features), "without AVX2"
    )


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
