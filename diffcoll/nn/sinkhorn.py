"""Assignment of all ranks' samples to prototypes in equal shares, by Sinkhorn's iterations (SwAV, DINOv2).

    v_j = −log Σ_i exp x_ij                         x = scores / epsilon; i: the rows of all ranks
    v_j ← v_j − log Σ_i softmax_j(x_i + v)_j        in each further iteration
    Q_i = softmax(x_i + v)

The factors K and B of the definition multiply all numbers alike, and the next softmax removes them. Each of the sums in
the second line is at least 1/K, so nothing overflows or underflows: before the softmax the column adds up to 1, and the
softmax divides a row by a sum of K numbers that are at most 1. Where a quotient x_ij overflows float32 on a
rank, all ranks compute in float64.

note      notes/training/contrastive.md#how-do-i-assign-samples-to-prototypes-swav-dino
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from diffcoll.collectives.all_reduce import all_reduce
from diffcoll.composed.leaves import rows_of_ranks
from diffcoll.core import expect
from diffcoll.core.errors import message
from diffcoll.core.torch_private.tracing import is_traced
from diffcoll.core.torch_private.transforms import without_transforms
from diffcoll.engines.types import Group
from diffcoll.nn.convention import same_options
from diffcoll.nn.inputs import check_rows, in_full_precision, without_autocast

_NAME = "sinkhorn"
#: What a rank sends of its quotients. The largest of all ranks counts: a graph cannot change its dtype.
_WIDE, _OVERFLOW, _UNKNOWN = 1, 2, 4


@torch.no_grad()
def sinkhorn(scores: Tensor, *, epsilon: float = 0.05, iterations: int = 3, group: Group = None) -> Tensor:
    """SwAV, DINOv2: assign the samples of all ranks to K prototypes, to each about equally many.

    Q = exp(scores / epsilon) of the rows of all ranks. Each iteration divides each column by its sum over all ranks and
    by K, then each row by its sum and by the number B of all rows. The result is B · Q: each row is a distribution.
    It has no gradient, as in published code.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> scores = torch.randn(6, 3, generator=torch.Generator().manual_seed(0)).double()
    >>> ranks = simulate(dc.nn.functional.sinkhorn, scores.split([4, 2]))
    >>> torch.testing.assert_close(torch.cat(ranks), dc.nn.functional.sinkhorn(scores))

    Args:
        scores: of this rank's samples for each prototype, (b, K), of float16, bfloat16, float32 or float64; b may
            differ between ranks, and be 0. Half precision is computed in float32, also under autocast.
        epsilon: the temperature of the teacher, above 0; with a small one most rows are near one prototype.
        iterations: 1 or more. After the last one rows are exact distributions, and columns are about equal sums.
        group: None, a `ProcessGroup`, a one-dimensional `DeviceMesh` or an `MPI.Comm`; see `set_default_group`.

    Returns:
        This rank's rows of B · Q, (b, K), of float32, or float64 if the scores are. The ranks' results joined in the
        order of ranks are the result of one process with all rows.

    Raises:
        TypeError, ValueError: an argument is invalid, or no rank has a row. On all ranks, if scores / epsilon is above
            1e308 on one; a compiled function does not check this, and returns NaN above 1e38 in float32.
        CollectiveMismatchError: on all ranks, if they differ in K, dtype, epsilon or iterations.

    Source: notes/training/contrastive.md#how-do-i-assign-samples-to-prototypes-swav-dino.
    """
    iterations = expect.integer(_NAME, "iterations", iterations, 1)
    if not expect.is_number(epsilon):
        raise TypeError(message(_NAME, "epsilon", type(epsilon).__name__, "a number"))
    if not 0 < epsilon < math.inf:
        raise ValueError(
            message(_NAME, "epsilon", repr(epsilon), "a finite number above 0", "scores are divided by it")
        )
    x, dtype = _checked(scores, epsilon, iterations, group)
    with without_autocast(x):
        x = x / epsilon
        v = -all_reduce(x.logsumexp(0), "logsumexp", group=group)
        for _ in range(iterations - 1):
            v = v - all_reduce(_softmax(x + v).sum(0), group=group).log()
        return _softmax(x + v).to(dtype)


def _softmax(x: Tensor) -> Tensor:
    """Return softmax(x, 1), in the memory of x: much of the time of large tensors goes to new memory."""
    x.sub_(x.amax(1, keepdim=True)).exp_()
    return x.div_(x.sum(1, keepdim=True))


def _checked(scores: Tensor, epsilon: float, iterations: int, group: Group) -> tuple[Tensor, torch.dtype]:
    """Return the scores in the dtype they are computed in, and the dtype of the result.

    Raise if ranks would send different messages, or if quotients overflow.
    """
    (x,) = in_full_precision(_NAME, scores=scores)
    x = x.detach()
    if x.ndim != 2 or not x.shape[1]:
        expected, remedy = "(b, K): a number for each sample and prototype", "scores of one sample: x.unsqueeze(0)"
        raise ValueError(message(_NAME, "scores", f"shape {tuple(x.shape)}", expected, remedy))
    same_options(_NAME, group, epsilon=epsilon, iterations=iterations)
    rows, compiling = len(x), torch.compiler.is_compiling()
    # Numbers that a graph formats become its constants.
    options = "" if compiling else f"epsilon={float(epsilon)}, iterations={iterations}"
    what = "K, dtype, epsilon or iterations"
    sizes, excess = rows_of_ranks(_NAME, {options: x}, [x], rows, group, _excess(x, epsilon), what)
    if not compiling:
        check_rows(_NAME, rows, torch.tensor(sum(sizes)), 1)
        if max(excess) == _OVERFLOW:
            got = f"{epsilon}; scores / epsilon overflows on rank {excess.index(_OVERFLOW)}"
            raise ValueError(message(_NAME, "epsilon", got, "quotients below 1e308", "pass a larger epsilon"))
    return x.double() if not compiling and max(excess) == _WIDE else x, x.dtype


def _excess(x: Tensor, epsilon: float) -> int:
    """Return what this rank sends of x / epsilon: `_WIDE` if x's dtype does not hold it, `_OVERFLOW` if none does."""
    if torch.compiler.is_compiling() or is_traced(x):
        return _UNKNOWN
    if not x.numel():
        return 0
    x = without_transforms(x)
    low, high = (bound.item() for bound in x.aminmax())
    if low == -math.inf:  # pairs that are not assigned
        low = x.masked_fill(x.isinf(), 0).amin().item()
    largest = max(-low, high)
    limits = torch.finfo(x.dtype)
    if not math.isfinite(largest) or (largest <= limits.max * epsilon and epsilon >= limits.tiny):
        return 0
    return _WIDE if largest <= torch.finfo(torch.float64).max * epsilon else _OVERFLOW
