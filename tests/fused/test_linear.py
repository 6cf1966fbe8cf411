"""Linear layers of models that read through oneDNN: the same answers as PyTorch's own, and its own wherever anything looks on."""

import copy
import io
import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    MptConfig,
    MptForCausalLM,
)

from linbias import _machine
from linbias.models import (
    LinbiasBertConfig,
    LinbiasBertModel,
    LinbiasConfig,
    LinbiasForCausalLM,
    fuse,
    install,
    prepack,
    unfuse,
)
from linbias.models.linear import layers as linear
from small_models import every_type, fast_types, has_bfloat16, needs_bfloat16, needs_onednn

pytestmark = needs_onednn
SIZES = {"vocab_size": 97, "initializer_range": 0.3}


@pytest.fixture(autouse=True)
def on_every_processor(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(linear, "_is_faster", lambda: True)
    monkeypatch.setattr(linear, "_types", lambda: fast_types)
    monkeypatch.setattr(linear, "_SMALLEST", 1)
    yield


def bloom() -> Any:
    return BloomForCausalLM(BloomConfig(hidden_size=48, n_head=6, n_layer=2, **SIZES)).eval()


def falcon() -> Any:
    sizes = {"hidden_size": 48, "num_attention_heads": 6, "num_hidden_layers": 2}
    return FalconForCausalLM(FalconConfig(**sizes, **SIZES, alibi=True, bias=True)).eval()


def mpt() -> Any:
    return MptForCausalLM(MptConfig(d_model=48, n_heads=6, n_layers=2, **SIZES)).eval()


def calls(function: Callable[[], object]) -> int:
    """How many calls of oneDNN's linear layer a function makes."""
    with torch.profiler.profile() as profile:
        function()
    return sum(event.name == "mkldnn::_linear_pointwise" for event in profile.events())


def gelus(function: Callable[[], object]) -> int:
    """How many GELUs a function computes that are a step of their own."""
    with torch.profiler.profile() as profile:
        function()
    return sum(event.name == "aten::gelu" for event in profile.events())


def tokens(*shape: int) -> Tensor:
    return torch.randint(0, 97, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("make", [bloom, falcon, mpt])
@torch.no_grad()
def test_a_fused_model_reads_through_it_until_it_is_unfused(make: Callable[[], Any]) -> None:
    model, x = make(), tokens(2, 9)
    expected = model(x).logits
    layers = sum(isinstance(module, nn.Linear) for module in model.modules())
    fuse(model)
    assert calls(lambda: model(x)) == layers
    torch.testing.assert_close(model(x).logits, expected, rtol=1e-4, atol=1e-4)
    unfuse(model)
    assert calls(lambda: model(x)) == 0
    assert not any("forward" in vars(module) for module in model.modules())


@torch.no_grad()
def test_our_own_models_and_those_that_are_built_fused_do() -> None:
    ours = LinbiasForCausalLM(LinbiasConfig(vocab_size=97, hidden_size=32, num_attention_heads=4))
    assert calls(lambda: ours(tokens(1, 5))) > 4
    install()
    config = BloomConfig(hidden_size=48, n_head=6, n_layer=1, **SIZES)
    built = AutoModelForCausalLM.from_config(config, attn_implementation="linbias")
    assert calls(lambda: built(tokens(1, 5))) == 5  # four of the layer, and the head


def test_a_copy_and_a_saved_model_read_their_own_weights() -> None:
    model = fuse(bloom())
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    for other in (copy.deepcopy(model), torch.load(saved, weights_only=False)):
        with torch.no_grad():
            before, x = model(tokens(1, 6)).logits, tokens(1, 6)
            other.transformer.h[0].mlp.dense_h_to_4h.weight.zero_()
            assert calls(lambda other=other, x=x: other(x)) == 9
            assert (other(x).logits - before).abs().max() > 1e-2
            torch.testing.assert_close(model(x).logits, before)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is:DeprecationWarning")  # forward mode's
def test_pytorchs_own_layer_runs_where_anything_looks_on() -> None:
    layer = nn.Sequential(nn.Linear(8, 6))
    linear.read_faster(layer)
    x = torch.randn(3, 8)
    assert calls(lambda: layer(x)) == 0, "weights that learn"
    loss = layer(x).square().sum()
    loss.backward()
    assert layer[0].weight.grad is not None
    with torch.no_grad():
        assert calls(lambda: layer(x)) == 1
        assert calls(lambda: layer(x[:0])) == 0
        assert calls(lambda: copy.deepcopy(layer).double()(x.double())) == 0
        assert calls(lambda: copy.deepcopy(layer).half()(x.half())) == 0
        assert calls(lambda: copy.deepcopy(layer).bfloat16()(x.bfloat16())) == has_bfloat16
        assert calls(lambda: torch.vmap(layer)(x)) == 0
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(x).dtype == torch.bfloat16
        tangent = torch.func.jvp(layer, (x,), (torch.ones_like(x),))[1]
        torch.testing.assert_close(tangent, torch.ones(3, 8) @ layer[0].weight.T)


@torch.no_grad()
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_a_gelu_is_one_step_with_its_layer_unless_somebody_listens(approximate: Any) -> None:
    layer, x = nn.Linear(8, 6), torch.randn(3, 8) * 3
    expected = nn.functional.gelu(layer(x), approximate=approximate)
    heard: list[Tensor] = []

    def both() -> Tensor:
        return linear.linear_gelu(layer, x, approximate)

    def own_gelus() -> int:
        return gelus(lambda: torch.testing.assert_close(both(), expected, rtol=1e-4, atol=1e-5))

    assert own_gelus() == 1
    linear.read_faster(layer)
    assert own_gelus() == 0
    handle = layer.register_forward_hook(lambda module, args, output: heard.append(output))
    assert own_gelus() == 1
    assert len(heard) == 1
    handle.remove()
    assert own_gelus() == 0
    with torch.enable_grad():
        assert both().requires_grad


@torch.no_grad()
@pytest.mark.parametrize("make", [bloom, falcon, mpt])
def test_each_family_reads_its_gelu_in_one_step(make: Callable[[], Any]) -> None:
    model, x = make(), tokens(2, 9)
    expected = model(x).logits
    fuse(model)
    assert gelus(lambda: model(x)) == 0
    torch.testing.assert_close(model(x).logits, expected, rtol=1e-4, atol=1e-4)
    with torch.enable_grad():
        assert gelus(lambda: model(x)) == 2
    unfuse(model)
    torch.testing.assert_close(model(x).logits, expected)


@torch.no_grad()
def test_a_falcon_may_have_another_activation() -> None:
    config = falcon().config
    config.activation = "relu"
    model = FalconForCausalLM(config).eval()
    x = tokens(2, 9)
    expected = model(x).logits
    torch.testing.assert_close(fuse(model)(x).logits, expected, rtol=1e-4, atol=1e-4)


@needs_bfloat16
@torch.no_grad()
def test_types_that_differ_are_refused_as_pytorch_refuses_them() -> None:
    layer, x = nn.Sequential(nn.Linear(8, 6, dtype=torch.bfloat16)), torch.randn(3, 8)
    for read in (linear.read_faster, prepack):
        read(layer)
        with pytest.raises(RuntimeError, match="must have the same dtype"):
            layer(x)
        with pytest.raises(RuntimeError, match="must have the same dtype"):
            linear.linear_gelu(layer[0], x, "tanh")


@torch.no_grad()
def test_inputs_that_are_not_contiguous() -> None:
    layer = nn.Sequential(nn.Linear(8, 6, bias=False))
    x = torch.randn(2, 8, 5)
    for view in (x.mT, x.mT[:, -1:], x.mT[..., :1, :].expand(2, 3, 8), x.mT[0, 0]):
        expected = layer(view)
        linear.read_faster(layer)
        assert calls(lambda view=view: layer(view)) == 1
        torch.testing.assert_close(layer(view), expected)
        linear.read_as_before(layer)


@pytest.fixture
def rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_is_faster", lambda: False)
    monkeypatch.setattr(linear, "_rows_are_faster", lambda: True)
    monkeypatch.setattr(linear, "_types", lambda: (torch.float32, torch.bfloat16))


def products_by_a_vector(function: Callable[[], object]) -> bool:
    with torch.profiler.profile() as profile:
        function()
    return any(event.name in ("aten::mv", "aten::addmv") for event in profile.events())


@torch.no_grad()
@pytest.mark.usefixtures("rows_alone")
@pytest.mark.parametrize("bias", [True, False])
def test_one_row_in_bfloat16_is_a_product_by_a_vector_and_nothing_else_is(bias: bool) -> None:
    layer = nn.Sequential(nn.Linear(96, 40, bias=bias, dtype=torch.bfloat16))
    linear.read_faster(layer)
    x = torch.randn(3, 5, 96).bfloat16()
    for row in (x[:1, :1], x[0, 0], x[1:2, 2], x.mT.contiguous().mT[:1, 3:4]):
        assert products_by_a_vector(lambda row=row: layer(row))
        expected = copy.deepcopy(layer[0]).double()
        linear.read_as_before(expected)
        torch.testing.assert_close(
            layer(row).double(), expected(row.double()), rtol=2**-8, atol=1e-4
        )
    assert not products_by_a_vector(lambda: layer(x[:1]))
    wide = copy.deepcopy(layer).float()
    assert not products_by_a_vector(lambda: wide(x[:1, :1].float()))
    with torch.enable_grad():
        assert layer(x[:1, :1]).requires_grad
    with torch.autocast("cpu", torch.bfloat16):
        assert not products_by_a_vector(lambda: layer(x[:1, :1]))


@needs_bfloat16
@torch.no_grad()
@pytest.mark.usefixtures("rows_alone")
def test_several_rows_in_bfloat16_have_their_gelu_in_one_step() -> None:
    layer, x = nn.Linear(96, 40, dtype=torch.bfloat16), torch.randn(5, 96).bfloat16()
    expected = nn.functional.gelu(layer(x), approximate="tanh")
    linear.read_faster(layer)

    def both(rows: Tensor) -> Tensor:
        return linear.linear_gelu(layer, rows, "tanh")

    assert calls(lambda: both(x)) == 1
    torch.testing.assert_close(both(x), expected, rtol=2**-6, atol=2**-8)
    assert products_by_a_vector(lambda: both(x[:1]))
    layer.float()
    assert calls(lambda: both(x.float())) == 0


@torch.no_grad()
@pytest.mark.usefixtures("rows_alone")
def test_a_fused_model_reads_rows_so_until_it_is_unfused() -> None:
    model, x = bloom().bfloat16(), tokens(1, 1)
    expected = model(x).logits
    fuse(model)
    assert products_by_a_vector(lambda: model(x))
    torch.testing.assert_close(model(x).logits, expected, rtol=2**-4, atol=2**-4)
    unfuse(model)
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("AMD Zen 4", (True, False, True)),
        ("AMD Zen 5", (True, False, False)),
        ("Intel with AMX", (False, True, False)),
        ("AMD with AVX2", (False, False, False)),  # where oneDNN was slower
        ("Intel with AVX-512", (False, False, False)),  # where nobody measured
    ],
)
def test_each_kind_of_processor_reads_as_was_measured_on_it(
    kind: str, expected: tuple[bool, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(_machine, "kind", lambda: kind)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    asked = (linear._is_faster, linear._rows_are_faster, linear._copies_are_faster)
    assert tuple(function.__wrapped__() for function in asked) == expected
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    assert not linear._is_faster.__wrapped__()


def test_bfloat16_is_read_where_the_processor_is_fast_and_onednn_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()
    for features, may, expected in (
        (["avx512_bf16"], True, True),
        (["avx512_bf16"], False, False),
        ([], True, False),
    ):
        monkeypatch.setattr(_machine, "cpu_features", lambda found=features: found)
        monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda found=may: found)
        assert (torch.bfloat16 in linear._types.__wrapped__()) == expected


def test_only_large_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for is_faster in (True, False):
        monkeypatch.setattr(linear, "_is_faster", lambda found=is_faster: found)
        monkeypatch.setattr(linear, "_rows_are_faster", lambda: False)
        layers = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 511))
        linear.read_faster(layers)
        assert ["forward" in vars(layer) for layer in layers] == [is_faster, False]


