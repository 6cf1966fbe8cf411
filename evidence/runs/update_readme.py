"""Rewrite the tables of README.md and docs/ from records, the plot of the comparison and what the
explorer shows of it: `python evidence/runs/update_readme.py`. Nothing measured is typed by hand.
"""

import json
import re
import sys
from collections.abc import Callable, Iterable

from matplotlib import rc_context

import extrapolation_report
from linbias._run.files import write_whole
from linbias.lm.report import figures
from markers import RECORDS, ROOT, Record, fill, read, table, unique

RESULTS = ROOT / "src" / "linbias" / "explore" / "results.json"
BENCH = "python evidence/benchmarks"
PEERS = "kernels.md#beside-what-a-user-can-run-instead"
# What the README shows: implementations, and cases with their headings.
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
SHOWN = "short-256 causal-2048 causal-8192 causal-32768 bfloat16-8192 symmetric-8192 training-4096"


def newest_by_machine(prefix: str) -> list[list[Record]]:
    """The records of each machine's newest file that has cases of this name, the newest first."""
    files = RECORDS.glob("*-????-??-??.jsonl")
    newest: dict[str, list[Record]] = {}
    for path in sorted(files, key=lambda path: (path.stem[-10:], path.name), reverse=True):
        records = read(path)
        if any(r["case"].startswith(prefix) for r in records):
            newest.setdefault(path.stem[:-11], records)
    if not newest:
        raise SystemExit(f"update_readme: no file in {RECORDS} has cases {prefix!r}")
    return list(newest.values())


def newest_records(prefix: str) -> list[Record]:
    """The records of this name of the newest machine file that has some."""
    return [r for r in newest_by_machine(prefix)[0] if r["case"].startswith(prefix)]


def rows_of(
    records: Iterable[Record],
    names: Iterable[str],
    cases: Iterable[str],
    write: Callable[[Record], str],
) -> dict[str, list[str]]:
    """By implementation, a cell for each case: of its last record, or "-"."""
    last = {(r["implementation"], r["case"]): r for r in records}
    found = {name: [last.get((name, case)) for case in cases] for name in names}
    return {name: [write(r) if r else "-" for r in cells] for name, cells in found.items()}


def median(r: Record) -> str:
    return f"{r['p50_ms']:,.0f}"


def median_and_spread(r: Record) -> str:
    return f"{r['p50_ms']:,.0f} ({r['p20_ms']:,.0f} to {r['p80_ms']:,.0f})"


def where(r: Record) -> str:
    """The machine, threads, version and date of a record."""
    return f"{r['machine']}, {r['threads']} threads, torch {r['versions']['torch']}, {r['date']}"


def speed_table() -> str:
    """The medians that the README shows, for each kind of processor that records exist for."""
    rows, made = [], []
    for records in newest_by_machine("causal-8192"):
        timed = [r for r in records if r.get("inputs") == "random normal"]
        r = next(r for r in timed if r["case"] == "causal-8192")
        processor = r["machine"].removesuffix(" 2 cores").replace(" Processor", "")
        for name, cells in rows_of(timed, FEW, FEW_CASES, median).items():
            rows.append([f"{FEW[name]}, {processor}", *cells])
        made.append(f"{processor}: torch {r['versions']['torch']}, {r['date']}")
    text = (
        "Medians, 8 heads of 64, causal, random inputs, two threads, `make bench`"
        f" ({'; '.join(made)}); short lengths and more peers: [docs/kernels.md](docs/kernels.md)."
    )
    return f"{table(['ms, length', *FEW_CASES.values()], rows)}\n\n{text}"


def speed_sentence(whole_table: str) -> str:
    """What the table of README comes to."""
    records = newest_by_machine("causal-8192")[0]
    medians = {(r.get("implementation"), r["case"]): r.get("p50_ms") for r in records}

    def times(peer: str, case: str) -> str:
        return f"{medians[peer, case] / medians['cpu', case]:.1f} times"

    return (
        "With 8 heads of 64 on two cores of an"
        f" {records[0]['machine'].removesuffix(' 2 cores')}, it is"
        f" {times('sdpa, no bias', 'causal-8192')} as fast as PyTorch's own attention without any"
        f" bias at 8,192 tokens, {times('sdpa, no bias', 'training-4096')} in training at 4,096,"
        f" and {times('flex, window mask', 'causal-32768')} as fast as FlexAttention at 32,768"
        f" ([the whole table]({whole_table}))."
    )


