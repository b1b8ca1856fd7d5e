"""Hosts on one machine: network namespaces with a name, an address and a cable each, joined by a switch.

The switch is a namespace too, so nothing of the machine's own network is changed. All traffic stays between them.
They need root and iproute2: the tests run if they are named, `pytest tests/hosts`; one run at a time.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

collect_ignore = ["rank_of_a_host.py"]
#: Sets the host's name, which gloo resolves to find its address, and becomes the command.
AS_HOST = 'hostname "$0" && exec "$@"'
SWITCH = "diffcoll-switch"


def pytest_ignore_collect(config):
    return None if any("tests/hosts" in argument for argument in config.args) else True


def ip(*words):
    """Run a command of iproute2; return what it prints."""
    done = subprocess.run(["ip", *map(str, words)], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, f"ip {' '.join(map(str, words))}: {done.stderr}"
    return done.stdout


class Host:
    """One host, `node0`, …, which has a port of its name at the switch; every host knows the names of all."""

    def __init__(self, r):
        self.name, self.namespace, self.address = f"node{r}", f"diffcoll-node{r}", f"10.77.0.{r + 1}"

    def connect(self):
        """Make the host, with a cable to the switch."""
        ip("netns", "add", self.namespace)
        peer = "peer", "name", "eth0", "netns", self.namespace
        ip("-n", SWITCH, "link", "add", self.name, "type", "veth", *peer)
        ip("-n", SWITCH, "link", "set", self.name, "master", "lan", "up")
        ip("-n", self.namespace, "addr", "add", f"{self.address}/24", "dev", "eth0")
        for interface in ("lo", "eth0"):
            ip("-n", self.namespace, "link", "set", interface, "up")

    def pull(self):
        """Pull the cable out of the switch."""
        ip("-n", SWITCH, "link", "set", self.name, "down")

    def start(self, *command, environment):
        """Start a process on this host."""
        within = ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "sh", "-c", AS_HOST, self.name]
        around = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        return subprocess.Popen([*within, *map(str, command)], stdout=-1, stderr=-1, text=True, env=around)


def end(hosts):
    """End the processes of the hosts and the switch, and remove them, as far as they are there."""
    there = {line.split()[0] for line in ip("netns", "list").splitlines()}
    for namespace in there & {SWITCH, *(host.namespace for host in hosts)}:
        while pids := ip("netns", "pids", namespace).split():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            time.sleep(0.02)
        ip("netns", "del", namespace)
        shutil.rmtree(Path("/etc/netns", namespace), ignore_errors=True)


@pytest.fixture
def hosts():
    """Three hosts; those of an earlier run are ended first."""
    hosts = [Host(r) for r in range(3)]
    end(hosts)
    try:
        ip("netns", "add", SWITCH)
        ip("-n", SWITCH, "link", "add", "lan", "type", "bridge", "forward_delay", 0)
        ip("-n", SWITCH, "link", "set", "lan", "up")
        names = "\n".join(f"{host.address} {host.name}" for host in hosts)
        for host in hosts:
            folder = Path("/etc/netns", host.namespace)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}\n", encoding="utf-8")
            host.connect()
        yield hosts
    finally:
        end(hosts)
