"""The script for a GPU (`evidence/benchmarks/bench_gpu.py`), as far as it needs none."""

import json
import sys
from types import SimpleNamespace

import pytest

from documents import ROOT


@pytest.fixture
def gpu(monkeypatch):
    """The modules of the script."""
    monkeypatch.syspath_prepend(str(ROOT / "evidence" / "benchmarks"))
    before = set(sys.modules)
    from gpu import page, timing

    yield SimpleNamespace(page=page, timing=timing)
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("gpu", "record"):
            del sys.modules[name]


def timed(implementation, p50, case="causal-4096", **more):
    sizes = {"B": 1, "H": 32, "G": 32, "T": 4096, "S": 4096, "D": 128, "dtype": "bfloat16"}
    times = {"p20_ms": p50 * 0.9, "p50_ms": p50, "p80_ms": p50 * 1.1}
    here = {"device": "cuda", "machine": "Some GPU", "commit": "abc", "date": "2026-01-01"}
    here["versions"] = {"torch": "2.11"}
    kind = {"case": case, "inputs": "random normal", "mode": "forward", "peak_memory_bytes": None}
    made = {"flop": 8e9, "bytes": 2e6, "implementation": implementation}
    return {**kind, **sizes, **times, **made, **here, **more}


def test_a_case_has_a_table_of_what_the_records_say(gpu):
    lines = [
        timed("triton", 2.0, work_kept=0.25, error=1e-3, peak_memory_bytes=2**29),
        timed("triton", 700.0, "causal-40960"),
        timed("flex", 5.0),
        timed("graph: triton, key_bound", 0.5, "decode-65536"),
    ]
    text = gpu.page.page(lines, {})
    first, other, decode = text.split("**causal-4096, forward**")[1].split("**")[::2][:3]
    assert first.startswith(" (bfloat16, B=1, H=32, D=128, random normal)\n")
    assert "| triton | 2.000 (1.800 to 2.200) | 1.00 | - | 25.0% | 1.0e-03 | 0.50 |\n" in first
    assert "| flex | 5.000 (4.500 to 5.500) | 2.50 | - | - | - | - |" in first
    assert "| triton | 700.000 " in other and "| graph: triton, key_bound | 0.500 " in decode


def test_failed_tests_and_those_that_were_not_reached_are_told(gpu):
    lines = [{"case": "contract", "num_tests": 3}]
    ended = {"a": "passed", "b": "failed"}
    lines += [{"case": "contract", "test": n, "outcome": how} for n, how in ended.items()]
    text = gpu.page.page(lines, {})
    assert "- contract: 1 of 3 passed, failed: b\n- sanitizer: not measured\n" in text


def test_the_page_of_a_run_that_was_cut_says_how_far_it_came(gpu, tmp_path):
    left_out = timed("flash_attn", 0.0, left_out="ImportError: none | here")
    del left_out["p50_ms"]
    rates = [
        {"case": "rates", "implementation": "matrix product", "flop": 8e9, "p50_ms": 1.0},
        {"case": "rates", "implementation": "copy", "bytes": 2e6, "p50_ms": 0.1},
    ]
    lines = [*rates, timed("triton", 2.0, work_kept=0.25), left_out]
    records = tmp_path / "records.jsonl"
    others = json.dumps(timed("triton", 9.0, machine="Another GPU")) + "\n"
    own = "".join(json.dumps(x) + "\n" for x in lines)
    records.write_text(others + own + '{"case": "cut in the mi')
    options = SimpleNamespace(records=records, start=len(others))
    fared = {"speed": "stopped", "decode": "not begun"}
    text = gpu.page.page(gpu.timing.lines_so_far(options), fared)
    assert "Some GPU, torch 2.11, commit abc, 2026-01-01" in text
    assert "- speed: stopped\n- decode: not begun" in text
    # A quarter of the product takes 0.25 ms at the rate that the device reaches, and the copy 0.1.
    assert "| triton | 2.000 (1.800 to 2.200) | 1.00 | 8.00 | 25.0% | - | - |" in text
    assert "| flash_attn | left out: ImportError: none / here | - | - | - | - | - |" in text
    assert "Another" not in text


def test_the_page_of_a_run_without_records_can_be_read(gpu):
    assert "not measured" in gpu.page.page([], {"contract": "not begun"})


@pytest.mark.parametrize("survives", (True, False))
def test_a_peer_that_fails_is_left_out_and_a_device_in_error_ends_the_process(
    gpu, tmp_path, monkeypatch, survives
):
    options = SimpleNamespace(records=tmp_path / "records.jsonl", start=0, failed=False)
    line = timed("", 1.0)
    fields = {key: line[key] for key in ("case", "inputs", "mode", "B", "H", "D")}
    gone: set[str] = set()

    def leave_out(name):
        with gpu.timing.left_out_if_it_fails(fields, name, gone, options):
            raise ValueError("no such backend\nand more")

    def in_error():
        raise RuntimeError("CUDA error: an illegal memory access")

    if survives:
        leave_out("flex")
        assert not options.failed  # of a peer nobody is to blame
        leave_out("graph: triton")
        assert options.failed and gone == {"flex", "graph: triton"}
    else:
        monkeypatch.setattr(gpu.timing, "synchronize", in_error)
        with pytest.raises(SystemExit) as ended:
            leave_out("flex")
        assert ended.value.code == gpu.timing.AGAIN
    assert gpu.timing.lines_so_far(options)[0]["left_out"] == "ValueError: no such backend"
