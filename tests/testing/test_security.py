"""What other users and hosts can reach of the processes that the library starts."""

import ast
import json
import os
import pickle
import select
import socket
import stat
import struct
import tempfile
import time
from collections import Counter
from datetime import timedelta
from multiprocessing.util import get_temp_dir
from pathlib import Path
from random import Random

import pytest
import torch
import torch.distributed as dist
from ports import listening

import diffcoll as dc
from diffcoll.testing import new_group, spawn
from diffcoll.testing.processes import temporary_folder

NOBODY = 65534
DIFFCOLL = Path(dc.__file__).parent
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def as_nobody(attempt):
    """Return what an attempt raises that another user makes; None: it succeeds."""
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        code = 1
        try:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            try:
                attempt()
            except Exception as error:
                os.write(write, type(error).__name__.encode())
            code = 0
        finally:
            os._exit(code)
    os.close(write)
    _, status = os.waitpid(pid, 0)
    with open(read) as pipe:
        said = pipe.read() or None
    assert os.waitstatus_to_exitcode(status) == 0, "the attempt was not made"
    return said


@as_root
def test_another_user_reads_and_plants_nothing():
    """Ranks find each other, receive their functions and join MPI's jobs through what is in these folders."""
    with tempfile.TemporaryDirectory() as reachable:
        Path(reachable).chmod(0o777)
        assert as_nobody(lambda: Path(reachable, "file").touch()) is None  # such attempts do succeed elsewhere
        assert as_nobody(lambda: os.listdir(reachable)) is None
        with socket.socket(socket.AF_UNIX) as door:
            door.bind(f"{reachable}/door")
            door.listen()
            Path(reachable, "door").chmod(0o777)
            assert as_nobody(lambda: socket.socket(socket.AF_UNIX).connect(f"{reachable}/door")) is None
    with temporary_folder() as folder:
        for private in folder, get_temp_dir():
            assert stat.S_IMODE(os.stat(private).st_mode) == 0o700
            assert as_nobody(lambda private=private: os.listdir(private)) == "PermissionError"
            assert as_nobody(lambda private=private: Path(private, "file").touch()) == "PermissionError"
        with socket.socket(socket.AF_UNIX) as door:
            door.bind(f"{folder}/door")
            door.listen()
            Path(folder, "door").chmod(0o777)
            assert as_nobody(lambda: socket.socket(socket.AF_UNIX).connect(f"{folder}/door")) == "PermissionError"


@as_root
@pytest.mark.parametrize("planted", ["link", "folder", "file"])
def test_a_folder_that_another_user_has_planted_is_not_used(planted, monkeypatch):
    """Who knows the name in advance makes a link there, a folder of their own, or a file."""
    with tempfile.TemporaryDirectory() as reachable:
        Path(reachable).chmod(0o777)  # without the sticky bit: worse than /tmp

        def plant():
            theirs, trap = Path(reachable, "theirs"), Path(reachable, "diffcoll-known")
            theirs.mkdir(mode=0o777)
            if planted == "link":
                trap.symlink_to(theirs)
            elif planted == "folder":
                trap.mkdir(mode=0o777)
            else:
                trap.write_bytes(pickle.dumps("planted"))

        assert as_nobody(plant) is None
        monkeypatch.setattr(tempfile, "tempdir", reachable)
        monkeypatch.setattr(tempfile, "_get_candidate_names", lambda: iter(["known", "other"]))
        with temporary_folder() as folder:
            Path(folder, "rendezvous").touch()
            assert os.path.basename(folder) == "diffcoll-other"
            found = os.lstat(folder)
            assert stat.S_ISDIR(found.st_mode)
            assert stat.S_IMODE(found.st_mode) == 0o700
            assert found.st_uid == os.geteuid()
        assert not [*Path(reachable, "theirs").iterdir()]
        trap = Path(reachable, "diffcoll-known")
        assert trap.lstat().st_uid == NOBODY  # still there
        assert planted == "file" or not [*trap.iterdir()]


