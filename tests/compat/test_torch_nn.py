"""The functions of torch.distributed.nn.functional: same signatures and values, gradients of the sum of all losses."""

import inspect
import warnings
from importlib import import_module

import pytest
import torch
import torch.distributed as dist
from runs import gloo, rules

import diffcoll as dc
import diffcoll.compat.torch_nn as ours
from diffcoll.testing import simulate

SUM, MAX, PRODUCT = dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT


def theirs():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return import_module("torch.distributed.nn.functional")


def functions(module):
    found = vars(module).items()
    return {name: f for name, f in found if inspect.isfunction(f) and f.__module__ == module.__name__}


def test_the_signatures_are_theirs():
    mine = functions(ours)
    expected = {
        name: f for name, f in functions(theirs()).items() if name not in ("_deprecated",) and "_not_" not in name
    }
    assert set(expected) == {name for name in mine if name not in ("_row", "_check", "_filled")}
    for name, f in expected.items():
        got = inspect.signature(mine[name]).parameters
        assert {k: p.default for k, p in got.items()} == {
            k: p.default for k, p in inspect.signature(f).parameters.items()
        }


def calls(nn, x, n, rank, group=None, root=0):
    """Call every function on data made from x; return results to compare, and output arguments."""
    more = {} if group is None else {"group": group}
    outputs = [torch.full_like(x, -1), torch.full_like(x.repeat(n, 1), -1), [torch.full_like(x, -1) for _ in range(n)]]
    blocks = [x * (s + 1) + rank for s in range(n)]
    uneven = [x[: (rank + s) % 3] for s in range(n)]  # block r → s and block s → r have equal size
    parts = [torch.zeros_like(block) for block in uneven]
    sizes = [len(block) for block in uneven]
    single = x.new_zeros(sum(sizes), x.shape[1])
    gathered = nn.gather(x, root, **more)
    reduced = nn.reduce(x, root, **more)
    here = dist.get_rank() == root
    found = {
        "broadcast": nn.broadcast(x, root, **more),
        "gather": gathered if here else [g * 0 for g in gathered],
        "scatter": nn.scatter(blocks, root, **more),
        "reduce": reduced if here else reduced * 0,
        "reduce_scatter": nn.reduce_scatter(outputs[0], blocks, **more),
        "all_gather": nn.all_gather(x, **more),
        "_all_gather_base": nn._all_gather_base(outputs[1], x, **more) if nn is ours else outputs[1].clone(),
        "all_to_all": nn.all_to_all(outputs[2], blocks, **more),
        "all_to_all uneven": nn.all_to_all(parts, uneven, **more) if nn is ours else None,
        "all_to_all_single": nn.all_to_all_single(single, torch.cat(uneven), sizes, sizes, **more),
        "all_to_all_single even": nn.all_to_all_single(torch.zeros_like(outputs[1]), torch.cat(blocks), **more),
        "all_reduce": nn.all_reduce(x, **more),
    }
    given = {"reduce_scatter": outputs[0], "all_to_all": outputs[2], "all_to_all_single": single}
    return found, given


def flat(y):
    return y if isinstance(y, torch.Tensor) else torch.cat([t.reshape(-1) for t in y])


def numbers(r):
    return torch.randn(3, 2, generator=torch.Generator().manual_seed(r), dtype=torch.float64)


THEIRS = [[0, 1], [0, 1, 2]]


@pytest.mark.parametrize("ranks", [*THEIRS, [1, 2]], ids=str)
def test_values_are_theirs(ranks):
    def body(r):
        warnings.simplefilter("ignore")
        group = dist.new_group(ranks) if ranks[0] else None
        if r not in ranks:
            return None
        rank = ranks.index(r)
        mine, given = calls(ours, numbers(r), len(ranks), rank, group, ranks[-1])
        # theirs uses ranks within the sub-group as global ranks in gloo's all_to_all
        other, filled = ({}, {}) if group else calls(theirs(), numbers(r), len(ranks), rank, group, ranks[-1])
        kinds = {name: type(mine[name]) is type(other[name]) for name in other if other[name] is not None}
        flats = ({k: flat(y) for k, y in d.items() if y is not None} for d in (mine, given, other, filled))
        return *flats, kinds

    found = [of_rank for of_rank in gloo(body, range(max(ranks) + 1)) if of_rank is not None]
    xs = [numbers(r) for r in ranks]
    for rank, (mine, given, other, filled, kinds) in enumerate(found):
        for name, y in other.items():
            if name != "_all_gather_base":
                torch.testing.assert_close(mine[name], y, msg=name)
        assert all(kinds[name] for name in kinds if name not in ("gather",)), kinds
        for name, y in given.items():
            torch.testing.assert_close(y, mine[name])
            torch.testing.assert_close(y, filled.get(name, y))
        torch.testing.assert_close(mine["all_gather"], torch.cat(xs).flatten())
        torch.testing.assert_close(mine["_all_gather_base"], torch.cat(xs))
        torch.testing.assert_close(mine["all_reduce"], torch.stack(xs).sum(0))
        torch.testing.assert_close(mine["broadcast"], xs[-1])
        torch.testing.assert_close(mine["scatter"], xs[-1] * (rank + 1) + len(ranks) - 1)
        pieces = [x[: (rank + s) % 3].flatten() for s, x in enumerate(xs)]
        torch.testing.assert_close(mine["all_to_all uneven"], torch.cat(pieces))


