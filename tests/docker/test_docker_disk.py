"""What an agent writes in a container is bounded, wherever it writes, and stays its own affair (S14)."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from rl360.agents.sandbox.docker.bounded import bound, release, same_mounts
from rl360.agents.sandbox.docker.engine import Engine, describe
from rl360.agents.sandbox.leases import sweep
from rl360.agents.tasks import Task, load_task
from tests.agents.conftest import RUN, Sandboxes
from tests.agents.harbor import make_task
from tests.docker.daemon import BASE, Daemon
from tests.docker.test_docker_sandbox import judged, killed_runner, left

pytestmark = pytest.mark.docker

FILL = "for i in 1 2 3 4 5 6; do fallocate -l 20M {0}/fill$i; done 2>&1 | tail -1; du -sm --apparent-size {0}"


@pytest.fixture
def task(tmp_path: Path) -> Task:
    make_task(tmp_path / "task", files={"notes.txt": "hello\n"})
    (tmp_path / "task/environment/Dockerfile").write_text(f"FROM {BASE}\nVOLUME /data\nCOPY notes.txt /app/\n")
    return load_task(tmp_path / "task")


def mounts(daemon: Daemon) -> list[str]:
    return [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines() if f"{daemon.root}/" in line and "/dev/loop" in line]


def test_s14_a_full_disk_is_the_agents_wherever_it_writes_and_the_verifier_judges(daemon: Daemon, sandboxes: Sandboxes, task: Task) -> None:
    sandbox = sandboxes.start(task, storage_mb=64)
    for folder in ("/tmp", "/app", "/data"):
        said = sandbox.exec(FILL.format(folder), 20).output.split("\n")
        assert "No space left on device" in said[0], folder
        assert 60 <= int(said[1].split()[0]) <= 80, folder
    assert (
        "No space left"
        in sandbox.exec("echo x > /root/x; head -c 9000 /dev/zero > /usr/y; dd if=/dev/zero of=/var/z bs=1M count=9", 20).output
    )
    assert judged(sandboxes, sandbox, task) == 0.0


def test_an_agent_with_room_is_judged_by_what_it_wrote(sandboxes: Sandboxes, task: Task) -> None:
    sandbox = sandboxes.start(task, storage_mb=64)
    assert sandbox.exec("ls -A; cat notes.txt; echo 42 > answer.txt", 10).output == "notes.txt\nhello\n"
    assert (sandbox.workdir / "answer.txt").read_text() == "42\n"
    assert judged(sandboxes, sandbox, task) == 1.0


def test_the_number_of_files_is_bounded_too(sandboxes: Sandboxes, task: Task) -> None:
    sandbox = sandboxes.start(task, storage_mb=4)
    said = sandbox.exec("cd /tmp; python3 -c 'for n in range(4000): open(str(n), str(\"w\"))' 2>&1 | tail -1", 20).output
    assert "No space left on device" in said


def test_cases_39_a_dead_runners_file_systems_go_with_its_containers(
    daemon: Daemon, sandboxes: Sandboxes, tmp_path: Path, task: Task
) -> None:
    before = mounts(daemon)
    killed_runner(tmp_path / "other", task)
    assert len(mounts(daemon)) == len(before) + 3  # layer, workdir, and the volume of the image
    sweep(tmp_path / "other")
    assert (mounts(daemon), left(daemon, f"{RUN}-victim")) == (before, [])


def test_what_was_there_stays_there_and_nothing_is_left_behind(tmp_path: Path) -> None:
    if os.geteuid() != 0 or not Path("/dev/loop-control").exists():
        pytest.skip("loop devices take root")
    (tmp_path / "f/sub").mkdir(parents=True)
    (tmp_path / "f/sub/x").write_bytes(b"x" * 5_000_000)
    (tmp_path / "f").chmod(0o1777)
    bound(tmp_path / "f", 8 << 20, 10)
    try:
        assert [p.name for p in tmp_path.rglob("*")] == ["f", "sub", "x"]
        assert (tmp_path / "f").stat().st_mode & 0o7777 == 0o1777
        room = os.statvfs(tmp_path / "f")
        assert 8 << 20 <= room.f_bavail * room.f_frsize <= 16 << 20
    finally:
        release(tmp_path / "f")
    assert str(tmp_path) not in subprocess.run(["losetup", "-a"], capture_output=True, text=True, check=True).stdout


def test_a_machine_that_can_not_says_so_once_and_in_doctor(
    daemon: Daemon, sandboxes: Sandboxes, task: Task, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert describe(Engine(daemon.address)).endswith("cgroup v1") or describe(Engine(daemon.address)).endswith("cgroup v2")
    monkeypatch.setattr("rl360.agents.sandbox.docker.bounded.PATH", "/nowhere")
    assert "mkfs.ext4 is missing: install e2fsprogs" in describe(Engine(daemon.address))
    sandbox = sandboxes.start(task)
    assert judged(sandboxes, sandbox, task) == 0.0
    assert [r.message.partition(" (")[0] for r in caplog.records] == ["what a container writes in all can't be bounded, only each file"]


def test_a_daemon_elsewhere_does_not_see_our_mounts(daemon: Daemon) -> None:
    assert same_mounts(daemon.address)
    assert not same_mounts("tcp://127.0.0.1:2375")
    assert not same_mounts("unix:///nowhere")
