"""On which addresses and ports this process listens."""

import os
import socket
import struct
from pathlib import Path

#: A state in /proc/net/tcp and tcp6.
_LISTENS = "0A"


def listening(process="self"):
    """Return (address, port), IPv4 and IPv6, of a process, by default this one."""
    inodes = set()
    for file in Path(f"/proc/{process}/fd").iterdir():
        try:
            inodes.add(os.readlink(file))
        except FileNotFoundError:  # of this listing itself
            continue
    found = []
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENS and f"socket:[{fields[9]}]" in inodes:
                address, port = fields[1].split(":")
                words = [int(address[i : i + 8], 16) for i in range(0, len(address), 8)]  # in the host's byte order
                found.append((socket.inet_ntop(family, struct.pack(f"={len(words)}I", *words)), int(port, 16)))
    return sorted(found)