def benchmark_table() -> str:
    """Median milliseconds and the spread of our implementations and their peers."""
    records, shown = newest_by_machine("causal-8192")[0], SHOWN.split()
    timed = [r for r in records if r["case"] in shown and r["inputs"] == "random normal"]
    columns = [case for case in shown if case in unique(timed, "case")]
    names = [name for name in ORDER if name in unique(timed, "implementation")]
    rows = rows_of(timed, names, columns, median_and_spread)
    r = timed[-1]
    m = [m for m in newest_records("memory-") if m["implementation"] == "blocked"][-1]
    text = (
        f"H={r['H']}, D={r['D']}, B=1 (short: 8), float32 and forward unless the name says"
        f" otherwise (training: forward and backward); {r['inputs']} inputs; {where(r)}, `make"
        ' bench`. "sdpa, no bias" computes something else and stands here for scale; FlexAttention'
        " has no backward pass on CPUs; at 32,768 only what takes seconds was measured. Memory of"
        f" `blocked`, forward and backward at {m['T']:,} tokens:"
        f" {m['peak_memory_bytes'] / 2**30:.2f} GiB above its inputs, output and gradients"
        " included."
    )
    lines = table(
        ["ms, median (p20 to p80)", *columns], ([n, *cells] for n, cells in rows.items())
    )
    return f"{lines}\n\n{text}"


def short_tables() -> str:
    """Ours beside the faster peer at every length, a table for each kind of processor."""
    tables = map(short_table, newest_by_machine("bfloat16-forward-D"))
    text = (
        "About 4,096 tokens in all, 8 heads, causal, random normal inputs,"
        f" `{BENCH}/bench_attention.py --sets short`; the peers are SDPA without any bias, which"
        " computes less, and with the bias as a mask (up to 2,048)."
    )
    return "\n\n".join([*tables, text])


def short_table(of_machine: list[Record]) -> str:
    """Ours beside the faster peer at every length, on one machine."""
    pattern = re.compile(r"(float32|bfloat16)-(forward|backward)-D(\d+)-(\d+)")
    records = [r for r in of_machine if pattern.fullmatch(r["case"])]
    kinds = {pattern.fullmatch(r["case"]).groups()[:3] for r in records}
    lengths, rows = sorted({r["T"] for r in records}), []
    for dtype, mode, size in sorted(kinds):
        cells = []
        for length in lengths:
            case = f"{dtype}-{mode}-D{size}-{length}"
            medians = {r["implementation"]: r["p50_ms"] for r in records if r["case"] == case}
            ours = medians.pop("cpu", None)
            cells.append(f"{ours:,.1f}, {min(medians.values()) / ours:.2f} x" if ours else "-")
        words = "forward" if mode == "forward" else "forward + backward"
        rows.append([f"{dtype}, {words}, head size {size}", *cells])
    r, target = records[-1], next(r["target"] for r in records if r.get("target"))
    head = ["linbias ms, times the faster SDPA", *(f"{n:,}" for n in lengths)]
    text = where(r).replace(r["machine"], f"{r['machine']} (target {target})")
    return f"{table(head, rows)}\n\n{text}."


def jax_table() -> str:
    """Median milliseconds of linbias.jax beside what a JAX user can write, and memory."""
    records = newest_records("jax-")
    cases, names = unique(records, "case"), unique(records, "implementation")

    def write(r: Record) -> str:
        peak = r["peak_memory_bytes"]
        return f"{peak / 2**30:.2f} GiB" if peak else median_and_spread(r)

    rows = rows_of(records, names, cases, write)
    head = ["", *(case.removeprefix("jax-") for case in cases)]
    text = (
        "Milliseconds, median (p20 to p80); memory above the inputs; training and memory: forward"
        ' and backward. H=8, D=64, B=1, causal, float32, random normal inputs; "jax, bias" is'
        " `jax.nn.dot_product_attention` with the bias made beforehand, which takes 32 GiB at"
        f" 32,768. {records[-1]['machine']}, {records[-1]['date']}, `{BENCH}/bench_jax.py`."
    )
    return f"{table(head, ([name, *cells] for name, cells in rows.items()))}\n\n{text}"


def serve_table() -> str:
    """How many times faster attention is in vLLM than by the engine's own kernel."""
    records = [r for r in newest_records("serve-") if "answers" not in r["case"]]
    lengths, rows = sorted({r["S"] for r in records}), []
    last = {(r["T"] == 1, r["B"], r["dtype"], r["S"], r["implementation"]): r for r in records}
    kinds = dict.fromkeys(key[:3] for key in last)
    for one, B, dtype in sorted(
        kinds, key=lambda kind: (not kind[0], kind[1], kind[2] != "float32")
    ):
        words = (
            ("one token after" if B == 1 else f"one of each of {B} after") if one else "prompt of"
        )
        cells = []
        for S in lengths:
            engine, ours = (last.get((one, B, dtype, S, n)) for n in ("vLLM", "linbias in vLLM"))
            cells.append(f"{engine['p50_ms'] / ours['p50_ms']:.2g}" if engine and ours else "-")
        rows.append([f"{words}, {dtype}", *cells])
    r = records[-1]
    text = (
        f"Times faster, medians of {r['repeats']} in turns, {r['H']} heads of {r['D']}; vLLM"
        f" {r['versions']['vllm']}, {r['machine']}, {r['threads']} threads, {r['date']},"
        f" `{BENCH}/bench_serve.py`."
    )
    return f"{table(['keys', *(f'{n:,}' for n in lengths)], rows)}\n\n{text}"


