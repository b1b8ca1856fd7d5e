"""Features that an older release of PyTorch lacks raise, and name the release; every private name still exists."""

import pytest
import torch
from releases import RELEASE
from runs import new_group

import diffcoll as dc
from diffcoll.testing import spawn

VERSION = torch.__version__.replace("+", ".")
before = pytest.mark.skipif


@before(RELEASE >= (2, 12), reason="collectives are compiled here")
def test_compilers_and_tracers_before_2_12():
    words = f"torch.compile and torch.export need torch 2.12 or later, and this is torch {RELEASE[0]}"
    x = torch.ones(2, requires_grad=True)
    for backend in ("eager", "aot_eager"):
        for fullgraph in (False, True):
            torch._dynamo.reset()
            with pytest.raises(Exception, match=words):
                torch.compile(lambda x: dc.all_reduce(2 * x, "max").sum(), fullgraph=fullgraph, backend=backend)(x)


@before(RELEASE >= (2, 12), reason="groups keep the order of their ranks here")
def test_groups_of_ranks_in_another_order_before_2_12():
    def body(r):
        with pytest.raises(ValueError, match=r"got ranks \[1, 0\], which torch .* would sort; pass ranks in ascending"):
            new_group([1, 0])
        return dc.all_reduce(torch.tensor(r + 1), group=new_group([0, 1])).item()

    assert spawn(body, range(2)) == [3, 3]
