"""Makes an NCCL small enough to carry: python tests/gpu/thin_nccl.py nccl.so.xz [compute capability, 90]

It downloads the newest nvidia-nccl-cu13 (300 MB), empties the kernels of other GPUs, strips symbols and compresses:
16 MB for capability 9.0 (H100, H200), in about 20 seconds. Needs pip, readelf and strip (binutils).

From NCCL 2.30 on, several ranks may share one GPU if NCCL_MULTI_RANK_GPU_ENABLE=1. `make test-gpu NCCL=nccl.so.xz`
unpacks the file and sets LD_PRELOAD.
"""

import lzma
import struct
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

#: How a part of a fat binary begins, and the kind of an entry that is machine code.
MAGIC, MACHINE_CODE = 0xBA55ED50, 2


def sections(library):
    """Return (offset, size) of each section of a shared library, by name."""
    done = subprocess.run(["readelf", "-S", "-W", library], capture_output=True, text=True, check=True)
    # [ 7] .nv_fatbin  PROGBITS  address  offset  size  …
    numbered = [line for line in done.stdout.splitlines() if line.lstrip().startswith("[") and "] " in line]
    rows = [line.split("]", 1)[1].split() for line in numbered]
    return {row[0]: (int(row[3], 16), int(row[4], 16)) for row in rows if len(row) > 4 and row[0][0] in "._"}


def empty_other_gpus(data, start, size, capability):
    """Zero each entry of a fat binary that is not machine code for this capability; return the number of bytes kept."""
    at, kept = start, 0
    while at < start + size - 16:
        magic, _, header, length = struct.unpack_from("<IHHQ", data, at)
        if magic != MAGIC:
            at += 8
            continue
        at += header
        end = at + length
        while at < end:
            kind, _, header, payload = struct.unpack_from("<HHIQ", data, at)
            (entry_capability,) = struct.unpack_from("<I", data, at + 28)
            if (kind, entry_capability) == (MACHINE_CODE, capability):
                kept += payload
            else:
                data[at + header : at + header + payload] = bytes(payload)
            at += header + payload
    return kept


def thin(library, capability):
    """Return the library without the kernels of other GPUs and without what is for linking device code."""
    found, data = sections(library), bytearray(library.read_bytes())
    kept = empty_other_gpus(data, *found[".nv_fatbin"], capability)
    assert kept, f"no kernels of capability {capability}"
    start, size = found["__nv_relfatbin"]
    data[start : start + size] = bytes(size)
    return data


def main(out, capability="90"):
    with tempfile.TemporaryDirectory() as folder:
        download = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, "nvidia-nccl-cu13"]
        subprocess.run(download, check=True)
        (wheel,) = Path(folder).glob("*.whl")
        library, stripped = Path(folder, "libnccl.so.2"), Path(folder, "stripped.so")
        library.write_bytes(zipfile.ZipFile(wheel).read("nvidia/nccl/lib/libnccl.so.2"))
        library.write_bytes(thin(library, int(capability)))
        subprocess.run(["strip", "--strip-unneeded", "-o", stripped, library], check=True)
        Path(out).write_bytes(lzma.compress(stripped.read_bytes(), preset=3))
        print(f"{wheel.name}: {Path(out).stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main(*sys.argv[1:])
