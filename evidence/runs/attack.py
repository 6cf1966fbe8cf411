"""Search for a broken certificate and for wrong results: `make attack`.

    python evidence/runs/attack.py                           # all parts, in 20 minutes at most
    python evidence/runs/attack.py --minutes 1 --part mass   # a quick look at one part
    python evidence/runs/attack.py --seed 5                  # other candidates and calls
    python evidence/runs/attack.py --part calls --first 4000 # other numbers of it

Part "mass" climbs towards inputs that make an implementation drop as much probability as it can:
`tests/support/attack_mass.py` says how the mass is measured. Part "proved" runs the program that
is extracted from the proof beside near_to_far and the kernels: `tests/support/attack_proved.py`.
Part "calls" holds random calls with every option against the definition within the tests' budget:
`tests/support/attack_calls.py`. Climb, head or call n is a function of the seed and n alone. A run
appends a line for each part to evidence/records/attack.jsonl, fills docs/numerics.md, and exits
with 1 if anything was wrong.
"""

import argparse
import json
import math
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / x) for x in ("evidence/benchmarks", "tests/support", "proof")]

import torch  # noqa: E402

import attack_calls  # noqa: E402
import attack_mass  # noqa: E402
import attack_proved  # noqa: E402
import record  # noqa: E402
from attack_calls import Outcome  # noqa: E402
from markers import RECORDS, Record, fill, parser_of, read  # noqa: E402
from markers import table as markdown  # noqa: E402

PATH = RECORDS / "attack.jsonl"
# The budget is twice the largest error of forty plain computations. Of ten thousand calls a few
# have an unluckier sum than these forty; a mistake in the code is larger.
MOST_BUDGETS = 3
SUMS = ("candidates", "calls", "tiles", "tighter", "asked_again", "over")  # of one subject
_last_line = [time.monotonic()]  # of a log, which gets one a minute
# By name: of the time, what each takes where all run; and the option and the field that count.
PARTS = {"mass": (0.45, "candidates"), "proved": (0.1, "heads"), "calls": (0.45, "calls")}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--minutes", type=float, default=20.0, help="most time, of all parts")
    parser.add_argument("--part", choices=(*PARTS, "all"), default="all")
    parser.add_argument("--candidates", type=int, default=500_000, help="of part mass")
    parser.add_argument("--heads", type=int, default=3_000, help="of part proved")
    parser.add_argument("--calls", type=int, default=10_000, help="of part calls")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="first climb, head or call")
    parser.add_argument("--only", default="", help='such as "cpu avx2 decode"')
    parser.add_argument("--no-record", action="store_true", help="write neither record nor table")
    options = parser.parse_args()
    torch.set_num_threads(1)
    stop, bad = time.monotonic(), False
    for name, (share, counted) in PARTS.items():
        if options.part not in (name, "all"):
            continue
        # What a part does not need is left to the next.
        stop += options.minutes * 60 * (share if options.part == "all" else 1)
        if name == "proved" and (reason := attack_proved.why_not()):
            print(f"part proved does not run, as {reason}", file=sys.stderr)
            continue
        found = search(name, counted, options, stop)
        bad |= found["bad"]
        if not options.no_record:
            numbers = {"case": f"attack-{name}", "seed": options.seed, "first": options.first}
            record.write({**numbers, **found, **record.here()}, PATH)
        print(json.dumps(found, indent=1))
    if not options.no_record:
        fill("docs/numerics.md", {"attack": table()})
    sys.exit(1 if bad else 0)


def search(part: str, counted: str, options: argparse.Namespace, stop: float) -> Record:
    """Try one number after the other."""
    worst: dict[str, Record] = {}
    over, bad, done, number, began = [], False, 0, options.first, time.monotonic()
    while done < getattr(options, counted) and time.monotonic() < stop:
        name, entry, failure = try_one(part, number, options)
        if failure:
            over.append(number)
            bad |= entry.get("share", math.inf) > MOST_BUDGETS
            print(f"\n{number}: {failure}")
        worst[name] = together(worst.get(name), entry)
        done, number = done + entry.get(counted, 1), number + 1
        highest = max(entry.get("ratio", entry.get("share")) for entry in worst.values())
        text = f"{done:,} {counted}, {len(over)} wrong, at most {highest:.4f}"
        _progress(f"{text}, {time.monotonic() - began:,.0f} s")
    print(file=sys.stderr)
    found = {counted: done, "next": number, "over": over, "worst": worst, "bad": bad}
    return found | {"seconds": round(time.monotonic() - began)}


def try_one(part: str, number: int, options: argparse.Namespace) -> Outcome:
    if part == "mass":
        return attack_mass.attack(options.seed, number, options.only)
    return (attack_proved if part == "proved" else attack_calls).attack(options.seed, number)


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{text}   ", end="", file=sys.stderr, flush=True)
    elif time.monotonic() - _last_line[0] > 60:
        _last_line[0] = time.monotonic()
        print(text, file=sys.stderr, flush=True)


def table() -> str:
    """The newest record of each part."""
    newest: dict[str, Record] = {found["case"]: found for found in read(PATH)}
    parts, largest = [], "largest share of `tolerance` dropped"
    if found := newest.get("attack-mass"):
        cells = {tuple(name.split(", ", 1)): f"{x['ratio']:.3f}" for name, x in worst_of(found)}
        parts.append(crossed(largest, cells))
        parts.append(_made(found, f"{found['candidates']:,} candidates, climbs"))
    if found := newest.get("attack-proved"):
        head = ["beside the proved program", "tiles", "read less than it", largest]
        rows = [
            [name, f"{x['tiles']:,}", f"{x['tighter']:,}", f"{x['ratio']:.3f}"]
            for name, x in found["worst"].items()
        ]
        wrong = f"{len(found['over'])} of them" if found["over"] else "none"
        said = f"{found['heads']:,} heads, {wrong} wrong, numbers"
        parts += [markdown(head, rows), _made(found, said)]
    if found := newest.get("attack-calls"):
        cells = {}
        for name, x in worst_of(found):
            over = f" ({x['over']} over)" if x["over"] else ""
            cells[tuple(name.rsplit(" ", 1))] = f"{x['share']:.2f}{over}"
        count = len(found["over"])
        over = f"{count} of them over the budget" if count else "all within the budget"
        said = f"{found['calls']:,} calls, {over}, numbers"
        parts.append(crossed("largest error of random calls, in budgets", cells))
        parts.append(_made(found, said))
    return "\n\n".join(parts)


def worst_of(found: Record) -> list[tuple[str, Record]]:
    return sorted(found["worst"].items())


def crossed(title: str, cells: dict[tuple[str, ...], str]) -> str:
    """A table of implementations down, and of what they were asked across."""
    down, across = (list(dict.fromkeys(sorted(names))) for names in zip(*cells, strict=True))
    rows = ([one, *(cells.get((one, other), "") for other in across)] for one in down)
    return markdown([title, *across], rows)


def together(before: Record | None, after: Record) -> Record:
    """What two numbers of one subject come to: its worst, and counts as sums."""
    if before is None:
        return after
    measure = "ratio" if "ratio" in after else "share"
    sums = {n: before.get(n, 0) + after[n] for n in SUMS if n in after}
    return {**(after if after[measure] >= before[measure] else before), **sums}


def _made(found: Record, what: str) -> str:
    return (
        f"{what} {found['first']} to {found['next'] - 1} of seed {found['seed']}, in"
        f" {found['seconds'] / 60:.0f} minutes; {found['machine']}, one thread, commit"
        f" {found['commit']}, {found['date']}, `make attack`."
    )


if __name__ == "__main__":
    main()
