"""Prepacked linear layers: the answers of PyTorch's own, which run wherever anything looks on."""

import copy
import io
import mmap
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from linbias import _machine
from linbias.models import LinbiasBertConfig, LinbiasBertModel, fuse, prepack, prepacked, unfuse
from small_models import every_type, fast_types, has_bfloat16, needs_bfloat16, needs_onednn
from test_transformers_fused import bloom, falcon, mpt

pytestmark = needs_onednn


@pytest.fixture(autouse=True)
def on_every_processor(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(prepacked, "_types", lambda: fast_types)
    monkeypatch.setattr(prepacked, "_SMALLEST", 1)
    yield


def events(name: str, function: Callable[[], object]) -> int:
    """How often a function runs an operator of PyTorch."""
    with torch.profiler.profile() as profile:
        function()
    return sum(event.name == name for event in profile.events())


calls = partial(events, "mkldnn::_linear_pointwise")
gelus = partial(events, "aten::gelu")  # those that are a step of their own


def tokens(*shape: int) -> Tensor:
    return torch.randint(0, 97, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is:DeprecationWarning")  # forward mode's
def test_pytorchs_own_layer_runs_where_anything_looks_on() -> None:
    layer = nn.Sequential(nn.Linear(8, 6))
    prepack(layer)
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
        narrow = prepack(copy.deepcopy(layer).bfloat16())
        assert calls(lambda: narrow(x.bfloat16())) == has_bfloat16
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
        return prepacked.linear_gelu(layer, x, approximate)

    def own_gelus() -> int:
        return gelus(lambda: torch.testing.assert_close(both(), expected, rtol=1e-4, atol=1e-5))

    assert own_gelus() == 1
    prepack(layer)
    assert own_gelus() == 0
    handle = layer.register_forward_hook(lambda module, args, output: heard.append(output))
    assert own_gelus() == 1
    assert len(heard) == 1
    handle.remove()
    assert own_gelus() == 0
    with torch.enable_grad():
        assert both().requires_grad


@torch.no_grad()
def test_a_falcon_may_have_another_activation() -> None:
    model, x = falcon(activation="relu").eval(), tokens(2, 9)
    expected = model(x).logits
    torch.testing.assert_close(fuse(model)(x).logits, expected, rtol=1e-4, atol=1e-4)


@needs_bfloat16
@torch.no_grad()
def test_types_that_differ_are_refused_as_pytorch_refuses_them() -> None:
    layer, x = nn.Sequential(nn.Linear(8, 6, dtype=torch.bfloat16)), torch.randn(3, 8)
    prepack(layer)
    with pytest.raises(RuntimeError, match="must have the same dtype"):
        layer(x)
    with pytest.raises(RuntimeError, match="must have the same dtype"):
        prepacked.linear_gelu(layer[0], x, "tanh")


@torch.no_grad()
def test_inputs_that_are_not_contiguous() -> None:
    layer = nn.Sequential(nn.Linear(8, 6, bias=False))
    x = torch.randn(2, 8, 5)
    for view in (x.mT, x.mT[:, -1:], x.mT[..., :1, :].expand(2, 3, 8), x.mT[0, 0]):
        expected = layer(view)
        prepack(layer)
        assert calls(lambda view=view: layer(view)) == 1
        torch.testing.assert_close(layer(view), expected)
        prepacked.unpack(layer)


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
        assert (torch.bfloat16 in prepacked._types.__wrapped__()) == expected


def test_only_large_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    layers = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 511))
    prepack(layers)
    assert ["forward" in vars(layer) for layer in layers] == [True, False]


def test_prepacking_keeps_freed_memory_wherever_models_are_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Tensor] = []
    empty = torch.empty
    prepacked.keep_freed_memory.cache_clear()
    with torch.device("meta"):
        assert empty(0).device.type == "meta"
        monkeypatch.setattr(torch, "empty", lambda *x, **how: made.append(empty(*x, **how)))
        prepack(nn.Sequential())
    assert [(x.device.type, x.nbytes >> 20) for x in made] == [("cpu", 31)]


def layer_and_inputs() -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(48, 40)), torch.randn(2, 3, 48)


def is_packed(layer: nn.Module) -> bool:
    """Whether a layer still reads the weight that `prepack` made of its own."""
    return vars(layer)["forward"].args[1].weight is not None


@pytest.mark.parametrize("make", [bloom, falcon, mpt])
@every_type
@torch.no_grad()
def test_a_prepacked_model_answers_as_before_until_it_is_unfused(
    make: Callable[[], Any], dtype: torch.dtype
) -> None:
    model, x = make().eval().to(dtype), tokens(2, 9)
    expected = fuse(model)(x).logits
    row = model(x[:1, :1]).logits
    layers = sum(isinstance(module, nn.Linear) for module in model.modules())
    names = [name for name, _ in model.named_parameters()]
    assert prepack(model) is model
    assert calls(lambda: model(x)) == layers
    assert gelus(lambda: model(x)) == 0
    with torch.enable_grad():
        assert gelus(lambda: model(x)) == 2
    error = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 0.1, "atol": 0.1}
    torch.testing.assert_close(model(x).logits, expected, **error)
    torch.testing.assert_close(model(x[:1, :1]).logits, row, **error)
    assert [name for name, _ in model.named_parameters()] == names
    assert all(is_packed(module) for module in model.modules() if isinstance(module, nn.Linear))
    unfuse(model)
    assert not any("forward" in vars(module) for module in model.modules())


