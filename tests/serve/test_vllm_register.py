"""When vLLM's plugin does something, and what it says where it does not, in a stand-in of vLLM."""

import logging
import multiprocessing
import sys
from types import ModuleType, SimpleNamespace

import pytest

from linbias import vllm as plugin


@pytest.fixture
def engine(monkeypatch):
    """Stands in for vLLM 0.32 on a CPU; `.attention` and `.models` are what was registered."""
    monkeypatch.delenv("LINBIAS_VLLM", raising=False)
    monkeypatch.delenv("LINBIAS_VLLM_GROUPS", raising=False)
    fake = SimpleNamespace(attention={}, models={})

    def module(name, **members):
        made = ModuleType(name)
        vars(made).update(members)
        monkeypatch.setitem(sys.modules, name, made)
        return made

    models = SimpleNamespace(register_model=fake.models.__setitem__)
    fake.vllm = module("vllm", __version__="0.32.0", ModelRegistry=models)
    fake.platform = SimpleNamespace(is_cpu=lambda: True, device_type="cpu")
    module("vllm.platforms", current_platform=fake.platform)
    for name in ("vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backends"):
        module(name)
    fake.registry = module(
        "vllm.v1.attention.backends.registry",
        AttentionBackendEnum=SimpleNamespace(CPU_ATTN="CPU_ATTN"),
        register_backend=fake.attention.__setitem__,
    )
    return fake


def warnings(caplog):
    return [x.getMessage() for x in caplog.records if x.levelno >= logging.WARNING]


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1", "0.32.0+cpu"])
def test_the_version_that_it_was_made_for_gets_attention_and_models(engine, caplog, version):
    engine.vllm.__version__ = version
    plugin.register()
    plugin.register()  # the engine may call it again
    assert engine.attention == {"CPU_ATTN": "linbias.vllm.backend.Backend"}
    assert engine.models.keys() == {"MptForCausalLM", "MPTForCausalLM"}
    assert warnings(caplog) == []


def test_the_environment_switches_it_off(engine, caplog, monkeypatch):
    monkeypatch.setenv("LINBIAS_VLLM", "0")
    plugin.register()
    assert engine.attention == engine.models == {}
    assert warnings(caplog) == []


@pytest.mark.parametrize("version", ["0.31.2", "0.33.0", "0.320.0", "1.32.0", "dev"])
def test_another_version_keeps_its_own_attention_after_one_warning(engine, caplog, version):
    engine.vllm.__version__ = version
    plugin.register()
    assert engine.attention == engine.models == {}
    assert warnings(caplog) == [
        "linbias: vLLM keeps its own attention: this linbias was made for vLLM 0.32, and this is"
        f" {version}"
    ]


def test_another_device_keeps_its_own_attention(engine, caplog):
    engine.platform.is_cpu = lambda: False
    engine.platform.device_type = "cuda"
    plugin.register()
    assert engine.attention == engine.models == {}
    assert warnings(caplog) == [
        "linbias: vLLM keeps its own attention: linbias runs in vLLM on CPUs, and this one is on"
        " cuda"
    ]


def test_an_engine_whose_interface_moved_starts_all_the_same(engine, caplog):
    del engine.registry.register_backend
    plugin.register()
    assert engine.attention == engine.models == {}
    assert len(warnings(caplog)) == 1
    assert "ImportError" in warnings(caplog)[0]


def test_the_processes_that_the_engine_starts_do_not_repeat_the_warning(
    engine, caplog, monkeypatch
):
    engine.vllm.__version__ = "0.33.0"
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: "the engine")
    plugin.register()
    assert engine.attention == {}
    assert warnings(caplog) == []
