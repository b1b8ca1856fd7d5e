"""Hosts on one machine: network namespaces with addresses, interfaces and cables of their own, joined by a switch.

The switch is a namespace too, so nothing of the machine's own network is changed. All traffic stays between them.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: Sets the host's name, which gloo resolves to find its address, mounts shared memory of its own, and becomes the
#: command.
_AS_HOST = 'hostname "$0" && mount -t tmpfs tmpfs /dev/shm && exec "$@"'


def ip(*words: object) -> str:
    """Run a command of iproute2; return what it prints."""
    done = subprocess.run(["ip", *map(str, words)], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, f"ip {' '.join(map(str, words))}: {done.stderr}"
    return done.stdout


def missing() -> str | None:
    """Return what this machine lacks for hosts of its own; None if nothing."""
    if not (shutil.which("ip") and shutil.which("unshare")):
        return "ip (iproute2) and unshare (util-linux) are not installed"
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"dc{os.getpid()}try"
    try:
        ip("netns", "add", name)
        ip("netns", "del", name)
    except AssertionError as error:
        return str(error)
    return None


class Host:
    """One host. Its name is `node0`, …; every host knows the names of all."""

    def __init__(self, namespace: str, name: str, address: str) -> None:
        self.namespace, self.name, self.address = namespace, name, address
        ip("netns", "add", namespace)
        self.ip("link", "set", "lo", "up")

    def ip(self, *words: object) -> str:
        """Run a command of iproute2 in this host."""
        return ip("-n", self.namespace, *words)

    def start(self, *command: object, environment: dict[str, str] | None = None, **more: Any) -> subprocess.Popen[str]:
        """Start a process on this host."""
        within = ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "sh", "-c", _AS_HOST, self.name]
        around = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **more}
        return subprocess.Popen([*within, *map(str, command)], env=around, start_new_session=True, **streams)

    def processes(self) -> list[int]:
        """Return the ids of all processes of this host."""
        return _processes(self.namespace)

    def signal(self, number: int) -> None:
        """Send a signal to all processes of this host."""
        _signal(self.namespace, number)

    def bytes_of(self, interface: str) -> int:
        """Return how many bytes an interface of this host has sent and received."""
        folder = f"/sys/class/net/{interface}/statistics"
        command = ["ip", "netns", "exec", self.namespace, "cat", f"{folder}/rx_bytes", f"{folder}/tx_bytes"]
        return sum(map(int, subprocess.run(command, capture_output=True, check=True, timeout=30).stdout.split()))

    def end(self) -> None:
        """End all processes of this host, and the host."""
        _end(self.namespace)


class Network:
    """Some hosts, with a cable from each to the switch."""

    def __init__(self, tag: str, size: int, *, ipv6: bool = False) -> None:
        address = "fd77::{}" if ipv6 else "10.77.0.{}"
        self.tag, self.ipv6 = tag, ipv6
        ip("netns", "add", self.switch)
        self.hosts = [Host(f"{tag}h{r}", f"node{r}", address.format(r + 1)) for r in range(size)]
        self.resolve({host.name: host.address for host in self.hosts})
        self.connect("lan", {host: "eth0" for host in self.hosts}, {host: host.address for host in self.hosts})

    @property
    def switch(self) -> str:
        """The namespace of the switch."""
        return f"{self.tag}sw"

    def connect(self, name: str, interfaces: dict[Host, str], addresses: dict[Host, str]) -> None:
        """Connect hosts by a network of this name, with an interface and an address each."""
        ip("-n", self.switch, "link", "add", name, "type", "bridge", "forward_delay", 0)
        ip("-n", self.switch, "link", "set", name, "up")
        for host, interface in interfaces.items():
            port = f"{name}{self.hosts.index(host)}"
            peer = "peer", "name", interface, "netns", host.namespace
            ip("-n", self.switch, "link", "add", port, "type", "veth", *peer)
            ip("-n", self.switch, "link", "set", port, "master", name, "up")
            size, more = (64, ["nodad"]) if ":" in addresses[host] else (24, [])
            host.ip("addr", "add", f"{addresses[host]}/{size}", "dev", interface, *more)
            host.ip("link", "set", interface, "up")

    def resolve(self, names: dict[str, str], *, on: Host | None = None) -> None:
        """Let host names mean these addresses, on one host or on all."""
        for host in self.hosts if on is None else [on]:
            lines = ["127.0.0.1 localhost", "::1 localhost", *(f"{at} {name}" for name, at in names.items())]
            folder = Path("/etc/netns", host.namespace)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "hosts").write_text("\n".join(lines) + "\n", encoding="utf-8")

    def pull(self, host: Host, name: str = "lan") -> None:
        """Pull a host's cable out of the switch."""
        ip("-n", self.switch, "link", "set", f"{name}{self.hosts.index(host)}", "down")

    def plug(self, host: Host, name: str = "lan") -> None:
        """Put a host's cable back."""
        ip("-n", self.switch, "link", "set", f"{name}{self.hosts.index(host)}", "up")


_count = iter(range(1_000_000))


@contextlib.contextmanager
def network(size: int = 3, **options: Any) -> Iterator[Network]:
    """Yield a network of hosts; end it, and their processes."""
    tag = f"dc{os.getpid()}n{next(_count)}"
    try:
        yield Network(tag, size, **options)
    finally:
        for namespace in _namespaces(rf"{tag}(h\d+|sw)"):
            _end(namespace)


def end_those_left() -> None:
    """End the hosts of runs that were killed, and their processes."""
    for namespace in _namespaces(r"dc\d+(n\d+(h\d+|sw)|try)"):
        pid = re.findall(r"\d+", namespace)[0]
        if not Path("/proc", pid).exists():
            _end(namespace)


def _namespaces(pattern: str) -> list[str]:
    """Return the names of namespaces that match."""
    names = (line.split()[0] for line in ip("netns", "list").splitlines())
    return [name for name in names if re.fullmatch(pattern, name)]


def _processes(namespace: str) -> list[int]:
    return [int(pid) for pid in ip("netns", "pids", namespace).split()]


def _signal(namespace: str, number: int) -> None:
    for pid in _processes(namespace):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _end(namespace: str) -> None:
    end = time.monotonic() + 10
    while _processes(namespace) and time.monotonic() < end:
        _signal(namespace, signal.SIGKILL)
        time.sleep(0.02)
    ip("netns", "del", namespace)
    shutil.rmtree(Path("/etc/netns", namespace), ignore_errors=True)


def ends(processes: list[subprocess.Popen[str]], timeout: float) -> list[tuple[int, str, str]]:
    """Wait for processes; return (exit code, stdout, stderr) of each. Kill those that take longer."""
    end, found = time.monotonic() + timeout, []
    for process in processes:
        try:
            out, err = process.communicate(timeout=max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            for other in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(other.pid, signal.SIGKILL)
            out, err = process.communicate()
            err += f"\nkilled after {timeout} s"
        found.append((process.returncode, out, err))
    return found
