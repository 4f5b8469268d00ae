"""A run whose processes others start: its folder names every service as the others reach it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl360.cli import main
from rl360.config import ConfigError
from rl360.launch.rundir import Hosts, RunDir, cluster_addresses

ROOT = Path(__file__).parents[2]
RECIPE = str(ROOT / "recipes" / "chaos.toml")


def test_every_service_has_the_address_by_which_others_reach_it(tmp_path: Path) -> None:
    path = tmp_path / "run"
    assert (
        main(["cluster", "init", RECIPE, "--dir", str(path), "--nats-host", "n", "--session-host", "s-{}", "--set", "sessions.count=2"])
        == 0
    )
    addresses = RunDir(path).addresses
    assert (addresses.nats, addresses.gateway) == ("nats://n:4222", "http://gateway:30000")
    assert addresses.sessions == ("http://s-0:8080", "http://s-1:8080")
    conf = path / "nats" / "server.conf"
    assert 'listen: "0.0.0.0:4222"' in conf.read_text() and 'http: "127.0.0.1:8222"' in conf.read_text(), "the monitor has no password"
    assert conf.stat().st_mode & 0o077 == 0


def test_a_folder_that_is_there_is_gone_on_with_and_another_runs_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    init = ["cluster", "init", RECIPE, "--dir", str(tmp_path / "run")]
    assert main(init) == 0
    secrets = (tmp_path / "run" / "secrets.json").read_bytes()
    assert main(init) == 0
    assert (tmp_path / "run" / "secrets.json").read_bytes() == secrets
    assert main([*init, "--set", 'run.name="other"']) == 2
    assert "holds run 'chaos', not 'other'" in capsys.readouterr().err


def test_session_servers_that_would_share_an_address_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"2 session servers .* --session-host \"session-\{\}\""):
        cluster_addresses(Hosts(nats="n", gateway="g", session="session"), 2)


def test_a_folder_without_a_run_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("nats", "gateway", "lead"):
        assert main(["cluster", command, "--dir", str(tmp_path / "none")]) == 2
        assert f"{tmp_path / 'none'} is not the folder of a run" in capsys.readouterr().err
