"""Features that an older release of PyTorch lacks raise, and name the release; every private name still exists."""

import inspect

import pytest
import torch
import torch.distributed as dist
from releases import RELEASE
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import diffcoll as dc
from diffcoll.core import _torch
from diffcoll.testing import new_group, simulate, spawn

VERSION = torch.__version__.replace("+", ".")
before = pytest.mark.skipif


@before(RELEASE >= (2, 12), reason="collectives are compiled here")
def test_compilers_and_tracers_before_2_12():
    words = (
        f"torch.compile, torch.export, make_fx and the like need torch 2.12 or later, and this is torch {RELEASE[0]}"
    )
    x = torch.ones(2, requires_grad=True)
    for backend in ("eager", "aot_eager"):
        for fullgraph in (False, True):
            torch._dynamo.reset()
            with pytest.raises(Exception, match=words):
                torch.compile(lambda x: dc.all_reduce(2 * x, "max").sum(), fullgraph=fullgraph, backend=backend)(x)
    with pytest.raises(NotImplementedError, match=words):
        make_fx(lambda x: dc.all_gather(x))(x)


@before(RELEASE >= (2, 12), reason="groups keep the order of their ranks here")
def test_groups_of_ranks_in_another_order_before_2_12():
    def body(r):
        with pytest.raises(ValueError, match=r"got ranks \[1, 0\], which torch .* would sort; pass ranks in ascending"):
            new_group([1, 0])
        return dc.all_reduce(torch.tensor(r + 1), group=new_group([0, 1])).item()

    assert spawn(body, range(2)) == [3, 3]


@before(RELEASE >= (2, 8), reason="hooks for saved tensors are shown here")
def test_hooks_for_saved_tensors_before_2_8():
    words = "a checkpoint or other hooks for saved tensors: torch .* does not expose them, torch 2.8 and later do"

    def loss(x):
        with dc.joint_backward() as joint:
            return joint(checkpoint(dc.all_reduce, x, use_reentrant=False).sum())

    x = torch.ones(2, requires_grad=True)
    with pytest.raises(RuntimeError, match="joint_backward: a collective within " + words):
        loss(x)
    with torch.autograd.graph.save_on_cpu(), pytest.raises(RuntimeError, match="simulate: called within " + words):
        simulate(lambda r: r, range(2))
    with dc.joint_backward() as joint:  # the failed region left no state
        joint(dc.all_reduce(x).sum()).backward()
    assert x.grad.tolist() == [1, 1]


def test_each_switch_finds_one_of_its_ways():
    """A private name that is missing in both its forms fails here, and not at its first use."""
    assert hasattr(_torch.eval_frame, "set_code_exec_strategy") or hasattr(_torch.eval_frame, "skip_code")
    assert hasattr(torch.utils._pytree, "tree_is_leaf") == (RELEASE >= (2, 8))
    assert hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks") == (RELEASE >= (2, 8))
    assert hasattr(torch._C, "_autocast_supported_devices") == (RELEASE >= (2, 9))
    assert hasattr(torch.autograd.grad_mode, "enforce_grad_layout_policy") == (RELEASE >= (2, 13))
    assert hasattr(torch, "float8_e8m0fnu") == (RELEASE >= (2, 7))
    assert ("sort_ranks" in inspect.signature(dist.new_group).parameters) == (RELEASE >= (2, 12))
    assert set(_torch._autocast_devices()) >= {"cpu", "cuda"}
