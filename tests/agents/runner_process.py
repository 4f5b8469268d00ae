"""A runner as a process of its own, for tests that kill it. Prints "up" when it has a command under way."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from pathlib import Path

from rl360.agents import runner
from rl360.bus.address import Addresses, Secrets
from rl360.bus.blobs import BlobStore
from rl360.bus.client import Bus, BusAddress
from rl360.bus.worker import WorkerContext
from rl360.config import parse


async def main(given: dict[str, str]) -> None:
    runner.ACK_WAIT = float(given["ack_wait"])  # type: ignore[misc]
    address = BusAddress(url=given["url"], user=given["user"], password=given["password"])
    async with Bus.connect(address, given["run"], BlobStore(Path(given["dir"]) / "blobs")) as bus:
        ctx = WorkerContext(
            kind="runner",
            index=int(given["index"]),
            config=parse(json.loads(given["config"])),
            dir=Path(given["dir"]),
            bus=bus,
            addresses=Addresses(nats=given["url"], sessions=(given["session"],)),
            secrets=Secrets(admin="admin-key"),
            stop=asyncio.Event(),
            log=logging.getLogger("runner"),
        )
        await runner.main(ctx)


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
