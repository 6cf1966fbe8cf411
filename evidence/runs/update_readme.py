"""Rewrite the tables of README.md and docs/ from records, the plot of the comparison and what the explorer shows of it.

    python evidence/runs/update_readme.py

Nothing measured is typed by hand.
"""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from matplotlib import rc_context

import extrapolation_report
from linbias._run.files import write_whole
from linbias.lm.report import figures
from markers import fill

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "evidence" / "records"
RESULTS = ROOT / "src" / "linbias" / "explore" / "results.json"
# What the README shows of it: implementations, and cases with their headings.
FEW = {
    "cpu": "linbias",
    "flex, window mask": "FlexAttention, window per head",
    "sdpa, no bias": "PyTorch's SDPA without a bias",
}
FEW_CASES = {
    "causal-2048": "2,048",
    "causal-8192": "8,192",
    "causal-32768": "32,768",
    "bfloat16-8192": "8,192, bfloat16",
    "training-4096": "4,096, with gradients",
}
ORDER = ("cpu", "blocked", "sdpa mask", "flex", "flex, window mask", "sdpa, no bias")
SHOWN = (
    "short-256",
    "causal-2048",
    "causal-8192",
    "causal-32768",
    "bfloat16-8192",
    "symmetric-8192",
    "training-4096",
)


def newest_by_machine(prefix: str) -> list[list[dict[str, Any]]]:
    """The records of each machine's newest file that has cases of this name, the newest machine first."""
    files = sorted(
        RECORDS.glob("*-????-??-??.jsonl"), key=lambda path: (path.stem[-10:], path.name)
    )
    found: dict[str, list[dict[str, Any]]] = {}
    for path in reversed(files):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        if any(r["case"].startswith(prefix) for r in records):
            found.setdefault(path.stem[:-11], records)
    if not found:
        raise SystemExit(f"update_readme: no file in {RECORDS} has cases {prefix!r}")
    return list(found.values())


def newest_records(prefix: str) -> list[dict[str, Any]]:
    """The records of the newest machine file that has cases of this name."""
    return newest_by_machine(prefix)[0]


def speed_table() -> str:
    """The medians that the README shows, for each kind of processor that records exist for."""
    lines = ["| ms, length | " + " | ".join(FEW_CASES.values()) + " |"]
    lines.append("|---" * (len(FEW_CASES) + 1) + "|")
    made = []
    for records in newest_by_machine("causal-8192"):
        timed = [r for r in records if r.get("inputs") == "random normal"]
        last = {(r["implementation"], r["case"]): r for r in timed}
        ours = last["cpu", "causal-8192"]
        processor = ours["machine"].removesuffix(" 2 cores").replace(" Processor", "")
        for name, words in FEW.items():
            found = [last.get((name, case)) for case in FEW_CASES]
            cells = [f"{r['p50_ms']:,.0f}" if r else "-" for r in found]
            lines.append(f"| {words}, {processor} | " + " | ".join(cells) + " |")
        made.append(f"{processor}: torch {ours['versions']['torch']}, {ours['date']}")
    text = (
        f"Medians, 8 heads of 64, causal, random inputs, two threads, `make bench` ({'; '.join(made)});"
        f" short lengths and more peers: [docs/kernels.md](docs/kernels.md)."
    )
    return "\n".join([*lines, "", text])


def speed_sentence(whole_table: str) -> str:
    """What the table of README comes to."""
    records = newest_records("causal-8192")
    medians = {(r.get("implementation"), r["case"]): r.get("p50_ms") for r in records}

    def times(peer: str, case: str) -> str:
        return f"{medians[peer, case] / medians['cpu', case]:.1f} times"

    return (
        f"With 8 heads of 64 on two cores of an {records[0]['machine'].removesuffix(' 2 cores')}, it is"
        f" {times('sdpa, no bias', 'causal-8192')} as fast as PyTorch's own attention without any bias at 8,192 tokens,"
        f" {times('sdpa, no bias', 'training-4096')} in training at 4,096, and {times('flex, window mask', 'causal-32768')} as fast as"
        f" FlexAttention at 32,768 ([the whole table]({whole_table}))."
    )


