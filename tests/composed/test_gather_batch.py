"""gather_batch: all ranks' rows with their labels, and where this rank's rows are among them."""

from typing import NamedTuple

import pytest
import torch
from releases import compiles, one_graph
from runs import gloo, new_group, profiled, rules, runs_on
from torch.nn.functional import pad as padded

import diffcoll as dc
from diffcoll.testing import assert_matches_single_process

SIZES = [2, 0, 3]


class Sample(NamedTuple):
    z: torch.Tensor
    label: torch.Tensor
    seen: torch.Tensor


def numbers(seed, *shape):
    return torch.randn(*shape, dtype=torch.double, generator=torch.Generator().manual_seed(seed))


def sample(r, rows):
    return Sample(numbers(r, 4, rows).T, torch.arange(rows) + 10 * r, numbers(r + 9, rows, 2) < 0.5)


@runs_on("truth", "rules", "gloo", "mpi")
@pytest.mark.parametrize("n", [1, 2, 3])
def test_what_each_rank_receives(run, n):
    """Unequal numbers of rows, exchanged or listed, and equal ones."""
    ways = [("auto", SIZES[:n]), (SIZES[:n], SIZES[:n]), (None, [2] * n), ("auto", [2] * n), ("auto", [0] * n)]

    def body(r):
        return [dc.gather_batch(sample(r, sizes[r]), sizes=given) for given, sizes in ways]

    for r, of_rank in enumerate(run(body, range(n))):
        for found, (_, sizes) in zip(of_rank, ways, strict=True):
            parts = [sample(s, rows) for s, rows in enumerate(sizes)]
            assert type(found.tree) is Sample
            for leaf, whole in zip(found.tree, map(torch.cat, zip(*parts, strict=True)), strict=True):
                assert torch.equal(leaf, whole)
            assert found[1:] == (sizes, sum(sizes[:r]), sum(sizes), None)


@runs_on("truth", "rules", "gloo")
def test_on_a_subgroup(run):
    def body(r):
        pair = new_group([1, 2])
        return dc.gather_batch(torch.full((r,), r), group=pair) if r else None

    found = run(body, range(3))[1:]
    assert [everyone.tree.tolist() for everyone in found] == [[1, 2, 2]] * 2
    assert [everyone[1:3] for everyone in found] == [([1, 2], 0), ([1, 2], 1)]


def loss(z, label, sizes="auto"):
    """Every row against all rows of another label, from the place that offset and total name."""
    everyone = dc.gather_batch({"z": z, "norm": z.square().sum(1), "label": label}, sizes=sizes)
    rows = torch.arange(len(z)) + everyone.offset
    weight = torch.arange(1.0, everyone.total + 1).double()  # of the rank that reads, and of the row that is read
    other = (label[:, None] != everyone.tree["label"]) * (1 + rows[:, None]) * weight
    return (other * (z @ everyone.tree["z"].T + everyone.tree["norm"]).tanh()).sum() / everyone.total


def test_gradients_are_those_of_one_process():
    batch = {"z": numbers(0, 8, 3), "label": torch.arange(8) % 3}
    assert_matches_single_process(loss, loss, batch, rank_reduction="sum", order=2)


def derivatives(program, leaves):
    """The value, and the gradients of first and second order."""
    value = program(*leaves)
    gs = torch.autograd.grad(value, leaves, create_graph=True)
    hs = torch.autograd.grad(sum((g * g.sin()).sum() for g in gs), leaves)
    return [value.detach(), *(g.detach() for g in gs), *hs]


@runs_on("rules", "gloo")
def test_gradients_do_not_depend_on_how_the_sizes_are_known(run):
    def body(r):
        z, label, _ = sample(r, SIZES[r])
        return [derivatives(lambda z: loss(z, label, sizes), [z.clone().requires_grad_()]) for sizes in ("auto", SIZES)]  # noqa: B023

    for auto, listed in run(body, range(3)):
        torch.testing.assert_close(auto, listed, rtol=0, atol=0)


# ── documents of other lengths ───────────────────────────────────────────────────────────────────────────

DOCUMENTS = [(2, 4, 1), (0, 2, 7), (3, 1, 2)]  # of each rank: documents, tokens, and another dimension that differs


def documents(r):
    rows, tokens, other = DOCUMENTS[r]
    return {
        "x": numbers(r, rows, tokens, 3),
        "more": (numbers(r + 5, other, rows, 2).transpose(0, 1), numbers(r, rows)),
    }


def whole_of(trees, leaf_of, value):
    """What every rank receives of one leaf, and its mask, by torch.nn.functional.pad."""
    leaves = [leaf_of(tree) for tree in trees]
    most = [max(sizes) for sizes in zip(*(leaf.shape[1:] for leaf in leaves), strict=True)]

    def fill(leaf, value):
        ends = [(0, m - n) for m, n in zip(most, leaf.shape[1:], strict=True)]
        return padded(leaf, [n for pair in reversed(ends) for n in pair], value=value) if ends else leaf

    return torch.cat([fill(leaf, value) for leaf in leaves]), torch.cat([fill(leaf == leaf, False) for leaf in leaves])


