"""One page of what a run measured: how its stages fared, what could be claimed, figures.

All is computed from records. What a run was cut before, or what failed, says "not measured".
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from gpu.timing import GRAPH, is_ours
from record import BACKWARD, FORWARD
from record import Fields as Line

NOT_MEASURED = "not measured"


def page(lines: list[Line], fared: dict[str, str], lengths: Iterable[int]) -> str:
    """The page, in Markdown, from records, how each stage ended, and the lengths asked for."""
    is_dry = any(line.get("device") == "cpu" for line in lines)
    parts = [
        "# The Triton kernels on a GPU",
        origin(lines),
        *(["**A dry run: none of its times means anything.**"] if is_dry else []),
        "\n".join(f"- {stage}: {how}" for stage, how in fared.items()),
        "## What could be claimed",
        "\n".join(f"- {claim}" for claim in claims(lines, lengths)),
        "## Figures",
        "Medians, and in brackets the 20th to the 80th percentile; as multiples of the first's,"
        " and of what the work kept would take at the rates of the device's products and copies.",
        *(table(group, lines) for group in groups(lines).values()),
    ]
    return "\n\n".join(parts) + "\n"


def origin(lines: list[Line]) -> str:
    line = next((line for line in lines if "machine" in line), None)
    if line is None:
        return NOT_MEASURED
    versions = ", ".join(f"{name} {version}" for name, version in line["versions"].items())
    return f"{line['machine']}, {versions}, commit {line['commit']}, {line['date']}"


def claims(lines: list[Line], lengths: Iterable[int]) -> list[str]:
    """A sentence for each thing that was to be found out, with what was."""
    both, random = (FORWARD, BACKWARD), "random normal"
    asked = [
        *((f"at {T:,} tokens", f"causal-{T}", both, random) for T in sorted(lengths)),
        ("without a bias", "zero-slopes-", both, random),
        ("of one token against a cache", "decode-", (FORWARD,), random),
        ("of a model, one step of training", "training-step-", (BACKWARD,), "text"),
        ("at the inputs of a trained model", "causal-", both, "trained model"),
        ("among points of a plane", "points-", both, random),
        ("with forget gates", "gates-", both, random),
        ("beside far blocks in shorter floats", "coarse-", both, random),
    ]
    said = [outcomes("the contract's tests", "contract", lines)]
    for subject, case, modes, inputs in asked:
        for mode in modes:
            own = [x for x in lines if (x.get("mode"), x.get("inputs")) == (mode, inputs)]
            named = str.startswith if case.endswith("-") else str.__eq__
            words = f"{mode} {subject}"
            compared = comparisons(words, [x for x in own if named(x["case"], case)])
            said += compared or [f"{words}: {NOT_MEASURED}"]
    said += errors(lines)
    said += [outcomes("tests under compute-sanitizer", "sanitizer", lines), pieces(lines)]
    place = next((f"On an {x['machine']}: " for x in lines if "machine" in x), "")
    return [f"{place}{words}." for words in said]


def comparisons(subject: str, lines: Iterable[Line]) -> list[str]:
    """Ours beside each peer, a sentence for each size that was measured."""
    said = []
    for group in groups(lines).values():
        for prefix in ("", GRAPH):
            timed = [x for x in group if "p50_ms" in x]
            timed = [x for x in timed if x["implementation"].startswith(GRAPH) == bool(prefix)]
            own = next((x for x in timed if is_ours(x["implementation"])), None)
            if own is None:
                continue
            sizes = [own["dtype"], f"batch {own['B']}", f"{own['H']} heads of {own['D']}"]
            sizes += [f"{own['S']:,} keys", own["inputs"], *(["as a graph"] if prefix else [])]
            if own.get("work_kept") is not None:
                sizes.append(f"{own['work_kept']:.1%} of the work kept")
            others = [
                f"{x['p50_ms'] / own['p50_ms']:.2f} times as fast as "
                + x["implementation"].removeprefix(GRAPH)
                + (f" (error {x['error']:.1e}, {own['error']:.1e} here)" if "error" in x else "")
                for x in timed
                if not is_ours(x["implementation"]) or (x is not own and "error" in x)
            ]
            took = f"takes {own['p50_ms']:.3f} ms: {', '.join(others) or 'no peer ran'}"
            said.append(f"{subject} ({', '.join(sizes)}) {took}")
    return said


def outcomes(subject: str, stage: str, lines: list[Line]) -> str:
    own = [x for x in lines if x["case"] == stage]
    ended = [x["outcome"] for x in own if "outcome" in x]
    asked = next((x["num_tests"] for x in own if "num_tests" in x), len(ended))
    failed = [x["test"] for x in own if x.get("outcome") == "failed"]
    if not ended:
        return f"{subject}: {NOT_MEASURED}"
    words = f"{subject}: {ended.count('passed')} of {asked} passed"
    return words + (f", failed: {', '.join(failed)}" if failed else "")


def errors(lines: list[Line]) -> list[str]:
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for line in lines:
        if "relative_error" in line:
            found[line["case"]][line["implementation"]] = line["relative_error"]["slope 1/2"]
    said = [
        f"the error in float32 at {int(case.partition('-')[2]):,} tokens, slope 1/2: "
        + ", ".join(f"{error:.1e} ({name})" for name, error in of.items())
        for case, of in found.items()
    ]
    return said or [f"the error at great length: {NOT_MEASURED}"]


def pieces(lines: list[Line]) -> str:
    line = next((x for x in lines if x["case"].startswith("pieces-")), None)
    if line is None:
        return f"a sequence in shards: {NOT_MEASURED}"
    return (
        f"a sequence of {line['T']:,} tokens in {line['num_pieces']} shards differs from the whole"
        f" by at most {line['error']:.1e} of the largest number, and sends"
        f" {line['sent_bytes'] / line['all_gather_bytes']:.1%} of what all-gather would"
    )


def groups(lines: Iterable[Line]) -> dict[tuple[Any, ...], list[Line]]:
    """Records of one case, in the order in which they came."""
    found: dict[tuple[Any, ...], list[Line]] = defaultdict(list)
    for line in lines:
        if "implementation" in line and "B" in line and ("p50_ms" in line or "left_out" in line):
            key = tuple(
                line.get(name) for name in ("case", "inputs", "dtype", "B", "H", "D", "mode")
            )
            found[key].append(line)
    return found


def table(group: list[Line], lines: list[Line]) -> str:
    """One case's implementations, also those that were left out."""
    line = group[0]
    sizes = f"{line['dtype']}, B={line['B']}, H={line['H']}, D={line['D']}, {line['inputs']}"
    title = f"**{line['case']}, {line['mode']}** ({sizes})"
    rows = ["| | ms | of the first | of the limit | GiB |", "|---|---|---|---|---|"]
    first = next((x["p50_ms"] for x in group if "p50_ms" in x), None)
    for x in group:
        if "left_out" in x:
            reason = x["left_out"].replace("|", "/")
            rows.append(f"| {x['implementation']} | left out: {reason} | - | - | - |")
            continue
        limit, peak = share_of_limit(x, lines), x.get("peak_memory_bytes")
        cells = [
            x["implementation"],
            f"{x['p50_ms']:.3f} ({x['p20_ms']:.3f} to {x['p80_ms']:.3f})",
            f"{x['p50_ms'] / max(first, 1e-9):.2f}",
            "-" if limit is None else f"{limit:.2f}",
            "-" if peak is None else f"{peak / 2**30:.2f}",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return title + "\n\n" + "\n".join(rows)


def share_of_limit(line: Line, lines: list[Line]) -> float | None:
    """How many times as long as the work kept would take at the rates that the device reached."""
    rates = {x["implementation"]: x for x in lines if x["case"] == "rates"}
    if line.get("work_kept") is None or len(rates) < 2:
        return None
    product, copy = rates["matrix product"], rates["copy"]
    least = max(
        line["flop"] * line["work_kept"] / product["flop"] * product["p50_ms"],
        line["bytes"] / copy["bytes"] * copy["p50_ms"],
    )
    return line["p50_ms"] / least if least else None
