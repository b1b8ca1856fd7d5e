"""Nothing that comes through the network is unpickled, as SECURITY.md says: which sources unpickle, and what."""

import ast
from pathlib import Path

import pytest
import torch.distributed as dist

import diffcoll as dc

DIFFCOLL = Path(dc.__file__).parent
#: Every place of the library that unpickles: what came through an inherited pipe, or was pickled in the same process.
UNPICKLES = {
    "testing/pickling.py": ["torch.load"],
    "testing/spawn.py": ["pipe.recv", "self.pipe.recv"],
}
#: Modules whose `load`, `loads`, `Unpickler` and the like run what they read.
LOADERS = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "numpy", "np", "torch", "jit"}
CONNECTIONS = {"connection", "multiprocessing"}
LOAD = {"load", "loads", "open", "Unpickler", "_Unpickler", "Listener", "Client", "ForkingPickler"}
#: What communicators of mpi4py are called here.
MPIS = {"comm", "world", "node", "COMM_WORLD", "COMM_SELF", "_comm", "_world"}
#: torch.distributed's functions for objects.
OBJECTS = {name for name in dir(dist.distributed_c10d) if "object" in name and not name.startswith("_get")}


def objects_of_mpi4py():
    """Return mpi4py's names in lower case that have a twin for buffers: they pickle."""
    comm = pytest.importorskip("mpi4py.MPI").Comm
    lower = {name for name in dir(comm) if name[0].islower() and name.capitalize() in dir(comm)}
    return lower - {"barrier", "free", "is_inter", "is_intra", "probe", "iprobe"}


def unpickling(source):
    """Return the calls in a source, and the names that it imports, that unpickle."""
    found, of_mpi = [], objects_of_mpi4py() if "mpi4py" in source else set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[-1] in LOADERS | CONNECTIONS:
            found += [f"{node.module}.{each.name}" for each in node.names if each.name in LOAD]
        elif isinstance(node, ast.Name) and node.id in OBJECTS:
            found.append(node.id)
        elif isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            last = owner.split(".")[-1]
            if (
                node.attr in OBJECTS
                or (node.attr in LOAD and last in LOADERS | CONNECTIONS)
                or (node.attr == "recv" and last in ("pipe", "_pipe"))
                or (node.attr in of_mpi and last in MPIS)
            ):
                found.append(f"{owner}.{node.attr}")
    return sorted(found)


@pytest.mark.parametrize(
    "source",
    [
        "dist.all_gather_object(xs, x)",
        "from torch.distributed import broadcast_object_list\nbroadcast_object_list(xs)",
        "import mpi4py\nMPI.COMM_WORLD.allgather(x)",
        "import mpi4py\nself._comm.sendrecv(x, 1)",
        "pickle.Unpickler(file).load()",
        "load = pickle.loads",
        "from pickle import Unpickler as Reader",
        "torch.load(file)",
        "np.load(file, allow_pickle=True)",
        "shelve.open(file)",
        "self.pipe.recv()",
        "from multiprocessing.connection import Listener",
        "multiprocessing.connection.Client(address)",
    ],
)
def test_what_unpickles_is_found(source):
    assert unpickling(source)


def test_nothing_that_comes_through_the_network_is_unpickled():
    sources = {path.relative_to(DIFFCOLL).as_posix(): path.read_text("utf-8") for path in DIFFCOLL.rglob("*.py")}
    assert {path: calls for path, source in sources.items() if (calls := unpickling(source))} == UNPICKLES
