"""A layer of the window cache beside a growing one: single calls, and random orders of calls."""

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import Tensor

from linbias.models.decoder.cache import GrowingLayer
from linbias.models.decoder.layout import TokenLayout
from linbias.models.decoder.rows import Rows
from linbias.models.window_cache import certificate, near_keys, pool
from linbias.models.window_cache import layer as window_layer
from linbias.models.window_cache.certificate import Settings
from linbias.models.window_cache.layer import WindowLayer
from linbias.near_to_far import reach
from linbias.torch import attention

pytestmark = pytest.mark.usefixtures("no_gradients")
SIZE = 8  # of a head
TOLERANCE = 2.0**-14
Tokens = tuple[Tensor, Tensor, Tensor]


class Reader:
    """A layer of the window cache, and one that keeps all tokens."""

    def __init__(self, layer: WindowLayer, slopes: list[float]) -> None:
        self.layer, self.whole = layer, GrowingLayer()
        self.slopes = torch.tensor(slopes, dtype=torch.float64)
        self.first: Tensor | None = None  # [B], the first position that is no padding
        self.missed = 0  # rows of heads farther from the truth than the tolerance lets them

    @property
    def num_tokens(self) -> int:
        return self.whole.get_seq_length()

    def tokens(self, rows: int, count: int) -> Tokens:
        """Random ones, with values in [-1, 1]."""
        H, G = len(self.slopes), len(self.layer.settings.reach)
        q, k, v = (torch.randn(rows, n, count, SIZE, dtype=torch.float64) for n in (H, G, G))
        return q, k, v.clamp(-1, 1)

    def read(self, tokens: Tokens, says_padding: bool = True) -> float:
        """Let both read tokens; return by how much what they say at tokens differs at most."""
        q, k, v = tokens
        start = self.num_tokens
        keys, values = self.whole.update(k, v)
        hidden = None
        if self.first is not None:
            hidden = torch.stack([self.first, torch.full_like(self.first, keys.shape[2])], -1)
        numbers = torch.zeros(1, 1, dtype=torch.int64)
        layout = TokenLayout(numbers, keys=(Rows(hidden if says_padding else None),))
        found = self.layer.attend(q, k, v, self.slopes, None, layout)
        how = {"key_range": hidden, "implementation": "dense"}
        expected = attention(q, keys, values, self.slopes, **how)
        error = (found - expected).abs().amax(-1)  # [B, H, T]
        if self.first is not None:
            position = torch.arange(start, keys.shape[2])
            error = error.masked_fill((position < self.first[:, None])[:, None], 0.0)
        # Without a share of its weight, a row of values in [-1, 1] is wrong by twice that at most.
        tolerance = self.layer.settings.tolerance
        assert tolerance is not None
        self.missed += int((~(error <= 2 * tolerance + 1e-9)).sum())
        return float(error.max())

    def select(self, rows: Tensor) -> None:
        for layer in (self.layer, self.whole):
            layer.batch_select_indices(rows)
        self.first = None if self.first is None else self.first[rows]

    def reset(self) -> None:
        self.layer.reset()
        self.whole, self.first, self.missed = GrowingLayer(), None, 0

    def copied(self, make_copy: Callable[[Any], Any]) -> "Reader":
        other = copy.deepcopy(self)
        other.layer = make_copy(self.layer)
        return other


def reader(slopes, windows=None, tolerance=TOLERANCE) -> Reader:
    """Of heads that share nothing, and whose weights promise nothing."""
    settings = Settings([math.inf] * len(slopes), windows, tolerance, "count")
    return Reader(WindowLayer(settings), slopes)


def test_a_step_after_several_tokens_knows_how_large_their_keys_are():
    one = reader([1.0])
    q, k, v = one.tokens(1, 480)
    k[:, :, 282:299] *= 300
    along = k[:, :, 290] / k[:, :, 290].norm()
    for position, length in ((298, 3.0), (479, 5.0)):
        q[:, :, position] = length * along
    start = 0
    for count in (280, 1, 1, 17, *[1] * 181):
        part = slice(start, start + count)
        one.read((q[:, :, part], k[:, :, part], v[:, :, part]))
        assert one.missed == 0
        start += count


