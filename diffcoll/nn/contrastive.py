"""Rows of this rank against the columns of all ranks: masks, and log-sum-exps of the logits, in chunks of rows.

    s_ij = scale · x_i · y_j            i: this rank's b rows; j: all ranks' B columns
    neg_i = log Σ_j exp s_ij            over the negatives: neither positive nor left out
    term_i = softplus(neg_i − pos_i)    of a row with one positive; −log of its softmax

Positives stay apart from negatives: log(exp pos + exp neg) − pos, and its gradient, would be differences of nearly
equal numbers where the loss is small. With chunks, a checkpoint computes the logits of some rows again in backward;
collectives are outside of it.

note  notes/training/contrastive.md
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

from diffcoll.collectives.all_gather import all_gather, gathered_as
from diffcoll.core import expect
from diffcoll.core.arguments import Sizes
from diffcoll.core.dtypes import wider
from diffcoll.core.errors import CollectiveMismatchError, message
from diffcoll.core.exchange import agree_on_gradients, exchanged, gradients_needed, lengths_of
from diffcoll.core.groups import resolve
from diffcoll.core.torch_private.tracing import is_known, is_observed
from diffcoll.core.torch_private.transforms import carries_tangents, is_batched_by_autograd, is_within_transform
from diffcoll.engines.engine import Engine
from diffcoll.engines.types import Group
from diffcoll.nn.arguments import Number, check_chunk_size, check_columns, check_exclude, check_marks, without_autocast
from diffcoll.nn.whole import of_sums

# ── the rows of all ranks ────────────────────────────────────────────────────────────────────────────────


class Batch:
    """The rows of all ranks, which of them are this rank's, and options of the loss `name`.

    x are this rank's features that are gathered, (b, …, D), and `marks` its labels and ids, (b,), which are sent in one
    message. `exclude` has `of_each` columns for each row of all ranks, and `out`, (b, of_each), is sent: features that
    all ranks leave out. A second collective of the loss depends on x and `reduced`.

    Raises:
        TypeError, ValueError, CollectiveMismatchError: a mark, the chunk size or `exclude` is invalid, or as of
            `sizes_of_ranks`; x was checked before.
    """

    def __init__(
        self,
        name: str,
        x: Tensor,
        normalize: bool,
        sizes: Sizes,
        group: Group,
        chunk_size: int | None = None,
        exclude: Tensor | None = None,
        of_each: int = 1,
        reduced: Sequence[Number] = (),
        out: Tensor | None = None,
        **marks: Tensor | None,
    ) -> None:
        self.name, self.group, engine = name, group, resolve(group, name)
        self.chunk_size = check_chunk_size(name, chunk_size)
        self.marks = self.all_marks = check_marks(name, x, **marks) | ({} if out is None else {"out": out})
        self.exclude = check_exclude(name, "exclude", exclude, x.shape[0])
        #: The dtype whose products run on tensor cores; None: those of the features' own.
        self.half = tensor_cores(x)
        #: Whether `features` are normalized, or left to `Logits`: tensor cores multiply them as they are.
        self.normalize, self.late = normalize and self.half is None, normalize and self.half is not None
        self.sizes = sizes_of_ranks(name, engine, x, sizes, [[x], [x, *reduced]], self.exclude, of_each)
        self.total = sum(self.sizes)
        #: The number of each of this rank's rows among all rows. A slice of all numbers has no size in a graph.
        self.mine = torch.arange(x.shape[0], device=x.device) + sum(self.sizes[: engine.rank])
        if self.marks and engine.size > 1:
            self.all_marks = all_gather(self.marks, sizes=self.sizes, group=group)

    def features(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return this rank's and all ranks' features in float32 or float64, normalized unless `late`.

        Half-precision features are sent as they are: normalized ones would be rounded once more. Parts of their
        gradient are added in float32, and rounded once.
        """
        wide = widened(x, False)  # once: the parts of its gradient are added before they are rounded
        own = normalized(wide) if self.normalize else wide
        if len(self.sizes) == 1:
            return own, own
        if own.dtype == x.dtype:
            return own, all_gather(own, sizes=self.sizes, group=self.group)
        every = gathered_as(x.dtype, wide, self.sizes, self.group)
        return own, normalized(every) if self.normalize else every

    def mean(self, terms: Tensor, of_each: int = 1) -> Tensor:
        """Return the mean over all ranks' rows from the terms of this rank's, of which each sample has `of_each`."""
        total = of_each * self.total
        if len(self.sizes) == 1:
            return terms.sum() / total
        return of_sums(lambda t: t / total, terms.sum(), group=self.group)


