"""A training on several streams and two ranks of the test device does what one CPU does."""

import pytest
import torch
from device_ranks import BACKENDS, N, on_two
from stream_training import STEPS, on_cpu, on_rank

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
