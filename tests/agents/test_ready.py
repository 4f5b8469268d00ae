"""Docker's rule of healthchecks, by a clock that is passed in; and what several steps' rewards make."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl360.agents.artifacts import Copying, collect, copy
from rl360.agents.outcomes import InfraError
from rl360.agents.ready import make_ready
from rl360.agents.sandbox.base import ExecResult, Sandbox
from rl360.agents.staging import Staged
from rl360.agents.steps import combined, over
from rl360.agents.tasks import Task, load_task
from rl360.agents.verify import Verdict
from rl360.bus.events import Boundary, Cause, Receipt
from tests.agents.harbor import make_task

TASKS = Path(__file__).parent.parent / "fixtures" / "tasks"
RECEIPT = Receipt(file="reward.txt", file_digest="", verifier_digest="", exit_status=0, agent_dead_at=0, written_at=0)


@dataclass
class Checked:
    """A place whose healthcheck takes a second and ends with these, one a time."""

    statuses: list[int]
    now: float = 0.0
    at: list[float] = field(default_factory=list[float])

    def exec(self, command: str, timeout: float, env: object = None) -> ExecResult:
        self.at.append(self.now)
        took = min(1.0, timeout)
        self.now += took
        return ExecResult(self.statuses.pop(0), "", timed_out=took < 1.0)

    def pause(self, seconds: float) -> None:
        self.now += seconds

    def ready(self, task: Task, timeout: float = 1000.0) -> None:
        nothing = Staged(None, Path(), None)
        make_ready(cast(Sandbox, self), task, nothing, timeout, clock=lambda: self.now, pause=self.pause)


def checked(tmp_path: Path, **keys: float) -> Task:
    more = "".join(f"{key} = {value}\n" for key, value in keys.items())
    return make_task(tmp_path / "t", toml=f'[environment.healthcheck]\ncommand = "true"\n{more}')


def test_one_success_is_enough(tmp_path: Path) -> None:
    place = Checked([1, 1, 0])
    place.ready(checked(tmp_path, retries=3, interval_sec=5))
    assert place.at == [0.0, 6.0, 12.0]


def test_so_many_failures_in_a_row_are_a_setup_failure(tmp_path: Path) -> None:
    place = Checked([1] * 9)
    with pytest.raises(InfraError, match="never passed") as caught:
        place.ready(checked(tmp_path, retries=2))
    assert (len(place.at), caught.value.boundary, caught.value.cause) == (2, Boundary.SANDBOX, Cause.START_FAILED)


def test_failures_of_the_start_period_count_for_nothing(tmp_path: Path) -> None:
    place = Checked([1] * 4 + [0])
    place.ready(checked(tmp_path, retries=1, start_period_sec=10, start_interval_sec=1))
    assert place.at == [0.0, 2.0, 4.0, 6.0, 8.0]


def test_s15_it_ends_with_the_setup_clock_whatever_the_retries(tmp_path: Path) -> None:
    place = Checked([1] * 100)
    with pytest.raises(InfraError):
        place.ready(checked(tmp_path, retries=100, interval_sec=2), timeout=10.0)
    assert place.now <= 10.0


# ---------------------------------------------------------------------------------------------------- rewards of steps


def verdict(reward: float) -> Verdict:
    return Verdict(reward, 0.0, 1.0, RECEIPT)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=2), st.booleans())
def test_s12_the_reward_of_steps_comes_from_those_that_were_verified(rewards: list[float], final: bool) -> None:
    task = replace(load_task(TASKS / "steps"), final_reward=final)
    whole = combined(task, [verdict(r) for r in rewards])
    assert whole.reward == (rewards[-1] if final else sum(rewards) / len(rewards))
    assert [s.reward for s in whole.steps] == rewards
    assert min(rewards) <= whole.reward <= max(rewards) + 1e-12


def test_a_step_is_over_below_its_min_reward_and_not_at_it() -> None:
    first, second = load_task(TASKS / "steps").steps
    assert [over(first, r) for r in (0.4, 0.5, 1.0)] == [True, False, False]
    assert not over(second, 0.0)


# ---------------------------------------------------------------------------------------------------- hostile workdirs

NAMES = st.sampled_from(["a", "b", "c"])
ENTRIES = st.lists(
    st.tuples(st.lists(NAMES, min_size=1, max_size=3), st.sampled_from(["file", "out", "up", "loop", "folder"])), max_size=12
)


def lay(root: Path, entries: list[tuple[list[str], str]]) -> None:
    for parts, kind in entries:
        path = root.joinpath(*parts)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.parent.resolve().is_relative_to(root):
                continue  # an agent's hand ends there, and so must this test's
            if kind == "file":
                path.write_text("mine")
            elif kind == "folder":
                path.mkdir(exist_ok=True)
            else:
                path.symlink_to({"out": root.parent / "secret", "up": "../../..", "loop": path.name}[kind])
        except (OSError, RuntimeError):
            continue  # something else lies there already, or a loop


@given(entries=ENTRIES, wanted=st.lists(NAMES, min_size=1, max_size=3))
def test_s17_nothing_outside_of_a_workdir_is_ever_kept(
    tmp_path_factory: Any, entries: list[tuple[list[str], str]], wanted: list[str]
) -> None:
    root = tmp_path_factory.mktemp("hostile")
    (root / "secret").mkdir()
    (root / "secret" / "a").write_text("the host's")
    (root / "app").mkdir()
    lay(root / "app", entries)
    task = make_task(root / "t", toml=f'artifacts = ["/app/{"/".join(wanted)}"]\n')
    collect(root / "app", task, root / "kept")
    for path in (root / "kept").rglob("*"):
        assert not path.is_symlink()
        assert path.name == "manifest.json" or path.is_dir() or path.read_text() == "mine"


def test_a_copy_stops_at_its_bounds(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for number in range(9):
        (source / f"{number}").write_bytes(b"x" * 100)
    few, small = Copying(entries=4), Copying(bytes=250)
    copy(tmp_path, PurePosixPath("source"), tmp_path / "few", PurePosixPath("out"), few)
    copy(tmp_path, PurePosixPath("source"), tmp_path / "small", PurePosixPath("out"), small)
    assert len(list((tmp_path / "few/out").iterdir())) == 3
    assert len(list((tmp_path / "small/out").iterdir())) == 2
    assert sum(bool(e.refused) for e in few.noted) == 1
    assert sum(bool(e.refused) for e in small.noted) == 7
