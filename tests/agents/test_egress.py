"""The proxy of a sandbox with an allowlist: what it passes on byte for byte, what it refuses and counts, and how it ends."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from rl360.agents.sandbox.egress import CONNECTIONS, Egress, reachable
from rl360.agents.verify import verify
from tests.agents.conftest import Sandboxes
from tests.agents.harbor import make_task

ALLOWLIST = "network_mode = 'allowlist'\nallowed_hosts = ['good.test']\n"


class Origin:
    """Answers each connection with its own head and keeps what it was sent."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.got: list[bytes] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                link, _ = self._listener.accept()
                with link:
                    self.got.append(link.recv(65536))
                    link.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + b"\0\xff" * 200_000)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(5)


async def _names(host: str, port: int) -> Sequence[str]:
    known = {"good.test": ["127.0.0.1"], "inner.test": ["10.0.0.1", "::1"]}
    if host not in known:
        raise socket.gaierror(f"no address of {host}")
    return known[host]


@pytest.fixture
def origin() -> Iterator[Origin]:
    made = Origin()
    yield made
    made.close()


@pytest.fixture
def egress() -> Iterator[Egress]:
    made = proxy()
    yield made
    made.close()


def proxy() -> Egress:
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    return Egress(listener, ["good.test", "inner.test", "*.gone.test"], "s0", resolve=_names, reachable=lambda a: a == "127.0.0.1")


def ask(egress: Egress, data: bytes, then: bytes = b"") -> bytes:
    with socket.create_connection(egress._listener.getsockname(), 10) as link:
        link.sendall(data)
        got = link.recv(65536)
        if then:
            link.sendall(then)
        while more := link.recv(65536):
            got += more
    return got


def test_a_request_goes_to_the_host_that_its_url_names_and_its_answer_comes_back(egress: Egress, origin: Origin) -> None:
    got = ask(egress, f"GET http://good.test:{origin.port}/a?b HTTP/1.1\r\nHost: other.test\r\nProxy-Authorization: x\r\n\r\n".encode())
    assert got == b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + b"\0\xff" * 200_000
    assert origin.got == [f"GET /a?b HTTP/1.1\r\nHost: good.test:{origin.port}\r\nConnection: close\r\n\r\n".encode()]


def test_a_tunnel_is_byte_for_byte(egress: Egress, origin: Origin) -> None:
    got = ask(egress, f"CONNECT good.test:{origin.port} HTTP/1.1\r\n\r\n".encode(), b"\x16\x03\0any bytes")
    assert got.startswith(b"HTTP/1.1 200 Connection established\r\n\r\n")
    assert got.endswith(b"\0\xff" * 200_000)
    assert origin.got == [b"\x16\x03\0any bytes"]


@pytest.mark.parametrize(
    ("request_line", "status", "says"),
    [
        ("CONNECT bad.test:443 HTTP/1.1", 403, "add it to task.toml"),
        ("GET http://bad.test/ HTTP/1.1", 403, "allowed_hosts"),
        ("CONNECT 127.0.0.1:4222 HTTP/1.1", 403, "allowed_hosts"),
        ("CONNECT inner.test:80 HTTP/1.1", 403, "private network"),
        ("CONNECT x.gone.test:80 HTTP/1.1", 502, "no address"),
        ("CONNECT good.test:1 HTTP/1.1", 502, "can't be reached"),
        ("CONNECT good.test HTTP/1.1", 400, "HOST:PORT"),
        ("GET https://good.test/ HTTP/1.1", 400, "CONNECT"),
        ("GET / HTTP/1.1", 400, "http://"),
        ("nonsense", 400, "proxy"),
    ],
)
def test_what_is_not_let_through_says_why(egress: Egress, request_line: str, status: int, says: str) -> None:
    got = ask(egress, f"{request_line}\r\nHost: good.test\r\n\r\n".encode()).decode()
    assert got.startswith(f"HTTP/1.1 {status} ")
    assert says in got.partition("\r\n\r\n")[2]
    assert egress.refused.total() == (status == 403)


def test_refused_hosts_are_logged_once_each_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    egress = proxy()
    with caplog.at_level(logging.WARNING):
        for n in range(60):
            for _ in range(2):
                ask(egress, f"CONNECT h{n}.test:443 HTTP/1.1\r\n\r\n".encode())
        egress.close()
        egress.close()
    assert (egress.refused.total(), egress.refused["h0.test"], egress.refused["others"]) == (120, 2, 20)
    assert [r.message for r in caplog.records].count("sandbox s0: 'h0.test': refused: not allowed") == 1
    assert caplog.records[-1].message == "sandbox s0: 120 requests to hosts that it may not reach were refused"
    assert len(caplog.records) == 51


def test_closing_ends_every_connection_and_a_flood_of_them_holds_few(egress: Egress) -> None:
    links = [socket.create_connection(egress._listener.getsockname(), 10) for _ in range(CONNECTIONS + 20)]
    egress.close()
    for link in links:
        with link, contextlib.suppress(ConnectionResetError):
            assert link.recv(1) == b""
    assert len(egress._held) <= CONNECTIONS


def test_this_machine_is_never_reachable_whatever_its_address() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        with contextlib.suppress(OSError):
            probe.connect(("8.8.8.8", 9))
        own = probe.getsockname()[0]
    assert not any(map(reachable, ("127.0.0.1", "::1", "169.254.169.254", "10.1.2.3", own)))
    assert reachable("8.8.8.8")


INSIDE = """
import os, urllib.request, urllib.error
print(os.environ["NO_PROXY"])
try:
    urllib.request.urlopen("http://bad.test/", timeout=15)
except urllib.error.HTTPError as e:
    print(e.code, e.read().decode().strip())
"""
TEST = """for try in 1 2; do (exec 3<>/dev/tcp/127.0.0.1/${https_proxy##*:}) || exit; done
python3 /app/agent.py > out; grep -c 403 out > /logs/verifier/reward.txt
"""


def test_a_sandbox_with_an_allowlist_has_the_proxy_and_nothing_else_and_so_has_its_verifier(sandboxes: Sandboxes, tmp_path: Path) -> None:
    task = make_task(tmp_path / "t", test=TEST, files={"agent.py": INSIDE}, toml=f"[environment]\n{ALLOWLIST}")
    sandbox = sandboxes.start(task)
    assert sandbox.exec("python3 agent.py; grep -c : /proc/net/dev", 30).output.splitlines() == [
        "localhost,127.0.0.1,::1",
        "403 bad.test is not in the task's allowed_hosts; add it to task.toml if the task needs it",
        "1",
    ]
    assert verify(sandbox, task, sandboxes.stage.get(task), started=time.time(), timeout=20).reward == 1.0
