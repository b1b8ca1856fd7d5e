"""ring: every rank sees every block once; gradients to second order are those of gathered blocks; nothing is left."""

import gc
import warnings

import pytest
import torch
from runs import gloo, new_group, profiled, rules, runs_on, truth
from torch.utils.checkpoint import checkpoint

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


def by_ring(r, batch):
    return sum(weighted(block, r, source) for source, block in dc.ring(batch))


def by_gathering(r, batch):
    x, y, z = inputs(dc.all_gather(batch, sizes="auto"))
    blocks = zip(x.split(SIZES), y.split(SIZES), z.split([2 * s for s in SIZES]), strict=True)
    return sum(weighted({"x": a, "more": [b, c]}, r, source) for source, (a, b, c) in enumerate(blocks))


def derivatives(loss, r):
    """The loss, its gradients and second derivatives."""
    batch = tree(r)
    value = loss(r, batch)
    gs = torch.autograd.grad(value, inputs(batch), create_graph=True)
    hs = torch.autograd.grad(sum((r + 2) * g.double().square().sum() for g in gs), inputs(batch))
    return [value.detach(), *(g.detach() for g in gs), *hs]


@runs_on("rules", "gloo", "mpi")
def test_gradients_to_second_order_are_those_of_gathered_blocks(run):
    """In check mode too, and in a checkpoint around the loop."""

    def checked(r):
        with dc.check_mode():
            return derivatives(by_ring, r)

    def body(r):
        again = derivatives(lambda r, batch: checkpoint(by_ring, r, batch, use_reentrant=False), r)
        return derivatives(by_gathering, r), derivatives(by_ring, r), again, checked(r)

    for expected, *found in run(body, range(3)):
        for got in found:
            torch.testing.assert_close(got, expected)


def test_truth_gives_the_same_gradients():
    batches = [tree(r) for r in range(3)]
    torch.autograd.backward(truth(by_ring, range(3), batches))
    for r, (_, *gs) in enumerate(rules(lambda r: derivatives(by_ring, r)[:4], range(3))):
        torch.testing.assert_close([x.grad for x in inputs(batches[r])], gs)


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

    assert run(body, range(n)) == [[(r - i) % n for i in range(n)] for r in range(n)]


@runs_on("truth", "rules", "gloo")
def test_on_a_subgroup(run):
    def body(r):
        pair, x = new_group([1, 2]), torch.full((r,), r)
        return [(source, block.tolist()) for source, block in dc.ring(x, group=pair)] if r else []

    first, second = (0, [1]), (1, [2, 2])
    assert run(body, range(3)) == [[], [first, second], [second, first]]


@runs_on("rules", "gloo")
@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_joint_backward_where_ranks_ignore_blocks(run, blocks):
    """Rank 0 ignores every block, rank 1 the received ones; the loop may end after any number of blocks."""

    def by_ring(r, batch):
        blocks_left = dc.ring(batch)
        yield from (next(blocks_left) for _ in range(blocks))

    def by_gathering(r, batch):
        x, y, z = inputs(dc.all_gather(batch, sizes="auto"))
        for i in range(blocks):
            source = (r - i) % 3
            parts = zip((x, y, z), (1, 1, 2), strict=True)
            a, *more = (t.narrow(0, k * sum(SIZES[:source]), k * SIZES[source]) for t, k in parts)
            yield source, {"x": a, "more": more}

    def body(r, loop):
        batch = tree(r)
        with dc.joint_backward() as joint:
            loss = torch.zeros((), dtype=torch.float64)
            for source, block in loop(r, batch):
                if r == 2 or (r == 1 and source == 1):
                    loss = loss + weighted(block, r, source)
            joint(loss).backward()
        return [torch.zeros_like(x) if x.grad is None else x.grad for x in inputs(batch)]

    torch.testing.assert_close(run(body, range(3), [by_ring] * 3), run(body, range(3), [by_gathering] * 3))


def leaving_early(r):
    """Leave the loop by break, by an exception, and by dropping the iterator; the group works, without a warning."""
    x = torch.full((1000 * r,), float(r), requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _, block in dc.ring(x):
            loss = block.sum()
            break
        loss.backward()
        with pytest.raises(KeyError):
            for source, _ in dc.ring([x, x]):
                if source != r:
                    raise KeyError("the loop")
        iterator = dc.ring({"x": x})
        next(iterator)
        del iterator
        dc.ring(x)  # never started
        gc.collect()
    total = dc.all_reduce(torch.tensor(r)).item()
    return total, [source for source, _ in dc.ring(x)], x.grad.tolist() == [1] * len(x)


@runs_on("rules", "gloo", "mpi")
def test_a_loop_that_is_left_early(run):
    assert run(leaving_early, range(3)) == [(3, [(r - i) % 3 for i in range(3)], True) for r in range(3)]


def test_left_early_within_joint_backward():
    """The block in flight is waited for where the loop ends; one that is still in flight after the region is named."""

    def body(r, leaves):
        x = torch.tensor([1.0, 10.0])[: r + 1].clone().requires_grad_()
        with dc.joint_backward() as joint:
            blocks = dc.ring(x)
            total = sum((r + 1) * block.square().sum() for _, (_, block) in zip(range(2), blocks, strict=False))
            if leaves:
                blocks.close()
        if leaves:
            joint(total).backward()
            return x.grad.tolist()
        with pytest.raises(RuntimeError, match=r"test_ring.py:\d+: backward: got a collective in flight"):
            joint(total).backward()
        return None

    # block s is used by ranks s and s + 1, with weights s + 1 and s + 2
    xs = [torch.tensor([1.0, 10.0])[: r + 1] for r in range(3)]
    assert rules(body, range(3), [True] * 3) == [(2 * x * (r + 1 + (r + 1) % 3 + 1)).tolist() for r, x in enumerate(xs)]
    assert rules(body, range(3), [False] * 3) == [None] * 3


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


@runs_on("truth", "rules", "gloo")
def test_trees_that_differ_are_an_error_on_all_ranks(run):
    x = torch.ones(2, 2)
    odd = [{"x": torch.ones(2, 3)}, {"x": x.double()}, {"y": x}, {"x": x, "y": x[:1]}, [x, x]]

    def body(r):
        for other in odd:
            with pytest.raises(dc.CollectiveMismatchError, match=r"^ring: tree: "):
                dc.ring(other if r == 1 else {"x": torch.ones(r, 2)})
        return dc.all_reduce(torch.tensor(r)).item()  # the group works

    assert run(body, range(3)) == [3] * 3
