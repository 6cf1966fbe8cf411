"""Packed texts, in random orders of what a program may do with them, each beside the same text alone: in attention, and in models."""

import functools
import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

import hypothesis.strategies as st
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
from torch.testing import assert_close
from transformers import PreTrainedModel

import small_models
from linbias.compat import flash_attn
from linbias.models import LinbiasForCausalLM, LinbiasForMaskedLM
from linbias.models.decoder.config import ENCODER_POSITIONS, POSITIONS
from linbias.torch import attention, attention_varlen

pytestmark = pytest.mark.usefixtures("same_start")

NUMBER = st.integers(0, 2**16)
LENGTHS = st.sampled_from(
    (1, 1, 2, 3, 7, 20, 63, 64, 65, 130)
)  # on both sides of what shares a batch
NEAR = {"rtol": 1e-10, "atol": 1e-10}
MOST = 6  # texts


def run(machine: type[RuleBasedStateMachine], examples: int, steps: int) -> None:
    run_state_machine_as_test(
        machine, settings=settings(max_examples=examples, stateful_step_count=steps)
    )


def same(found: Tensor, expected: Tensor) -> None:
    """Within the rounding of the largest of the numbers."""
    size = max(1.0, float(expected.detach().abs().amax())) if len(expected) else 1.0
    assert_close(found, expected, rtol=1e-10, atol=1e-10 * size)


# ---- attention

H, G, D, ROOM = 4, 2, 8, 400  # query heads, key/value heads, their size, and the places of a cache
SIZES = (H, D), (G, D), (G, D)


@dataclass(frozen=True)
class Sequence:
    """Queries, keys and values [n, heads, size]; a row of the caches holds the first `done` keys and values."""

    arrays: tuple[Tensor, ...]
    row: int
    done: int = 0

    def __len__(self) -> int:
        return len(self.arrays[0])


