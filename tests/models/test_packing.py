"""Packed texts of any lengths, each beside itself alone: in attention, and in models."""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch.testing import assert_close
from transformers import PreTrainedModel

import small_models
from linbias.compat import flash_attn
from linbias.models import LinbiasForCausalLM, LinbiasForMaskedLM
from linbias.models.decoder.config import ENCODER_POSITIONS, POSITIONS
from linbias.torch import attention, attention_varlen

pytestmark = pytest.mark.usefixtures("same_start")
often = pytest.mark.parametrize("examples", [100, pytest.param(200, marks=pytest.mark.thorough)])

SEED = st.integers(0, 2**16)
LENGTHS = st.sampled_from((1, 1, 2, 3, 7, 20, 63, 64, 65, 130))  # around what shares a batch
NEAR = {"rtol": 1e-10, "atol": 1e-10}
UNUSED = {"materialize_grads": True, "allow_unused": True}


def run(test: Callable[..., None], examples: int, **drawn: st.SearchStrategy[Any]) -> None:
    settings(max_examples=examples)(given(**drawn)(test))()


def same(found: Tensor, expected: Tensor) -> None:
    """Within the rounding of the largest of the numbers."""
    size = max(1.0, float(expected.detach().abs().amax())) if len(expected) else 1.0
    assert_close(found, expected, rtol=1e-10, atol=1e-10 * size)


# ---- attention

H, G, D = 4, 2, 8  # query heads, key/value heads, and their size
SIZES = (H, D), (G, D), (G, D)


WINDOW = 4, 2


