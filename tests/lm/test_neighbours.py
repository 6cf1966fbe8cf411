"""OpenMP's threads sleep while others want the cores: when a team outnumbers these."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from typer.testing import CliRunner

from linbias import doctor
from linbias._run import neighbours
from linbias.cli import app

pytestmark = pytest.mark.skipif(not neighbours._STAT.exists(), reason="there is no /proc/stat")


def watched(
    monkeypatch: pytest.MonkeyPatch, looks: list[tuple[float, float]]
) -> list[threading.Event]:
    """The teams that a watch starts, for the cores used by all and by us at each look."""
    ended, teams = threading.Event(), []

    def outnumber(_):
        teams.append(threading.Event())
        return teams[-1]

    def times() -> Iterator[tuple[float, float, float]]:
        used = own = 0.0
        yield 0.0, used, own
        for second, (more, ours) in enumerate(looks, start=1):
            used, own = used + more, own + ours
            if second == len(looks):
                ended.set()
            yield float(second), used, own

    told = times()
    monkeypatch.setattr(neighbours, "_PERIOD", 0)
    monkeypatch.setattr(neighbours, "_times", lambda: next(told))
    monkeypatch.setattr(neighbours, "_outnumber", outnumber)
    monkeypatch.setattr(neighbours.os, "sched_getaffinity", lambda _: {0, 1})
    neighbours._watch(ended)
    return teams


@pytest.mark.parametrize(
    ("looks", "teams"),
    [
        pytest.param([(2.0, 2.0)] * 9, 0, id="alone"),
        pytest.param([(1.1, 0.1)] * 9, 0, id="a neighbour with a core to itself"),
        pytest.param([(2.0, 1.0)] * 9, 1, id="a neighbour"),
        pytest.param(
            [(2.0, 1.0), *[(1.2, 0.2)] * 8], 1, id="it stays while we wait for something"
        ),
        pytest.param([(2.0, 1.0), *[(2.0, 2.0)] * 3, (2.0, 1.0)], 1, id="a short rest is none"),
        pytest.param([(2.0, 1.0), *[(2.0, 2.0)] * 4, (2.0, 1.0)], 2, id="it went and came again"),
    ],
)
def test_a_team_for_each_time_that_cores_are_shared(monkeypatch, looks, teams):
    events = watched(monkeypatch, looks)
    assert len(events) == teams
    assert all(event.is_set() for event in events), "every team has ended with the watch"


def test_times_count_this_process():
    before, start = neighbours._times(), time.process_time()
    while time.process_time() < start + 0.3:
        pass
    after = neighbours._times()
    clock, used, own = (b - a for a, b in zip(before, after, strict=True))
    assert 0.3 <= own <= clock + 0.05
    assert used >= 0.8 * own


def test_only_work_on_the_own_cores_is_use(monkeypatch, tmp_path):
    """Each counter has a bit: user, nice, system, idle, iowait, irq, softirq, steal, guests."""
    ticks = " ".join(str(2**bit) for bit in range(10))
    stat = tmp_path / "stat"
    stat.write_text(
        f"cpu  {ticks}\ncpu0 {ticks}\ncpu1 {ticks}\ncpu10 {ticks}\nintr 5 6 7 8 9 10 11 12\n"
    )
    monkeypatch.setattr(neighbours, "_STAT", stat)
    monkeypatch.setattr(neighbours.os, "sched_getaffinity", lambda _: {1})
    user, nice, system, irq, softirq = 1, 2, 4, 32, 64
    seconds = (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")
    assert neighbours._times()[1] == seconds


TEAM = """
import os, time
import torch
from linbias._run.neighbours import _outnumber

def count():
    return len(os.listdir("/proc/self/task"))

def wait(rule):
    for _ in range(500):
        if rule(count()):
            return
        time.sleep(0.01)
    raise SystemExit(f"{count()} threads")

(torch.ones(2**21) + 1).sum()
before = count()
alone = _outnumber(4)
wait(lambda found: found == before + 5)
alone.set()
wait(lambda found: found == before)
"""


@pytest.mark.processes
@pytest.mark.skipif(not torch.backends.openmp.is_available(), reason="PyTorch without OpenMP")
def test_the_team_has_more_threads_than_cores_and_ends():
    from linbias.torch import addresses

    if not addresses.TEAM:
        pytest.skip("PyTorch's OpenMP is not libgomp")
    done = subprocess.run(
        [sys.executable, "-c", TEAM], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture
def seen(monkeypatch):
    """The watches that were started, where the user has set nothing."""
    seen: list[object] = []
    monkeypatch.setattr(neighbours, "_watch", seen.append)
    for variable in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(variable, raising=False)
    return seen


@pytest.mark.parametrize("name", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"])
def test_a_setting_of_the_user_wins(monkeypatch, seen, name):
    with neighbours.considerate():
        pass
    assert len(seen) == 1
    monkeypatch.setenv(name, "0")
    with neighbours.considerate():
        assert os.environ[name] == "0"
    assert len(seen) == 1


def test_only_commands_that_compute_are_watched(seen):
    for words in (["--help"], ["train", "--help"], ["slopes", "8"]):
        assert CliRunner().invoke(app, words).exit_code == 0
    assert not seen
    assert CliRunner().invoke(app, ["generate", "absent", "--prompt", ""]).exit_code == 2
    assert len(seen) == 1


def test_the_doctor_tells_how_threads_wait(monkeypatch, seen):
    assert "asleep beside busy processes" in doctor.diagnose()["machine"]["threads wait"]
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    assert doctor.diagnose()["machine"]["threads wait"] == "as set by OMP_WAIT_POLICY=PASSIVE"
