"""The bwrap sandbox: what is inside, what it can't reach, and what hostile commands can't do to the runner."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from rl360.agents.outcomes import InfraError
from rl360.agents.sandbox.base import OUTPUT_LIMIT, Sandbox
from rl360.agents.sandbox.host import detect
from rl360.agents.tasks import Task
from rl360.bus.events import Cause
from tests.agents.conftest import Sandboxes
from tests.agents.harbor import make_task

limited = pytest.mark.skipif(detect().hierarchy is None, reason="cgroups are not writable here")


@pytest.fixture
def task(tmp_path: Path) -> Task:
    return make_task(tmp_path / "task", files={"notes.txt": "hello\n", "sub/x": "1\n"}, toml='[environment]\nenv = { MODE = "fast" }\n')


@pytest.fixture
def sandbox(sandboxes: Sandboxes, task: Task) -> Sandbox:
    return sandboxes.start(task)


def test_commands_run_in_the_workdir_with_the_tasks_files_and_a_clean_environment(sandbox: Sandbox) -> None:
    assert sandbox.exec("pwd; cat notes.txt sub/x; echo $MODE $X", 5, {"X": "y"}).output == "/app\nhello\n1\nfast y\n"
    names = {line.partition("=")[0] for line in sandbox.exec("env", 5).output.splitlines()}
    assert names == {"PATH", "HOME", "LANG", "MODE", "PWD", "SHLVL", "_"}
    assert sandbox.exec("echo err >&2; exit 3", 5).status == 3
    assert sandbox.exec("nosuch", 5).output == "bash: line 1: nosuch: command not found\n"


def test_files_stay_and_only_the_places_meant_for_it_can_be_written(sandbox: Sandbox) -> None:
    sandbox.exec("echo 1 > a; echo 2 > /tmp/b; echo 3 > /logs/c; echo 4 > ~/d", 5)
    assert sandbox.exec("cat a /tmp/b /logs/c ~/d", 5).output == "1\n2\n3\n4\n"
    assert (sandbox.workdir / "a").read_text() == "1\n"
    for path in ("/usr/x", "/etc/x", "/proc/sys/kernel/hostname", "/tests"):
        assert sandbox.exec(f"touch {path} 2>/dev/null && echo w > {path}", 5).status != 0, path


def test_nothing_of_the_host_is_in_reach(sandbox: Sandbox, tmp_path: Path) -> None:
    """No file of ours, no process of ours, no network but a loopback of its own, no capability, no way back to root."""
    (tmp_path / "secret").write_text("s")
    assert sandbox.exec(f"cat {tmp_path}/secret", 5).status != 0
    processes = sandbox.exec("cat /proc/[0-9]*/comm", 5).output.split()
    assert set(processes) <= {"cat", "bash"}
    assert sandbox.exec("grep -c : /proc/net/dev; (echo > /dev/tcp/127.0.0.1/22) 2>&1", 5).output.startswith("1\n")
    assert sandbox.exec("grep CapEff /proc/self/status", 5).output.split() == ["CapEff:", "0000000000000000"]
    assert sandbox.exec("id -u", 5).output.strip() != "0"
    assert sandbox.exec("mount -t tmpfs x /app || umount /app", 5).status != 0


def test_a_command_has_no_more_privileges_than_the_first_process_and_can_gain_none(sandbox: Sandbox) -> None:
    wanted = "grep -hE 'NoNewPrivs|Cap|Uid|Gid|Groups' /proc/{}/status"
    command = dict(line.split(":\t", 1) for line in sandbox.exec(wanted.format("self"), 5).output.splitlines())
    assert command["NoNewPrivs"] == "1"
    assert {command[name] for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {"0" * 16}
    if detect().rooted:  # the bounding set may be full: it gives nothing without new privileges
        assert len({command["Uid"], command["Gid"]}) == 1
        assert command["Groups"].strip() == ""


def test_no_program_that_holds_privileges_inside_reads_a_tasks_environment(sandbox: Sandbox) -> None:
    """A library of the agent's must not be loaded by what enters its sandbox as root."""
    sandbox.exec("echo broken > libc.so.6; chmod 755 libc.so.6", 5)
    got = sandbox.exec("true", 5, {"LD_LIBRARY_PATH": "/app"})
    assert "setpriv" not in got.output and "nsenter" not in got.output
    assert sandbox.exec("echo $A=$0", 5, {"A": "b c", "B": ""}).output == "b c=bash\n"


