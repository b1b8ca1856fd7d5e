"""The GPU, the versions on this machine, and the NCCL that the ranks of a row use."""

import json
import lzma
import os
import shutil
import subprocess
import sys
from pathlib import Path

#: The first release of NCCL in which several ranks may share a GPU.
SHARES_A_GPU = (2, 30)
HOW = "several NCCL ranks on one GPU need NCCL 2.30: make test-gpu NCCL=nccl.so.xz, a file of tests/gpu/thin_nccl.py"
#: Run in a process of its own, so that it sees the NCCL that ranks will see, and this one does not hold the GPU.
ASK = """
import ctypes, json, os, sys, torch
found = {"python": sys.version.split()[0], "torch": torch.__version__, "cores": os.cpu_count(), "device": "CPU"}
if torch.cuda.is_available():
    found["device"] = torch.cuda.get_device_name()
    found["nccl"] = torch.cuda.nccl.version()[:3]  # with which PyTorch was built
    try:
        number = ctypes.c_int()
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
        found["nccl"] = [number.value // 10000, number.value // 100 % 100, number.value % 100]
    except OSError:  # it is linked into PyTorch
        pass
print(json.dumps(found))
"""


class Machine:
    """What rows run on.

    Args:
        dry: use the CPU and gloo.
        packed: an NCCL packed by thin_nccl.py, for rows of several ranks; None: PyTorch's for all rows.
        folder: a temporary folder, for the unpacked NCCL.
    """

    def __init__(self, dry, packed, folder):
        self.device = "cpu" if dry else "cuda"
        self._loopback = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
        # Asking whether there is a GPU does not initialize CUDA then, so processes that have asked may fork.
        self._loopback["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
        self._several = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
        if packed and not dry:
            library = Path(folder, "libnccl.so.2")
            with lzma.open(packed) as source, open(library, "wb") as target:
                shutil.copyfileobj(source, target)
            self._several["LD_PRELOAD"] = str(library)
        self.facts = self._ask(1)
        if dry:
            self.facts["device"] = "CPU"
            self.shares = True
        else:
            if "nccl" not in self.facts:
                raise SystemExit("no CUDA device; DRY=1 make test-gpu runs the rows on the CPU")
            self.facts["driver"] = _driver()
            self.facts["nccl of several ranks"] = self._ask(2)["nccl"]
            self.shares = tuple(self.facts["nccl of several ranks"]) >= SHARES_A_GPU

    def environment(self, ranks):
        """Return the environment of the processes of a row."""
        more = self._loopback if ranks == 1 else self._loopback | self._several
        return {**os.environ, **more, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}

    def skips(self, row):
        """Return why a row cannot run here; "": it can."""
        if self.device == "cpu":
            return "" if row.dry else "on a GPU only"
        return "" if row.ranks == 1 or row.backend == "gloo" or self.shares else HOW

    def line(self):
        """Return the first line of the table."""
        facts = self.facts
        words = [facts["device"], f"torch {facts['torch']}", f"Python {facts['python']}", f"{facts['cores']} cores"]
        if self.device == "cuda":
            one, several = (".".join(map(str, facts[name])) for name in ("nccl", "nccl of several ranks"))
            words[1:1] = [f"driver {facts['driver']}"]
            words.append(f"NCCL {one}" if one == several else f"NCCL {one} with one rank, {several} with several")
        return ", ".join(words)

    def _ask(self, ranks):
        command = [sys.executable, "-c", ASK]
        done = subprocess.run(command, env=self.environment(ranks), capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"PyTorch does not start here:\n{done.stderr}")
        return json.loads(done.stdout.splitlines()[-1])


def _driver():
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"
