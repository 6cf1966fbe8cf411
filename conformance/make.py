"""Make vectors.npz and rows.json: inputs, right answers by the definition, and what bugs give.

Inputs are multiples of 1/16 with at most seven significant bits, which all formats hold exactly.
Each bug of a row must move the answer by ten times what check.py allows for bfloat16; rows.json
says by how much, in units of the largest |v|.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import linbias
from bugs import BUGS, Answer, Array, Call
from check import TOLERANCE, distance

HERE = Path(__file__).parent


@dataclass
class Row:
    """The arguments that a function gets, and the bugs that it must tell from the right answer."""

    name: str
    meaning: str
    arguments: dict[str, Any]
    bugs: tuple[str, ...]
    compared: npt.NDArray[np.bool_] | None = None  # [B, T], the queries that count: not padding's
    steps: bool = False  # a call for each query, with the keys up to it


def numbers(seed: int, *shape: int) -> Array:
    """Multiples of 1/16 from -31/16 to 31/16, by splitmix64."""
    with np.errstate(over="ignore"):
        x = np.arange(np.prod(shape), dtype=np.uint64) + np.uint64(seed * 1_000_003)
        x = x * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return ((x % np.uint64(63)).astype(np.float64) - 31).reshape(shape) / 16


def inputs(seed: int, B: int = 1, H: int = 8, T: int = 7, S: int = 7, D: int = 4, G: int = 0):
    """The arguments that every row has: causal, the paper's slopes."""
    q = numbers(3 * seed, B, H, T, D)
    k, v = (numbers(3 * seed + i, B, G or H, S, D) for i in (1, 2))
    others = {"slopes": linbias.slopes(H), "causal": True, "scale": D**-0.5}
    return {"q": q, "k": k, "v": v, **others}


def call(arguments: dict[str, Any]) -> Call:
    """Fill in what the arguments leave open."""
    given = dict(arguments)
    q, k = given["q"], given["k"]
    (B, H, T, _), S = q.shape, k.shape[2]
    slopes = given["slopes"]
    if slopes is None:
        slopes = linbias.slopes(H, given["schedule"], given["max_bias"])
    right = given.get("right_slopes", np.inf if given["causal"] else slopes)
    return Call(
        q, k, given["v"],
        slopes=np.broadcast_to(slopes, (B, H)).astype(float),
        right_slopes=np.broadcast_to(right, (B, H)).astype(float),
        scale=given["scale"],
        query_start=given.get("query_start", np.full(B, S - T)),
        key_range=given.get("key_range", np.array([[0, S]] * B)),
        segments=given.get("segments", np.zeros((B, S), int)),
    )  # fmt: skip


def right(row: Row) -> Answer:
    """The definition's answer, asked with its own arguments."""
    c = call(row.arguments)
    mask = c.segments[:, None, :, None] == c.segments[:, None, None] if c.segments.any() else None
    return linbias.attention(
        c.q, c.k, c.v, c.slopes, causal=False, right_slopes=c.right_slopes, scale=c.scale,
        key_range=c.key_range, query_start=c.query_start, mask=mask, return_lse=True,
    )  # fmt: skip


LSE = {"return_lse": True}
PADDED = ("padding seen", "query counted without padding, keys with it")
ALIGNED = ("first query at the first key", "query one position early", "query one position late")