def test_s15_a_command_that_runs_too_long_is_killed_with_its_children(sandbox: Sandbox) -> None:
    started = time.monotonic()
    result = sandbox.exec("echo begun; sleep 60 & sleep 60", 1.5)
    assert (result.timed_out, result.output) == (True, "begun\n")
    assert time.monotonic() - started < 20
    assert sandbox.exec("cat /proc/[0-9]*/comm | grep -c sleep", 5).output == "0\n"


def test_a_command_that_stops_itself_is_killed_all_the_same(sandbox: Sandbox) -> None:
    assert sandbox.exec("kill -STOP $$; sleep 60", 1.0).timed_out
    assert sandbox.exec("echo alive", 5).output == "alive\n"


def test_a_background_process_lives_on_and_does_not_hold_its_command(sandbox: Sandbox) -> None:
    assert sandbox.exec("sleep 60 & echo started", 5).output == "started\n"
    assert sandbox.exec("cat /proc/[0-9]*/comm | grep -c sleep", 5).output == "1\n"


def test_output_is_bounded_and_an_endless_flood_is_cut(sandbox: Sandbox) -> None:
    some = sandbox.exec(f"head -c {OUTPUT_LIMIT + 1} /dev/zero", 5)
    assert (some.status, some.truncated, len(some.output)) == (0, True, OUTPUT_LIMIT)
    flood = sandbox.exec("head -c 1000000000 /dev/zero", 30)
    assert (flood.truncated, flood.timed_out, len(flood.output)) == (True, False, OUTPUT_LIMIT)
    assert flood.status != 0


def test_output_that_is_no_utf8_and_a_silent_command(sandbox: Sandbox) -> None:
    assert sandbox.exec(r"printf '\xff\xc3'", 5).output == "\ufffd\ufffd"
    assert sandbox.exec("exec >&- 2>&-; sleep 0.05; exit 4", 5).status == 4


@limited
def test_a_memory_hog_is_killed_and_counted_and_the_sandbox_lives(sandboxes: Sandboxes, task: Task) -> None:
    sandbox = sandboxes.start(task, memory_mb=64)
    hog = "x=$(head -c 200000000 /dev/zero | tr '\\0' x); echo $?"
    assert sandbox.exec(hog, 20).status == 137
    assert sandbox.oom_kills() >= 1
    for folder in ("/tmp", "/root", "/dev/shm", "/logs", "/var/tmp"):  # memory too, bounded so that it leaves enough to go on
        assert sandbox.exec(f"head -c 200000000 /dev/zero > {folder}/file", 20).status == 1, folder
    assert sandbox.exec("touch /file", 5).status == 1
    assert sandbox.exec("echo alive", 5).output == "alive\n"


FILL = {
    "one large file": "head -c 200000000 /dev/zero > big",
    "small files": "for i in $(seq 10000); do echo $i > f$i || exit 1; done",
    "space asked for and not written": "fallocate -l 200M big",
    "a file with a hole": "truncate -s 200M big && cat /dev/zero 1<>big",
    "a deleted file that is open": "exec 3>big; rm big; head -c 200000000 /dev/zero >&3",
}


@pytest.mark.parametrize("how", FILL)
def test_a_full_workdir_refuses_what_goes_beyond_it_and_the_sandbox_lives(sandboxes: Sandboxes, task: Task, how: str) -> None:
    sandbox, neighbour = sandboxes.start(task, storage_mb=8), sandboxes.start(task, storage_mb=8)
    full = sandbox.exec(FILL[how], 30)
    assert (full.status != 0, full.timed_out, "No space left" in full.output) == (True, False, True), full
    assert neighbour.exec("head -c 7000000 /dev/zero > ok && cat notes.txt", 10).output == "hello\n"
    on_disk = sum(path.lstat().st_blocks * 512 for path in sandboxes.lease.folder.glob("s*/**/*"))
    assert on_disk < 1 << 16  # nothing that an agent writes reaches a disk of the run
    assert sandbox.exec("rm -f big g f*; echo again > notes.txt; cat notes.txt", 10).output == "again\n"
    assert sandbox.oom_kills() == 0


