"""`ring`: every rank sees every block once; gradients to second order are those of gathered blocks; nothing is left."""

import gc
import warnings

import pytest
import torch
from runs import gloo, refusal, rules, runs_on
from torch.utils.checkpoint import checkpoint

import diffcoll as dc
from diffcoll.core.groups import resolve
from diffcoll.engines.c10d import C10dEngine
from diffcoll.testing import check_gradients, new_group, simulate, spawn

SIZES = [2, 0, 3]


def tree(r, sizes=SIZES):
    """Two leaves of one dtype, one of them without further dimensions, and labels; different on every rank."""
    generator = torch.Generator().manual_seed(r)

    def numbers(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    rows = sizes[r]
    return {
        "x": numbers(rows, 2),
        "more": [numbers(rows), numbers(2 * rows, 1).detach().float().requires_grad_()],
        "label": torch.full((rows,), r),
    }


def inputs(batch):
    return [batch["x"], *batch["more"]]


def weighted(block, r, source):
    """A loss of one block, which depends on the rank and on where the block is from."""
    x, y, z = inputs(block)
    return (r + 1) * (
        x.pow(3).sum() * (source + 2) + (y * torch.arange(1, 1 + len(y))).sin().sum() + z.double().exp().sum()
    )


def by_ring(r, batch):
    return sum(weighted(block, r, source) for source, block in dc.ring(batch))


def by_gathering(r, batch):
    whole = dc.all_gather(batch, sizes="auto")
    x, y, z = inputs(whole)
    total = 0
    for source, (a, b, c) in enumerate(
        zip(x.split(SIZES), y.split(SIZES), z.split([2 * s for s in SIZES]), strict=True)
    ):
        total = total + weighted({"x": a, "more": [b, c]}, r, source)
    return total


def derivatives(loss, r):
    """The loss, its gradients and second derivatives."""
    batch = tree(r)
    value = loss(r, batch)
    gs = torch.autograd.grad(value, inputs(batch), create_graph=True)
    hs = torch.autograd.grad(sum((r + 2) * g.double().square().sum() for g in gs), inputs(batch))
    return [value.detach(), *(g.detach() for g in gs), *hs]


@runs_on("rules", "gloo", "mpi")
def test_gradients_to_second_order_are_those_of_gathered_blocks(run):
    def body(r):
        return derivatives(by_ring, r), derivatives(by_gathering, r)

    for got, expected in run(body, range(3)):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_every_block_once_in_order(run, n):
    def body(r):
        batch = tree(r)
        found = []
        for source, block in dc.ring(batch):
            assert (block is batch) == (source == r)
            assert block["label"].tolist() == [source] * SIZES[source]
            assert all(torch.equal(a, b) for a, b in zip(inputs(block), inputs(tree(source)), strict=True))
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


def test_truth_gives_the_same_gradients():
    batches = [tree(r) for r in range(3)]
    torch.autograd.backward(simulate(by_ring, range(3), batches))
    for r, (_, *gs) in enumerate(rules(lambda r: derivatives(by_ring, r)[:4], range(3))):
        for x, g in zip(inputs(batches[r]), gs, strict=True):
            torch.testing.assert_close(x.grad, g)


def test_finite_differences():
    def loss(x):
        return sum((x.sum() * block.sin() * (source + 1)).sum() for source, block in dc.ring(x))

    xs = [torch.linspace(r, 1, SIZES[r], dtype=torch.double) for r in range(3)]
    check_gradients(loss, xs, order=2, on=["simulated"])


@runs_on("rules", "gloo")
def test_a_checkpoint_around_the_loop(run):
    def body(r):
        found = []
        for again in (False, True):
            batch = tree(r)
            loss = checkpoint(by_ring, r, batch, use_reentrant=False) if again else by_ring(r, batch)
            found.append(torch.autograd.grad(loss, inputs(batch)))
        return found

    for once, again in run(body, range(3)):
        torch.testing.assert_close(once, again)


@runs_on("rules", "gloo")
@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_joint_backward_where_ranks_ignore_blocks(run, blocks):
    """Rank 0 ignores every block, rank 1 the received ones; the loop may end after any number of blocks."""

    def body(r, ring):
        batch = tree(r)
        with dc.joint_backward() as joint:
            loss = torch.zeros((), dtype=torch.float64)
            whole = dc.all_gather(batch, sizes="auto") if not ring else None
            iterator = iter(dc.ring(batch)) if ring else None
            for i in range(blocks):
                if ring:
                    source, block = next(iterator)
                else:
                    source = (r - i) % 3
                    first = sum(SIZES[:source])
                    x, y, z = inputs(whole)
                    parts = [t.narrow(0, k * first, k * SIZES[source]) for t, k in ((x, 1), (y, 1), (z, 2))]
                    block = {"x": parts[0], "more": parts[1:]}
                if r == 2 or (r == 1 and source == 1):
                    loss = loss + weighted(block, r, source)
            del iterator
            joint(loss).backward()
        return [torch.zeros_like(x) if x.grad is None else x.grad for x in inputs(batch)]

    torch.testing.assert_close(run(body, range(3), [True] * 3), run(body, range(3), [False] * 3))


def leaving_early(r):
    """Leave the loop by break, by an exception, and by dropping the iterator; the group works, without a warning."""
    engine, x = resolve(None, "test"), torch.full((1000 * r,), float(r), requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _, block in dc.ring(x):
            loss = block.sum()
            break
        loss.backward()
        try:
            for source, _ in dc.ring([x, x]):
                if source != r:
                    raise KeyError("the loop")
        except KeyError:
            pass
        iterator = dc.ring({"x": x})
        next(iterator)
        del iterator
        dc.ring(x)  # never started
        gc.collect()
        total = dc.all_reduce(torch.tensor(r)).item()
        whole = [source for source, _ in dc.ring(x)]
    return total, whole, len(engine.abandoned), len(engine.unwaited), x.grad.tolist() == [1] * len(x)


@runs_on("rules", "gloo", "mpi")
def test_a_loop_that_is_left_early(run):
    assert run(leaving_early, range(3)) == [(3, [(r - i) % 3 for i in range(3)], 0, 0, True) for r in range(3)]


def test_messages(monkeypatch):
    """One for the sizes; N − 1 per dtype, none after the last block; as many back; the next is sent before a yield."""

    def body(r):
        events = []
        whole = C10dEngine.exchange

        def exchange(self, sends, recvs):
            wait = whole(self, sends, recvs)
            events.append("send")
            return lambda: (events.append("received"), wait())

        C10dEngine.exchange = exchange
        x = torch.ones(r + 1, 2, requires_grad=True)
        loss = 0
        iterator = dc.ring({"x": x, "label": torch.arange(r + 1)})
        events.append("called")
        for _, block in iterator:
            events.append("work")
            loss = loss + block["x"].sum()
        forward = [*events]
        events.clear()
        loss.backward()
        return forward, events

    two, received = ["send"] * 2, ["received"] * 2
    sizes = ["send", "received", "called"]
    for forward, backward in spawn(body, range(3)):
        assert forward == [*sizes, *two, "work", *received, *two, "work", *received, "work"]
        assert backward == ["send", "received"] * 2


def test_blocks_may_be_modified(run):
    def body(r):
        seen = []
        for source, block in dc.ring([torch.full((2,), float(r)), torch.full((1,), float(r))]):
            seen.append((source, block[0].tolist(), block[1].tolist()))
            if source != r:
                block[0].add_(100)
                block[1].mul_(7)
        x = torch.full((2,), float(r), requires_grad=True)
        for leaves in ([x], [x, 2 * x]):
            for source, block in dc.ring(leaves):
                if source != r:
                    block[0].add_(100)
        return seen

    for of_rank in run(body, range(3)):
        assert [(a, b) for _, a, b in of_rank] == [([s] * 2, [s]) for s, _, _ in of_rank]


def test_wrong_trees_are_errors_of_the_call():
    for x, error, text in [
        (3, TypeError, "ring: tree: got int, expected a tensor"),
        ({"a": [torch.ones(1), None]}, TypeError, "ring: tree['a'][1]: got NoneType, expected a tensor"),
        ([torch.ones(1), torch.tensor(1.0)], ValueError, "ring: tree[1]: got a 0-d tensor, expected at least one"),
        ({}, ValueError, "ring: tree: got a tree without tensors, expected at least one tensor"),
        ([torch.eye(2).to_sparse()], TypeError, "ring: tree[0]: got a torch.sparse_coo tensor, expected a dense"),
    ]:
        assert refusal(error, dc.ring, x).startswith(text)
    with pytest.raises(TypeError, match=r"ring: group: got str, expected None"):
        dc.ring(torch.ones(2), group="world")


@runs_on("rules", "gloo")
def test_trees_that_differ_are_an_error_on_all_ranks(run):
    def body(r):
        texts = []
        x = torch.ones(2, 2)
        for odd in ({"x": torch.ones(2, 3)}, {"x": x.double()}, {"y": x}, {"x": x, "y": x[:1]}, [x, x]):
            texts.append(refusal(dc.CollectiveMismatchError, dc.ring, odd if r == 1 else {"x": torch.ones(r, 2)}))
        return texts, dc.all_reduce(torch.tensor(r)).item()

    for r, (texts, total) in enumerate(run(body, range(3))):
        assert total == 3
        for text in texts:
            assert text.startswith("ring: tree: rank 1 differs from rank 0 in paths, dtypes or dimensions other than 0")
        assert texts[0].endswith(f"rank {r} has tree['x']: torch.float32 (*, {2 + (r == 1)})")


def test_check_mode():
    def body(r):
        with dc.check_mode():
            return derivatives(by_ring, r)[1].tolist()

    assert rules(body, range(3)) == gloo(body, range(3))


@pytest.mark.parametrize("kept", ["closed", "used up", "kept"])
def test_left_early_and_kept_within_joint_backward(kept):
    def body(r):
        x = torch.tensor([1.0, 10.0])[: r + 1].clone().requires_grad_()
        with dc.joint_backward() as joint:
            blocks = dc.ring(x)
            total = sum((r + 1) * block.square().sum() for _, (_, block) in zip(range(2), blocks, strict=False))
        if kept == "closed":
            blocks.close()
        elif kept == "used up":
            next(blocks)
        else:
            text = (
                r"shift\(async_op=True\) at .*test_ring.py:\d+: backward: got a collective in flight, .*; if it sends "
            )
            with pytest.raises(RuntimeError, match=text + "the next block of a ring that was left early, close"):
                joint(total).backward()
            return None
        joint(total).backward()
        return x.grad.tolist()

    # block s is used by ranks s and s + 1, with weights s + 1 and s + 2
    xs = [torch.tensor([1.0, 10.0])[: r + 1] for r in range(3)]
    expected = [(2 * x * (r + 1 + (r + 1) % 3 + 1)).tolist() for r, x in enumerate(xs)]
    assert rules(body, range(3)) == ([None] * 3 if kept == "kept" else expected)
