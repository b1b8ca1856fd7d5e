"""An error of the averager's in backward, which autograd runs in a thread of its own: `.grad` is restored before."""

import threading

import pytest
import torch

import diffcoll as dc

pytestmark = pytest.mark.usefixtures("two_ranks")


@pytest.mark.parametrize("reduced_before", [False, True])
def test_an_error_while_a_bucket_is_sent(reduced_before):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3))).to("late")
    averager = dc.GradientAverager(model, bucket_mb=1e-6, reduction="sum")
    sender = averager._reducer._sender
    start, sent, threads = sender.start, [], set()

    def fail_at_the_fourth(bucket, now):
        threads.add(threading.get_ident())
        sent.append(bucket)
        if len(sent) == 4:
            raise ValueError("while a bucket is sent")
        start(bucket, now)

    def gradients():
        return [None if p.grad is None else p.grad.cpu() for p in model.parameters()]

    x = torch.arange(8.0).view(2, 4).to("late")
    for _ in range(20):
        model.zero_grad()
        model(x).sum().backward()
        once = gradients()
        if not reduced_before:
            model.zero_grad()
        before = gradients()
        sender.start = fail_at_the_fourth
        with pytest.raises(ValueError, match="while a bucket is sent"):
            model(x).sum().backward()
        after = gradients()
        assert all(a is b if a is None or b is None else torch.equal(a, b) for a, b in zip(after, before, strict=True))
        sender.start = start
        sent.clear()
        averager._hooks.end_failed_backward()
        model.zero_grad()
        model(x).sum().backward()
        assert all(torch.equal(a, b) for a, b in zip(gradients(), once, strict=True))
    assert threading.get_ident() not in threads