def benchmark_table() -> str:
    """Median milliseconds and the spread of `blocked` and its peers."""
    records = newest_records("causal-8192")
    timed = [r for r in records if r["case"] in SHOWN and r["inputs"] == "random normal"]
    columns = [case for case in SHOWN if any(r["case"] == case for r in timed)]
    names = [name for name in ORDER if any(r["implementation"] == name for r in timed)]
    lines = [
        "| ms, median (p20 to p80) | " + " | ".join(columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for name in names:
        cells = []
        for case in columns:
            found = [r for r in timed if (r["implementation"], r["case"]) == (name, case)]
            r = found[-1] if found else None
            cells.append(
                f"{r['p50_ms']:,.0f} ({r['p20_ms']:,.0f} to {r['p80_ms']:,.0f})" if r else "-"
            )
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    r = timed[-1]
    memory = [
        r
        for r in newest_records("memory-")
        if r["case"].startswith("memory-") and r["implementation"] == "blocked"
    ]
    text = (
        f"H={r['H']}, D={r['D']}, B=1 (short: 8), float32 and forward unless the name says otherwise (training: forward"
        f" and backward); {r['inputs']} inputs; {r['machine']}, {r['threads']} threads, torch {r['versions']['torch']},"
        f' {r["date"]}, `make bench`. "sdpa, no bias" computes something else and stands here for scale;'
        " FlexAttention has no backward pass on CPUs; at 32,768 only what takes seconds was measured."
    )
    if memory:
        m = memory[-1]
        text += (
            f" Memory of `blocked`, forward and backward at {m['T']:,} tokens: {m['peak_memory_bytes'] / 2**30:.2f} GiB"
            " above its inputs, output and gradients included."
        )
    return "\n".join([*lines, "", text])


def short_tables() -> str:
    """Ours beside the faster peer at every length, a table for each kind of processor."""
    tables = map(short_table, newest_by_machine("bfloat16-forward-D"))
    text = (
        "About 4,096 tokens in all, 8 heads, causal, random normal inputs, `python evidence/benchmarks/bench_short.py`; the peers are"
        " SDPA without any bias, which computes less, and with the bias as a mask (up to 2,048)."
    )
    return "\n\n".join([*tables, text])


def short_table(of_machine: list[dict[str, Any]]) -> str:
    """Ours beside the faster peer at every length, on one machine."""
    pattern = re.compile(r"(float32|bfloat16)-(forward|backward)-D(\d+)-(\d+)")
    records = [r for r in of_machine if pattern.fullmatch(r["case"])]
    kinds = list(dict.fromkeys(pattern.fullmatch(r["case"]).groups()[:3] for r in records))
    lengths = sorted({r["T"] for r in records})
    lines = [
        "| linbias ms, times the faster SDPA | " + " | ".join(f"{n:,}" for n in lengths) + " |"
    ]
    lines.append("|---" * (len(lengths) + 1) + "|")
    for dtype, mode, size in sorted(kinds):
        cells = []
        for length in lengths:
            case = f"{dtype}-{mode}-D{size}-{length}"
            medians = {r["implementation"]: r["p50_ms"] for r in records if r["case"] == case}
            ours = medians.pop("cpu", None)
            cells.append(f"{ours:,.1f}, {min(medians.values()) / ours:.2f} x" if ours else "-")
        words = "forward" if mode == "forward" else "forward + backward"
        lines.append(f"| {dtype}, {words}, head size {size} | " + " | ".join(cells) + " |")
    r, target = records[-1], next(r["target"] for r in records if r.get("target"))
    text = f"{r['machine']} (target {target}), {r['threads']} threads, torch {r['versions']['torch']}, {r['date']}."
    return "\n".join([*lines, "", text])


def neighbours_table() -> str:
    """What a program takes beside busy processes, by how its threads wait."""
    ways = {
        "spins default": "as PyTorch comes",
        "spins watched": "the commands",
        "spins passive": "`OMP_WAIT_POLICY=PASSIVE`",
        "spins one thread": "`OMP_NUM_THREADS=1`",
    }
    found = [r for r in newest_records("token beside") if " beside " in r["case"]]
    last = {(r["case"], r["implementation"]): r for r in found}
    lines = ["| | reading 512 tokens | a token |", "|---|---|---|"]
    for way, words in ways.items():
        cells = [
            " / ".join(
                f"{last[f'{work} beside {n} busy', way]['p50_ms']:,.{digits}f}" for n in range(3)
            )
            for work, digits in (("read", 0), ("token", 1))
        ]
        lines.append(f"| {words} | " + " | ".join(cells) + " |")
    r = found[-1]
    text = (
        f"Four layers of BLOOM-560m's shape, float32; {r['machine']}, torch {r['versions']['torch']}, {r['date']},"
        " `python evidence/benchmarks/bench_neighbours.py`."
    )
    return "\n".join([*lines, "", text])


def jax_table() -> str:
    """Median milliseconds of linbias.jax beside what a JAX user can write, and memory."""
    records = newest_records("jax-")
    found = [r for r in records if r["case"].startswith("jax-")]
    cases = list(dict.fromkeys(r["case"] for r in found))
    lines = ["| | " + " | ".join(case.removeprefix("jax-") for case in cases) + " |"]
    lines.append("|---" * (len(cases) + 1) + "|")
    for name in dict.fromkeys(r["implementation"] for r in found):
        cells = []
        for case in cases:
            own = [r for r in found if (r["case"], r["implementation"]) == (case, name)]
            if not own:
                cells.append("-")
            elif own[-1]["peak_memory_bytes"]:
                cells.append(f"{own[-1]['peak_memory_bytes'] / 2**30:.2f} GiB")
            else:
                r = own[-1]
                cells.append(f"{r['p50_ms']:,.0f} ({r['p20_ms']:,.0f} to {r['p80_ms']:,.0f})")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    text = (
        "Milliseconds, median (p20 to p80); memory above the inputs; training and memory: forward and backward. H=8, D=64, B=1,"
        f' causal, float32, random normal inputs; "jax, bias" is `jax.nn.dot_product_attention` with the bias made beforehand,'
        f" which takes 32 GiB at 32,768. {found[-1]['machine']}, {found[-1]['date']}, `python evidence/benchmarks/bench_jax.py`."
    )
    return "\n".join([*lines, "", text])


def experiment_figure(*, dark: bool = False) -> bytes:
    """The plot of the comparison, as an SVG file's bytes."""
    sys.path.append(str(ROOT / "docs"))
    from pictures import compact

    words = "Loss by test length"
    with rc_context({"svg.hashsalt": "linbias"}):
        figure = figures.loss_by_length(list(extrapolation_report.evaluations()))
        return compact(figures.svg_file(figure, words, dark=dark)).encode()


def extrapolation_table(*reads: str) -> str:
    """The loss of every method at every length, and how it was measured."""
    found = extrapolation_report.Found()
    tables = [extrapolation_report.table(read, found) for read in reads]
    return "\n\n".join([*tables, extrapolation_report.how_made(found)])


def learned_steps_tables() -> str:
    """ALiBi beside the methods whose layers learn its steps; in words until every method has a model."""
    found = extrapolation_report.Found("learned-steps")
    if len(found.methods) < len(extrapolation_report.PLANS[found.name].seeds):
        return f"Not measured yet (`{found.command}`)."
    parts = [
        extrapolation_report.table("segments", found),
        extrapolation_report.near_to_far_table(found),
        extrapolation_report.how_made(found),
    ]
    return "\n\n".join(parts)


def positions_table(
    prefix: str, names: dict[str, str], columns: dict[str, str], command: str
) -> str:
    """Times of keys at given positions, or of points, beside what a user can run instead; of the machine that ran most of it."""
    timed = max(
        ([r for r in records if r["case"] in columns] for records in newest_by_machine(prefix)),
        key=lambda found: len({(r["implementation"], r["case"]) for r in found}),
    )
    last = {(r["implementation"], r["case"]): r for r in timed}
    lines = ["| ms | " + " | ".join(columns.values()) + " |", "|---" * (len(columns) + 1) + "|"]
    for name, words in names.items():
        found = [last.get((name, case)) for case in columns]
        cells = [f"{r['p50_ms']:,.0f}" if r else "-" for r in found]
        lines.append(f"| {words} | " + " | ".join(cells) + " |")
    kept = [last[next(iter(names)), case]["work_kept"] for case in columns]
    lines.append(
        "| pairs of query and key that linbias computes | "
        + " | ".join(f"{k:.0%}" for k in kept)
        + " |"
    )
    r = timed[-1]
    text = (
        f"Medians, {r['H']} heads of {r['D']}, {r['dtype']}; {r['machine']}, {r['threads']} threads, torch"
        f" {r['versions']['torch']}, {r['date']}, `{command}`."
    )
    return "\n".join([*lines, "", text])


def gates_table() -> str:
    """What forget gates of about 0.98 save."""
    return positions_table(
        "positions-gates",
        {"cpu, positions": "linbias", "sdpa mask": "PyTorch's SDPA, the bias as its mask"},
        {
            "positions-gates-4096": "4,096",
            "positions-gates-8192": "8,192",
            "positions-gates-8192-training": "8,192, with gradients",
        },
        "python evidence/benchmarks/bench_positions.py",
    )


def points_table() -> str:
    """What attention among points costs, and the memory of one layer."""
    table = positions_table(
        "points-",
        {
            "cpu": "linbias",
            "blocked": "linbias, in PyTorch operations",
            "sdpa mask": "PyTorch's SDPA, the bias as its mask, made before",
            "sdpa mask, made": "PyTorch's SDPA, the bias as its mask, made in the call",
            "sdpa, no bias": "PyTorch's SDPA without a bias",
        },
        {"points-7000": "7,000 points", "points-28000": "28,000 points"},
        "python evidence/benchmarks/bench_points.py",
    )
    memory = [r for r in newest_records("points-memory") if r["case"].startswith("points-memory")]
    r = memory[-1]
    return (
        f"{table} One layer of {r['T']:,} points, forward and backward, takes {r['peak_memory_bytes'] / 2**30:.2f} GiB"
        " above its inputs (`--memory`)."
    )


def written_parts() -> dict[tuple[str, str], str]:
    """What records say, by document and part."""
    return {
        ("README.md", "speed"): speed_table(),
        ("README.md", "speed in a sentence"): speed_sentence("#results"),
        ("docs/index.md", "speed in a sentence"): speed_sentence(
            "kernels.md#beside-what-a-user-can-run-instead"
        ),
        ("docs/kernels.md", "benchmark"): benchmark_table(),
        ("docs/kernels.md", "short"): short_tables(),
        ("docs/faq.md", "neighbours"): neighbours_table(),
        ("docs/jax.md", "benchmark"): jax_table(),
        ("docs/guides/train-short.md", "extrapolation"): extrapolation_table(
            "segments", "sliding"
        ),
        ("docs/guides/train-short.md", "learned steps"): learned_steps_tables(),
        ("docs/guides/positions.md", "gates"): gates_table(),
        ("docs/guides/positions.md", "points"): points_table(),
    }


def compact_json(content: Any) -> str:
    """JSON with a line for each curve."""
    text = json.dumps(content, indent=1)
    return re.sub(r"\[[^][]*\]", lambda curve: json.dumps(json.loads(curve[0])), text) + "\n"


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    write_whole(RESULTS, compact_json(extrapolation_report.for_explorer()).encode())
    write_whole(ROOT / "docs" / "extrapolation.svg", experiment_figure())
    write_whole(ROOT / "docs" / "extrapolation-dark.svg", experiment_figure(dark=True))
    for (document, part), content in written_parts().items():
        fill(document, {part: content})


if __name__ == "__main__":
    main()