def alone(
    q: Tensor, k: Tensor, v: Tensor, left: Tensor, right: Tensor | None, start: int, ranges: Tensor
) -> tuple[Tensor, Tensor]:
    """One sequence, with all of its scores: out [T, H, E] and lse [T, H]. No right slopes [H] hide later keys; ranges is [G, 2]."""
    distance, key = (
        torch.arange(len(q))[:, None] + start - torch.arange(len(k)),
        torch.arange(len(k)),
    )
    outs, lses = [], []
    for h, (first, end) in enumerate(ranges.repeat_interleave(H // G, 0).tolist()):
        seen = (key >= first) & (key < end) & ((distance >= 0) | (right is not None))
        fall = (
            torch.where(distance >= 0, left[h], left[h] if right is None else right[h])
            * distance.abs()
        )
        g, rows = h // (H // G), seen.any(1)
        score = (q[:, h] @ k[:, g].T * D**-0.5 - fall).masked_fill(~seen, -math.inf)[rows]
        outs.append(q.new_zeros(len(q), D).index_put((rows,), score.softmax(1) @ v[:, g]))
        lses.append(q.new_full((len(q),), -math.inf).index_put((rows,), score.logsumexp(1)))
    return torch.stack(outs, 1), torch.stack(lses, 1)


def read_nested(
    q: Tensor, k: Tensor, v: Tensor, of_q: Tensor, of_k: Tensor, left: Tensor, **options: Any
) -> Any:
    jagged = [
        torch.nested.nested_tensor_from_jagged(x, offsets=of)
        for x, of in ((q, of_q), (k, of_k), (v, of_k))
    ]
    found = attention(*(x.transpose(1, 2) for x in jagged), left, **options)
    return [x.transpose(1, 2).values() for x in found]


def read_flash(
    q: Tensor, k: Tensor, v: Tensor, of_q: Tensor, of_k: Tensor, left: Tensor, **options: Any
) -> Any:
    out, lse, _ = flash_attn.flash_attn_varlen_func(
        q, k, v, of_q, of_k, int(of_q.diff().max()), int(of_k.diff().max()),
        causal=options["causal"], alibi_slopes=left, return_attn_probs=True,
    )  # fmt: skip
    return out, lse.T.masked_fill(lse.T == math.inf, -math.inf)


class Sequences(RuleBasedStateMachine):
    """Sequences of queries, keys and values, which are read as a whole, in parts, and with a cache."""

    @initialize(seed=NUMBER)
    def begin(self, seed):
        torch.manual_seed(seed)
        self.texts: list[Sequence] = []
        self.caches = list(torch.full((2, MOST, ROOM, G, D), torch.nan, dtype=torch.float64))

    def add(self, *arrays: Tensor) -> Sequence:
        """In the first row of the caches that is free, where another one may have been."""
        row = next(
            row for row in itertools.count() if row not in {text.row for text in self.texts}
        )
        self.texts.append(Sequence(arrays, row))
        return self.texts[-1]

    def check(
        self,
        read: Any,
        parts: list[tuple[Tensor, ...]],
        left: Tensor,
        right: Tensor | None,
        **options: Any,
    ) -> None:
        """Read queries with keys and values, of each sequence some, together and one by one, forward and backward."""
        lengths = [[len(part[i]) for part in parts] for i in range(3)]
        leaves = [
            torch.cat([torch.empty(0, *size, dtype=torch.float64), *(part[i] for part in parts)])
            for i, size in enumerate(SIZES)
        ]
        slopes = [left] if right is None or right is left else [left, right]
        inputs = [x.requires_grad_() for x in (*leaves, *slopes)]
        of_q, of_k = (torch.tensor([0, *itertools.accumulate(n)]) for n in lengths[:2])
        given = {"causal": right is None, "right_slopes": right, "return_lse": True, **options}
        found = read(*leaves, of_q, of_k, left, **given)
        each = zip(*(x.split(n) for x, n in zip(leaves, lengths, strict=True)), strict=True)
        nothing = torch.stack(
            [x.sum() for x in inputs]
        ).sum()  # a function of all, as what is found is
        expected = [(nothing.expand(0, H, D), nothing.expand(0, H))]
        for b, (q, k, v) in enumerate(each):
            own = [None if x is None else x.expand(len(parts), H)[b] for x in (left, right)]
            ranges = options.get("key_range", torch.tensor([[0, len(k)]] * len(parts)))[b].expand(
                G, 2
            )
            start = (
                int(options["query_start"][b])
                if "query_start" in options
                else int(ranges[:, 1].max()) - len(q)
            )
            expected.append(alone(q, k, v, *own, start, ranges))
        wanted = [torch.cat(x) for x in zip(*expected, strict=True)]
        assert_close(list(found), wanted, **NEAR)
        weights = [torch.randn_like(x) for x in wanted]
        gradients = (
            torch.autograd.grad(
                [x.masked_fill(x.isinf(), 0) for x in results],
                inputs,
                weights,
                materialize_grads=True,
                allow_unused=True,
            )
            for results in (found, wanted)
        )
        assert_close(*gradients, **NEAR)

    def slopes(self, by_sequence: bool, count: int) -> tuple[Tensor, Tensor]:
        some = torch.tensor((0.0, 0.02, 0.3, 2.0), dtype=torch.float64)
        shape = (count, H) if by_sequence else (H,)
        return some[torch.randint(4, shape)], some[torch.randint(4, shape)]

    @precondition(lambda self: len(self.texts) < MOST)
    @rule(length=LENGTHS)
    def write(self, length):
        self.add(*(torch.randn(length, *size, dtype=torch.float64) for size in SIZES))

    @precondition(lambda self: 0 < len(self.texts) < MOST)
    @rule(number=NUMBER, at=NUMBER)
    def cut(self, number, at):
        """One of the parts may be empty."""
        text = self.texts.pop(number % len(self.texts))
        at %= len(text) + 1
        self.add(*(x[:at] for x in text.arrays))
        self.add(*(x[at:] for x in text.arrays))

    @precondition(lambda self: len(self.texts) > 1)
    @rule()
    def join(self):
        if sum(map(len, self.texts[:2])) <= ROOM:
            pair = [self.texts.pop(0).arrays for _ in range(2)]
            self.add(*(torch.cat(x) for x in zip(*pair, strict=True)))

    @rule(order=st.randoms(use_true_random=False))
    def reorder(self, order):
        order.shuffle(self.texts)

    @precondition(lambda self: self.texts)
    @rule(number=NUMBER)
    def forget(self, number):
        del self.texts[number % len(self.texts)]

    @rule(
        read=st.sampled_from((attention_varlen, read_nested, read_flash)),
        is_causal=st.booleans(),
        by_sequence=st.booleans(),
        implementation=st.sampled_from(("auto", "blocked", "dense")),
    )
    def read_all(self, read, is_causal, by_sequence, implementation):
        if not self.texts and read is not attention_varlen:
            return
        left, right = self.slopes(by_sequence, len(self.texts))
        if read is read_flash:  # which has the same for both sides
            right = left
        self.check(
            read,
            [text.arrays for text in self.texts],
            left,
            None if is_causal else right,
            implementation=implementation,
        )

    @precondition(lambda self: self.texts)
    @rule(
        read=st.sampled_from((attention_varlen, read_nested)),
        is_causal=st.booleans(),
        by_head=st.booleans(),
        placed=st.sets(st.sampled_from(("key_range", "query_start"))),
    )
    def read_some(self, read, is_causal, by_head, placed):
        """Other queries than keys, in places of their own."""
        parts, ranges, starts = [], [], []
        for text in self.texts:
            count, first = torch.randint(len(text) + 1, (2,)).tolist()
            first *= int(torch.randint(2, ()))
            q, k, v = text.arrays
            parts.append((q[:count], k[first:], v[first:]))
            ranges.append(
                torch.randint(len(text) - first + 1, (G if by_head else 1, 2)).sort(-1)[0]
            )
            starts.append(int(torch.randint(-9, len(text) + 9, ())))
        options = {
            "key_range": torch.stack(ranges) if by_head else torch.cat(ranges),
            "query_start": torch.tensor(starts),
        }
        options = {name: options[name] for name in sorted(placed)}
        left, right = self.slopes(False, 0)
        self.check(read, parts, left, None if is_causal else right, **options)

    @precondition(lambda self: any(text.done < len(text) for text in self.texts))
    @rule(
        most=st.sampled_from((1, 1, 2, 5, 70)),
        order=st.randoms(use_true_random=False),
        with_cache=st.booleans(),
    )
    def go_on(self, most, order, with_cache):
        """Read the next tokens of some texts with all before them: from a cache, which then has them, or once more."""
        left = self.slopes(False, 0)[0]
        some = [i for i, text in enumerate(self.texts) if text.done < len(text)]
        order.shuffle(some)
        count = min(most, *(len(self.texts[i]) - self.texts[i].done for i in some[:3]))
        chosen = [self.texts[i] for i in some[:3]]
        parts = []
        for i, text in zip(some, chosen, strict=False):
            q, k, v = text.arrays
            now = slice(0, text.done + count)
            parts.append((q[text.done : text.done + count], k[now], v[now]))
            if with_cache:
                self.texts[i] = replace(text, done=text.done + count)
        if not with_cache:
            self.check(attention_varlen, parts, left, None)
            return
        new = [torch.stack([x[i][-count:] for x in parts]) for i in range(3)]
        out, lse = self.attend_cached(*new, chosen, left)
        for b, part in enumerate(parts):
            whole = torch.tensor([[0, len(part[1])]] * G)
            wanted = alone(*part, left, None, len(part[1]) - count, whole)
            assert_close((out[b], lse[b].T), wanted, **NEAR)

    def attend_cached(
        self, q: Tensor, k: Tensor, v: Tensor, texts: list[Sequence], left: Tensor
    ) -> Any:
        return flash_attn.flash_attn_with_kvcache(
            q, *self.caches, k, v, cache_seqlens=torch.tensor([text.done for text in texts]),
            cache_batch_idx=torch.tensor([text.row for text in texts]), causal=True, alibi_slopes=left, return_softmax_lse=True,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("examples", "steps"), [(25, 12), pytest.param(500, 12, marks=pytest.mark.thorough)]
)
def test_packed_sequences_are_read_as_each_alone_in_whatever_order(examples, steps):
    run(Sequences, examples, steps)


# ---- models

CHANGES: dict[str, dict[str, Any]] = {
    **{name: {"position": name} for name in POSITIONS},
    "scaled": {"slope_scale": "interpolate", "train_length": 30, "num_key_value_heads": 2},
    **{f"masked {name}": {"encoder_position": name, "window": 5} for name in ENCODER_POSITIONS},
}
PADDING = {
    "zeros": lambda size: torch.zeros(size, dtype=torch.int64),
    "ones": lambda size: torch.ones(size, dtype=torch.int64),
    "counted": lambda size: torch.arange(size[1]).expand(
        size
    ),  # which may go on where a text ends
    "any": lambda size: torch.randint(9, size),
}


@functools.cache
def models(name: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A model, and the same with all scores in memory."""
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "train_length": 2 * ROOM}
    kind = LinbiasForMaskedLM if name.startswith("masked") else LinbiasForCausalLM
    both = []
    for implementation in ("auto", "dense"):
        config = small_models.settings(
            **sizes | CHANGES[name], attention_implementation=implementation
        )
        both.append(kind(config).double().eval())
    for parameter in both[0].model.position.parameters():
        torch.nn.init.normal_(parameter, -1.0)
    both[1].load_state_dict(both[0].state_dict())
    return both[0], both[1]


@dataclass(frozen=True)
class Text:
    """Token ids, and the number of the first of them."""

    ids: Tensor
    first: int

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def numbers(self) -> Tensor:
        return self.first + torch.arange(len(self))


class Rows(RuleBasedStateMachine):
    """Texts in the rows of a batch of a model, several to a row."""

    @initialize(seed=NUMBER, name=st.sampled_from(list(CHANGES)))
    def begin(self, seed, name):
        self.is_causal = not name.startswith("masked")
        self.model, self.plain = models(name)
        torch.manual_seed(seed)
        self.texts: list[Text] = []

    @precondition(lambda self: len(self.texts) < MOST)
    @rule(length=LENGTHS, first=st.sampled_from((0, 0, 0, 4)))
    def write(self, length, first):
        self.texts.append(Text(small_models.tokens(length), first))

    @precondition(lambda self: 0 < len(self.texts) < MOST)
    @rule(number=NUMBER, at=NUMBER, counts_on=st.booleans())
    def cut(self, number, at, counts_on):
        place = number % len(self.texts)
        ids, first = self.texts[place].ids, self.texts[place].first
        if len(ids) > 1:
            at = 1 + at % (len(ids) - 1)
            rest = Text(ids[at:], first + at if counts_on else 0)
            self.texts[place : place + 1] = [Text(ids[:at], first), rest]

    @precondition(lambda self: self.texts)
    @rule(numbers=st.lists(NUMBER, max_size=MOST))
    def select(self, numbers):
        self.texts = [self.texts[number % len(self.texts)] for number in numbers]

    @rule(order=st.randoms(use_true_random=False))
    def reorder(self, order):
        order.shuffle(self.texts)

    def lay_out(
        self, num_rows: int, room: int, padding: str
    ) -> tuple[Tensor, Tensor, Tensor, list[tuple[int, int, Text]]]:
        """Ids, mask and numbers [B, T]; and of each text its row, its place there and itself, where those that count on are one."""
        rows: list[list[Text]] = [[] for _ in range(num_rows)]
        for text in self.texts:
            rows[int(torch.randint(num_rows, ()))].append(text)
        T = max(1, *(sum(map(len, row)) for row in rows)) + room
        ids, mask = small_models.tokens(num_rows, T), torch.zeros(num_rows, T, dtype=torch.int64)
        numbers, found = PADDING[padding]((num_rows, T)).clone(), []
        for b, row in enumerate(rows):
            place = int(torch.randint(T + 1 - sum(map(len, row)), ()))
            for i, text in enumerate(row):
                here = slice(place, place + len(text))
                ids[b, here], mask[b, here], numbers[b, here] = text.ids, 1, text.numbers
                if i and text.first == row[i - 1].first + len(row[i - 1]):
                    _, start, before = found.pop()
                    found.append((b, start, Text(torch.cat([before.ids, text.ids]), before.first)))
                else:
                    found.append((b, place, text))
                place += len(text)
        return ids, mask, numbers, found

    @rule(
        num_rows=st.integers(1, 3),
        room=st.sampled_from((0, 0, 1, 9)),
        padding=st.sampled_from(list(PADDING)),
        keep=st.sampled_from((0, 0, 1, 5)),
        says_all=st.booleans(),
        asks_cache=st.booleans(),
        asks_weights=st.booleans(),
    )
    def read(self, num_rows, room, padding, keep, says_all, asks_cache, asks_weights):
        ids, mask, numbers, texts = self.lay_out(num_rows, room, padding)
        is_token = mask.bool()
        given = {
            "attention_mask": None if mask.all() and not says_all else mask,
            "position_ids": numbers,
        }
        given["output_attentions"] = asks_weights
        keep = keep if self.is_causal and 0 < keep <= ids.shape[1] else ids.shape[1]
        if self.is_causal:
            given["logits_to_keep"] = keep
            given["use_cache"] = asks_cache
            if asks_cache and len({b for b, _, _ in texts}) < len(texts):
                with pytest.raises(ValueError, match="several texts in a row"):
                    self.model(ids, **given)
                return
        output = self.model(ids, **given)
        if not texts:
            return
        logits = output.logits[is_token[:, -keep:]]
        expected = torch.full((*ids.shape, small_models.VOCAB), torch.nan, dtype=torch.float64)
        for b, start, text in texts:
            here = slice(start, start + len(text))
            one = self.plain(
                text.ids[None], position_ids=text.numbers[None], output_attentions=asks_weights
            )
            expected[b, here] = one.logits[0]
            if asks_weights:
                weights = output.attentions[0][b, :, here]
                assert_close(weights[..., here], one.attentions[0][0], **NEAR)
                assert not weights[..., :start].any() and not weights[..., here.stop :].any()
        expected = expected[:, -keep:][is_token[:, -keep:]]
        same(logits, expected)
        direction = torch.randn_like(logits)
        gradients = []
        for model, results in ((self.model, logits), (self.plain, expected)):
            found = torch.autograd.grad(
                (results * direction).sum(),
                list(model.parameters()),
                materialize_grads=True,
                allow_unused=True,
            )
            gradients.append(found)
        for x, y in zip(*gradients, strict=True):
            same(x, y)


@pytest.mark.parametrize(
    ("examples", "steps"), [(25, 8), pytest.param(500, 8, marks=pytest.mark.thorough)]
)
def test_packed_rows_are_read_as_each_text_alone_in_whatever_order(examples, steps):
    run(Rows, examples, steps)
