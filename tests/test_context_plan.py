"""The plan of what pieces send (`runs/context_plan.py`), beside what real processes send."""

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import linbias
from documents import ROOT, blocks
from ranks import Ranks
from test_docs import run_script

pytestmark = pytest.mark.processes

planning = run_script("context_plan")
GUIDE = ROOT / "docs/guides/many-machines.md"


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    with Ranks(4) as ranks:
        yield ranks


def drawn(H: int, G: int, n: int, D: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"q": H, "k": G, "v": G}
    return {name: rng.standard_normal((2, heads, n, D)) for name, heads in shapes.items()}


@pytest.mark.parametrize(
    ("H", "G", "edges", "dtype", "options"),
    [
        (8, 8, (0, 512, 1024, 1536, 2048), "float32", {}),
        (8, 2, (0, 512, 1024, 1536, 2048), "float32", {}),
        (8, 2, (0, 700, 700, 1900, 2048), "bfloat16", {}),
        (4, 4, (0, 100, 200, 1100, 2048), "float32", {"causal": False}),
        (4, 1, (0, 30, 60, 90, 120), "float64", {"tolerance": 1e-6}),
    ],
)
def test_the_plan_is_what_processes_send_to_the_byte(
    four: Ranks, H: int, G: int, edges: tuple[int, ...], dtype: str, options: dict[str, Any]
) -> None:
    arrays = drawn(H, G, edges[-1], 16)
    cuts = [slice(a, b) for a, b in itertools.pairwise(edges)]
    given = [({n: x[:, :, rows] for n, x in arrays.items()}, dtype, options) for rows in cuts]
    really = four.run("pieces:sent_in_a_step", given)
    q, k = (torch.tensor(arrays[name], dtype=getattr(torch, dtype)) for name in "qk")
    wide = torch.float64 if dtype == "float64" else torch.float32
    slopes = torch.tensor(linbias.slopes(H), dtype=wide)
    with torch.no_grad():
        planned = planning.simulate(q, k, slopes, edges, **options)
    forward = [sum(x) for x in zip(planned.sent, planned.gathered, strict=True)]
    assert forward == [sent for sent, _ in really]
    assert planned.step() == [sent for _, sent in really]
    assert sum(planned.sent) == sum(planned.fetched) > 0
    # It is about windows, not about everything.
    everything = 3 * k.nbytes * 2
    assert sum(planned.sent) < everything or edges[-1] == 120


@torch.no_grad()
def test_longer_sequences_take_the_most_that_any_rank_needed() -> None:
    arrays = drawn(4, 2, 4096, 16)
    q, k = (torch.tensor(arrays[name][:1], dtype=torch.float32) for name in "qk")
    slopes = torch.tensor(linbias.slopes(4), dtype=torch.float32)
    short = planning.simulate(q, k, slopes, range(0, 4097, 1024))
    token = 2 * 16 * 4
    most = [max(counts[0][g] for counts in short.needs) for g in range(2)]
    for tokens in (4096, 1 << 24):
        long = planning.extrapolate(short, tokens, token)
        n = tokens // 4
        assert long.fetched == [token * sum(min(m, rank * n) for m in most) for rank in range(4)]
        assert all(counts[1] == [0, 0] for counts in long.needs)  # causal: nothing on the right
        assert long.gathered == short.gathered
    assert sum(short.fetched) <= sum(planning.extrapolate(short, 4096, token).fetched)


