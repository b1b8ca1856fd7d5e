"""What ranks agree on before they exchange features: numbers of rows, options, and what backward has to do.

note  notes/training/contrastive.md
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from diffcoll.composed.leaves import batch_leaves, rows_of_ranks
from diffcoll.core.groups import collectives_only
from diffcoll.core.joint import is_joint
from diffcoll.core.torch_private.tracing import assert_in_graph, assume
from diffcoll.core.torch_private.transforms import is_within_transform
from diffcoll.engines.types import Group
from diffcoll.nn.features import Columns, Options
from diffcoll.nn.followers import ABSENT, DIFFER, leaf, needs_gradient, refuse_absent_of

#: A parameter without elements.
_LEAF = torch.zeros(0, 1, device="cpu", requires_grad=True)


class Wants(NamedTuple):
    """What the ranks have agreed on for backward, in which they send the same messages."""

    #: Whether a rank needs the gradient of its columns.
    k: bool
    #: Whether a rank needs any gradient.
    any: bool
    #: Whether a ring is differentiated as a loop of shifts.
    loop: bool


def agree(
    q: Tensor, columns: list[Columns], bias: Tensor | None, compared: dict[str, Tensor], options: Options
) -> tuple[list[int], Wants]:
    """Return the ranks' numbers of rows, after a check that they pass the same things, and what backward has to do."""
    loop = options.exchange == "ring" and collectives_only(options.group)
    k, xs = columns[0], [x.k for x in columns]
    # Not is_compiling(): after a graph break the rest of a compiled rank's call is eager.
    facts = ", ".join(f"{key}={value}" for key, value in options.same.items())
    tree = {f"{facts}{', in a transform' if loop else ''}": k.k.detach().to(k.sent), **compared}
    what = "labels, ids, negatives or numbers of positives (given on all ranks, of one dtype)"
    what = f"{what}, targets, options, dtype or size of the features"
    needs = needs_gradient(*xs), needs_gradient(*xs, q, bias)
    sizes, (needs_k, needs_any) = agreed(options.name, tree, what, len(q), needs, options.group)
    return sizes, Wants(needs_k, needs_any, loop)


def agreed(
    name: str, tree: dict[str, Tensor], what: str, rows: int, needs: tuple[bool, bool], group: Group
) -> tuple[list[int], tuple[bool, bool]]:
    """Return the ranks' numbers of rows, and whether a rank needs the gradients of a part of the inputs, and any.

    Raise on all ranks if their trees differ in keys, dtypes or dimensions other than 0, in words `what`, or if one rank
    needs a gradient and another one is absent.
    """
    leaves, _ = batch_leaves(name, tree)
    grad, compiling = torch.is_grad_enabled(), torch.compiler.is_compiling()
    absent = not grad and not is_joint()
    mine = 3 if compiling and grad else needs[0] + 2 * needs[1] + 4 * absent  # a graph always computes all gradients
    sizes, bits = rows_of_ranks(name, tree, leaves, rows, group, mine, what)
    if len(sizes) == 1:
        return sizes, needs
    if compiling:
        for b in bits:
            if is_within_transform():  # no assertion with a text can be traced there
                assume(b < 4 if grad else b % 4 == 0)
            else:
                of_rank = torch.full((), b)
                assert_in_graph(of_rank < 4 if grad else of_rank % 4 == 0, f"{name}: {DIFFER}")
        return sizes, (grad, grad)
    numbers = [float(ABSENT if b & 4 else b & 2) for b in bits]
    refuse_absent_of(name, numbers, group)
    return sizes, (any(b & 1 for b in bits), any(b & 2 for b in bits))


def tracked(x: Tensor, wanted: bool) -> Tensor:
    """Return x such that backward computes its gradient on this rank too, if a rank wants one."""
    if not wanted or x.requires_grad or not torch.is_grad_enabled() or is_within_transform():
        return x
    if torch.compiler.is_compiling():  # refuses requires_grad_
        return torch.cat([x, _LEAF.to(x).expand(0, x.shape[1])])
    return leaf(x)
