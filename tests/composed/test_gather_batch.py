"""gather_batch: all ranks' rows with their labels, and where this rank's rows are among them."""

from contextlib import nullcontext
from typing import NamedTuple

import nests
import pytest
import torch
from runs import gloo, profiled, refusal, runs_on
from torch.nn import functional

import diffcoll as dc

SIZES = [2, 0, 3]
#: Of each rank: documents, and the lengths of two other dimensions.
DOCUMENTS = [(2, 4, 1), (0, 2, 7), (3, 1, 2)]


class Sample(NamedTuple):
    z: torch.Tensor
    label: torch.Tensor
    seen: torch.Tensor


def numbers(seed, *shape):
    return torch.randn(*shape, dtype=torch.double, generator=torch.Generator().manual_seed(seed))


def sample(r, rows, tokens=4, labels=1):
    """Leaves of three dtypes, one of them not contiguous."""
    label = torch.arange(rows * labels).view(rows, labels) + 10 * r
    return Sample(numbers(r, tokens, rows).T, label, numbers(r + 9, rows, 2) < 0.5)


def whole(samples, r, pad=None):
    """What rank r receives, by torch.cat and torch.nn.functional.pad."""

    def padded(x, width, value):
        return functional.pad(x, (0, width - x.shape[1]), value=value)

    leaves, masks = [], []
    for xs in zip(*samples, strict=True):
        width = max(x.shape[1] for x in xs)
        leaves.append(torch.cat([padded(x, width, pad or 0) for x in xs]))
        masks.append(torch.cat([padded(torch.ones_like(x, dtype=torch.bool), width, False) for x in xs]))
    sizes = [len(each.z) for each in samples]
    mask = None if pad is None else Sample(*masks)
    return dc.GatheredBatch(Sample(*leaves), sizes, sum(sizes[:r]), sum(sizes), mask)


@runs_on("truth", "rules", "gloo", "mpi")
@pytest.mark.parametrize("n", [1, 2, 3])
def test_what_each_rank_receives(run, n):
    """Unequal numbers of rows, exchanged or listed, and equal ones; documents of other lengths, and their mask."""
    unequal, equal = [(rows,) for rows in SIZES], [(2,)] * 3
    ways = [({}, unequal), ({"sizes": SIZES[:n]}, unequal), ({"sizes": None}, equal), ({}, equal), ({}, [(0,)] * 3)]
    ways += [({"pad": -1}, DOCUMENTS), ({"pad": -1}, equal)]

    def body(r):
        return [dc.gather_batch(sample(r, *shapes[r]), **options) for options, shapes in ways]

    for r, of_rank in enumerate(run(body, range(n))):
        for found, (options, shapes) in zip(of_rank, ways, strict=True):
            expected = whole([sample(s, *shapes[s]) for s in range(n)], r, options.get("pad"))
            assert type(found.tree) is Sample
            torch.testing.assert_close(tuple(found), tuple(expected), rtol=0, atol=0)


WAYS = {
    "auto": ({}, [(rows,) for rows in SIZES]),
    "listed": ({"sizes": SIZES}, [(rows,) for rows in SIZES]),
    "padded": ({"pad": 0.5}, DOCUMENTS),
}


@runs_on("rules", "gloo", "mpi")
@pytest.mark.parametrize("way", WAYS)
def test_derivatives_are_those_of_the_whole_batch(run, way):
    options, shapes = WAYS[way]
    samples = [sample(r, *shapes[r]) for r in range(3)]

    def of_rank(r):
        return lambda z: dc.gather_batch(samples[r]._replace(z=z), **options).tree.z

    def of_all(zs):
        replaced = [own._replace(z=z) for own, z in zip(samples, zs, strict=True)]
        return [whole(replaced, r, options.get("pad")).tree.z for r in range(3)]

    nests.check(run, nests.SOME, of_rank, of_all, [own.z for own in samples])


def test_messages():
    """One for each dtype of the leaves; before them one for the sizes if they are not known."""

    def body(r):
        ways = {"sizes": "auto"}, {"sizes": SIZES}, {"pad": 0}
        return [len(profiled(lambda: dc.gather_batch(sample(r, SIZES[r]), **way))) for way in ways]  # noqa: B023

    assert gloo(body, range(3)) == [[3 + 1, 3, 3 + 2]] * 3


def labelled(z):
    return {"z": z, "seen": torch.ones(len(z), dtype=z.dtype), "labels": torch.arange(len(z))}


#: Calls of this rank's z, and whether backward waits for all ranks.
CALLS = {
    "gather_batch": (lambda z: dc.gather_batch(labelled(z)).tree["z"], True),
    "padded": (lambda z: dc.gather_batch(labelled(z), pad=0).tree["z"], True),
    "all_gather": (lambda z: dc.all_gather(z, sizes="auto"), True),
    "all_gather of a tree": (lambda z: dc.all_gather(labelled(z), sizes="auto")["z"], True),
    "all_gather, replicated": (lambda z: dc.all_gather(z, sizes="auto", grad_placement="replicate"), False),
    "ring": (lambda z: torch.cat([block["z"] for _, block in dc.ring(labelled(z))]), True),
}


@runs_on("rules", "gloo", "mpi")
def test_an_empty_rank_that_needs_no_gradient(run):
    """An error on all ranks, unless all run backward anyway, none does, or it sends nothing."""

    def body(r):
        def step(call, needed, context=nullcontext):
            z = numbers(r, SIZES[r], 4).requires_grad_(SIZES[r] > 0 or needed)
            with context() as region:
                y = call(z)
            loss = (region or (lambda loss: loss))(y.sin().sum())
            if loss.requires_grad:
                loss.backward()
            return torch.zeros_like(z) if z.grad is None else z.grad

        for call, waits in CALLS.values():
            right = step(call, True)
            torch.testing.assert_close(step(call, False, dc.joint_backward), right)
            step(call, False, torch.no_grad)
            if waits:
                refusal(dc.CollectiveMismatchError, step, call, False)
            else:
                torch.testing.assert_close(step(call, False), right)

    run(body, range(3))