def test_the_other_ways_by_hand() -> None:
    machine = planning.Machine(25, 50, 200)
    # 4 ranks, 1,024 tokens, 8 heads of 64, 2 for keys and values, 2 bytes each.
    found = planning.others(8, 2, 64, 1024, 4, 2, machine)
    piece = 256 * 2 * 2 * 64 * 2  # K and V
    assert (
        found["all-gather"]["forward_bytes"] == found["all-gather"]["backward_bytes"] == 3 * piece
    )
    assert found["ring"]["backward_bytes"] == 2 * found["ring"]["forward_bytes"] == 6 * piece
    # To each of 3 others the 2 heads of q and out that it attends with, and a key/value head, which two ranks share.
    assert found["ulysses"]["forward_bytes"] == 3 * 256 * (2 * 2 + 2 * 1) * 64 * 2
    assert planning.others(8, 2, 64, 1024, 16, 2, machine)["ulysses"] is None
    flops = 4 * 64 * 8 * 1024**2 / 2 / 4 * 3.5
    assert found["ring"]["attention_ms"] == pytest.approx(flops / 200e12 * 1e3, rel=1e-3)
    sent = 9 * piece / 25e9 + 9 * 50e-6
    assert found["ring"]["communication_ms"] == pytest.approx(sent * 1e3, rel=1e-3)
    assert found["ring"]["longer"] == "communication"
    assert [found[name]["messages"] for name in found] == [2 * 2, 3 * 3, 8 * 3]


def test_pairs_that_are_read() -> None:
    rows = np.arange(1, 101)
    for window in (7, 100, 1000):
        assert planning.pairs_read(window, 100) == pytest.approx(np.minimum(rows, window).sum(), abs=51)  # fmt: skip


def test_a_run_of_random_activations_writes_records(tmp_path: Any) -> None:
    path = tmp_path / "plan.jsonl"
    sizes = "--heads 4 --key-heads 2 --head-size 8 --longest 512 --tokens 256 512 4096 --ranks 2 4"
    for _ in range(2):  # the second run takes the place of the first
        planning.main(["--random", *sizes.split(), "--records", str(path)])
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(r["ranks"], r["tokens"]) for r in records] == [
        (ranks, tokens) for ranks in (2, 4) for tokens in (256, 512, 4096)
    ]
    assert [r["simulated"] for r in records] == [True, True, False] * 2
    assert planning.table(records).count("\n") == 3 + len(records)


def test_queries_and_keys_are_those_of_the_model(tmp_path: Any) -> None:
    from linbias.models import LinbiasConfig, LinbiasForCausalLM

    torch.manual_seed(0)
    config = LinbiasConfig(vocab_size=256, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2)  # fmt: skip
    model = LinbiasForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "model")
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(256)) * 20)
    with torch.no_grad():
        found = planning.of_model(tmp_path / "model", [text], 5000, torch.float32, "tiny")
        ids = torch.tensor(list(text.read_bytes()[:5000]))[None]
        inputs = model.model(ids, output_hidden_states=True).hidden_states
        for (q, k), block, hidden in zip(found.layers, model.model.layers, inputs, strict=False):
            parts = block.attention.project_in(block.norm(hidden))
            for ours, theirs, heads in ((q, parts[0], 4), (k, parts[1], 2)):
                theirs = theirs.unflatten(-1, (heads, 8)).transpose(1, 2)
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert found.slopes.tolist() == linbias.slopes(4).tolist()
    path = tmp_path / "plan.jsonl"
    words = ["--model", tmp_path / "model", "--text", text, "--records", path, "--longest", 1024]
    planning.main([str(x) for x in (*words, "--tokens", 1024, 2048, "--ranks", 2)])
    assert len(path.read_text().splitlines()) == 2
    with pytest.raises(SystemExit, match="--text: must hold 9,999 bytes, got 5,120"):
        planning.of_model(tmp_path / "model", [text], 9999, torch.float32, "tiny")


def test_the_script_of_the_guide_runs_on_two_processes(tmp_path: Any) -> None:
    script = tmp_path / "pieces.py"
    script.write_text(blocks(GUIDE, "python")[0])
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script]
    done = subprocess.run([sys.executable, *launch], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for rank in range(2):  # in any order, and perhaps in one line
        assert done.stdout.count(f"rank {rank}: 4096 tokens") == 1
