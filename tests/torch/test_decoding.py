"""One step of decoding against a call of attention on the whole cache, and where that is left."""

import contextlib
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.overrides import BaseTorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

import linbias.models.decoder.cache
import linbias.torch
from linbias.kernels import core
from linbias.models import LinbiasConfig, LinbiasForCausalLM, fuse
from linbias.torch.decoding import TOLERANCES, decode
from linbias.torch.shard import put_in_place

pytestmark = [
    pytest.mark.usefixtures("same_start"),
    pytest.mark.skipif(core.WHY_MISSING is not None, reason="the core is not compiled"),
]


def draw(
    B: int = 1,
    H: int = 2,
    G: int = 2,
    T: int = 1,
    num_cached: int = 5,
    D: int = 8,
    E: int = 8,
    dtype: torch.dtype = torch.float32,
    size: float = 1.0,
    scale: float | None = None,
) -> dict[str, Any]:
    """The arguments of `decode`: room for more tokens than come holds NaN."""
    keys, values = (torch.full((B, G, num_cached + 9, n), torch.nan, dtype=dtype) for n in (D, E))
    keys[:, :, :num_cached] = size * torch.randn(B, G, num_cached, D)
    values[:, :, :num_cached] = torch.randn(B, G, num_cached, E)
    wide = torch.promote_types(dtype, torch.float32)
    norms = keys[:, :, :num_cached].to(wide).norm(dim=-1)
    return {
        "q": torch.randn(B, H, T, D).to(dtype),
        "k": (size * torch.randn(B, G, T, D)).to(dtype),
        "v": torch.randn(B, G, T, E).to(dtype),
        "keys": keys,
        "values": values,
        "num_cached": num_cached,
        "key_bound": norms.amax(-1) if num_cached else norms.new_zeros(B, G),
        "slopes": torch.rand(H, dtype=wide),
        "scale": scale,
    }


def by_attention(given: dict[str, Any]) -> Tensor:
    """What `decode` gives, before it was called."""
    n = given["num_cached"]
    pairs = ("keys", "k"), ("values", "v")
    k, v = (torch.cat([given[old][:, :, :n], given[new]], 2) for old, new in pairs)
    options = {"scale": given["scale"], "implementation": "dense"}
    return linbias.torch.attention(given["q"], k, v, given["slopes"], **options)


@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize(
    "sizes",
    [
        {"scale": 0.3},
        {"T": 3, "num_cached": 0, "scale": 2.0},
        {"B": 3, "H": 6, "G": 2, "T": 4, "num_cached": 64, "D": 16, "E": 5},
        {"H": 4, "G": 1, "num_cached": 700, "D": 33, "E": 64},
        {"B": 2, "num_cached": 130, "size": 30.0},
    ],
)
@torch.inference_mode()
def test_it_is_attention_to_all_that_was_and_came(dtype, sizes):
    given = draw(**sizes, dtype=dtype)
    keys, values = given["keys"].clone(), given["values"].clone()
    n, T = given["num_cached"], given["q"].shape[2]
    expected = by_attention(given)
    found = decode(**given)
    assert found is not None and found.dtype == dtype
    torch.testing.assert_close(found, expected)
    keys[:, :, n : n + T], values[:, :, n : n + T] = given["k"], given["v"]
    for held, whole in ((given["keys"], keys), (given["values"], values)):
        torch.testing.assert_close(held, whole, rtol=0, atol=0, equal_nan=True)
    largest = keys[:, :, : n + T].double().norm(dim=-1).amax(-1)
    assert (given["key_bound"] >= largest * (1 - 1e-7)).all()
    assert (given["key_bound"] <= largest * 1.001).all()