def experiment_figure(*, dark: bool = False) -> bytes:
    """The plot of the comparison, as an SVG file's bytes."""
    sys.path.append(str(ROOT / "docs"))
    from pictures import compact

    words = "Loss by test length"
    with rc_context({"svg.hashsalt": "linbias"}):
        figure = figures.loss_by_length(list(extrapolation_report.evaluations()))
        return compact(figures.svg_file(figure, words, dark=dark)).encode()


def extrapolation_tables() -> str:
    """The loss of every method at every length, and how it was measured."""
    found = extrapolation_report.Found()
    tables = [extrapolation_report.table(way, found) for way in ("segments", "sliding")]
    return "\n\n".join([*tables, extrapolation_report.how_made(found)])


def learned_steps_tables() -> str:
    """ALiBi beside methods whose layers learn its steps; in words until all have a model."""
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
    """Times of keys at given positions, or of points, beside what a user can run instead.

    They are those of the machine that ran most of it.
    """
    timed = max(
        ([r for r in records if r["case"] in columns] for records in newest_by_machine(prefix)),
        key=lambda found: len({(r["implementation"], r["case"]) for r in found}),
    )
    rows = [[names[n], *cells] for n, cells in rows_of(timed, names, columns, median).items()]
    kept = rows_of(timed, [next(iter(names))], columns, lambda r: f"{r['work_kept']:.0%}")
    rows += [["pairs of query and key that linbias computes", *cells] for cells in kept.values()]
    r = timed[-1]
    sizes = f"Medians, {r['H']} heads of {r['D']}, {r['dtype']}"
    return f"{table(['ms', *columns.values()], rows)}\n\n{sizes}; {where(r)}, `{command}`."


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
        f"{BENCH}/bench_attention.py --sets positions",
    )


def points_table() -> str:
    """What attention among points costs, and the memory of one layer."""
    times = positions_table(
        "points-",
        {
            "cpu": "linbias",
            "sdpa mask": "PyTorch's SDPA, the bias as its mask, made before",
            "sdpa mask, made": "PyTorch's SDPA, the bias as its mask, made in the call",
            "sdpa, no bias": "PyTorch's SDPA without a bias",
        },
        {"points-7000": "7,000 points", "points-28000": "28,000 points"},
        f"{BENCH}/bench_points.py",
    )
    r = newest_records("points-memory")[-1]
    return (
        f"{times} One layer of {r['T']:,} points, forward and backward, takes"
        f" {r['peak_memory_bytes'] / 2**30:.2f} GiB above its inputs (`--memory`)."
    )


def around_table() -> str:
    """What a whole model takes, as it is and compiled."""
    columns = {"model-512": "512 tokens", "model-1-after-512": "one after 512"}
    records = newest_records("model-")
    rows = rows_of(records, unique(records, "implementation"), columns, median)
    text = f"BLOOM-560m's shape, fused, float32; {where(records[-1])}, `{BENCH}/bench_around.py`."
    lines = table(["ms", *columns.values()], ([name, *cells] for name, cells in rows.items()))
    return f"{lines}\n\n{text}"


def busy_table() -> str:
    """What busy processes cost one that computes with PyTorch, by how its threads wait."""
    records = newest_records("token beside")
    cases, names = unique(records, "case"), unique(records, "implementation")
    rows = rows_of(records, names, cases, lambda r: f"{r['p50_ms']:.1f}")
    text = f"A token of four layers of BLOOM-560m's shape, {where(records[-1])}"
    lines = table(["ms", *cases], ([name, *cells] for name, cells in rows.items()))
    return f"{lines}\n\n{text}, `{BENCH}/bench_around.py`."


def written_parts() -> dict[tuple[str, str], str]:
    """What records say, by document and part."""
    return {
        ("README.md", "speed"): speed_table(),
        ("README.md", "speed in a sentence"): speed_sentence("#results"),
        ("docs/index.md", "speed in a sentence"): speed_sentence(PEERS),
        ("docs/kernels.md", "benchmark"): benchmark_table(),
        ("docs/kernels.md", "short"): short_tables(),
        ("docs/kernels.md", "around"): around_table(),
        ("docs/faq.md", "busy"): busy_table(),
        ("docs/guides/serve-vllm.md", "serve"): serve_table(),
        ("docs/jax.md", "benchmark"): jax_table(),
        ("docs/guides/train-short.md", "extrapolation"): extrapolation_tables(),
        ("docs/guides/train-short.md", "learned steps"): learned_steps_tables(),
        ("docs/guides/positions.md", "gates"): gates_table(),
        ("docs/guides/positions.md", "points"): points_table(),
    }


def compact_json(content: Record) -> str:
    """JSON with a line for each curve."""
    text = json.dumps(content, indent=1)
    return re.sub(r"\[[^][]*\]", lambda curve: json.dumps(json.loads(curve[0])), text) + "\n"


def main() -> None:
    write_whole(RESULTS, compact_json(extrapolation_report.for_explorer()).encode())
    plots = ROOT / "docs" / "results"
    write_whole(plots / "extrapolation.svg", experiment_figure())
    write_whole(plots / "extrapolation-dark.svg", experiment_figure(dark=True))
    for (document, part), content in written_parts().items():
        fill(document, {part: content})


if __name__ == "__main__":
    main()