@pytest.mark.parametrize("ranks", [[0, 1, 2], [1, 2]], ids=str)
def test_gradients_are_the_laws(ranks):
    n = len(ranks)

    def losses(x, rank, group=None, root=n - 1):
        """A loss of the result of each function; `everything` makes all ranks take part in all of them."""
        ys = {name: flat(y).reshape(-1) for name, y in calls(ours, x, n, rank, group, root)[0].items()}
        weights = {name: (rank + 1) * torch.arange(1.0, y.numel() + 1, dtype=y.dtype) for name, y in ys.items()}
        everything = 0 * sum(y.sum() for y in ys.values())
        return {name: (weights[name] * y.sin()).sum() + everything for name, y in ys.items()}

    def body(r):
        group = dist.new_group(ranks) if ranks[0] else None
        if r not in ranks:
            return None
        x = numbers(r).requires_grad_()
        found = losses(x, ranks.index(r), group, ranks[-1])
        return {name: torch.autograd.grad(loss, x, retain_graph=True)[0] for name, loss in found.items()}

    got = [g for g in gloo(body, range(max(ranks) + 1)) if g is not None]
    assert len(got[0]) == 12
    for name in got[0]:

        def of_rank(name=name):  # rank of the process, as calls ask for it
            return n - 1 if name not in ("gather", "reduce") or dc.get_rank() == n - 1 else -1

        xs = [numbers(r).requires_grad_() for r in ranks]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "get_rank", of_rank)
            total = sum(of_one[name] for of_one in simulate(losses, xs, range(n)))
        torch.testing.assert_close([g[name] for g in got], list(torch.autograd.grad(total, xs)), msg=name)


def test_right_beside_wrong():
    def body(r):
        warnings.simplefilter("ignore")
        found = {}
        for name, nn in (("theirs", theirs()), ("ours", ours)):
            for op in (SUM, MAX, PRODUCT):
                x = torch.tensor([3.0, 5.0][r], requires_grad=True)
                ((1.0, 10.0)[r] * nn.all_reduce(x, op)).backward()
                found[name, str(op)] = x.grad.item()
        return found

    zero, one = gloo(body, range(2))
    pairs = {key: (zero[key], one[key]) for key in zero}
    assert pairs["theirs", str(SUM)] == pairs["ours", str(SUM)] == (11, 11)
    assert pairs["theirs", str(MAX)] == pairs["theirs", str(PRODUCT)] == (10, 10)
    assert pairs["ours", str(MAX)] == (0, 11)
    assert pairs["ours", str(PRODUCT)] == (55, 33)


def test_ops_and_bad_input():
    with pytest.raises(TypeError, match="all_reduce: op: got the bitwise BAND"):
        ours.all_reduce(torch.ones(1), dist.ReduceOp.BAND)
    assert ours.all_reduce(torch.tensor([3.0]), dist.ReduceOp.AVG).tolist() == [3]
    with pytest.raises(ValueError, match="reduce: dst: got 3"):
        ours.reduce(torch.ones(1), 3)


