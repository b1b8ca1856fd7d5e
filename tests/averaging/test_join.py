"""join: which ranks count after a loop that was left, between two reductions, and batches that the loop modifies."""

import collections
import contextlib
import dataclasses

import pytest
import torch
from runs import rules, runs_on
from torch import nn
from training import RUNS, attach, by_each_reduction, on_two, refused

import diffcoll as dc
from diffcoll.averaging.joined import copied_containers
from diffcoll.testing import simulate

#: Of ranks 0, 1, 2: rank 1 has no batch, rank 2 runs out after one.
NUMBERS = [3, 0, 1]


def made(reduction):
    w = nn.Parameter(torch.tensor(1.0, dtype=torch.double))
    averager, backward = attach([w], reduction)

    def step(x, reduces=True):
        """Backward of a gradient x of weight 1; returns the gradient, and drops it if it was reduced."""
        backward(lambda: w * x, reduces=reduces)
        gradient = w.grad.item()
        w.grad = None if reduces else w.grad
        return gradient

    return w, averager, step


@by_each_reduction
@pytest.mark.parametrize("left", ["break", "exception", "evaluation"])
@on_two
def test_after_a_loop_that_was_left_all_ranks_count(where, left, reduction):
    def body(r):
        w, averager, step = made(reduction)
        found = []
        try:
            for k, x in enumerate(averager.join([4.0 + r] * NUMBERS[r], spare=1.0)):
                if left == "evaluation":
                    with torch.no_grad():
                        w * x
                    continue
                if k == 1:
                    if left == "break":
                        break
                    raise KeyError
                found.append(step(x))
        except KeyError:
            pass
        found.append(step(3.0 * 2**r))
        found.append(step(3.0 * 2**r))
        return found

    divisor = {"sum": 1}.get(reduction, 3)
    loop = [] if left == "evaluation" else [(4.0 + 6.0) / {"sum": 1}.get(reduction, 2)]
    assert RUNS[where](body, range(3)) == [[*loop, 21.0 / divisor, 21.0 / divisor]] * 3


class Bar:
    """Keeps what it iterates over, as a progress bar does."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        yield from self.batches


KEEPERS = {"variable": lambda batches: batches, "bar": Bar, "iter": iter}


@pytest.mark.parametrize("left", ["break", "exception", "close"])
@pytest.mark.parametrize("keep", KEEPERS)
@on_two
def test_a_loop_that_was_left_while_its_iterator_is_kept(where, keep, left):
    """It has ended: all ranks count. Another loop over the same iterator raises instead of having no batch."""

    def body(r):
        _, averager, step = made("mean")
        joined = averager.join([4.0 + r] * NUMBERS[r], spare=1.0)
        kept = KEEPERS[keep](joined)
        found = []
        if left == "close":
            next(joined), next(joined)
            joined.close()
        try:
            for k, _ in enumerate(kept) if left != "close" else ():
                if k == 1:
                    if left == "break":
                        break
                    raise KeyError
        except KeyError:
            pass
        found.append(step(3.0 * 2**r))
        return found, "" if left == "close" and list(joined) == [] else refused(lambda: next(iter(joined)))

    text = (
        "GradientAverager.join: a second loop over an iterator whose first one was left early, by break or an error, "
        "expected one loop; call join() again, with the batches that are left"
    )
    for found, error in RUNS[where](body, range(3)):
        assert found == [7.0]
        assert error == ("" if left == "close" else text)


def test_an_iterator_around_it_that_is_kept_is_closed_by_the_user():
    def body(r, closes):
        _, averager, step = made("mean")
        joined = averager.join([4.0 + r] * NUMBERS[r], spare=1.0)
        kept = enumerate(joined)
        for k, _ in kept:
            if k == 1:
                break
        if closes:
            joined.close()
        return step(3.0 * 2**r)

    assert rules(body, range(3), [True] * 3) == [7.0] * 3
    assert rules(body, range(3), [False] * 3) == [3.0] * 3  # "Not covered" of the note


def test_micro_batches_of_a_loop_that_was_left():
    """What was accumulated in the loop is reduced as in the loop, by the plain backward or by synchronize."""

    def body(r, how):
        w, averager, step = made("mean")
        for k, x in enumerate(averager.join([4.0 + r] * NUMBERS[r], spare=1.0)):
            if k == 2:
                break
            step(x, reduces=False)
        if how == "synchronize":
            averager.synchronize()
        else:
            (w * 3.0 * 2**r).backward()
        return w.grad.item()

    assert simulate(body, range(3), ["synchronize"] * 3, rules=True) == [(4 + 4 + 6) / 2] * 3  # of ranks 0 and 2
    assert simulate(body, range(3), ["plain"] * 3, rules=True) == [(4 + 4 + 6 + 21) / 3] * 3


@pytest.mark.parametrize("reduction", ["mean", "weighted"])
@on_two
def test_two_reductions_in_one_iteration(where, reduction):
    """Across the end of a rank's data, where the first reduction has a micro-batch of its last batch."""

    def body(r):
        w, averager, step = made(reduction)
        found = []
        for k, x in enumerate(averager.join([4.0 + r] * NUMBERS[r], spare=1.0)):
            if k == 0:
                step(0.0, reduces=False)
                w.grad = None
                step(x, reduces=False)
                continue
            found += [step(x), step(x)]
        return found

    first = (4 + 6 + 4) / {"mean": 2, "weighted": 3}[reduction]
    assert RUNS[where](body, range(3)) == [[first, 4.0, 4.0, 4.0]] * 3