def test_rows_that_wait_are_certified_before_rows_are_reordered():
    one = reader([0.01], windows=[20.0])
    q, k, v = one.tokens(2, 512)
    k[1] *= 10
    one.read((q, k, v))
    one.read(one.tokens(2, 1))
    asked = one.copied(copy.deepcopy)
    before = asked.layer.uncertified, asked.layer.largest_dropped
    one.select(torch.tensor([1, 0]))
    assert (one.layer.uncertified, one.layer.largest_dropped) == before


def test_dropped_keys_may_weigh_half_of_the_tolerance():
    """The other half is left to the keys that are kept and not read; and of this half the rounding
    of sums takes 0.8%.
    """

    def after_a_step(tolerance: float) -> WindowLayer:
        torch.manual_seed(0)
        one = reader([0.25], windows=[20.0], tolerance=tolerance)
        one.read(one.tokens(1, 512))
        one.read(one.tokens(1, 1))
        return one.layer

    most = math.exp(after_a_step(2.0**-30).largest_dropped)
    assert after_a_step(2.005 * most).uncertified == 1
    assert after_a_step(2.025 * most).uncertified == 0


def test_a_reset_layer_knows_nothing_of_what_it_read():
    one = reader([0.001], windows=[8.0])
    one.first = torch.tensor([50])
    for count in (100, 500, 1):
        one.read(one.tokens(1, count))
    assert one.layer.uncertified > 0
    one.reset()
    assert one.layer.uncertified == 0
    assert one.layer.largest_dropped == -math.inf
    assert one.read(one.tokens(1, 100)) < 1e-12


def test_padding_goes_where_its_rows_go():
    one = reader([0.05])
    one.first = torch.tensor([0, 60])
    for count in (100, 1):
        one.read(one.tokens(2, count))
    one.select(torch.tensor([1, 0]))
    assert one.read(one.tokens(2, 1), says_padding=False) < 1e-12


def test_tokens_that_were_taken_back_leave_no_trace():
    """Neither in what is read nor where later rows stand that wait for their certificates."""

    def read_on(takes_back: bool) -> tuple[float, float]:
        torch.manual_seed(0)
        one = reader([0.25], windows=[20.0])
        first, step, back, (q, k, v) = (one.tokens(1, count) for count in (512, 1, 10, 3))
        one.read(first)
        one.read(step)
        if takes_back:
            one.read(back)
            for layer in (one.layer, one.whole):
                layer.crop(-10)
        return one.read((30 * q, k, v)), one.layer.largest_dropped

    assert read_on(True) == pytest.approx(read_on(False))


def test_windows_do_not_follow_rows_that_were_taken_back():
    one = reader([0.25])
    one.layer.activate_past_recording()
    one.read(one.tokens(1, 600))
    q, k, v = one.tokens(1, 20)
    one.read((100 * q, k, v))
    one.layer.crop(-20)  # where keys may leave
    assert one.layer.counts[0] < 300


# ---- in random orders

SMALL = {"CHUNK": 8, "FEWEST": 4, "_LASTS": 32}  # so that keys leave every few tokens
COUNTS = st.sampled_from((1, 1, 2, 4, 5, 17, 40))
PROMPTS = {
    "rows": st.integers(1, 3),
    "count": st.sampled_from((9, 40, 90)),
    "padding": st.sampled_from((0, 0, 1, 8)),
}
NUMBER = st.integers(0, 2**16)
COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
}