@pytest.mark.parametrize("size", [1e-30, 1e30, torch.inf, torch.nan])
@torch.inference_mode()
def test_the_bound_holds_for_keys_of_any_size(size):
    """Squares of the first vanish, of the second overflow."""
    given = draw(H=1, G=1, num_cached=400)
    given["k"] = torch.full((1, 1, 1, 8), size)
    given["slopes"][:] = 4.0
    assert decode(**given) is not None
    bound = given["key_bound"].item()
    assert (bound >= size * 8**0.5) if size < torch.inf else (bound != bound)
    # The next query reaches a key far away, whose value shows, only if its bound lets it.
    given |= {"num_cached": 401, "k": torch.ones(1, 1, 1, 8)}
    given["values"][:, :, 0] = torch.inf
    found = decode(**given)
    assert found is not None
    assert found.isfinite().all() == (size == 1e-30)


@torch.inference_mode()
def test_arrays_may_be_views_of_others():
    """As parts of one projection they lie apart, and a last axis may have a stride."""
    given = draw(B=2, H=3, G=3, T=2, num_cached=70)
    expected = by_attention(given)
    qkv = torch.stack([given["q"], given["k"], given["v"]], -1).transpose(1, 2).contiguous()
    q, k, v = qkv.transpose(1, 2).unbind(-1)
    assert q.stride(-1) == 3
    found = decode(**given | {"q": q, "k": k, "v": v})
    torch.testing.assert_close(found, expected)


LOOKS_ON: dict[str, list[Callable[[], Any]]] = {
    "gradients": [torch.enable_grad],
    "mode": [torch.inference_mode, BaseTorchFunctionMode],
    "profiler": [
        torch.inference_mode,
        lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
    ],
    "autocast": [torch.inference_mode, lambda: torch.autocast("cpu")],
    "shard": [torch.inference_mode, lambda: put_in_place(cast(Any, object()))],
}


@pytest.mark.parametrize("name", LOOKS_ON)
def test_nothing_happens_where_something_looks_on(name):
    assert_left_alone(draw(), *LOOKS_ON[name])


def beside(**other: int) -> dict[str, Any]:
    """A step with the cache of another model, beside which the core would write."""
    cache = draw(**other)
    return draw() | {name: cache[name] for name in ("keys", "values", "key_bound")}


def strided(name: str) -> dict[str, Any]:
    """A cache in whose place the core would write to a copy."""
    return {name: draw()[name].mT.contiguous().mT}


def without_room(name: str) -> dict[str, Any]:
    given = draw()
    return given | {name: given[name][:, :, :5].clone()}


UNFIT: dict[str, Callable[[], dict[str, Any]]] = {
    "many tokens": lambda: draw(T=5),
    "large heads": lambda: draw(D=300, E=8),
    "keys of another type": lambda: draw() | {"k": torch.randn(1, 2, 1, 8).double()},
    "values of another type": lambda: draw() | {"v": torch.randn(1, 2, 1, 8).half()},
    "device": lambda: draw() | {"q": torch.zeros(1, 2, 1, 8, device="meta")},
    "other key heads": lambda: beside(G=1),
    "other key size": lambda: beside(D=4),
    "other value size": lambda: beside(E=4),
    "other batch": lambda: beside(B=2),
    "no room for keys": lambda: without_room("keys"),
    "no room for values": lambda: without_room("values"),
    "query heads that no key head has": lambda: draw(H=3),
    "other number of bounds": lambda: draw() | {"key_bound": torch.ones(1, 1)},
    "slopes of other batch rows": lambda: draw() | {"slopes": torch.ones(3, 2)},
    "other number of slopes": lambda: draw() | {"slopes": torch.ones(3)},
    "cached keys with a stride in each": lambda: draw() | strided("keys"),
    "cached values with a stride in each": lambda: draw() | strided("values"),
    "one bound for all": lambda: draw() | {"key_bound": torch.full((1, 1), 9.0).expand(1, 2)},
    "slopes of another type": lambda: draw() | {"slopes": torch.ones(2).double()},
}


@pytest.mark.parametrize("case", UNFIT)
def test_nothing_happens_where_arrays_do_not_fit(case):
    assert_left_alone(UNFIT[case](), torch.inference_mode)


