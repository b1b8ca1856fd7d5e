"""Ranks that need no gradient, where other ranks need one.

All ranks send the same messages in backward only if all record the same collectives. Which of its tensors require a
gradient is local to a rank, so each rank sends one number with a message of the forward: 1 if it needs a gradient. A
rank that needs none, a follower, records its collectives before it has the numbers of the others, and drops its graph
if these are all 0. Only a follower reads them, which on a GPU makes the host wait.

A rank under no_grad or inference_mode never runs backward. Where code is traced or compiled, a number has no value, and
a rank that needs no gradient cannot follow. Such a rank is absent, and sends that instead. If others need a gradient,
all raise an error: these would wait for it. In joint_backward no rank need follow.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from diffcoll.composed.leaves import batch_leaves, rows_of_ranks
from diffcoll.core.errors import CollectiveMismatchError
from diffcoll.core.groups import collectives_only, get_rank, get_world_size
from diffcoll.core.joint import is_joint
from diffcoll.core.torch_private.tracing import assert_in_graph, assume, is_traced
from diffcoll.core.torch_private.transforms import is_vmapped, is_within_transform
from diffcoll.engines.types import Group

#: A parameter without elements.
_LEAF = torch.zeros(0, 1, device="cpu", requires_grad=True)
#: The number of a rank that is absent. Sums over up to 4095 ranks are exact in float32.
ABSENT = 4096


def needs_gradient(*xs: Tensor | None) -> bool:
    """Whether this rank needs the gradient of one of xs."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in xs)


def number(needs: bool, like: Tensor) -> float:
    """Return the number that a rank sends: 1 if it needs a gradient, 0 if not, ABSENT if it is absent."""
    if needs or is_joint():
        return float(needs)
    absent = not torch.is_grad_enabled() or torch.compiler.is_compiling() or is_traced(like)
    return float(ABSENT * absent)


def bit(needs: bool, like: Tensor) -> Tensor:
    """Return the number that a rank sends, of shape (1,)."""
    return torch.full((1,), number(needs, like), dtype=like.dtype, device=like.device)


def leaf(x: Tensor) -> Tensor:
    """Return x as a new leaf that requires a gradient, also if x was made in inference mode."""
    return (x.clone() if x.is_inference() else x.detach()).requires_grad_()


def any_needs(numbers: list[float]) -> bool:
    """Whether a rank needs a gradient, by the numbers of all ranks or their sum."""
    return any(x % ABSENT for x in numbers)


def refuse_absent(name: str, numbers: Tensor, group: Group) -> Tensor:
    """Return which ranks need a gradient, or how many, by the numbers of all ranks or their sum.

    Raise on every rank if one needs a gradient and another one is absent.

    On an accelerator, and in a graph, as an assertion that the host does not wait for.
    """
    numbers = numbers.detach().real if numbers.is_complex() else numbers.detach()
    needs = numbers % ABSENT
    compiling = torch.compiler.is_compiling()
    if is_joint() or (is_within_transform() if compiling else is_vmapped(numbers)):  # no assertion can be traced there
        return needs
    if compiling or is_traced(numbers) or not numbers.is_cpu:
        total = numbers.sum()
        assert_in_graph((total < ABSENT) | (total % ABSENT == 0), f"{name}: {DIFFER}")
    else:
        refuse_absent_of(name, numbers.reshape(-1).tolist(), group)
    return needs


def refuse_absent_of(name: str, numbers: list[float], group: Group) -> None:
    """Do what `refuse_absent` does, for numbers that were read."""
    absent = [r for r, x in enumerate(numbers) if x >= ABSENT]
    if not (absent and any_needs(numbers)):
        return
    if len(numbers) == get_world_size(group):
        who = f"rank {', '.join(map(str, absent))}"
    else:
        mine = "with" if torch.is_grad_enabled() else "without"
        n = get_world_size(group)
        who = f"{int(sum(numbers)) // ABSENT} of {n} ranks; this is rank {get_rank(group)}, {mine} grad mode"
    raise CollectiveMismatchError(f"{name}: {DIFFER}: {who}")


#: Why ranks cannot go on, one of which is absent.
DIFFER = (
    "some ranks need gradients, and others will not run backward, under no_grad, under inference_mode or compiled "
    "without anything to train; call it on all ranks with grad mode on or on none, and compile all or none"
)


def follows(group: Group, *xs: Tensor) -> bool:
    """Whether this rank needs no gradient of xs, but runs backward if another rank needs one."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or needs_gradient(*xs):
        return False
    return not collectives_only(group) and not any(map(is_traced, xs))


def sent(name: str, collective: Callable[[Tensor], Tensor], row: Tensor, needs: bool, group: Group) -> Tensor:
    """Return collective(row), recorded on every rank if a rank needs a gradient.

    Args:
        name: of the public function, for errors.
        collective: sums rows, or stacks them in dim 0.
        row: 1-d.
        needs: whether this rank needs a gradient, of the row or of what is computed from the result.
        group: of the collective.

    Raises:
        CollectiveMismatchError: on all ranks, if one needs a gradient and another one cannot run backward.
    """
    follower = follows(group, row) or (needs and not row.requires_grad and not collectives_only(group))
    y = collective(torch.cat([leaf(row) if follower else row, bit(needs, row)]))
    anyone = refuse_absent(name, y[..., -1], group)
    found: Tensor = y[..., :-1]
    return found.detach() if follower and not needs and not anyone.any() else found


def agreed(
    name: str, tree: dict[str, Tensor], what: str, rows: int, needs: tuple[bool, bool], group: Group
) -> tuple[list[int], tuple[bool, bool]]:
    """Return the ranks' numbers of rows, and whether a rank needs the gradients of a part of the inputs, and any.

    Raise on all ranks if their trees differ in keys, dtypes or dimensions other than 0, in words `what`, or if one rank
    needs a gradient and another one is absent.
    """
    if get_world_size(group) == 1:
        return [rows], needs
    leaves, _ = batch_leaves(name, tree)
    grad, compiling = torch.is_grad_enabled(), torch.compiler.is_compiling()
    absent = not grad and not is_joint()
    mine = 3 if compiling and grad else needs[0] + 2 * needs[1] + 4 * absent  # a graph always computes all gradients
    sizes, bits = rows_of_ranks(name, tree, leaves, rows, group, mine, what)
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
