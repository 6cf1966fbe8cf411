"""What attention over pieces of a sequence sends, beside other ways, on machines that are not here; fills docs/guides/many-machines.md.

    python runs/context_plan.py --model FOLDER --text FILE [FILE ...] --longest 1048576    # a trained model's queries and keys
    python runs/context_plan.py --random --heads 8 --key-heads 2 --head-size 64            # random normal ones, grouped heads
    python runs/context_plan.py --write                                                    # the tables alone, from the records

What a head fetches is decided by the code of `linbias.torch.context_parallel` itself: all pieces are made in this process, and
only the gathers between processes are replaced. `tests/test_context_plan.py` holds the bytes to those that four real processes send.
Lengths above --longest take the largest needs that were found at --longest, clipped to the tokens that lie before a piece.

Bytes are those that one rank sends for one layer in one training step of one sequence, forward and backward:

    halo        keys and values that others fetch, and back the gradients of those that were fetched; the two small gathers
    all-gather  all other pieces of K and V, and back a reduce-scatter of their gradients
    ring        K and V once around, and back K, V and their gradients
    Ulysses     q, k, v and out from pieces to heads by all-to-all, and back the gradients of all four; with more ranks than key/value
                heads each of these is sent to several ranks, and with more ranks than query heads it cannot be done; where ranks do not
                divide the heads, the mean of the ranks

A time of communication is bytes / link speed + messages * latency. Over P ranks, a gather, all-gather or reduce-scatter counts log2 P
messages one after the other, a round of the ring or an all-to-all P - 1, and the exchange of a halo one for each rank that gets something.
A time of attention is 2 * (D + E) operations for each pair of a query and a key, and 2.5 times as many backward, at the given rate: for the
halo those pairs that the near-to-far kernels read, for the last rank; for the other ways all visible pairs, shared equally among the ranks.
"""

import argparse
import itertools
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "benchmarks")]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from markers import fill  # noqa: E402
from torch import Tensor  # noqa: E402

import linbias  # noqa: E402
import record  # noqa: E402
from linbias._run.files import write_whole  # noqa: E402
from linbias.torch import pieces, visited  # noqa: E402
from linbias.torch.halo import Plan  # noqa: E402

RECORDS, DOCUMENT = ROOT / "records" / "context_plan.jsonl", "docs/guides/many-machines.md"
LENGTHS = [2**14, 2**16, 2**18, 2**20, 2**22, 2**24]
RANKS = [4, 8, 64]
CHUNK = 4096  # tokens that the model reads at a time
BACKWARD = 2.5  # operations of a backward pass, of those of a forward pass
Record = dict[str, Any]


# What the pieces fetch


class Piece(pieces.Piece):
    """A process's piece of a sequence without the process: a gather returns what the pieces told that were made before.

    Attributes:
        told: What this piece gave to the last gather.
        heard: [ranks, ...], what the next gather returns; None where the others have not told yet.
        gathered_bytes: Sent in gathers so far.
    """

    def __init__(
        self, q: Tensor, k: Tensor, slopes: Tensor, rank: int, size: int, **options: Any
    ) -> None:
        here = mock.patch.object(pieces, "rank_and_size", lambda group: (rank, size))
        given = {"causal": True, "scale": None, "key_range": None, "dropout": 0.0, **options}
        given = {"tolerance": None, **given}
        with here:  # keys stand for values, which are as wide and decide nothing
            super().__init__(q, k, k, slopes, None, None, **given)
        self.told = self.heard = torch.empty(0)
        self.gathered_bytes = 0

    def _gather(self, x: Tensor) -> Tensor:
        self.told = x
        self.gathered_bytes += x.nbytes * (self.size - 1)
        return self.heard if len(self.heard) else x.expand(self.size, *x.shape)


@dataclass(frozen=True)
class Planned:
    """What all ranks do in one layer.

    Attributes:
        needs: [ranks][2][G], keys that each fetches beyond its left and its right edge.
        sent: [ranks], bytes of keys and values that a rank sends forward, and receives the gradients of.
        fetched: [ranks], bytes that it receives forward, and sends the gradients of.
        gathered: [ranks], bytes of the gathers.
        peers: [ranks], others that a rank sends to in the exchange forward and in that backward, summed.
    """

    needs: list[list[list[int]]]
    sent: list[int]
    fetched: list[int]
    gathered: list[int]
    peers: list[int]

    def step(self) -> list[int]:
        """[ranks], bytes that a rank sends in a training step."""
        return [sum(parts) for parts in zip(self.sent, self.fetched, self.gathered, strict=True)]


