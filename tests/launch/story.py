"""The events of one small step, as a journal would hold them: two attempts of one group, one fails by infrastructure."""

from __future__ import annotations

import numpy as np

from rl360.bus import events as ev
from rl360.bus.codec import Recorded
from rl360.bus.payload import Payload

RUN = "story"
BUDGETS = ev.Budgets(queue=60, setup=10, agent=60, verify=10, collect=10, margin=5)
GOOD, LOST = "t0-g000-a0", "t0-g000-a1"


def payload(values: list[float], kind: str) -> Payload:
    data = np.array(values, kind).tobytes()
    return Payload(size=len(data), inline=data)


def turn(number: int, started: float) -> ev.TurnCompleted:
    return ev.TurnCompleted(
        run=RUN,
        step=0,
        attempt=GOOD,
        group=0,
        session=f"{GOOD}.1",
        turn=number,
        branch=0,
        parent=number - 1,
        base=0,
        prompt_ids=payload([5, 6], "<i4"),
        output_ids=payload([7, 8, 2], "<i4"),
        logprobs=payload([-0.5, -0.1, -0.2], "<f4"),
        spans=(ev.VersionSpan(0, 0, 3),),
        finish_reason="stop",
        cached_tokens=4 * (number - 1),
        prompt_tokens=2 + 5 * (number - 1),
        best_cached=4 * (number - 1),
        generation="engine0-1",
        request_id=f"r{number}",
        started=started,
        ended=started + 0.4,
    )


def events() -> list[ev.AnyEvent]:
    spec = ev.GroupSpec(group=0, task="fix-1", digest="d", domain="fix", attempts=2)
    request = {"run": RUN, "step": 0, "group": 0, "task": "fix-1", "digest": "d", "budgets": BUDGETS}
    phase = {"run": RUN, "step": 0, "attempt": GOOD, "group": 0, "session": f"{GOOD}.1", "node": "n"}
    receipt = ev.Receipt(file="reward.txt", file_digest="f", verifier_digest="v", exit_status=0, agent_dead_at=6.0, written_at=6.5)
    decisions = (
        ev.AttemptDecision(attempt=GOOD, fate=ev.Fate.DROPPED, reason="insufficient_valid", raw_reward=1.0, reward=1.0),
        ev.AttemptDecision(attempt=LOST, fate=ev.Fate.MASKED, reason="sandbox/lost"),
    )
    return [
        ev.RunStarted(run=RUN, config={}, config_digest="c", code_version="0", seed=0),
        ev.StepOpened(run=RUN, step=0, version=0, groups=(spec,)),
        ev.RolloutRequested(attempt=GOOD, index=0, **request),
        ev.RolloutRequested(attempt=LOST, index=1, **request),
        ev.RolloutAdmitted(attempt=GOOD, index=0, wave=0, admitted=1.0, **request),
        ev.RolloutPhase(phase=ev.Phase.QUEUE, start=1.0, end=2.0, **phase),
        ev.RolloutPhase(phase=ev.Phase.SETUP, start=2.0, end=3.0, **phase),
        turn(1, 3.2),
        turn(2, 4.0),
        ev.RolloutPhase(phase=ev.Phase.AGENT, start=3.0, end=6.0, **phase),
        ev.VerifierResult(
            run=RUN,
            step=0,
            attempt=GOOD,
            group=0,
            session=f"{GOOD}.1",
            reward=1.0,
            low=0.0,
            high=1.0,
            receipt=receipt,
            exit_status=0,
            agent_end=ev.AgentEnd.SUBMITTED,
        ),
        ev.InfraFailed(
            run=RUN,
            step=0,
            attempt=LOST,
            group=0,
            session=f"{LOST}.1",
            boundary=ev.Boundary.SANDBOX,
            cause=ev.Cause.LOST,
            exception="OSError",
        ),
        ev.TrajectoryMerged(
            run=RUN,
            step=0,
            attempt=GOOD,
            group=0,
            session=f"{GOOD}.1",
            branch=0,
            tokens=10,
            sampled=6,
            turns=2,
            dropped_turns=0,
            format_errors=0,
            min_version=0,
            max_version=0,
            sample=Payload(size=0, inline=b""),
            cached_tokens=4,
            best_cached=4,
            prompt_tokens=9,
        ),
        ev.GroupDecided(run=RUN, step=0, group=0, domain="fix", kept=False, reason="insufficient_valid", n_valid=1, attempts=decisions),
        ev.StepTrained(
            run=RUN,
            step=0,
            version=0,
            samples=0,
            tokens=0,
            divisor=0,
            loss=0,
            grad_norm=0,
            metrics={},
            seconds={},
            checkpoint="",
            skipped=True,
            why="no survivor",
        ),
        ev.StepClosed(run=RUN, step=0, requested=2, valid=1, masked=1, infra=1, kept=0, skipped=True, why="no survivor"),
    ]


def records() -> list[Recorded]:
    return [Recorded(i + 1, 1.0 + 0.5 * i, e) for i, e in enumerate(events())]
