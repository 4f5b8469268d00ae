"""The trainer's process: exactly one optimizer step a step, then the push. Thin: `Ledger` says what is due, the ranks do it.

Exactly-once: a step's StepTrained lies inside its checkpoint, and the checkpoint is complete before the event is published. After a
crash the newest checkpoint decides: an event that the journal lacks is published from it, a version that no engine holds is pushed.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final

from rl360.bus import events as ev
from rl360.bus.codec import decode, encode
from rl360.bus.worker import WorkerContext
from rl360.engines.push import Pusher
from rl360.trainer import checkpoints, commands, step_events
from rl360.trainer.crew_thread import CrewThread
from rl360.trainer.ledger import FOLDED, Ledger, PushOrder, command
from rl360.trainer.rank import START, Answer
from rl360.trainer.spec import ModelSpec
from rl360.trainer.step_batch import StepBatch

_POLL: Final = 0.5
_MEGABYTE: Final = 1_000_000


async def main(ctx: WorkerContext) -> None:
    """Train and push until `ctx.stop` is set. Raises ModelError, CheckpointError or RankLost."""
    push = ctx.config.push
    async with CrewThread(ctx.config, ctx.dir) as crew:
        pusher = Pusher(
            bucket_bytes=int(push.bucket_mb * _MEGABYTE),
            timeout=push.timeout,
            call_timeout=push.call_timeout,
            shared_memory=push.path == "shared_memory",
            host=ctx.host,
            holders=crew.experts if push.path == "direct" else None,
        )
        async with pusher:
            trainer = Trainer(ctx, crew, pusher)
            await trainer.restore()
            await trainer.run()


class Trainer:
    """The trainer's own place, and what it does next."""

    def __init__(self, ctx: WorkerContext, crew: CrewThread, pusher: Pusher) -> None:
        self._ctx, self._crew, self._pusher = ctx, crew, pusher
        self._root = ctx.dir / checkpoints.FOLDER
        self._ledger = Ledger(ctx.bus.run, ctx.config)
        self._folded = 0  # sequence of the newest event in the ledger
        self._folded_at = 0.0  # when that was recorded (unix seconds)
        self._wait_for = 0  # sequence of the newest event that this worker published
        self._step = -1  # last step that is trained or skipped, by the weights in memory
        self._version, self._made_by = START, -1
        self._restored: ev.StepTrained | None = None
        self._training: asyncio.Task[None] | None = None
        self._exported: tuple[commands.Export, Answer] | None = None
        spec = ModelSpec.read(ctx.config.policy.folder)
        self._experts = spec.experts.count if spec.experts else 0  # of a layer

    async def restore(self) -> None:
        """Take the newest usable checkpoint, or the starting policy."""
        found = await asyncio.to_thread(checkpoints.latest, self._root)
        for problem in found.passed_over:
            self._ctx.log.error("%s; going on from the one before, its later steps are made again from the journal", problem)
        if found.checkpoint is None:
            await self._crew.do(commands.Restore())
            return
        path, manifest = found.checkpoint.path, found.checkpoint.manifest
        event = decode(manifest.event, str(path))
        if not isinstance(event, ev.StepTrained):
            raise checkpoints.CheckpointError(f"checkpoint {path}: holds {type(event).__name__}, not StepTrained: remove the folder")
        await self._crew.do(commands.Restore(str(path)))
        self._step = self._made_by = manifest.step
        self._version, self._restored = manifest.version, event
        self._ledger.done(self._step)
        self._ctx.log.info("restored step %d, version %d from %s", self._step, self._version, path)

    async def run(self) -> None:
        """Fold the journal; train and push what is due."""
        try:
            await self._follow()
            await self._drain()
        finally:
            if self._training is not None:
                self._training.cancel()
                await asyncio.gather(self._training, return_exceptions=True)

    async def _follow(self) -> None:
        async with self._ctx.bus.reader(types=FOLDED) as reader:
            while not self._ctx.stop.is_set():
                record = await reader.next(timeout=_POLL)
                if record is not None:
                    self._ledger.on(record)
                    self._folded, self._folded_at = record.seq, record.time
                self._crew.check()
                if reader.caught_up and self._folded >= self._wait_for:
                    await self._act()

    async def _act(self) -> None:
        """What is due now. Training goes on beside the pushes."""
        if self._restored is not None:
            event, self._restored = self._restored, None
            await self._publish_once(event)
        elif self._training is not None:
            if self._training.done():
                self._training.result()
                self._training = None
        elif (batch := self._ledger.batch(self._step + 1, self._version)) is not None:
            self._training = asyncio.create_task(self._train(batch))
        order = self._ledger.push(self._version, self._made_by)
        if order is not None and self._folded >= self._wait_for:
            await self._push(order)

    async def _drain(self) -> None:
        """Let a step in work become a checkpoint and an event, for as long as the worker has."""
        if self._training is None:
            return
        try:
            async with asyncio.timeout(self._ctx.config.supervise.drain_seconds / 2):
                await self._training
        except TimeoutError:
            self._ctx.log.warning("stopped in the middle of a step; it is made again")

    async def _publish(self, event: ev.Event) -> None:
        self._wait_for = max(self._wait_for, await self._ctx.bus.publish(event))

    async def _publish_once(self, event: ev.StepTrained) -> None:
        if self._ledger.trained(event.step) is None:
            await self._publish(event)

    # ------------------------------------------------------------------------------------------------ train

    async def _train(self, batch: StepBatch) -> None:
        if batch.stale:
            self._ctx.log.error(
                "step %d: %d samples are too stale and are dropped: %s", batch.step, len(batch.stale), ", ".join(batch.stale)
            )
        if not batch.refs:
            await self._publish_once(step_events.skipped(self._ctx.bus.run, batch, checkpoint=self._checkpoint(self._made_by)))
            self._step = batch.step
            return
        event = await self._optimize(batch)
        if self._ledger.trained(batch.step) is not None:
            self._ctx.log.warning("step %d was made again from the journal: its checkpoint was lost", batch.step)
        await self._publish_once(event)
        self._tell(event)
        self._step = self._made_by = batch.step
        self._version = event.version
        self._ledger.done(batch.step)

    async def _optimize(self, batch: StepBatch) -> ev.StepTrained:
        """One optimizer step and its checkpoint. The event is the journal's own when the step is made again."""
        trainer = self._ctx.config.trainer
        seen = checkpoints.Seen(self._folded, self._folded_at)
        answer = await self._crew.do(command(batch, dp=trainer.dp, microbatch_tokens=trainer.microbatch_tokens))
        started = time.perf_counter()
        await self._crew.do(commands.Save(batch.step))
        seconds = {**answer.seconds, "save": time.perf_counter() - started}
        measured = step_events.Measured(answer.loss, answer.grad_norm, answer.metrics, seconds)
        event = self._ledger.trained(batch.step) or step_events.trained(
            self._ctx.bus.run, batch, measured, checkpoint=self._checkpoint(batch.step), alarm_above=trainer.logp_alarm
        )
        source = self._ctx.config.policy.folder
        await asyncio.to_thread(
            checkpoints.commit, self._root, step=batch.step, version=event.version, event=encode(event), hf_source=source, seen=seen
        )
        return event

    def _checkpoint(self, step: int) -> str:
        return "" if step < 0 else f"{checkpoints.FOLDER}/{checkpoints.name_of(step)}"

    def _tell(self, event: ev.StepTrained) -> None:
        """A line in the log, and the alarm on disagreement with the sampler."""
        log, worst = self._ctx.log, event.metrics.get("logp/delta_max")
        parts = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in event.seconds.items())
        log.info("step %d: version %d from %d samples, loss %.4g; %s", event.step, event.version, event.samples, event.loss, parts)
        if worst is not None and event.metrics.get("logp/alarm"):
            limit = self._ctx.config.trainer.logp_alarm
            log.error("step %d: trainer and sampler differ about a token by %.1e (alarm above %.0e)", event.step, worst, limit)

    # ------------------------------------------------------------------------------------------------ push

    async def _push(self, order: PushOrder) -> None:
        unable = await self._pusher.unable(order.engines, self._experts)
        if unable and self._ctx.config.push.path == "direct":
            self._ctx.log.warning('push of version %d: push.path is "direct", it goes by broadcast: %s', order.version, unable)
        exported = await self._export(commands.Export(order.version, apart=not unable))
        outcome = await self._pusher.push(
            order.version, exported.weights, order.engines, experts=exported.experts, unable=unable, attempt=order.attempt
        )
        for result in outcome.results:
            if not result.ok:
                self._ctx.log.error("push of version %d to %s: %s", order.version, result.generation, result.error)
        for event in outcome.events(self._ctx.bus.run, order.step):
            await self._publish(event)

    async def _export(self, order: commands.Export) -> Answer:
        """Kept from one push to the next: a joiner must not wait for the step in work."""
        if self._exported is None or self._exported[0] != order:
            self._exported = order, await self._crew.do(order)
        return self._exported[1]
