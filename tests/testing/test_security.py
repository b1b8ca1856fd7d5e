"""What other users and hosts can reach of the processes that the library starts."""

import os
import re
import select
import socket
import stat
import struct
import tempfile
import time
from multiprocessing.util import get_temp_dir
from pathlib import Path
from random import Random

import pytest
import torch

import diffcoll as dc
from diffcoll.testing import spawn
from diffcoll.testing.processes import temporary_folder

NOBODY = 65534
DIFFCOLL = Path(dc.__file__).parent


def as_nobody(attempt):
    """Return what an attempt raises that another user makes; None: it succeeds."""
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            attempt()
        except BaseException as error:
            os.write(write, type(error).__name__.encode())
        finally:
            os._exit(0)
    os.close(write)
    os.waitpid(pid, 0)
    with open(read) as pipe:
        return pipe.read() or None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_reads_and_plants_nothing(monkeypatch, tmp_path):
    """Ranks find each other, receive their functions and join MPI's jobs through what is in these folders."""
    with tempfile.TemporaryDirectory() as reachable:
        Path(reachable).chmod(0o777)
        assert as_nobody(lambda: Path(reachable, "file").touch()) is None  # such attempts do succeed elsewhere
    with temporary_folder() as folder:
        for private in folder, get_temp_dir():
            assert stat.S_IMODE(os.stat(private).st_mode) == 0o700
            assert as_nobody(lambda private=private: os.listdir(private)) == "PermissionError"
            assert as_nobody(lambda private=private: Path(private, "file").touch()) == "PermissionError"
        with socket.socket(socket.AF_UNIX) as door:
            door.bind(f"{folder}/door")
            door.listen()
            assert as_nobody(lambda: socket.socket(socket.AF_UNIX).connect(f"{folder}/door")) == "PermissionError"


def test_the_pickled_calls_are_in_pipes_alone():
    """No file that a rank has open, and none in its folder, has the function that it was sent."""
    mark = f"mark of {os.getpid()}"

    def body(r, said):
        links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
        files = [os.readlink(link) for link in links if os.path.isfile(link)]
        folder = next(Path(name).parent for name in files if "/stack-" in name)
        return [path.name for path in folder.parent.rglob("*") if path.is_file() and said.encode() in path.read_bytes()]

    assert spawn(body, range(2), [mark] * 2) == [[], []]


def test_nothing_that_comes_through_the_network_is_unpickled():
    """PyTorch's functions for objects and mpi4py's in lower case pickle: no source of the library calls one."""
    objects = r"\w+_object(_list)?\(|\b(comm|world|COMM_\w+)\.(bcast|allgather|gather|scatter|send|recv|allreduce)\("
    assert re.search(objects, "dist.all_gather_object(x)") and re.search(objects, "world.bcast(x)")
    found = [
        f"{path.name}: {match[0]}"
        for path in DIFFCOLL.rglob("*.py")
        for match in re.finditer(objects, path.read_text(encoding="utf-8"))
        if not match[0].startswith(("load_object", "py_object", "import_object"))
    ]
    assert not found


# ── malformed messages ───────────────────────────────────────────────────────────────────────────────────


def malformed(chance):
    """A message of one of several kinds: bytes, lengths that do not fit, a beginning of what gloo and a store send."""
    kind = chance.randrange(5)
    if kind == 0:
        return chance.randbytes(chance.randrange(1, 200))
    if kind == 1:
        return struct.pack("<Q", chance.choice([0, 1, 2**31, 2**63, 2**64 - 1])) + chance.randbytes(8)
    if kind == 2:
        return struct.pack("<i", chance.choice([-1, 0, 1, 7])) + b"GET / HTTP/1.1\r\n\r\n"
    if kind == 3:
        return bytes([chance.randrange(20)]) + struct.pack("<Q", chance.choice([3, 2**40])) + b"key"
    return b""


def attack(port, messages, seed):
    """Send messages to a port on loopback, each in a connection of its own; some stay open for a while."""
    chance, kept = Random(seed), []
    for _ in range(messages):
        line = socket.socket()
        line.settimeout(1)
        try:
            line.connect(("127.0.0.1", port))
            line.sendall(malformed(chance))
            if chance.random() < 0.05:
                select.select([line], [], [], 0.002)
        except OSError:
            pass
        kept.append(line)
        if len(kept) > 20 or chance.random() < 0.7:
            kept.pop(chance.randrange(len(kept))).close()
    for line in kept:
        line.close()


def listening_ports():
    """Return the ports on which this process listens."""
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    inodes = {os.readlink(link) for link in links if os.path.islink(link)}
    rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    return [int(row[1].split(":")[1], 16) for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes]


def test_malformed_messages_to_every_open_port(tmp_path):
    """2,000 to each, while the ranks work: no rank ends, waits, or has a wrong value; memory does not grow."""

    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

    def body(r):
        x = torch.full((1000,), r + 1.0)
        dc.all_gather(x)
        ports, before, steps = listening_ports(), resident(), 0
        (tmp_path / f"new-{r}").write_text(" ".join(map(str, ports)))
        (tmp_path / f"new-{r}").rename(tmp_path / f"ports-{r}")
        done = False
        while not done:
            y = dc.all_gather(x)
            assert y.view(2, -1).mean(1).tolist() == [1.0, 2.0]
            steps += 1
            done = bool(dc.all_reduce(torch.tensor(float((tmp_path / "done").exists())), "min"))
        return ports, resident() - before, steps

    if (attacker := os.fork()) == 0:
        try:
            files = [tmp_path / f"ports-{r}" for r in range(2)]
            while not all(file.exists() for file in files):
                time.sleep(0.01)
            for seed, port in enumerate(port for file in files for port in file.read_text().split()):
                attack(int(port), 2000, seed)
        finally:
            (tmp_path / "done").touch()
            os._exit(0)
    try:
        for ports, grown, steps in spawn(body, range(2), timeout=300):
            assert ports
            assert grown < 64 << 20
            assert steps > 10
    finally:
        os.waitpid(attacker, 0)