@torch.no_grad()
def test_encoders_and_models_that_nobody_fused_are_prepacked_too() -> None:
    sizes = {"vocab_size": 97, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
    encoder = LinbiasBertModel(LinbiasBertConfig(intermediate_size=64, **sizes))
    for model in (encoder.eval(), falcon(bias=True).eval()):
        x = tokens(1, 7)
        expected = model(x)[0]
        prepack(model)
        assert calls(lambda model=model, x=x: model(x)) > 4
        torch.testing.assert_close(model(x)[0], expected, rtol=1e-4, atol=1e-4)


def free_and_set_another(layer: nn.Linear) -> None:
    weight = layer.weight.detach() + 1
    del layer.weight
    layer.weight = nn.Parameter(weight.clone())  # which may lie where the other lay


def step_fused(layer: nn.Linear, kind: type[torch.optim.Optimizer]) -> None:
    with torch.enable_grad():
        layer(torch.ones(2, 48)).sum().backward()
    kind([layer.weight], lr=0.1, fused=True).step()  # type: ignore[call-arg]


CHANGES = (
    "layer.weight.add_(1)",
    "layer.load_state_dict({name: x + 1 for name, x in layer.state_dict().items()})",
    "layer.weight.data = layer.weight.data + 1",
    "layer.weight.data = layer.weight.data.T",
    "layer.weight = nn.Parameter(layer.weight + 1)",
    "free_and_set_another(layer)",
    # What follows PyTorch does not count.
    "layer.weight.data += 1",  # as PEFT merges
    "torch._foreach_add_([layer.weight.data], 1.0)",
    "layer.weight.detach().numpy()[:] += 1",
    "step_fused(layer, torch.optim.AdamW)",
    "step_fused(layer, torch.optim.SGD)",
)
ONE_NUMBER = "layer.weight.data[-1, 5] += 1"  # in the memory of a file it would stay unseen


@pytest.mark.parametrize(
    ("change", "is_ours"), [*product(CHANGES, (True, False)), (ONE_NUMBER, True)]
)
@torch.no_grad()
def test_a_weight_that_changes_after_prepacking_is_read(change: str, is_ours: bool) -> None:
    """Whether its memory is PyTorch's or another's, as that of a file."""
    for rows in (3, 1):
        torch.manual_seed(3)
        layer, x = nn.Sequential(nn.Linear(48, 48)), torch.randn(rows, 48)
        if not is_ours:
            layer[0].weight.data = torch.from_numpy(layer[0].weight.detach().numpy().copy())
        prepack(layer)
        layer(x)
        assert is_packed(layer[0])
        exec(change, globals() | {"layer": layer[0]})
        expected = nn.functional.linear(x, layer[0].weight, layer[0].bias)
        torch.testing.assert_close(layer(x), expected)
        assert not is_packed(layer[0])
        prepack(layer)
        torch.testing.assert_close(layer(x), expected)
        assert is_packed(layer[0])


@torch.no_grad()
def test_a_weight_that_was_only_saved_stays_prepacked() -> None:
    layer, x = layer_and_inputs()
    prepack(layer)
    for _ in range(2):
        torch.save(layer.state_dict(), io.BytesIO())  # which asks for its memory as a writer does
        layer(x)
        assert is_packed(layer[0])
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
        assert not is_packed(other[0])
        with torch.no_grad():
            torch.testing.assert_close(other(x), before)
            other[0].weight.zero_()
            torch.testing.assert_close(other(x), other[0].bias.expand_as(before))
            torch.testing.assert_close(layer(x), before)
    layer(x).square().sum().backward()
    torch.optim.SGD(layer.parameters(), lr=0.1).step()
    with torch.no_grad():
        expected = nn.functional.linear(x, layer[0].weight, layer[0].bias)
        torch.testing.assert_close(layer(x), expected)


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
    with monkeypatch.context() as patch:
        patch.setattr(torch.ops, "mkldnn", object())
        layer, _ = layer_and_inputs()
        assert "forward" not in vars(prepack(layer)[0])
    caplog.set_level("INFO", "linbias")
    prepack(nn.Sequential(nn.Linear(48, 40), nn.Linear(40, 40).half(), of_two))
    assert caplog.messages == [
        "prepack: packed 1 of 3 large linear layers; not '1': this processor has no fast products "
        "of float16; not '2': the weight is no plain parameter but a TwoTensor"
    ]
    monkeypatch.setattr(prepacked, "_types", lambda: (torch.float32,))
    prepack(nn.Linear(48, 40).bfloat16())
    assert caplog.messages[1].endswith(
        "0 of 1 large linear layers; not '': this processor has no fast products of bfloat16"
    )
    with pytest.raises(TypeError, match=r"prepack: model must be a torch\.nn\.Module, got str"):
        prepack("bloom")  # type: ignore[arg-type]


def resident_mb(x: torch.Tensor) -> float:
    """How much of an array is in this process's memory, page by page: it may cross mappings."""
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
