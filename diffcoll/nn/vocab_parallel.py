"""Cross-entropy over a vocabulary whose rows are sharded over the ranks (tensor parallelism).

    s_ij = h_i · w_j + bias_j       i: tokens, the same on all ranks; j: rows of the vocabulary, each on one rank

forward   L_i = log Z_i − s_it, t the target, log Z_i = log Σ_j exp s_ij; each rank sends its part of log Z_i, and s_it
          label_smoothing ε: + ε (s_it − Σ_j s_ij / V);  z_loss λ: + λ (log Z_i)²
backward  gs_ij = p_ij − [j = t], locally; gw_j = Σ_i gs_ij h_i, locally; gh_i = Σ_r Σ_{j on r} gs_ij w_j, all-reduced
note      notes/training/vocab-parallel.md
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from diffcoll.collectives.all_gather import all_gather
from diffcoll.collectives.sum_gradients import sum_gradients
from diffcoll.core import expect
from diffcoll.core.errors import CollectiveMismatchError, message
from diffcoll.core.groups import resolve
from diffcoll.core.torch_private.tracing import is_traced
from diffcoll.core.torch_private.transforms import carries_tangents, is_within_transform, without_transforms
from diffcoll.engines.types import Group
from diffcoll.nn.chunks import Work
from diffcoll.nn.convention import same_options
from diffcoll.nn.features import check_chunk_size
from diffcoll.nn.followers import agreed, needs_gradient, tracked
from diffcoll.nn.inputs import asserted, in_full_precision, is_dtensor, saveable, without_autocast
from diffcoll.nn.logits import LossRule, least
from diffcoll.nn.loss_module import LossModule, Reduction
from diffcoll.nn.marks import Marks

_NAME = "vocab_parallel_cross_entropy"
#: Checksums of targets are exact in float32.
_MODULUS = 1 << 20
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def vocab_parallel_cross_entropy(
    hidden: Tensor,
    weight_shard: Tensor,
    target: Tensor,
    *,
    bias_shard: Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    chunk_size: int | None = None,
    group: Group = None,
) -> Tensor:
    """Language models under tensor parallelism: cross-entropy of an output layer whose vocabulary is sharded.

    `F.cross_entropy(hidden @ weight.T + bias, target)` for a weight whose rows are on the ranks of the group, in the
    order of ranks: the first row of rank r has the index V_0 + … + V_{r−1}. No logits are sent, and with `chunk_size`
    no rank keeps those of its whole shard. In forward, each rank sends two small messages: 2 numbers, and 2 b + 2 for b
    tokens (3 b + 2 with label smoothing). In backward, one all_reduce of hidden's gradient.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> g = torch.Generator().manual_seed(0)
    >>> hidden, weight = torch.randn(6, 4, generator=g), torch.randn(10, 4, generator=g)
    >>> target = torch.tensor([0, 9, 4, -100, 7, 6])
    >>> loss = dc.nn.functional.vocab_parallel_cross_entropy
    >>> for found in simulate(loss, [hidden] * 3, weight.split([5, 0, 5]), [target] * 3):
    ...     torch.testing.assert_close(found, torch.nn.functional.cross_entropy(hidden @ weight.T, target))

    Args:
        hidden: (…, D), of float16, bfloat16, float32 or float64; the same on all ranks. Half precision is computed in
            float32, also under autocast.
        weight_shard: (V_r, D), this rank's rows of the output layer; V_r may differ between ranks, and be 0.
        target: (…), integers: indices in the whole vocabulary, or `ignore_index`; the same on all ranks.
        bias_shard: (V_r,), of the same rows; on all ranks or on none.
        label_smoothing: from 0 to 1, as that of `torch.nn.functional.cross_entropy`, over the whole vocabulary.
        z_loss: is multiplied with (log Z)² of each token, Z being the sum of all exponentials, and added to its loss.
        ignore_index: tokens with this target have no loss and no gradient, and do not count in the mean.
        reduction: over the tokens, as that of `torch.nn.functional.cross_entropy`, and not over the ranks: "mean" over
            those that are not ignored, "sum", or "none", the loss of each token.
        chunk_size: keep the logits of this many rows of the shard at a time, and compute them again in backward. None:
            keep those of the whole shard.
        group: the ranks that have shards: None, a `ProcessGroup`, a one-dimensional `DeviceMesh` or an `MPI.Comm`; see
            `set_default_group`.

    Returns:
        The loss, the same on every rank: 0-d, or of target's shape with "none"; float32, or float64 if an argument is.
        "mean" without any token is NaN, "sum" 0, as in PyTorch. All ranks compute the same from it, once: the gradient
        that arrives is equal on all ranks. Then hidden's gradient is the whole one on every rank, and that of
        weight_shard and bias_shard is this rank's part of the whole one. No reduction over the group follows.

    Raises:
        TypeError, ValueError: an argument is invalid; or a target is outside the vocabulary, on all ranks (a
            RuntimeError on an accelerator and in compiled functions).
        CollectiveMismatchError: on all ranks, if they differ in options, shapes, dtypes, bias or target.

    Source: notes/training/vocab-parallel.md.
    """
    numbers = {"label_smoothing": label_smoothing, "z_loss": z_loss}
    same_options(_NAME, group, **numbers, ignore_index=ignore_index, reduction=reduction)
    expect.fraction(_NAME, "label_smoothing", label_smoothing)
    expect.not_negative(_NAME, z_loss=z_loss)
    expect.integer(_NAME, "ignore_index", ignore_index)
    expect.choice(_NAME, "reduction", reduction, ("mean", "sum", "none"), "it is over the tokens, not over the ranks")
    check_chunk_size(_NAME, chunk_size)
    dtype, engine = _checked(hidden, weight_shard, target, bias_shard), resolve(group, _NAME)
    index = target.reshape(-1).long()  # ignore_index may have no value in a small dtype
    ignored = index == ignore_index
    index = index.masked_fill(ignored, -1)
    with without_autocast(hidden):
        q = saveable(hidden).to(dtype).reshape(-1, hidden.shape[-1])
        k, bias = weight_shard, None if bias_shard is None else bias_shard.to(dtype)
        # Numbers that a graph formats become its constants.
        facts = {**{key: float(x) for key, x in numbers.items()}, "ignore_index": ignore_index, "reduction": reduction}
        options = "" if torch.compiler.is_compiling() else "".join(f", {key}={x}" for key, x in facts.items())
        tree = {
            f"hidden{options}": hidden.detach().unsqueeze(0),
            "target": index.unsqueeze(0),
            "weight_shard": k.detach(),
        }
        tree |= {} if bias_shard is None else {"bias_shard": bias_shard.detach()}
        what = "options, or shapes or dtypes of hidden, target, weight_shard or bias_shard"
        needs = needs_gradient(q), needs_gradient(q, k, bias)
        sizes, (needs_hidden, needs_any) = agreed(_NAME, tree, what, len(k), needs, group)
        total, first = sum(sizes), sum(sizes[: engine.rank])
        if not torch.compiler.is_compiling():  # a size from another rank has no value there
            if total == 0:
                raise ValueError(message(_NAME, "weight_shard", "no rows on any rank", "one row at least"))
            k = saveable(k) if needs_any else k
        if engine.size > 1:
            if needs_hidden:
                q, k, bias = _together(tracked(q, True), k, bias)
            q = sum_gradients(q, group=group)
        mine = _sums(q, k, bias, index, first, chunk_size, label_smoothing > 0)
        row = torch.cat([mine.reshape(1, -1), _facts(index, ignored, total).to(dtype)], 1)
        if engine.size > 1:
            row = all_gather(tracked(row, needs_any), group=group, grad_placement="replicate")
        neg, own, *every = row[:, :-2].reshape(engine.size, *mine.shape).unbind(1)
        log_neg, logit = neg.logsumexp(0), own.sum(0)
        loss = -F.logsigmoid(logit - log_neg)
        if z_loss:
            loss = loss + z_loss * torch.logaddexp(log_neg, logit).square()
        if label_smoothing:
            loss = loss + label_smoothing * (logit - every[0].sum(0) / total)
        loss = _right_targets(loss.masked_fill(ignored, 0), row[:, -2:].detach(), index, total, ignore_index)
        if reduction == "none":
            return loss.view(target.shape)
        return loss.sum() if reduction == "sum" else loss.sum() / (~ignored).sum()


class VocabParallelCrossEntropy(LossModule, of=vocab_parallel_cross_entropy):
    """`vocab_parallel_cross_entropy` as a module; its arguments are the options, `forward` takes the tensors.

    It has no parameters: the rows of the output layer are passed to `forward`.

    >>> import torch, diffcoll as dc
    >>> loss = dc.nn.VocabParallelCrossEntropy(label_smoothing=0.1, chunk_size=4)
    >>> loss
    VocabParallelCrossEntropy(label_smoothing=0.1, z_loss=0.0, ignore_index=-100, reduction='mean', chunk_size=4)
    >>> hidden, layer, target = torch.randn(6, 3), torch.nn.Linear(3, 10), torch.arange(6)
    >>> whole = torch.nn.functional.cross_entropy(layer(hidden), target, label_smoothing=0.1)
    >>> torch.testing.assert_close(loss(hidden, layer.weight, target, layer.bias), whole)
    """

    def forward(self, hidden: Tensor, weight_shard: Tensor, target: Tensor, bias_shard: Tensor | None = None) -> Tensor:
        """Return the loss, as `vocab_parallel_cross_entropy` does."""
        return vocab_parallel_cross_entropy(hidden, weight_shard, target, bias_shard=bias_shard, **self.options)


def _checked(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None) -> torch.dtype:
    """Return the dtype of the logits; raise if an argument is invalid."""
    floats = {"hidden": hidden, "weight_shard": weight} | ({} if bias is None else {"bias_shard": bias})
    for name, x in {**floats, "target": target}.items():
        if is_dtensor(x):
            remedy = "pass x.to_local(), which is replicated if it is hidden or target, and this rank's shard otherwise"
            raise TypeError(message(_NAME, name, "a DTensor", "a plain tensor", remedy))
    few = {name: x[:0] if isinstance(x, Tensor) and x.ndim else x for name, x in floats.items()}
    dtype = in_full_precision(_NAME, **few)[0].dtype
    if not isinstance(target, Tensor) or target.dtype not in _INTEGERS:
        got = target.dtype if isinstance(target, Tensor) else type(target).__name__
        raise TypeError(message(_NAME, "target", got, "integers, indices in the whole vocabulary"))
    if hidden.ndim == 0 or hidden.shape[-1] == 0:
        raise ValueError(message(_NAME, "hidden", f"shape {tuple(hidden.shape)}", "(…, D) with D > 0"))
    size = hidden.shape[-1]
    if weight.ndim != 2 or weight.shape[1] != size:
        remedy = "each rank passes its own rows of the output layer's weight"
        raise ValueError(message(_NAME, "weight_shard", f"shape {tuple(weight.shape)}", f"(V_r, {size})", remedy))
    if bias is not None and bias.shape != weight.shape[:1]:
        expected = f"({weight.shape[0]},), a number for each row of weight_shard"
        raise ValueError(message(_NAME, "bias_shard", f"shape {tuple(bias.shape)}", expected))
    if target.shape != hidden.shape[:-1]:
        expected = f"{tuple(hidden.shape[:-1])}, an index for each token of hidden"
        raise ValueError(message(_NAME, "target", f"shape {tuple(target.shape)}", expected))
    for name, x in {**floats, "target": target}.items():
        if x.device != hidden.device:
            raise ValueError(message(_NAME, name, f"a tensor on {x.device}", f"{hidden.device}, as hidden"))
    return dtype


class _Together(Function):
    """Identity, whose backward has the gradients of all its inputs before it returns any."""

    @staticmethod
    def forward(ctx: Any, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return xs

    @staticmethod
    def backward(ctx: Any, *gs: Tensor | None) -> tuple[Tensor | None, ...]:
        return gs


def _together(q: Tensor, k: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return all three such that a backward to k or bias alone computes the gradient of q too, which all ranks sum.

    A graph, and a transform of torch.func, are the same on all ranks.
    """
    xs = [x for x in (k, bias) if x is not None and x.requires_grad]
    if not xs or torch.compiler.is_compiling() or is_within_transform() or carries_tangents():
        return q, k, bias
    q, *xs = _Together.apply(q, *xs)  # type: ignore[no-untyped-call]
    return q, xs.pop(0) if k.requires_grad else k, xs.pop(0) if xs else bias


