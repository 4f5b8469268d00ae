"""What a hostile agent tries, and what must hold: a table of shell commands, run by each kind of sandbox that isolates.

An attack that does its work first (`SOLVE`) must still get its reward: what it breaks, the verifier judges (S14). One that
does not gets 0, or, where the verifier can't come to a number, a failure with its place and cause (S12, S13).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rl360.agents.tasks import Task
from rl360.bus.events import AgentEnd, Boundary, Cause, InfraFailed, VerifierResult
from tests.agents.harbor import ANSWER_TEST, make_task
from tests.agents.test_runner import Stage

SOLVE = "echo 42 > /app/answer.txt; "
REWARD = "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; echo '{\"reward\": 1}' > /logs/verifier/reward.json"
LOOP = f"while :; do {REWARD}; sleep 0.02; done"
COPIES = "cat /app/score > /logs/verifier/reward.txt\n"
RUNS = "bash /app/run.sh; echo 0 > /logs/verifier/reward.txt\n"
ARTIFACTS = 'artifacts = ["/app/out", "/app/answer.txt"]\n'
BUDGETS = {"agent": 25.0, "verify": 8.0}
LIMITS = {"memory_mb": 64, "storage_mb": 64, "pids": 32}


@dataclass(frozen=True, kw_only=True)
class Attack:
    """`does` is one command of the agent's. `reward` None: no reward at all, but a verifier's failure with this cause."""

    does: str
    reward: float | None = 0.0
    cause: Cause | None = None
    test: str = ANSWER_TEST
    toml: str = ""
    submits: bool = False  # it must end by itself, within its clocks
    budgets: dict[str, float] = field(default_factory=dict[str, float])


def judged(does: str, **more: object) -> Attack:
    """One that does its work first."""
    return Attack(does=SOLVE + does, reward=1.0, **more)  # type: ignore[arg-type]


def no_number(score: str, cause: Cause = Cause.BAD_REWARD) -> Attack:
    return Attack(does=score, reward=None, cause=cause, test=COPIES)


ATTACKS = {
    # ---------------------------------------------------------------------------------------- a reward that wasn't earned
    "writes the reward early": Attack(does=REWARD),
    "writes it in the background": Attack(does=f"({LOOP}) >/dev/null 2>&1 &"),
    "writes it as a daemon": Attack(does=f"(setsid nohup bash -c 'trap \"\" TERM HUP INT; ({LOOP}) &' >/dev/null 2>&1 &)"),
    "links the reward": Attack(
        does="mkdir -p /logs/verifier; cd /logs/verifier; echo 1 > /app/one; ln -s /app/one reward.txt; mkfifo reward.json"
    ),
    "answers with a link to the reward": Attack(does="ln -s /logs/verifier/reward.txt answer.txt"),
    "replaces tests and tools": Attack(
        does=f"mkdir -p tests ~/bin; echo '{REWARD}' | tee test.sh tests/test.sh /tests/test.sh bash sh cat python3 conftest.py ~/bin/cat "
        "~/.bashrc ~/.profile .env BASH_ENV; chmod +x *; export PATH=/app:$HOME/bin:$PATH BASH_ENV=/app/BASH_ENV ENV=/app/BASH_ENV; true"
    ),
    "leaves a process through the verifier": Attack(
        does="echo '(setsid bash -c \"sleep 0.3; echo 1 > /logs/verifier/reward.txt\" >/dev/null 2>&1 &)' > run.sh", test=RUNS
    ),
    # ---------------------------------------------------------------------------------------- a score that the verifier copies
    "scores nan": no_number("echo nan > score"),
    "scores infinity": no_number("echo -inf > score"),
    "scores 1e999": no_number("echo 1e999 > score"),
    "scores twice": no_number("printf '1\\n1' > score"),
    "scores beyond the range": no_number("echo 1e300 > score"),
    "scores at length": no_number("head -c 5000000 /dev/zero | tr '\\0' 1 > score"),
    "scores without end": no_number("ln -s /dev/zero score"),
    "scores no text": no_number("printf '1\\377\\0' > score"),
    "scores nothing": no_number("true"),
    "swaps the reward for a link": Attack(
        does="echo 'mkdir /logs/verifier/d; echo 1 > /logs/verifier/d/x; ln -s d/x /logs/verifier/reward.json' > run.sh",
        test=RUNS,
        reward=None,
        cause=Cause.FORGED_REWARD,
    ),
    "makes the verifier wait": Attack(does="mkfifo answer.txt", reward=None, cause=Cause.TIMEOUT, budgets={"verify": 2.0}),
    # ---------------------------------------------------------------------------------------- using everything up
    "forks without end": judged("b() { b | b & }; b; sleep 0.2"),
    "forks daemons without end": judged("b() { (setsid bash -c 'trap \"\" TERM; sleep 100' &); b & }; b; sleep 0.2"),
    "takes all memory": judged("x=$(head -c 300000000 /dev/zero | tr '\\0' x)"),
    "takes all memory in files of its own": judged(
        "unshare -Urm bash -c 'mkdir /tmp/m; mount -t tmpfs x /tmp/m && head -c 300000000 /dev/zero > /tmp/m/x'"
    ),
    "fills everything with bytes": judged("for d in . /tmp /dev/shm ~ /logs; do head -c 90000000 /dev/zero > $d/big; done 2>/dev/null"),
    "fills everything with empty files": judged("for d in . /tmp /dev/shm ~ /logs; do (cd $d; seq 20000 | xargs touch); done 2>/dev/null"),
    "digs 10,000 folders deep": judged(
        "p=$(printf 'd/%.0s' {1..2000}); for i in 1 2 3 4 5; do mkdir -p $p && cd $p; done; touch x", toml=ARTIFACTS
    ),
    "uses odd names": judged(
        "mkdir out; touch out/$'\\xff\\xfe' out/$'new\\nline' out/$'\\e[2J\\e]0;x\\a' out/-rf out/\"$(printf '%0255d' 0)\" './ '",
        toml=ARTIFACTS,
    ),
    "pretends huge files": judged("mkdir out; truncate -s 4T big out/big /tmp/big", toml=ARTIFACTS),
    # ---------------------------------------------------------------------------------------- artifacts that aren't files
    "leaves anything but files": Attack(
        does="mkdir out; cd out; mkfifo pipe; mknod device c 1 5; ln -s /etc/passwd link; ln -s / root; ln -s loop loop; "
        "ln /etc/passwd hard; ln pipe pipe2; chmod 000 . ; mkfifo /app/x; ln -s /app/x /app/answer.txt; rm /app/answer.txt",
        toml=ARTIFACTS,
    ),
    "makes a file of a folder": Attack(does="rm -rf out; touch out; mkdir answer.txt", toml=ARTIFACTS),
    "closes everything": judged("rm -rf /tmp ~ /logs 2>/dev/null; mkdir -p out/in; chmod 000 out /app ~ /tmp", toml=ARTIFACTS),
    # ---------------------------------------------------------------------------------------- processes
    "kills its own shell": judged("kill -9 $$; echo 41 > answer.txt"),
    "kills all": judged("kill -9 -1; kill -9 1; kill -TERM 1"),
    "kills all, again and again": judged("(setsid bash -c 'while :; do kill -9 -1; sleep 0.01; done' >/dev/null 2>&1 &)"),
    "stops all": judged("kill -STOP -1; kill -STOP 1; kill -STOP $$"),
    "stops all, again and again": judged("(setsid bash -c 'while :; do kill -STOP -1; done' >/dev/null 2>&1 &); sleep 9"),
    # ---------------------------------------------------------------------------------------- output
    "says the same without end": judged("yes"),
    "says it in the background": judged("(yes &) ; sleep 0.1"),
    "says what is no text": judged("printf '\\e[2J\\e]0;x\\a\\0\\377\\376\\355\\240\\200'; head -c 70000 /dev/urandom"),
    # ---------------------------------------------------------------------------------------- what others have
    "looks for secrets": Attack(
        does="if grep -aqsE 'adm[i]n-key|key[-]t3|RL360_SECR[E]T' /proc/*/environ /proc/*/cmdline /proc/*/task/*/environ "
        "|| [ -n \"$(find / -xdev \\( -name '*.lease' -o -name 'intent.json' \\) 2>/dev/null)\" ] "
        "|| [ $(ls -d /proc/[0-9]* | wc -l) -gt 6 ]; then echo 42 > answer.txt; fi"
    ),
    "looks for the session server": Attack(
        does="for h in 127.0.0.1 localhost 10.0.2.2 172.17.0.1; do (echo > /dev/tcp/$h/{port}) 2>/dev/null && echo 42 > answer.txt; done"
    ),
}


GOOD = judged("true", submits=True)


def task_of(stage: Stage, number: int, attack: Attack) -> Task:
    """The attack is the task's own solution, so that one runner runs them all: its agent is the oracle."""
    folder = stage.dir / f"tasks/train/attack{number:02}"
    toml = f'{attack.toml}[task]\nname = "attack{number:02}"\n'
    return make_task(folder, test=attack.test, toml=toml, solution=attack.does.replace("{port}", str(stage.session.port)) + "\n")


