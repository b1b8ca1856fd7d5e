"""GradientAverager under compiled autograd, which runs no callback at the end of backward."""

import importlib

import pytest
import torch
from torch import nn
from training import LEFT, attach

import diffcoll as dc
from diffcoll.testing import spawn


def test_a_backward_under_compiled_autograd():
    """An error on all ranks, also if one rank alone has it; `synchronize` and later backwards work."""

    def body(r):
        dynamo = importlib.import_module("torch._dynamo")  # by name: cloudpickle would send it
        texts = []
        for everywhere, reduction in ((True, "mean"), (False, "weighted")):
            w = nn.Linear(3, 2, bias=False)
            averager, backward = attach(w, reduction)

            def step(reduces, w=w, averager=averager, backward=backward):
                w.zero_grad()
                backward(lambda: w(torch.full((1, 3), r + 1.0)).sum(), r + 1, reduces)
                if not reduces:
                    averager.synchronize()

            right = [[1.5 if reduction == "mean" else 5 / 3] * 3] * 2
            with dynamo.config.patch(compiled_autograd=everywhere or r == 1):
                compiled = torch.compile(step, backend="eager")
                with pytest.raises(RuntimeError) as caught:
                    compiled(True)
                    averager.synchronize()  # not reached; the ranks that wait raise when another rank goes on
                texts.append(str(caught.value))
                compiled(False)
                torch.testing.assert_close(w.weight.grad, torch.tensor(right))
            dynamo.reset()
            step(True)
            torch.testing.assert_close(w.weight.grad, torch.tensor(right))
            averager.detach()
        return texts

    found = spawn(body, range(2), timeout=200)
    for r, texts in enumerate(found):
        for k, text in enumerate(texts):
            if k == 0 or r == 1:
                assert text.startswith("GradientAverager: compiled autograd runs this backward, which does not tell")
                assert "call backward within no_sync() and synchronize() after it" in text
            else:
                assert text.startswith(f"GradientAverager: {LEFT}")


@pytest.mark.parametrize("first", [True, False])
def test_hooks_of_the_user_under_compiled_autograd(first):
    """Registered before the averager a hook gets this rank's own gradient; registered after it, backward raises."""

    def body(r):
        dynamo = importlib.import_module("torch._dynamo")
        w = nn.Linear(3, 1, bias=False)
        if first:
            w.weight.register_hook(lambda g: g.clamp(max=1.5))
        averager = dc.GradientAverager(w, reduction="weighted")
        if not first:
            w.weight.register_hook(lambda g: g.clamp(max=1.5))

        def step():
            averager.set_weight(r + 1)
            loss = w(torch.full((1, 3), r + 1.0)).sum()
            with averager.no_sync():
                loss.backward()

        with dynamo.config.patch(compiled_autograd=True):
            if not first:
                with pytest.raises(RuntimeError, match="the parameter has a hook that was registered after the averag"):
                    torch.compile(step, backend="eager")()
                return None
            torch.compile(step, backend="eager")()
        averager.synchronize()
        return w.weight.grad.tolist()

    wanted = [[pytest.approx((1 * 1.0 + 2 * 1.5) / 3)] * 3] if first else None
    assert spawn(body, range(2), timeout=200) == [wanted] * 2
