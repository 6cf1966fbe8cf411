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
    return {
        **{"case": case, "inputs": "random normal", "mode": "forward", **sizes, **times},
        **{"flop": 8e9, "bytes": 2e6, **here, "implementation": implementation, **more},
    }


def test_a_claim_is_what_the_records_say(gpu):
    lines = [
        timed("triton", 2.0, work_kept=0.25),
        timed("flex", 5.0),
        timed("sdpa flash, no bias", 1.5),
        timed("triton", 700.0, "causal-40960"),
        timed("graph: triton, key_bound", 0.5, "decode-65536"),
        timed("graph: flex", 2.0, "decode-65536"),
        timed("triton, key_bound", 4.0, "decode-65536"),
    ]
    claims = gpu.page.claims(lines, [4096, 16384])
    assert sum("at 4,096 tokens" in claim for claim in claims) == 2
    sizes = "bfloat16, batch 1, 32 heads of 128, 4,096 keys, random normal"
    place = "On an Some GPU: "
    assert claims[1] == (
        f"{place}forward at 4,096 tokens ({sizes}, 25.0% of the work kept) takes 2.000 ms: "
        "2.50 times as fast as flex, 0.75 times as fast as sdpa flash, no bias."
    )
    token = f"{place}forward of one token against a cache ({sizes}"
    assert f"{token}, as a graph) takes 0.500 ms: 4.00 times as fast as flex." in claims
    assert f"{token}) takes 4.000 ms: no peer ran." in claims
    for missing in (
        *("forward+backward at 4,096 tokens", "forward at 16,384 tokens", "the contract's tests"),
        *("forward+backward with forget gates", "tests under compute-sanitizer"),
        "a sequence in shards",
    ):
        assert f"{place}{missing}: not measured." in claims


def test_failed_tests_and_those_that_were_not_reached_are_told(gpu):
    lines = [{"case": "contract", "num_tests": 3}]
    ended = {"a": "passed", "b": "failed"}
    lines += [{"case": "contract", "test": n, "outcome": how} for n, how in ended.items()]
    assert gpu.page.claims(lines, [])[0] == "the contract's tests: 1 of 3 passed, failed: b."


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
    text = gpu.page.page(gpu.timing.lines_so_far(options), fared, [4096])
    assert "Some GPU, torch 2.11, commit abc, 2026-01-01" in text
    assert "- speed: stopped\n- decode: not begun" in text
    # A quarter of the product takes 0.25 ms at the rate that the device reaches, and the copy 0.1.
    assert "| triton | 2.000 (1.800 to 2.200) | 1.00 | 8.00 | - |" in text
    assert "| flash_attn | left out: ImportError: none / here | - | - | - |" in text
    assert "Another" not in text


def test_the_page_of_a_run_without_records_can_be_read(gpu):
    assert "not measured" in gpu.page.page([], {"contract": "not begun"}, [4096])


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
    assert "flex" in gpu.timing.left_out_before(fields, options)
    assert gpu.timing.lines_so_far(options)[0]["left_out"] == "ValueError: no such backend"
