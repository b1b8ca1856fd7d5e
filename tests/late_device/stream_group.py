"""What the backends of torch.distributed on the test device share: they treat streams as NCCL does.

A backend has a stream of its own, which waits for the caller's; the wait for a call makes the current stream wait for
its end, not the host; inputs and outputs are kept until then.
"""

from datetime import timedelta
from types import SimpleNamespace

import torch
import torch.distributed as dist


class StreamWork(dist.Work):
    """A call; `end` is an event on the backend's stream."""

    def __init__(self, kept, end=None):
        super().__init__()
        self.kept, self.end = kept, end

    def wait(self, timeout=None):
        """Make the current stream wait for the call."""
        if self.end is not None:
            torch.accelerator.current_stream().wait_event(self.end)
        self.kept = None
        return True

    def is_completed(self):
        """Whether the device has done it."""
        return self.end is None or self.end.query()


class StreamGroup(dist.ProcessGroup):
    """A group with a stream of its own."""

    #: The name for PyTorch's messages.
    kind = ""

    def __init__(self, rank, size):
        super().__init__(rank, size)
        self.stream = torch.Stream(device="late")

    def getBackendName(self):
        """Return the name for PyTorch's messages."""
        return self.kind

    def _set_group_name(self, name):
        self._name = name

    @property
    def group_name(self):
        """Return the name that `init_process_group` and `new_group` have set."""
        return self._name

    def _get_backend(self, device):
        return SimpleNamespace(options=SimpleNamespace(_timeout=timedelta(seconds=60)), supports_coalescing=False)

    def _run(self, kernel, *kept):
        """Run it on the backend's stream; at once if the tensors are the CPU's."""
        if kept[0].is_cpu:
            kernel()
            return StreamWork(None)
        self.stream.wait_stream(torch.accelerator.current_stream())
        with self.stream:
            kernel()
        return StreamWork(kept, self.stream.record_event())
