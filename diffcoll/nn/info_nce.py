"""InfoNCE: each query's positive keys among all ranks' keys.

    L = Σ_i (log Σ_j exp s_ij − mean of s_ip over i's positives) / B        s_ij = q_i · k_j / temperature

k_j: all ranks' positives and negatives, and the negatives of query i alone. With soft targets t_ij:

    L = Σ_i (Σ_j t_ij log Σ_j exp s_ij − Σ_j t_ij s_ij) / B

note  notes/training/contrastive.md
"""

from __future__ import annotations

from torch import Tensor

from diffcoll.core.errors import message
from diffcoll.engines.types import Group
from diffcoll.nn.convention import RankReduction
from diffcoll.nn.features import Options, check_columns, check_features, soft_targets
from diffcoll.nn.logits import LossRule
from diffcoll.nn.loss_module import Exchange, LossModule
from diffcoll.nn.pairs import loss_of_pairs


def info_nce_loss(
    query: Tensor,
    positive: Tensor,
    *,
    negatives: Tensor | None = None,
    labels: Tensor | None = None,
    ids: Tensor | None = None,
    targets: Tensor | None = None,
    temperature: Tensor | float = 0.1,
    normalize: bool = True,
    decoupled: bool = False,
    label_smoothing: float = 0.0,
    symmetric: bool = False,
    group: Group = None,
    rank_reduction: RankReduction = "mean",
    chunk_size: int | None = None,
    exchange: Exchange = "gather",
) -> Tensor:
    """Retrieval and representation learning: the cross-entropy of each query's own keys among all ranks' keys.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> g = torch.Generator().manual_seed(0)
    >>> query, key = (torch.randn(8, 16, generator=g).double() for _ in range(2))
    >>> losses = simulate(dc.nn.functional.info_nce_loss, query.split([5, 3]), key.split([5, 3]))
    >>> torch.testing.assert_close(sum(losses) / 2, dc.nn.functional.info_nce_loss(query, key))

    Args:
        query: this rank's features, (b, D), of float16, bfloat16, float32 or float64; b may differ between ranks, and
            be 0. Half precision is sent as it is; logits are computed in float32.
        positive: (b, D): row i is the positive of query i; all other rows of all ranks are its negatives. Or (b, P, D):
            query i has the P positives positive[i], and the loss is averaged over them; P is the same on all ranks.
        negatives: more negatives, without labels and ids. (m, D): of all queries of all ranks, which receive them as
            they do the positives; m may differ between ranks, and be 0. Or (b, K, D): negatives[i] are K negatives of
            query i, and of no other query; they are not sent, and K may differ between ranks, and be 0.
        labels: (b,), integers: all keys of a query's label are its positives; the loss is averaged over them (UniCL).
            Of label −1, a query's own keys alone.
        ids: keys of other samples with the query's id are *left out*, as false negatives; (b,), integers.
        targets: (b, number of all ranks' positives), floating-point: soft targets, such as the softmax of a teacher's
            logits, as the probabilities of `torch.nn.functional.cross_entropy`; columns are in the order of ranks, P
            for each query. `negatives` have the target 0. Not together with labels, ids, decoupled, label_smoothing or
            symmetric.
        temperature: a number or a tensor with one element; divides the logits.
        normalize: normalize the features first.
        decoupled: leave a query's positives out of its denominator, which has its negatives alone (Yeh et al. 2022); a
            query without negatives contributes 0.
        label_smoothing: from 0 to 1, the part of a query's target that all its keys share equally, as in
            `torch.nn.functional.cross_entropy`; keys left out by `ids` have none.
        symmetric: the mean of this loss and that of each positive key's query among all ranks' queries, as in
            `clip_loss`; the keys of `negatives` are no queries. positive is (b, D) then.
        group: None, a `ProcessGroup`, a one-dimensional `DeviceMesh` or an `MPI.Comm`; see `set_default_group`.
        rank_reduction: what is done with the ranks' gradients afterwards. "mean" (DDP, `GradientAverager`): the mean
            over ranks of the returned values is the loss of the whole batch. "sum": their sum is.
        chunk_size: keep the logits of this many columns at a time and compute them again in backward. None: keep all,
            a matrix of b × B numbers. The b × K logits of queries' own negatives are kept.
        exchange: "gather": every rank gets all keys. "ring": one rank's keys after the other's.

    Returns:
        A 0-d tensor of float32, or float64 if the features are: N times this rank's share of the loss, or the share.

    Raises:
        TypeError, ValueError: an argument is invalid, or the batch is empty on all ranks.
        CollectiveMismatchError: on all ranks, if they differ in the tensors that are given, in options that are no
            numbers, in dtypes or in D.

    Source: notes/training/contrastive.md.
    """
    name = "info_nce_loss"
    check_features(name, query=query)
    check_columns(name, query, positive, negatives)
    number, common = {"temperature": temperature}, (group, rank_reduction, chunk_size, exchange)
    options = Options(name, "query", number, normalize, *common, decoupled, label_smoothing, symmetric)
    if symmetric and positive.ndim == 3:
        got, expected = f"shape {tuple(positive.shape)}", f"shape {tuple(query.shape)} with symmetric=True"
        remedy = "a key has one query; pass one positive for each query, and the others as negatives"
        raise ValueError(message(name, "positive", got, expected, remedy))
    if targets is not None:
        others = {"decoupled": decoupled, "label_smoothing": label_smoothing, "symmetric": symmetric}
        targets = soft_targets(name, targets, query, labels=labels, ids=ids, **others)
    return loss_of_pairs(
        options, LossRule(), [query], positive, negatives=negatives, labels=labels, ids=ids, targets=targets
    )


class InfoNCELoss(LossModule, of=info_nce_loss):
    """`info_nce_loss` as a module; its arguments are the options, `forward` takes the tensors.

    A temperature that is an `nn.Parameter` becomes a parameter of the module. With `learnable=True` the temperature is
    a number to start with, and the module's parameter its logarithm, `log_temperature`.

    >>> from diffcoll.nn import InfoNCELoss
    >>> InfoNCELoss(decoupled=True).decoupled
    True
    """

    def forward(
        self,
        query: Tensor,
        positive: Tensor,
        labels: Tensor | None = None,
        ids: Tensor | None = None,
        negatives: Tensor | None = None,
        targets: Tensor | None = None,
    ) -> Tensor:
        """Return the loss, as `info_nce_loss` does."""
        return info_nce_loss(
            query, positive, negatives=negatives, labels=labels, ids=ids, targets=targets, **self.options
        )
