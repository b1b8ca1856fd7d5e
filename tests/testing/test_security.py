"""Nothing that comes through the network is unpickled, as SECURITY.md says: which sources unpickle, and what."""

import ast
from pathlib import Path

import pytest
import torch.distributed as dist

import diffcoll as dc

DIFFCOLL = Path(dc.__file__).parent
#: What runs what it reads, whichever module or object has it.
LOAD = {"load", "loads", "open", "Unpickler", "_Unpickler", "Listener", "Client", "ForkingPickler", "recv"}
#: torch.distributed's functions for objects.
OBJECTS = {name for name in dir(dist.distributed_c10d) if "object" in name and not name.startswith("_get")}
#: Every use in the library: of an inherited pipe, of what was pickled in the same process, or of another thing.
USES = {
    "cli/verify.py": ["control.gather"],  # of tensors
    "engines/c10d.py": ["group.recv"],  # of tensors
    "engines/mpi.py": ["super().reduce"],  # the method of `Engine`
    "testing/harness/packing.py": ["diffcoll.testing.pickling.load"],
    "testing/pickling.py": ["torch.load"],
    "testing/spawn.py": ["asked.recv", "diffcoll.testing.pickling.load", "pipe.recv", "self.pipe.recv"],
}


def objects_of_mpi4py():
    """Return mpi4py's names in lower case that have a twin for buffers: they pickle."""
    comm = pytest.importorskip("mpi4py.MPI").Comm
    lower = {name for name in dir(comm) if name[0].islower() and name.capitalize() in dir(comm)}
    return lower - {"barrier", "free", "is_inter", "is_intra", "probe", "iprobe"}


def unpickling(source):
    """Return the uses and imports of names that may unpickle."""
    names, found = LOAD | OBJECTS | (objects_of_mpi4py() if "mpi4py" in source else set()), []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            found += [f"{node.module}.{each.name}" for each in node.names if each.name in names]
        elif isinstance(node, ast.Attribute) and node.attr in names:
            found.append(ast.unparse(node))
    return sorted(found)


@pytest.mark.parametrize(
    "source",
    [
        "dist.all_gather_object(xs, x)",
        "from torch.distributed import broadcast_object_list",
        "import mpi4py\nself._comm.sendrecv(x, 1)",
        "pickle.Unpickler(file).load()",
        "from pickle import Unpickler as Reader",
        "multiprocessing.connection.Client(address)",
    ],
)
def test_what_unpickles_is_found(source):
    assert unpickling(source)


def test_nothing_that_comes_through_the_network_is_unpickled():
    sources = {path.relative_to(DIFFCOLL).as_posix(): path.read_text("utf-8") for path in DIFFCOLL.rglob("*.py")}
    assert {path: uses for path, source in sources.items() if (uses := unpickling(source))} == USES
