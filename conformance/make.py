"""Make vectors.npz: inputs, right answers by the definition, and what bugs give.

rows.json says of each row what it means and which bugs it must tell from the right answer; the row
here is its arguments. How they are set, and how far each bug moves the answer, in units of the
largest |v|, is written back to rows.json. That must be ten times what check.py allows for
bfloat16. Inputs are multiples of 1/16 with at most seven significant bits, which all formats hold
exactly.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import linbias
from bugs import BUGS, Answer, Array, Call
from check import TOLERANCE, distance

HERE = Path(__file__).parent
ROWS = HERE / "rows.json"


Arguments = dict[str, Any]  # what a function gets


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


def call(arguments: Arguments) -> Call:
    """Fill in what the arguments leave open."""
    given = dict(arguments)
    q, k = given["q"], given["k"]
    (B, H, T, _), S = q.shape, k.shape[2]
    slopes = given["slopes"]
    if slopes is None:
        slopes = linbias.slopes(H, given["schedule"], given["max_bias"])
    right = given.get("right_slopes", np.inf if given["causal"] else slopes)
    return Call(
        *(q, k, given["v"]),
        slopes=np.broadcast_to(slopes, (B, H)).astype(float),
        right_slopes=np.broadcast_to(right, (B, H)).astype(float),
        scale=given["scale"],
        query_start=given.get("query_start", np.full(B, S - T)),
        key_range=given.get("key_range", np.array([[0, S]] * B)),
        segments=given.get("segments", np.zeros((B, S), int)),
    )


def right(c: Call) -> Answer:
    """The definition's answer, asked with its own arguments."""
    mask = c.segments[:, None, :, None] == c.segments[:, None, None] if c.segments.any() else None
    sides = {"causal": False, "right_slopes": c.right_slopes}
    seen = {"key_range": c.key_range, "query_start": c.query_start, "mask": mask}
    options = {**sides, **seen, "scale": c.scale, "return_lse": True}
    return linbias.attention(c.q, c.k, c.v, c.slopes, **options)


LSE = {"return_lse": True}
BOTH = {"causal": False}


def basic_rows() -> dict[str, Arguments]:
    """Sign, scale, order, heads."""
    large = inputs(13, H=4, T=6, S=6, D=16)
    large["q"] = np.full((1, 4, 6, 16), 48.0)
    large["k"] = np.tile(np.array([[2, -3, 5, 4, 6, 64.0]]).T, (1, 4, 1, 16))
    own = np.stack([linbias.slopes(8), linbias.slopes(8, "geometric", 4)[::-1]])
    return {
        "causal": inputs(1),
        "scale": inputs(2, H=4, D=16, T=2, S=9),
        "before-softmax": inputs(3, T=5, S=17),
        "no-bias": inputs(11) | {"slopes": np.zeros(8)},
        "no-bias-both-sides": inputs(12, T=3) | BOTH | {"slopes": np.zeros(8)},
        "large-scores": large,
        "slopes-per-row": inputs(14, B=2) | {"slopes": own},
        "grouped-heads": inputs(15, G=2),
        "one-key-head": inputs(16, G=1),
    }


def slope_rows() -> dict[str, Arguments]:
    """Schedules, by what attention gives with them; slopes are not given."""
    rows = {}
    by_the_paper = [(H, "paper", 8.0) for H in (8, 6, 12, 20, 71)]
    others = [(12, "geometric", 8.0), (12, "halving", 8.0), (12, "mpt", 8.0), (8, "mpt", 16.0)]
    for seed, (H, schedule, max_bias) in enumerate([*by_the_paper, *others], 20):
        name = f"slopes-{schedule}-{H}" + (f"-max-{max_bias:g}" if max_bias != 8 else "")
        own = {"slopes": None, "schedule": schedule, "max_bias": max_bias}
        rows[name] = inputs(seed, H=H, T=1, S=9) | own
    return rows


def position_rows() -> dict[str, Arguments]:
    """Where queries stand."""
    half, hidden = linbias.slopes(4), np.full(4, np.inf)
    directional = {
        "slopes": np.concatenate([half, hidden]),
        "right_slopes": np.concatenate([hidden, half]),
    }
    asymmetric = {"right_slopes": linbias.slopes(8)[::-1].copy()}
    # 40 positions before the first key, lse tells more than out: every key has much the same bias.
    ahead = {"query_start": np.array([-40]), **LSE}
    return {
        "fewer-queries": inputs(46, T=3),
        "more-queries": inputs(47, S=4),
        "symmetric": inputs(40) | BOTH,
        "symmetric-fewer-queries": inputs(41, T=3) | BOTH,
        "directional": inputs(43) | BOTH | directional,
        "asymmetric": inputs(44) | BOTH | asymmetric,
        "decode": inputs(48),
        "part-of-the-keys": inputs(45, T=3, S=5) | {"query_start": np.array([1]), **LSE},
        "keys-after-the-queries": inputs(42, T=3) | BOTH | ahead,
    }