def simulate(
    q: Tensor, k: Tensor, slopes: Tensor, edges: Sequence[int], **options: Any
) -> Planned:
    """Plan the exchange of the pieces between `edges` of q [B, H, N, D] and k [B, G, N, D]."""
    size = len(edges) - 1
    pieces = [
        Piece(q[:, :, a:b], k[:, :, a:b], slopes, rank, size, **options)
        for rank, (a, b) in enumerate(itertools.pairwise(edges))
    ]
    for piece in pieces:  # a first time, to learn what each tells
        piece.meet()
    heard = torch.stack([piece.told for piece in pieces])
    tables, needs = [], []
    for piece in pieces:
        piece.heard, piece.gathered_bytes = heard, 0
        tables.append(piece.meet())
        needs.append(piece.needs(tables[-1]))
    for piece, table, own in zip(pieces, tables, needs, strict=True):
        piece.heard = torch.tensor(needs)
        plan = piece.agree(table, own)
    p = pieces[0].problem
    token = p.B * (p.D + p.E) * k.element_size()
    return traffic(plan, token, [piece.gathered_bytes for piece in pieces])


def traffic(plan: Plan, token: int, gathered: list[int]) -> Planned:
    """What a plan sends, given the bytes of a head's key and value."""
    ranks = range(len(plan.lengths))
    lent = np.zeros((len(ranks), len(ranks)), np.int64)  # [owner, reader]
    for reader in ranks:
        for owner in ranks:
            if reader != owner:
                lent[owner, reader] = sum(part.count for part in plan.parts(reader, owner))
    peers = (lent > 0).sum(0) + (lent > 0).sum(1)
    sent, fetched = (token * lent).sum(1).tolist(), (token * lent).sum(0).tolist()
    return Planned(plan.counts, sent, fetched, gathered, peers.tolist())


