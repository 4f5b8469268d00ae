"""What only containers have: labels and limits as the daemon sees them, images, networks, and a daemon that dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from rl360.agents.network import Network
from rl360.agents.outcomes import InfraError
from rl360.agents.sandbox.base import Sandbox
from rl360.agents.sandbox.faulty import FaultySandbox
from rl360.agents.sandbox.leases import Lease, sweep
from rl360.agents.sandbox.make import SandboxMaker
from rl360.agents.staging import Stage
from rl360.agents.tasks import Task, load_task
from rl360.agents.verify import verify
from rl360.bus.events import Boundary, Cause
from rl360.config import Sandbox as SandboxSection
from tests.agents.conftest import RUN, Sandboxes
from tests.agents.harbor import make_task
from tests.agents.test_leases import VICTIM
from tests.docker.daemon import BASE, Daemon

pytestmark = pytest.mark.docker


@pytest.fixture
def task(tmp_path: Path) -> Task:
    return make_task(tmp_path / "task", toml="[environment]\nenv = { MODE = 'fast' }\n")


def inspected(daemon: Daemon, sandboxes: Sandboxes) -> dict[str, object]:
    names = daemon.call("ps", "-aq", "--filter", f"label=rl360.lease={sandboxes.lease.name}").stdout.split()
    return json.loads(daemon.call("inspect", names[0]).stdout)[0]


def judged(sandboxes: Sandboxes, sandbox: Sandbox, task: Task) -> float:
    return verify(sandbox, task, sandboxes.stage.get(task), started=time.time(), timeout=20).reward


def test_a_container_has_labels_limits_reservations_and_few_rights(daemon: Daemon, sandboxes: Sandboxes, task: Task) -> None:
    sandbox = sandboxes.start(task, memory_mb=128, pids=32, cpus=0.5)
    seen = inspected(daemon, sandboxes)
    host, config = seen["HostConfig"], seen["Config"]
    assert isinstance(host, dict) and isinstance(config, dict)
    assert {k: v for k, v in config["Labels"].items() if k.startswith("rl360.") and k != "rl360.image"} == {
        "rl360.run": RUN,
        "rl360.attempt": sandbox.id,
        "rl360.sandbox": sandbox.id,
        "rl360.lease": sandboxes.lease.name,
    }
    assert (host["Memory"], host["MemorySwap"], host["MemoryReservation"]) == (128 << 20, 128 << 20, 64 << 20)
    assert (host["NanoCpus"], host["CpuShares"], host["PidsLimit"]) == (500_000_000, 512, 32)
    assert (host["NetworkMode"], host["CapDrop"], host["SecurityOpt"]) == ("none", ["ALL"], ["no-new-privileges"])
    status = sandbox.exec("grep -E 'NoNewPrivs|CapBnd' /proc/self/status", 5).output.split()
    assert status == ["CapBnd:", "00000000000000fb", "NoNewPrivs:", "1"]


def test_commands_see_the_image_and_a_clean_environment(sandboxes: Sandboxes, task: Task) -> None:
    sandbox = sandboxes.start(task)
    assert sandbox.exec("pwd; cat notes.txt; echo $MODE $X; exit 3", 5, {"X": "y"}).output == "/app\nhello\nfast y\n"
    names = {line.partition("=")[0] for line in sandbox.exec("env", 5).output.splitlines()}
    assert names == {"PATH", "HOME", "LANG", "MODE", "PWD", "SHLVL", "HOSTNAME", "_"}
    assert sandbox.exec("nosuch", 5).output == "bash: line 1: nosuch: command not found\n"
    assert sandbox.exec("grep -c : /proc/net/dev", 5).output == "1\n"


def test_the_memory_limit_kills_and_is_counted(sandboxes: Sandboxes, task: Task) -> None:
    sandbox = sandboxes.start(task, memory_mb=64)
    assert sandbox.exec("x=$(head -c 200000000 /dev/zero | tr '\\0' x); echo $?", 20).status == 137
    assert sandbox.oom_kills() >= 1
    assert sandbox.exec("echo alive", 5).output == "alive\n"
    sandbox.kill_all()
    assert sandbox.oom_kills() >= 1


def test_an_out_of_memory_verifier_says_so(sandboxes: Sandboxes, tmp_path: Path) -> None:
    hog = make_task(tmp_path / "t", test="x=$(head -c 900000000 /dev/zero | tr '\\0' x)\n", toml="[environment]\nmemory_mb = 64\n")
    with pytest.raises(InfraError) as caught:
        judged(sandboxes, sandboxes.start(hog), hog)
    assert (caught.value.boundary, caught.value.cause) == (Boundary.VERIFIER, Cause.OUT_OF_MEMORY)


def test_s17_a_verifier_runs_in_the_image_whatever_became_of_the_agents_container(sandboxes: Sandboxes, task: Task) -> None:
    sandbox = sandboxes.start(task)
    sandbox.exec("mkdir -p /tests; printf '#!/bin/sh\\necho 1 > /logs/verifier/reward.txt\\n' | tee /bin/cat /bin/test /tests/test.sh", 5)
    sandbox.exec("mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; rm -f /bin/bash", 5)
    assert judged(sandboxes, sandbox, task) == 0.0


def test_s17_a_reward_baked_into_the_image_is_not_seen(sandboxes: Sandboxes, tmp_path: Path) -> None:
    make_task(tmp_path / "t", test="true\n")
    (tmp_path / "t/environment/Dockerfile").write_text(f"FROM {BASE}\nCOPY notes.txt /logs/verifier/reward.txt\n")
    baked = load_task(tmp_path / "t")
    with pytest.raises(InfraError) as caught:
        judged(sandboxes, sandboxes.start(baked), baked)
    assert caught.value.cause is Cause.NO_REWARD


def test_s13_a_sandbox_that_is_killed_from_outside_is_lost(sandboxes: Sandboxes, task: Task) -> None:
    struck: list[str] = []
    sandbox = FaultySandbox(sandboxes.start(task), "sandbox_kill", lambda: struck.append("now"))
    with pytest.raises(InfraError) as caught:
        sandbox.exec("echo hi", 5)
    assert (struck, caught.value.boundary, caught.value.cause) == (["now"], Boundary.SANDBOX, Cause.LOST)


def test_s13_a_container_that_ends_under_a_command_is_lost_and_no_exit_status(daemon: Daemon, sandboxes: Sandboxes, task: Task) -> None:
    sandbox = sandboxes.start(task)
    killer = threading.Thread(
        target=lambda: (wait_for(sandbox.workdir / "begun"), daemon.call("kill", str(inspected(daemon, sandboxes)["Id"])))
    )
    killer.start()
    with pytest.raises(InfraError, match="status 137") as caught:
        sandbox.exec("touch begun; sleep 60", 20)
    killer.join()
    assert (caught.value.boundary, caught.value.cause) == (Boundary.SANDBOX, Cause.LOST)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 10
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.01)


# ---------------------------------------------------------------------------------------------------- images


def test_an_image_by_digest_is_used_as_it_is(daemon: Daemon, sandboxes: Sandboxes, tmp_path: Path) -> None:
    digest = daemon.call("images", "-q", "--no-trunc", BASE).stdout.split()[0]
    pinned = make_task(tmp_path / "t", toml=f"[environment]\ndocker_image = '{digest}'\n")
    sandbox = sandboxes.start(pinned)
    assert inspected(daemon, sandboxes)["Image"] == digest
    assert sandbox.exec("ls", 5).output == ""  # its environment folder is for those who build


def test_a_task_without_an_image_of_its_own_gets_the_recipes_with_its_files(sandboxes: Sandboxes, tmp_path: Path) -> None:
    make_task(tmp_path / "t")
    (tmp_path / "t/environment/Dockerfile").unlink()
    bare = load_task(tmp_path / "t")
    assert sandboxes.start(bare, image=BASE).exec("ls; cat notes.txt", 5).output == "notes.txt\nhello\n"
    with pytest.raises(InfraError, match=r"sandbox\.image") as caught:
        sandboxes.make(bare)
    assert caught.value.cause is Cause.BAD_TASK


def test_an_image_is_built_once_from_its_content_and_its_log_kept(sandboxes: Sandboxes, tmp_path: Path) -> None:
    task = make_task(tmp_path / "t", files={"new": str(tmp_path)})
    for _ in range(2):
        sandboxes.start(task)
    (log,) = (sandboxes.root.parent / "images").iterdir()
    assert log.read_text().count("Successfully built") == 1
    assert log.read_text().startswith("Step 1/")


@pytest.mark.parametrize(
    ("step", "seconds", "cause", "says"),
    [("RUN echo oh no; exit 7", 60, Cause.START_FAILED, "oh no"), ("RUN sleep 30", 1, Cause.TIMEOUT, "1 s")],
)
def test_s13_a_build_that_fails_or_is_slow_is_typed(
    sandboxes: Sandboxes, tmp_path: Path, step: str, seconds: int, cause: Cause, says: str
) -> None:
    make_task(tmp_path / "t", toml=f"[environment]\nbuild_timeout_sec = {seconds}\n")
    (tmp_path / "t/environment/Dockerfile").write_text(f"FROM {BASE}\n{step}\n")
    with pytest.raises(InfraError, match=says) as caught:
        sandboxes.start(load_task(tmp_path / "t"))
    assert (caught.value.boundary, caught.value.cause) == (Boundary.SANDBOX, cause)


def test_s13_an_image_that_no_registry_has_is_a_typed_failure(sandboxes: Sandboxes, tmp_path: Path) -> None:
    absent = make_task(tmp_path / "t", toml="[environment]\ndocker_image = 'localhost:1/absent:1'\n")
    with pytest.raises(InfraError, match="absent") as caught:
        sandboxes.start(absent)
    assert caught.value.cause in (Cause.START_FAILED, Cause.LOST)


# ---------------------------------------------------------------------------------------------------- network


def test_a_public_network_is_given_by_the_tasks_word_alone(sandboxes: Sandboxes, tmp_path: Path) -> None:
    public = make_task(tmp_path / "p", toml="[environment]\nnetwork_mode = 'public'\n")
    assert sandboxes.start(public).exec("grep -c : /proc/net/dev", 5).output == "2\n"
    other = sandboxes.make(replace(public, network=Network("sometimes")))
    with pytest.raises(InfraError, match="sometimes") as caught:
        other.start()
    assert caught.value.cause is Cause.BAD_TASK


# ---------------------------------------------------------------------------------------------------- runners and daemons that die


def killed_runner(root: Path, task: Task) -> None:
    argv = [sys.executable, "-c", VICTIM, str(root), str(task.dir), RUN, "docker"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]) as runner:
        assert runner.stdout is not None
        assert runner.stdout.readline() == b"up\n"
        runner.send_signal(signal.SIGKILL)


def left(daemon: Daemon, lease: str) -> list[str]:
    return [
        line
        for kind in (("ps", "-aq"), ("volume", "ls", "-q"))
        for line in daemon.call(*kind, "--filter", f"label=rl360.lease={lease}").stdout.split()
    ]


def test_cases_39_a_container_ends_with_its_runner_and_a_sweep_removes_it(
    daemon: Daemon, sandboxes: Sandboxes, tmp_path: Path, task: Task
) -> None:
    """A live runner's sandboxes on the same daemon are left alone."""
    alive = sandboxes.start(task)
    root = tmp_path / "other"
    killed_runner(root, task)
    assert left(daemon, f"{RUN}-victim") != []
    deadline = time.monotonic() + 10
    while daemon.call("ps", "-q", "--filter", f"label=rl360.lease={RUN}-victim").stdout:  # before any sweep: its input ended
        assert time.monotonic() < deadline
    assert sweep(root) == ("s0",)
    assert left(daemon, f"{RUN}-victim") == []
    assert list(root.iterdir()) == []
    assert sweep(sandboxes.root) == ()
    assert alive.exec("echo alive", 5).output == "alive\n"


