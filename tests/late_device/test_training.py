"""A training on several streams and two ranks of the test device does what one CPU does."""

import late
import pytest
import torch
from device_ranks import BACKENDS, N, on_two
from planting import planted
from stream_group import StreamGroup
from stream_training import STEPS, on_cpu, on_rank

from diffcoll.averaging.buckets import Bucket
from diffcoll.averaging.messages import Message

#: With buckets of 20 KB, gradients of several streams are in one bucket, and there are several buckets.
SETTINGS = [("mean", 25), ("mean", 2e-2), ("count", 2e-2), ("sum", 2e-2), ("sum", 1e-4)]


def differing(found, reduction):
    """Return the steps after which parameters differ from those of one CPU."""
    pairs = zip(found, on_cpu(N, reduction), strict=True)
    return [step for step, pair in enumerate(pairs) if not torch.allclose(*pair, rtol=1e-10, atol=1e-12)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("reduction", "bucket_mb"), SETTINGS)
def test_parameters_are_those_of_one_cpu(backend, reduction, bucket_mb, order):
    def body(r):
        return on_rank(r, reduction, bucket_mb=bucket_mb)

    for found, waits in on_two(backend, order, body):
        assert differing(found, reduction) == []
        if backend == "gloo":  # in the first step the ranks agree on the order
            assert waits[1:STEPS] == [0] * (STEPS - 1)


#: Each sends a message, or reads one, before it is there.
TOO_EARLY = [
    (Bucket, "_join_streams", "here.wait_stream(other)"),
    (Bucket, "enter_stream", "self._others.add(here)"),
    (StreamGroup, "_run", "self.stream.wait_stream(torch.accelerator.current_stream())"),
    (Message, "wait", "self._wait()"),
]


@pytest.mark.parametrize(("owner", "name", "line"), TOO_EARLY, ids=[f"{name}: {line}" for _, name, line in TOO_EARLY])
def test_a_message_that_is_sent_too_early_is_noticed(owner, name, line):
    def body(r):
        planted(owner, name, line)
        return on_rank(r, "count", bucket_mb=2e-2)

    noticed = [differing(found, "count") for order in late.ORDERS for found, _ in on_two("gloo", order, body)]
    assert any(noticed)
