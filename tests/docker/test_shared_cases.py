"""The cases of the bwrap sandbox, run on containers: the same promises, kept by other means."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl360.agents.sandbox.base import Sandbox
from rl360.agents.tasks import Task
from tests.agents.conftest import Sandboxes
from tests.agents.harbor import make_task
from tests.agents.test_openai_url import AGENT
from tests.agents.test_openai_url import test_an_agent_that_fails_by_itself_is_still_judged as test_url_failing_agent
from tests.agents.test_openai_url import test_it_solves_a_task_through_its_sessions_url_alone as test_url_solves
from tests.agents.test_openai_url import test_no_other_path_and_no_other_host_is_in_reach as test_url_nothing_else
from tests.agents.test_sandbox import (
    test_a_background_process_lives_on_and_does_not_hold_its_command,
    test_a_command_that_stops_itself_is_killed_all_the_same,
    test_kill_all_ends_a_command_that_another_thread_waits_for,
    test_orphans_are_reaped,
    test_output_is_bounded_and_an_endless_flood_is_cut,
    test_output_that_is_no_utf8_and_a_silent_command,
    test_s15_a_command_that_runs_too_long_is_killed_with_its_children,
    test_s17_kill_all_leaves_nothing_whatever_was_daemonised,
    test_the_first_process_of_a_sandbox_is_out_of_reach,
    test_whatever_an_agent_makes_of_its_workdir_is_removed,
)
from tests.agents.test_verify import (
    test_cases_2_a_missing_reward_says_what_the_verifier_said,
    test_s12_no_reward_to_trust_is_an_infrastructure_outcome_and_never_a_zero,
    test_s12_the_verifiers_number_comes_with_its_receipt,
    test_s14_what_a_hostile_agent_breaks_the_verifier_judges,
    test_s17_a_process_that_code_under_test_leaves_behind_writes_nothing_later,
    test_s17_cheating_wins_nothing,
    test_s17_the_verifier_never_runs_while_something_of_the_agents_lives,
    test_the_verifier_has_an_environment_of_its_own_beside_that_of_the_place,
    test_the_verifier_runs_without_its_run_bit_and_its_exit_status_is_only_a_fact,
)

pytestmark = pytest.mark.docker


@pytest.fixture
def task(tmp_path: Path) -> Task:
    return make_task(
        tmp_path / "task",
        files={"notes.txt": "hello\n", "sub/x": "1\n", "agent.py": AGENT},
        toml='[environment]\nenv = { MODE = "fast" }\n',
    )


@pytest.fixture
def sandbox(sandboxes: Sandboxes, task: Task) -> Sandbox:
    return sandboxes.start(task)
