"""Gradient caching (GradCache): the gradient of one loss of a batch that does not fit through the model.

forward   features of each chunk without a graph; the loss of all of them, and its gradient g_i of chunk i's features
backward  the features of chunk i again, with a graph, and their backward with g_i
note      notes/training/contrastive.md
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

from diffcoll.composed.leaves import batch_leaves, number_of_rows
from diffcoll.core import expect
from diffcoll.core.errors import message

_NAME = "grad_cache"
_Batch = TypeVar("_Batch")
_Features = TypeVar("_Features")


def grad_cache(
    encode: Callable[[_Batch], _Features],
    batch: _Batch,
    loss: Callable[[_Features], Tensor],
    *,
    chunk_size: int,
    no_sync: Callable[[], AbstractContextManager[Any]] | None = None,
) -> Tensor:
    """Contrastive batches that do not fit through the model: `loss(encode(batch)).backward()` with less memory.

    The model runs twice, on `chunk_size` rows at a time; the loss runs once, on the features of all rows. The gradients
    in `.grad`, those of the loss's own parameters included, are those of this call, and are added to what is there.

    >>> import torch, diffcoll as dc
    >>> model, scale = torch.nn.Linear(5, 3).double(), torch.tensor(2.0, requires_grad=True)
    >>> x, y = torch.randn(8, 5).double(), torch.randn(8, 5).double()
    >>> encode = lambda batch: (model(batch["image"]), model(batch["text"]))
    >>> loss = lambda features: dc.nn.functional.clip_loss(*features, scale, normalize=True)
    >>> value = dc.nn.grad_cache(encode, {"image": x, "text": y}, loss, chunk_size=3)
    >>> torch.testing.assert_close(value, loss(encode({"image": x, "text": y})).detach())

    Args:
        encode: called with chunks of the batch, returns features: a tensor, or nested tuples, lists and dicts of
            tensors, with one row for each row of the chunk. It must not depend on the other rows, as batch norm in
            training does, and without a graph it does the same as with one. It has no collectives, unless all ranks
            have the same number of chunks.
        batch: this rank's, a tensor, or nested tuples, lists and dicts of tensors; dim 0 of each is the batch, of the
            same length for all tensors of a rank. A rank without rows runs the model on one empty chunk.
        loss: called once with the features of all rows of this rank, in the structure that `encode` returns. Returns
            a tensor with one element.
        chunk_size: number of rows of a chunk; the last one may have fewer. Ranks may have different numbers of chunks.
        no_sync: returns a context in which backward synchronizes no gradients, as `model.no_sync` of a
            `DistributedDataParallel`. All but the last chunk run in it, so gradients are reduced once per step. None:
            there is nothing to suppress, as with `GradientAverager`, whose `reduce()` you put around this call.

    Returns:
        The loss, detached.

    Raises:
        TypeError, ValueError: an argument, or what `encode` or `loss` returns, is invalid.
        RuntimeError: gradients are disabled, or no feature requires one.

    Source: notes/training/contrastive.md.
    """
    size = expect.integer(_NAME, "chunk_size", chunk_size, 1)
    if hasattr(no_sync, "no_sync"):
        kind, remedy = type(no_sync).__name__, "pass its method no_sync, without calling it"
        raise TypeError(message(_NAME, "no_sync", kind, "a function that returns a context", remedy))
    if not torch.is_grad_enabled():
        raise RuntimeError(message(_NAME, "grad mode", "off", "on, since it runs backward", "use loss(encode(batch))"))
    without_sync = nullcontext if no_sync is None else no_sync
    leaves, rebuild = batch_leaves(_NAME, batch, "batch")
    number_of_rows(_NAME, batch, leaves, "batch")
    split = list(zip(*(torch.split(x, size) for x in leaves), strict=True))  # no rows: one chunk without rows

    encoded, random_states = [], []
    with torch.no_grad():
        for parts in split:
            random_states.append(_RandomState())
            features = encode(rebuild([*parts]))
            encoded.append(_leaves_of(features, len(parts[0]))[0])
    restore = _leaves_of(features, len(parts[0]))[1]
    cached = [torch.cat(parts) for parts in zip(*encoded, strict=True)]
    del encoded, features
    with without_sync():
        value = _backward_of(loss, cached, restore)
    gradients = [[None] * len(split) if x.grad is None else torch.split(x.grad, size) for x in cached]
    for i, parts in enumerate(split):
        is_last = i == len(split) - 1
        with nullcontext() if is_last else without_sync(), random_states[i].replayed():
            outputs, _ = _leaves_of(encode(rebuild([*parts])), len(parts[0]))
            _backward_from(outputs, [each[i] for each in gradients])
    return value


def _leaves_of(features: object, rows: int) -> tuple[list[Tensor], Callable[[list[Any]], Any]]:
    """Return the leaves of what `encode` returned for a chunk, and the function that rebuilds it."""
    leaves, restore = batch_leaves(_NAME, features, "features")
    if number_of_rows(_NAME, features, leaves, "features") != rows:
        got, expected = f"{len(leaves[0])} rows", f"{rows}, as the chunk of the batch has"
        remedy = "return one row for each sample; several views are several tensors, or a dimension of their own"
        raise ValueError(message(_NAME, "features", got, expected, remedy))
    return leaves, restore


def _backward_of(loss: Callable[[Any], Tensor], cached: list[Tensor], restore: Callable[[list[Any]], Any]) -> Tensor:
    """Return the loss of the features, detached, after its backward, which sets their `.grad`."""
    for x in cached:
        x.requires_grad_(x.is_floating_point() or x.is_complex())
    value = loss(restore([*cached]))
    if not isinstance(value, Tensor) or value.numel() != 1:
        got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(message(_NAME, "loss", got, "a function that returns a tensor with one element"))
    value.backward()  # type: ignore[no-untyped-call]
    return value.detach()


def _backward_from(features: list[Tensor], gradients: list[Tensor | None]) -> None:
    """Run the backward of a chunk; if the loss uses none of its features, with zeros, since other ranks may wait."""
    differentiable = [(y, g) for y, g in zip(features, gradients, strict=True) if y.requires_grad]
    if not differentiable:
        got, expected = "none that requires a gradient", "at least one"
        raise RuntimeError(message(_NAME, "features", got, expected, "use loss(encode(batch)).backward()"))
    used = [(y, g) for y, g in differentiable if g is not None]
    used = used or [(y, torch.zeros_like(y)) for y, _ in differentiable]
    torch.autograd.backward([y for y, _ in used], [g for _, g in used])


class _RandomState:
    """The state of the random number generators of the CPU and of the current accelerator, if it is in use."""

    def __init__(self) -> None:
        device = torch.accelerator.current_accelerator(check_available=True)
        module: Any = None if device is None else torch.get_device_module(device)
        in_use = module is not None and getattr(module, "is_initialized", lambda: True)()
        self._modules = [torch.random, module] if in_use else [torch.random]
        self._states = [each.get_rng_state() for each in self._modules]

    def _set(self) -> None:
        for module, state in zip(self._modules, self._states, strict=True):
            module.set_rng_state(state)

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Return a context that draws from this state, and then goes on from the present one."""
        present = _RandomState()
        self._set()
        try:
            yield
        finally:
            present._set()
