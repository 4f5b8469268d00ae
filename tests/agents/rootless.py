"""Run by a test as an ordinary user: the sandbox in a user namespace. Prints "done" when all holds."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from rl360.agents.sandbox.base import Limits, Sealed
from rl360.agents.sandbox.bwrap import BwrapSandbox
from rl360.agents.sandbox.host import detect
from rl360.agents.sandbox.leases import Lease


def main(place: Path) -> None:
    host = detect()
    assert not host.rooted
    lease = Lease(place / "sandboxes", "r0")
    sandbox = BwrapSandbox(
        host,
        lease,
        "s0",
        run="rootless",
        number=0,
        limits=Limits(memory_mb=256, storage_mb=16, pids=24, cpus=1.0),
        workdir="/app",
        files=None,
        files_size=0,
        env={},
        start_timeout=10.0,
    )
    crowd = [os.fork() or os.execv("/bin/sleep", ["sleep", "60"]) for _ in range(30)]  # more than the sandbox's limit
    try:
        sandbox.start()
        check(sandbox, place)
    finally:
        sandbox.close()
        for pid in crowd:
            os.kill(pid, 9)
    lease.release()
    print("done")


def check(sandbox: BwrapSandbox, place: Path) -> None:
    assert sandbox.exec("echo hi > a; cat a", 5).output == "hi\n"
    assert sandbox.exec("touch /usr/x", 5).status != 0
    assert sandbox.exec(f"ls {place}", 5).status != 0
    assert sandbox.exec("grep CapEff /proc/self/status", 5).output.split()[1] == "0" * 16
    assert sandbox.exec("grep NoNewPrivs /proc/self/status", 5).output.split()[1] == "1"
    with sandbox.listen() as listener:
        listener.settimeout(10)
        sandbox.exec(f"echo hi > /dev/tcp/127.0.0.1/{listener.getsockname()[1]}", 5)
        with listener.accept()[0] as connection:
            assert connection.recv(3) == b"hi\n"
    assert sandbox.exec("touch /dev/x; echo hi > /dev/null", 5).output.endswith("Read-only file system\n")
    for folder in ("/tmp", "/root", "/dev/shm", "/logs"):
        assert "No space left" in sandbox.exec(f"cd {folder} && seq 20000 | xargs touch", 10).output, folder
    assert "No space left" in sandbox.exec("head -c 20000000 /dev/zero > big; rm big", 5).output
    sandbox.exec("kill -9 -1; kill -9 1", 5)
    sandbox.exec("bomb() { bomb | bomb & }; bomb; sleep 0.2", 2)
    sandbox.exec("(setsid sleep 60 >/dev/null 2>&1 &)", 5)
    sandbox.kill_all()
    logs = sandbox.root / "verifier"
    logs.mkdir()
    tests = place / "tests"
    tests.mkdir()
    (tests / "test.sh").write_text("cat /app/a; cat /proc/[0-9]*/comm; echo 1 > /logs/verifier/reward.txt\n")
    run = Sealed(argv=("/bin/bash", "/tests/test.sh"), read_only={"/tests": tests}, writable={"/logs/verifier": logs})
    assert "sleep" not in sandbox.run_sealed(run, 5).output
    assert (logs / "reward.txt").read_text() == "1\n"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
