"""Cross-entropy of an output layer whose vocabulary is sharded over the ranks.

    s_ij = h_i · w_j + b_j            i: tokens, on all ranks; j: this rank's words
    neg_i = log Σ_j≠t exp s_ij        over all ranks' words, from one small message; t: the target
    loss_i = softplus(neg_i − s_it)   label smoothing ε: + ε (s_it − mean_j s_ij);   z-loss λ: + λ (log Z_i)²

    gs_ij = p_ij − [j = t], locally;   gw_j = Σ_i gs_ij h_i, locally;   gh_i = Σ_r Σ_{j on r} gs_ij w_j, all-reduced

It is the contrastive losses' law transposed: rows are shared, and columns are the ranks' own.

note  notes/training/vocab-parallel.md
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from diffcoll.collectives.all_gather import all_gather
from diffcoll.collectives.sum_gradients import sum_gradients
from diffcoll.core import check_mode, expect
from diffcoll.core.arguments import Sizes
from diffcoll.core.errors import message
from diffcoll.core.groups import resolve
from diffcoll.core.torch_private.tracing import assert_in_graph, is_known, is_traced
from diffcoll.core.torch_private.transforms import is_within_transform, without_transforms
from diffcoll.engines.types import Group
from diffcoll.nn.arguments import check_chunk_size, in_full_precision, without_autocast
from diffcoll.nn.contrastive import (
    halves,
    in_chunks,
    least,
    logsumexp,
    may_overwrite,
    overwritten,
    product,
    sizes_of_ranks,
    softplus,
    tensor_cores,
)

#: What is done over the tokens.
Reduction = Literal["mean", "sum", "none"]
_NAME = "vocab_parallel_cross_entropy"


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
    sizes: Sizes = "auto",
    group: Group = None,
) -> Tensor:
    """Language models under tensor parallelism: cross-entropy of an output layer whose vocabulary is sharded.

    `F.cross_entropy(hidden @ weight.T + bias, target)` for a weight whose rows are on the ranks of the group, in the
    order of ranks: the first row of rank r has the index V_0 + … + V_{r−1}. No logits are sent, and with `chunk_size`
    no rank keeps those of all tokens. In forward, each rank sends 2 numbers for each token (3 with label smoothing). In
    backward, one all_reduce of hidden's gradient.

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
            float32, also under autocast: on CUDA by tensor cores, if weight_shard is of the same dtype.
        weight_shard: (V_r, D), this rank's rows of the output layer; V_r may differ between ranks, and be 0.
        target: (…), integers: indices in the whole vocabulary, or `ignore_index`; the same on all ranks.
        bias_shard: (V_r,), of the same rows; on all ranks or on none.
        label_smoothing: from 0 to 1, as that of `torch.nn.functional.cross_entropy`, over the whole vocabulary.
        z_loss: is multiplied with (log Z)² of each token, Z being the sum of all exponentials, and added to its loss.
        ignore_index: tokens with this target have no loss and no gradient, and do not count in the mean.
        reduction: over the tokens, as that of `torch.nn.functional.cross_entropy`, and not over the ranks: "mean" over
            those that are not ignored, "sum", or "none", the loss of each token.
        chunk_size: keep the logits of this many tokens at a time, and compute them again in backward. None: of all.
        sizes: the numbers V_r of all ranks, as `sizes` of `clip_loss`.
        group: None, a `ProcessGroup`, a one-dimensional `DeviceMesh` or an `MPI.Comm`; see `set_default_group`.

    Returns:
        The loss, the same on every rank: 0-d, or of target's shape with "none"; float32, or float64 if an argument is.
        "mean" without any token is NaN, "sum" 0, as in PyTorch. All ranks compute the same from it, once: the gradient
        that arrives is equal on all ranks. Then hidden's gradient is the whole one on every rank, and that of
        weight_shard and bias_shard is this rank's part of the whole one. No reduction over the group follows.

    Raises:
        TypeError, ValueError: an argument is invalid, or a target is outside the vocabulary (a RuntimeError on an
            accelerator and in compiled functions).
        CollectiveMismatchError: on all ranks, with sizes="auto", if they differ in D, or in whether hidden needs a
            gradient; in check mode, if hidden or target differ.

    Source: notes/training/vocab-parallel.md.
    """
    expect.not_negative(_NAME, label_smoothing=label_smoothing, z_loss=z_loss)
    if label_smoothing > 1:
        raise ValueError(message(_NAME, "label_smoothing", label_smoothing, "a number from 0 to 1"))
    expect.integer(_NAME, "ignore_index", ignore_index)
    expect.choice(_NAME, "reduction", reduction, ("mean", "sum", "none"), "it is over the tokens, not over the ranks")
    check_chunk_size(_NAME, chunk_size)
    floats = {"hidden": hidden, "weight_shard": weight_shard, "bias_shard": bias_shard}
    states, w, *biases = in_full_precision(_NAME, **{name: x for name, x in floats.items() if x is not None})
    half = tensor_cores(hidden) if hidden.dtype == weight_shard.dtype else None
    bias = biases[0] if biases else None
    _check_shapes(states, w, target, bias)
    engine = resolve(group, _NAME)
    if check_mode.compares(engine):  # ranks with other tokens send equal messages
        facts = f"{_NAME}(hidden={tuple(hidden.shape)}, {label_smoothing=}, {z_loss=}, {ignore_index=}, {reduction=})"
        check_mode.compare_calls(engine, facts)
        remedy = "the ranks of a tensor-parallel group get the same tokens"
        check_mode.same_everywhere(engine, without_transforms(target), lambda: f"{_NAME}: target", remedy)
        check_mode.same_everywhere(engine, without_transforms(hidden), lambda: f"{_NAME}: hidden", remedy)
    lengths = sizes_of_ranks(_NAME, engine, w, sizes, [[states]])
    first, total = sum(lengths[: engine.rank]), sum(lengths)
    index = target.reshape(-1).long()  # ignore_index may have no value in a small dtype
    ignored = index == ignore_index
    _check_targets(index, ignored, total, ignore_index)
    q = states.reshape(-1, states.shape[-1])
    with without_autocast(q):
        q = q if engine.size == 1 else sum_gradients(q, group=group)
        sums = _sums(q, w, bias, index.masked_fill(ignored, -1) - first, chunk_size, half)
        if label_smoothing:
            every = q @ w.sum(0)
            sums.append(every if bias is None else every + bias.sum())
        rows = all_gather(torch.stack(sums), group=group, stack=True, grad_placement="replicate")
        neg, logit, *all_logits = rows.unbind(1)
        log_neg, logit = neg.logsumexp(0), logit.sum(0)
        loss = softplus(log_neg - logit)
        if z_loss:
            loss = loss + z_loss * (loss + logit).square()
        if label_smoothing:
            loss = loss + label_smoothing * (logit - all_logits[0].sum(0) / total)
        loss = loss.masked_fill(ignored, 0)
    if reduction == "none":
        return loss.view(target.shape)
    return loss.sum() if reduction == "sum" else loss.sum() / (~ignored).sum()


def _sums(
    q: Tensor, w: Tensor, bias: Tensor | None, at: Tensor, chunk_size: int | None, half: torch.dtype | None
) -> list[Tensor]:
    """Return, for each token, log Σ_j exp s_ij of this rank's j ≠ t, and s_it or 0.

    `at` is the target's index among this rank's rows w, if it is one of them; `half` holds q and w, for tensor cores.
    """
    here = (at >= 0) & (at < w.shape[0])
    if is_known(w.shape[0] == 0):  # of this rank no word; the derivatives depend on q and w as those of others do
        s = q @ w.t() if bias is None else torch.addmm(bias, q, w.t())
        return [logsumexp(s, 1, False), s.sum(1)]
    at = torch.where(here, at, 0)
    added = None if bias is None else bias.clamp(min=least(q))  # −inf excludes words, of some ranks all
    in_place, of_w = may_overwrite(), halves(w, half)

    def block(q: Tensor, at: Tensor, here: Tensor) -> tuple[Tensor]:
        s = product(q, w, halves(q, half), of_w, added)
        kept = torch.where(here, least(s), s.gather(1, at))  # `least` at the target, no negative
        return (logsumexp(overwritten(s, at, kept, in_place), 1, in_place),)

    (neg,) = in_chunks(block, chunk_size, q, at.unsqueeze(1), here.unsqueeze(1))
    logit = (q * w[at]).sum(1) + (0 if added is None else added[at])
    return [neg, torch.where(here, logit + 0 * logit, 0.0)]


def _check_shapes(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None) -> None:
    if not isinstance(target, Tensor) or target.dtype == torch.bool or target.is_floating_point():
        got = target.dtype if isinstance(target, Tensor) else type(target).__name__
        raise TypeError(message(_NAME, "target", got, "integers, indices in the whole vocabulary"))
    if hidden.ndim == 0 or target.shape != hidden.shape[:-1]:
        expected = "(…), an index for each token of hidden, which is (…, D)"
        raise ValueError(message(_NAME, "target", f"shape {tuple(target.shape)}", expected))
    if weight.ndim != 2 or weight.shape[1] != hidden.shape[-1]:
        expected = "(V_r, D): each rank passes its own rows of the output layer's weight"
        raise ValueError(message(_NAME, "weight_shard", f"shape {tuple(weight.shape)}", expected))
    if bias is not None and bias.shape != weight.shape[:1]:
        expected = "(V_r,), a number for each row of weight_shard"
        raise ValueError(message(_NAME, "bias_shard", f"shape {tuple(bias.shape)}", expected))


def _check_targets(index: Tensor, ignored: Tensor, total: int, ignore_index: int) -> None:
    """Raise, on this rank and so on all, if targets are outside the vocabulary; an accelerator is not waited for."""
    if is_within_transform():  # no assertion can be traced there
        return
    inside = (((index >= 0) & (index < total)) | ignored).all()
    text = message(_NAME, "target", "an index outside the vocabulary", f"below {total}, or {ignore_index=}")
    if torch.compiler.is_compiling() or is_traced(inside) or not inside.is_cpu:
        assert_in_graph(inside, f"{_NAME}: target: an index outside the vocabulary")
    elif not bool(without_transforms(inside)):
        raise ValueError(text)
