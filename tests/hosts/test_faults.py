"""Cables are pulled, hosts are stopped: every rank goes on right, or raises in time, says where, and ends."""

import itertools
import json
import os
import random
import signal
import statistics
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from namespaces import network as network_of

SERVER = Path(__file__).parent / "fault_ranks.py"
ROUNDS = int(os.environ.get("DIFFCOLL_FAULT_ROUNDS", "50"))
N = 3
#: The group's timeout, how long a fault lasts that is shorter, and the seconds that an error and the end may take more.
TIMEOUT, SHORT, MORE, ENDS = 3.0, 0.5, 5.0, 10.0
_ports = itertools.count(20000)


class Round:
    """One round: the outcome of each rank, the exit code, and when the fault came."""

    def __init__(self, outcomes, ended, fault):
        self.outcomes, self.ended, self.fault = outcomes, ended, fault


class Servers:
    """A server of ranks on each host of a network."""

    def __init__(self, network):
        self.network = network
        around = {"MASTER_ADDR": network.hosts[0].address}
        command = sys.executable, SERVER
        self.servers = [h.start(*command, stdin=-1, stderr=None, environment=around) for h in network.hosts]
        for server in self.servers:
            assert server.stdout.readline() == "ready\n"

    def play(self, kind, victim, fault, folder):
        port = next(_ports)
        for rank, server in enumerate(self.servers):
            given = {"kind": kind, "rank": rank, "size": N, "victim": victim, "folder": str(folder), "port": port}
            server.stdin.write(json.dumps({**given, "timeout": TIMEOUT}) + "\n")
            server.stdin.flush()
        end = time.monotonic() + 60
        while not (folder / "here").exists():
            early = [file.read_text() for file in folder.glob("outcome-*")]
            assert not early and time.monotonic() < end, early
            time.sleep(0.005)
        begin = time.monotonic()
        fault(self.network, self.network.hosts[victim], folder)
        ended = [json.loads(server.stdout.readline()) for server in self.servers]
        found = [folder / f"outcome-{rank}" for rank in range(N)]
        return Round([json.loads(f.read_text()) if f.exists() else None for f in found], ended, begin)


def go(folder):
    (folder / "go").touch()


def pulled(seconds):
    """Pull the victim's cable, for some seconds."""

    def fault(network, host, folder):
        network.pull(host)
        go(folder)
        time.sleep(seconds)
        network.plug(host)

    return fault


def stopped(seconds):
    """Stop all processes of the victim's host, for some seconds."""

    def fault(network, host, folder):
        host.signal(signal.SIGSTOP)
        go(folder)
        time.sleep(seconds)
        host.signal(signal.SIGCONT)

    return fault


def killed(network, host, folder):
    """Kill the rank on the victim's host."""
    server = next(pid for pid in host.processes() if _parent(pid) not in host.processes())
    os.kill(next(pid for pid in host.processes() if _parent(pid) == server), signal.SIGKILL)
    go(folder)


def _parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()[1])


FAULTS = {
    "cable out for good": pulled(TIMEOUT + MORE + 2),
    "cable out, longer than the timeout": pulled(TIMEOUT + 1.5),
    "cable out, shorter": pulled(SHORT),
    "host stopped, longer than the timeout": stopped(TIMEOUT + MORE + 2),
    "host stopped, shorter": stopped(SHORT),
    "killed": killed,
}
KINDS = {
    "making_a_group": "making a group",
    "forward": "all_gather, forward",
    "backward": "all_gather, backward (which is reduce_scatter)",
    "async_op": "all_reduce, forward",
    "ring": "shift, forward",  # a ring is made of shifts
    "checked": "all_gather",
    "averager": "GradientAverager, bucket",
}


@pytest.fixture
def servers():
    with network_of(N) as network:
        made = Servers(network)
        try:
            yield made
        finally:
            for server in made.servers:
                server.kill()
                server.communicate()


@contextmanager
def nothing_is_left(network):
    """In shared memory, and of processes, but for the servers."""
    before = {*os.listdir("/dev/shm")}, [host.processes() for host in network.hosts]
    yield
    assert ({*os.listdir("/dev/shm")}, [host.processes() for host in network.hosts]) == before


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault(servers, kind, fault, tmp_path_factory, record_property):
    rounds, chance = max(1, round(ROUNDS / len(KINDS))), random.Random(f"{kind}, {fault}")
    went_on, raised, to_the_end = 0, [], []
    for _ in range(rounds):
        victim = chance.randrange(N)
        with nothing_is_left(servers.network):
            played = servers.play(kind, victim, FAULTS[fault], tmp_path_factory.mktemp("round"))
        survivors = [r for r in range(N) if not (fault == "killed" and r == victim)]
        went_on += all(played.outcomes[r]["error"] is None for r in survivors)
        for r in survivors:
            outcome, ended = played.outcomes[r], played.ended[r]
            about = kind, fault, f"rank {r}, victim {victim}", outcome, ended
            assert outcome is not None and ended["code"] == 0, about
            assert outcome["kept"], about
            if outcome["error"] is None:
                assert "shorter" in fault and outcome["steps"] == 4, about
                continue
            assert "other" not in outcome, about
            assert outcome["error"].startswith(KINDS[kind]), about
            assert f"failed on rank {r} of a gloo group of 3 ranks" in outcome["error"], about
            if kind != "averager":
                assert "fault_ranks.py:" in outcome["error"], about
            else:
                assert not any(outcome["grad"]), about
            stops = r == victim and "host stopped" in fault
            if not stops:
                raised.append(outcome["raised"] - played.fault)
                # While PyTorch makes a group, gloo tries to connect five times as long, and waits for the store.
                assert raised[-1] < TIMEOUT * (5 if kind == "making_a_group" else 1) + MORE, about
            to_the_end.append(ended["ended"] - outcome["raised"])
            assert to_the_end[-1] < ENDS, about
    times = f"errors after {statistics.median(raised):.1f} s, at most {max(raised):.1f}; " if raised else ""
    times += f"ended {max(to_the_end):.1f} s later at most" if to_the_end else ""
    print(f"\n{fault}; {kind}: {rounds} rounds, {went_on} went on right; {times}")
