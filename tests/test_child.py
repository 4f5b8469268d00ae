"""A child never outlives who started it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

STARTS_A_CHILD = """
import asyncio, sys
from pathlib import Path
from rl360.child import Child
async def main():
    child = Child("sleeper", ["sleep", "300"], Path(sys.argv[1]))
    await child.start()
    print(child.pid, flush=True)
    await child.wait()
asyncio.run(main())
"""


def test_a_child_dies_with_who_started_it(tmp_path: Path) -> None:
    starter = subprocess.Popen([sys.executable, "-c", STARTS_A_CHILD, tmp_path / "log"], stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    child = os.pidfd_open(int(starter.stdout.readline()))
    starter.send_signal(signal.SIGKILL)
    starter.wait()
    starter.stdout.close()
    try:
        assert select.select([child], [], [], 10)[0], "it is still alive"
    finally:
        os.close(child)


def test_a_child_whose_starter_was_gone_before_it_could_ask_ends_at_once() -> None:
    code = f"from rl360.child import die_with; die_with({os.getpid()}); print('alive'); die_with(2**22 + 1); print('alive still')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    assert (done.stdout, done.returncode) == ("alive\n", 137)
