"""The causes of a wrong gradient that are named."""

from __future__ import annotations

from enum import Enum

from diffcoll.testing.harness.report import Cause

#: Names of kinds that are spelled otherwise than the constant.
_SPELLED = {"STOP_GRADIENT": "stop-gradient", "OFF_BY_LOG_N": "off by log N"}


class Kind(Enum):
    """The kind of a cause: the usual bug behind it, and the fix. Reports show the name of the constant in words."""

    RAISED = (
        "the collectives expect blocks of equal size",
        'gather with sizes="auto", or give every rank equally many rows',
    )
    NOT_FINITE = "a mean over no rows is 0/0", "divide a sum by the number of rows of all ranks instead"
    VALUE_SCALED = (
        "every rank returns the loss of the whole batch where a share is expected, or the other way round; or the loss "
        "is multiplied by N to make up for a mean",
        "average or sum the values where the number is shown (diffcoll.global_mean)",
    )
    ROUNDING = (
        "a value or gradient that is zero but for rounding, such as the mean of centered rows, or a small difference "
        "of large numbers",
        "choose other data or another weighting, so that there is a number to compare",
    )
    RANDOM = (
        "dropout or other random numbers, which differ between the ranks and one process",
        "call module.eval(), or pass the random numbers in the batch",
    )
    NEARLY_RIGHT = (
        "the computation has a lower precision than its inputs, as under autocast, or a small term is missing",
        "check without autocast and in float64; if the precision is intended, pass tolerance= to "
        "assert_matches_single_process",
    )
    SOME_ROWS = (
        "rows that few look up, or that several ranks have, are added or divided otherwise than the others",
        "look at what these rows have in common: a rare index, an index on several ranks, the last row, padding",
    )
    SCALED = (
        "the loss and the later reduction of gradients do not agree on who divides by N",
        "use the reduction under which it is exact, or multiply the returned loss by the missing factor",
    )
    MULTIPLIED = (
        "a backward, a hook or a weight multiplies it by a number that is no power of N",
        "look for this number in backward functions, hooks and the weights of the loss",
    )
    REDUCED_TWICE = (
        "the gradient of this tensor is reduced within the loss and again by the averager, or the loss is multiplied "
        "by N and is the whole loss for this tensor on every rank",
        "reduce it once: no all_reduce of a parameter's gradient in the loss",
    )
    GRAPH_CUT = (
        "the tensor leaves the autograd graph at the lines listed below, so the gradient through other ranks is lost",
        "use a collective that has a gradient there, such as diffcoll.all_gather",
    )
    NO_REDUCTION = (
        "the gather passes on this rank's share of the gradient only, while the loss's own parameters get the whole",
        "gather with a backward that sums over ranks (diffcoll.all_gather); then all gradients follow one convention",
    )
    SCALED_DIFFERENTLY = "a factor depends on the rank", "look for a division by a size or a count of this rank"
    MEAN_OF_LOCAL_MEANS = (
        "each rank divides by its own number of rows or tokens, so those of small ranks count more",
        "divide by the number of all ranks (diffcoll.global_mean, or a sum and its count in GradientAverager's block)",
    )
    LEFT_OUT = (
        "a slice, a mask or a loop over ranks leaves rows out, or another rank's rows stand in their place",
        "look at which rows of each rank enter the loss",
    )
    NO_CONTRIBUTION = (
        "the tensor is detached on this rank, or replaced by its gathered copy, which has no gradient",
        "gather with a collective that has a gradient, on every rank",
    )
    LOCAL_SLICE = (
        "the backward of the gather returns this rank's slice of its own gradient, without the sum over ranks",
        "sum the gradients over ranks before taking the slice: diffcoll.all_gather",
    )
    NOT_REDUCED = (
        "the collective has the backward of the identity, as torch.distributed.all_reduce in a graph has",
        "use diffcoll.all_reduce, whose backward sums over ranks",
    )
    RANK_MISSING = (
        "a loop or a mask leaves a rank out, such as range(1, N)",
        "look at which blocks the backward of the collective adds up",
    )
    RANKS_SWAPPED = (
        "the backward sends to the rank that it should receive from, or blocks are ordered otherwise than ranks",
        "the adjoint of a permutation is its reverse: diffcoll.permute, diffcoll.shift",
    )
    LOCAL_STATISTICS = (
        "a mean, a variance or a set of negatives is taken over this rank's rows alone, or labels and masks lack the "
        "rank's offset",
        "take it over all ranks' rows: diffcoll.all_reduce of sums and counts, or diffcoll.all_gather of the rows; add "
        "the number of rows of lower ranks to indices",
    )
    ANOTHER_STATE = (
        "a buffer, queue or codebook is updated with this rank's rows, on some ranks only, or by another formula",
        "update it on every rank with the numbers of all ranks: reduce sums and counts, or gather the rows",
    )
    ANOTHER_LOSS = "", "compare the two functions' values first; the gradient follows"
    STOP_GRADIENT = (
        "the function for one process detaches a tensor, such as a target, that the distributed one does not",
        "detach it in both",
    )
    ANOTHER_GRADIENT = (
        "one of the functions detaches a tensor that the other does not, or the values agree at this point alone",
        "look for detach(), no_grad and .data in both, and try other data",
    )
    AVERAGED = (
        "the gradient is reduced over ranks in the backward, as by DDP or a GradientAverager: its tensors are one "
        "variable for all ranks",
        "compare with one process instead: assert_matches_single_process",
    )
    WRONG_IN_DIRECTION = (
        "a backward that is not the adjoint of the forward: the reduction is ignored (max, product), statistics are "
        "taken as constants, or a collective cuts the graph",
        "use diffcoll's collectives, or derive the backward from the forward of all ranks",
    )
    SECOND_ORDER = (
        "a custom autograd.Function calls a collective in its backward that autograd does not see, or treats what "
        "depends on the input as a constant there",
        "write the backward with differentiable collectives",
    )
    LATER_STEP = (
        "what the first call keeps, such as a queue, a cache or running statistics, is not what one process keeps",
        "look at what the call writes to the module, to attributes and to globals",
    )
    MORE_RANKS = (
        "neighbours, partners or offsets are right for few ranks alone, as with two, where each has one other; or each "
        "rank has fewer rows than the code expects",
        "look at each index that is computed from the rank and the number of ranks, and run more ranks with more rows",
    )
    UNEVEN = "a count or an offset is that of equal ranks", "use the sizes that the ranks have"
    EMPTY = "an empty rank skips a collective or divides by zero", "let every rank make the same calls"
    NOT_REPLICATED = (
        "a sum over the ranks is missing in the forward, or the ranks draw other random numbers",
        "reduce it (diffcoll.all_reduce); or, if each rank has a loss of its own, say no placement of the output",
    )
    PART_OF_A_SUM = (
        "nobody sums it over the axis: an all_reduce is missing, in the forward, or in the backward of what the ranks "
        "of the axis share (the input of a column-parallel layer, the weights of a norm on parts of a sequence)",
        "sum it over the axis (diffcoll.all_reduce); if somebody does so later, say Partial() in placements=, or "
        'rank_reduction={axis: "sum"}',
    )
    NOT_AVERAGED = (
        "the axis is one of data, and nobody averages over it; or each rank takes a mean over its own piece",
        'average over it, or say so: rank_reduction={axis: "mean"}; or divide a sum over the axis by the whole count',
    )
    SCALED_OVER_AN_AXIS = (
        "a reduction over the axis too many or too few, in the forward or in the backward, or nobody divides by the "
        "number of its ranks",
        "look at each collective over the axis: where all ranks have the same loss, the backward of a sum is the "
        "identity (grad_placement='replicate')",
    )
    WRONG_AXES = (
        "a sum over ranks is divided by the number of ranks of other axes than it was taken over",
        "divide by the ranks that the sum is taken over",
    )
    ANOTHER_PIECE = (
        "an offset or a rank is that of another rank, or the pieces are in another order than placements= says",
        "compare the order of the ranks in the group with that of the pieces",
    )
    BIAS_REPEATED = (
        "every rank of the axis adds the bias before the sum over the axis",
        "add it after the sum, or on one rank",
    )
    OFF_BY_LOG_N = ("the sum of exponentials has each term N times", "sum over the pieces of the axis once")
    PADDING_COUNTED = (
        "elements that a mask or an ignored label leaves out are counted where the loss is divided",
        "divide by the number of elements that count, on all ranks",
    )
    DETACHED = (
        "a tensor is detached, see the lines below, on purpose or not",
        "if on purpose, compare with one process instead: assert_matches_single_process",
    )
    KINK = (
        "two elements that a maximum compares are equal, or a value is where a clamp or ReLU bends",
        "choose other data: at a kink finite differences do not say what the gradient is",
    )
    ON_PROCESSES = (
        "the function depends on something that simulated ranks share or that differs between processes",
        "look at devices, globals, environment variables and random numbers",
    )
    SHARED_STATE = (
        "simulated ranks are threads of one process: what an imported module keeps, such as a rank, a group or a cache "
        "that is computed once, is that of the rank that came first",
        'compute it in the function, or check on real processes alone: on=["gloo"]',
    )
    #: No bug of the backward: the gradient is that of the losses which the ranks return.
    CONSISTENT = None

    def __str__(self) -> str:
        return _SPELLED.get(self.name) or self.name.lower().replace("_", " ")


#: Names that say what was observed; state that simulated ranks share may be behind each.
OBSERVED = {
    str(kind)
    for kind in (
        Kind.ANOTHER_LOSS,
        Kind.ANOTHER_STATE,
        Kind.ANOTHER_GRADIENT,
        Kind.ANOTHER_PIECE,
        Kind.LOCAL_STATISTICS,
        Kind.RANKS_SWAPPED,
        Kind.WRONG_IN_DIRECTION,
    )
}


def cause_of(kind: Kind, seen: str) -> Cause:
    """Return a cause, with the usual bug and the fix, and what was seen."""
    return Cause(str(kind), seen, *kind.value)