def basic_rows() -> list[Row]:
    """Sign, scale, order, heads."""
    no_bias, full = inputs(11), inputs(12, T=3)
    for given, causal in ((no_bias, True), (full, False)):
        given.update(slopes=np.zeros(8), causal=causal)
    large = inputs(13, H=4, T=6, S=6, D=16)
    large["q"] = np.full((1, 4, 6, 16), 48.0)
    large["k"] = np.tile(np.array([[2, -3, 5, 4, 6, 64.0]]).T, (1, 4, 1, 16))
    per_row = inputs(14, B=2)
    per_row["slopes"] = np.stack([linbias.slopes(8), linbias.slopes(8, "geometric", 4)[::-1]])
    return [
        Row("causal", "Far keys lose slope * distance, each head by its own slope.", inputs(1),
            ("sign turned", "no bias", "bias added twice", "scores multiplied by bias",
             "slopes in reverse order", "slopes of half the heads, twice", "future seen")),
        Row("scale",
            "Products of queries and keys are scaled before the bias is added; heads of 16.",
            inputs(2, H=4, D=16, T=2, S=9),
            ("bias inside the scale", "no scale", "scale of the whole width")),
        Row("before-softmax", "The bias is added to scores, not to weights.", inputs(3, T=5, S=17),
            ("bias after softmax", "scores multiplied by bias")),
        Row("no-bias", "Slopes of zero are no bias.", no_bias,
            ("zero slopes taken for absent ones", "future seen")),
        Row("no-bias-both-sides", "Slopes of zero on both sides: plain attention.", full,
            ("zero slopes taken for absent ones", "causal although both sides are asked for")),
        Row("large-scores", "Scores up to 12,288 overflow nothing, and the future stays hidden.",
            large, ("hidden by -10,000", "exponentials without the row's maximum")),
        Row("slopes-per-row", "Each batch row has slopes of its own, [B, H].", per_row,
            ("first batch row's slopes for all", "sign turned")),
        Row("grouped-heads", "Query head h reads key/value head h // (H // G); 8 and 2 heads.",
            inputs(15, G=2),
            ("grouped heads in the wrong order", "slopes of the key heads, repeated")),
        Row("one-key-head", "All query heads read one key/value head, with slopes of their own.",
            inputs(16, G=1), ("slopes of the key heads, repeated", "sign turned")),
    ]  # fmt: skip


def slope_rows() -> list[Row]:
    """Schedules, by what attention gives with them; slopes are not given."""
    rows = []
    for seed, (H, schedule, max_bias, wrong) in enumerate((
        (8, "paper", 8.0, ("steepest slope is 1", "slopes of half the heads, twice",
                           "slopes in reverse order")),
        (6, "paper", 8.0, ("slopes of schedule geometric", "slopes sorted")),
        (12, "paper", 8.0, ("slopes of schedule geometric", "slopes sorted", "steepest slope is 1",
                            "slopes of half the heads, twice")),
        (20, "paper", 8.0, ("slopes of schedule geometric", "slopes sorted")),
        (71, "paper", 8.0, ("slopes of schedule geometric", "slopes sorted")),
        (12, "geometric", 8.0, ("slopes of schedule paper", "steepest slope is 1")),
        (12, "halving", 8.0, ("slopes of schedule paper", "slopes of schedule geometric")),
        (12, "mpt", 8.0, ("slopes sorted", "slopes of schedule geometric")),
        (8, "mpt", 16.0, ("slopes of schedule paper", "slopes in reverse order")),
    )):  # fmt: skip
        given = inputs(20 + seed, H=H, T=1, S=9)
        given.update(slopes=None, schedule=schedule, max_bias=max_bias)
        name = f"slopes-{schedule}-{H}"
        meaning = f"Slopes of {H} heads by the schedule `{schedule}`"
        if max_bias != 8:
            name, meaning = f"{name}-max-{max_bias:g}", f"{meaning}, down to 2^-{max_bias:g}"
        rows.append(Row(name, f"{meaning}.", given, wrong))
    return rows


def position_rows() -> list[Row]:
    """Where queries stand."""
    both, fewer, ahead = inputs(40), inputs(41, T=3), inputs(42, T=3)
    for given in (both, fewer, ahead):
        given["causal"] = False
    # 40 positions before the first key, lse tells more than out: every key has much the same bias.
    ahead.update(query_start=np.array([-40]), **LSE)
    directional, asymmetric = inputs(43), inputs(44)
    half = linbias.slopes(4)
    hidden = np.full(4, np.inf)
    sides = (np.concatenate([half, hidden]), np.concatenate([hidden, half]))
    directional.update(causal=False, slopes=sides[0], right_slopes=sides[1])
    asymmetric.update(causal=False, right_slopes=linbias.slopes(8)[::-1].copy())
    part = {**inputs(45, T=3, S=5), "query_start": np.array([1]), **LSE}
    return [
        Row("fewer-queries", "The last query stands at the last key; 3 queries, 7 keys, causal.",
            inputs(46, T=3), ALIGNED[:2]),
        Row("more-queries", "The last query stands at the last key;"
            " the first 3 of 7 queries see none and give zeros.", inputs(47, S=4),
            (*ALIGNED, "empty row gives NaN", "empty row gives the mean of all values")),
        Row("symmetric", "An encoder's keys lose slope * distance on both sides.", both,
            ("future rewarded", "sign turned", "causal although both sides are asked for")),
        Row("symmetric-fewer-queries", "Both sides, 3 queries at the last of 7 keys.", fewer,
            (*ALIGNED, "future rewarded")),
        Row("directional",
            "Half of the heads look left and half look right, all at their own position too.",
            directional, ("sides swapped", "own position hidden", "future seen")),
        Row("asymmetric", "Each side has slopes of its own.", asymmetric,
            ("sides swapped", "left slopes on both sides", "future rewarded")),
        Row("decode",
            "One call per query with the keys up to it gives what one causal call gives.",
            inputs(48),
            ("query one position early", "no bias", "each query counted as position 0"),
            steps=True),
        Row("part-of-the-keys", "Queries 1 to 3 of 5 keys, given by query_start;"
            " with lse, so that parts can be merged.", part,
            (*ALIGNED[1:], "bias of the key's position")),
        Row("keys-after-the-queries",
            "Keys that all lie 40 positions and more to the right; with lse.", ahead,
            ("first query at the first key", "future rewarded")),
    ]  # fmt: skip