@pytest.mark.parametrize("folder", ["/tmp", "/root", "/dev/shm", "/logs"])
def test_empty_files_fill_the_folders_in_memory_and_leave_the_memory_limit_alone(sandboxes: Sandboxes, task: Task, folder: str) -> None:
    sandbox = sandboxes.start(task, memory_mb=64)
    assert "No space left" in sandbox.exec(f"cd {folder} && seq 20000 | xargs touch", 20).output
    assert (sandbox.exec("echo alive", 5).output, sandbox.oom_kills()) == ("alive\n", 0)


def test_nobody_inside_can_lift_the_bounds_of_a_folder(sandbox: Sandbox) -> None:
    before = sandbox.exec("grep -E '/tmp|/root|/dev/shm|/logs' /proc/mounts", 5).output
    assert before.count("nr_inodes=") == 4
    sandbox.exec("for f in /tmp /root /dev/shm /logs; do mount -n -i -o remount,size=1g,nr_inodes=0 tmpfs $f; done", 5)
    sandbox.exec("unshare -Urm mount -n -i -o remount,size=1g,nr_inodes=0 tmpfs /tmp", 5)
    assert sandbox.exec("grep -E '/tmp|/root|/dev/shm|/logs' /proc/mounts", 5).output == before


def test_empty_files_fill_a_workdir_too(sandboxes: Sandboxes, task: Task) -> None:
    sandbox = sandboxes.start(task, storage_mb=1)
    assert "No space left" in sandbox.exec("touch $(seq 5000)", 20).output
    assert sandbox.exec("cat notes.txt", 5).output == "hello\n"


def test_a_workdir_holds_its_tasks_files_and_the_smaller_of_the_tasks_and_the_recipes_storage(sandboxes: Sandboxes, tmp_path: Path) -> None:
    task = make_task(tmp_path / "t", files={"large": "x" * 3_000_000}, toml='[environment]\nstorage = "2M"\n')
    room = "df --output=avail -k . | tail -1"
    assert int(sandboxes.start(task, storage_mb=4).exec(room, 5).output) == 2 << 10
    assert int(sandboxes.start(task, storage_mb=1).exec(room, 5).output) == 1 << 10


def test_a_fork_bomb_stays_in_its_sandbox(sandboxes: Sandboxes, task: Task) -> None:
    bombed, other = sandboxes.start(task, pids=32), sandboxes.start(task)
    bombed.exec("bomb() { bomb | bomb & }; bomb; sleep 0.2", 1.0)
    assert other.exec("echo alive", 5).output == "alive\n"
    bombed.kill_all()


def test_the_first_process_of_a_sandbox_is_out_of_reach(sandbox: Sandbox) -> None:
    sandbox.exec("kill -9 -1; kill -9 1; kill -STOP 1; kill -TERM 1", 5)
    assert sandbox.exec("echo alive", 5).output == "alive\n"


def test_orphans_are_reaped(sandbox: Sandbox) -> None:
    sandbox.exec("for i in 1 2 3; do (setsid true &); done; sleep 0.1", 5)
    assert sandbox.exec("grep -l 'State:.Z' /proc/[0-9]*/status", 5).output == ""


@pytest.mark.parametrize(
    "escape",
    [
        "nohup sleep 60 >/dev/null 2>&1 &",
        "setsid sleep 60 >/dev/null 2>&1 &",
        "(setsid sh -c 'sleep 60 & wait' >/dev/null 2>&1 &) &",
        "setsid sh -c 'trap \"\" TERM HUP INT; kill -STOP $$' >/dev/null 2>&1 &",
    ],
)
def test_s17_kill_all_leaves_nothing_whatever_was_daemonised(sandboxes: Sandboxes, sandbox: Sandbox, escape: str) -> None:
    sandbox.exec(escape, 5)
    assert sandbox.exec("ls -d /proc/[0-9]* | wc -l", 5).output.strip() > "3"
    sandbox.kill_all()
    assert sandboxes.left() == []
    with pytest.raises(InfraError) as caught:
        sandbox.exec("true", 5)
    assert caught.value.cause is Cause.CANCELLED