class Planted:
    """Makes a file when it is unpickled."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return Path.touch, (self.file,)


def test_a_pickle_planted_in_the_folder_of_the_ranks_is_not_loaded(tmp_path):
    """Nothing is unpickled but what comes through the pipes, also if the folder were open to others."""
    file, control = tmp_path / "unpickled", tmp_path / "control"
    pickle.loads(pickle.dumps(Planted(control)))
    assert control.exists()

    def body(r, data):
        folder = folder_of_the_call()
        names = [path for path in folder.iterdir() if path.name != "rendezvous"]  # that one is PyTorch's, and in use
        names += [folder / f"{name}-{rank}" for name in ("stdout", "stderr", "answer", "seat") for rank in range(2)]
        for path in [*names, folder.parent / "mpiexec"]:
            path.write_bytes(data)
        if r == 1:
            time.sleep(60)  # this rank is asked for its stack
        return len(names)

    data = pickle.dumps(Planted(file)) + b"\xff" * 10**5 + b"\n"  # longer than a stack, and not in UTF-8
    with pytest.raises(dc.testing.RanksFailedError, match="hung"):
        spawn(body, range(2), [data] * 2, timeout=1)
    assert not file.exists()


def folder_of_the_call():
    """In a rank: the folder in which ranks find each other."""
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return next(Path(os.readlink(link)).parent for link in links if "/stack-" in os.path.realpath(link))


def test_the_pickled_calls_are_in_pipes_alone():
    """No file that a rank has open, and none in its folder, has the function that it was sent."""
    mark = f"mark of {os.getpid()}"

    def body(r, said):
        folder = folder_of_the_call()
        (folder / f"control-{r}").write_text(said)
        dc.all_reduce(torch.ones(1))  # both are written
        found = [
            path.name for path in folder.parent.rglob("*") if path.is_file() and said.encode() in path.read_bytes()
        ]
        dc.all_reduce(torch.ones(1))
        return sorted(found)

    assert spawn(body, range(2), [mark] * 2) == [["control-0", "control-1"]] * 2


# ── what is unpickled ────────────────────────────────────────────────────────────────────────────────────

#: Every place of the library that unpickles, or reads marshalled data: what came through an inherited pipe, or was
#: pickled in the same process.
UNPICKLES = {
    "testing/harness/packing.py": ["pickle.loads", "torch.jit.load"],
    "testing/mpi_job.py": ["marshal.load", "pickle.loads"],
    "testing/pickling.py": ["torch.load"],
    "testing/pool.py": ["pickle.loads"],
    "testing/worker.py": ["pickle.loads"] * 2,
}
#: Modules whose `load`, `loads`, `Unpickler` and the like run what they read.
_LOADERS = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "numpy", "np", "torch", "jit"}
_LOAD = {"load", "loads", "open", "Unpickler", "_Unpickler", "Listener", "Client", "ForkingPickler"}


def objects_of_torch():
    """Return the names of torch.distributed's functions that pickle: those that call its functions for objects."""
    return {name for name in dir(dist.distributed_c10d) if "object" in name and not name.startswith("_get")}


def objects_of_mpi4py():
    """Return mpi4py's names in lower case that have a twin for buffers: they pickle."""
    comm = pytest.importorskip("mpi4py.MPI").Comm
    lower = {name for name in dir(comm) if name[0].islower() and name.capitalize() in dir(comm)}
    return lower - {"barrier", "free", "is_inter", "is_intra", "probe", "iprobe"}


def unpickling(source):
    """Return the calls in a source, and the names that it imports, that unpickle."""
    found, objects, tree = [], objects_of_torch(), ast.parse(source)
    of_mpi = objects_of_mpi4py() if "mpi4py" in source else set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[-1] in (_LOADERS | {"connection"}):
            found += [f"{node.module}.{each.name}" for each in node.names if each.name in _LOAD]
        if not isinstance(node, ast.Attribute):
            if isinstance(node, ast.Name) and node.id in objects:
                found.append(node.id)
            continue
        owner = ast.unparse(node.value)
        last = owner.split(".")[-1]
        if node.attr in objects or (node.attr in _LOAD and last in (_LOADERS | {"connection", "multiprocessing"})):
            found.append(f"{owner}.{node.attr}")
        elif (node.attr == "recv" and last in ("pipe", "leash")) or (node.attr in of_mpi and last in MPIS):
            found.append(f"{owner}.{node.attr}")
    return sorted(found)


#: What communicators of mpi4py are called here.
MPIS = {"comm", "world", "node", "COMM_WORLD", "COMM_SELF", "_comm", "_world"}


