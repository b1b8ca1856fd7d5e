"""The product over dim 0 as a torch.library op: the one rule that is not linear and not PyTorch's own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from diffcoll.core.over_ranks import value_in_pieces
from diffcoll.core.product import PRODUCT
from diffcoll.core.torch_private.transforms import batch_last


def product(s: Tensor) -> Tensor:
    """Return the product over dim 0 as one op."""
    y: Tensor = torch.ops.diffcoll.product(s)
    return y


def _save(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _product_backward(ctx: Any, gy: Tensor) -> Tensor:
    (s,) = ctx.saved_tensors
    return PRODUCT.gradient(s, gy, gy)  # it does not use y


def _product_of_batch(info: Any, in_dims: tuple[int], s: Tensor) -> tuple[Tensor, int]:
    return batch_last(product(s.movedim(in_dims[0], -1)))


_product = torch.library.custom_op(
    "diffcoll::product", lambda s: value_in_pieces(s, PRODUCT), mutates_args=(), schema="(Tensor s) -> Tensor"
)
_product.register_fake(lambda s: s.new_empty(s.shape[1:]))
_product.register_autograd(_product_backward, setup_context=_save)
_product.register_vmap(_product_of_batch)