def test_making_a_model_keeps_freed_memory_wherever_it_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Any] = []
    empty = torch.empty

    def watched(*args: Any, **options: Any) -> Tensor:
        made.append(empty(*args, **options))
        return made[-1]

    linear.keep_freed_memory.cache_clear()
    with torch.device("meta"):
        assert empty(0).device.type == "meta"
        monkeypatch.setattr(torch, "empty", watched)
        linear.read_faster(nn.Sequential())
    assert [(x.device.type, x.nbytes >> 20) for x in made] == [("cpu", 31)]


def layer_and_inputs() -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(48, 40)), torch.randn(2, 3, 48)


def prepacked(layer: nn.Module) -> bool:
    """Whether a layer still reads the weight that `prepack` made of its own."""
    return vars(layer)["forward"].args[1].weight is not None


@pytest.mark.parametrize("make", [bloom, falcon, mpt])
@every_type
@torch.no_grad()
def test_a_prepacked_model_answers_as_before_until_it_is_unfused(
    make: Callable[[], Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "_is_faster", lambda: False)
    model, x = make().to(dtype), tokens(2, 9)
    expected = fuse(model)(x).logits
    row = model(x[:1, :1]).logits
    layers = sum(isinstance(module, nn.Linear) for module in model.modules())
    names = [name for name, _ in model.named_parameters()]
    assert prepack(model) is model
    assert calls(lambda: model(x)) == layers
    assert gelus(lambda: model(x)) == 0
    error = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 0.1, "atol": 0.1}
    torch.testing.assert_close(model(x).logits, expected, **error)
    torch.testing.assert_close(model(x[:1, :1]).logits, row, **error)
    assert [name for name, _ in model.named_parameters()] == names
    assert all(prepacked(module) for module in model.modules() if isinstance(module, nn.Linear))
    unfuse(model)
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("bias", [True, False])
@every_type
@pytest.mark.parametrize(
    ("shape", "rows"),
    [
        *[((48,), 4), ((1, 48), 4), ((1, 1, 48), 4)],
        *[((2, 48), 4), ((2, 1, 48), 4), ((1, 2, 48), 4)],
        *[((3, 48), 3), ((2, 2, 48), 4), ((9, 48), 9)],
    ],
)
@torch.no_grad()
def test_one_or_two_rows_are_four_for_prepacked_weights(
    shape: tuple[int, ...],
    rows: int,
    dtype: torch.dtype,
    bias: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read, seen = linear.read, []

    def watched(input: Tensor, *args: Any) -> Tensor:
        seen.append(input.numel() // 48)
        return read(input, *args)

    monkeypatch.setattr(linear, "read", watched)
    torch.manual_seed(7)
    layer, x = nn.Linear(48, 40, bias=bias, dtype=dtype), torch.randn(shape, dtype=dtype)
    expected = layer(x)
    prepack(layer)
    error = (
        {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.02}
    )
    for is_faster, count in ((True, rows), (False, x.numel() // 48)):
        monkeypatch.setattr(linear, "_copies_are_faster", lambda found=is_faster: found)
        torch.testing.assert_close(layer(x), expected, **error)
        wide = linear.linear_gelu(layer, x, "tanh")
        torch.testing.assert_close(wide, nn.functional.gelu(expected, approximate="tanh"), **error)
        assert layer(x).is_contiguous()
        assert seen == [count] * 3
        seen.clear()


@torch.no_grad()
def test_encoders_and_models_that_nobody_fused_are_prepacked_too() -> None:
    for model in (make_encoder(), falcon()):
        x = tokens(1, 7)
        expected = model(x)[0]
        linear.read_as_before(model)
        prepack(model)
        assert calls(lambda model=model, x=x: model(x)) > 4
        torch.testing.assert_close(model(x)[0], expected, rtol=1e-4, atol=1e-4)


def make_encoder() -> Any:
    sizes = {"vocab_size": 97, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
    return LinbiasBertModel(LinbiasBertConfig(intermediate_size=64, **sizes)).eval()


def add_with_gradients_off(layer: nn.Linear) -> None:
    layer.weight.add_(1)


def load_other_weights(layer: nn.Linear) -> None:
    layer.load_state_dict({name: x + 1 for name, x in layer.state_dict().items()})


def set_data(layer: nn.Linear) -> None:
    layer.weight.data = layer.weight.data + 1


def transpose_data(layer: nn.Linear) -> None:
    layer.weight.data = layer.weight.data.T


def set_another_weight(layer: nn.Linear) -> None:
    layer.weight = nn.Parameter(layer.weight + 1)


def free_and_set_another(layer: nn.Linear) -> None:
    weight = layer.weight.detach() + 1
    del layer.weight
    layer.weight = nn.Parameter(weight.clone())  # which may lie where the other lay


# What follows PyTorch does not count.
def merge_through_data(layer: nn.Linear) -> None:
    layer.weight.data += 1  # as PEFT merges


def merge_many_through_data(layer: nn.Linear) -> None:
    torch._foreach_add_([layer.weight.data], 1.0)


def write_through_numpy(layer: nn.Linear) -> None:
    layer.weight.detach().numpy()[:] += 1


def step_fused(kind: type[torch.optim.Optimizer], layer: nn.Linear) -> None:
    with torch.enable_grad():
        layer(torch.ones(2, 48)).sum().backward()
    kind([layer.weight], lr=0.1, fused=True).step()  # type: ignore[call-arg]


def write_one_number(layer: nn.Linear) -> None:
    layer.weight.data[-1, 5] += 1


UNCOUNTED = (
    merge_through_data,
    merge_many_through_data,
    write_through_numpy,
    partial(step_fused, torch.optim.AdamW),
    partial(step_fused, torch.optim.SGD),
)


@pytest.mark.parametrize("is_ours", [True, False])
@pytest.mark.parametrize(
    "change",
    [
        *(add_with_gradients_off, load_other_weights, set_data, transpose_data),
        *(set_another_weight, free_and_set_another, *UNCOUNTED, write_one_number),
    ],
)
@torch.no_grad()
def test_a_weight_that_changes_after_prepacking_is_read(
    change: Callable[[Any], None], is_ours: bool
) -> None:
    """Whether its memory is PyTorch's or, as that of a file, another's, in which a part that changes unseen stays unseen."""
    for rows in (3, 1):
        torch.manual_seed(3)
        layer, x = nn.Sequential(nn.Linear(48, 48)), torch.randn(rows, 48)
        if not is_ours:
            if change is write_one_number:
                return
            layer[0].weight.data = torch.from_numpy(layer[0].weight.detach().numpy().copy())
        prepack(layer)
        layer(x)
        assert prepacked(layer[0])
        change(layer[0])
        expected = nn.functional.linear(x, layer[0].weight, layer[0].bias)
        torch.testing.assert_close(layer(x), expected)
        assert not prepacked(layer[0])
        prepack(layer)
        torch.testing.assert_close(layer(x), expected)
        assert prepacked(layer[0])


@torch.no_grad()
def test_a_weight_that_was_only_saved_stays_prepacked() -> None:
    layer, x = layer_and_inputs()
    prepack(layer)
    for _ in range(2):
        torch.save(layer.state_dict(), io.BytesIO())  # which asks for its memory as a writer does
        layer(x)
        assert prepacked(layer[0])
    layer[0].weight.data.zero_()
    torch.testing.assert_close(layer(x), layer[0].bias.expand(2, 3, 40))


@every_type
def test_a_prepacked_layer_is_converted_with_swapped_parameters(dtype: torch.dtype) -> None:
    layer, x = layer_and_inputs()
    prepack(layer)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        layer.to(dtype)
        layer.load_state_dict({name: x + 1 for name, x in layer.state_dict().items()})
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    x = x.to(dtype)
    with torch.no_grad():
        expected = nn.functional.linear(x, layer[0].weight, layer[0].bias)
        torch.testing.assert_close(layer(x), expected, rtol=0.02, atol=0.02)


def test_a_prepacked_layer_learns_and_its_copies_read_their_own_weights() -> None:
    layer, x = layer_and_inputs()
    prepack(layer)
    saved = io.BytesIO()
    torch.save(layer, saved)
    saved.seek(0)
    with torch.no_grad():
        before = layer(x)
    for other in (copy.deepcopy(layer), torch.load(saved, weights_only=False)):
        assert not prepacked(other[0])
        with torch.no_grad():
            torch.testing.assert_close(other(x), before)
            other[0].weight.zero_()
            torch.testing.assert_close(other(x), other[0].bias.expand_as(before))
            torch.testing.assert_close(layer(x), before)
    layer(x).square().sum().backward()
    torch.optim.SGD(layer.parameters(), lr=0.1).step()
    with torch.no_grad():
        torch.testing.assert_close(
            layer(x), nn.functional.linear(x, layer[0].weight, layer[0].bias)
        )


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:.torch.nn.utils.weight_norm. is deprecated:FutureWarning")
def test_what_cannot_be_prepacked_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    half = nn.Sequential(nn.Linear(48, 40), nn.Linear(40, 4, device="meta")).half()
    with torch.inference_mode():
        uncounted = nn.Linear(48, 40)
    made_anew = nn.utils.weight_norm(nn.Linear(48, 40))
    of_two = nn.Linear(48, 40)  # as quantised weights are
    of_two.weight = nn.Parameter(TwoTensor(torch.ones(40, 48), torch.ones(40, 48)))
    for layer in (half, uncounted, made_anew, of_two):
        prepack(layer)
        assert not any("forward" in vars(module) for module in layer.modules())
    monkeypatch.setattr(linear, "_has_onednn", lambda: False)
    layer, _ = layer_and_inputs()
    assert "forward" not in vars(prepack(layer)[0])
    caplog.set_level("INFO", "linbias")
    monkeypatch.setattr(linear, "_has_onednn", lambda: True)
    prepack(nn.Sequential(nn.Linear(48, 40), nn.Linear(40, 40).half(), of_two))
    said = "prepack: packed 1 of 3 large linear layers; not '1': this processor has no fast products of float16; "
    assert caplog.messages == [said + "not '2': the weight is no plain parameter but a TwoTensor"]
    monkeypatch.setattr(linear, "_types", lambda: (torch.float32,))
    prepack(nn.Linear(48, 40).bfloat16())
    assert caplog.messages[1].endswith(
        "0 of 1 large linear layers; not '': this processor has no fast products of bfloat16"
    )
    with pytest.raises(TypeError, match=r"prepack: model must be a torch\.nn\.Module, got str"):
        prepack("bloom")  # type: ignore[arg-type]


def resident_mb(x: torch.Tensor) -> float:
    """How much of an array is in this process's memory, counted page by page: an array may cross several mappings."""
    first = x.data_ptr() // mmap.PAGESIZE
    count = -(-(x.data_ptr() + x.nbytes) // mmap.PAGESIZE) - first
    with Path("/proc/self/pagemap").open("rb", buffering=0) as pages:
        pages.seek(8 * first)
        entries = np.frombuffer(pages.read(8 * count), np.uint64)
    return float((entries >> np.uint64(63)).sum()) * mmap.PAGESIZE / 2**20


def lies_in_memory(folder: Path) -> bool:
    """Whether files of a folder have no disk to which their pages could go."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    kinds = {place: kind for place, kind in [("/", ""), *mounts] if folder.is_relative_to(place)}
    return kinds[max(kinds, key=len)] in ("tmpfs", "ramfs")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="pages are given back on Linux")
@torch.no_grad()
def test_weights_of_a_file_leave_memory_once_they_are_prepacked(tmp_path: Path) -> None:
    if lies_in_memory(tmp_path):
        pytest.skip("the folder of temporary files lies in memory")
    layer = nn.Linear(1024, 4096)
    save_file({"weight": layer.weight.data}, tmp_path / "layer.safetensors")
    os.sync()  # since pages that are not on the disk yet stay
    expected = layer(torch.ones(2, 1024))
    loaded = load_file(tmp_path / "layer.safetensors")["weight"]
    for weight, is_of_a_file in ((loaded, True), (loaded.clone(), False)):
        layer.weight.data = weight
        assert weight.sum().isfinite()
        assert resident_mb(weight) > 15
        prepack(layer)
        assert (resident_mb(weight) < 2) == is_of_a_file
        torch.testing.assert_close(layer(torch.ones(2, 1024)), expected)
        torch.testing.assert_close(weight, layer.weight.data)


IN_LARGE_PAGES = """
import ctypes, mmap
from pathlib import Path
from torch import nn
from linbias.models import prepack

def large_pages_mb():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages:")) >> 10

memory = mmap.mmap(-1, 8 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory.write(bytes(8 << 20))
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(8 << 20), 25)
to_give = large_pages_mb()
# One after the other, as in a model: what is added to the heap for the next one must not end the pages of the last.
model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(24)])  # 4 MB each
before = large_pages_mb()
prepack(model)
print(to_give, large_pages_mb() - before)
"""


@pytest.mark.processes
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="large pages are Linux's")
def test_prepacked_weights_lie_in_large_pages() -> None:
    """In a process of its own, where no memory is used again that lies in them already."""
    if not linear._has_onednn():
        pytest.skip("PyTorch was built without oneDNN")
    found = subprocess.run(
        [sys.executable, "-c", IN_LARGE_PAGES], check=True, capture_output=True, text=True
    )
    to_give, given = map(int, found.stdout.split())
    if to_give < 4:
        pytest.skip("the system has no large pages to give")
    assert given > 60  # of 96
