"""Cables are pulled, hosts are stopped: every rank goes on right, or raises in time, says where, and ends."""

import itertools
import json
import os
import random
import re
import select
import signal
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from namespaces import network as network_of

SERVER = Path(__file__).parent / "fault_ranks.py"
ROUNDS = int(os.environ.get("DIFFCOLL_FAULT_ROUNDS", "50"))
N = 3
#: The group's timeout, how long a fault lasts that is shorter, and the seconds that an error and the end may take more.
TIMEOUT, SHORT, MORE, ENDS = 3.0, 0.5, 5.0, 10.0
LIMIT = 60
_ports = itertools.count(20000)


@dataclass
class Fault:
    """What happens to a host, for some seconds, or until all ranks that can end have ended (None)."""

    begin: Callable
    end: Callable
    seconds: float | None

    @property
    def is_short(self):
        return self.seconds == SHORT


@dataclass
class Round:
    """One round: the outcome of each rank, how it ended, and when the fault came."""

    outcomes: list
    ended: list
    fault: float


class Servers:
    """A server of ranks on each host of a network."""

    def __init__(self, network):
        self.network = network
        around = {"MASTER_ADDR": network.hosts[0].address}
        command = sys.executable, SERVER
        self.servers = [h.start(*command, stdin=-1, stderr=None, environment=around) for h in network.hosts]
        for server in self.servers:
            assert server.stdout.readline() == "ready\n"

    def play(self, kind, fault, victim, step, place, folder, delay):
        """Run a round; if the ranks go on, the fault comes after a delay."""
        given = {"kind": kind, "size": N, "victim": victim, "step": step, "place": place, "folder": str(folder)}
        given |= {"port": next(_ports), "timeout": TIMEOUT}
        for rank, server in enumerate(self.servers):
            server.stdin.write(json.dumps({**given, "rank": rank}) + "\n")
            server.stdin.flush()
        end = time.monotonic() + 60
        while not (folder / "here").exists():
            early = [file.read_text() for file in folder.glob("outcome-*")]
            assert not early and time.monotonic() < end, early
            time.sleep(0.005)
        time.sleep(delay)
        begin = time.monotonic()
        host, ended = self.network.hosts[victim], [None] * N
        fault.begin(self.network, host)
        (folder / "go").touch()
        if fault.seconds is None:
            for r in range(N):
                if r != victim or fault.begin is pull:  # a process that is stopped cannot end
                    ended[r] = self.how_it_ended(r)
        else:
            time.sleep(fault.seconds)
        fault.end(self.network, host)
        if fault.is_short:
            finish(folder)
        ended = [how or self.how_it_ended(r) for r, how in enumerate(ended)]
        found = [folder / f"outcome-{r}" for r in range(N)]
        return Round([json.loads(f.read_text()) if f.exists() else None for f in found], ended, begin)

    def how_it_ended(self, rank):
        ready, _, _ = select.select([self.servers[rank].stdout], [], [], LIMIT)
        assert ready, f"rank {rank} has not ended"
        return json.loads(self.servers[rank].stdout.readline())


def finish(folder):
    """Let ranks that go on make their last steps, which none of them has reached."""
    at = [int(file.read_text() or 0) for file in folder.glob("step-*")]
    (folder / "new").write_text(str(max(at, default=0) + 100))
    (folder / "new").replace(folder / "last")


def pull(network, host):
    network.pull(host)


def plug(network, host):
    network.plug(host)


def stop(network, host):
    host.signal(signal.SIGSTOP)


def go_on(network, host):
    host.signal(signal.SIGCONT)


def kill(network, host):
    """Kill the rank on this host."""
    server = next(pid for pid in host.processes() if _parent(pid) not in host.processes())
    os.kill(next(pid for pid in host.processes() if _parent(pid) == server), signal.SIGKILL)


def nothing(network, host):
    pass


def _parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()[1])


