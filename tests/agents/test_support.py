"""What no sandbox can carry out is refused with its key, the reason and the remedy; nothing is silently ignored."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rl360.agents import support
from rl360.agents.lint import lint
from rl360.agents.staging import Stage
from rl360.agents.tasks import TaskError, load_task
from tests.agents.harbor import make_task, write_task

TASKS = Path(__file__).parent.parent / "fixtures" / "tasks"
REFUSED = sorted(p.name for p in TASKS.glob("refused-*"))
ACCEPTED = sorted(p.name for p in TASKS.iterdir() if p.name not in REFUSED)


@pytest.mark.parametrize("name", ACCEPTED)
def test_every_supported_feature_is_read_without_an_error(name: str) -> None:
    assert [f for f in lint(TASKS / name, "bwrap") if f.level == "error"] == []
    assert load_task(TASKS / name).oracle


@pytest.mark.parametrize("name", REFUSED)
def test_what_cant_be_carried_out_is_refused_by_load_and_by_lint(name: str) -> None:
    with pytest.raises(TaskError, match=";"):
        load_task(TASKS / name)
    assert any(f.level == "error" and ";" in f.message for f in lint(TASKS / name))


@pytest.mark.parametrize(
    ("toml", "key"),
    [
        ("[environment]\ngpus = 2\n", "environment.gpus"),
        ('[environment.tpu]\ntype = "v4"\n', "environment.tpu"),
        ('[environment]\nos = "Windows"\n', "environment.os"),
        ('[environment]\nskills_dir = "/skills"\n', "environment.skills_dir"),
        ('[[environment.mcp_servers]]\nname = "x"\n', "environment.mcp_servers"),
        ('[environment.env]\nKEY = "${KEY}"\n', "environment.env.KEY"),
        ('[solution.env]\nKEY = "${KEY}"\n', "solution.env.KEY"),
        ('[agent]\nuser = "agent"\n', "agent.user"),
        ("[verifier]\nuser = 1000\n", "verifier.user"),
        ('[agent]\nnetwork_mode = "allowlist"\nallowed_hosts = ["https://a.org/x"]\n', "agent.allowed_hosts"),
        ('[environment]\nnetwork_mode = "allowlist"\nallowed_hosts = ["10.0.0.0/8"]\n', "environment.allowed_hosts"),
        ('[verifier]\nallowed_hosts = ["a.org"]\n', "verifier.allowed_hosts"),
        ('[[verifier.collect]]\ncommand = "dump"\n', "verifier.collect"),
        ('[verifier]\nenvironment_mode = "shared"\n[verifier.environment]\ncpus = 1\n', "verifier.environment_mode"),
        ("[verifier.environment]\ngpus = 1\n", "verifier.environment.gpus"),
        ('[verifier.environment]\ndocker_image = "judge:1"\n', "verifier.environment.docker_image"),
        ('[verifier.environment]\nworkdir = "/judge"\n', "verifier.environment.workdir"),
    ],
)
def test_a_refusal_names_the_key_the_reason_and_the_remedy(tmp_path: Path, toml: str, key: str) -> None:
    folder = write_task(tmp_path / "t", toml=toml)
    with pytest.raises(TaskError, match=rf"task\.toml: key '{key}': .+; .+"):
        load_task(folder)
    assert [f.level for f in lint(folder) if key in f.message] == ["error"]


@pytest.mark.parametrize(
    "entry", ['"/var/log/x"', '"/app/../etc"', '{ source = "/app/a", destination = "../b" }', '{ source = "/app/a", service = "db" }']
)
def test_an_artifact_outside_the_workdir_or_the_folder_is_refused(tmp_path: Path, entry: str) -> None:
    with pytest.raises(TaskError, match="artifacts"):
        make_task(tmp_path / "t", toml=f"artifacts = [{entry}]\n")


def test_every_refusal_of_a_task_is_told_not_the_first_alone(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "t", toml='[environment]\ngpus = 1\nos = "windows"\nskills_dir = "/s"\n')
    assert {f.rule for f in lint(folder) if f.level == "error"} == {"environment.gpus", "environment.os", "environment.skills_dir"}


def test_some_refusals_hang_on_the_kind_of_sandbox(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "t", toml='[environment]\nnetwork_mode = "public"\n')
    assert load_task(folder).network.mode == "public"
    assert {f.rule for f in lint(folder, "bwrap") if f.level == "error"} == {"environment.network_mode"}
    assert [f for f in lint(folder, "docker") if f.level == "error"] == []
    assert {f.rule for f in lint(TASKS / "steps", "docker") if f.level == "error"} == {"steps"}


def test_hosts_go_with_the_word_that_opens_the_network(tmp_path: Path) -> None:
    toml = '[environment]\nnetwork_mode = "allowlist"\nallowed_hosts = ["*.A.org"]\n[verifier]\nnetwork_mode = "no-network"\n'
    task = make_task(tmp_path / "t", toml=toml)
    assert (task.network.filtered, task.network.allowed) == (True, ("*.a.org",))
    assert (task.verifier_network.mode, task.verifier_network.hosts) == ("no-network", ())
    assert {kind for kind in ("docker", "bwrap", "subprocess") if any(f.level == "error" for f in lint(task.dir, kind))} == {"subprocess"}


def test_a_verifiers_own_environment_has_its_own_network(tmp_path: Path) -> None:
    task = make_task(tmp_path / "t", toml='[environment]\nnetwork_mode = "public"\n[verifier.environment]\nnetwork_mode = "no-network"\n')
    assert (task.network.mode, task.verifier_network.mode) == ("public", "no-network")


def test_unknown_keys_of_a_step_are_findings(tmp_path: Path) -> None:
    folder = tmp_path / "t"
    shutil.copytree(TASKS / "steps", folder)
    toml = folder / "task.toml"
    toml.write_text(toml.read_text().replace("min_reward", "minreward"))
    assert load_task(folder).unknown_keys == ("steps.minreward",)
    assert any("steps.minreward" in f.message for f in lint(folder))


def test_a_step_reads_like_a_task_of_its_own(tmp_path: Path) -> None:
    task = load_task(TASKS / "steps")
    first, second = task.steps
    assert (first.step, second.step, first.min_reward, second.min_reward) == ("first", "second", 0.5, None)
    assert "word one" in first.instruction
    assert second.verifier_env == {"WANTED": "one two"}
    assert len({task.verifier_digest, first.verifier_digest, second.verifier_digest}) == 3
    assert (task.agent_timeout, first.agent_timeout, task.verifier_timeout) == (120.0, 60.0, None)
    staged = Stage(tmp_path / "stage").get(task).steps
    assert sorted(p.name for p in staged[1].tests.iterdir()) == ["test.sh", "words.sh"]
    assert [s.environment and s.environment.name for s in staged] == [None, "workdir"]


@pytest.mark.parametrize("missing", ["steps/first/instruction.md", "steps/second/tests/test.sh"])
def test_a_missing_file_of_a_step_is_named(tmp_path: Path, missing: str) -> None:
    shutil.copytree(TASKS / "steps", tmp_path / "t")
    (tmp_path / "t" / missing).unlink()
    with pytest.raises(TaskError, match=missing):
        load_task(tmp_path / "t")


@pytest.mark.parametrize("name", ["../up", "a/b", "", ".hidden", "first "])
def test_a_steps_name_is_a_plain_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(TaskError, match=r"steps\.name"):
        make_task(tmp_path / "t", toml=f"[[steps]]\nname = '{name}'\n")


@given(st.dictionaries(st.text("AB", min_size=1), st.text()))
def test_the_hosts_environment_never_reaches_a_task(env: dict[str, str]) -> None:
    env = {**env, "HOME": "${HOME}", "OTHER": "${HOME:-there}"}
    assert support.resolved(env)["OTHER"] == "there"
    assert support.resolved(env)["HOME"] == "${HOME}"  # refused by lint, and not looked up


def test_a_file_of_the_task_that_only_looks_like_services_is_a_file(tmp_path: Path) -> None:
    """Harbor reads docker-compose.yaml; a docker-compose.yml is what the task is about."""
    task = make_task(tmp_path / "t", files={"docker-compose.yml": "services: {}\n"})
    assert task.files == ("docker-compose.yml",)


KEYS = [
    "schema_version",
    "version",
    "source",
    "task",
    "metadata",
    "agent",
    "verifier",
    "environment",
    "solution",
    "artifacts",
    "steps",
    "name",
    "multi_step_reward_strategy",
    "timeout_sec",
    "env",
    "user",
    "network_mode",
    "allowed_hosts",
    "environment_mode",
    "collect",
    "gpus",
    "reward_min",
    "reward_max",
    "reward_range",
    "memory",
    "memory_mb",
    "storage",
    "os",
    "workdir",
    "healthcheck",
    "command",
    "min_reward",
    "mcp_servers",
    "skills_dir",
    "tpu",
    "service",
    "destination",
    "exclude",
    "docker_image",
    "cpus",
    "retries",
    "domain",
]
SCALARS = st.one_of(
    st.sampled_from(["", "/app", "..", "1G", "${X}", "${X:-y}", "public", "separate", "final", "first", "linux", "\n", "../x"]),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.booleans(),
)
TABLES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4), max_leaves=20
)


def inline(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {inline(v)}" for key, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(inline, value)) + "]"
    return json.dumps(value)


@example({"metadata": {"reward_range": []}})
@example({"metadata": {"reward_range": [0, 10**400]}})
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from(KEYS), TABLES, max_size=5))
def test_lint_never_crashes_and_says_what_load_refuses(tmp_path: Path, data: dict[str, object]) -> None:
    folder = tmp_path / "t"
    if not folder.exists():
        write_task(folder)
        shutil.copytree(TASKS / "steps" / "steps", folder / "steps")
    (folder / "task.toml").write_text("".join(f"{key} = {inline(value)}\n" for key, value in data.items()))
    errors = [f for f in lint(folder) if f.level == "error"]
    assert all(";" in f.message for f in errors)
    try:
        load_task(folder)
    except TaskError:
        assert errors
    else:
        assert not errors
