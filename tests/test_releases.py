"""Features that an older release of PyTorch lacks raise, and name the release."""

import pytest
import torch
from releases import RELEASE

import diffcoll as dc


@pytest.mark.skipif(RELEASE >= (2, 12), reason="collectives are compiled here")
def test_compilers_and_tracers_before_2_12():
    words = f"torch.compile and torch.export need torch 2.12 or later, and this is torch {RELEASE[0]}"
    x = torch.ones(2, requires_grad=True)
    for backend in ("eager", "aot_eager"):
        for fullgraph in (False, True):
            torch._dynamo.reset()
            with pytest.raises(Exception, match=words):
                torch.compile(lambda x: dc.all_reduce(2 * x, "max").sum(), fullgraph=fullgraph, backend=backend)(x)