def test_kill_all_ends_a_command_that_another_thread_waits_for(sandbox: Sandbox) -> None:
    ended: list[InfraError] = []

    def work() -> None:
        try:
            sandbox.exec("touch begun; sleep 60", 60)
        except InfraError as e:
            ended.append(e)

    thread = threading.Thread(target=work)
    thread.start()
    deadline = time.monotonic() + 10
    while not (sandbox.workdir / "begun").exists() and time.monotonic() < deadline:
        time.sleep(0.002)
    sandbox.kill_all()
    thread.join(10)
    assert [e.cause for e in ended] == [Cause.CANCELLED]


def test_whatever_an_agent_makes_of_its_workdir_is_removed(sandboxes: Sandboxes, sandbox: Sandbox) -> None:
    """Unreadable folders, 1,200 levels, odd and huge names, links to the host's files."""
    sandbox.exec("mkdir -p no/way; touch no/way/x; chmod 000 no/way no; ln -s /etc/passwd link; ln -s / root", 10)
    sandbox.exec("p=$(printf 'd/%.0s' $(seq 600)); mkdir -p $p && cd $p && mkdir -p $p", 30)
    sandbox.exec("touch \"$(head -c 255 /dev/zero | tr '\\0' n)\" $'new\\nline' $'\\xff\\xfe' -- '-rf'", 10)
    sandbox.exec("rm -rf /app /app/* ~; chmod 000 /app", 10)
    sandbox.close()
    assert not sandbox.root.exists()
    assert Path("/etc/passwd").exists()


def test_s13_a_sandbox_that_cannot_start_says_why(sandboxes: Sandboxes, task: Task) -> None:
    sandbox = sandboxes.make(task)
    sandbox._host = replace(detect(), rooted=False, unshare="/bin/false")  # type: ignore[attr-defined]  # a machine that lets nobody mount
    with pytest.raises(InfraError, match="disk can't be mounted") as caught:
        sandbox.start()
    assert caught.value.cause is Cause.START_FAILED


def test_s13_bwraps_own_words_are_in_the_error(sandboxes: Sandboxes, tmp_path: Path) -> None:
    sandbox = sandboxes.make(make_task(tmp_path / "t", toml='[environment]\nworkdir = "/var/tmp/../../proc/x"\n'.replace("..", "a")))
    sandbox._inside = "/proc/x"  # type: ignore[attr-defined]  # a place that bwrap can't make
    with pytest.raises(InfraError, match="bwrap") as caught:
        sandbox.start()
    assert caught.value.cause is Cause.START_FAILED


def test_without_root_the_same_promises_hold(tmp_path: Path) -> None:
    """A person's machine: a user namespace and resource limits. Run as nobody of importance, where we are root."""
    if os.geteuid() != 0 or not Path("/usr/bin/python3").exists() or sys.version_info[:2] != (3, 11):
        pytest.skip("needs root to become an ordinary user")
    place = Path("/tmp") / f"rl360-{os.getpid()}"
    place.mkdir(mode=0o700)
    os.chown(place, 54321, 54321)
    script = Path(__file__).with_name("rootless.py")
    packages = Path(sys.prefix) / "lib/python3.11/site-packages"
    env = {"PATH": "/usr/bin:/bin", "HOME": str(place), "PYTHONPATH": f"{script.parents[2]}:{packages}", "PYTHONDONTWRITEBYTECODE": "1"}
    argv = ["setpriv", "--reuid", "54321", "--regid", "54321", "--clear-groups", "/usr/bin/python3", str(script), str(place)]
    try:
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stdout.split()[-1:]) == (0, ["done"]), done.stdout + done.stderr
    finally:
        subprocess.run(["rm", "-rf", str(place)], check=True)


def test_the_plain_sandbox_is_only_taken_by_name_and_warns(sandboxes: Sandboxes, task: Task, caplog: pytest.LogCaptureFixture) -> None:
    sandbox = sandboxes.start(task, kind="subprocess")
    assert "in reach" in caplog.text
    assert sandbox.exec("cat /app/notes.txt; pwd", 5).output == f"hello\n{sandbox.workdir}\n"
    sandbox.exec("(setsid sleep 60 >/dev/null 2>&1 &)", 5)
    sandbox.kill_all()
    assert sandboxes.left() == []


def test_a_runner_with_thousands_of_descriptors_starts_sandboxes(sandboxes: Sandboxes, task: Task) -> None:
    """What waits for a sandbox must not be select(), which knows 1,024 of them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4096)), hard))
    held = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
    try:
        assert sandboxes.start(task).exec("echo in", 5).output == "in\n"
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
