"""A CPU with tensor cores."""

import pytest
import torch

from diffcoll.nn import contrastive, vocab_parallel

HALF = (torch.bfloat16, torch.float16)


@pytest.fixture
def cores(monkeypatch):
    """The CPU multiplies halves and adds up in float32, and the losses take it for a device that does."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("mm.dtype", lambda a, b, out_dtype: a.to(out_dtype) @ b.to(out_dtype), "CPU")
    for module in (contrastive, vocab_parallel):
        monkeypatch.setattr(module, "tensor_cores", lambda x: x.dtype if x.dtype in HALF else None)
    yield
    library._destroy()
