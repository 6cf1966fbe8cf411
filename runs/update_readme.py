"""Rewrite the README's tables and figures, and the table of docs/jax.md, from records: nothing measured is typed by hand.

    python runs/update_readme.py                                # the benchmark table
    python runs/update_readme.py --experiment output/extrapolate  # also the extrapolation table and plot

Each part stands between <!-- name --> and <!-- /name --> in README.md.
"""

import argparse
import json
import re
import shutil
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
RECORDS = ROOT / "records"
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


def benchmark_table() -> str:
    """Median milliseconds and the spread of `blocked` and its peers, from the newest record file."""
    newest = max(RECORDS.glob("*-????-??-??.jsonl"), key=lambda path: (path.stem[-10:], path.name))
    records = [json.loads(line) for line in newest.read_text().splitlines()]
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
        r for r in records if r["case"].startswith("memory-") and r["implementation"] == "blocked"
    ]
    text = (
        f"H={r['H']}, D={r['D']}, B=1 (short: 8), float32 and forward unless the name says otherwise (training: forward"
        f" and backward); {r['inputs']} inputs; {r['machine']}, {r['threads']} threads, torch {r['versions']['torch']},"
        f' {r["date"]}, `make bench`. "sdpa, no bias" computes something else and stands here for scale;'
        " FlexAttention has no backward pass on CPUs; the bias as a mask does not fit at 32,768."
    )
    if memory:
        m = memory[-1]
        text += (
            f" Memory of `blocked`, forward and backward at {m['T']:,} tokens: {m['peak_memory_bytes'] / 2**30:.2f} GiB"
            " above its inputs, output and gradients included."
        )
    return "\n".join([*lines, "", text])


def jax_table() -> str:
    """Median milliseconds of linbias.jax beside what a JAX user can write, and memory, from the newest record file."""
    newest = max(RECORDS.glob("*-????-??-??.jsonl"), key=lambda path: (path.stem[-10:], path.name))
    records = [json.loads(line) for line in newest.read_text().splitlines()]
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
        f" which takes 32 GiB at 32,768. {found[-1]['machine']}, {found[-1]['date']}, `python benchmarks/bench_jax.py`."
    )
    return "\n".join([*lines, "", text])


def experiment(folder: Path) -> str:
    """The loss of every method at every length, and the plot beside it."""
    results = json.loads((folder / "results.json").read_text())
    shutil.copy(folder / "extrapolation.png", ROOT / "docs" / "extrapolation.png")
    evaluations = results["evaluations"]
    lengths = sorted({e["test_length"] for e in evaluations})
    lines = ["| bits per byte, tested on | " + " | ".join(f"{n:,}" for n in lengths) + " |"]
    lines.append("|---" * (len(lengths) + 1) + "|")
    for method in dict.fromkeys(e["method"] for e in evaluations):
        values = {
            e["test_length"]: e["bits_per_byte"] for e in evaluations if e["method"] == method
        }
        lines.append(
            f"| {method} | "
            + " | ".join(f"{values[n]:.3f}" if n in values else "-" for n in lengths)
            + " |"
        )
    made = results["made"]
    text = (
        f"Trained on {results['evaluations'][0]['train_length']} tokens; {made['model']}, {made['training']}."
        f" {made['corpus'][0].upper() + made['corpus'][1:]}. {made['machine']}, {made['time']}, {made['date']}, `make run`."
    )
    return "\n".join(["![Loss by test length](docs/extrapolation.png)", "", *lines, "", text])


def fill(text: str, name: str, content: str) -> str:
    pattern = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
    assert re.search(pattern, text, re.DOTALL), f"there is no part <!-- {name} -->"
    return re.sub(pattern, lambda match: f"{match[1]}{content}\n{match[2]}", text, flags=re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--experiment", type=Path, help="folder of `linbias extrapolate`")
    options = parser.parse_args()
    text = README.read_text(encoding="utf-8")
    text = fill(text, "benchmark", benchmark_table())
    page = ROOT / "docs" / "jax.md"
    page.write_text(fill(page.read_text(), "benchmark", jax_table()))
    if options.experiment:
        text = fill(text, "extrapolation", experiment(options.experiment))
    README.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
