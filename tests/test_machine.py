"""What a record calls the processor that it was made on."""

import pytest

from linbias import _machine


@pytest.mark.parametrize(
    ("maker", "family", "flags", "expected"),
    [
        ("AuthenticAMD", 26, "avx2 avx512f", "A B Zen 5"),
        ("AuthenticAMD", 25, "avx2 avx512f", "A B"),
        ("GenuineIntel", 26, "avx2", "A B"),
        ("GenuineIntel", 6, "avx2 amx_bf16", "A B with AMX"),
    ],
)
def test_a_name_tells_what_the_system_hides(
    maker: str, family: int, flags: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = (
        f"vendor_id\t: {maker}\ncpu family\t: {family}\nmodel name\t: A(R)  B\nflags\t: {flags}\n"
    )
    monkeypatch.setattr(_machine, "_cpuinfo", lambda: lines)
    assert _machine.processor() == expected
