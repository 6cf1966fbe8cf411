"""What this machine can run, and why not the rest."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from linbias import _extras, _machine
from linbias._request import Described, Request, check
from linbias.kernels import core

# The parts that are tried, each by the import of a module.
PARTS = {
    "linbias.torch": "linbias.torch",
    "linbias.lm": "linbias.lm.extrapolation",
    "linbias.jax": "linbias.jax",
    "linbias.jax.flax": "linbias.jax.flax",
}


def diagnose(progress: Callable[[str], None] = lambda task: None) -> dict[str, Any]:
    """Collect the facts that `linbias doctor` prints; `progress` is told of each step before it.

    They are `machine`, `versions`, `parts` and `implementations`. In the last two, None stands for
    "works" and a string says why not; an implementation is asked for a plain causal call on every
    device.
    """
    parts = {}
    for part in PARTS:
        progress(f"importing {part}")
        parts[part] = _why_not_importable(part)
    progress("asking every implementation")
    machine: dict[str, Any] = {
        "processor": _machine.processor(),
        "kind": _machine.kind(),
        "cores": _machine.num_cores(),
        "instruction sets": _machine.cpu_features(),
        "core's target": core.target() or "not compiled",
        "devices": ["cpu"],
    }
    devices = machine["devices"]
    implementations = {"numpy cpu": {"cpu": core.why_not(_plain_call("cpu"))}}
    if parts["linbias.torch"] is None:
        import torch

        from linbias.torch.choice import IMPLEMENTATIONS

        devices += ["cuda"] * torch.cuda.is_available()
        machine["threads"] = torch.get_num_threads()
        for implementation in IMPLEMENTATIONS:
            implementations[implementation.NAME] = {
                device: implementation.why_not(_plain_call(device)) for device in devices
            }
    if parts.get("linbias.jax", "not asked") is None:
        implementations |= _of_jax(devices)
    return {
        "machine": machine,
        "versions": _machine.versions(),
        "parts": parts,
        "implementations": implementations,
    }


def broken(facts: dict[str, Any]) -> list[str]:
    """The parts that do not work although all that they need is installed."""
    return [part for part, why in facts["parts"].items() if why and not _extras.missing(part)]


def explain_call(call: str) -> Any:
    """Tell which implementation "auto" takes for a call in PyTorch, and why."""
    from linbias.torch.choice import explain_choice

    return explain_choice(call)


def _of_jax(devices: list[str]) -> dict[str, dict[str, str | None]]:
    import jax

    from linbias.jax.call import IMPLEMENTATIONS

    backend = jax.default_backend()
    seen = {"cpu", "cuda" if backend == "gpu" else backend}
    return {
        f"jax {implementation.NAME}": {
            device: implementation.why_not(_plain_call(device))
            if device in seen
            else "JAX sees no such device"
            for device in devices
        }
        for implementation in IMPLEMENTATIONS
    }


def _plain_call(device: str) -> Any:
    q = Described((1, 8, 1024, 64), "float32", device)
    return check("doctor", Request(q=q, k=q, v=q))


def _why_not_importable(part: str) -> str | None:
    try:
        _extras.require(part)
        import_module(PARTS[part])
    except ImportError as error:
        cause: BaseException = error
        while cause.__cause__ is not None:  # Transformers wraps what really happened
            cause = cause.__cause__
        return str(cause)
    return None