class Orders(RuleBasedStateMachine):
    """Readers of one prompt, which go on from copies of each other."""

    @initialize(
        seed=NUMBER,
        slopes=st.lists(st.sampled_from((0.5, 0.1, 0.02, 0.0)), min_size=2, max_size=2),
        shared=st.booleans(),
        windows=st.sampled_from((None, 4.0, 30.0)),
        is_bounded=st.booleans(),
        **PROMPTS,
    )
    def begin(self, seed, slopes, shared, windows, is_bounded, rows, count, padding):
        torch.manual_seed(seed)
        self.is_bounded = is_bounded
        heads = 1 if shared else 2
        caps = [math.inf] * heads
        if is_bounded:  # queries and keys of length 1 at most
            lead = 2 * SIZE**-0.5
            found = reach(slopes, lead, tolerance=TOLERANCE / 2)
            caps = np.ceil(found).reshape(heads, -1).max(1).tolist()
        fixed = windows and [windows] * heads
        layer = WindowLayer(Settings(caps, fixed, TOLERANCE, "count"))
        self.readers = [Reader(layer, slopes)]
        self._begin_text(self.readers[0], rows, count, padding)

    def one(self, number: int) -> Reader:
        return self.readers[number % len(self.readers)]

    def _begin_text(self, one: Reader, rows: int, count: int, padding: int) -> None:
        if padding:
            one.first = torch.randint(padding + 1, (rows,))
        self._read(one, one.tokens(rows, count), True)

    def _read(self, one: Reader, tokens: Tokens, says_padding: bool) -> None:
        q, k, v = tokens
        if self.is_bounded:
            q, k = (x / x.norm(dim=-1, keepdim=True).clamp(min=1.0) for x in (q, k))
        one.read((q, k, v), says_padding)

    @rule(
        number=NUMBER,
        count=COUNTS,
        size=st.sampled_from((0.5, 1.0, 30.0)),
        looks_back=st.booleans(),
        says_padding=st.booleans(),
    )
    def read(self, number, count, size, looks_back, says_padding):
        one = self.one(number)
        q, k, v = one.tokens(len(one.whole.keys), count)
        if looks_back:  # along the largest key that there is
            keys = one.whole.keys[:, :1]
            largest = keys.norm(dim=-1, keepdim=True).argmax(2, keepdim=True)
            q = q / 10 + 5 * torch.nn.functional.normalize(keys.take_along_dim(largest, 2), dim=-1)
        self._read(one, (q, size * k, v), says_padding)

    @rule(number=NUMBER)
    def certify(self, number):
        one = self.one(number)
        assert one.missed <= one.layer.uncertified

    @rule(number=NUMBER, count=st.integers(0, 20))
    def crop(self, number, count):
        one = self.one(number)
        first = 0 if one.first is None else int(one.first.max())
        count = min(count, one.num_tokens - first - 1, *one.layer.counts)
        if count > 0:
            for layer in (one.layer, one.whole):
                layer.crop(-count)

    @rule(number=NUMBER)
    def record_past(self, number):
        self.one(number).layer.activate_past_recording()

    @rule(number=NUMBER, rows=st.lists(NUMBER, min_size=1, max_size=3))
    def select(self, number, rows):
        one = self.one(number)
        one.select(torch.tensor(rows) % len(one.whole.keys))

    @rule(number=NUMBER)
    def reorder(self, number):
        one = self.one(number)
        one.select(torch.randperm(len(one.whole.keys)))

    @rule(number=NUMBER)
    def repeat(self, number):
        one = self.one(number)
        if len(one.whole.keys) < 3:
            for layer in (one.layer, one.whole):
                layer.batch_repeat_interleave(2)
            one.first = None if one.first is None else one.first.repeat_interleave(2)

    @precondition(lambda self: len(self.readers) < 3)
    @rule(number=NUMBER, how=st.sampled_from(list(COPIES)))
    def copy(self, number, how):
        self.readers.append(self.one(number).copied(COPIES[how]))

    @precondition(lambda self: len(self.readers) > 1)
    @rule(number=NUMBER)
    def forget(self, number):
        del self.readers[number % len(self.readers)]

    @rule(number=NUMBER, **PROMPTS)
    def reset(self, number, rows, count, padding):
        one = self.one(number)
        one.reset()
        assert one.layer.uncertified == 0
        self._begin_text(one, rows, count, padding)

    def teardown(self):
        for one in getattr(self, "readers", ()):
            assert one.missed <= one.layer.uncertified


@pytest.mark.parametrize("examples", [10, pytest.param(200, marks=pytest.mark.thorough)])
def test_whatever_is_asked_of_it_in_whatever_order(examples, monkeypatch):
    for module in (window_layer, pool, near_keys, certificate):
        for name in SMALL.keys() & vars(module):
            monkeypatch.setattr(module, name, SMALL[name])
    how = settings(max_examples=examples, stateful_step_count=20)
    run_state_machine_as_test(Orders, settings=how)