def hidden_rows() -> list[Row]:
    """Padding, caches, packed texts, rows that see nothing."""
    rows = []
    ranges = {"left": np.array([[3, 7], [0, 7]]), "right": np.array([[0, 4], [0, 7]])}
    for seed, (side, causal) in enumerate((s, c) for s in ranges for c in (True, False)):
        key_range = ranges[side]
        keys = np.arange(7)
        given = {**inputs(60 + seed, B=2), "causal": causal, "key_range": key_range}
        wrong = {
            ("left", True): PADDED,
            ("left", False): (*PADDED, "future rewarded"),
            ("right", True): ("last query at the last key that counts", "future seen"),
            ("right", False): ("padding seen", "last query at the last key that counts"),
        }[side, causal]
        rows.append(
            Row(f"padding-{side}" + ("" if causal else "-symmetric"),
                f"Padding on the {side} is not seen and moves nothing"
                + (", causal." if causal else ", both sides."),
                given, wrong,
                compared=(keys >= key_range[:, :1]) & (keys < key_range[:, 1:]))
        )  # fmt: skip
    cache = {
        **inputs(65, B=2, T=1, S=16),
        "key_range": np.array([[0, 9], [0, 14]]),
        "query_start": np.array([8, 13]),
    }
    prompt = {**inputs(66, B=2, T=1), "key_range": np.array([[3, 7], [0, 7]])}
    texts = np.array([[0] * 3 + [1] * 4, [0] * 4 + [1] + [2] * 2])
    packed = {"segments": texts}
    empty = {"key_range": np.array([[0, 7], [4, 4]])}
    return [
        *rows,
        Row("cache",
            "One query per row and a cache that is filled up to it: 9 and 14 of 16 slots.", cache,
            ("empty slots of the cache seen", "query one position early", "no bias")),
        Row("decode-padding-left", "One query at the end of a row that begins with padding.",
            prompt, ("padding seen", "query counted without padding, keys with it", "no bias")),
        Row("packed", "Texts in one row do not see each other, causal.",
            {**inputs(67, B=2), **packed}, ("neighbours in a packed row seen",)),
        Row("packed-symmetric", "Texts in one row do not see each other, both sides.",
            {**inputs(68, B=2), **packed, "causal": False},
            ("neighbours in a packed row seen", "future rewarded")),
        Row("empty", "A query that may see no key gives zeros.", {**inputs(69, B=2, T=3), **empty},
            ("empty row gives NaN", "empty row gives the mean of all values", "padding seen")),
        Row("lse", "The log of the sum of exponentials is that of the scores with their biases.",
            {**inputs(70, T=5), **LSE},
            ("lse without the bias", "lse in base 2", "lse less the row's maximum",
             "bias of the key's position")),
        Row("lse-symmetric", "The same with both sides.", {**inputs(71), "causal": False, **LSE},
            ("lse without the bias", "lse in base 2", "future rewarded")),
        Row("lse-empty", "A query that may see no key has an lse of minus infinity.",
            {**inputs(72, B=2, T=3), **empty, **LSE}, ("empty row gives NaN", "lse in base 2")),
    ]  # fmt: skip