@torch.inference_mode()
def test_the_cache_of_another_model_is_refused_in_words():
    ids = torch.randint(50, (1, 8))
    cache = build("linbias")(ids, use_cache=True).past_key_values
    with pytest.raises(RuntimeError, match="size"):
        build("interpolate")(ids[:, :1], past_key_values=cache)  # of which each head has keys


def assert_left_alone(given: dict[str, Any], *contexts: Callable[[], Any]) -> None:
    before = {name: given[name].clone() for name in ("keys", "values", "key_bound")}
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context())
        assert decode(**given) is None
    for name, array in before.items():
        torch.testing.assert_close(given[name], array, rtol=0, atol=0, equal_nan=True)


@torch.inference_mode()
def test_slopes_are_checked_before_anything_is_written():
    given = draw()
    given["slopes"][0] = -1.0
    before = given["keys"].clone()
    with pytest.raises(ValueError, match="decode: slopes"):
        decode(**given)
    torch.testing.assert_close(given["keys"], before, rtol=0, atol=0, equal_nan=True)


FUSED = {
    "bloom": {"hidden_size": 32, "n_head": 4, "n_layer": 2},
    "falcon": {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "alibi": True},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "attn_config": {"alibi": True}},
}
SMALL = {"vocab_size": 50, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
OWN = {
    "linbias": {"num_key_value_heads": 2},
    "interpolate": {"train_length": 32, "slope_scale": "interpolate"},
}


def build(name: str) -> Any:
    if name in OWN:
        return LinbiasForCausalLM(LinbiasConfig(**SMALL, **OWN[name])).eval()
    config = AutoConfig.for_model(name, vocab_size=50, **FUSED[name])
    return fuse(AutoModelForCausalLM.from_config(config)).eval()


class Steps:
    """Stands for `linbias.torch.decoding` in caches: counts its steps, or refuses them."""

    def __init__(self, refuses: bool = False) -> None:
        self.refuses, self.count = refuses, 0

    def decode(self, *arguments: Any) -> Tensor | None:
        out = None if self.refuses else decode(*arguments)
        self.count += out is not None
        return out


@pytest.mark.parametrize("name", [*FUSED, *OWN])
@torch.inference_mode()
def test_a_model_takes_it_for_all_but_the_prompt(name, monkeypatch):
    model = build(name)
    ids = torch.randint(50, (2, 110))
    logits = []
    for steps in (Steps(), Steps(refuses=True)):
        monkeypatch.setattr(linbias.models.decoder.cache, "decoding", steps)
        cache = DynamicCache()
        found = [model(ids[:, :20], past_key_values=cache).logits]
        for first, end in ((20, 23), *((i, i + 1) for i in range(23, 109))):  # buffers grow at 89
            found.append(model(ids[:, first:end], past_key_values=cache).logits)
        logits.append(torch.cat(found, 1))
        assert steps.count == (0 if steps.refuses else 2 * 87)
    torch.testing.assert_close(*logits)
    if name != "interpolate":  # whose slopes were others while the text was shorter
        torch.testing.assert_close(logits[0], model(ids[:, :109], use_cache=False).logits)


@pytest.mark.parametrize("name", ["bloom", "linbias"])
@torch.inference_mode()
def test_a_model_does_not_where_more_is_asked(name, monkeypatch):
    model = build(name)
    ids = torch.randint(50, (2, 12))
    padding = torch.ones(2, 12, dtype=torch.int64)
    padding[0, :3] = 0
    for options in ({"attention_mask": padding}, {"output_attentions": True}):
        steps = Steps()
        monkeypatch.setattr(linbias.models.decoder.cache, "decoding", steps)
        whole = model(ids, use_cache=False, **options)
        cache = DynamicCache()
        mask = options.get("attention_mask")
        first = {} if mask is None else {"attention_mask": mask[:, :11]}
        model(ids[:, :11], past_key_values=cache, **first)
        last = model(ids[:, 11:], past_key_values=cache, **options)
        assert steps.count == 0
        torch.testing.assert_close(last.logits[:, -1], whole.logits[:, -1])
        if mask is None:
            torch.testing.assert_close(last.attentions[0], whole.attentions[0][:, :, -1:])
