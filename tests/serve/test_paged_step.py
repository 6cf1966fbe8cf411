"""A step of a model in pages, checked once, computes what each layer's own call would."""

import pytest
import torch

import linbias
from linbias.torch import attention_paged, write_pages
from linbias.torch.packed.step import Layer, Step

PAGES, SIZE, G, H, D = 13, 8, 2, 6, 16
TABLE = torch.tensor([[7, 2, 11, 0], [3, 9, 1, 5]], dtype=torch.int32)
LENGTHS, ENDS = torch.tensor([19, 30], dtype=torch.int32), torch.tensor([0, 1, 6])
SLOTS = torch.cat([TABLE[0, 2:3] * SIZE + 2, TABLE[1, 3:4] * SIZE + torch.arange(1, 6)])


def layer(seed, dtype):
    """New queries, keys and values; pages, and their norms."""
    torch.manual_seed(seed)
    new = [torch.randn(6, heads, D).to(dtype) for heads in (H, G, G)]
    pages = torch.randn(2, PAGES, G, SIZE, D).transpose(2, 3).to(dtype)
    norms = pages[0].float().norm(dim=-1).amax(1) * 1.01
    return new, pages, norms


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, (4, 0)])
def test_layers_share_what_is_checked_and_nothing_else(dtype, window):
    step = Step(TABLE, LENGTHS, ENDS, SLOTS)
    for seed, scale in ((0, 0.25), (1, 0.5), (2, 1.0)):
        (q, k, v), pages, norms = layer(seed, dtype)
        slopes = torch.tensor(linbias.slopes(H, max_bias=4.0 + seed)).float()
        other, other_norms = pages.clone(), norms.clone()
        write_pages(k, v, *other, SLOTS, other_norms)
        own = Layer(*pages, slopes, norms, scale=scale, window=window)
        step.write(own, k, v)
        assert torch.equal(pages, other)
        assert torch.equal(norms, other_norms)
        given = {"cu_seqlens_q": ENDS, "page_norms": norms, "scale": scale, "window": window}
        expected = attention_paged(q, *pages, TABLE, LENGTHS, slopes, **given)
        out = torch.empty_like(q)
        step.attention(own, q, out)
        assert torch.equal(out, expected)


def strided(x):
    """The same numbers, every second row of a wider array."""
    return x.repeat_interleave(2, dim=1)[:, ::2]


def test_a_layer_of_another_form_gets_no_description_of_the_first():
    """The core takes arrays at their word: each of these would be read as what it is not."""
    step = Step(TABLE, LENGTHS, ENDS, SLOTS)
    (q, _, _), (keys, values), norms = layer(0, torch.float32)
    slopes = torch.tensor(linbias.slopes(H)).float()
    narrow = [x.bfloat16() for x in (q, keys, values)]
    wide = [x.double() for x in (q, keys, values, slopes, norms)]
    for q_, keys_, values_, slopes_, norms_ in (
        (q, keys, values, slopes, norms),
        (strided(q), keys, values, slopes, norms),
        (q, keys.contiguous(), values, slopes, norms),
        (q, keys, values.contiguous(), slopes, norms),
        (q, keys, values.mT.contiguous().mT, slopes, norms),
        (q, keys, values, slopes, None),
        (q, keys, values, slopes, norms.T.contiguous().T),
        (q, keys, values, strided(slopes[None])[0], norms),
        (q[..., :8], keys[..., :8], values, slopes, norms),
        (*narrow, slopes, norms),
        (*wide,),
    ):
        given = {"cu_seqlens_q": ENDS, "page_norms": norms_, "scale": 0.25}
        expected = attention_paged(q_, keys_, values_, TABLE, LENGTHS, slopes_, **given)
        for out in (torch.empty_like(expected), strided(torch.empty_like(expected))):
            own = Layer(keys_, values_, slopes_, norms_, scale=0.25)
            step.attention(own, q_, out)
            torch.testing.assert_close(out, expected, rtol=0, atol=0)


def test_padding_is_written_nowhere():
    (_, k, v), pages, norms = layer(0, torch.float32)
    before = pages.clone()
    own = Layer(*pages, torch.ones(H), norms, scale=1.0)
    Step(TABLE, LENGTHS, ENDS, torch.full((6,), -1)).write(own, k, v)
    assert torch.equal(pages, before)


def test_the_first_layer_of_a_shape_is_checked():
    (q, k, v), pages, norms = layer(0, torch.float32)
    slopes = torch.tensor(linbias.slopes(H)).float()
    own = Layer(*pages, slopes, norms, scale=1.0)
    step = Step(TABLE, LENGTHS + 3, ENDS, SLOTS + PAGES * SIZE)
    with pytest.raises(ValueError, match="write_pages: slots must be below 104"):
        step.write(own, k, v)
    with pytest.raises(ValueError, match="attention_paged: seq_lens must be in"):
        step.attention(own, q, torch.empty_like(q))