@pytest.mark.parametrize(
    "source",
    [
        "dist.all_gather_object(xs, x)",
        "from torch.distributed import broadcast_object_list\nbroadcast_object_list(xs)",
        "import mpi4py\nworld.bcast(x)",
        "import mpi4py\nMPI.COMM_WORLD.allgather(x)",
        "import mpi4py\nself._comm.sendrecv(x, 1)",
        "pickle.loads(data)",
        "pickle.Unpickler(file).load()",
        "load = pickle.loads",
        "from pickle import loads",
        "from pickle import Unpickler as Reader",
        "torch.load(file)",
        "np.load(file, allow_pickle=True)",
        "marshal.loads(data)",
        "shelve.open(file)",
        "self.pipe.recv()",
        "from multiprocessing.connection import Listener",
        "multiprocessing.connection.Client(address)",
    ],
)
def test_what_unpickles_is_found(source):
    assert unpickling(source)


def test_nothing_that_comes_through_the_network_is_unpickled():
    """No source calls PyTorch's functions for objects, or mpi4py's in lower case; what unpickles is listed above."""
    found = {}
    for path in DIFFCOLL.rglob("*.py"):
        if calls := unpickling(path.read_text(encoding="utf-8")):
            found[str(path.relative_to(DIFFCOLL))] = calls
    assert found == UNPICKLES


# ── ports ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::1", "::"])
def test_what_listens_is_found(host):
    """By `ports.py`, which other tests use too; not what is connected, or is open in another process alone."""
    before = listening()
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as server:
        try:
            server.bind((host, 0))
        except OSError:
            pytest.skip("no IPv6 here")
        assert listening() == before
        server.listen()
        assert listening() == sorted([*before, (host, server.getsockname()[1])])
        with socket.create_connection(server.getsockname()[:2]), server.accept()[0]:
            assert len(listening()) == len(before) + 1
        if (child := os.fork()) == 0:
            server.close()
            os._exit(listening() != before)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert listening() == before


# ── malformed messages ───────────────────────────────────────────────────────────────────────────────────

#: How a client of a TCPStore begins; then one byte for what it wants.
VALID = struct.pack("<BI", 0, 0x3C85F7CE)
LENGTHS = [0, 1, 2**20, 2**31, 2**40, 2**63, 2**64 - 1]
#: To each port; a store writes a message and a stack to stderr for each that it refuses, which takes longer.
MESSAGES = {"gloo": 2000, "store": 200}
#: Connections that send a byte now and then, and stay open.
SLOW = 20


def text(words):
    return struct.pack("<Q", len(words)) + words


def malformed(chance, kind):
    """A message of one of several kinds: bytes, lengths that do not fit, a beginning of what gloo and a store send."""
    length = struct.pack("<Q", chance.choice(LENGTHS))
    return [
        chance.randbytes(chance.randrange(1, 200)),
        length + chance.randbytes(8),
        struct.pack("<i", chance.choice([-1, 0, 1, 7])) + b"GET / HTTP/1.1\r\n\r\n",
        bytes([chance.randrange(20)]) + length + b"key",
        VALID[: chance.randrange(1, len(VALID))],
        VALID + chance.randbytes(chance.randrange(100)),
        VALID + bytes([chance.randrange(20)]) + length + b"key",  # a key that is too long
        VALID + b"\x01" + text(b"attack") + length + b"value",  # set
        VALID + bytes([chance.choice([5, 6, 10, 11])]) + length + text(b"attack"),  # of too many keys
        VALID + b"\x03" + text(b"never set"),  # get, for which a server waits
    ][kind]


KINDS = 10


class Slow:
    """A client that sends a long message one byte at a time; it begins again if it is closed."""

    def __init__(self, address, kind):
        self._address, self._kind, self._line, self.bytes = address, kind, None, 0

    def drip(self):
        if self._line is None:
            self._line = socket.create_connection(self._address, timeout=5)
            self._data = iter(VALID + b"\x01" + text(b"slow") + text(bytes(10**6)) if self._kind else bytes(10**6))
        try:
            self.bytes += self._line.send(bytes([next(self._data)]))
        except ConnectionError:
            self._line.close()
            self._line = None


