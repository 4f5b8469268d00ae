"""Publish and consume rates of the bus beside nats-py's own calls, in one process against one real nats-server.

    python bench/bus.py [--json] [--events N]

Rates are events a second of wall-clock; each pair is measured A B A B and the medians' ratio is given.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import nats

from rl360.bus import events as ev
from rl360.bus import nats_server, subjects
from rl360.bus.blobs import BlobStore
from rl360.bus.client import Bus, BusAddress
from rl360.bus.codec import encode
from rl360.child import Child
from rl360.ports import free_ports

RUN = "bench"


def event(i: int) -> ev.RolloutPhase:
    """An event of a usual size (about 200 bytes)."""
    return ev.RolloutPhase(
        run=RUN,
        step=i % 50,
        attempt=f"t0-g000-a{i}",
        group=i % 32,
        session=f"t0-g000-a{i}.1",
        phase=ev.Phase.AGENT,
        start=float(i),
        node="bench",
    )


async def timed(work: Callable[[], Awaitable[object]], n: int) -> float:
    start = time.perf_counter()
    await work()
    return n / (time.perf_counter() - start)


async def publish_ours(bus: Bus, first: int, n: int) -> None:
    receipts = [await bus.submit(event(i)) for i in range(first, first + n)]
    await asyncio.gather(*receipts)


async def publish_theirs(js: nats.js.JetStreamContext, first: int, n: int) -> None:
    for i in range(first, first + n):
        e = event(i)
        await js.publish_async(subjects.subject(e), encode(e), headers={"Nats-Msg-Id": subjects.msg_id(e)})
    await js.publish_async_completed()


async def consume_ours(bus: Bus, durable: str, n: int) -> None:
    async with bus.consume(durable, [ev.RolloutPhase], ack_wait=30, max_deliver=3, max_in_flight=4096, batch=256) as share:
        for _ in range(n):
            delivery = await share.next(10)
            assert delivery is not None
            await delivery.ack()


async def consume_theirs(js: nats.js.JetStreamContext, durable: str, n: int) -> None:
    config = nats.js.api.ConsumerConfig(max_ack_pending=4096)
    subscription = await js.pull_subscribe(f"rl360.{RUN}.ev.>", durable, stream=subjects.stream(RUN), config=config)
    seen = 0
    while seen < n:
        for msg in await subscription.fetch(256, timeout=10):
            await msg.ack()
            seen += 1


async def measure(bus: Bus, n: int) -> dict[str, float]:
    js = bus.client.jetstream(publish_async_max_pending=1024)
    rates: dict[str, list[float]] = {k: [] for k in ("publish", "publish_nats_py", "consume", "consume_nats_py")}
    for i in range(2):
        first = 2 * i * n
        rates["publish"].append(await timed(lambda f=first: publish_ours(bus, f, n), n))
        rates["publish_nats_py"].append(await timed(lambda f=first + n: publish_theirs(js, f, n), n))
    for i in range(2):
        rates["consume"].append(await timed(lambda i=i: consume_ours(bus, f"ours{i}", n), n))
        rates["consume_nats_py"].append(await timed(lambda i=i: consume_theirs(js, f"theirs{i}", n), n))
    found = {k: statistics.median(v) for k, v in rates.items()}
    found["publish_vs_nats_py"] = found["publish"] / found["publish_nats_py"]
    found["consume_vs_nats_py"] = found["consume"] / found["consume_nats_py"]
    return found


async def main(n: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as tmp:
        root = Path(tmp)
        port, monitor = free_ports(2)
        password = secrets.token_hex(8)
        config = root / "server.conf"
        passwords = {nats_server.ADMIN: password}
        text = nats_server.config_text(run=RUN, store=root / "store", port=port, monitor_port=monitor, passwords=passwords)
        nats_server.write_config(config, text)
        server = Child("nats-server", nats_server.command(config), root / "log")
        await server.start()
        try:
            await nats_server.wait_healthy(monitor)
            address = BusAddress(url=f"nats://127.0.0.1:{port}", user=nats_server.ADMIN, password=password)
            async with Bus.connect(address, RUN, BlobStore(root / "blobs")) as bus:
                await bus.create_streams()
                return await measure(bus, n)
        finally:
            await server.stop(5)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--events", type=int, default=5000)
    arguments = parser.parse_args()
    result = asyncio.run(main(arguments.events))
    for key, value in result.items():
        print(f"{key:24} {value:12.2f}" + (" x" if "_vs_" in key else " events/s"))
    if arguments.json:
        print(json.dumps(result))
