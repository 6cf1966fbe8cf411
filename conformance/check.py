"""Check any implementation of ALiBi attention against the vectors beside this file, with NumPy.

    python check.py --call module:function [--dtype TYPE] [--rows NAME ...] [--json FILE] [--list]

The function takes and returns NumPy arrays, q and out [B, H, T, D], k and v [B, G, S, D]:

    function(q, k, v, *, slopes, causal, scale, ...) -> out

It adds -slopes[h] * distance to scale * (q . k), hides the keys after the query where `causal`,
and is symmetric else. Key s stands at position s, and the last query at the last key. slopes is
[H], or [B, H] in one row. A row that needs more passes it by name; a function that lacks it, or
raises NotImplementedError("why"), does not claim the row, which is no failure:

    right_slopes [H]     towards later keys; inf on either side hides it, and never distance 0
    key_range [B, 2]     the first key that counts and one past the last; the others are padding
    query_start [B]      the position of query 0, S - T where it is not passed
    segments [B, S]      T = S, and a query sees the keys of its own segment only
    schedule, max_bias   slopes is None: make them by this schedule and largest exponent
    return_lse           True: return (out, lse), lse [B, H, T] = log sum exp(scores)

A parameter `dtype` gets the name of the type. bfloat16 needs it: its numbers come as float32.
out has the dtype of q. Exit code 0: no claimed row is wrong; 1: some are; 2: bad usage.
"""

import argparse
import importlib
import inspect
import json
import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
# The largest error, in units of the largest |v|, and for lse in units of 1 or |lse|.
TOLERANCE = {"float64": 1e-10, "float32": 2e-5, "float16": 1.25e-3, "bfloat16": 1e-2}
BAD = ("wrong", "failed")


def distance(found, expected, v, compared=None):
    """The largest error of out and lse; inf where one is not finite and the other not the same."""
    errors = [0.0]
    for name in found:
        a, b = (np.asarray(x[name], np.float64) for x in (found, expected))
        if compared is not None:  # [B, T]: what queries in padding give does not count
            a, b = (x[np.broadcast_to(np.array(compared)[:, None], x.shape[:3])] for x in (a, b))
        least = np.abs(v).max() if name == "out" else 1.0
        unit = np.maximum(np.where(np.isfinite(b), np.abs(b), 0.0), least)
        with np.errstate(invalid="ignore"):
            error = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b) / unit)
        errors.append(np.where(np.isnan(error), np.inf, error).max(initial=0.0))
    return float(max(errors))


def answer(function, row, arrays, dtype):
    """Call the function for one row, once or in a step per query, and refuse what is no answer."""
    settings = {n: np.array(x) if isinstance(x, list) else x for n, x in row["settings"].items()}
    parameters = inspect.signature(function).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        for name in (n for n in settings if n not in parameters):
            raise NotImplementedError(f"takes no {name}")
    settings |= {"dtype": dtype} if "dtype" in parameters else {}
    held = np.dtype("float32" if dtype == "bfloat16" else dtype)
    q, k, v = (arrays[name].astype(held) for name in "qkv")
    S, steps = k.shape[2], []
    for n in range(1, S + 1) if row["steps"] else [S]:
        queries = q[:, :, n - 1 : n] if row["steps"] else q
        got = function(queries, k[:, :, :n], v[:, :, :n], **settings)
        parts = dict(zip(("out", "lse"), got, strict=True)) if "lse" in arrays else {"out": got}
        for name, part in parts.items():
            shape = queries.shape[: 4 if name == "out" else 3]
            if getattr(part, "shape", None) != shape:
                given = getattr(part, "shape", type(part).__name__)
                raise TypeError(f"{name} is {given}, not an array {shape}")
        if parts["out"].dtype != held:
            raise TypeError(f"out is {parts['out'].dtype}, not {held}")
        steps.append(parts)
    return {name: np.concatenate([step[name] for step in steps], 2) for name in steps[0]}


def judge(function, row, arrays, dtype):
    """The record of one row: verdict, error and a note."""
    record = {"row": row["name"], "verdict": "failed", "error": None, "note": ""}
    try:
        found = answer(function, row, arrays, dtype)
    except NotImplementedError as why:
        return record | {"verdict": "not claimed", "note": str(why)}
    except Exception as error:
        return record | {"note": f"{type(error).__name__}: {error}".splitlines()[0][:160]}
    v, compared = arrays["v"], row.get("compared")
    error = distance(found, arrays, v, compared)
    if error <= TOLERANCE[dtype]:
        return record | {"verdict": "right", "error": error}
    note = "NaN" if np.isnan(found["out"]).any() else ""
    for index, bug in enumerate(row["bugs"]):
        wrong = {part: arrays[f"bugs-{part}"][index] for part in found}
        if distance(found, wrong, v, compared) <= max(TOLERANCE[dtype], 2e-3):  # kept in 16 bits
            note = f"looks like: {bug['name']}"
    record["error"] = error if np.isfinite(error) else None
    return record | {"verdict": "wrong", "note": note}


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.print_usage = lambda file=None: None  # a mistake is answered with one line
    parser.add_argument("--call", metavar="MODULE:FUNCTION")
    parser.add_argument("--dtype", choices=TOLERANCE, default="float32")
    parser.add_argument("--rows", nargs="+", metavar="NAME")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--list", action="store_true", help="print the rows and what they catch")
    options = parser.parse_args(arguments)
    rows = json.loads((HERE / "rows.json").read_text(encoding="utf-8"))
    for name in set(options.rows or ()) - {row["name"] for row in rows}:
        parser.error(f"there is no row {name}; --list names them")
    rows = [row for row in rows if not options.rows or row["name"] in options.rows]
    if options.list:
        for row in rows:
            bugs = "; ".join(bug["name"] for bug in row["bugs"])
            print(f"{row['name']:24} {row['meaning']}\n{'':24} {bugs}")
        return 0
    module, _, name = (options.call or "").partition(":")
    if not module or not name:
        parser.error("say which function, --call module:function")
    sys.path.insert(0, "")  # modules of the current folder
    try:
        function = getattr(importlib.import_module(module), name)
    except Exception as error:
        parser.error(f"{options.call} cannot be loaded: {type(error).__name__}: {error}")
    if options.dtype == "bfloat16" and "dtype" not in inspect.signature(function).parameters:
        parser.error(f"{options.call} takes no dtype, so it cannot be asked for bfloat16")
    records = []
    with np.load(HERE / "vectors.npz", allow_pickle=False) as file:
        for row in rows:
            start = row["name"] + "/"
            arrays = {n.removeprefix(start): file[n] for n in file.files if n.startswith(start)}
            record = judge(function, row, arrays, options.dtype)
            error = "" if record["error"] is None else f"{record['error']:.1e}"
            line = f"{row['name']:24} {record['verdict']:12} {error:8} {record['note']}"
            print(line.rstrip(), flush=True)
            records.append(record)
    verdicts = [record["verdict"] for record in records]
    print(", ".join(f"{verdicts.count(x)} {x}" for x in ("right", *BAD, "not claimed")))
    if options.json:
        options.json.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    return int(any(x in BAD for x in verdicts))


if __name__ == "__main__":
    sys.exit(main())
