"""Imports run one way (DESIGN section 4), and NumPy is enough for the core."""

import ast
import importlib
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path
from unittest import mock

import pytest

import linbias

PACKAGE = Path(linbias.__file__).parent

# What the modules of a layer may import of ours: itself and these.
ANYONE = {"schedules", "methods", "_machine", "_extras"}
CORE = {"_request", "_dispatch"}
LAYERS = {
    **{module: set() for module in ANYONE},
    "_request": set(),
    "_arrays": {"_request"} | ANYONE,
    "_dispatch": {"_request"},
    "definition": {"_arrays", "_request"},
    "_matrix": {"definition", "methods", "schedules"},
    "explain": {"_arrays", "definition", "schedules", "_matrix"},
    "near_to_far": {"_arrays", "definition", "_request"},
    "streams": {"definition"},
    "kernels": {"_cpu", "_machine"} | CORE,
    "cpu": {"kernels", "_arrays", "_request"},
    "torch": {"kernels", "near_to_far"} | CORE | ANYONE,
    "compat": {"torch", "definition", "explain"} | CORE | ANYONE,
    "jax": {"kernels", "near_to_far", "_xla"} | CORE | ANYONE,
    "vllm": {"torch", "near_to_far", "streams"} | ANYONE,
    "models": {"data", "_run", "torch", "definition", "near_to_far", "streams", "_request"}
    | ANYONE,
    "_run": ANYONE,
    "data": {"_run"} | ANYONE,
    "paper": {"lm", "models", "data", "_run"} | ANYONE,
    "lm": {"models", "torch", "data", "explore", "_run"} | ANYONE,
    "__init__": {"definition", "explain", "near_to_far"} | ANYONE,
    "example": {"definition", "explain"} | ANYONE,
    "explore": {"example", "_matrix", "definition", "models"} | ANYONE,
    "doctor": {"torch", "jax", "kernels", "models", "_run"} | CORE | ANYONE,
    "cli": {"lm", "paper", "models", "data", "_run", "definition", "_matrix", "explain", "example"}
    | {"explore", "methods", "schedules", "doctor", "__version__"},
    "__main__": {"cli"},
}
IMPLEMENTATIONS = {
    *(f"linbias.torch.impl.{name}" for name in ("dense", "blocked", "cpu", "triton", "sdpa")),
    *(f"linbias.torch.points.{name}" for name in ("dense", "cpu")),
    *(f"linbias.jax.impl.{name}" for name in ("dense", "blocked", "cpu")),
}


def imports(path: Path, for_types: bool = True) -> set[str]:
    found = set()
    nodes = [ast.parse(path.read_text())]
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif for_types or not (
            isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        ):
            nodes += ast.iter_child_nodes(node)
    return {name for name in found if name == "linbias" or name.startswith("linbias.")}


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE))
)
def test_imports_run_one_way(path):
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    layer = parts[0]
    assert layer in LAYERS, f"{layer} is no layer of DESIGN section 4"
    for name in imports(path):
        target = name.split(".")[1] if "." in name else ""
        assert target == layer or target in LAYERS[layer], f"{layer} imports {name}"


def test_no_files_import_each_other_in_a_circle():
    """Not by way of others either, nor inside of functions, but for types."""
    files = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        files[".".join(parts).removesuffix(".__init__")] = path
    # What is imported is a file, or a name in one.
    needed = {
        name: {x if x in files else x.rpartition(".")[0] for x in imports(path, False)} - {name}
        for name, path in files.items()
    }
    TopologicalSorter(needed).prepare()  # which raises a CycleError that names them


def test_implementations_never_import_each_other():
    for module in IMPLEMENTATIONS:
        path = PACKAGE.joinpath(*module.split(".")[1:]).with_suffix(".py")
        for name in imports(path):
            assert not any(name.startswith(other) for other in IMPLEMENTATIONS - {module})


def run(program: str) -> str:
    """What a process of its own prints; a warning is an error."""
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


COLD_START = """
import sys
ABSENT = {"torch", "jax", "triton", "transformers", "datasets", "matplotlib", "typer", "rich"}
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ABSENT:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Refuse())
import linbias, numpy as np
ones = np.ones((2, 3, 4))
assert linbias.attention(ones, ones, ones).shape == (2, 3, 4)
print(linbias.explain(ones, ones, ones).table())
"""


def test_the_core_needs_numpy_only():
    assert "weight" in run(COLD_START)


def test_importing_linbias_loads_numpy_and_nothing_else_of_size():
    before = "import numpy, sys; before = set(sys.modules); import linbias"
    loaded = run(f"{before}; print(*sorted(set(sys.modules) - before))")
    foreign = {name.split(".")[0] for name in loaded.split()} - set(sys.stdlib_module_names)
    assert foreign <= {"linbias", "numpy"}


NAMED = """
import sys, numpy, linbias
assert "linbias.cpu" not in sys.modules
linbias.cpu.attention
assert not {"torch", "jax"} & set(sys.modules)
linbias.torch.attention
assert "torch" in sys.modules
try:
    linbias.tensorflow
except AttributeError as error:
    print(error)
"""


@pytest.mark.processes
def test_submodules_load_when_they_are_named():
    assert run(NAMED) == "module 'linbias' has no attribute 'tensorflow'"


@pytest.mark.processes
@pytest.mark.parametrize(("own", "other"), [("jax", "torch"), ("torch", "jax")])
def test_each_front_end_loads_its_own_framework_only(own, other):
    program = f"import sys, linbias.{own}; print(not {{'flax', {other!r}}} & set(sys.modules))"
    assert run(program) == "True"


def test_public_names():
    """The contract of DESIGN section 5."""
    import linbias.jax
    import linbias.torch

    assert {"slopes", "bias", "attention", "explain"} <= set(linbias.__all__)
    shown = dir(linbias)
    assert {*linbias.__all__, "torch", "jax", "models", "lm", "explore", "cpu"} <= set(shown)
    assert not {"TYPE_CHECKING", "import_module", "transformers"} & set(shown)
    # help() loads all that is shown.
    with mock.patch("linbias._extras._is_installed", "torch".__ne__):
        assert not {"torch", "models", "lm"} & set(dir(linbias))
    names = """attention attention_paged attention_points attention_varlen attention_weights merge
        visited visited_paged write_pages replace_attention MultiheadAttention PointAttention
        Visited"""
    assert set(linbias.torch.__all__) == {*names.split()}
    assert set(linbias.jax.__all__) == {"attention", "attention_weights", "bias", "merge"}
    assert linbias.jax.context_parallel.__all__ == ["attention", "needed_halo"]


@pytest.mark.parametrize("name", ["labml", "fairseq", "flash_attn"])
def test_compat_loads_its_modules_when_they_are_named(name):
    assert getattr(linbias.compat, name) is importlib.import_module(f"linbias.compat.{name}")
    assert name in dir(linbias.compat)


def test_compat_has_no_other_modules():
    with pytest.raises(AttributeError, match=r"^module 'linbias.compat' has no attribute 'apex'$"):
        _ = linbias.compat.apex
