"""Polls gloo's point-to-point messages, which PyTorch cannot."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Sequence

import torch.distributed as dist

from diffcoll.engines.messages import Messages

# How long a process waits at exit for messages that were polled and never waited for.
EXIT_SECONDS = 5.0
# How long gloo's threads get at exit to free what they have sent. One that frees a tensor takes Python's lock for it.
THREADS_SECONDS = 0.01


def wait_for(works: Sequence[dist.Work], sends: Messages = (), recvs: Messages = ()) -> None:
    """Wait for all of them. If they are those of sends, and then of receives, an error names the first that failed."""
    completed = 0
    try:
        for work in works:
            work.wait()
            completed += 1
    except RuntimeError as error:
        if not (sends or recvs):
            raise
        raise of_message(completed, sends, recvs, error) from error


def of_message(number: int, sends: Messages, recvs: Messages, error: RuntimeError) -> RuntimeError:
    """Return the backend's error with the message that failed."""
    is_sent = number < len(sends)
    peer = f"to rank {sends[number][0]}" if is_sent else f"from rank {recvs[number - len(sends)][0]}"
    return RuntimeError(f"message {peer}: {error}")


class InThread:
    """The Wait for gloo's point-to-point messages, which complete in a wait only: `is_completed()` is False until then.

    So the first poll starts a thread that waits. A work cannot be waited for twice, so the Wait then joins the thread.
    At exit threads are given time to end, gloo's own too: std::terminate ends the process (exit code -6) if a thread
    asks for Python's lock, as on the way back from torch, while the interpreter shuts down.
    """

    def __init__(self, works: Sequence[dist.Work], sends: Messages, recvs: Messages) -> None:
        self._of_messages = works, sends, recvs
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Whether all messages have completed or failed; the first call takes up to a millisecond."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True, name="diffcoll poll")
            _polling.add(self._thread)
            self._thread.start()
            self._thread.join(0.001)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            wait_for(*self._of_messages)
        except BaseException as error:
            self._error = error

    def __call__(self) -> None:
        """Wait for all messages."""
        if self._thread is None:
            wait_for(*self._of_messages)
            return
        self._thread.join()
        if self._error is not None:
            raise self._error


_polling: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


@atexit.register
def _join_polling() -> None:
    time.sleep(THREADS_SECONDS)
    end = time.monotonic() + EXIT_SECONDS
    for thread in list(_polling):
        thread.join(max(0.0, end - time.monotonic()))