@pytest.mark.parametrize("which", ["mesh", "default group", "world"])
def test_roots_are_global_ranks(which):
    """Groups (0, 2) and (1, 3), whose last rank is the root."""

    def body(r):
        mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))["rows"]
        assert dist.get_process_group_ranks(mesh.get_group()) == [r % 2, r % 2 + 2]
        x = torch.tensor([1.0 + 10 * r, -2.0], requires_grad=True)
        group = mesh if which == "mesh" else None
        with dc.set_default_group(mesh if which == "default group" else None):
            root = 3 if which == "world" else r % 2 + 2
            found = {
                "broadcast": ours.broadcast(x, root, group),
                "scatter": ours.scatter([x + s for s in range(4 if which == "world" else 2)], root, group),
                "reduce": ours.reduce(x, root, group=group),
                "gather": torch.stack(ours.gather(x, root, group)),
            }
            weights = torch.tensor([1.0 + r, 100.0])
            sum((weights * y).sum() for y in found.values()).backward()
            if which != "world":
                with pytest.raises(ValueError, match=rf"got {1 - r % 2}, expected a global rank of the group, one of"):
                    ours.broadcast(x, 1 - r % 2, group)
        return {name: y[..., 0].tolist() for name, y in found.items()}, x.grad[0].item()

    found = gloo(body, range(4), timeout=100)
    for r, (values, gradient) in enumerate(found):
        ranks = range(4) if which == "world" else [r % 2, r % 2 + 2]
        first, root = [1 + 10 * s for s in ranks], ranks[-1]
        assert values == {
            "broadcast": first[-1],
            "scatter": first[-1] + list(ranks).index(r),
            "reduce": sum(first) if r == root else 0,
            "gather": first if r == root else [0] * len(first),
        }
        # broadcast and scatter: the weights of all ranks, at the root; reduce and gather: the root's
        everyone = sum(1 + s for s in ranks)
        assert gradient == (2 * everyone if r == root else 0) + 2 * (1 + root)


def test_outputs_and_lists_of_another_dtype_or_size_raise_before_communication():
    x, wrong = torch.arange(6.0).view(3, 2), torch.zeros(3, 2, dtype=torch.int32)
    expected = r"got a torch.int32 tensor on cpu, expected torch.float32 on cpu, as"
    calls = {
        f"reduce_scatter: output: {expected} input_list is": lambda: ours.reduce_scatter(wrong, [x, x]),
        f"all_to_all: output_tensor_list\\[1\\]: {expected} input": lambda: ours.all_to_all([x, wrong], [x, x]),
        f"_all_gather_base: output_tensor: {expected} input": lambda: ours._all_gather_base(wrong.repeat(2, 1), x),
        f"all_to_all_single: output: {expected} input is": lambda: ours.all_to_all_single(wrong[:2], x[:2]),
        f"reduce_scatter: input_list\\[1\\]: {expected} input_list": lambda: ours.reduce_scatter(x, [x, wrong]),
        f"all_to_all: input_tensor_list\\[1\\]: {expected}": lambda: ours.all_to_all([x, x], [x, wrong]),
        f"scatter: tensors\\[1\\]: {expected} tensors": lambda: ours.scatter([x, wrong]),
        "reduce_scatter: output: got shape \\(2, 2\\), expected 6": lambda: ours.reduce_scatter(x[:2], [x, x]),
        "_all_gather_base: output_tensor: got shape \\(3, 2\\), expected 12": lambda: ours._all_gather_base(x, x),
        "all_to_all_single: output: got shape \\(3, 2\\), expected 4 n": lambda: ours.all_to_all_single(x, x[:2]),
        "output: got shape \\(3, 2\\), expected 8 n": lambda: ours.all_to_all_single(x, x[:2], [2, 2], [1, 1]),
    }

    def body(r):
        for text, call in calls.items():
            with pytest.raises((TypeError, ValueError), match=text):
                call()
            assert dc.all_reduce(torch.tensor(r + 1)) == 3  # nothing was sent

    rules(body, range(2))
    assert not wrong.any()


def test_second_order_through_empty_blocks():
    """Rank 2 keeps its block, the others send and receive empty ones; then each rank sends to rank 0 only."""

    def loss(x, r, only_to_0):
        keeps = x if r == 2 else x[:0]
        sent = [x * x, x[:0], x[:0]] if only_to_0 else [x[:0], x[:0], keeps.exp()]
        received = [x if r == 0 else x[:0]] * 3 if only_to_0 else [x[:0], x[:0], keeps]
        ys = ours.all_to_all([torch.empty_like(y) for y in received], sent)
        return sum((y.sin() * (s + 1 + r)).sum() for s, y in enumerate(ys))

    def body(x, r, only_to_0):
        (g,) = torch.autograd.grad(loss(x, r, only_to_0), x, create_graph=True)
        return torch.autograd.grad((g * g * (r + 1)).sum(), x)[0]

    for only_to_0 in (False, True):
        xs = [torch.tensor([0.3 + r, -1.1], dtype=torch.float64, requires_grad=True) for r in range(3)]
        found = rules(body, xs, range(3), [only_to_0] * 3)
        losses = simulate(loss, xs, range(3), [only_to_0] * 3)
        gs = torch.autograd.grad(sum(losses), xs, create_graph=True)
        expected = torch.autograd.grad(sum((g * g * (r + 1)).sum() for r, g in enumerate(gs)), xs)
        torch.testing.assert_close(found, list(expected))