def extrapolate(found: Planned, tokens: int, token: int) -> Planned:
    """The plan of a longer sequence on as many ranks: each fetches the most that any did, where so much lies before it."""
    size = len(found.needs)
    lengths = [tokens // size] * size
    most = np.array(found.needs).max(0)  # [2, G]
    before = np.cumsum([0, *lengths])[:-1]
    beyond = np.stack([before, tokens - before - lengths[0]], -1)[..., None]  # [ranks, 2, 1]
    counts = np.minimum(most, beyond).tolist()
    plan = Plan(0, lengths, counts, 0)
    return traffic(plan, token, found.gathered)


# Queries and keys


@dataclass(frozen=True)
class Activations:
    """Queries and keys to plan for: of each layer q [1, H, N, D] and k [1, G, N, D]; slopes [H]."""

    name: str
    layers: list[tuple[Tensor, Tensor]]
    slopes: Tensor


def of_model(folder: str, files: list[Path], tokens: int, dtype: torch.dtype, name: str) -> Activations:  # fmt: skip
    """A trained model's, while it reads the bytes of files."""
    from linbias.models.decoder import SelfAttention
    from linbias.models.loading import load
    from linbias.models.positions import AttendOptions, Biased
    from linbias.models.window_cache import WindowCache

    model = load(folder).eval()
    text = np.concatenate([np.fromfile(file, np.uint8) for file in files])[:tokens]
    if len(text) < tokens:
        raise SystemExit(f"--text: must hold {tokens:,} bytes, got {len(text):,}")
    ids = torch.from_numpy(text.astype(np.int64))[None]
    position = model.model.position
    if not isinstance(position, Biased):
        raise SystemExit(f"--model: must have linear biases, got {type(position).__name__}")
    attentions = [m for m in model.modules() if isinstance(m, SelfAttention)]
    wanted: list[list[Tensor]] = []
    for attention in attentions:
        heads = [width // attention.head_size for width in attention.widths[:2]]
        wanted.append([torch.empty(1, n, tokens, attention.head_size, dtype=dtype) for n in heads])
    at = 0

    def kept(index: int) -> Any:
        def hook(module: Any, given: Any, projected: Tensor) -> None:
            parts = projected.split(attentions[index].widths, dim=-1)[:2]
            for part, whole in zip(parts, wanted[index], strict=True):
                heads = part.unflatten(-1, (whole.shape[1], -1)).transpose(1, 2)
                whole[:, :, at : at + part.shape[1]] = heads

        return hook

    for index, attention in enumerate(attentions):
        getattr(attention, attention.names[0]).register_forward_hook(kept(index))
    cache = WindowCache.for_model(model)  # the text is read in chunks, as exactly as at once
    for chunk in ids.split(CHUNK, dim=1):
        model(chunk, past_key_values=cache, logits_to_keep=1)
        at += chunk.shape[1]
    layers = [(q, k) for q, k in wanted]
    fall = position.fall(*(x[:, :, :1].float() for x in layers[0]), AttendOptions())
    if set(fall) - {"slopes", "scale"} or fall.get("scale") is not None:
        raise SystemExit(
            f"--model: must have slopes and the usual scale alone, got {', '.join(fall)}"
        )
    return Activations(name, layers, fall["slopes"].detach())


def random(slopes: Tensor, key_heads: int, head_size: int, tokens: int, dtype: torch.dtype, name: str) -> Activations:  # fmt: skip
    """Random normal ones of one layer."""
    draw = torch.Generator().manual_seed(0)
    q, k = (
        torch.randn(1, heads, tokens, head_size, generator=draw).to(dtype)
        for heads in (len(slopes), key_heads)
    )
    return Activations(name, [(q, k)], slopes)


def keys_read(q: Tensor, k: Tensor, slopes: Tensor) -> list[float]:
    """[H]: keys that the kernels read for one of the last queries, on average."""
    queries, keys = min(1024, q.shape[2]), min(2**16, k.shape[2])
    q, k = q[:, :, -queries:], k[:, :, -keys:]
    kept = visited(q, k, k, slopes).work_kept[0]
    return (kept * (keys - (queries - 1) / 2)).tolist()


# What it takes


@dataclass(frozen=True)
class Machine:
    gbytes_per_second: float
    latency_us: float
    tflops: float

    def cost(self, sent: float, messages: float, pairs: float, width: int) -> dict[str, float]:
        """Milliseconds of a step of one layer, and the share of communication where the two do not overlap."""
        communication = sent / (self.gbytes_per_second * 1e6) + messages * self.latency_us / 1e3
        attention = 2 * width * pairs * (1 + BACKWARD) / (self.tflops * 1e9)
        return {
            "communication_ms": float(f"{communication:.4g}"),
            "attention_ms": float(f"{attention:.4g}"),
            "longer": "communication" if communication > attention else "attention",
            "share": float(f"{communication / (communication + attention):.3g}"),
        }


def steps(ranks: int) -> int:
    """Messages one after the other of a collective in which what is known doubles with each."""
    return math.ceil(math.log2(ranks))


def pairs_read(window: float, tokens: float) -> float:
    """Pairs of a query and a key in a causal sequence in which no query reads more than `window` keys."""
    window = min(window, tokens)
    return window * tokens - window**2 / 2


def others(H: int, G: int, D: int, tokens: int, ranks: int, itemsize: int, machine: Machine) -> dict[str, Record | None]:  # fmt: skip
    """The ways that do not look at slopes: all ranks send alike."""
    n, away = tokens / ranks, ranks - 1
    piece = n * G * 2 * D * itemsize
    pairs = H * tokens**2 / 2 / ranks
    # A rank of Ulysses has H / P query heads, and at least one key/value head.
    heads = 2 * H / ranks + 2 * max(1.0, G / ranks)
    exchanged = away * n * heads * D * itemsize
    found: dict[str, Record | None] = {}
    for name, forward, backward, messages in (
        ("all-gather", away * piece, away * piece, 2 * steps(ranks)),
        ("ring", away * piece, 2 * away * piece, 3 * away),
        ("ulysses", exchanged, exchanged, 8 * away),
    ):
        sent = forward + backward
        found[name] = {
            **{"forward_bytes": round(forward), "backward_bytes": round(backward)},
            **{"messages": messages, **machine.cost(sent, messages, pairs, 2 * D)},
        }
    if ranks > H:
        found["ulysses"] = None
    return found


def halo(found: list[Planned], read: list[list[float]], D: int, tokens: int, ranks: int, machine: Machine) -> Record:  # fmt: skip
    """The same of `context_parallel`, by layer; times are means over layers, of the rank that has most to do."""
    layers = []
    for planned, windows in zip(found, read, strict=True):
        step = planned.step()
        messages = max(planned.peers) + 2 * steps(ranks)  # exchanges, and two gathers
        both = zip(planned.sent, planned.fetched, planned.gathered, strict=True)
        # A link carries both ways at once: forward the larger of the two counts, and backward again.
        busiest = max(2 * max(sent, fetched) + gathered for sent, fetched, gathered in both)
        start = tokens - tokens / ranks
        pairs = sum(pairs_read(w, tokens) - pairs_read(w, start) for w in windows)
        layers.append(
            {
                "needs": np.array(planned.needs).max(0)[0].tolist(),
                "forward_bytes_mean": round(float(np.mean(planned.sent))),
                "forward_bytes_worst": max(*planned.sent, *planned.fetched),
                "gathered_bytes": max(planned.gathered),
                "step_bytes_mean": round(float(np.mean(step))),
                "step_bytes_worst": max(step),
                "peers": max(planned.peers),
                "messages": messages,
                **machine.cost(busiest, messages, pairs, 2 * D),
            }
        )
    mean = {
        name: float(np.mean([layer[name] for layer in layers]))
        for name in ("step_bytes_mean", "step_bytes_worst", "communication_ms", "attention_ms")
    }
    c, a = mean["communication_ms"], mean["attention_ms"]
    return {
        **{name: float(f"{x:.5g}") for name, x in mean.items()},
        **{"longer": "communication" if c > a else "attention", "share": float(f"{c / (c + a):.3g}")},
        "layers": layers,
    }  # fmt: skip


def plan(given: Activations, lengths: list[int], all_ranks: list[int], machine: Machine) -> list[Record]:  # fmt: skip
    """A record for each length and number of ranks."""
    q, k = given.layers[0]
    (_, H, longest, D), G = q.shape, k.shape[1]
    shared = {
        **{"activations": given.name, "layers": len(given.layers), "H": H, "G": G, "D": D},
        **{"dtype": str(q.dtype).removeprefix("torch."), "slopes": given.slopes.tolist()},
        **{"longest_simulated": longest, **vars(machine)},
    }
    read = [[round(x, 1) for x in keys_read(*layer, given.slopes)] for layer in given.layers]
    found = []
    for ranks in all_ranks:
        kept: list[Planned] = []
        for tokens in sorted({*lengths, longest}):
            if tokens <= longest:
                edges = [tokens * rank // ranks for rank in range(ranks + 1)]
                kept = [
                    simulate(q[:, :, :tokens], k[:, :, :tokens], given.slopes, edges)
                    for q, k in given.layers
                ]
                planned = kept
            else:
                token = 2 * D * q.element_size()
                planned = [extrapolate(layer, tokens, token) for layer in kept]
            if tokens not in lengths:
                continue
            figures = {
                "halo": halo(planned, read, D, tokens, ranks, machine),
                **others(H, G, D, tokens, ranks, q.element_size(), machine),
            }
            fetched = figures["halo"]["step_bytes_mean"]
            everything = figures["all-gather"]
            times = (everything["forward_bytes"] + everything["backward_bytes"]) / fetched
            found.append(
                {
                    **shared,
                    **{"tokens": tokens, "ranks": ranks, "simulated": tokens <= longest},
                    "keys_read": read,
                    "all_gather_over_halo": round(times, 1),
                    **figures,
                }
            )
            shown = {name: found[-1][name] for name in ("tokens", "ranks", "all_gather_over_halo")}
            print(given.name, shown, [layer["needs"] for layer in figures["halo"]["layers"]], flush=True)  # fmt: skip
    return found


# The page


def written() -> dict[str, str]:
    """The table of each set of activations, and the bars, in words."""
    records = [json.loads(line) for line in RECORDS.read_text().splitlines()]
    by_name = {r["activations"]: [] for r in records}
    for r in records:
        by_name[r["activations"]].append(r)
    whole = [found for found in by_name.values() if {r["tokens"] for r in found} >= {*LENGTHS}]
    few = [[r for r in found if r["ranks"] == 8] for found in whole[1:]]
    parts = [bars(by_name), *map(table, [*whole[:1], *few])]
    r = records[-1]
    text = (
        f"Times: links of {r['gbytes_per_second']:g} GB/s with {r['latency_us']:g} microseconds for each message, and attention at"
        f" {r['tflops']:g} TFLOP/s; the records have the busiest ranks, messages and further numbers of ranks."
        f" `python runs/context_plan.py`, {r['date']}."
    )
    return {"traffic": "\n\n".join([*parts, text])}


def bars(by_name: dict[str, list[Record]]) -> str:
    """How much less is sent than in an all-gather, for two sizes."""
    lines = [
        "| all-gather / halo | 64k tokens on 4 ranks | 1M tokens on 8 ranks |",
        "|---|---|---|",
    ]
    for name, records in by_name.items():
        found = {(r["tokens"], r["ranks"]): f"{r['all_gather_over_halo']:,.0f}" for r in records}
        lines.append(f"| {name} | {found[2**16, 4]} | {found[2**20, 8]} |")
    return "\n".join(lines)


def table(records: list[Record]) -> str:
    r = records[0]
    title = (
        f"**{r['activations']}**: {r['H']} heads, {r['G']} for keys and values, of size {r['D']}, {r['dtype']},"
        f" slopes from {max(r['slopes']):g} to {min(r['slopes']):g}; simulated up to {size(r['longest_simulated'])} tokens, calculated beyond."
    )
    lines = [
        "| tokens | ranks | halo, MB | all-gather | ring | Ulysses | all-gather / halo | halo: send + attend, ms | all-gather: the same |",
        "|---" * 9 + "|",
    ]
    for r in sorted(records, key=lambda r: (r["tokens"], r["ranks"])):
        found = r["halo"]
        sums = [
            "-" if x is None else megabytes(x["forward_bytes"] + x["backward_bytes"])
            for x in (r["all-gather"], r["ring"], r["ulysses"])
        ]
        cells = [
            *(size(r["tokens"]), f"{r['ranks']}", megabytes(found["step_bytes_mean"])),
            *(*sums, f"{r['all_gather_over_halo']:,.0f}"),
            *(times(x) for x in (found, r["all-gather"])),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([title, "", *lines])


def size(tokens: int) -> str:
    return f"{tokens >> 20}M" if tokens >= 2**20 else f"{tokens >> 10}k"


def times(figures: Record) -> str:
    return f"{short(figures['communication_ms'], 2)} + {short(figures['attention_ms'], 2)}"


def megabytes(count: float) -> str:
    return short(count / 1e6)


def short(x: float, digits: int = 3) -> str:
    """So many digits, or all before the point."""
    return f"{x:,.{max(0, digits - 1 - math.floor(math.log10(x)))}f}" if x else "0"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="folder of a model with linear biases that reads bytes")
    parser.add_argument("--text", nargs="+", type=Path, help="files that it reads, one after the other")  # fmt: skip
    parser.add_argument("--random", action="store_true", help="random normal queries and keys")
    parser.add_argument("--slopes", default="paper", help="of --random: schedule, or numbers with commas between them")  # fmt: skip
    parser.add_argument("--heads", type=int, default=8, help="of --random")
    parser.add_argument("--key-heads", type=int, help="of --random; as many as --heads")
    parser.add_argument("--head-size", type=int, default=64, help="of --random")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--name", help="of these queries and keys in records and tables")
    parser.add_argument("--tokens", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--longest", type=int, default=2**16, help="tokens to simulate at most")
    parser.add_argument("--gbytes-per-second", type=float, default=25, help="of a link, one way; 25: InfiniBand of 200 Gbit/s")  # fmt: skip
    parser.add_argument("--latency-us", type=float, default=50, help="of a message")
    parser.add_argument("--tflops", type=float, default=200, help="rate of attention")
    parser.add_argument("--records", type=Path, default=RECORDS)
    parser.add_argument("--write", action="store_true", help="fill the page from the records")
    options = parser.parse_args(arguments)

    machine = Machine(options.gbytes_per_second, options.latency_us, options.tflops)
    dtype = getattr(torch, options.dtype)
    given = None
    with torch.no_grad():
        if options.model:
            name = options.name or f"A trained model, {Path(options.model).name}"
            given = of_model(options.model, options.text or [], options.longest, dtype, name)
        elif options.random:
            name = options.name or f"Random, {options.slopes}"
            if options.slopes.replace(".", "").replace(",", "").replace("e-", "").isdigit():
                slopes = torch.tensor([float(x) for x in options.slopes.split(",")])
            else:
                slopes = torch.from_numpy(linbias.slopes(options.heads, options.slopes)).float()
            shape = options.key_heads or len(slopes), options.head_size, options.longest
            given = random(slopes, *shape, dtype, name)
        if given is not None:
            where = record.here()
            found = plan(given, options.tokens, options.ranks, machine)
            path = options.records
            lines = path.read_text().splitlines() if path.exists() else []
            rest = [r for r in map(json.loads, lines) if r["activations"] != given.name]
            new = [{**r, **where} for r in found]
            text = "".join(json.dumps(r, separators=(",", ":")) + "\n" for r in [*rest, *new])
            write_whole(path, text.encode())
    if options.write:
        fill(DOCUMENT, written())


if __name__ == "__main__":
    main()