def far_rows() -> list[Row]:
    """Positions that 16 bits do not hold."""
    rows = []
    for seed, S in ((80, 2500), (84, 5000)):
        near = inputs(seed, T=1, S=S)
        near["k"][..., :-32, :] = 0
        near["v"][..., :-32, :] = 0
        rows.append(
            Row(f"near-keys-of-{S}", f"The order of the nearest keys at the end of {S:,}.", near,
                ("bias of the key's position in bfloat16", "bias of the key's position in float16",
                 "no bias"))
        )  # fmt: skip
    # Keys more than 4,096 back that content lifts by just what the distance costs: about 2,048.
    content = inputs(82, H=4, T=1, S=4400, D=16)
    content["slopes"] = np.array([0.5, 0.25, 0.125, 0.0625])
    lift = np.array([64, 32, 16, 8.0])[:, None, None]
    content["q"] = np.full((1, 4, 1, 16), 8.0)
    k, place = np.zeros((4, 4400, 16)), np.arange(4400)
    far = (place >= 4384 - 4112) & (place < 4400 - 4098)
    k[:, far] = lift
    content["k"], content["v"] = k[None], np.where(far[:, None], content["v"], 0.0)
    rows.append(Row("far-keys",
        "Keys 4,099 to 4,127 back whose content makes up for what the distance costs.", content,
        ("distances in float16", "distances in bfloat16", "distances end at 2,048"))
    )  # fmt: skip
    # Multiples of 1/4: next to a bias of -50,000, float32 holds nothing smaller than 1/256.
    start = {**inputs(83, T=2, S=32), "query_start": np.array([100_000])}
    for name in "qk":
        start[name] = np.round(4 * start[name]) / 4
    rows.append(Row("far-queries", "Queries at position 100,000 whose nearest keys are elsewhere:"
        " 32 keys of a longer cache.", start,
        ("distances in float16", "distances in bfloat16"))
    )  # fmt: skip
    return rows


ROWS = (basic_rows, slope_rows, position_rows, hidden_rows, far_rows)


def make() -> tuple[dict[str, npt.NDArray[Any]], list[dict[str, Any]]]:
    """The arrays of vectors.npz by name, and the rows of rows.json."""
    arrays: dict[str, npt.NDArray[Any]] = {}
    described = []
    for row in (row for rows in ROWS for row in rows()):
        parts = ("out", "lse") if row.arguments.get("return_lse") else ("out",)
        kept = dict(zip(parts, right(row), strict=False))
        moved, wrongs = {}, []
        for name in row.bugs:
            wrong = dict(zip(parts, BUGS[name](call(row.arguments)), strict=False))
            moved[name] = distance(wrong, kept, row.arguments["v"], row.compared)
            assert moved[name] >= 10 * TOLERANCE["bfloat16"], (row.name, name, moved[name])
            wrongs.append(wrong)
        for part in parts:
            kept[f"bugs-{part}"] = np.stack([wrong[part] for wrong in wrongs]).astype(np.float16)
        settings = {}
        for name, value in row.arguments.items():
            if name in "qkv":
                kept[name] = narrow(value)
            else:
                settings[name] = value.tolist() if isinstance(value, np.ndarray) else value
        arrays |= {f"{row.name}/{name}": array for name, array in kept.items()}
        bugs = [
            {"name": name, "moves": None if np.isinf(x) else round(x, 3)}
            for name, x in moved.items()
        ]
        about = {"name": row.name, "meaning": row.meaning, "settings": settings}
        about["steps"] = row.steps
        if row.compared is not None:
            about["compared"] = row.compared.tolist()
        described.append({**about, "bugs": bugs})
    return arrays, described


def narrow(array: Array) -> npt.NDArray[np.float16]:
    """What 16 bits hold exactly."""
    small = array.astype(np.float16)
    assert (small == array).all()
    return small


def main() -> None:
    arrays, rows = make()
    np.savez_compressed(HERE / "vectors.npz", **arrays)
    lines = ",\n ".join(json.dumps(row) for row in rows)
    (HERE / "rows.json").write_text(f"[{lines}]\n", encoding="utf-8")
    size = (HERE / "vectors.npz").stat().st_size
    print(f"{len(rows)} rows, {sum(len(row['bugs']) for row in rows)} bugs, {size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
