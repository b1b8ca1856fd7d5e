"""ring: every rank sees every block once; derivatives are those of all blocks; nothing is left."""

import gc
import warnings
from itertools import islice

import nests
import pytest
import torch
from runs import gloo, profiled, runs_on

import diffcoll as dc

SIZES = [2, 0, 3]


def tree(r):
    """Leaves of two dtypes, one of them of another length, and labels; different on every rank."""
    generator = torch.Generator().manual_seed(r)

    def numbers(*shape, dtype=torch.float64):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    rows = SIZES[r]
    more = [numbers(rows), numbers(2 * rows, 1, dtype=torch.float32)]
    return {"x": numbers(2, rows).detach().T.requires_grad_(), "more": more, "label": torch.full((rows,), r)}


def inputs(batch):
    return [batch["x"], *batch["more"]]


def weighted(block, r, source):
    """A loss of one block, which depends on the rank and on where the block is from."""
    x, y, z = inputs(block)
    of_y = (y * torch.arange(1, 1 + len(y))).sin().sum()
    return (r + 1) * (x.pow(3).sum() * (source + 2) + of_y + z.double().exp().sum())


def order(r, n=3):
    """The ranks whose blocks rank r gets, in order."""
    return [(r - i) % n for i in range(n)]


@runs_on("rules", "gloo", "mpi")
def test_derivatives_are_those_of_all_blocks(run):
    def in_order(r, blocks):
        return torch.cat([(r + source + 2.0) * block["x"] * block["more"][0].cos() for source, block in blocks])

    def tree_of(x):
        return {"x": x, "more": [x[:, :1].exp(), x.long()]}

    def of_all(xs):
        return [in_order(r, [(s, tree_of(xs[s])) for s in order(r)]) for r in range(3)]

    blocks = [tree(r)["x"].detach() for r in range(3)]
    nests.check(run, nests.SOME, lambda r: lambda x: in_order(r, dc.ring(tree_of(x))), of_all, blocks)


@runs_on("rules", "gloo")
@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_joint_backward_where_ranks_ignore_blocks(run, blocks, held):
    """Rank 0 ignores every block, rank 1 the received ones; the loop may end after any number of blocks.

    The iterator may be freed then, or be held, with a block in flight.
    """

    def loss(r, found):
        used = [weighted(block, r, source) for source, block in found if r == 2 or r == source == 1]
        return sum(used, torch.zeros((), dtype=torch.float64))

    def body(r):
        batch = tree(r)
        with dc.joint_backward() as joint:
            iterator = dc.ring(batch)
            total = joint(loss(r, islice(iterator, blocks)))
            if not held:
                del iterator
            return torch.autograd.grad(total, inputs(batch), materialize_grads=True)

    trees = [tree(r) for r in range(3)]
    total = sum(loss(r, [(s, trees[s]) for s in order(r)[:blocks]]) for r in range(3))
    expected = torch.autograd.grad(total, [leaf for each in trees for leaf in inputs(each)], materialize_grads=True)
    torch.testing.assert_close([g for of_rank in run(body, range(3)) for g in of_rank], [*expected])


@pytest.mark.parametrize("n", [1, 2, 3])
def test_every_block_once_in_order(run, n):
    """The first is this rank's own object; the others may be modified."""

    def body(r):
        batch, found = tree(r), []
        for source, block in dc.ring(batch):
            assert (block is batch) == (source == r)
            assert block["label"].tolist() == [source] * SIZES[source]
            assert all(torch.equal(a, b) for a, b in zip(inputs(block), inputs(tree(source)), strict=True))
            if source != r:
                [leaf.mul_(7) for leaf in inputs(block)]
            found.append(source)
        return found

    assert run(body, range(n)) == [order(r, n) for r in range(n)]


@runs_on("rules", "gloo", "mpi")
def test_a_loop_that_is_left_early(run):
    """By dropping the iterator, by an exception, and before its start; the group works, without a warning."""

    def body(r):
        x = torch.full((1000 * r,), float(r), requires_grad=True)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _, block in islice(dc.ring(x), 1):
                block.sum().backward()
            with pytest.raises(KeyError):
                for source, _ in dc.ring([x, x]):
                    if source != r:
                        raise KeyError("the loop")
            dc.ring(x)  # never started
            gc.collect()
        total = dc.all_reduce(torch.tensor(r)).item()
        return total, [source for source, _ in dc.ring(x)], x.grad.tolist() == [1] * len(x)

    assert run(body, range(3)) == [(3, order(r), True) for r in range(3)]


def test_messages():
    """N − 1 blocks of each dtype, the next one sent before the caller works on one, and as many back."""

    def body(r):
        x = torch.ones(r + 1, 2, requires_grad=True)
        iterator = dc.ring({"x": x, "label": torch.arange(r + 1)})

        def loop():
            loss = 0
            for _, block in iterator:
                with torch.profiler.record_function("diffcoll.work: 0 B"):
                    loss = loss + block["x"].sum()
            loss.backward()

        return profiled(loop)

    for r, events in enumerate(gloo(body, range(3))):
        own, before = (("all_to_all", 8 * (s % 3 + 1)) for s in (r, r - 1))  # two float32, or an int64, a row
        wait, work = ("all_to_all", 0), ("work", 0)
        assert events[:11] == [own, own, work, wait, wait, before, before, work, wait, wait, work]
        assert [name for name, nbytes in events[11:] if nbytes] == ["all_to_all backward"] * 2