def wrong(attack: Attack, outcome: VerifierResult | InfraFailed) -> str:
    """What is wrong with the outcome of an attack; "" when all is as it must be."""
    if isinstance(outcome, InfraFailed):
        kept = attack.reward is None and (outcome.boundary, outcome.cause) == (Boundary.VERIFIER, attack.cause)
        return "" if kept else f"{outcome.boundary}/{outcome.cause}: {outcome.detail}"
    if outcome.reward != attack.reward:
        return f"reward {outcome.reward:g}, not {attack.reward}"
    if attack.submits and outcome.agent_end is not AgentEnd.SUBMITTED:
        return f"ended by {outcome.agent_end}"
    if outcome.teardown_error:
        return f"teardown: {outcome.teardown_error}"
    dead, written = outcome.receipt.agent_dead_at, outcome.receipt.written_at
    return "" if dead <= written + 0.05 else f"the reward was written {dead - written:.2f} s before the agent was dead"


async def play(
    stage: Stage, attacks: Sequence[str], *, seconds: float = 120.0, command_timeout: float = 3.0, **sandbox: object
) -> dict[str, str]:
    """Run attacks with a well-behaved neighbour to every three of them, in one runner; what went wrong, by name."""
    neighbour, clocks = stage.task, {**BUDGETS, "queue": 300.0}  # they wait for eight slots, on a machine that may be busy
    names: dict[str, str] = {}
    for number, name in enumerate(attacks):
        attack = ATTACKS[name]
        stage.task = task_of(stage, number, attack)
        names[await stage.admit(**{**clocks, **attack.budgets})] = name
        if number % 3 == 0:
            stage.task = neighbour
            names[await stage.admit(**clocks)] = f"neighbour of {name}"
    agent = {"script": ["oracle", "true"], "command_timeout": command_timeout}
    async with stage.running(agent=agent, runners={"slots": 8}, sandbox={**LIMITS, **sandbox}):
        outcomes = await stage.outcomes(len(names), seconds)
    return {name: why for id, name in names.items() if (why := wrong(ATTACKS.get(name, GOOD), outcomes[id]))}