FAULTS = {
    "cable out for good": Fault(pull, plug, None),
    "cable out, longer than the timeout": Fault(pull, plug, TIMEOUT + 3),
    "cable out, shorter": Fault(pull, plug, SHORT),
    "host stopped, longer than the timeout": Fault(stop, go_on, None),
    "host stopped, shorter": Fault(stop, go_on, SHORT),
    "killed": Fault(kill, nothing, 0),
}
KINDS = {
    "making_a_group": "making a group",
    "forward": "all_gather, forward",
    "backward": "all_gather, backward (which is reduce_scatter)",
    "async_op": "all_reduce, forward",
    "ring": ("all_gather, forward", "shift, forward"),  # of sizes and blocks
    "checked": "all_gather",
    "averager": ("GradientAverager, bucket", "GradientAverager, the note"),
}
#: What an error begins with where the fault comes after the call, which then fails in another message.
AFTER = {
    "making_a_group": ("making a group", "GradientAverager, forward", "broadcast, forward"),
    "backward": ("all_gather, ",),
    "checked": ("all_gather", "check_mode, forward"),
    "averager": ("GradientAverager, ",),
}
PLACES = "before", "after", "running"


@pytest.fixture
def servers():
    with network_of(N) as network:
        made = Servers(network)
        try:
            yield made
        finally:
            for host, server in zip(network.hosts, made.servers, strict=True):
                host.signal(signal.SIGKILL)  # ranks that hang hold the server's pipes
                server.communicate()


@contextmanager
def nothing_is_left(network):
    """In the hosts' shared memory, and of processes, but for the servers."""
    before = [host.processes() for host in network.hosts]
    yield
    assert [host.processes() for host in network.hosts] == before
    assert not any(os.listdir(f"/proc/{server}/root/dev/shm") for (server,) in before)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault(servers, kind, fault, tmp_path_factory):
    rounds, chance = max(1, round(ROUNDS / len(KINDS))), random.Random(f"{kind}, {fault}")
    went_on, raised, to_the_end = 0, [], []
    for i in range(rounds):
        victim, place = chance.randrange(N) if i else 0, PLACES[i % len(PLACES)]  # rank 0 serves the store
        step, delay = chance.choice([1, 2]), chance.uniform(0, 0.05) if place == "running" else 0
        with nothing_is_left(servers.network):
            folder = tmp_path_factory.mktemp("round")
            played = servers.play(kind, FAULTS[fault], victim, step, place, folder, delay)
        survivors = [r for r in range(N) if not (fault == "killed" and r == victim)]
        went_on += all(played.outcomes[r]["error"] is None for r in survivors)
        for r in survivors:
            outcome, ended = played.outcomes[r], played.ended[r]
            about = kind, fault, f"rank {r}, victim {victim}, step {step}, {place}", outcome, ended
            assert outcome is not None and ended["code"] == 0, about
            assert outcome["kept"] and outcome["grad"], about
            if outcome["error"] is None:
                assert FAULTS[fault].is_short, about
                assert place == "running" or outcome["steps"] == 4, about
                continue
            check_error(kind, fault, r, victim, step, place, outcome, about)
            if r != victim or FAULTS[fault].begin is not stop:
                raised.append(outcome["raised"] - played.fault)
                # While PyTorch makes a group, gloo tries to connect five times as long.
                assert raised[-1] < TIMEOUT * (5 if kind == "making_a_group" else 1) + MORE, about
            to_the_end.append(ended["ended"] - outcome["raised"])
            assert to_the_end[-1] < ENDS, about
    times = f"errors after {statistics.median(raised):.1f} s, at most {max(raised):.1f}; " if raised else ""
    times += f"ended {max(to_the_end):.1f} s later at most" if to_the_end else ""
    print(f"\n{fault}; {kind}: {rounds} rounds, {went_on} went on right; {times}")


def check_error(kind, fault, rank, victim, step, place, outcome, about):
    """The error names the call, its line or the parameters, and the lost rank where a message shows it."""
    text, is_gone = outcome["error"], FAULTS[fault].seconds in (None, 0)
    assert "other" not in outcome, about
    assert text.startswith(KINDS[kind] if place == "before" else AFTER.get(kind, KINDS[kind])), about
    assert f"failed on rank {rank} of a gloo group of 3 ranks" in text, about
    assert place == "running" or outcome["steps"] in (step, step + 1), about
    if text.startswith("GradientAverager, bucket"):
        assert re.match(r"GradientAverager, bucket \d of 4 \([01]\.(weight|bias)\): ", text), about
        return
    assert "fault_ranks.py:" in text, about
    if kind in ("forward", "backward", "ring"):  # not gloo's own sum
        assert re.search(r": message (to|from) rank [012]: ", text), about
        if place == "before" and kind != "ring" and is_gone and fault != "killed" and rank != victim:
            assert re.search(rf": message (to|from) rank {victim}: ", text), about
