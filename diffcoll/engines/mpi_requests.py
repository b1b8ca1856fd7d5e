"""What MPI has started: requests, and the library's own communicator, which the first call makes."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from diffcoll.engines.messages import KINDS
from diffcoll.engines.mpi_library import mpi_library

#: The largest tag that every MPI has. A message's tag is the number of its dtype and its collective, modulo this + 1.
TAGS = (1 << 15) - 1
#: The first of the tags of `Create_group`. Every MPI has tags up to 32767; a user's own calls may use small ones.
_TAG = 1 << 14


class Wanted(NamedTuple):
    """The message that a request receives: the rank that sends it, its size in bytes, its dtype and its tag."""

    s: int
    nbytes: int
    dtype: torch.dtype
    tag: int

    def refuse_other(self, status: Any) -> None:
        """Raise if another one arrived. MPI reports only one that is longer, and does not say from whom."""
        mpi = mpi_library()
        error, tag = mpi.Get_error_class(status.Get_error()), status.Get_tag()
        if error not in (mpi.SUCCESS, mpi.ERR_TRUNCATE):  # none arrived
            return
        if tag != self.tag:
            kind = (tag ^ self.tag ^ KINDS[self.dtype]) & TAGS
            got = next((dtype for dtype, number in KINDS.items() if number & TAGS == kind), "another collective")
            raise RuntimeError(f"got a message of {got} from rank {self.s}, expected {self.dtype}")
        if error == mpi.ERR_TRUNCATE:
            raise RuntimeError(f"got a message of more than {self.nbytes} bytes from rank {self.s}")
        if (nbytes := status.Get_count(mpi.BYTE)) != self.nbytes:
            raise RuntimeError(f"got a message of {nbytes} bytes from rank {self.s}, expected {self.nbytes}")


class Polled:
    """The Wait for requests. A poll completes those that are ready, and keeps their statuses and their error.

    It keeps the memory that they use alive. The first requests receive what is `wanted`.
    """

    def __init__(self, memory: object, requests: Sequence[Any], wanted: Sequence[Wanted] = ()) -> None:
        self._memory, self._requests, self._wanted = memory, requests, wanted
        self._statuses = [mpi_library().Status() for _ in requests] if wanted else None
        self._error: Exception | None = None
        self._is_complete = False

    def done(self) -> bool:
        """Whether all requests have completed or failed."""
        if self._error is None and not self._is_complete:
            try:
                self._is_complete = bool(mpi_library().Request.Testall(self._requests, self._statuses))
                return self._is_complete
            except Exception as error:  # MPI has released the request, so a wait would not report it again
                self._error = error
        return True

    def __call__(self) -> object:
        """Wait for all requests."""
        if self._error is None and not self._is_complete:  # completed requests have empty statuses
            try:
                mpi_library().Request.Waitall(self._requests, self._statuses)
            except Exception as error:
                self._error = error
        for status, message in zip(self._statuses or (), self._wanted, strict=False):
            message.refuse_other(status)
        if self._error is not None:
            raise self._error
        return self._memory


class Deferred:
    """The Wait for requests that are started when there is a communicator for them."""

    def __init__(self, start: Callable[[Any], Polled]) -> None:
        self._start = start
        self._begun = threading.Event()
        self._polled: Polled | None = None
        self._error: Exception | None = None

    def begin(self, comm: Any) -> None:
        """Start the requests."""
        try:
            self._polled = self._start(comm)
        except Exception as error:
            self._error = error
        self._begun.set()

    def fail(self, error: Exception) -> None:
        """There is no communicator."""
        self._error = error
        self._begun.set()

    def done(self) -> bool:
        """Whether all requests have completed or failed."""
        if not self._begun.is_set():
            return False
        return self._polled is None or self._polled.done()

    def __call__(self) -> object:
        """Wait for all requests."""
        self._begun.wait()
        if self._polled is None:
            assert self._error is not None
            raise self._error
        return self._polled()


class Duplicate:
    """The library's own communicator, with the ranks of a user's. All ranks make it, at their first call.

    MPI has no way to make one that does not wait for the other ranks. A call with `async_op` must not wait for them,
    since they may wait for this rank in another group. So there the communicator is made in a thread, which then starts
    what was deferred, in order; the thread ends. `Create_group` is the one function for this that may run in several
    threads at once, and beside the user's own calls in the same communicator.

    Args:
        users: the user's communicator.
        number: tells apart those that are made of one communicator at the same time; equal on all ranks.
    """

    def __init__(self, users: Any, number: int) -> None:
        self._users, self._tag = users, _TAG + number % _TAG
        #: None until it was made and all that was deferred has been started.
        self.comm: Any = None
        self._lock = threading.Lock()
        self._queue: deque[Deferred] = deque()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def get(self) -> Any:
        """Return the communicator; wait for the other ranks if it is not there yet."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            raise self._error
        if self.comm is None:
            self.comm = self._make()
        return self.comm

    def defer(self, call: Deferred) -> None:
        """Start the call when the communicator is there; do not wait for the other ranks."""
        with self._lock:
            if self.comm is None and self._error is None and self.has_threads():
                self._queue.append(call)
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, daemon=True, name="diffcoll first call")
                    self._thread.start()
                return
        call.begin(self.get())

    @staticmethod
    def has_threads() -> bool:
        """Whether MPI may be called in several threads at once. If not, a first call waits for the other ranks."""
        return bool(mpi_library().Query_thread() == mpi_library().THREAD_MULTIPLE)

    def free(self) -> None:
        """Free the communicator, if there is one."""
        if (self._thread is not None or self.comm is not None) and not mpi_library().Is_finalized():
            self.get().Free()
        self.comm = None

    def _make(self) -> Any:
        group = self._users.Get_group()
        try:
            return self._users.Create_group(group, self._tag)
        finally:
            group.Free()

    def _run(self) -> None:
        comm, error = None, None
        try:
            comm = self._make()
        except Exception as failure:
            error = failure
        while True:
            with self._lock:
                if not self._queue:
                    self.comm, self._error = comm, error
                    return
                call = self._queue.popleft()
            if error is None:
                call.begin(comm)
            else:
                call.fail(error)