def widened(x: Tensor, normalize: bool) -> Tensor:
    """Return features in float32, or float64 if they are, normalized if asked for."""
    x = x.to(wider(x.dtype))
    return normalized(x) if normalize else x


def normalized(x: Tensor) -> Tensor:
    """Return F.normalize(x, dim=-1). The tangent of that writes in place, which an outer reverse mode refuses."""
    return x * x.square().sum(-1, keepdim=True).clamp(1e-24).rsqrt()


def sizes_of_ranks(
    name: str,
    engine: Engine,
    x: Tensor,
    sizes: Sizes,
    collectives: Sequence[Sequence[Number]],
    exclude: Tensor | None = None,
    of_each: int = 1,
) -> list[int]:
    """Return each rank's number of rows; see `gradients_needed`, and `Batch`.

    Raises:
        TypeError, ValueError: `sizes` or this rank's `exclude` is invalid.
        CollectiveMismatchError: with "auto" on all ranks, if they differ in D or in what needs a gradient, and on the
            others if a rank's `exclude` is invalid.
    """
    rows, columns = x.shape[0], -1 if exclude is None else exclude.shape[1]
    others: Sequence[int] = ()
    if sizes is None or (sizes == "auto" and engine.size == 1):
        lengths = [rows] * engine.size
    elif sizes != "auto":
        lengths = list(expect.sizes(name, "sizes", sizes, engine.size, (engine.rank, rows)))
    else:
        every = exchanged(engine, [rows, x.shape[-1], columns, gradients_needed(*collectives)])
        lengths = lengths_of(engine, every, rows)
        if not engine.compiling:  # which cannot compare numbers that ranks have sent
            _, widths, others, needs = ([*of_ranks] for of_ranks in zip(*every, strict=True))
            for r, width in enumerate(widths):
                if width != widths[0]:
                    raise CollectiveMismatchError(f"{name}: rank 0 has D = {widths[0]}, rank {r} has {width}")
            agree_on_gradients(f"{name}: features", needs)
    total = of_each * sum(lengths)
    check_columns(name, exclude, total)
    for r, other in enumerate(others):  # before features are sent
        if other not in (-1, total):
            got = f"{other} columns on rank {r}"
            raise CollectiveMismatchError(message(name, "exclude", got, f"{total}, one for each row of all ranks"))
    return lengths


# ── rows against columns ─────────────────────────────────────────────────────────────────────────────────


class Marks(NamedTuple):
    """Identifies the sample of each row or column; None: no row has one."""

    #: Of rows, (b, k): the columns of a row that are no negatives; of columns, None.
    own: Tensor | None = None
    #: Pairs of equal labels are positives.
    labels: Tensor | None = None
    #: Pairs of equal ids that are not positives are left out.
    ids: Tensor | None = None
    #: Of rows, (b, columns): pairs that are left out unless they are positives.
    exclude: Tensor | None = None
    #: Of rows, (b, k), those of `own` that are left out; of columns, (columns,), the same of all rows.
    out: Tensor | None = None
    #: Of rows, (b, 1): pairs of larger logits are left out unless they are positives.
    limit: Tensor | None = None


def least(s: Tensor) -> float:
    """Return the logit of a pair that is left out. Not −inf: the derivative of logsumexp is NaN if all terms are."""
    return torch.finfo(s.dtype).min / 4


def tensor_cores(x: Tensor) -> torch.dtype | None:
    """Return the half dtype of x if tensor cores multiply it and add up in float32, else None."""
    return x.dtype if x.is_cuda and torch.version.hip is None and x.dtype != wider(x.dtype) else None


