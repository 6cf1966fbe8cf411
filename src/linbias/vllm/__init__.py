"""vLLM's plugin: models with linear biases attend near to far in that engine, on CPUs.

Nothing but an install is needed: the engine calls `register` in each of its processes, by the
entry point `vllm.general_plugins`. LINBIAS_VLLM=0 in the environment switches it off, and
LINBIAS_VLLM_GROUPS=2 lets pages go back that no head can reach any more (`groups.py`).

`backend.py` alone touches the engine's interface of attention; `mpt.py` is a model that the engine
no longer knows.
"""

import logging
import multiprocessing
import os

MADE_FOR = "0.32"

# Below the engine's own name, so that its handlers write what is said.
_logger = logging.getLogger("vllm.linbias")


def register() -> None:
    """Hand layers with linear biases to linbias, and the models to the engine that it lacks.

    An engine that this was not made for keeps its own attention, after one warning. Never raises:
    an engine must start whatever is installed beside it.

    Example:
        >>> import os
        >>> os.environ["LINBIAS_VLLM"] = "0"
        >>> register()  # does nothing
    """
    if os.environ.get("LINBIAS_VLLM", "1") == "0":
        return
    try:
        if (reason := why_not()) is None:
            _register()
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    if reason is not None and multiprocessing.parent_process() is None:
        _logger.warning("linbias: vLLM keeps its own attention: %s", reason)


def why_not() -> str | None:
    """Why the engine's own attention stays, or None."""
    from vllm import __version__
    from vllm.platforms import current_platform

    if __version__.split(".")[:2] != MADE_FOR.split("."):
        return f"this linbias was made for vLLM {MADE_FOR}, and this is {__version__}"
    if not current_platform.is_cpu():
        return f"linbias runs in vLLM on CPUs, and this one is on {current_platform.device_type}"
    return None


def _register() -> None:
    from vllm import ModelRegistry
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    # On CPUs the engine asks for this name, whatever the layer.
    register_backend(AttentionBackendEnum.CPU_ATTN, "linbias.vllm.backend.Backend")
    for name in ("MptForCausalLM", "MPTForCausalLM"):
        ModelRegistry.register_model(name, "linbias.vllm.mpt:MptForCausalLM")
    if os.environ.get("LINBIAS_VLLM_GROUPS", "0") != "0":
        ModelRegistry.register_model("BloomForCausalLM", "linbias.vllm.groups:BloomForCausalLM")