def _sums(
    q: Tensor, k: Tensor, bias: Tensor | None, index: Tensor, first: int, chunk_size: int | None, smooth: bool
) -> Tensor:
    """Return, for each token, log Σ_j exp s_ij of this rank's j ≠ t, s_it or 0, and, to `smooth`, Σ_j s_ij."""
    here = torch.arange(k.shape[0], device=q.device) + first
    rows, cols = (Marks(at, at) for at in (index, here))
    added = None if bias is None else bias.clamp(min=least(q))  # −inf excludes rows, of some ranks all
    sums = Work(LossRule(), rows, cols, chunk_size).sums(q, k, added)
    assert sums.row_neg is not None and sums.row_sum is not None
    if not smooth:
        return torch.stack([sums.row_neg, sums.row_sum])
    every = q @ k.sum(0, dtype=q.dtype)
    return torch.stack([sums.row_neg, sums.row_sum, every if bias is None else every + bias.sum()])


def _facts(index: Tensor, ignored: Tensor, total: int) -> Tensor:
    """Return, of shape (1, 2), the number of targets outside the vocabulary, and a checksum of the targets."""
    wrong = ((index < 0) | (index >= total)) & ~ignored
    weights = torch.arange(1, index.shape[0] + 1, device=index.device)
    return torch.stack([wrong.sum(), (index * weights).sum() % _MODULUS]).unsqueeze(0)


