"""The causes of a wrong gradient that are named."""

from __future__ import annotations

#: Each cause: the usual bug behind it, and the fix.
CAUSES = {
    "raised": (
        "the collectives expect blocks of equal size",
        'gather with sizes="auto", or give every rank equally many rows',
    ),
    "not finite": ("a mean over no rows is 0/0", "divide a sum by the number of rows of all ranks instead"),
    "value scaled": (
        "every rank returns the loss of the whole batch where a share is expected, or the other way round; or the loss "
        "is multiplied by N to make up for a mean",
        "average or sum the values where the number is shown (diffcoll.global_mean)",
    ),
    "rounding": (
        "a value or gradient that is zero but for rounding, such as the mean of centered rows, or a small difference "
        "of large numbers",
        "choose other data or another weighting, so that there is a number to compare",
    ),
    "random": (
        "dropout or other random numbers, which differ between the ranks and one process",
        "call module.eval(), or pass the random numbers in the batch",
    ),
    "nearly right": (
        "the computation has a lower precision than its inputs, as under autocast, or a small term is missing",
        "check without autocast and in float64; pass tolerance= if the precision is intended",
    ),
    "scaled": (
        "the loss and the later reduction of gradients do not agree on who divides by N",
        "use the reduction under which it is exact, or multiply the returned loss by the missing factor",
    ),
    "reduced twice": (
        "the gradient of this tensor is reduced within the loss and again by the averager, or the loss is multiplied "
        "by N and is the whole loss for this tensor on every rank",
        "reduce it once: no all_reduce of a parameter's gradient in the loss",
    ),
    "graph cut": (
        "the tensor leaves the autograd graph at the lines listed below, so the gradient through other ranks is lost",
        "use a collective that has a gradient there, such as diffcoll.all_gather",
    ),
    "no reduction": (
        "the gather passes on this rank's share of the gradient only, while the loss's own parameters get the whole",
        "gather with a backward that sums over ranks (diffcoll.all_gather); then all gradients follow one convention",
    ),
    "scaled differently": ("a factor depends on the rank", "look for a division by a size or a count of this rank"),
    "mean of local means": (
        "each rank divides by its own number of rows, so rows of small ranks count more",
        "divide by the number of rows of all ranks (diffcoll.global_mean, or GradientAverager with weights)",
    ),
    "no contribution": (
        "the tensor is detached on this rank, or replaced by its gathered copy, which has no gradient",
        "gather with a collective that has a gradient, on every rank",
    ),
    "local slice": (
        "the backward of the gather returns this rank's slice of its own gradient, without the sum over ranks",
        "sum the gradients over ranks before taking the slice: diffcoll.all_gather",
    ),
    "not reduced": (
        "the collective has the backward of the identity, as torch.distributed.all_reduce in a graph has",
        "use diffcoll.all_reduce, whose backward sums over ranks",
    ),
    "rank missing": (
        "a loop or a mask leaves a rank out, such as range(1, N)",
        "look at which blocks the backward of the collective adds up",
    ),
    "ranks swapped": (
        "the backward sends to the rank that it should receive from, or blocks are ordered otherwise than ranks",
        "the adjoint of a permutation is its reverse: diffcoll.permute, diffcoll.shift",
    ),
    "local statistics": (
        "a mean, a variance or a set of negatives is taken over this rank's rows alone, or labels and masks lack the "
        "rank's offset",
        "take it over all ranks' rows: diffcoll.all_reduce of sums and counts, or diffcoll.all_gather of the rows; add "
        "the number of rows of lower ranks to indices",
    ),
    "another loss": ("", "compare the two functions' values first; the gradient follows"),
    "wrong in direction": (
        "a backward that is not the adjoint of the forward: the reduction is ignored (max, product), statistics are "
        "taken as constants, or a collective cuts the graph",
        "use diffcoll's collectives, or derive the backward from the forward of all ranks",
    ),
    "second order": (
        "a custom autograd.Function calls a collective in its backward that autograd does not see, or treats what "
        "depends on the input as a constant there",
        "write the backward with differentiable collectives",
    ),
    "uneven": ("a count or an offset is that of equal ranks", "use the sizes that the ranks have"),
    "empty": ("an empty rank skips a collective or divides by zero", "let every rank make the same calls"),
    "detached": (
        "a tensor is detached, see the lines below, on purpose or not",
        "if on purpose, compare with one process instead: assert_matches_single_process",
    ),
    "kink": (
        "two elements that a maximum compares are equal, or a value is where a clamp or ReLU bends",
        "choose other data: at a kink finite differences do not say what the gradient is",
    ),
    "on processes": (
        "the function depends on something that simulated ranks share or that differs between processes",
        "look at devices, globals, environment variables and random numbers",
    ),
}
