"""How one case is checked against float64, timed in turn, and recorded.

One that cannot run, or is wrong, is recorded as left out, with the reason, and costs the others
nothing. One that leaves the device in error ends this process with the status AGAIN: the script
starts the stage once more, which goes on behind what is recorded.
"""

import argparse
import gc
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

import record
from record import BACKWARD, FORWARD, Fields, synchronize

Call = Callable[[], Any]
Makers = dict[str, Callable[[], Call]]
AGAIN = 75
ROWS = 8  # the last ones, which are compared with float64
ALLOWED_ERROR = 2e-2  # of the largest number, for 16 bits
# How names begin: those of ours, of which one that fails is a failure of its stage, and those of
# calls captured as graphs; and how those end that compute something else, and stand there for
# scale.
OURS, GRAPH, OTHERWISE = ("triton", "blocked"), "graph: ", ", no bias"
IDENTITY = ("case", "mode", *"BHGTSD", "dtype", "inputs")


@dataclass
class Case:
    """Inputs, and what must come of them.

    `exact` gives out of the last rows of q, and k and v, in float64; `fields` gives more for the
    record of an implementation, by its name.
    """

    name: str
    q: Tensor
    k: Tensor
    v: Tensor
    exact: Callable[[Tensor, Tensor, Tensor], Tensor]
    inputs: str = "random normal"
    modes: tuple[str, ...] = (FORWARD, BACKWARD)
    fields: dict[str, Callable[[], Fields]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.q, self.k, self.v = self.leaves = [x.detach() for x in (self.q, self.k, self.v)]
        self.dout = torch.randn_like(self.q)

    def enter(self, mode: str) -> Fields:
        """Take gradients in the next calls, or not; what is known of them."""
        for x in self.leaves:
            x.requires_grad_(mode == BACKWARD)
        dtype = str(self.q.dtype).removeprefix("torch.")
        return record.fields(self.name, self.q.shape, self.k.shape, dtype, mode, True, self.inputs)

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

    def check(self, function: Call, mode: str) -> float:
        """By how much of its largest number the worst result is off: at most by rounding."""
        if mode == FORWARD:
            results = {"out": self.call(function, mode)[:, :, -ROWS:]}
        else:
            dout = torch.zeros_like(self.dout)
            dout[:, :, -ROWS:] = self.dout[:, :, -ROWS:]
            dq, dk, dv = self.call(function, mode, dout)
            results = {"dq": dq[:, :, -ROWS:], "dk": dk, "dv": dv}
        errors = {n: (x - self.truth[n]).abs().max() for n, x in results.items()}
        error = max((x / self.truth[n].abs().max()).item() for n, x in errors.items())
        if not error < ALLOWED_ERROR:
            raise AssertionError(f"a result is off by {error:.2g} of its largest number")
        return error


def measure(
    case: Case,
    makers: Makers,
    options: argparse.Namespace,
    within: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext(),
) -> None:
    """Check what `makers` make, time it in turn in each mode, and record it.

    `within` gives what the calls of a name run in, with their backward pass.
    """
    gc.collect()  # what an earlier case held
    made: dict[str, Call] = {}
    gone: set[str] = set()

    def run(name: str, mode: str, do: Callable[[Call, str], Any] = case.call) -> Any:
        with within(name):
            return do(made[name], mode)

    for mode in case.modes:
        fields = case.enter(mode)
        before = [x for x in lines_so_far(options) if _identity(fields).items() <= x.items()]
        gone |= {line["implementation"] for line in before if "left_out" in line}
        if any("p50_ms" in line for line in before):
            continue
        functions: dict[str, Call] = {}
        more: dict[str, Fields] = {}
        for name in [name for name in makers if name not in gone]:
            with left_out_if_it_fails(fields, name, gone, options):
                made[name] = made.get(name) or makers[name]()
                run(name, mode)
                functions[name] = partial(run, name, mode)
                more[name] = {"peak_memory_bytes": peak_memory(functions[name])}
                if not name.endswith(OTHERWISE):
                    more[name]["error"] = run(name, mode, case.check)
                more[name] |= case.fields.get(name, dict)()
        kept = {name: function for name, function in functions.items() if name not in gone}
        record.compare(fields, kept, options, more)


@contextmanager
def left_out_if_it_fails(
    fields: Fields, name: str, gone: set[str], options: argparse.Namespace
) -> Iterator[None]:
    """Record a failure, and add the name to those that are `gone`."""
    try:
        yield
        synchronize()
    except Exception as problem:
        gone.add(name)
        reason = f"{type(problem).__name__}: {problem}".strip().split("\n")[0][:200]
        line = {**_identity(fields), "implementation": name, "left_out": reason}
        record.write(line, options.records)
        print(f"{line} is left out: {problem!s:.2000}", flush=True)
        options.failed |= is_ours(name)
        try:
            synchronize()
        except Exception:  # nor would any later call run
            raise SystemExit(AGAIN) from problem


def _identity(fields: Fields) -> Fields:
    return {name: fields[name] for name in IDENTITY if name in fields}


def is_ours(name: str) -> bool:
    return name.removeprefix(GRAPH).startswith(OURS)


def peak_memory(function: Call) -> int | None:
    """Bytes that a call takes on the device at most, above what is there."""
    if not torch.cuda.is_available():
        return None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    synchronize()
    return torch.cuda.max_memory_allocated() - before


def lines_so_far(options: argparse.Namespace) -> list[Fields]:
    """The records of this run, which begin behind those of others; a line that was cut is none."""
    lines = []
    if options.records.exists():
        for line in options.records.read_bytes()[options.start :].decode().splitlines():
            with suppress(json.JSONDecodeError):
                lines.append(json.loads(line))
    return lines
