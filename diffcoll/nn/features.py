"""The arguments that contrastive losses share: features, scales, labels, and options.

note  notes/training/contrastive.md
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

from diffcoll.core import expect
from diffcoll.core.dtypes import FLOATS, wider
from diffcoll.core.errors import message
from diffcoll.core.torch_private.tracing import assume
from diffcoll.core.torch_private.transforms import is_eager
from diffcoll.engines.types import Group
from diffcoll.nn.convention import RankReduction, check_options
from diffcoll.nn.inputs import saveable
from diffcoll.nn.logits import normalized
from diffcoll.nn.loss_module import Exchange


@dataclass(frozen=True)
class Options:
    """The options of a call of the loss `name`, checked."""

    name: str
    #: The argument with the features of the rows.
    rows: str
    #: Scale and bias, or temperature.
    numbers: Mapping[str, Tensor | float]
    normalize: bool
    group: Group
    rank_reduction: RankReduction
    chunk_size: int | None
    exchange: Exchange
    #: Whether a row's positives are left out of its denominator.
    decoupled: bool = False
    #: The part of a row's target that all its columns share.
    label_smoothing: float = 0.0
    #: Whether columns, too, are classified among the rows.
    symmetric: bool = False
    #: Whether rows without positives are left out of the mean.
    only_rows_with_positives: bool = False

    @property
    def same(self) -> dict[str, object]:
        """The options that are the same on all ranks; numbers and chunk_size may differ."""
        different = "name", "rows", "numbers", "group", "chunk_size"
        found = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in different}
        return {**found, "normalize": bool(self.normalize), "label_smoothing": float(self.label_smoothing)}

    def __post_init__(self) -> None:
        for flag in ("decoupled", "symmetric", "only_rows_with_positives"):
            expect.flag(self.name, flag, getattr(self, flag))
        expect.fraction(self.name, "label_smoothing", self.label_smoothing)
        own = {key: x for key, x in self.same.items() if key != "rank_reduction"}
        check_options(self.name, self.group, self.rank_reduction, **own, **self.numbers)
        if self.decoupled and self.label_smoothing:
            remedy = "a decoupled loss is no cross-entropy: its denominator lacks the positives"
            raise ValueError(message(self.name, "label_smoothing", self.label_smoothing, "0 with decoupled", remedy))
        check_chunk_size(self.name, self.chunk_size)
        remedy = '"ring" keeps the features of one other rank at a time instead of those of all ranks'
        expect.choice(self.name, "exchange", self.exchange, ("gather", "ring"), remedy)


def check_chunk_size(name: str, chunk_size: object) -> None:
    """Raise unless `chunk_size`, an argument of the loss `name`, is None or a positive integer."""
    if chunk_size is not None and (isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1):
        remedy = "the number of columns of the matrix of logits that are computed at a time, e.g. 512"
        raise ValueError(message(name, "chunk_size", repr(chunk_size), "None or a positive integer", remedy))


def check_features(name: str, dims: tuple[int, ...] = (2,), **features: Tensor) -> None:
    """Raise unless all features are floating-point tensors of one shape, dtype and device, with one row per sample."""
    (first, x), *others = features.items()
    expected = "(b, D)" if dims == (2,) else "(b, D) or (b, views, D)"
    for argument, y in features.items():
        _check_floats(name, argument, y, expected)
        if y.ndim not in dims or 0 in y.shape[1:]:
            remedy = "flatten the features to one row per sample: x.flatten(1)"
            raise ValueError(message(name, argument, f"shape {tuple(y.shape)}", f"shape {expected}", remedy))
    for argument, y in others:
        if y.shape != x.shape:
            remedy = f"row i of {argument} belongs to row i of {first}"
            got = f"shape {tuple(y.shape)}"
            raise ValueError(message(name, argument, got, f"shape {tuple(x.shape)}, as {first} has", remedy))
        _check_alike(name, argument, y, first, x)


def check_columns(name: str, query: Tensor, positive: Tensor, negatives: Tensor | None) -> None:
    """Raise unless these are features of the size, dtype and device of the queries, in numbers that fit them.

    Expected sizes are formatted where they are needed, as Dynamo specializes a size that is formatted.
    """
    b, size = query.shape
    _check_floats(name, "positive", positive, "(b, D) or (b, P, D)")
    rows, *several, last = positive.shape if positive.ndim > 1 else (-1, -1)
    if rows != b or last != size or len(several) > 1 or 0 in several:
        expected = f"shape {tuple(query.shape)}, as query has, or ({b}, P, {size}) with P positives for each query"
        got, remedy = f"shape {tuple(positive.shape)}", "row i of positive belongs to row i of query"
        raise ValueError(message(name, "positive", got, expected, remedy))
    _check_alike(name, "positive", positive, "query", query)
    if negatives is None:
        return
    _check_floats(name, "negatives", negatives, "(m, D) or (b, K, D)")
    n = negatives.shape
    if len(n) not in (2, 3) or n[-1] != size or (len(n) == 3 and n[0] != b):
        expected = f"shape (m, {size}), for all queries, or ({b}, K, {size}), K for each row of query"
        remedy = "(m, D) are negatives of all ranks' queries, and negatives[i] of (b, K, D) of row i of query alone"
        raise ValueError(message(name, "negatives", f"shape {tuple(n)}", expected, remedy))
    _check_alike(name, "negatives", negatives, "query", query)


def soft_targets(name: str, targets: Tensor, x: Tensor, **others: object) -> Tensor:
    """Return soft targets in the dtype of the logits; raise unless they fit this rank's rows, x.

    `others`: arguments that say what the targets are, and have no meaning besides them.
    """
    _check_floats(name, "targets", targets, "(b, number of all ranks' columns)")
    if targets.ndim != 2 or len(targets) != len(x):
        expected = f"shape ({len(x)}, number of all ranks' columns)"
        raise ValueError(message(name, "targets", f"shape {tuple(targets.shape)}", expected))
    if targets.device != x.device:
        raise ValueError(message(name, "targets", f"a tensor on {targets.device}", f"{x.device}, as the features"))
    if targets.requires_grad:
        remedy = "the loss has no gradient of its targets; pass targets.detach()"
        raise ValueError(message(name, "targets", "a tensor that requires a gradient", "one that does not", remedy))
    for other, value in others.items():
        if isinstance(value, Tensor) or value:
            remedy = "targets alone say which columns are right"
            raise ValueError(message(name, other, "given together with targets", "one of the two", remedy))
    return saveable(targets).to(wider(x.dtype))


def check_targets(name: str, targets: Tensor, columns: int) -> None:
    """Raise, on all ranks, unless there is a target for each of all ranks' columns; each rank has as many.

    While compiling, a number of columns has no value: this becomes an assertion of the graph.
    """
    if torch.compiler.is_compiling():
        assume(columns == targets.shape[1])
    elif targets.shape[1] != columns:
        expected = f"(b, {columns}), a target for each column of all ranks"
        remedy = "columns are the positives of all ranks, in the order of ranks"
        raise ValueError(message(name, "targets", f"{targets.shape[1]} columns", expected, remedy))


def _check_floats(name: str, argument: str, x: Tensor, shape: str) -> None:
    if not isinstance(x, Tensor):
        remedy = "torch.as_tensor(x) makes one"
        raise TypeError(message(name, argument, type(x).__name__, f"a tensor of shape {shape}", remedy))
    if x.dtype not in FLOATS:
        remedy = "pass the features as x.float()"
        raise TypeError(message(name, argument, str(x.dtype), "float16, bfloat16, float32 or float64", remedy))


def _check_alike(name: str, argument: str, y: Tensor, first: str, x: Tensor) -> None:
    if y.dtype != x.dtype:
        remedy = "convert one of them"
        raise TypeError(message(name, argument, str(y.dtype), f"{x.dtype}, as {first} has", remedy))
    if y.device != x.device:
        remedy = "move one of them"
        raise ValueError(message(name, argument, f"a tensor on {y.device}", f"{x.device}, as {first}", remedy))


def per_row(name: str, argument: str, x: Tensor, rows: Tensor) -> Tensor:
    """Return labels or ids, after a check that there is one number for each row of the features."""
    if not isinstance(x, Tensor) or x.shape != (len(rows),):
        expected = f"a tensor of shape ({len(rows)},), one number per row of the features"
        if not isinstance(x, Tensor):
            raise TypeError(message(name, argument, type(x).__name__, expected, "torch.as_tensor(x) makes one"))
        raise ValueError(message(name, argument, f"shape {tuple(x.shape)}", expected, "pass this rank's rows only"))
    if x.is_floating_point() or x.is_complex():  # NaN equals no number, and large numbers are rounded to the same one
        remedy = f"number the classes or samples in the same way on all ranks, or pass {argument}.long()"
        raise TypeError(message(name, argument, str(x.dtype), "integers or bool", remedy))
    if x.device != rows.device:
        raise ValueError(message(name, argument, f"a tensor on {x.device}", f"{rows.device}, as the features"))
    return x.detach()


def scalar(name: str, argument: str, x: Tensor | float, like: Tensor, positive: bool = False) -> Tensor:
    """Return a number or a tensor with one element as a 0-d tensor of the dtype of the logits."""
    expected = "a number, or a floating-point tensor with one element"
    if isinstance(x, Tensor):
        if x.numel() != 1 or not x.is_floating_point():
            got = f"a {x.dtype} tensor of shape {tuple(x.shape)}"
            raise ValueError(message(name, argument, got, expected, "one value serves all pairs"))
        # Reading a number of another device would wait for it, and one that is traced has none.
        readable = positive and x.device.type == "cpu" and is_eager(x)
        if readable and float(x.detach()) <= 0:
            got = f"a tensor with {float(x.detach())}"
            raise ValueError(message(name, argument, got, "a number above 0", "logits are divided by it"))
        return saveable(x).reshape(()).to(like.device, like.dtype)
    if not expect.is_number(x):
        raise TypeError(message(name, argument, type(x).__name__, expected))
    if positive and not x > 0:
        raise ValueError(message(name, argument, repr(x), "a number above 0", "logits are divided by it"))
    return torch.full((), x, dtype=like.dtype, device=like.device)  # filled in there: a copy would block the host


def wide(x: Tensor, normalize: bool) -> Tensor:
    """Return features in float32, or float64 if they are, and normalized rows if asked for."""
    x = saveable(x).to(wider(x.dtype))
    return normalized(x) if normalize else x


class Columns(NamedTuple):
    """Features of this rank's columns."""

    #: In the dtype of the logits, as they are sent.
    k: Tensor
    #: The dtype that they are sent in, which is exact for them.
    sent: torch.dtype
    #: Normalized if asked for.
    here: Tensor
    #: Whether a receiver has to normalize them.
    later: bool


def columns_of(x: Tensor, normalize: bool) -> Columns:
    """Return features as columns.

    Half-precision features are sent unchanged, since normalized features would be rounded once more. All that a loss
    computes of them is computed of one float32 copy, so that the parts of their gradient are added before it is
    rounded.
    """
    k = wide(x, False)
    here = normalized(k) if normalize else k
    half = k.dtype != x.dtype
    return Columns(k if half else here, x.dtype, here, normalize and half)
