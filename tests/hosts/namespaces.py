"""Hosts on one machine: network namespaces with addresses, interfaces and cables of their own, joined by a switch.

The switch is a namespace too, so nothing of the machine's own network is changed. All traffic stays between them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: Sets the host's name, which gloo resolves to find its address, and becomes the command.
_AS_HOST = 'hostname "$0" && exec "$@"'


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
        return [int(pid) for pid in ip("netns", "pids", self.namespace).split()]

    def signal(self, number: int) -> None:
        """Send a signal to all processes of this host."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def bytes_of(self, interface: str) -> int:
        """Return how many bytes an interface of this host has sent and received."""
        folder = f"/sys/class/net/{interface}/statistics"
        command = ["ip", "netns", "exec", self.namespace, "cat", f"{folder}/rx_bytes", f"{folder}/tx_bytes"]
        return sum(map(int, subprocess.run(command, capture_output=True, check=True, timeout=30).stdout.split()))

    def end(self) -> None:
        """End all processes of this host, and the host."""
        end = time.monotonic() + 10
        while self.processes() and time.monotonic() < end:
            self.signal(signal.SIGKILL)
            time.sleep(0.02)
        ip("netns", "del", self.namespace)
        shutil.rmtree(Path("/etc/netns", self.namespace), ignore_errors=True)


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

    def end(self) -> None:
        """End the hosts and their processes."""
        for host in self.hosts:
            host.end()
        ip("netns", "del", self.switch)


_count = iter(range(1_000_000))


@contextlib.contextmanager
def network(size: int = 3, **options: Any) -> Iterator[Network]:
    """Yield a network of hosts, and take it down."""
    made = Network(f"dc{os.getpid()}n{next(_count)}", size, **options)
    try:
        yield made
    finally:
        made.end()


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
