"""How one case is checked, timed and recorded: every implementation against float64, then all in turn.

An implementation that cannot run, or is wrong, is recorded as left out, with the reason, and costs the others nothing. One
that leaves the device in error, after which nothing runs in this process, ends it with the status AGAIN: the script starts
the stage once more, which goes on behind what is recorded.
"""

import argparse
import gc
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

import record

Call = Callable[[], Any]
Makers = dict[str, Callable[[], Call]]
FORWARD, BACKWARD = "forward", "forward+backward"
AGAIN = 75
ROWS = 8  # the last ones, which are compared with float64
ALLOWED_ERROR = 2e-2  # of the largest number, for 16 bits
# How names begin: those of ours, of which one that fails is a failure of its stage, and those of calls captured as graphs.
OURS, GRAPH = ("triton", "blocked"), "graph: "
OTHERWISE = (
    ", no bias"  # how names of what computes something else end: they stand there for scale
)


@dataclass
class Case:
    """Inputs, and what must come of them.

    Attributes:
        exact: Gives out of the last rows of q, and k and v, all in float64.
        fields: What gives more for the record of an implementation, by its name.
    """

    name: str
    q: Tensor
    k: Tensor
    v: Tensor
    exact: Callable[[Tensor, Tensor, Tensor], Tensor]
    inputs: str = "random normal"
    causal: bool = True
    modes: tuple[str, ...] = (FORWARD, BACKWARD)
    fields: dict[str, Callable[[], dict[str, Any]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.q, self.k, self.v = self.leaves = [x.detach() for x in (self.q, self.k, self.v)]
        self.dout = torch.randn_like(self.q)

    @property
    def sizes(self) -> dict[str, Any]:
        (B, H, T, D), (G, S) = self.q.shape, self.k.shape[1:3]
        sizes = {"B": B, "H": H, "G": G, "T": T, "S": S, "D": D, "dtype": str(self.q.dtype)[6:]}
        return {"case": self.name, **sizes, "inputs": self.inputs}

    def enter(self, mode: str) -> None:
        """Say which mode the next calls are of: gradients are taken, or not."""
        for x in self.leaves:
            x.requires_grad_(mode == BACKWARD)

    def call(self, function: Call, mode: str, dout: Tensor | None = None) -> Any:
        """Out, or the gradients of q, k and v."""
        if mode == FORWARD:
            with torch.no_grad():
                return function()
        return torch.autograd.grad(function(), self.leaves, self.dout if dout is None else dout)

    @cached_property
    def truth(self) -> dict[str, Tensor]:
        """In float64, with only the last rows in the loss."""
        wide = [x.detach().double() for x in (self.q[:, :, -ROWS:], self.k, self.v)]
        leaves = [x.requires_grad_(BACKWARD in self.modes) for x in wide]
        out = self.exact(*leaves)
        truth = {"out": out.detach()}
        if BACKWARD in self.modes:
            gradients = torch.autograd.grad(out, leaves, self.dout[:, :, -ROWS:].double())
            truth |= dict(zip(("dq", "dk", "dv"), gradients, strict=True))
        return truth

    def check(self, function: Call, mode: str) -> None:
        """Refuse results that are off by more than rounding."""
        if mode == FORWARD:
            found = {"out": self.call(function, mode)[:, :, -ROWS:]}
        else:
            dout = torch.zeros_like(self.dout)
            dout[:, :, -ROWS:] = self.dout[:, :, -ROWS:]
            dq, dk, dv = self.call(function, mode, dout)
            found = {"dq": dq[:, :, -ROWS:], "dk": dk, "dv": dv}
        for name, x in found.items():
            true = self.truth[name]
            error = ((x - true).abs().max() / true.abs().max()).item()
            if not error < ALLOWED_ERROR:
                raise AssertionError(f"{name} is off by {error:.2g} of its largest number")


def measure(case: Case, makers: Makers, options: argparse.Namespace) -> None:
    """Check what `makers` make, time it in turn in each mode, and record it."""
    gc.collect()  # what an earlier case held
    made: dict[str, Call] = {}
    gone: set[str] = set()
    for mode in case.modes:
        fields = {**case.sizes, "mode": mode}
        gone |= left_out_before(fields, options)
        if is_measured(fields, options):
            continue
        case.enter(mode)
        functions: dict[str, Call] = {}
        for name in [name for name in makers if name not in gone]:
            with left_out_if_it_fails(fields, name, gone, options):
                made[name] = made.get(name) or makers[name]()
                case.call(made[name], mode)
                if not name.endswith(OTHERWISE):
                    case.check(made[name], mode)
                functions[name] = partial(case.call, made[name], mode)
        B, H, G, T, S, D = (fields[letter] for letter in "BHGTSD")
        flop = record.flop(B, H, T, S, D, case.causal)
        moved = record.moved_bytes(B, H, G, T, S, D, case.q.element_size())
        if mode == BACKWARD:
            flop, moved = flop * 7 // 2, moved * 3
        work = {"flop": flop, "bytes": moved, "work_kept": None}
        more = {name: {**work, **case.fields.get(name, dict)()} for name in functions}
        write_times(fields, functions, more, options)


@contextmanager
def left_out_if_it_fails(
    fields: dict[str, Any], name: str, gone: set[str], options: argparse.Namespace
) -> Iterator[None]:
    """Record a failure, and add the name to those that are `gone`."""
    try:
        yield
        synchronize()
    except Exception as problem:
        gone.add(name)
        reason = f"{type(problem).__name__}: {problem}".strip().split("\n")[0][:200]
        line = {**fields, "implementation": name, "left_out": reason}
        record.write(line, options.records)
        print(f"{describe(line)} is left out: {problem!s:.2000}", flush=True)
        options.failed |= is_ours(name)
        try:
            synchronize()
        except Exception:  # nor would any later call run
            raise SystemExit(AGAIN) from problem


def left_out_before(fields: dict[str, Any], options: argparse.Namespace) -> set[str]:
    """What has failed already, of a stage that is started once more."""
    lines = [line for line in lines_so_far(options) if fields.items() <= line.items()]
    return {line["implementation"] for line in lines if "left_out" in line}


def is_measured(fields: dict[str, Any], options: argparse.Namespace) -> bool:
    return any(fields.items() <= x.items() and "p50_ms" in x for x in lines_so_far(options))


def write_times(
    fields: dict[str, Any],
    functions: dict[str, Call],
    more: dict[str, dict[str, Any]],
    options: argparse.Namespace,
) -> None:
    """Time in turn, record and print, beside the first; `more` are fields by implementation."""
    times = record.interleave(functions, options.repeats)
    for name, values in times.items():
        line = {
            **fields, "implementation": name, **record.spread(values), "repeats": options.repeats,
            "peak_memory_bytes": peak_memory(functions[name]), **more.get(name, {}),
            **record.here(options.device),
        }  # fmt: skip
        record.write(line, options.records)
        first = record.spread(next(iter(times.values())))["p50_ms"]
        ratio = line["p50_ms"] / max(first, 1e-9)
        print(f"{describe(line)} {line['p50_ms']:9.3f} ms {ratio:6.2f}", flush=True)


def describe(line: dict[str, Any]) -> str:
    words = (line["case"], f"H={line['H']} D={line['D']}", line["inputs"], line["mode"])
    return f"{'  '.join(words):56} {line['implementation']:28}"


def is_ours(name: str) -> bool:
    return name.removeprefix(GRAPH).startswith(OURS)


def peak_memory(function: Call) -> int | None:
    """Bytes that a call takes on the device at most, above what is there."""
    if not torch.cuda.is_available():
        return None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def lines_so_far(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The records of this run, which begin behind those of others; a line that was cut is none."""
    if not options.records.exists():
        return []
    with options.records.open("rb") as file:
        file.seek(options.start)
        found = []
        for line in file.read().decode().splitlines():
            with suppress(json.JSONDecodeError):
                found.append(json.loads(line))
        return found