PLACES = [lambda tree: tree["x"], lambda tree: tree["more"][0], lambda tree: tree["more"][1]]


@runs_on("truth", "rules", "gloo", "mpi")
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.double, torch.long])
def test_padded_documents_and_their_mask(run, n, dtype):
    """Ranks with other lengths, one of them without documents; an integer pads integers too."""

    def tree(r):
        double = documents(r)
        return {"x": (9 * double["x"]).to(dtype), "more": [(9 * leaf).to(dtype) for leaf in double["more"]]}

    for found in run(lambda r: dc.gather_batch(tree(r), pad=-1), range(n)):
        assert found.sizes == [rows for rows, *_ in DOCUMENTS[:n]]
        for leaf_of in PLACES:
            values, mask = whole_of([tree(r) for r in range(n)], leaf_of, -1)
            torch.testing.assert_close((leaf_of(found.tree), leaf_of(found.mask)), (values, mask), rtol=0, atol=0)


def of_documents(everyone, values):
    """A loss that reads the padding too, whose gradient nobody gets."""
    return sum((everyone * (k + 1) * y).sin().square().sum() for k, y in enumerate(values))


@runs_on("rules", "gloo", "mpi")
def test_gradients_of_padded_documents_to_second_order(run):
    def body(r):
        tree = documents(r)
        leaves = [leaf_of(tree).detach().requires_grad_() for leaf_of in PLACES]

        def program(*leaves):
            found = dc.gather_batch(list(leaves), pad=0.5)
            return of_documents(r + 1.0, [y.where(mask, 2 * y) for y, mask in zip(found.tree, found.mask, strict=True)])

        return derivatives(program, leaves)

    trees = [documents(r) for r in range(3)]
    leaves = [leaf_of(tree).detach().requires_grad_() for tree in trees for leaf_of in PLACES]

    def value(*leaves):
        ys = []
        for k in range(3):
            y, mask = whole_of(leaves[k::3], lambda leaf: leaf, 0.5)
            ys.append(y.where(mask, 2 * y))
        return sum(of_documents(r + 1.0, ys) for r in range(3))

    _, *right = derivatives(value, leaves)
    for r, (_, *found) in enumerate(run(body, range(3))):
        torch.testing.assert_close(found, right[3 * r : 3 * r + 3] + right[9 + 3 * r : 12 + 3 * r])


def test_in_transforms():
    """vmap and forward mode, with and without padding."""

    def body(r, pad):
        z = numbers(r, SIZES[r], 1 + (r if pad else 1))

        def sums(z):
            everyone = dc.gather_batch(z, pad=0.0 if pad else None)
            return everyone.tree.sin().sum(1) * (everyone.offset + 1)

        mapped = torch.func.vmap(sums)(torch.stack([z, 2 * z]))
        tangent = torch.func.jvp(sums, (z,), (torch.ones_like(z),))[1]
        return mapped, torch.stack([sums(z), sums(2 * z)]), tangent, z

    for pad in (False, True):
        of_ranks = rules(body, range(3), [pad] * 3)
        along = torch.cat([z.cos().sum(1) for *_, z in of_ranks])
        for (mapped, one_by_one, tangent, _), first in zip(of_ranks, [1, 3, 3], strict=True):
            torch.testing.assert_close(mapped, one_by_one)
            torch.testing.assert_close(tangent, along * first)


def test_messages():
    """One for each dtype of the leaves; before them one for the sizes if they are not known."""

    def body(r):
        ways = {"sizes": "auto"}, {"sizes": SIZES}, {"pad": 0}
        return [len(profiled(lambda: dc.gather_batch(sample(r, SIZES[r]), **way))) for way in ways]  # noqa: B023

    assert gloo(body, range(3)) == [[3 + 1, 3, 3 + 2]] * 3


@compiles
@pytest.mark.parametrize("sizes", ["auto", SIZES], ids=str)
def test_in_a_compiled_function(sizes):
    def body(r):
        z, label, _ = sample(r, SIZES[r])
        found = []
        for run in loss, one_graph(loss):
            leaf = z.clone().requires_grad_()
            value = run(leaf, label, sizes)
            found.append((value.item(), *torch.autograd.grad(value, leaf)))
        return found

    for eager, compiled in gloo(body, range(3)):
        torch.testing.assert_close(eager, compiled)


@runs_on("truth", "rules", "gloo")
@pytest.mark.parametrize("pad", [None, 0.0])
def test_trees_that_differ_are_an_error_on_all_ranks(run, pad):
    """Without check mode; float16 and bfloat16 have the same number of bytes."""
    z = torch.ones(2, 3, dtype=torch.float16)
    odd = [z.bfloat16(), {"z": z}, {"z": z, "label": z[:, 0]}, z[None], z[:, :2]]
    odd = odd if pad is None else odd[:-1]  # padding is for other lengths

    def body(r):
        for other in odd:
            with pytest.raises(dc.CollectiveMismatchError, match=r"^gather_batch: tree: "):
                dc.gather_batch(other if r == 1 else z, pad=pad)
        return dc.all_reduce(torch.tensor(r)).item()  # the group works

    assert run(body, range(2)) == [1, 1]