def alone(q, k, v, left, right, start, ranges, rows=None, window=None):
    """One sequence, with all scores: out [T, H, E] and lse [T, H]; ranges is [G, 2], rows [T, 2]
    or none.
    """
    key = torch.arange(len(k))
    distance = torch.arange(len(q))[:, None] + start - key
    shown = (distance >= 0) | (right is not None)
    if rows is not None:
        shown = shown & (key >= rows[:, :1]) & (key < rows[:, 1:])
    if window is not None:
        shown = shown & (distance <= window[0]) & (-distance <= window[1])
    outs, lses = [], []
    for h, (first, end) in enumerate(ranges.repeat_interleave(H // G, 0).tolist()):
        seen = shown & (key >= first) & (key < end)
        later = left[h] if right is None else right[h]
        fall = torch.where(distance >= 0, left[h], later) * distance.abs()
        g, rows = h // (H // G), seen.any(1)
        score = (q[:, h] @ k[:, g].T * D**-0.5 - fall).masked_fill(~seen, -math.inf)[rows]
        outs.append(q.new_zeros(len(q), D).index_put((rows,), score.softmax(1) @ v[:, g]))
        lses.append(q.new_full((len(q),), -math.inf).index_put((rows,), score.logsumexp(1)))
    return torch.stack(outs, 1), torch.stack(lses, 1)


def read_nested(q, k, v, of_q, of_k, left, **options):
    both = zip((q, k, v), (of_q, of_k, of_k), strict=True)
    jagged = [torch.nested.nested_tensor_from_jagged(x, offsets=of) for x, of in both]
    if "query_range" in options:
        rows = options["query_range"]
        options["query_range"] = torch.nested.nested_tensor_from_jagged(rows, offsets=of_q)
    found = attention(*(x.transpose(1, 2) for x in jagged), left, **options)
    return [x.transpose(1, 2).values() for x in found]


def read_flash(q, k, v, of_q, of_k, left, right_slopes, causal, **_):
    longest = [int(of.diff().max()) for of in (of_q, of_k)]
    how = {"causal": causal, "alibi_slopes": left, "return_attn_probs": True}
    out, lse, _ = flash_attn.flash_attn_varlen_func(q, k, v, of_q, of_k, *longest, **how)
    return out, lse.T.masked_fill(lse.T == math.inf, -math.inf)


@often
def test_packed_sequences_are_read_as_each_alone(examples):
    """Out, lse and all gradients, of sequences some of which are empty."""

    def check(seed, lengths, read, is_causal, is_square, by_sequence, by_head, placed, how):
        torch.manual_seed(seed)
        if not lengths and read is not attention_varlen:
            return
        parts, ranges, starts, rows = [], [], [], []
        for n in lengths:
            count, first = (n, 0) if is_square else torch.randint(n + 1, (2,)).tolist()
            q, k, v = (torch.randn(n, *size, dtype=torch.float64) for size in SIZES)
            parts.append((q[:count], k[first:], v[first:]))
            ends = torch.randint(n - first + 1, (G if by_head else 1, 2))
            ranges.append(ends.sort(-1)[0])
            starts.append(int(torch.randint(-9, n + 9, ())))
            rows.append(torch.randint(n - first + 1, (count, 2)).sort(-1)[0])
        options = {"implementation": how}
        if lengths and read is not read_flash:  # which has no placement
            if "key_range" in placed:
                options["key_range"] = torch.stack(ranges) if by_head else torch.cat(ranges)
            if "query_start" in placed:
                options["query_start"] = torch.tensor(starts)
            if "query_range" in placed:
                options["query_range"] = torch.cat(rows)
            if "window" in placed:
                options["window"] = WINDOW
        some = torch.tensor((0.0, 0.02, 0.3, 2.0), dtype=torch.float64)
        shape = (len(parts), H) if by_sequence else (H,)
        left, right = some[torch.randint(4, shape)], some[torch.randint(4, shape)]
        if is_causal:
            right = None
        elif read is read_flash:  # which has the same for both sides
            right = left
        none = [torch.empty(0, *size, dtype=torch.float64) for size in SIZES]
        leaves = [torch.cat(x) for x in zip(none, *parts, strict=True)]
        slopes = [left] if right is None or right is left else [left, right]
        inputs = [x.requires_grad_() for x in (*leaves, *slopes)]
        sizes = [[len(part[i]) for part in parts] for i in range(3)]
        of_q, of_k = (torch.tensor([0, *itertools.accumulate(n)]) for n in sizes[:2])
        asked = {"causal": is_causal, "right_slopes": right, "return_lse": True, **options}
        found = read(*leaves, of_q, of_k, left, **asked)

        nothing = sum(x.sum() for x in inputs)  # a function of all, as what is found is
        expected = [(nothing.expand(0, H, D), nothing.expand(0, H))]
        each = zip(*(x.split(n) for x, n in zip(leaves, sizes, strict=True)), strict=True)
        for b, (q, k, v) in enumerate(each):
            own = [None if x is None else x.expand(len(parts), H)[b] for x in (left, right)]
            seen = torch.tensor([[0, len(k)]])
            seen = options["key_range"][b] if "key_range" in options else seen
            start = int(seen.reshape(-1, 2)[:, 1].max()) - len(q)
            start = starts[b] if "query_start" in options else start
            limits = rows[b] if "query_range" in options else None, options.get("window")
            expected.append(alone(q, k, v, *own, start, seen.expand(G, 2), *limits))
        wanted = [torch.cat(x) for x in zip(*expected, strict=True)]
        assert_close(list(found), wanted, **NEAR)
        weights = [torch.randn_like(x) for x in wanted]
        finite = ([x.masked_fill(x.isinf(), 0) for x in results] for results in (found, wanted))
        gradients = (torch.autograd.grad(x, inputs, weights, **UNUSED) for x in finite)
        assert_close(*gradients, **NEAR)

    run(
        check,
        examples,
        seed=SEED,
        lengths=st.lists(LENGTHS | st.just(0), max_size=6),
        read=st.sampled_from((attention_varlen, read_nested, read_flash)),
        is_causal=st.booleans(),
        is_square=st.booleans(),
        by_sequence=st.booleans(),
        by_head=st.booleans(),
        placed=st.sets(st.sampled_from(("key_range", "query_start", "query_range", "window"))),
        how=st.sampled_from(("auto", "blocked", "dense")),
    )


# ---- models

CHANGES: dict[str, dict[str, Any]] = {
    **{name: {"position": name} for name in POSITIONS},
    "scaled": {"slope_scale": "interpolate", "train_length": 30, "num_key_value_heads": 2},
    **{f"masked {name}": {"encoder_position": name, "window": 5} for name in ENCODER_POSITIONS},
}
PADDING = {
    "zeros": lambda size: torch.zeros(size, dtype=torch.int64),
    "ones": lambda size: torch.ones(size, dtype=torch.int64),
    "counted": lambda size: torch.arange(size[1]).expand(size),  # perhaps on where a text ends
    "any": lambda size: torch.randint(9, size),
}


@functools.cache
def models(name: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A model, and the same with all scores in memory."""
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "train_length": 800}
    kind = LinbiasForMaskedLM if name.startswith("masked") else LinbiasForCausalLM
    both = []
    for implementation in ("auto", "dense"):
        changes = sizes | CHANGES[name] | {"attention_implementation": implementation}
        both.append(kind(small_models.settings(**changes)).double().eval())
    for parameter in both[0].model.position.parameters():
        torch.nn.init.normal_(parameter, -1.0)
    both[1].load_state_dict(both[0].state_dict())
    return both[0], both[1]


def lay_out(
    texts: list[tuple[int, int | None]], num_rows: int, room: int, padding: str
) -> tuple[Tensor, Tensor, Tensor, list[tuple[int, slice]]]:
    """Ids, mask and numbers [B, T]; and where each text is, where those that count on are one."""
    rows: list[list[Tensor]] = [[] for _ in range(num_rows)]
    for length, first in texts:
        row = rows[int(torch.randint(num_rows, ()))]
        if first is None:
            first = int(row[-1][-1]) + 1 if row else 0
        row.append(first + torch.arange(length))
    T = max(1, *(sum(map(len, row)) for row in rows)) + room
    ids, mask = small_models.tokens(num_rows, T), torch.zeros(num_rows, T, dtype=torch.int64)
    numbers, found = PADDING[padding]((num_rows, T)).clone(), []
    for b, row in enumerate(rows):
        start = end = int(torch.randint(T + 1 - sum(map(len, row)), ()))
        for i, text in enumerate(row):
            counts_on = i > 0 and text[0] == row[i - 1][-1] + 1
            start = found.pop()[1].start if counts_on else end
            numbers[b, end : end + len(text)] = text
            mask[b, end : end + len(text)] = 1
            end += len(text)
            found.append((b, slice(start, end)))
    return ids, mask, numbers, found


@often
def test_packed_rows_are_read_as_each_text_alone(examples):
    """Logits, weights of attention and gradients, with padding on either side."""

    def check(
        seed, name, texts, num_rows, room, padding, keep, says_all, asks_cache, asks_weights
    ):
        is_causal, (model, plain) = not name.startswith("masked"), models(name)
        torch.manual_seed(seed)
        ids, mask, numbers, found = lay_out(texts, num_rows, room, padding)
        is_token, shown = mask.bool(), {"output_attentions": asks_weights}
        mask = None if mask.all() and not says_all else mask
        options = {"attention_mask": mask, "position_ids": numbers, **shown}
        keep = keep if is_causal and 0 < keep <= ids.shape[1] else ids.shape[1]
        if is_causal:
            options |= {"logits_to_keep": keep, "use_cache": asks_cache}
            if asks_cache and len({b for b, _ in found}) < len(found):
                with pytest.raises(ValueError, match="several texts in a row"):
                    model(ids, **options)
                return
        output = model(ids, **options)
        if not found:
            return
        expected = torch.full((*ids.shape, small_models.VOCAB), torch.nan, dtype=torch.float64)
        for b, here in found:
            one = plain(ids[b, here][None], position_ids=numbers[b, here][None], **shown)
            expected[b, here] = one.logits[0]
            if asks_weights:
                weights = output.attentions[0][b, :, here]
                assert_close(weights[..., here], one.attentions[0][0], **NEAR)
                assert not weights[..., : here.start].any() and not weights[..., here.stop :].any()
        kept = is_token[:, -keep:]
        logits, expected = output.logits[kept], expected[:, -keep:][kept]
        same(logits, expected)
        direction = torch.randn_like(logits)
        gradients = [
            torch.autograd.grad((results * direction).sum(), list(one.parameters()), **UNUSED)
            for one, results in ((model, logits), (plain, expected))
        ]
        for x, y in zip(*gradients, strict=True):
            same(x, y)

    run(
        check,
        examples,
        seed=SEED,
        name=st.sampled_from(list(CHANGES)),
        # Lengths, and the number of the first token; None counts on from the text before.
        texts=st.lists(st.tuples(LENGTHS, st.sampled_from((0, 0, 4, None))), max_size=6),
        num_rows=st.integers(1, 3),
        room=st.sampled_from((0, 0, 1, 9)),
        padding=st.sampled_from(list(PADDING)),
        keep=st.sampled_from((0, 0, 1, 5)),
        says_all=st.booleans(),
        asks_cache=st.booleans(),
        asks_weights=st.booleans(),
    )
