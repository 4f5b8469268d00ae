"""CASES 39, 40: nothing of a dead runner stays, wherever it died; runners at work are left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from rl360.agents.sandbox.base import LABEL
from rl360.agents.sandbox.cgroups import Hierarchy
from rl360.agents.sandbox.leases import Intent, Lease, labelled, sweep
from rl360.agents.tasks import Task
from tests.agents.conftest import RUN, Sandboxes
from tests.agents.harbor import make_task

VICTIM = """
import sys
from pathlib import Path
from rl360.agents.sandbox.leases import Lease
from rl360.agents.sandbox.make import SandboxMaker
from rl360.agents.staging import Stage
from rl360.agents.tasks import load_task
from rl360.config import Sandbox

root, task, run, kind = Path(sys.argv[1]), load_task(Path(sys.argv[2])), sys.argv[3], sys.argv[4]
lease = Lease(root, f"{run}-victim")
sandbox = SandboxMaker(Sandbox(kind=kind), lease, run).make("s0", 0, task, Stage(lease.folder / "tasks").get(task), 10.0)
sandbox.start()
sandbox.exec("(setsid sleep 300 >/dev/null 2>&1 &)", 10)
print("up", flush=True)
sandbox.exec("sleep 300", 300)
"""
"""A runner with a daemon and a command under way in a sandbox."""


STARTER = """
import itertools, sys, threading
from pathlib import Path
from rl360.agents.sandbox.leases import Lease
from rl360.agents.sandbox.make import SandboxMaker
from rl360.agents.staging import Stage
from rl360.agents.tasks import load_task
from rl360.config import Sandbox

root, task, run = Path(sys.argv[1]), load_task(Path(sys.argv[2])), sys.argv[3]
lease = Lease(root, f"{run}-starter")
maker, staged, numbers = SandboxMaker(Sandbox(), lease, run), Stage(lease.folder / "tasks").get(task), itertools.count()

def start():
    for number in numbers:
        maker.make(f"s{number}", number, task, staged, 10.0).start()
        print(number, flush=True)

threads = [threading.Thread(target=start) for _ in range(6)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""
"""A runner that starts sandboxes all the time."""


def until(condition: object, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.005)


@pytest.fixture
def task(tmp_path: Path) -> Task:
    return make_task(tmp_path / "task")


def killed_runner(root: Path, task: Task, kind: str) -> None:
    argv = [sys.executable, "-c", VICTIM, str(root), str(task.dir), RUN, kind]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]) as runner:
        assert runner.stdout is not None
        assert runner.stdout.readline() == b"up\n"
        runner.send_signal(signal.SIGKILL)


def cgroups(name: str) -> list[Path]:
    hierarchy = Hierarchy.find()
    return [f for f in (hierarchy.existing(RUN, name).folders if hierarchy else ()) if f.exists()]


def test_cases_39_a_sandbox_ends_with_its_runner_and_a_sweep_removes_the_rest(tmp_path: Path, task: Task) -> None:
    root = tmp_path / "sandboxes"
    killed_runner(root, task, "bwrap")
    until(lambda: labelled(f"{LABEL}={RUN}-victim/".encode()) == [])  # before any sweep: its first process lost its runner
    assert sweep(root) == ("s0",)
    assert list(root.iterdir()) == []
    assert cgroups(f"{RUN}-victim.s0") == []


def test_cases_40_a_runner_killed_in_the_middle_of_starts_leaves_no_process(tmp_path: Path, task: Task) -> None:
    root = tmp_path / "sandboxes"
    argv = [sys.executable, "-c", STARTER, str(root), str(task.dir), RUN]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]) as runner:
        assert runner.stdout is not None
        for _ in range(10):
            assert runner.stdout.readline()
        runner.send_signal(signal.SIGKILL)
    until(lambda: labelled(f"{LABEL}={RUN}-starter/".encode()) == [])  # without a sweep: none waits for a runner that is gone
    assert len(sweep(root)) >= 10
    assert list(root.iterdir()) == []


def test_cases_39_a_sweep_kills_what_outlives_its_runner(tmp_path: Path, task: Task) -> None:
    root = tmp_path / "sandboxes"
    killed_runner(root, task, "subprocess")
    until(lambda: labelled(f"{LABEL}={RUN}-victim/".encode()) != [])  # in the moment of an exec a process shows no environment
    assert sweep(root) == ("s0",)
    until(lambda: labelled(f"{LABEL}={RUN}-victim/".encode()) == [])
    assert list(root.iterdir()) == []


def test_cases_40_a_runner_that_died_between_intent_and_start_leaves_nothing(tmp_path: Path) -> None:
    root = tmp_path / "sandboxes"
    hierarchy = Hierarchy.find()
    lease = Lease(root, f"{RUN}-dead")
    group = hierarchy.existing(RUN, f"{RUN}-dead.s0") if hierarchy else None
    folder = lease.open("s0", group)
    intent = msgspec.json.decode((folder / "intent.json").read_bytes(), type=Intent)
    assert (intent.sandbox, intent.lease, intent.root) == ("s0", f"{RUN}-dead", str(folder))
    for part in group.folders if group else ():
        part.mkdir(parents=True)
    (lease.folder / "s1").mkdir()  # it died even before it had written the intent
    os.close(lease._fd)
    assert sweep(root) == ("s0",)
    assert list(root.iterdir()) == []
    assert cgroups(f"{RUN}-dead.s0") == []
    if hierarchy:
        hierarchy.remove_run(RUN)


def test_a_sweep_leaves_runners_at_work_alone(sandboxes: Sandboxes, task: Task) -> None:
    sandbox = sandboxes.start(task)
    assert sweep(sandboxes.root) == ()
    assert sandbox.exec("echo alive", 5).output == "alive\n"


def test_a_lease_is_seen_only_when_it_is_locked_and_never_taken_twice(tmp_path: Path) -> None:
    lease = Lease(tmp_path, "one")
    assert sweep(tmp_path) == ()
    with pytest.raises(FileExistsError):
        Lease(tmp_path, "one")
    lease.release()
    lease.release()
    assert list(tmp_path.iterdir()) == []