def test_cases_40_a_container_that_was_made_and_never_started_is_swept_by_its_lease(daemon: Daemon, tmp_path: Path) -> None:
    lease = Lease(tmp_path / "sandboxes", "half")
    lease.open("s0", None, engine=daemon.address)
    daemon.call("create", "--label", "rl360.lease=half", "--label", "rl360.sandbox=s0", BASE)
    daemon.call("volume", "create", "--label", "rl360.lease=half", "half-app")
    os.close(lease._fd)
    assert sweep(tmp_path / "sandboxes") == ("s0",)
    assert left(daemon, "half") == []


def test_a_daemon_that_dies_in_the_middle_is_an_infra_outcome_and_nothing_is_orphaned(daemon: Daemon, tmp_path: Path, task: Task) -> None:
    root = tmp_path / "sandboxes"
    lease = Lease(root, f"outage-{time.time_ns()}")
    stage, maker = Stage(lease.folder / "tasks"), SandboxMaker(SandboxSection(kind="docker"), lease, "pytest")
    sandbox = maker.make("s0", 0, task, stage.get(task), 20.0)
    sandbox.start()
    failed: list[InfraError] = []

    def work() -> None:
        try:
            sandbox.exec("touch begun; sleep 60", 30)
        except InfraError as e:
            failed.append(e)

    thread = threading.Thread(target=work)
    thread.start()
    wait_for(sandbox.workdir / "begun")
    daemon.kill()
    try:
        thread.join(20)
        assert [(e.boundary, e.cause) for e in failed] == [(Boundary.SANDBOX, Cause.LOST)]
        for step in (sandbox.abort, sandbox.close):
            with pytest.raises(InfraError):
                step()
        maker.close()
        lease.release()
        with pytest.raises(OSError, match="containers of"):
            sweep(root)  # the daemon is still gone: nothing is forgotten
    finally:
        daemon.start()
    assert left(daemon, lease.name) != []
    assert sweep(root) == ("s0",)
    assert left(daemon, lease.name) == []
    assert list(root.iterdir()) == []