class Halves(NamedTuple):
    """Rows in a half dtype, and a factor of each, (rows, 1) or (1, 1), that makes them rows of a float32 product."""

    rows: Tensor
    factor: Tensor


def halves(x: Tensor, half: torch.dtype | None, normalize: bool = False) -> Halves | None:
    """Return rows, which the half dtype holds, as they are, or what makes them normalized; without a dtype None.

    Then the rows are divided by powers of two, so that factors are from 1 to 2 and float16 holds the gradients.
    """
    if half is None:
        return None
    x = x.detach()
    if not normalize:
        return Halves(x.to(half), x.new_ones(1, 1))
    mantissa, exponent = torch.frexp(x.square().sum(-1, keepdim=True).clamp(1e-24).sqrt())
    return Halves(torch.ldexp(x, -exponent).to(half), 1 / mantissa)


class _Product(Function):
    """x yᵀ of float32 tensors on tensor cores, which add up in float32: x = a · ka and y = b · kb are `Halves`.

    A gradient is multiplied as the sum of two halves: with 16 bits in bfloat16, 22 in float16.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, a: Tensor, ka: Tensor, b: Tensor, kb: Tensor) -> Tensor:
        ctx.save_for_backward(x, y, a, ka, b, kb)
        s, factor = torch.mm(a, b.t(), out_dtype=torch.float32), ka * kb.t()
        return s.mul_(factor) if may_overwrite() else s * factor

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, y, a, ka, b, kb = ctx.saved_tensors
        of_x, of_y = ctx.needs_input_grad[:2]
        differentiated = torch.is_grad_enabled() or is_within_transform()
        if not torch.compiler.is_compiling() and (differentiated or is_batched_by_autograd(g)):
            return g @ y if of_x else None, g.t() @ x if of_y else None, None, None, None, None
        # Of norm 2¹³: float16 has neither large nor small numbers. The norm of less than 1e-19 would be 0.
        scale = torch.linalg.vector_norm(g).clamp(min=1e-18) / 2**13
        g = g * (ka * kb.t() / scale)
        high = g.to(a.dtype)
        parts = high, g.sub_(high).to(a.dtype)

        def of_parts(parts: Sequence[Tensor], rows: Tensor) -> Tensor:
            high, low = (torch.mm(part, rows, out_dtype=torch.float32) for part in parts)
            return high + low

        gx = of_parts(parts, b) * (scale / ka) if of_x else None
        gy = of_parts([part.t() for part in parts], a) * (scale / kb) if of_y else None
        return gx, gy, None, None, None, None


def product(x: Tensor, y: Tensor, of_x: Halves | None, of_y: Halves | None, bias: Tensor | None = None) -> Tensor:
    """Return x yᵀ + bias as a new matrix, of halves if there are any; torch.func and forward mode take float32."""
    if of_x is None or of_y is None or is_within_transform() or carries_tangents():
        return x @ y.t() if bias is None else bias.addmm(x, y.t())
    s: Tensor = _Product.apply(x, y, *of_x, *of_y)  # type: ignore[no-untyped-call]
    return s if bias is None else s + bias


class Logits:
    """Makes logits of this rank's features x, with the marks `rows`, and all ranks' columns, with `marks`."""

    def __init__(
        self,
        batch: Batch,
        x: Tensor,
        rows: Marks,
        columns: Tensor,
        marks: Marks,
        scale: Number,
        bias: Number | None = None,
    ) -> None:
        self.half, self.late, self.chunk_size = batch.half, batch.late, batch.chunk_size
        #: x, scaled; tensor cores need x itself.
        self.q = x if self.half is not None else x * scale
        self.of_columns = halves(columns, self.half, self.late)
        self.columns = self.normalized(columns)
        self.rows, self.marks, self.scale, self.bias = rows, marks, scale, bias
        #: Whether operations write into logits: vmap lacks rules, and a selective checkpoint keeps results. Decided
        #: before a checkpoint repeats them.
        self.in_place = may_overwrite()

    def __call__(self, q: Tensor) -> Tensor:
        """Return a new matrix, (rows, columns), that may be overwritten."""
        of_q = halves(q, self.half, self.late)
        return self._scaled(product(self.normalized(q), self.columns, of_q, self.of_columns))

    def normalized(self, x: Tensor) -> Tensor:
        """Return features that were left to `Logits` to normalize."""
        return normalized(x) if self.late else x

    def of_pairs(self, keys: Tensor) -> Tensor:
        """Return the logits of each row with its own keys, (b, k, D); NaN if one overflows, for a GradScaler to see."""
        s = self._scaled((self.normalized(self.q).unsqueeze(1) * self.normalized(keys)).sum(2))
        return s + 0 * s

    def _scaled(self, products: Tensor) -> Tensor:
        """Return logits from products with rows of q, which tensor cores leave unscaled."""
        s = products if self.half is None else products * self.scale
        return s if self.bias is None else s + self.bias

    def of_negatives(self, q: Tensor, rows: Marks) -> Tensor:
        """Return logits, `least` for what is no negative; its gradient is 0 without a rule, since its softmax is."""
        s = self(q)
        for others in (rows.own, self.left_out(s, rows)):
            s = s if others is None else overwritten(s, others, least(s), self.in_place)
        return s

    def left_out(self, s: Tensor, rows: Marks) -> Tensor | None:
        """Return which pairs, of logits s, are left out unless they are positives, if any."""
        near = None if rows.limit is None else s > rows.limit
        same = None if rows.ids is None or self.marks.ids is None else rows.ids.unsqueeze(1) == self.marks.ids
        masks = [mask for mask in (same, rows.exclude, self.marks.out, near) if mask is not None]
        return reduce(torch.logical_or, masks) if masks else None


def may_overwrite() -> bool:
    """Whether operations may write into a result, see `Logits.in_place`."""
    return torch.compiler.is_compiling() or not (is_within_transform() or is_observed())


def overwritten(s: Tensor, at: Tensor, value: Any, in_place: bool) -> Tensor:
    """Return s with another value where a bool mask is True, or in these columns of each row, (rows, k)."""
    if not in_place:
        return s.masked_fill(at, value) if at.dtype == torch.bool else s.scatter(1, at, value)
    with torch.no_grad():
        return s.masked_fill_(at, value) if at.dtype == torch.bool else s.scatter_(1, at, value)


def logsumexp(s: Tensor, dim: int, in_place: bool) -> Tensor:
    """Return log Σ exp s; `least` without any term. torch.logsumexp computes the exponentials again in backward."""
    if is_known(s.shape[dim] == 0):  # its derivatives depend on s as other ranks' do
        return s.exp().sum(dim).log1p() + least(s)
    top = s.detach().amax(dim, keepdim=True)
    s = s - top
    s = s.exp_() if in_place else s.exp()
    return s.sum(dim).log() + top.squeeze(dim)


def softplus(x: Tensor) -> Tensor:
    """Return log(1 + exp x), exact in float64 too; of neg − pos, −log softmax of a positive among negatives."""
    return F.softplus(x, 1.0, 40.0)


def in_chunks(
    block: Callable[..., tuple[Tensor, ...]], chunk_size: int | None, x: Tensor, *of_rows: Tensor | None
) -> Sequence[Tensor]:
    """Return block(x, *of_rows) of all rows, or what it returns for each chunk of rows, joined along dim 0.

    The logits of a chunk are computed again in backward. Autocast does not cast the products to half precision.
    """
    with without_autocast(x):
        if chunk_size is None or is_within_transform() or carries_tangents():  # torch.func refuses checkpoints
            return block(x, *of_rows)
        found: list[tuple[Tensor, ...]] = []
        for i in range(max(-(-x.shape[0] // chunk_size), 1)):  # a graph is of this number, not of the number of rows
            part = slice(i * chunk_size, (i + 1) * chunk_size)
            more = (None if each is None else each[part] for each in of_rows)
            found.append(checkpoint(block, x[part], *more, use_reentrant=False, preserve_rng_state=False))
        if len(found) == 1:  # torch.cat of empty rows has a gradient without a graph
            return found[0]
        return [torch.cat(parts) for parts in zip(*found, strict=True)]