def _right_targets(loss: Tensor, facts: Tensor, index: Tensor, total: int, ignore_index: int) -> Tensor:
    """Return the loss; raise on all ranks if targets are outside the vocabulary, or differ between ranks.

    Args:
        loss: what is returned.
        facts: (N, 2), the `_facts` of all ranks.
        index: targets of this rank.
        total: number of rows of the vocabulary.
        ignore_index: for the text.
    """
    same, inside = (facts[:, 1] == facts[:1, 1]).all(), (facts[:, 0] == 0).all()
    differ = f"{_NAME}: target: the ranks have different targets, expected the same on all ranks of the group"
    if torch.compiler.is_compiling() or is_traced(facts) or not facts.is_cpu:
        expected = f"indices of the vocabulary's rows, or ignore_index={ignore_index}"
        loss = asserted(loss, same, differ)
        return asserted(loss, inside, message(_NAME, "target", "an index outside the vocabulary", expected))
    if not bool(without_transforms(same).all()):
        raise CollectiveMismatchError(differ)
    if not bool(without_transforms(inside).all()):
        values = without_transforms(index)
        got = f"values from {values.min().item()} to {values.max().item()}"
        expected = f"indices from 0 to {total - 1}, or ignore_index={ignore_index}"
        raise ValueError(message(_NAME, "target", got, expected))
    return loss
