"""Whether other hosts can connect to gloo; the hosts themselves are in tests/hosts."""

import socket

import pytest
from runs import refusal

from diffcoll.cli import launch


@pytest.fixture
def means(monkeypatch):
    """Let the host's name mean these addresses."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(socket, "gethostname", lambda: "node0")

    def means(*addresses):
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(None,) * 4 + ((a, 0),) for a in addresses])
        monkeypatch.setattr(launch, "_is_of_this_host", lambda a: not a.startswith("203.0.113."))

    return means


@pytest.mark.parametrize(
    ("addresses", "reason"),
    [
        (["127.0.1.1", "192.0.2.1"], "the host name 'node0' means 127.0.1.1"),
        (["203.0.113.9", "::1"], "the host name 'node0' means ::1"),
        (["203.0.113.9"], "the host name 'node0' means no address of this host"),
        (["203.0.113.9", "192.0.2.1", "127.0.1.1"], ""),
        (["fe80::1%eth0"], ""),
    ],
)
def test_unreachable(means, addresses, reason):
    means(*addresses)
    assert launch.unreachable() == reason


def test_a_named_interface_is_the_users(means, monkeypatch):
    means("127.0.1.1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    assert launch.unreachable() == ""


def test_one_host_has_no_others(means, monkeypatch):
    means("127.0.1.1")
    made = []
    monkeypatch.setattr(launch.dist, "init_process_group", made.append)
    monkeypatch.setenv("WORLD_SIZE", "2")
    launch.gloo_on_hosts("gloo")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    launch.gloo_on_hosts("gloo")
    assert made == ["gloo"] * 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    text = refusal(launch.UnreachableError, launch.gloo_on_hosts, "gloo")
    assert text.startswith("gloo on several hosts: the host name 'node0' means 127.0.1.1, where the other hosts cannot")
    assert "set GLOO_SOCKET_IFNAME on each host" in text
    assert len(made) == 2


def test_the_addresses_of_this_host():
    assert launch._is_of_this_host("127.0.0.1")
    assert not launch._is_of_this_host("203.0.113.9")  # of documentation
