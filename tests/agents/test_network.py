"""Which hosts an allowlist lets through, and which addresses none does."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl360.agents.network import allows, normalised, private, proxy_env, public

NOT_PUBLIC = ["0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.168.0.0/16", "224.0.0.0/4"]
inside = st.sampled_from(NOT_PUBLIC).flatmap(lambda text: st.ip_addresses(v=4, network=ip_network(text)))


@given(inside)
def test_an_address_that_is_not_the_internets_is_never_public_however_it_is_written(address: IPv4Address) -> None:
    number = int(address)
    for written in (
        str(address),
        str(IPv6Address((0xFFFF << 32) | number)),
        str(IPv6Address((0x2002 << 112) | (number << 80) | 1)),
        f"64:ff9b::{address}",
    ):
        assert not public(written)


@pytest.mark.parametrize("address", ["::1", "::", "fe80::1%eth0", "fd00::1", "ff02::1"])
def test_addresses_of_version_6_that_are_not_the_internets(address: str) -> None:
    assert not public(address)


@pytest.mark.parametrize(
    ("entry", "host", "let_through"),
    [
        ("pypi.org", "PyPI.org.", True),
        ("pypi.org", "files.pypi.org", False),
        ("pypi.org", "notpypi.org", False),
        ("*.pypi.org", "a.b.pypi.org", True),
        ("*.pypi.org", "pypi.org", False),
        ("*.pypi.org", "evilpypi.org", False),
        ("*.pypi.org", "pypi.org.evil.net", False),
        ("8.8.8.0/24", "8.8.8.8", True),
        ("8.8.8.0/24", "8.8.9.8", False),
        ("8.8.8.8", "8.8.8.8", True),
        ("2001:4860::8888", "2001:4860:0::8888", True),
        ("8.8.8.8", "134744072", False),
    ],
)
def test_a_host_is_let_through_by_its_whole_name_or_what_is_below_a_wildcard(entry: str, host: str, let_through: bool) -> None:
    assert allows([normalised(entry)], host) is let_through


@given(st.lists(st.sampled_from(["a.org", "*.b.org", "8.8.8.0/24"])), st.from_regex(r"[a-z]{1,8}(\.[a-z]{1,8}){0,2}", fullmatch=True))
def test_nothing_is_let_through_that_no_entry_names(entries: list[str], host: str) -> None:
    assert allows(entries, host) == (("a.org" in entries and host == "a.org") or ("*.b.org" in entries and host.endswith(".b.org")))


@pytest.mark.parametrize(
    "entry", ["", "*", "*.", "a.*.org", "https://a.org", "a.org:443", "a.org/x", "*.8.8.8.8", "[::1]", "a_b.org", "8.8.8.8/8"]
)
def test_an_entry_that_is_none_is_told(entry: str) -> None:
    with pytest.raises(ValueError, match="host name"):
        normalised(entry)


def test_an_entry_that_names_private_addresses_alone_is_private() -> None:
    assert [e for e in ("localhost", "127.0.0.1", "10.0.0.0/8", "fd00::/8", "8.8.8.8", "a.org") if private(e)] == [
        "localhost",
        "127.0.0.1",
        "10.0.0.0/8",
        "fd00::/8",
    ]


def test_programs_are_told_of_the_proxy_in_both_spellings_and_never_use_it_for_the_session() -> None:
    env = proxy_env(3128)
    assert {env[n] for n in ("HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "http_proxy")} == {"http://127.0.0.1:3128"}
    assert "127.0.0.1" in env["NO_PROXY"] == env["no_proxy"]
