"""Ranks on MPI: a job of mpiexec that makes one call after the other; this file is the program of its ranks, too."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from functools import cache
from multiprocessing.connection import Client, Listener, wait
from pathlib import Path

import torch
from torch import Tensor

import diffcoll
from diffcoll.core.trees import tree_map
from diffcoll.engines.rank_state import seed_rank
from diffcoll.testing.failures import RankFailure, RanksFailedError
from diffcoll.testing.pickling import dumps, load
from diffcoll.testing.spawn import GRACE

#: For Open MPI: as root, with more ranks than cores, on any of them, and through shared memory alone.
SETTINGS = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    "OMPI_MCA_btl": "self,sm,vader",
    # In pieces of 256 KB, not by one process that reads another's memory, which takes longer in a virtual machine.
    "OMPI_MCA_smsc": "^cma",
    "OMPI_MCA_btl_sm_max_send_size": str(256 << 10),
    "OMPI_MCA_mpi_yield_when_idle": "1",  # ranks that wait are in the others' way
    "PYTHONPATH": os.pathsep.join((str(Path(diffcoll.__file__).parent.parent), str(Path(__file__).parent))),
    "OMP_NUM_THREADS": "1",
}
MPIEXEC = shutil.which("mpiexec", path=os.pathsep.join((os.path.dirname(sys.executable), os.environ["PATH"])))


@cache
def temporary():
    """The folder of all jobs that this process starts.

    Open MPI does not start a job that has the number of a killed one, if that has left its files in the same folder.
    """
    return tempfile.TemporaryDirectory(prefix="mpi-")


def environment():
    """The variables with which jobs start."""
    return {**os.environ, **SETTINGS, "TMPDIR": temporary().name}


class MpiRanks:
    """Processes of one job, kept from call to call. A call that fails ends them."""

    def __init__(self, n):
        self._folder = tempfile.TemporaryDirectory(prefix="diffcoll-")
        with Listener(f"{self._folder.name}/door") as door:
            command = [MPIEXEC, "-n", str(n), sys.executable, "-m", "mpi_ranks", door.address]
            self._job = subprocess.Popen(command, env=environment(), stdin=subprocess.DEVNULL)
            pipes, end = [], time.monotonic() + 60
            while len(pipes) < n:
                if wait([door._listener._socket], 0.1):
                    pipes.append(door.accept())
                elif self._job.poll() is not None or time.monotonic() > end:
                    self._job.kill()
                    raise RuntimeError(f"{len(pipes)} of {n} ranks began")
        ranks = [pipe.recv() for pipe in pipes]
        self._pipes = [pipes[ranks.index(r)] for r in range(n)]

    def call(self, fn, rows, *, seed=0, timeout=60):
        """As `Ranks.call`."""
        for pipe, row in zip(self._pipes, rows, strict=True):
            pipe.send((dumps((fn, tuple(row))), seed, dict(os.environ), os.getcwd(), sys.path))
        answers, end = {}, time.monotonic() + timeout
        while len(answers) < len(rows):
            silent = {pipe: r for r, pipe in enumerate(self._pipes) if r not in answers}
            if not (ready := wait(list(silent), max(0, end - time.monotonic()))):
                answers |= {r: RankFailure("hung", "hung") for r in silent.values()}
            for pipe in ready:
                try:
                    answers[silent[pipe]] = answer = pipe.recv()
                except (EOFError, OSError):
                    answers[silent[pipe]] = answer = RankFailure("died", "the process ended")
                if isinstance(answer, RankFailure):
                    end = min(end, time.monotonic() + GRACE)
        failures = {r: answer if isinstance(answer := answers[r], RankFailure) else None for r in range(len(rows))}
        if any(failures.values()):
            self._job.terminate()
            self.close()
            raise RanksFailedError("mpi", failures, timeout)
        return [load(answers[r]) for r in range(len(rows))]

    def close(self):
        for pipe in self._pipes:
            pipe.close()
        try:
            self._job.wait(GRACE)
        except subprocess.TimeoutExpired:
            self._job.kill()
            self._job.wait()
        self._folder.cleanup()


def main(address):
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    torch.set_num_threads(1)
    own = {name: os.environ[name] for name in os.environ if name.startswith(("OMPI_", "PMIX_", "PRTE_", "PMI_"))}
    with Client(address) as pipe:
        pipe.send(world.rank)
        while True:
            try:
                payload, seed, environment, folder, path = pipe.recv()
            except EOFError:
                break
            os.chdir(folder)
            os.environ.clear()
            os.environ.update({**environment, **own})
            sys.path[:] = path
            communicator = world.Dup()  # messages that a call has left are not the next one's
            diffcoll.set_default_group(communicator)
            try:
                fn, arguments = load(payload)
                seed_rank(seed, world.rank)
                result = tree_map(lambda x: x.detach().cpu() if isinstance(x, Tensor) else x, fn(*arguments))
                answer = dumps(result)
            except BaseException as error:
                answer = RankFailure.of(error)
            pipe.send(answer)
            diffcoll.set_default_group(None)


if __name__ == "__main__":
    main(sys.argv[1])