def attack(address, seed, messages):
    """Send messages to a port, each in a connection of its own; return what was delivered, and the slow senders.

    Some connections stay open for a while. A connection that is refused, or not accepted in time, raises.
    """
    chance, kept, counts = Random(seed), [], Counter()
    slow = [Slow(address, i % 2) for i in range(SLOW)]
    for i in range(messages):
        kind = i % KINDS
        line = socket.create_connection(address, timeout=5)
        counts["connections"] += 1
        try:
            line.sendall(malformed(chance, kind))
            counts[f"kind {kind}"] += 1
            if chance.random() < 0.05:
                select.select([line], [], [], 0.002)
        except ConnectionError:  # it was closed at once
            pass
        kept.append(line)
        if len(kept) > 20 or chance.random() < 0.7:
            kept.pop(chance.randrange(len(kept))).close()
        slow[i % SLOW].drip()
    for line in kept:
        line.close()
    counts["slow bytes"] = sum(each.bytes for each in slow)
    return counts, slow


def attack_all(folder):
    """Run in a process of its own: attack all ports of both ranks; slow connections are kept until they are done."""
    files = [folder / f"ports-{r}" for r in range(2)]
    wait_for(*files)
    counts, kept = {}, []
    ports = [each for file in files for each in json.loads(file.read_text())]
    for seed, (what, address) in enumerate(ports):
        found, slow = attack(tuple(address), seed, MESSAGES[what])
        counts[f"{what} {address}"] = found
        kept += slow
    (folder / "counts").write_text(json.dumps(counts))
    (folder / "flooded").touch()
    wait_for(folder / "done-0", folder / "done-1")
    for each in kept:
        each.drip()


def wait_for(*files, seconds=60):
    end = time.monotonic() + seconds
    while not all(file.exists() for file in files):
        assert time.monotonic() < end
        time.sleep(0.01)


def serve_store():
    """Serve a store as `diffcoll verify` does: on loopback alone."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    more = {"wait_for_workers": False, "timeout": timedelta(seconds=20), "master_listen_fd": listener.detach()}
    return dist.TCPStore("127.0.0.1", port, 2, is_master=True, **more)


def test_malformed_messages_to_every_open_port(tmp_path):
    """While the ranks work: no rank ends, waits, or has a wrong value; memory does not grow.

    To gloo's ports, and to those of stores. Then the ranks make a group, while slow senders are still connected.
    """

    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

    def body(r):
        x, store = torch.full((1000,), r + 1.0), serve_store()
        dc.all_gather(x)
        before, steps, longest = resident(), 0, 0.0
        ports = [("store" if port == store.port else "gloo", (address, port)) for address, port in listening()]
        (tmp_path / f"new-{r}").write_text(json.dumps(ports))
        (tmp_path / f"new-{r}").rename(tmp_path / f"ports-{r}")
        flooded = False
        while not flooded:
            start = time.monotonic()
            y = dc.all_gather(x)
            assert y.view(2, -1).mean(1).tolist() == [1.0, 2.0]
            steps += 1
            assert store.add("steps", 1) == steps
            flooded = bool(dc.all_reduce(torch.tensor(float((tmp_path / "flooded").exists())), "min"))
            longest = max(longest, time.monotonic() - start)
        grown = resident() - before
        y = dc.all_gather(x, group=new_group([0, 1]))
        assert y.view(2, -1).mean(1).tolist() == [1.0, 2.0]
        (tmp_path / f"done-{r}").touch()
        return ports, listening(), grown, steps, longest

    if (attacker := os.fork()) == 0:
        code = 1
        try:
            attack_all(tmp_path)
            code = 0
        finally:
            (tmp_path / "flooded").touch()  # also if the attack has failed
            os._exit(code)
    try:
        of_ranks = spawn(body, range(2), timeout=100)
    finally:
        _, status = os.waitpid(attacker, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    counts = json.loads((tmp_path / "counts").read_text())
    attacked = []
    for ports, later, grown, steps, longest in of_ranks:
        assert sorted({what for what, _ in ports}) == ["gloo", "store"]
        assert {address for _, address in ports} <= {*later}  # they are still open
        assert {host for host, _ in later} == {"127.0.0.1"}
        attacked += [f"{what} {[*address]}" for what, address in ports]
        assert grown < 64 << 20
        assert steps > 1  # while the attack goes on, on a machine that may be busy
        assert longest < 10
    assert sorted(counts) == sorted(attacked)
    for address, found in counts.items():
        messages = MESSAGES[address.split()[0]]
        assert found.pop("connections") == messages
        assert found.pop("slow bytes") > 0.7 * messages  # those that a server closes begin again
        assert len(found) == KINDS
        assert min(found.values()) > 0.9 * messages / KINDS
