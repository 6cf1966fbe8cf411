"""What an installed wheel must do on every CPU target here; release/wheels.py starts it."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np

import linbias
from linbias import cpu
from linbias.kernels import core

# How far the core may be from the definition in float64: some roundings of the type.
ALLOWED = {"float64": 1e-12, "float32": 1e-5, "float16": 2e-3}
# The flags in /proc/cpuinfo with which a CPU target must be chosen.
FLAGS = {
    "avx2": {"avx2", "fma"},
    "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"},
    "avx512_bf16": {"avx512f", "avx512_bf16"},
    "avx512_amx": {"avx512_bf16", "amx_bf16", "amx_tile"},
}
CALLS = {
    "causal": {},
    "symmetric": {"causal": False},
    "asymmetric": {"causal": False, "right_slopes": [0.0, 0.2, np.inf, 0.4]},
    "padded": {"key_range": [[7, 300], [0, 291]]},
}


def main() -> None:
    assert not any(map(shutil.which, ("cc", "c++", "gcc", "g++", "clang", "clang++")))
    assert core.WHY_MISSING is None, core.WHY_MISSING
    cpuinfo = Path("/proc/cpuinfo").read_text()
    flags = set(cpuinfo.partition("\nflags")[2].partition("\n")[0].split())
    expected = ["baseline", *(target for target, needed in FLAGS.items() if needed <= flags)]
    assert core.targets() == expected[::-1], (core.targets(), expected)
    assert core.target() == core.targets()[0]
    for target in core.targets():
        core.force_target(target)
        for name, options in CALLS.items():
            check(target, name, options)
    core.force_target(None)
    check_commands()
    version = "{}.{}".format(*sys.version_info)
    print(f"    python{version}, numpy {np.__version__}: {', '.join(core.targets())}", flush=True)


def check(target: str, name: str, options: dict) -> None:
    """Output and lse equal the definition."""
    rng = np.random.default_rng(0)
    slopes = [0.5, 0.1, 0.0, 1.0]
    for dtype, allowed in ALLOWED.items():
        q = rng.normal(size=(2, 4, 129, 24)).astype(dtype)
        k, v = rng.normal(size=(2, 2, 2, 300, 24)).astype(dtype)
        found = cpu.attention(q, k, v, slopes, return_lse=True, **options)
        expected = linbias.attention(q, k, v, slopes, return_lse=True, **options)
        for one, other in zip(found, expected, strict=True):
            error = np.abs(one.astype(np.float64) - other).max() / max(1, np.abs(other).max())
            assert error <= allowed, f"{target}, {name}, {dtype}: {error}"


def check_commands() -> None:
    """The command runs, and says that the core works."""
    assert "0.5110" in subprocess.check_output(["linbias", "explain"], text=True)
    found = json.loads(subprocess.check_output(["linbias", "doctor", "--json"]))
    assert found["implementations"] == {"numpy cpu": {"cpu": None}}


main()