def test_gradients_accumulated_before_and_between_loops():
    """They count although the rank has no batch in the loop."""

    def body(r):
        w, averager, step = made("mean")
        found = []
        for numbers in (NUMBERS, [1, 1, 0]):
            step(10.0, reduces=False)
            for x in averager.join([1.0] * numbers[r], spare=1.0):
                found.append(step(x))
                step(100.0, reduces=False)
                w.grad = None if x else w.grad
        return found

    assert rules(body, range(3)) == [[32 / 3, 1.0, 1.0, 32 / 3]] * 3


class Labeled(collections.UserDict):
    """A batch as of transformers: not a dict."""


@dataclasses.dataclass
class Example:
    x: torch.Tensor
    labels: list


Pair = collections.namedtuple("Pair", ["x", "rest"])


def containers(r):
    x = torch.tensor(1.0 + r)
    return {
        "dict": {"x": x, "labels": [1, 2]},
        "nested": Pair(x, ({"labels": [3]}, "text")),
        "user's": Labeled(x=x, labels={"a": [1]}),
        "dataclass": Example(x, [1]),
        "list": [x, [5], {6}, collections.deque([7])],
    }


def take(kind, batch):
    """Return x, and remove everything from the batch; fails the second time for the same object."""
    if kind == "dict":
        batch["labels"].pop()
        batch.pop("labels")
        return batch.pop("x")
    if kind == "nested":
        batch.rest[0].pop("labels").pop()
        return batch.x
    if kind == "user's":
        batch.pop("labels").pop("a").pop()
        return batch.pop("x")
    if kind == "dataclass":
        batch.labels.pop()
        x, batch.x = batch.x, None
        return x * 1
    batch.pop().pop()
    batch.pop().pop()
    batch.pop().pop()
    return batch.pop()


@pytest.mark.parametrize("kind", containers(0))
def test_batches_that_the_loop_modifies(kind):
    def body(r, spare):
        _, averager, step = made("mean")
        found = []
        for batch in averager.join([containers(r)[kind] for _ in range(NUMBERS[r])], spare=spare):
            found.append(step(take(kind, batch)))
        return found

    assert simulate(body, range(3), [None, containers(7)[kind], None], rules=True) == [[2.0, 1.0, 1.0]] * 3


def test_a_spare_batch_that_the_loop_modifies():
    def body(r):
        _, averager, _ = made("mean")
        batches, spare = [containers(r)["dict"] for _ in range(NUMBERS[r])], containers(0)["dict"]
        found = [take("dict", batch).item() for batch in averager.join(batches, spare=spare)]
        return found, "x" in spare

    assert rules(body, range(3)) == [([1.0] * 3, True), ([1.0] * 3, True), ([3.0] * 3, True)]


def test_what_is_copied():
    x = torch.ones(2)
    for same in (x, "text", 3, None, (x, ("a", 1)), torch.Size([2]), object()):
        assert copied_containers(same) is same
    packed = nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(1)])
    assert copied_containers(packed) is packed
    batch = collections.OrderedDict(a=x, b=[(x, [x])])
    copied = copied_containers(batch)
    assert type(copied) is collections.OrderedDict
    assert copied["a"] is copied["b"][0][0] is copied["b"][0][1][0] is x
    assert copied["b"][0][1] is not batch["b"][0][1]


@runs_on("rules", "gloo")
def test_a_backward_within_the_loop_that_a_hook_of_the_user_ends(run):
    """Rank 0 has run out, and its repetition raises: the other rank raises too, and the next mean is over it alone."""

    def body(r):
        p, q = (nn.Parameter(torch.ones(())) for _ in range(2))
        averager, raises = dc.GradientAverager([p, q], bucket_mb=1e-6), False

        def hook(grad):
            if raises:
                raise ValueError("of the user")

        q.register_hook(hook)
        found = []
        for i, x in enumerate(averager.join([torch.tensor(v) for v in ([1.0], [2.0, 4.0, 8.0])[r]])):
            raises = r == 0 and i == 1
            try:
                with averager.no_sync() if i == 0 else contextlib.nullcontext():
                    (p * (q * x)).backward()
            except (ValueError, RuntimeError) as error:
                found.append(str(error))
                p.grad = q.grad = None
        return found, p.grad.item(), q.grad.item()

    (first, *grads), (second, *others) = run(body, range(2))
    assert first == ["of the user"]
    assert len(second) == 1
    assert "a rank has left this backward by an error" in second[0]
    assert grads == others == [8.0, 8.0]
