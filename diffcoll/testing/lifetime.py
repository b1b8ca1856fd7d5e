"""Ranks end, and their folder is removed, with the process that started them, whatever ends it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.util import get_temp_dir

#: Removes the first folder when it receives a line, or all when its standard input is closed because the process that
#: uses them has ended. Ranks that are being killed may still write to the first one.
_REMOVE = """
trap "" HUP INT TERM
read _ && set -- "$1"
for i in 1 2 3 4 5 6 7 8 9; do rm -rf "$@" && break; sleep 0.1; done
"""


def end_with(leash: Connection) -> None:
    """Let the kernel kill this process, and all that it starts, when the other end of the leash is closed.

    Nothing is sent on the leash. The other end is held by the process that started this one, and only there.
    """
    os.setpgid(0, 0)  # Ctrl-C reaches that process only, and what this one starts ends with it
    fcntl.fcntl(leash, fcntl.F_SETOWN, -os.getpid())
    if hasattr(fcntl, "F_SETSIG"):  # Linux; elsewhere SIGIO, which ends a process too unless it handles it
        fcntl.fcntl(leash, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(leash, fcntl.F_SETFL, os.O_ASYNC)
    if wait([leash], timeout=0):  # it was closed before
        os.killpg(0, signal.SIGKILL)


@contextlib.contextmanager
def temporary_folder() -> Iterator[str]:
    """Create a folder for one call. It is removed when the block is left, or when this process is killed."""
    folders = [folder := tempfile.mkdtemp(prefix="diffcoll-")]
    if parent_process() is None:  # else it may be the parent's
        folders.append(get_temp_dir())  # of the fork server's socket; multiprocessing removes it at exit
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        remover = subprocess.Popen(
            ["/bin/sh", "-c", _REMOVE, "sh", *folders],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,  # signals to this process's group do not reach it
        )
        stack.callback(remover.communicate, b"\n")  # not by closing stdin: a copy of this process may hold it too
        yield folder