def hidden_rows() -> dict[str, Arguments]:
    """Padding, caches, packed texts, rows that see nothing."""
    left, right = ({"key_range": np.array([own, [0, 7]])} for own in ([3, 7], [0, 4]))
    cache = {"key_range": np.array([[0, 9], [0, 14]]), "query_start": np.array([8, 13])}
    packed = {"segments": np.array([[0] * 3 + [1] * 4, [0] * 4 + [1] + [2] * 2])}
    empty = {"key_range": np.array([[0, 7], [4, 4]])}
    return {
        "padding-left": inputs(60, B=2) | left,
        "padding-left-symmetric": inputs(61, B=2) | BOTH | left,
        "padding-right": inputs(62, B=2) | right,
        "padding-right-symmetric": inputs(63, B=2) | BOTH | right,
        "cache": inputs(65, B=2, T=1, S=16) | cache,
        "decode-padding-left": inputs(66, B=2, T=1) | left,
        "packed": inputs(67, B=2) | packed,
        "packed-symmetric": inputs(68, B=2) | packed | BOTH,
        "empty": inputs(69, B=2, T=3) | empty,
        "lse": inputs(70, T=5) | LSE,
        "lse-symmetric": inputs(71) | BOTH | LSE,
        "lse-empty": inputs(72, B=2, T=3) | empty | LSE,
    }


def far_rows() -> dict[str, Arguments]:
    """Positions that 16 bits do not hold."""
    near = {S: inputs(seed, T=1, S=S) for seed, S in ((80, 2500), (84, 5000))}
    for given in near.values():
        given["k"][..., :-32, :] = 0
        given["v"][..., :-32, :] = 0
    # Keys more than 4,096 back that content lifts by just what the distance costs: about 2,048.
    content = inputs(82, H=4, T=1, S=4400, D=16)
    content["slopes"] = np.array([0.5, 0.25, 0.125, 0.0625])
    lift = np.array([64, 32, 16, 8.0])[:, None, None]
    content["q"] = np.full((1, 4, 1, 16), 8.0)
    k, place = np.zeros((4, 4400, 16)), np.arange(4400)
    far = (place >= 4384 - 4112) & (place < 4400 - 4098)
    k[:, far] = lift
    content["k"], content["v"] = k[None], np.where(far[:, None], content["v"], 0.0)
    # Multiples of 1/4: next to a bias of -50,000, float32 holds nothing smaller than 1/256.
    start = inputs(83, T=2, S=32) | {"query_start": np.array([100_000])}
    for name in "qk":
        start[name] = np.round(4 * start[name]) / 4
    return {
        **{f"near-keys-of-{S}": given for S, given in near.items()},
        "far-keys": content,
        "far-queries": start,
    }


def make() -> tuple[dict[str, npt.NDArray[Any]], list[dict[str, Any]]]:
    """The arrays of vectors.npz by name, and the rows of rows.json."""
    arrays: dict[str, npt.NDArray[Any]] = {}
    rows = basic_rows() | slope_rows() | position_rows() | hidden_rows() | far_rows()
    described = json.loads(ROWS.read_text(encoding="utf-8"))
    assert [row["name"] for row in described] == list(rows)
    for row in described:
        arguments = rows[row["name"]]
        asked, v = call(arguments), arguments["v"]
        parts = ("out", "lse") if arguments.get("return_lse") else ("out",)
        kept = dict(zip(parts, right(asked), strict=False))
        if "compared" in row:  # queries in padding do not count
            row["compared"] = asked.real[:, 0, 0].tolist()
        wrongs = []
        for bug in row["bugs"]:
            wrong = dict(zip(parts, BUGS[bug["name"]](asked), strict=False))
            moved = distance(wrong, kept, v, row.get("compared"))
            assert moved >= 10 * TOLERANCE["bfloat16"], (row["name"], bug["name"], moved)
            bug["moves"] = None if np.isinf(moved) else round(moved, 3)
            wrongs.append(wrong)
        for part in parts:
            kept[f"bugs-{part}"] = np.stack([wrong[part] for wrong in wrongs]).astype(np.float16)
        kept |= {name: narrow(arguments.pop(name)) for name in "qkv"}
        row["settings"] = {
            name: value.tolist() if isinstance(value, np.ndarray) else value
            for name, value in arguments.items()
        }
        arrays |= {f"{row['name']}/{name}": array for name, array in kept.items()}
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
    ROWS.write_text(f"[{lines}]\n", encoding="utf-8")
    size = (HERE / "vectors.npz").stat().st_size
    print(f"{len(rows)} rows, {sum(len(row['bugs']) for row in rows)} bugs, {size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
