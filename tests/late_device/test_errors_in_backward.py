"""An error of the averager's in backward, which autograd runs in a thread of its own: no gradient is left."""

import threading

import pytest
import torch

import diffcoll as dc
from diffcoll.averaging.reducer import Block

pytestmark = pytest.mark.usefixtures("two_ranks")


def test_an_error_while_a_bucket_is_sent(monkeypatch):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3))).to("late")
    averager = dc.GradientAverager(model, bucket_mb=1e-6, reduction="sum")
    send, sent, threads = Block._send, [], set()

    def fail_at_the_fourth(block, bucket):
        threads.add(threading.get_ident())
        sent.append(bucket)
        if len(sent) == 4:
            raise ValueError("while a bucket is sent")
        send(block, bucket)

    def gradients():
        return [p.grad.cpu() for p in model.parameters()]

    x = torch.arange(8.0).view(2, 4).to("late")
    averager.backward(model(x).sum())  # the buckets are ordered after it
    for _ in range(20):
        model.zero_grad()
        averager.backward(model(x).sum())
        once = gradients()
        model.zero_grad()
        monkeypatch.setattr(Block, "_send", fail_at_the_fourth)
        with pytest.raises(ValueError, match="while a bucket is sent"):
            averager.backward(model(x).sum())
        assert all(p.grad is None for p in model.parameters())
        monkeypatch.undo()
        sent.clear()
        averager.backward(model(x).sum())
        assert all(torch.equal(a, b) for a, b in zip(gradients(), once, strict=True))
    assert len(threads) == 2
