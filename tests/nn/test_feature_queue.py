"""FeatureQueue: the features of earlier steps, on every rank as on one process with the whole batch."""

import copy
import pickle
from functools import partial

import pytest
import torch
from runs import gloo, new_group, profiled, rules, runs_on

import diffcoll as dc
from diffcoll.nn import FeatureQueue, feature_queue


def rows_of(r, step, b):
    return torch.randn(b, 3, generator=torch.Generator().manual_seed(10 * step + r))


def whole(steps, n, sizes):
    return torch.cat([rows_of(r, step, sizes[r]) for step in range(steps) for r in range(n)])


@runs_on("rules", "gloo")
@pytest.mark.parametrize(("n", "size"), [(1, 8), (2, 8), (3, 8), (3, 4), (3, 1), (3, 100)])  # 1, 4: less than a step's
def test_the_rows_of_all_ranks(run, n, size):
    """After each step, bit by bit."""
    sizes = [3, 0, 2]

    def body(r):
        queue, found = FeatureQueue(size, 3, labels=True), []
        for step in range(4):
            found.append((queue.features(), queue.labels()))
            x = rows_of(r, step, sizes[r]).requires_grad_()
            queue.enqueue(x, torch.full((sizes[r],), 10 * step + r))
        return found

    found = run(body, range(n))
    for step in range(4):
        rows, labels = zip(*(each[step] for each in found), strict=True)
        right = whole(step, n, sizes)[-size:] if step else torch.empty(0, 3)
        of_rows = [10 * s + r for s in range(step) for r in range(n) for _ in range(sizes[r])][-size:]
        assert all(x.equal(right) and not x.requires_grad for x in rows)
        assert all(x.tolist() == of_rows for x in labels)


def test_training_goes_on_with_another_number_of_ranks():
    sizes = [3, 1, 2]

    def steps(r, n, state, first, last):
        queue = FeatureQueue(10, 3)
        queue.load_state_dict(state or queue.state_dict())
        for step in range(first, last):
            queue.enqueue(torch.cat([rows_of(s, step, sizes[s]) for s in range(3) if s * n // 3 == r]))
        return queue.features(), {key: x.clone() for key, x in queue.state_dict().items()}

    state = None
    for n, first, last in ((2, 0, 2), (3, 2, 3), (1, 3, 5)):
        found = rules(steps, range(n), [n] * n, [state] * n, [first] * n, [last] * n)
        state = found[0][1]
        assert all(features.equal(whole(last, 3, sizes)[-10:]) for features, _ in found)


def test_what_it_returned_is_not_changed():
    queue = FeatureQueue(4, 3, labels=True)
    queue.enqueue(rows_of(0, 0, 3), torch.arange(3))
    found = queue.features(), queue.labels()
    before = [x.clone() for x in found]
    weight = torch.ones(3, requires_grad=True)
    loss = (found[0] * weight).sum()
    queue.enqueue(rows_of(0, 1, 3), torch.arange(3))
    queue.load_state_dict(FeatureQueue(4, 3, labels=True).state_dict())
    loss.backward()
    assert all(x.equal(y) for x, y in zip(found, before, strict=True))
    torch.testing.assert_close(weight.grad, before[0].sum(0))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, dc.joint_backward])
def test_no_gradient_flows(mode):
    """Rows that were made without gradients are appended there and later; joint_backward does not record them."""

    def body(r):
        queue = FeatureQueue(8, 3)
        with mode():
            x = rows_of(r, 0, 2).requires_grad_()
            queue.enqueue(x)
        queue.enqueue(x)
        weight = torch.ones(3, requires_grad=True)
        (queue.features() * weight).sum().backward()
        return weight.grad, x.grad

    for found, nothing in rules(body, range(2)):
        torch.testing.assert_close(found, 2 * whole(1, 2, [2, 2]).sum(0))
        assert nothing is None


def test_copies_and_groups():
    def body(r):
        pair = new_group([0, 1] if r < 2 else [2, 3])
        queue = FeatureQueue(8, 3, group=pair)
        twin = copy.deepcopy(queue)
        queue.enqueue(rows_of(r, 0, 2))
        assert twin.group is pair and len(twin.features()) == 0
        return queue.features()

    for r, found in enumerate(rules(body, range(4))):
        assert found.equal(torch.cat([rows_of(s, 0, 2) for s in ((0, 1) if r < 2 else (2, 3))]))
    queue = FeatureQueue(4, 3, labels=True)
    queue.enqueue(rows_of(0, 0, 2), torch.arange(2))
    assert pickle.loads(pickle.dumps(queue)).features().equal(rows_of(0, 0, 2))


def test_a_graph_that_is_captured(monkeypatch):
    """Its replays would write to the same rows again."""
    queue = FeatureQueue(4, 3)
    monkeypatch.setattr(feature_queue, "is_capturing", lambda: True)
    with pytest.raises(RuntimeError):
        queue.enqueue(rows_of(0, 0, 2))
    monkeypatch.undo()
    queue.enqueue(rows_of(0, 0, 2))
    assert queue.features().equal(rows_of(0, 0, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dtypes_and_messages(dtype):
    """Rows are sent as they are, after their numbers, before the labels, and kept in the dtype of the queue."""

    def body(r):
        x = rows_of(r, 0, 2)
        queue, other = FeatureQueue(8, 3, labels=True), FeatureQueue(8, 3).to(dtype)
        sent = profiled(queue.enqueue, x.to(dtype), torch.arange(2))
        known = profiled(partial(other.enqueue, sizes=None), x)
        read = []
        nothing = profiled(lambda: read.extend([queue.features(), other.features()]))
        return *read, [nbytes for _, nbytes in sent], [nbytes for _, nbytes in known], nothing

    right = whole(1, 2, [2, 2])
    for rows, of_other, *messages in gloo(body, range(2)):
        assert rows.equal(right.to(dtype).float()) and of_other.equal(right.to(dtype))
        assert messages == [[24, 2 * 3 * dtype.itemsize, 2 * 8], [2 * 3 * 4], []]
