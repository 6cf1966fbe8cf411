"""Attention over a sequence in shards on several processes: the contract, and what is sent."""

import re
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

import contract
import linbias
import linbias.torch
import shards
from cases import Case, Inputs, by_name
from contract import check_case
from ranks import Ranks

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def four():
    with Ranks(4) as ranks:
        yield ranks


def cut(n: int, size: int, how: str) -> list[slice]:
    """Shards of n tokens: as equal as can be, or uneven, with an empty one."""
    if how == "even":
        edges = [n * i // size for i in range(size + 1)]
    else:
        edges = [0, n // 7, n // 7, n - n // 3, n]
    return [slice(a, b) for a, b in pairwise(edges)]


def shards_of(arrays: dict[str, Any], n: int, how: str = "even") -> list[dict[str, Any]]:
    """Arrays [B, heads, n, ...] of four processes; slopes are those of all."""
    cut_up = ("q", "k", "v", "dout", "dlse")
    return [
        {name: x[:, :, rows] if name in cut_up else x for name, x in arrays.items()}
        for rows in cut(n, 4, how)
    ]


def join(found: list[Any], name: str, kind: int = 0) -> np.ndarray[Any, Any]:
    """A result of the whole sequence."""
    return np.concatenate([part[kind][name] for part in found], 2)


PLACED = ("causal", "sides", "heads", "ranges", "integers")


@pytest.mark.parametrize("how", ("even", "uneven"))
@pytest.mark.parametrize("name", PLACED)
def test_positions_are_those_of_the_whole_sequence(four, name, how):
    rng = np.random.default_rng(0)
    shapes = {"q": 4, "k": 2, "v": 2, "dout": 4}
    arrays = {x: rng.normal(size=(2, heads, 403, 8)) for x, heads in shapes.items()}
    arrays |= {"dlse": rng.normal(size=(2, 4, 403)), "left": np.array([0.5, 2.0, 0.3, 4.0])}
    x = np.cumsum(rng.random((2, 4, 403) if name == "heads" else (2, 403)) ** 2 * 4, -1)
    options: dict[str, Any] = {"causal": name == "causal"}
    if not options["causal"]:
        arrays["right"] = np.array([0.3, 1.0, np.inf, 0.7])
    if name == "ranges":
        options["key_range"] = np.array([[13, 403], [0, 350]])
    if name == "integers":
        x = (x * 1e6).astype(np.int64) + 17 * 10**17
        arrays |= {side: arrays[side] * 1e-6 for side in ("left", "right")}
    calls = [
        (part, "float64", {**options, "positions": x[..., rows]})
        for part, rows in zip(shards_of(arrays, 403, how), cut(403, 4, how), strict=True)
    ]
    found = four.run("shards:attend", calls)
    out, lse = join(found, "out"), join(found, "lse")
    q, k, v, dout, dlse, left, right = (
        arrays.get(n) for n in (*"qkv", "dout", "dlse", "left", "right")
    )
    whole = {**options, "positions": x, "right_slopes": right}
    if name == "ranges":
        whole["query_start"] = np.zeros(2, int)
    truth = linbias.attention(q, k, v, left, return_lse=True, **whole)
    np.testing.assert_allclose(out, truth[0], atol=1e-13)
    np.testing.assert_allclose(lse, truth[1], atol=1e-13)
    gradients = linbias.attention_backward(dout, q, k, v, left, dlse=dlse, **whole)
    for n in "qkv":
        np.testing.assert_allclose(join(found, n, 1), getattr(gradients, f"d{n}"), atol=1e-11)
    if name != "integers":
        dx = np.concatenate([part[1]["positions"] for part in found], -1)
        np.testing.assert_allclose(dx, gradients.dpositions, atol=1e-11)
    if name == "causal":  # all keys and values of the 6 pairs of shards would be more
        assert sum(part[2][0] for part in found) < 6 * 100 * 2 * 2 * (8 + 8) * 8


class InShards:
    """`context_parallel.attention` on four processes, as the contract asks for it."""

    def __init__(self, ranks: Ranks, how: str = "even") -> None:
        self.ranks, self.how = ranks, how
        self.sent: list[Any] = []

    def run(
        self,
        inputs: Inputs,
        case: Case,
        dtype: str,
        *,
        tolerance: float | None = None,
        layout: str = "plain",
    ) -> Any:
        options: dict[str, Any] = {"causal": case.causal, "scale": case.scale}
        options |= {"dropout": case.dropout, "tolerance": tolerance, "seed": contract.SEED}
        if case.key_range is not None:
            options["key_range"] = case.placement["key_range"]
        if case.rows:
            W = max(2, case.S // 12)
            options["window"] = {"window": (W, 0), "both": (W, 2 * W)}[case.rows]
        whole = {name: x for name, x in vars(inputs).items() if x is not None}
        arrays = shards_of(whole, case.T, self.how)
        found = self.ranks.run("shards:attend", [(x, dtype, dict(options)) for x in arrays])
        self.sent = [told for _, _, told in found]
        for part in found[1:]:  # gradients of slopes are those of the whole sequence everywhere
            for name in {"left", "right"} & part[1].keys():
                assert np.array_equal(part[1][name], found[0][1][name])
        results, gradients = found[0][:2]
        joined = {name: join(found, name, 0) for name in results}
        return joined, gradients | {name: join(found, name, 1) for name in "qkv"}


def square(name: str, n: int, **changes: Any) -> Case:
    """A case of n queries, each of which stands at the key of its number."""
    case = by_name(name, T=n, S=n, **changes)
    return case if case.key_range is None else replace(case, query_start=(0, 0))


SHORT = """T-equals-S multi-head multi-query scale size-one slopes-zero slopes-mixed
slopes-per-batch slopes-extreme symmetric asymmetric asymmetric-per-batch directional
both-sides-hidden bidirectional-unbiased equal-scores extreme-logits dropout
dropout-range-symmetric"""
LONG = "long long-symmetric long-directional long-per-batch long-T-above-S"
MIDDLE = "long-dropout far-key-aligned far-key-aligned-symmetric keys-off-center"
LENGTHS = {41: SHORT, 1031: LONG, 523: MIDDLE}
CASES = [
    *(square(name, n) for n, names in LENGTHS.items() for name in names.split()),
    square("left-padding", 41, key_range=((13, 41), (0, 41))),
    square("right-padding", 41, key_range=((0, 29), (0, 41))),
    square("range-symmetric", 41, key_range=((3, 28), (1, 41))),
    replace(square("left-padding", 41), name="empty-range", key_range=((4, 4), (0, 41))),
    square("slopes-zero", 203, rows="window"),
    square("asymmetric", 203, rows="both"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_shards_give_what_one_process_gives(four, case):
    """Uneven ones too, of which one is empty; short causal ones are alike."""
    how = "uneven" if case.T > 41 or case.dropout or not case.causal else "even"
    check_case(InShards(four, how), case, "float32")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_other_types_in_even_shards(four, dtype):
    check_case(InShards(four), square("long", 523), dtype, again=False)


def test_the_share_that_is_left_out_is_below_the_tolerance(four):
    """The halo and the kernel leave out half of a large tolerance each."""
    for case in (square("long", 1031), square("long-symmetric", 1031)):
        subject = InShards(four)
        contract.check_certificate_holds(subject, case, 1e-3)
        assert 0 < sum(told[0] for told in subject.sent) < sum(_everything(case, 8))


def test_only_the_keys_that_heads_need_are_sent(four):
    """Of 96 MiB that each process would have to send in an all-gather, at most 17 in all."""
    case = Case("bytes", B=2, H=8, G=8, T=8192, S=8192, D=32, E=32)
    rng = np.random.default_rng(0)
    arrays = {n: rng.standard_normal((2, 8, 8192, 32)).astype("f4") for n in "qkv"}
    given = [(x, "float32", {}, False) for x in shards_of(arrays, case.T)]
    found = four.run("shards:attend", given)
    assert sum(_everything(case, 4)) == 96 * 2**20
    assert sum(told[0] for *_, told in found) <= 17 * 2**20
    assert all(told[1:] == (1, 2) for *_, told in found)  # one exchange, two gathers


def test_no_more_is_sent_than_a_window_shows(four):
    """Without slopes each of three processes fetches the 10 keys before its own, in all heads."""
    arrays = {n: np.ones((1, 2, 400, 4), "f4") for n in "qkv"} | {"left": np.zeros(2)}
    sent = []
    for window in ((10, 0), (0, 0)):  # the second for what the processes say in any case
        given = [(x, "float32", {"window": window}, False) for x in shards_of(arrays, 400)]
        sent.append(sum(told[0] for *_, told in four.run("shards:attend", given)))
    assert sent[0] - sent[1] == 3 * 10 * 2 * (4 + 4) * 4


def _everything(case: Case, size: int) -> list[int]:
    """Bytes that each of four processes sends in an all-gather of keys and values."""
    shard = case.B * case.G * (case.D + case.E) * case.S // 4 * size
    return [3 * shard] * 4


ALIKE = "{} must be the same on all processes, but differs between rank 0 and rank 2; got"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    # What rank 2 gives, and what it says; so do the others where calls differ.
    "tolerance": ({"tolerance": 1e-3}, ALIKE),
    "causal": ({"causal": False}, ALIKE),
    "scale": ({"scale": 0.5}, ALIKE),
    "key_range": ({"key_range": np.array([[0, 9]])}, ALIKE),
    "window": ({"window": (3, 0)}, ALIKE),
    "dtype": ({"dtype": "bfloat16"}, ALIKE),
    "slopes": ({"left": np.ones(4)}, ALIKE),
    "B": ({"shape": (2, 4, 10, 8)}, ALIKE),
    "H": ({"shape": (1, 2, 10, 8)}, ALIKE),
    "D": ({"shape": (1, 4, 10, 16)}, ALIKE),
    "floats": ({"key_range": np.array([[0.0, 9]])}, "key_range must hold integers, got float"),
    "flat range": ({"key_range": np.array([0, 9])}, r"must have shape \[B, 2\] = \[1, 2\], got"),
    "unknown": ({"mask": np.ones((10, 10), bool)}, "there is no argument mask"),
    "falling": ({"positions": -np.arange(10.0)}, "positions must not fall, got -1.0 after -0.0"),
    "axes": ({"shape": (4, 10, 8)}, "q must have 4 axes"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_one_process_does_wrong_all_hear(four, name):
    change, words = REFUSED[name]
    calls = []
    for mine in ({}, {}, dict(change), {}):
        arrays: dict[str, Any] = dict.fromkeys("qkv", np.ones(mine.pop("shape", (1, 4, 10, 8))))
        arrays["left"] = mine.pop("left", None)
        calls.append((arrays, mine.pop("dtype", "float32"), mine, False))
    four.start("shards:attend", calls)
    for rank, answer in enumerate(four.wait()):
        assert isinstance(answer, (ValueError, TypeError, RuntimeError)), answer
        expected = words.format(name)
        if words is not ALIKE and rank != 2:
            expected = "but rank 2 refuses its arguments, and says why"
        assert re.search(expected, str(answer)), answer


OUTSIDE = {"key_range": np.array([[0, 99]])}, "key_range must be 0 <= first <= end <= S = 40, got"
FALLING = (
    {"positions": np.arange(10.0)},
    "positions must not fall from shard to shard, but token 10",
)


@pytest.mark.parametrize(("options", "words"), [OUTSIDE, FALLING])
def test_what_is_wrong_with_the_whole_sequence(four, options, words):
    arrays = dict.fromkeys("qkv", np.ones((1, 4, 10, 8)))
    four.start("shards:attend", [(arrays, "float32", dict(options), False)] * 4)
    for answer in four.wait():
        assert isinstance(answer, ValueError) and words in str(answer), answer


MODELS = {
    "own": ("own", {}),
    "grouped heads": ("own", {"num_key_value_heads": 2}),
    "fused block": ("own", {"block": "parallel_fused"}),
    "symmetric": ("masked", {"encoder_position": "symmetric"}),
    "learned slopes": ("masked", {"encoder_position": "asymmetric"}),
    "paper": ("paper", {"position": "alibi"}),
    "bloom": ("bloom", {"n_layer": 2, "n_head": 4}),
    "mpt": ("mpt", {"d_model": 32, "n_layers": 2, "n_heads": 4}),
    "falcon": ("falcon", {"num_hidden_layers": 2, "num_attention_heads": 4, "alibi": True}),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("padded", [False, True])
def test_whole_models_read_shards(four, name, padded):
    ids = torch.from_numpy(np.random.default_rng(0).integers(61, size=(2, 90)))
    bidirectional = MODELS[name][0] == "masked"
    options: dict[str, Any] = {} if bidirectional else {"use_cache": False}
    if padded:
        options["attention_mask"] = torch.ones_like(ids)
        options["attention_mask"][0, :37] = 0  # the whole first shard, and some of the second
    model = shards.small(*MODELS[name])
    logits = model(input_ids=ids, **options).logits
    seen = options.get("attention_mask", torch.ones_like(ids))[..., None]
    weigh = shards.weigh(ids, logits.shape[-1])
    (logits * weigh).sum().backward()
    given = [(MODELS[name], ids, rows, options) for rows in cut(90, 4, "even")]
    found = four.run("shards:read", given)
    joined = torch.cat([part for part, _ in found], 1)
    torch.testing.assert_close(joined * seen, logits.detach() * seen, rtol=1e-9, atol=1e-9)
    if not padded:  # what a model says at padding means nothing
        for key, weight in model.named_parameters():
            if weight.grad is not None:
                tolerance = {"rtol": 1e-7, "atol": 1e-9, "msg": key}
                torch.testing.assert_close(found[0][1][key], weight.grad, **tolerance)


IDS = torch.arange(40)[None]
ENDS = [[*range(5 * i, 5 * i + 5), *range(45 - 5 * i, 50 - 5 * i)] for i in range(4)]
NOT_CONTIGUOUS = "position_ids of a shard must count on .*not made of head and tail"
NOT_BY_RANK = "shards must lie in the order of ranks, got position 30 at the start of .* rank 0"
ORDERS = {
    "head and tail": (torch.tensor(ENDS).view(1, 40), NOT_CONTIGUOUS),
    "wrong": (IDS.view(4, 10).flip(0).reshape(1, 40), NOT_BY_RANK),
    "right": (IDS, None),
}


@pytest.mark.parametrize("order", ORDERS)
def test_positions_tell_shards_that_are_not_in_order(four, order):
    position_ids, words = ORDERS[order]
    options = {"position_ids": position_ids, "use_cache": False}
    four.start("shards:read", [(("own", {}), IDS, rows, options) for rows in cut(40, 4, "even")])
    for answer in four.wait():
        assert isinstance(answer, ValueError if words else tuple), answer
        assert words is None or re.search(words, str(answer)), answer


def of_position(position: str) -> tuple[Any, ...]:
    return ("own", {"position": position}), torch.arange(9)[None], slice(0, 9), {}


ALONE = "is read by linbias.torch.attention alone"
OWN_POSITIONS = "attention: positions of a model, which count from the start of its shard, are"
UNREADABLE = [
    ("generate_in_shards", (), "queries and keys must be those of one shard, so that there is no"),
    ("not_linbias", (), "linbias.torch.attention must run within the block, but nothing called"),
    *(("read", of_position(name), ALONE) for name in ("rotary", "sinusoidal", "none")),
    *(("read", of_position(name), OWN_POSITIONS) for name in ("forget", "cable")),
]


def test_models_that_cannot_read_shards():
    with Ranks(1) as one:
        for function, arguments, words in UNREADABLE:
            one.start(f"shards:{function}", [arguments])
            assert words in str(one.wait()[0])


def test_a_block_is_a_matter_of_its_thread(four):
    found = four.run("shards:attend_in_two_threads", [(rank,) for rank in range(4)])
    for rank, (alone, beside, own) in enumerate(found):
        assert torch.equal(beside, alone)
        # Only the first shard has no keys before it.
        assert torch.allclose(own, alone, atol=1e-5) == (rank == 0)


EDGES = [(0, 400), (0, 10, 90, 90, 260, 400), (0, 100, 200, 300, 400)]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("how", ["even", "uneven"])
@pytest.mark.parametrize("edges", EDGES, ids=str)
def test_documents_cut_by_the_edges_of_shards(four, edges, how, causal):
    rng = np.random.default_rng(0)
    heads = {"q": 4, "k": 2, "v": 2, "dout": 4}
    arrays = {n: rng.standard_normal((400, h, 8)) for n, h in heads.items()}
    arrays["dlse"] = rng.standard_normal((400, 4))
    left, cu, options = np.array([2.0, 0.0, 0.02, 0.3]), np.array(edges), {"causal": causal}
    given = [
        ({n: x[rows] for n, x in arrays.items()} | {"left": left}, "float64")
        for rows in cut(400, 4, how)
    ]
    found = four.run("shards:attend", [(*x, {"cu_seqlens": cu, **options}) for x in given])
    leaves = [torch.tensor(x).requires_grad_() for x in (*map(arrays.get, "qkv"), left)]
    whole = linbias.torch.attention_varlen(
        *leaves[:3], *[torch.tensor(cu)] * 2, leaves[3], **options, return_lse=True
    )
    torch.autograd.backward(whole, [torch.tensor(arrays[n]) for n in ("dout", "dlse")])
    results = dict(zip(("out", "lse"), whole, strict=True))
    gradients = {n: x.grad for n, x in zip("qkv", leaves[:3], strict=True)}
    for kind, expected in enumerate((results, gradients)):
        for name, x in expected.items():
            joined = np.concatenate([part[kind][name] for part in found])
            np.testing.assert_allclose(joined, x.detach().numpy(), rtol=1e-11, atol=1e-11)
    np.testing.assert_allclose(found[0][1]["left"], leaves[3].grad.numpy(), rtol=1e-10)
    if edges == EDGES[2] and how == "even":  # nothing but two gathers
        assert sum(told[0] for *_, told in found) == 4 * 3 * (1024 + 4) * 8


EDGES_REFUSED = {
    "cu_seqlens must start at 0, never fall and end at 40": (np.array([0, 30]), (10, 4, 8)),
    "end at 40, the tokens of all shards, got [40]": (np.array(40), (10, 4, 8)),
    "cu_seqlens must hold integers, got float64": (np.array([0.0, 40.0]), (10, 4, 8)),
    "q must have 3 axes, n, heads, size, got [1, 10, 4, 8]": (np.array([0, 40]), (1, 10, 4, 8)),
}


@pytest.mark.parametrize("words", EDGES_REFUSED)
def test_edges_of_documents_that_are_wrong(four, words):
    edges, shape = EDGES_REFUSED[words]
    arrays, options = dict.fromkeys("qkv", np.ones(shape)), {"cu_seqlens": edges}
    four.start("shards:attend", [(arrays, "float32", dict(options), False)] * 4)
    for answer in four.wait():
        assert words in str(answer)


def test_the_bound_is_attained(four):
    """Where all keys are alike, what a row misses is near what may be missing."""
    tolerance, n = 1e-3, 64
    arrays = dict.fromkeys("qkv", np.ones((1, 1, n, 4))) | {"left": np.array([0.5])}
    options = {"tolerance": tolerance}
    given = [(x, "float64", options, False) for x in shards_of(arrays, n)]
    found = join(four.run("shards:attend", given), "lse")
    _, lse = linbias.attention(*(arrays[x] for x in "qkv"), arrays["left"], return_lse=True)
    missing = (-np.expm1(found - lse)).max()
    assert 0.1 * tolerance < missing <= tolerance


@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.parametrize("wrong", [np.nan, np.inf])
@pytest.mark.parametrize("query", [1.0, 0.0])
@pytest.mark.parametrize("stamped", [False, True])
def test_what_is_not_finite_shows_as_in_one_process(four, name, wrong, query, stamped):
    """Such a far key or value is fetched, though its head would not see a finite one."""
    arrays = {n: np.ones((1, 2, 400, 4)) for n in "qkv"} | {"left": np.array([1.0, 1.0])}
    arrays[name][0, 0, 7] = wrong
    arrays["q"] *= query
    stamps = [np.arange(400.0)[rows] for rows in cut(400, 4, "even")]
    given = [
        (part, "float32", {"positions": x} if stamped else {}, False)
        for part, x in zip(shards_of(arrays, 400), stamps, strict=True)
    ]
    out = join(four.run("shards:attend", given), "out")
    whole = [torch.tensor(x, dtype=torch.float32) for x in arrays.values()]
    expected = linbias.torch.attention(*whole).numpy()
    assert not np.isfinite(expected[0, 0, 399]).any()
    np.testing.assert_array_equal(np.isfinite(out), np.isfinite(expected))


def test_a_process_that_dies_stops_the_others(four):
    """The last test here: rank 1 is gone then."""
    arrays = dict.fromkeys("qkv", np.ones((1, 2, 5, 4)))
    four.start("shards:attend_or_die", [(arrays, rank == 1) for rank in range(4)])
    answers = four.wait()
    assert answers.pop(1) is None
    for answer in answers:
        assert "the processes did not meet: one of them has died" in str(answer)
