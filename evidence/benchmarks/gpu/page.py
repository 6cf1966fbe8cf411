"""One page of what a run measured, from records alone: how its stages fared, tests, figures."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from record import Fields as Line

NOT_MEASURED = "not measured"
COLUMNS = ("", "ms", "of the first", "of the limit", "work kept", "error", "GiB")
ALIKE = ("case", "inputs", "dtype", "B", "H", "D", "mode")  # what the rows of a table share


def page(lines: Sequence[Line], fared: Mapping[str, str]) -> str:
    """The page, in Markdown, from records and how each stage ended."""
    groups: dict[tuple[Any, ...], list[Line]] = defaultdict(list)
    for line in lines:
        if "implementation" in line and "B" in line:
            groups[tuple(line.get(name) for name in ALIKE)].append(line)
    is_dry = any(line.get("device") == "cpu" for line in lines)
    parts = [
        "# The Triton kernels on a GPU",
        origin(lines),
        *(["**A dry run: none of its times means anything.**"] if is_dry else []),
        "\n".join(f"- {stage}: {how}" for stage, how in fared.items()),
        "## Tests",
        "\n".join(f"- {stage}: {outcomes(stage, lines)}" for stage in ("contract", "sanitizer")),
        "## Figures",
        "Medians, and in brackets the 20th to the 80th percentile; as multiples of the first's,"
        " and of what the work kept would take at the rates of the device's products and copies."
        " Errors are those of the worst result, of its largest number.",
        *(table(group, lines) for group in groups.values()),
    ]
    return "\n\n".join(parts) + "\n"


def origin(lines: Sequence[Line]) -> str:
    line = next((line for line in lines if "machine" in line), None)
    if line is None:
        return NOT_MEASURED
    versions = ", ".join(f"{name} {version}" for name, version in line["versions"].items())
    return f"{line['machine']}, {versions}, commit {line['commit']}, {line['date']}"


def outcomes(stage: str, lines: Sequence[Line]) -> str:
    own = [line for line in lines if line["case"] == stage]
    ended = [line["outcome"] for line in own if "outcome" in line]
    asked = next((line["num_tests"] for line in own if "num_tests" in line), len(ended))
    failed = ", ".join(line["test"] for line in own if line.get("outcome") == "failed")
    words = f"{ended.count('passed')} of {asked} passed" + (
        f", failed: {failed}" if failed else ""
    )
    return words if ended else "not measured"


def table(group: Sequence[Line], lines: Sequence[Line]) -> str:
    """One case's implementations, also those that were left out."""
    line = group[0]
    sizes = f"{line['dtype']}, B={line['B']}, H={line['H']}, D={line['D']}, {line['inputs']}"
    rows = [COLUMNS, ["---"] * len(COLUMNS)]
    first = next((x["p50_ms"] for x in group if "p50_ms" in x), None)
    for x in group:
        if "left_out" in x:
            why = x["left_out"].replace("|", "/")
            rows.append([x["implementation"], f"left out: {why}", *["-"] * (len(COLUMNS) - 2)])
            continue
        limit, peak, kept = share_of_limit(x, lines), x["peak_memory_bytes"], x.get("work_kept")
        numbers = [limit, kept, x.get("error"), None if peak is None else peak / 2**30]
        forms = (".2f", ".1%", ".1e", ".2f")
        shown = zip(numbers, forms, strict=True)
        rows.append(
            [
                x["implementation"],
                f"{x['p50_ms']:.3f} ({x['p20_ms']:.3f} to {x['p80_ms']:.3f})",
                f"{x['p50_ms'] / max(first, 1e-9):.2f}",
                *("-" if number is None else format(number, form) for number, form in shown),
            ]
        )
    body = "\n".join(f"| {' | '.join(cells)} |" for cells in rows)
    return f"**{line['case']}, {line['mode']}** ({sizes})\n\n{body}"


def share_of_limit(line: Line, lines: Sequence[Line]) -> float | None:
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
