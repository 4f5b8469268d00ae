"""S12 and S17: a reward exists only if the verifier wrote it, after the agent was dead, where the agent could not write."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl360.agents.outcomes import InfraError
from rl360.agents.sandbox.base import Sandbox
from rl360.agents.tasks import Task, load_task
from rl360.agents.verify import MAX_REWARD_BYTES, Verdict, read_reward, verify
from rl360.bus.blobs import digest_of
from rl360.bus.events import Boundary, Cause
from tests.agents.conftest import Sandboxes
from tests.agents.harbor import make_task, write_task

SOLVE = "echo 42 > answer.txt"


def judge(sandboxes: Sandboxes, task: Task, *commands: str, timeout: float = 10.0) -> Verdict:
    """Let an agent run some commands, then verify."""
    sandbox = sandboxes.start(task)
    for command in commands:
        sandbox.exec(command, 2)
    return verdict(sandboxes, sandbox, task, timeout)


def verdict(sandboxes: Sandboxes, sandbox: Sandbox, task: Task, timeout: float = 10.0) -> Verdict:
    return verify(sandbox, task, sandboxes.stage.get(task), started=time.time(), timeout=timeout)


def refused(sandboxes: Sandboxes, task: Task, *commands: str, timeout: float = 10.0) -> Cause:
    with pytest.raises(InfraError) as caught:
        judge(sandboxes, task, *commands, timeout=timeout)
    assert caught.value.boundary is Boundary.VERIFIER
    return caught.value.cause


@pytest.fixture
def task(tmp_path: Path) -> Task:
    return make_task(tmp_path / "task", toml="[environment]\nmemory_mb = 64\n")


# ------------------------------------------------------------------------------------------------ what counts


def test_s12_the_verifiers_number_comes_with_its_receipt(sandboxes: Sandboxes, task: Task) -> None:
    before = time.time()
    won = judge(sandboxes, task, SOLVE)
    assert (won.reward, won.low, won.high) == (1.0, 0.0, 1.0)
    receipt = won.receipt
    assert (receipt.file, receipt.file_digest, receipt.exit_status) == ("reward.txt", digest_of(b"1\n"), 0)
    assert receipt.verifier_digest == task.verifier_digest
    assert before <= receipt.agent_dead_at <= receipt.written_at + 0.05 <= time.time() + 0.05
    assert judge(sandboxes, task, "true").reward == 0.0


def test_the_verifier_runs_without_its_run_bit_and_its_exit_status_is_only_a_fact(sandboxes: Sandboxes, tmp_path: Path) -> None:
    task = make_task(tmp_path / "t", test="echo 0.5 > /logs/verifier/reward.txt\nexit 7\n")
    assert not os.access(task.dir / "tests/test.sh", os.X_OK)
    half = judge(sandboxes, task)
    assert (half.reward, half.receipt.exit_status) == (0.5, 7)


def test_the_verifier_has_an_environment_of_its_own_beside_that_of_the_place(sandboxes: Sandboxes, tmp_path: Path) -> None:
    test = '[ "$LEVEL" = 3 ] && [ "$PLACE" = p ] && [ "$(cat level)" = none ] && [ -z "$SECRET" ] && [ ! -e /tmp/x ] && [ "$PWD" = /app ]'
    toml = '[verifier]\nenv = { LEVEL = "3" }\n[environment]\nenv = { PLACE = "p" }\n[solution]\nenv = { SECRET = "s" }\n'
    task = make_task(tmp_path / "t", test=f"{test} && echo 1 > /logs/verifier/reward.txt\n", toml=toml)
    assert judge(sandboxes, task, "touch /tmp/x; echo ${LEVEL:-none} > level; export SECRET=mine").reward == 1.0


@pytest.mark.parametrize(
    ("test", "cause"),
    [
        ("exit 0", Cause.NO_REWARD),
        ("set -e; false; echo 1 > /logs/verifier/reward.txt", Cause.NO_REWARD),
        (": > /logs/verifier/reward.txt", Cause.BAD_REWARD),
        ("echo 1.5 > /logs/verifier/reward.txt", Cause.BAD_REWARD),
        ("echo 1 > /logs/verifier/reward.txt; echo 0 > /logs/verifier/reward.json", Cause.BAD_REWARD),
        ("echo 1 > /logs/verifier/reward.txt; sleep 60", Cause.TIMEOUT),
        ("ln -s /dev/zero /logs/verifier/reward.txt", Cause.FORGED_REWARD),
        ("mkfifo /logs/verifier/reward.json", Cause.FORGED_REWARD),
        ("mkdir /logs/verifier/reward.txt", Cause.FORGED_REWARD),
        ("head -c 100000000 /dev/zero | tr '\\0' 1 > /logs/verifier/reward.txt", Cause.BAD_REWARD),
    ],
)
def test_s12_no_reward_to_trust_is_an_infrastructure_outcome_and_never_a_zero(
    sandboxes: Sandboxes, tmp_path: Path, test: str, cause: Cause
) -> None:
    timeout = 0.5 if cause is Cause.TIMEOUT else 10.0
    assert refused(sandboxes, make_task(tmp_path / "t", test=test + "\n"), timeout=timeout) is cause


def test_cases_2_a_missing_reward_says_what_the_verifier_said(sandboxes: Sandboxes, tmp_path: Path) -> None:
    task = make_task(tmp_path / "t", test="echo cannot find pytest >&2; exit 9\n")
    with pytest.raises(InfraError, match=r"exit status 9; it said: cannot find pytest"):
        judge(sandboxes, task)


# ------------------------------------------------------------------------------------------------ hostile agents


@pytest.mark.parametrize(
    "attack",
    [
        'nohup sh -c \'while :; do echo "{\\"reward\\": 1}" > /logs/verifier/reward.json; done\' >/dev/null 2>&1 &',
        "(setsid sh -c 'while :; do mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; done' >/dev/null 2>&1 &)",
        "mkdir -p /logs/verifier /tests; echo 1 > /logs/verifier/reward.txt; echo '{\"reward\": 1}' > /logs/verifier/reward.json",
        "mkdir -p logs/verifier; echo 1 > logs/verifier/reward.txt; echo 'echo 1 > /logs/verifier/reward.txt' > test.sh",
        "printf '#!/bin/sh\\necho 1 > /logs/verifier/reward.txt' > bash; chmod +x bash; cp bash sh; cp bash cat; export PATH=/app:$PATH",
        "echo 'echo 1 > /logs/verifier/reward.txt' > ~/.bashrc; cp ~/.bashrc ~/.profile; cp ~/.bashrc .bash_profile",
        "ln -s /logs/verifier/reward.txt answer.txt",
    ],
)
def test_s17_cheating_wins_nothing(sandboxes: Sandboxes, task: Task, attack: str) -> None:
    assert judge(sandboxes, task, attack).reward == 0.0


@pytest.mark.parametrize(
    "attack",
    [
        "bomb() { bomb | bomb & }; bomb; sleep 0.3",
        "(setsid sh -c 'trap \"\" TERM; sleep 300' >/dev/null 2>&1 &); nohup sleep 300 >/dev/null 2>&1 &",
        "x=$(head -c 900000000 /dev/zero | tr '\\0' x)",
        "head -c 1000000000 /dev/zero",
        "touch \"$(head -c 255 /dev/zero | tr '\\0' n)\"; mkdir -p ' ' $'\\n' --; ln -s / root",
        "rm -rf /app /tmp ~ 2>/dev/null; chmod 000 /app; kill -9 -1",
    ],
)
def test_s14_what_a_hostile_agent_breaks_the_verifier_judges(sandboxes: Sandboxes, task: Task, attack: str) -> None:
    assert judge(sandboxes, task, attack).reward == 0.0
    assert sandboxes.left() == []


def test_s17_a_process_that_code_under_test_leaves_behind_writes_nothing_later(sandboxes: Sandboxes, tmp_path: Path) -> None:
    test = "sh /app/program.sh; echo 0 > /logs/verifier/reward.txt\n"
    task = make_task(tmp_path / "t", test=test)
    program = "printf '(setsid sh -c \"sleep 0.2; echo 1 > /logs/verifier/reward.txt\" >/dev/null 2>&1 &)' > program.sh"
    assert judge(sandboxes, task, program).reward == 0.0
    assert sandboxes.left() == []


def test_s17_the_verifier_never_runs_while_something_of_the_agents_lives(sandboxes: Sandboxes, task: Task) -> None:
    sandbox = sandboxes.start(task)
    sandbox.exec("(setsid sleep 300 >/dev/null 2>&1 &)", 5)
    assert verdict(sandboxes, sandbox, task).reward == 0.0
    with pytest.raises(InfraError):
        sandbox.exec("true", 5)


def test_an_out_of_memory_verifier_says_so(sandboxes: Sandboxes, tmp_path: Path) -> None:
    task = make_task(tmp_path / "t", test="x=$(head -c 900000000 /dev/zero | tr '\\0' x)\n", toml="[environment]\nmemory_mb = 64\n")
    sandbox = sandboxes.start(task)
    if sandbox._host.hierarchy is None:  # type: ignore[attr-defined]
        pytest.skip("cgroups are not writable here")
    with pytest.raises(InfraError) as caught:
        verdict(sandboxes, sandbox, task)
    assert caught.value.cause is Cause.OUT_OF_MEMORY


def test_the_plain_sandbox_verifies_too(sandboxes: Sandboxes, task: Task) -> None:
    sandbox = sandboxes.start(task, kind="subprocess")
    sandbox.exec("echo 42 > /app/answer.txt; (setsid sleep 300 >/dev/null 2>&1 &)", 5)
    assert verdict(sandboxes, sandbox, task).reward == 1.0
    assert sandboxes.left() == []


# ------------------------------------------------------------------------------------------------ the file itself


def reading(folder: Path, name: str, data: bytes) -> float:
    (folder / name).write_bytes(data)
    written = read_reward(folder, started=0.0)
    assert written is not None
    (folder / name).unlink()
    return written.value


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_s12_every_finite_number_is_read_as_it_was_written(value: float) -> None:
    folder = Path("/tmp") / f"rl360-reward-{os.getpid()}"
    folder.mkdir(exist_ok=True)
    try:
        assert reading(folder, "reward.txt", f"{value!r}\n".encode()) == value
        assert reading(folder, "reward.json", json.dumps({"reward": value, "style": "x"}).encode()) == value
        assert reading(folder, "reward.json", json.dumps(value).encode()) == value
    finally:
        folder.rmdir()


@pytest.mark.parametrize(
    ("name", "data"),
    [
        *[("reward.txt", d) for d in (b"", b"nan", b"inf", b"-Infinity", b"1e999", b"1_0", b"pass", b"1 2", b"\xff", "１".encode())],
        *[("reward.json", d) for d in (b"", b"true", b"null", b"NaN", b'"1"', b"[1]", b'{"score": 1}', b'{"reward": true}')],
        *[("reward.json", d) for d in (b'{"reward": null}', b'{"reward": "1"}', b"1e999", b"9" * 400, b"[" * 9000, b"\xff")],
        ("reward.txt", b"1" + b" " * MAX_REWARD_BYTES),
    ],
)
def test_s12_what_is_no_finite_number_is_refused(tmp_path: Path, name: str, data: bytes) -> None:
    with pytest.raises(InfraError) as caught:
        reading(tmp_path, name, data)
    assert caught.value.cause is Cause.BAD_REWARD


def test_s17_older_linked_and_special_files_are_forged(tmp_path: Path) -> None:
    reward = tmp_path / "reward.txt"

    def cause(started: float = 0.0) -> Cause:
        with pytest.raises(InfraError) as caught:
            read_reward(tmp_path, started)
        return caught.value.cause

    assert read_reward(tmp_path, 0.0) is None
    reward.write_text("1")
    os.utime(reward, (time.time() + 1e6, time.time() + 1e6))  # its own time says nothing
    assert cause(started=time.time() + 1) is Cause.FORGED_REWARD
    os.link(reward, tmp_path / "other")
    assert cause() is Cause.FORGED_REWARD
    reward.unlink()
    reward.symlink_to(tmp_path / "other")
    assert cause() is Cause.FORGED_REWARD


def test_the_digest_of_the_verifier_is_that_of_its_tests(tmp_path: Path) -> None:
    one, two = write_task(tmp_path / "one"), write_task(tmp_path / "two", instruction="another")
    assert load_task(one).verifier_digest == load_task(two).verifier_digest
    (one / "tests/helper.py").write_text("x = 1\n")
    assert load_task(one).verifier_digest != load_task(two).verifier_digest
