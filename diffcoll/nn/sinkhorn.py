"""Assignment of all ranks' samples to prototypes in equal shares, by Sinkhorn's iterations (SwAV, DINOv2).

    v_j = −log Σ_i exp x_ij                         x = scores / epsilon; i: the rows of all ranks
    v_j ← v_j − log Σ_i softmax_j(x_i + v)_j        in each further iteration
    Q_i = softmax(x_i + v)

The factors K and B of the definition multiply all numbers alike, and the next softmax removes them.

note  notes/training/contrastive.md#how-do-i-assign-samples-to-prototypes-swav-dino
"""

from __future__ import annotations

import torch
from torch import Tensor

from diffcoll.collectives.all_reduce import all_reduce
from diffcoll.core import expect
from diffcoll.core.dtypes import wider
from diffcoll.core.errors import message
from diffcoll.engines.types import Group
from diffcoll.nn.arguments import check_rows, without_autocast


@torch.no_grad()
def sinkhorn(scores: Tensor, *, epsilon: float = 0.05, iterations: int = 3, group: Group = None) -> Tensor:
    """SwAV, DINOv2: assign the samples of all ranks to K prototypes, to each about equally many.

    Q = exp(scores / epsilon) of the rows of all ranks. Each iteration divides each column by its sum over all ranks and
    by K, then each row by its sum and by the number B of all rows. The result is B · Q: each row is a distribution.
    It has no gradient, as in published code, and computes with logarithms, so scores / epsilon may be large.

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
        TypeError, ValueError: an argument is invalid.

    Source: notes/training/contrastive.md#how-do-i-assign-samples-to-prototypes-swav-dino.
    """
    name = "sinkhorn"
    check_rows(name, "scores", scores)
    expect.integer(name, "iterations", iterations, 1)
    if not expect.is_number(epsilon) or not 0 < epsilon < torch.inf:
        raise ValueError(message(name, "epsilon", repr(epsilon), "a finite number above 0"))
    x = scores.to(wider(scores.dtype)) / epsilon
    with without_autocast(x):
        v = -all_reduce(x.logsumexp(0), "logsumexp", group=group)
        for _ in range(iterations - 1):
            v = v - all_reduce((x + v).softmax(1).sum(0), group=group).log()
        return (x + v).softmax(1)
