"""Hosts on one machine: network namespaces with a name, an address and a cable each, joined by a switch.

The switch is a namespace too, so nothing of the machine's own network is changed. All traffic stays between them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

#: Sets the host's name, which gloo resolves to find its address, and becomes the command.
_AS_HOST = 'hostname "$0" && exec "$@"'
_SWITCH = "diffcoll-switch"


def ip(*words: object) -> str:
    """Run a command of iproute2; return what it prints."""
    done = subprocess.run(["ip", *map(str, words)], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, f"ip {' '.join(map(str, words))}: {done.stderr}"
    return done.stdout


class Host:
    """One host, `node0`, …; every host knows the names of all."""

    def __init__(self, r: int) -> None:
        self.name, self.namespace, self.address = f"node{r}", f"diffcoll-node{r}", f"10.77.0.{r + 1}"
        self.port = f"port{r}"

    def connect(self) -> None:
        """Make the host, with a cable to the switch."""
        ip("netns", "add", self.namespace)
        peer = "peer", "name", "eth0", "netns", self.namespace
        ip("-n", _SWITCH, "link", "add", self.port, "type", "veth", *peer)
        ip("-n", _SWITCH, "link", "set", self.port, "master", "lan", "up")
        ip("-n", self.namespace, "addr", "add", f"{self.address}/24", "dev", "eth0")
        for interface in ("lo", "eth0"):
            ip("-n", self.namespace, "link", "set", interface, "up")

    def pull(self) -> None:
        """Pull the cable out of the switch."""
        ip("-n", _SWITCH, "link", "set", self.port, "down")

    def start(self, *command: object, environment: dict[str, str]) -> subprocess.Popen[str]:
        """Start a process on this host."""
        within = ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "sh", "-c", _AS_HOST, self.name]
        around: dict[str, Any] = {"env": {**os.environ, "OMP_NUM_THREADS": "1", **environment}}
        return subprocess.Popen([*within, *map(str, command)], stdout=-1, stderr=-1, text=True, **around)


class Network:
    """A context with some hosts. It ends those of an earlier run first; one run at a time."""

    def __init__(self, size: int) -> None:
        self.hosts = [Host(r) for r in range(size)]

    def __enter__(self) -> Network:
        self.__exit__()
        ip("netns", "add", _SWITCH)
        ip("-n", _SWITCH, "link", "add", "lan", "type", "bridge", "forward_delay", 0)
        ip("-n", _SWITCH, "link", "set", "lan", "up")
        names = "\n".join(f"{host.address} {host.name}" for host in self.hosts)
        for host in self.hosts:
            folder = Path("/etc/netns", host.namespace)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}\n", encoding="utf-8")
            host.connect()
        return self

    def __exit__(self, *_: object) -> None:
        there = {line.split()[0] for line in ip("netns", "list").splitlines()}
        for namespace in there & {_SWITCH, *(host.namespace for host in self.hosts)}:
            while pids := ip("netns", "pids", namespace).split():
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
                time.sleep(0.02)
            ip("netns", "del", namespace)
            shutil.rmtree(Path("/etc/netns", namespace), ignore_errors=True)
