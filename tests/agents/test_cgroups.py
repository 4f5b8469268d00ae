"""Limits are written in the words of cgroup v1 and v2; v2 is checked against a folder that looks like it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl360.agents.sandbox import cgroups
from rl360.agents.sandbox.base import Limits
from rl360.agents.sandbox.cgroups import CONTROLLERS, Cgroup, Hierarchy, describe
from tests.agents.conftest import RUN

LIMITS = Limits(memory_mb=64, storage_mb=32, pids=16, cpus=0.5)


@pytest.mark.skipif(Hierarchy.find() is None, reason="cgroups are not writable here")
def test_a_cgroup_of_this_machine_is_made_limited_and_removed() -> None:
    hierarchy = Hierarchy.find()
    assert hierarchy is not None
    group = hierarchy.create(f"{RUN}-limits", "x", LIMITS)
    try:
        assert group.pids() == set()
        assert group.oom_kills() == 0
        written = {
            f.name: f.read_text().strip() for folder in group.folders for f in folder.iterdir() if f.name in ("pids.max", "memory.max")
        }
        assert written["pids.max"] == "16"
    finally:
        group.remove(deadline=0.0)
        hierarchy.remove_run(f"{RUN}-limits")
    assert not any(folder.exists() for folder in group.folders)
    assert "cgroup v" in describe()


def test_v2_delegates_and_limits(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpu memory pids")
    folder = tmp_path / "rl360" / "run" / "s0"
    group = Hierarchy((tmp_path / "rl360",), 2).create("run", "s0", LIMITS)
    assert group == Cgroup((folder,), 2)
    assert (folder / "memory.max").read_text() == str((64 + 32) << 20)
    assert (folder / "pids.max").read_text() == "16"
    assert (folder / "cpu.max").read_text() == "50000 100000"
    for above in (tmp_path / "rl360", tmp_path / "rl360" / "run"):
        assert (above / "cgroup.subtree_control").read_text() == " ".join(f"+{c}" for c in CONTROLLERS)
    (folder / "memory.events").write_text("low 0\noom 3\noom_kill 2\n")
    (folder / "cgroup.procs").write_text("12\n13\n")
    assert (group.oom_kills(), group.pids()) == (2, {12, 13})


def test_no_writable_cgroup_is_said_and_not_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroups, "ROOT", tmp_path)
    assert Hierarchy.find(tmp_path) is None
    assert "ulimit" in cgroups.WEAK_LIMITS
