"""What a processor is called, and how one is held to less than it has."""

import os
import subprocess
import sys

import pytest

from linbias import _machine
from linbias.kernels import core


def pretend(monkeypatch, maker: str, family: int, flags: str) -> None:
    named = {"vendor_id": maker, "cpu family": family, "model name": "A(R)  B", "flags": flags}
    lines = "".join(f"{name}\t: {value}\n" for name, value in named.items())
    monkeypatch.setattr(_machine, "_cpuinfo", lambda: lines)


@pytest.mark.parametrize(
    ("maker", "family", "flags", "name", "kind"),
    [
        ("AuthenticAMD", 26, "avx2 avx512f avx512_bf16", "A B Zen 5", "AMD Zen 5"),
        ("AuthenticAMD", 25, "avx2 avx512f avx512_bf16", "A B Zen 4", "AMD Zen 4"),
        ("AuthenticAMD", 25, "avx2", "A B with AVX2", "AMD with AVX2"),
        (
            "AuthenticAMD",
            27,
            "avx512f avx512_bf16",
            "A B with AVX-512 and bfloat16",
            "AMD with AVX-512 and bfloat16",
        ),
        ("GenuineIntel", 26, "avx2", "A B with AVX2", "Intel with AVX2"),
        ("GenuineIntel", 6, "avx2 avx512f", "A B with AVX-512", "Intel with AVX-512"),
        ("GenuineIntel", 6, "avx512f avx512_bf16 amx_bf16", "A B with AMX", "Intel with AMX"),
        ("GenuineIntel", 6, "sse4_2", "A B without AVX2", "Intel without AVX2"),
    ],
)
def test_a_name_tells_what_the_system_hides(maker, family, flags, name, kind, monkeypatch):
    monkeypatch.delenv("LINBIAS_MAX_CPU_TARGET", raising=False)
    pretend(monkeypatch, maker, family, flags)
    assert _machine.processor() == name
    assert _machine.kind() == kind


def test_a_system_that_tells_nothing_is_of_unknown_kind(monkeypatch):
    monkeypatch.setattr(_machine, "_cpuinfo", str)
    monkeypatch.setattr(_machine.platform, "processor", lambda: "arm")
    assert _machine.processor() == "arm of unknown kind"
    assert _machine.kind() == "processor of unknown kind"


def test_a_processor_is_held_to_less_than_it_has(monkeypatch):
    pretend(monkeypatch, "AuthenticAMD", 25, "avx2 fma f16c avx512f avx512_bf16")
    for most, kind, width in (
        ("baseline", "AMD without AVX2", 0),
        ("avx2", "AMD with AVX2", 3),
        ("avx512", "AMD with AVX-512", 4),
        ("avx512_amx", "AMD Zen 4", 5),
    ):
        monkeypatch.setenv("LINBIAS_MAX_CPU_TARGET", most)
        assert _machine.kind() == kind
        assert len(_machine.cpu_features()) == width
        assert len(_machine.limits()) == (0 if most == "avx512_amx" else 4)
    monkeypatch.setenv("LINBIAS_MAX_CPU_TARGET", "avx3")
    with pytest.raises(ValueError, match=r"LINBIAS_MAX_CPU_TARGET must be one of .*, got 'avx3'"):
        _machine.most()


def run(program: str, most: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "LINBIAS_MAX_CPU_TARGET": most}
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.processes
@pytest.mark.parametrize(("most", "capability"), [("avx2", "AVX2"), ("baseline", "DEFAULT")])
def test_everything_that_computes_is_held_to_it(most, capability):
    if most not in core.targets():
        pytest.skip(f"this processor has no {most}")
    program = """if True:
        import os
        from linbias import _machine
        os.environ |= _machine.limits()
        import torch
        from linbias.kernels import core
        print(core.target(), core.targets()[0], torch.backends.cpu.get_cpu_capability())
        print(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    """
    assert run(program, most).stdout.split() == [most, most, capability, "False"]


def test_a_kind_that_does_not_exist_is_refused_at_once():
    done = run("import linbias.cpu", "AVX2")
    assert "LINBIAS_MAX_CPU_TARGET must be one of ('baseline', 'avx2'," in done.stderr
