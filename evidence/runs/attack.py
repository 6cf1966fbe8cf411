"""Search for a broken certificate and for wrong results: `make attack`.

    python evidence/runs/attack.py                           # all parts, in 20 minutes at most
    python evidence/runs/attack.py --minutes 1 --part mass   # a quick look at one part
    python evidence/runs/attack.py --seed 5                  # other candidates and calls
    python evidence/runs/attack.py --part calls --first 4000 # goes on where that seed stopped

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
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / x) for x in ("evidence/benchmarks", "tests/support", "proof")]

import numpy as np  # noqa: E402
import torch  # noqa: E402

import attack_proved as proved  # noqa: E402
import record  # noqa: E402
from attack_calls import try_call  # noqa: E402
from attack_mass import STEPS, climb  # noqa: E402
from attack_subjects import everything  # noqa: E402
from linbias._run.progress import Pace  # noqa: E402
from markers import RECORDS, Record, fill, parser_of, read  # noqa: E402
from markers import table as markdown  # noqa: E402

PATH = RECORDS / "attack.jsonl"
# The budget is twice the largest error of forty plain computations. Of ten thousand calls a few
# have an unluckier sum than these forty; a mistake in the code is larger.
MOST_BUDGETS = 3
_PACE = Pace()


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
    for part, (share, run) in PARTS.items():
        if options.part not in (part, "all"):
            continue
        # What a part does not need is left to the next.
        stop += options.minutes * 60 * (share if options.part == "all" else 1)
        found = run(options, stop)
        if not found:
            continue
        bad |= found["bad"]
        if not options.no_record:
            numbers = {"case": f"attack-{part}", "seed": options.seed, "first": options.first}
            record.write({**numbers, **found, **record.here()}, PATH)
        print(json.dumps(found, indent=1))
    if not options.no_record:
        fill("docs/numerics.md", {"attack": table()})
    sys.exit(1 if bad else 0)


def attack_mass(options: argparse.Namespace, stop: float) -> dict[str, Any]:
    """Climb, in rounds over everything that can be attacked, each in an order of its own."""
    subjects = [a for a in everything() if options.only in f"{a.implementation} {a.way} {a.dtype}"]
    worst: dict[str, dict[str, Any]] = {}
    candidates, number, began = 0, options.first, time.monotonic()
    while candidates < options.candidates and time.monotonic() < stop:
        round_number, turn = divmod(number, len(subjects))
        order = np.random.default_rng([options.seed, round_number]).permutation(len(subjects))
        attacked = subjects[order[turn]]
        setting = attacked.setting(np.random.default_rng([options.seed, number]))
        found = climb(setting, attacked.subject, [options.seed, number])
        name = f"{attacked.implementation}, {attacked.way}"
        entry = worst.setdefault(name, {"candidates": 0, "ratio": 0.0})
        entry["candidates"] += found.candidates
        if found.ratio >= entry["ratio"]:
            entry |= {"ratio": round(found.ratio, 6), "climb": number, "dtype": attacked.dtype}
        if found.ratio > 1:
            print(f"\nclimb {number}: {attacked} drops {found.ratio:.4g} times {setting}")
        candidates, number = candidates + found.candidates, number + 1
        highest = max(entry["ratio"] for entry in worst.values())
        _progress(f"{candidates:,} candidates, climb {number}, worst ratio {highest:.4f}", began)
    print(file=sys.stderr)
    bad = any(entry["ratio"] > 1 for entry in worst.values())
    found = {"candidates": candidates, "steps": STEPS, "next": number, "worst": worst, "bad": bad}
    return found | {"seconds": round(time.monotonic() - began)}


def attack_proved(options: argparse.Namespace, stop: float) -> dict[str, Any]:
    """Hostile heads, for near_to_far and the kernels in turn, beside the program of the proof;
    nothing where that cannot be built.
    """
    worst: dict[str, dict[str, Any]] = {}
    failures, number, began = [], options.first, time.monotonic()
    if reason := proved.why_not():
        print(f"part proved does not run, as {reason}", file=sys.stderr)
        return {}
    while number < options.first + options.heads and time.monotonic() < stop:
        outcome = proved.attack(options.seed, number)
        entry = worst.setdefault(outcome.subject, {"tiles": 0, "tighter": 0, "ratio": 0.0})
        entry["tiles"] += outcome.tiles
        entry["tighter"] += outcome.tighter
        entry["ratio"] = max(entry["ratio"], round(outcome.ratio, 6))
        if outcome.failures:
            failures.append(number)
            print(f"\nhead {number}, {outcome.subject}: {'; '.join(outcome.failures)}")
        number += 1
        _progress(f"{number - options.first:,} heads, {len(failures)} wrong", began)
    print(file=sys.stderr)
    found = {"heads": number - options.first, "next": number, "over": failures, "worst": worst}
    return found | {"bad": bool(failures), "seconds": round(time.monotonic() - began)}


def attack_calls(options: argparse.Namespace, stop: float) -> dict[str, Any]:
    """Random calls, for the implementations in turn."""
    worst: dict[str, dict[str, Any]] = {}
    failures, again, number, began = [], 0, options.first, time.monotonic()
    while number < options.first + options.calls and time.monotonic() < stop:
        outcome = try_call([options.seed, number], number)
        entry = worst.setdefault(outcome.ran, {"calls": 0, "share": 0.0, "over": 0})
        entry["calls"] += 1
        again += outcome.again
        if outcome.failure:
            entry["over"] += 1
            failures.append(number)
            print(f"\ncall {number}: {outcome.failure}")
        entry["share"] = max(entry["share"], round(outcome.share, 4))
        number += 1
        done = number - options.first
        if number % 20 == 0:
            _progress(f"{done:,} calls, {len(failures)} over the budget", began)
    print(file=sys.stderr)
    bad = any(entry["share"] > MOST_BUDGETS for entry in worst.values())
    found = {"calls": number - options.first, "next": number, "asked_again": again}
    found |= {"over": failures, "worst": worst, "bad": bad}
    return found | {"seconds": round(time.monotonic() - began)}


# Of the time, what each takes where all run.
PARTS = {
    "mass": (0.45, attack_mass),
    "proved": (0.1, attack_proved),
    "calls": (0.45, attack_calls),
}


def _progress(text: str, began: float) -> None:
    text += f", {time.monotonic() - began:,.0f} s"
    if sys.stderr.isatty():
        print(f"\r{text}   ", end="", file=sys.stderr, flush=True)
    elif _PACE.is_due():
        print(text, file=sys.stderr, flush=True)


def table() -> str:
    """The newest record of either part, with those that it went on from."""
    newest: dict[str, Record] = {}
    for found in read(PATH):
        before = newest.get(found["case"])
        goes_on = before and all(before[x] == found[y] for x, y in CONTINUED)
        newest[found["case"]] = _together(before, found) if before and goes_on else found
    parts, largest = [], "largest share of `tolerance` dropped"
    if mass := newest.get("attack-mass"):
        rows = [
            [*name.split(", ", 1), f"{x['candidates']:,}", f"{x['ratio']:.3f}", x["dtype"]]
            for name, x in mass["worst"].items()
        ]
        parts.append(markdown(["implementation", "called", "candidates", largest, "in"], rows))
        parts.append(_made(mass, f"{mass['candidates']:,} candidates, climbs"))
    if checked := newest.get("attack-proved"):
        head = ["beside the proved program", "tiles", "read less than it", largest]
        rows = [
            [name, f"{x['tiles']:,}", f"{x['tighter']:,}", f"{x['ratio']:.3f}"]
            for name, x in checked["worst"].items()
        ]
        wrong = f"{len(checked['over'])} of them" if checked["over"] else "none"
        said = f"{checked['heads']:,} heads, {wrong} wrong, numbers"
        parts += [markdown(head, rows), _made(checked, said)]
    if calls := newest.get("attack-calls"):
        rows = [
            [name, f"{x['calls']:,}", str(x["over"]), f"{x['share']:.2f}"]
            for name, x in sorted(calls["worst"].items())
        ]
        head = ["random calls of", "calls", "over the budget", "largest error, in budgets"]
        count = len(calls["over"])
        over = f"{count} of them over the budget" if count else "all within the budget"
        parts += [markdown(head, rows), _made(calls, f"{calls['calls']:,} calls, {over}, numbers")]
    return "\n\n".join(parts)


# What a record shares with the one before it, where it goes on from that one.
CONTINUED = (("seed", "seed"), ("commit", "commit"), ("machine", "machine"), ("next", "first"))


def _together(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Two records as if one run had made them."""
    worst = {name: dict(entry) for name, entry in before["worst"].items()}
    for name, entry in after["worst"].items():
        there = worst.setdefault(name, {"ratio": 0.0, "share": 0.0})
        counted = [n for n in ("candidates", "tiles", "tighter", "calls", "over") if n in entry]
        counts = {n: there.get(n, 0) + entry[n] for n in counted}
        measure = "ratio" if "ratio" in entry else "share"
        worst[name] = {**(entry if entry[measure] >= there[measure] else there), **counts}
    summed = [n for n in ("candidates", "heads", "calls", "seconds", "over") if n in after]
    sums = {n: before[n] + after[n] for n in summed}
    return {**after, "first": before["first"], "worst": worst, **sums}


def _made(found: Record, what: str) -> str:
    return (
        f"{what} {found['first']} to {found['next'] - 1} of seed {found['seed']}, in"
        f" {found['seconds'] / 60:.0f} minutes; {found['machine']}, one thread, commit"
        f" {found['commit']}, {found['date']}, `make attack`."
    )


if __name__ == "__main__":
    main()
