"""Before the workers of a run start (again): is the journal what the run's other files know of it, and who is to be served anew.

nats-server syncs its files once in `nats_server.SYNC_INTERVAL`, so a crash of the machine can take the last events with it,
while the high-water mark and the checkpoints, which are synced at once, may know of them. What follows from the rest of the
journal is then said again by those who said it before; a checkpoint made from lost events is set aside, and its step is made
again; an attempt whose outcome is lost has a new life.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from pathlib import Path
from typing import Final

from rl360 import __version__
from rl360.agents.runner import DURABLE
from rl360.bus import events as ev
from rl360.bus import nats_server
from rl360.bus.blobs import BlobStore, digest_of
from rl360.bus.client import Bus, BusAddress
from rl360.child import Child
from rl360.config import Config, to_toml_data
from rl360.launch.high_water import Mark
from rl360.launch.rundir import RunDir
from rl360.ports import free_ports
from rl360.trainer import checkpoints

log = logging.getLogger(__name__)

_STOP: Final = 5.0  # seconds for a server to end


async def look(bus: Bus, mark: Mark | None, root: Path) -> ev.JournalRewound | None:
    """Compare the journal with what is known of it, and put right what depends on lost events. None: it is whole.

    `root` has the checkpoints. The runners' shared consumer is made anew in any case: what it knows of deliveries may be
    older or newer than the journal, and runners ask the journal itself.
    """
    await bus.forget_consumer(DURABLE)
    kept = await bus.last_seq()
    known = await asyncio.to_thread(checkpoints.seen, root)
    strangers = {path: seen for path, seen in known.items() if not await bus.holds(seen.seq, seen.time)}
    for path in strangers:
        log.warning("%s was made from events that the journal lost: set aside, its step is made again", path)
        await asyncio.to_thread(checkpoints.set_aside, path, "rewound")
    lost = [seen.seq for seen in strangers.values()]
    if mark is not None and not await bus.holds(mark.seq, mark.time):
        lost.append(mark.seq)
    if not lost:
        return None
    return ev.JournalRewound(run=bus.run, lost=max(lost), kept=kept, checkpoints=tuple(path.name for path in strangers))


async def announce(bus: Bus, config: Config) -> int:
    """Publish RunStarted; returns how many times the run was started before."""
    data = to_toml_data(config)
    digest = digest_of(json.dumps(data, sort_keys=True).encode())
    before = len([r async for r in bus.replay(types=[ev.RunStarted])])
    await bus.publish(
        ev.RunStarted(
            run=config.run.name, config=data, config_digest=digest, code_version=__version__, seed=config.run.seed, resumed=before
        )
    )
    return before


async def store_holds(folder: RunDir, mark: Mark) -> bool:
    """Ask the store of a run whose server is down, through a server of our own: no worker must reach a journal that lost its end.

    Only for who holds the store's lock.
    """
    port, monitor = free_ports(2)
    nats, run = folder.path / "nats", folder.config.run.name
    address = BusAddress(url=f"nats://127.0.0.1:{port}", user=nats_server.ADMIN, password=secrets.token_urlsafe(16))
    config = nats / "look.conf"
    passwords = {address.user: address.password}
    text = nats_server.config_text(run=run, store=nats / "store", port=port, monitor_port=monitor, passwords=passwords)
    nats_server.write_config(config, text)
    server = Child("nats-server", nats_server.command(config), nats / "look.log")
    await server.start()
    try:
        await nats_server.wait_healthy(monitor)
        async with Bus.connect(address, run, BlobStore(folder.path / "blobs"), name="look") as bus:
            return await bus.holds(mark.seq, mark.time)
    finally:
        await server.stop(_STOP)


def told(rewound: ev.JournalRewound) -> str:
    """What the run says about it."""
    aside = f"; set aside: {', '.join(rewound.checkpoints)}" if rewound.checkpoints else ""
    return (
        f"warning: the journal lost its end: it holds events to {rewound.kept}, the run had recorded up to {rewound.lost} at least. "
        f"What follows from the rest is recorded again, attempts without an outcome start a new life{aside}"
    )
