"""Attention over a sequence in pieces on several processes: the contract, what is sent, and what is refused."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import contract
from cases import Case, Inputs, by_name
from contract import check_case
from ranks import Ranks

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    with Ranks(4) as ranks:
        yield ranks


def cut(n: int, size: int, how: str) -> list[slice]:
    """Pieces of n tokens: as equal as can be, or uneven, with an empty one."""
    if how == "even":
        edges = [n * i // size for i in range(size + 1)]
    else:
        edges = [0, n // 7, n // 7, n - n // 3, n]
    return [slice(a, b) for a, b in zip(edges, edges[1:], strict=False)]


class Pieces:
    """`context_parallel.attention` on four processes, as the contract asks for it."""

    def __init__(self, ranks: Ranks, how: str = "even", **options: Any) -> None:
        self.ranks, self.how, self.options = ranks, how, options
        self.sent: list[Any] = []

    def run(self, inputs: Inputs, case: Case, dtype: str, *, tolerance: float | None = None, layout: str = "plain") -> Any:  # fmt: skip
        options = {
            **{"causal": case.causal, "scale": case.scale, "dropout": case.dropout},
            **{"tolerance": tolerance, "seed": contract.SEED, **self.options},
        }
        if case.key_range is not None:
            options["key_range"] = case.placement["key_range"]
        given = []
        for rows in cut(case.T, self.ranks.size, self.how):
            arrays = {
                name: x[:, :, rows] if name in ("q", "k", "v", "dout", "dlse") else x
                for name, x in vars(inputs).items()
                if x is not None
            }
            given.append((arrays, dtype, dict(options)))
        found = self.ranks.run("pieces:attend", given)
        self.sent = [told for _, _, told in found]
        joined = [
            {
                name: np.concatenate([part[kind][name] for part in found], 2)
                if name in ("out", "lse", "q", "k", "v")
                else found[0][kind][name]
                for name in found[0][kind]
            }
            for kind in (0, 1)
        ]
        for part in found[
            1:
        ]:  # gradients of slopes are those of the whole sequence, on every process
            for name in {"left", "right"} & part[1].keys():
                assert np.array_equal(part[1][name], found[0][1][name])
        return tuple(joined)


def square(name: str, n: int, **changes: Any) -> Case:
    """A case of n queries, each of which stands at the key of its number."""
    case = by_name(name, T=n, S=n, **changes)
    return case if case.key_range is None else replace(case, query_start=(0, 0))


CASES = (
    *(square(name, 41) for name in ("T-equals-S", "multi-head", "multi-query", "scale", "size-one")),
    *(square(name, 41) for name in ("slopes-zero", "slopes-mixed", "slopes-per-batch", "slopes-extreme")),
    *(square(name, 41) for name in ("symmetric", "asymmetric", "asymmetric-per-batch", "directional")),
    *(square(name, 41) for name in ("both-sides-hidden", "bidirectional-unbiased", "equal-scores", "extreme-logits")),
    square("left-padding", 41, key_range=((13, 41), (0, 41))),
    square("right-padding", 41, key_range=((0, 29), (0, 41))),
    square("range-symmetric", 41, key_range=((3, 28), (1, 41))),
    replace(square("left-padding", 41), name="empty-range", key_range=((4, 4), (0, 41))),
    *(square(name, 41) for name in ("dropout", "dropout-range-symmetric")),
    *(square(name, 1031) for name in ("long", "long-symmetric", "long-directional", "long-per-batch")),
    square("long-T-above-S", 1031),
    square("long-dropout", 523),
    *(square(name, 523) for name in ("far-key-aligned", "far-key-aligned-symmetric", "keys-off-center")),
)  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_pieces_give_what_one_process_gives(four: Ranks, case: Case) -> None:
    check_case(Pieces(four), case, "float32")


@pytest.mark.parametrize("case", [c for c in CASES if c.T > 41 or c.dropout or not c.causal], ids=str)  # fmt: skip
def test_uneven_and_empty_pieces(four: Ranks, case: Case) -> None:
    check_case(Pieces(four, "uneven"), case, "float32", again=False)
