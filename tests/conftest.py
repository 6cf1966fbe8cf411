"""Set-up shared by all tests: seeds, few threads, poisoned memory, hypothesis, the GPU mark."""

import os
import random
import sys
from pathlib import Path
from types import SimpleNamespace

from linbias._machine import limits, most, processor

# A processor that is to act as one with less: LINBIAS_MAX_CPU_TARGET=avx2 make test.
os.environ.update(limits())

# Without a GPU, Triton's kernels run in its interpreter, which has to be said before triton loads.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

if "PYTEST_XDIST_WORKER" in os.environ:  # one thread for each worker, set before torch loads
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# The tests compile some hundred small JAX programs, which would take most of their time. Without
# optimisation and without the newer emitters of fused loops XLA needs a third of it, and what it
# has compiled it finds again the next time. JAX reads this at its first computation.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + (
    " --xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
)
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(
    Path(__file__).parents[1] / "build/jax" / "-".join(f"{processor()} {most() or ''}".split())
)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import pytest

try:  # what checks the kernels on a GPU does without
    import hypothesis
except ModuleNotFoundError:
    pass
else:
    hypothesis.settings.register_profile(
        "ci", derandomize=True, max_examples=25, deadline=None, database=None
    )
    hypothesis.settings.register_profile("night", max_examples=2000, deadline=None)
    hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what nobody asked for
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "chromium" in getattr(item, "fixturenames", ()):  # a browser is many processes
            item.add_marker(pytest.mark.processes)
    if not any(item.get_closest_marker("gpu") for item in items):
        return
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session", autouse=True)
def files_that_need_not_reach_the_disk():
    """No test crashes the machine, and waiting for the disk takes long where tests train."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture(scope="module", autouse=True)
def programs_of_other_files():
    """Forget what JAX compiled for a file of tests.

    Each program maps memory, a hundred maps for a test that differentiates; Linux allows a process
    65,530, and ends it beyond.
    """
    yield
    if (jax := sys.modules.get("jax")) is not None:
        jax.clear_caches()


@pytest.fixture
def poisoned_memory():
    """Fill every tensor that PyTorch leaves uninitialised with NaN, so that a hole shows."""
    import torch

    # Only what is asked for here: on a GPU PyTorch may do other things in no fixed order.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def forced_target():
    """Have the compiled core run one CPU target, until the test is over."""
    from linbias.kernels import core

    yield core.force_target
    core.force_target(None)


@pytest.fixture
def same_start():
    """The same random numbers for every test of a model, and one thread: the models are small."""
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(1)


@pytest.fixture
def no_gradients(same_start):
    import torch

    with torch.no_grad():
        yield


# A short run of the paper's recipe, which several files look at. What it needs loads torch.


@pytest.fixture(scope="session")
def paper_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from paper_training import write_data

    return write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def paper_run(paper_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was never interrupted."""
    from paper_training import KeepMomentum, train_into

    output = tmp_path_factory.mktemp("unbroken") / "run"
    return train_into(paper_data, output, callbacks=[KeepMomentum(output)])


# A short text, and a run of the language models' training on it, which two files look at.


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"{i} times {i} is {i * i}\n" for i in range(24)))
    return str(path)


@pytest.fixture(scope="session")
def word_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of 6,000 words, alone in its folder."""
    words = random.Random(0).choices(["train", "short", "test", "long", "slope", "bias"], k=6000)
    path = tmp_path_factory.mktemp("corpus") / "words.txt"
    path.write_text(" ".join(words))
    return path


@pytest.fixture(scope="session")
def corpus(text: str):
    from linbias.data.corpus import load_corpus

    return load_corpus(text)


@pytest.fixture(scope="session")
def unbroken(corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from lm_training import SETTINGS, train_into

    return train_into(SETTINGS, corpus, tmp_path_factory.mktemp("unbroken") / "run")


@pytest.fixture
def data_sets(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stands in for `datasets.load_dataset`; `.data` is what it returns, `.calls` what it got."""
    import datasets

    fake = SimpleNamespace(data={}, calls=[])

    def load_dataset(path: str, configuration: str | None, **options: object) -> object:
        fake.calls.append((path, configuration, options))
        return fake.data

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr("linbias.data.data_sets.answers", lambda: True)
    return fake


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch):
    """The addresses that were asked, none of which answers."""
    from huggingface_hub import constants, get_session

    asked: list[str] = []

    def refuse(_: object, url: str, **__: object) -> None:
        asked.append(url)
        raise OSError("no network")

    monkeypatch.setattr(type(get_session()), "head", refuse)
    yield asked
    assert set(asked) == {constants.ENDPOINT}
    assert not constants.HF_HUB_OFFLINE


@pytest.fixture(scope="session")
def golden_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the original."""
    import paper_original

    return paper_original.write(paper_original.golden_record(), tmp_path_factory.mktemp("golden"))


# Pages in a real browser. One is started for each file of tests: Playwright keeps an event loop
# running, which tests with a loop of their own must not meet.


@pytest.fixture(scope="module")
def chromium():
    from browser import why_not

    reason = why_not()
    if reason is not None:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)
    from browser import started

    with started() as browser:
        yield browser


@pytest.fixture
def visit(chromium):
    """Open pages, and fail if one of them asked for anything or wrote to the console."""
    from browser import Visits

    visits = Visits(chromium)
    yield visits
    visits.close()


@pytest.fixture(scope="session")
def explorer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from linbias import explore

    path = tmp_path_factory.mktemp("explore") / "explore.html"
    path.write_text(explore.page(), encoding="utf-8")
    return path


@pytest.fixture
def open_state(visit, explorer_file):
    """Open the explorer's view "How" in a state, given as in its address, and a window."""
    from urllib.parse import urlencode

    from explorer_page import Explorer

    def opened(options: dict[str, object] | None = None, **state: object) -> Explorer:
        address = urlencode({"view": "how", **state})
        return Explorer(visit(explorer_file, address, **(options or {})))

    return opened
