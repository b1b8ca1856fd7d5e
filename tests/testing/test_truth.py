"""`true_gradients`: what PyTorch derives of N ranks in one graph equals what the rules give on each rank."""

import pytest
import torch
import torch.distributed as dist
from runs import truth
from torch.utils.checkpoint import checkpoint
from verdicts import ruled

import diffcoll as dc
from diffcoll.testing import simulate, true_gradients


def leaves(n=3):
    """Different on every rank."""
    xs = torch.randn(n, n, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return [x.clone().requires_grad_() for x in xs]


def loss(y):
    """Different on every rank, and not linear in y."""
    weights = torch.arange(1.0, y.numel() + 1).view(y.shape) * (1 + dc.get_rank())
    return (weights * (y**3 + y)).sum()


def rules(fn, *per_rank):
    """The gradients of the rules, in the form of `true_gradients`."""

    def body(*row):
        fn(*row).backward()
        return [x.grad for x in row if isinstance(x, torch.Tensor) and x.requires_grad]

    copies = [[x.detach().requires_grad_(x.requires_grad) for x in xs] for xs in per_rank]
    return [tuple(gs) for gs in simulate(body, *copies)]


def to_the_next(x):
    """All rows go to the next rank, so that sizes differ between ranks."""
    r, n = dc.get_rank(), dc.get_world_size()
    sizes = [len(x) if s == (r + 1) % n else 0 for s in range(n)]
    return dc.all_to_all(x, split_sizes=sizes, concat_sizes="auto")


@pytest.mark.parametrize("n", [1, 2, 3])
def test_gradients_are_those_of_the_rules(n):
    """The table of rules has every collective: tests/test_rules.py."""

    def program(x):
        return loss(dc.all_gather(to_the_next(dc.all_reduce(x.sin()) * x), sizes="auto"))

    xs = leaves(n)
    torch.testing.assert_close(true_gradients(program, xs), rules(program, xs))
    assert all(x.grad is None for x in xs)


def test_arguments_that_are_trees():
    """The gradients are those of the tensors that require one, in their order; a tensor that occurs twice has one."""
    a, b, c = leaves()

    def program(tree, factor):
        first, rest = tree["first"], tree["rest"]
        return loss(dc.all_reduce(first * rest[0] + rest[1].detach() + rest[2][0])) * factor

    trees = [{"first": x, "rest": [y, torch.ones(3, 2), (x,)]} for x, y in ((a, b), (b, c))]
    found = true_gradients(program, trees, [1.0, 10.0])
    expected = rules(
        lambda x, y, f: loss(dc.all_reduce(x * y + 1 + x)) * f, [a, b], [b, c], [torch.tensor(1.0), torch.tensor(10.0)]
    )
    torch.testing.assert_close(found, expected)
    assert [len(of_rank) for of_rank in found] == [2, 2]


def test_one_tensor_given_to_all_ranks():
    """Each rank differentiates by its own, also in one call; the caller's tensor and its `.grad` are untouched."""
    x = torch.tensor(2.0, requires_grad=True)
    x.grad = torch.tensor(7.0)
    assert true_gradients(lambda r, x: (r + 1) * x**2, range(3), [x] * 3) == [(4.0,), (8.0,), (12.0,)]
    assert x.grad == 7


def test_what_no_loss_depends_on_has_zeros():
    xs, ys = leaves(2), leaves(2)
    for g, unused in true_gradients(lambda x, y: loss(x), xs, ys):
        assert g.count_nonzero() and torch.equal(unused, torch.zeros(2, 2, dtype=torch.float64))
    for program in (lambda x: torch.tensor(1.0), lambda x: loss(x.detach())):
        torch.testing.assert_close(true_gradients(program, xs), [(torch.zeros_like(x),) for x in xs])
    assert true_gradients(lambda r: torch.tensor(1.0), range(2)) == [(), ()]
    # only the other rank's loss depends on it
    (g0,), (g1,) = true_gradients(lambda x: loss(dc.shift(x)) if dc.get_rank() else dc.shift(x).sum() * 0, xs)
    assert g0.count_nonzero() and not g1.count_nonzero()


def test_seed_is_that_of_simulate():
    noise = simulate(lambda r: torch.rand(2), range(2), seed=3)
    found = true_gradients(lambda x: (torch.rand(2) * x).sum(), [torch.ones(2, requires_grad=True)] * 2, seed=3)
    torch.testing.assert_close(found, [(x,) for x in noise])


@pytest.mark.parametrize("result", [None, 1.0, torch.ones(2), [torch.tensor(1.0)]], ids=str)
def test_what_is_no_loss(result):
    def program(x):
        y = dc.all_reduce(x)
        return loss(y) if dc.get_rank() else result

    with pytest.raises(TypeError):
        true_gradients(program, leaves(2))


def test_collectives_that_do_not_match():
    for program in (
        lambda x: loss(dc.all_reduce(x) if dc.get_rank() else dc.scan(x)),
        lambda x: loss(dc.all_reduce(x[: 1 + dc.get_rank()])),
        lambda x: loss(dc.all_reduce(x.float() if dc.get_rank() else x)),
        lambda x: loss(dc.broadcast(x, src=dc.get_rank())),
        lambda x: loss(dc.all_to_all(torch.cat([x, x][dc.get_rank() :]))),
        lambda x: torch.func.grad(lambda y: dc.all_reduce(y).sum())(x.detach()).sum(),
    ):
        with pytest.raises(dc.CollectiveMismatchError):
            true_gradients(program, leaves(2))


def hooked(x):
    y = x * 2
    y.register_hook(lambda g: dc.all_reduce(g))
    return y.sum()


def of_torch(x):
    y = x * 2
    dist.all_reduce(y)
    return y.sum()


REFUSED = {
    "backward": lambda x: loss(dc.all_reduce(x)).backward() or x.sum(),
    "grad": lambda x: torch.autograd.grad(loss(dc.all_reduce(x)), x)[0].sum(),
    "recorded": lambda x: checkpoint(lambda x: loss(dc.all_reduce(x)), x, use_reentrant=False),
    "reentrant": lambda x: checkpoint(lambda x: loss(dc.all_reduce(x)), x, use_reentrant=True),
    "Function": lambda x: ruled(torch.clone, dc.all_reduce)(x).sum(),
    "hook": hooked,
    "torch.distributed": of_torch,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_joint_graph_cannot_differentiate_raises(name):
    """Instead of gradients that are wrong. Later calls are not affected, and nothing is added to `.grad`."""
    xs = leaves(2)
    with pytest.raises(RuntimeError):
        true_gradients(REFUSED[name], xs)
    assert all(x.grad is None for x in xs)
    assert dc.all_reduce(torch.tensor(3.0)) == 3
    assert true_gradients(lambda r: torch.tensor(1.0), range(2)) == [(), ()]


def test_torch_distributed_on_what_needs_no_gradient():
    def program(x):
        dist.all_reduce(scale := torch.tensor(1.0 + dc.get_rank()))
        return scale * x.sum()

    torch.testing.assert_close(true_gradients(program, leaves(2)), [(torch.full_like(x, 3.0),) for x in leaves(2)])


@pytest.mark.parametrize("collective", [dc.all_reduce, dc.all_gather, dc.broadcast])
def test_results_of_a_joint_graph_share_no_memory(collective):
    ys = truth(collective, [torch.ones(2) * r for r in range(3)])
    assert len({y.data_ptr() for y in ys}) == 3
