"""The GPU, the versions on this machine, and the NCCL that the ranks of a row use."""

import json
import lzma
import os
import subprocess
import sys
from pathlib import Path

#: The first release of NCCL in which several ranks may share a GPU.
SHARES_A_GPU = (2, 30)
HOW = "several NCCL ranks on one GPU need NCCL 2.30: make test-gpu NCCL=nccl.so.xz, a file of tests/gpu/thin_nccl.py"
#: Run in a process of its own, so that it sees the NCCL of several ranks, and this one does not hold the GPU.
ASK = """
import ctypes, json, os, sys, torch
found = {"device": "CPU", "torch": torch.__version__, "Python": sys.version.split()[0], "cores": os.cpu_count()}
if torch.cuda.is_available() and sys.argv[1] == "cuda":
    found["device"] = torch.cuda.get_device_name()
    nccl = torch.cuda.nccl.version()[:3]  # with which PyTorch was built
    try:
        number = ctypes.c_int()
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
        nccl = number.value // 10000, number.value // 100 % 100, number.value % 100
    except OSError:  # it is linked into PyTorch
        pass
    found["NCCL of several ranks"] = ".".join(map(str, nccl))
print(json.dumps(found))
"""
DRIVER = "nvidia-smi --query-gpu=driver_version --format=csv,noheader | head -n 1"


class Machine:
    """What rows run on.

    Args:
        dry: use the CPU and gloo.
        packed: an NCCL packed by thin_nccl.py, for rows of several ranks; None: PyTorch's for all rows.
        folder: a temporary folder, for the unpacked NCCL.
    """

    def __init__(self, dry, packed, folder):
        self.device = "cpu" if dry else "cuda"
        self._environment = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
        self._environment |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        # Asking whether there is a GPU does not initialize CUDA then, so processes that have asked may fork.
        self._environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
        self._of_several = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
        if packed and not dry:
            library = Path(folder, "libnccl.so.2")
            library.write_bytes(lzma.decompress(Path(packed).read_bytes()))
            self._of_several["LD_PRELOAD"] = str(library)
        command = [sys.executable, "-c", ASK, self.device]
        done = subprocess.run(command, env=self.environment(2), capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"PyTorch does not start here:\n{done.stderr}")
        self.facts = json.loads(done.stdout.splitlines()[-1])
        if not dry:
            if self.facts["device"] == "CPU":
                raise SystemExit("no CUDA device; DRY=1 make test-gpu runs the rows on the CPU")
            driver = subprocess.run(DRIVER, shell=True, capture_output=True, text=True, check=False)
            self.facts["driver"] = driver.stdout.strip()

    def environment(self, ranks):
        """Return the environment of the processes of a row."""
        return {**os.environ, **self._environment, **(self._of_several if ranks > 1 else {})}

    def skips(self, row):
        """Return why a row cannot run here; "": it can."""
        if self.device == "cpu":
            return "" if row.dry else "on a GPU only"
        shares = tuple(map(int, self.facts["NCCL of several ranks"].split("."))) >= SHARES_A_GPU
        return "" if row.ranks == 1 or row.backend == "gloo" or shares else HOW
