"""gather_batch: all ranks' rows with their labels, and where this rank's rows are among them."""

import re
from typing import NamedTuple

import pytest
import torch
from releases import compiles, one_graph
from runs import gloo, profiled, refusal, rules, runs_on

import diffcoll as dc
from diffcoll.testing import assert_matches_single_process, new_group

SIZES = [2, 0, 3]


class Sample(NamedTuple):
    z: torch.Tensor
    label: torch.Tensor
    seen: torch.Tensor


def sample(r, sizes=SIZES):
    g = torch.Generator().manual_seed(r)
    n = sizes[r]
    z, seen = torch.randn(n, 4, generator=g).double(), torch.rand(n, 2, generator=g) < 0.5
    return Sample(z, torch.arange(n) + 10 * r, seen)


@runs_on("truth", "rules", "gloo", "mpi")
@pytest.mark.parametrize("n", [1, 2, 3])
def test_what_each_rank_receives(run, n):
    def body(r):
        return dc.gather_batch(sample(r))

    parts = [sample(r) for r in range(n)]
    for r, found in enumerate(run(body, range(n))):
        assert type(found.tree) is Sample
        for leaf, whole in zip(found.tree, map(torch.cat, zip(*parts, strict=True)), strict=True):
            assert torch.equal(leaf, whole)
        assert found[1:] == (SIZES[:n], sum(SIZES[:r]), sum(SIZES[:n]))


@runs_on("truth", "rules", "gloo")
def test_on_a_subgroup(run):
    def body(r):
        pair = new_group([1, 2])
        return dc.gather_batch(torch.full((r,), r), group=pair) if r else None

    found = run(body, range(3))[1:]
    assert [everyone.tree.tolist() for everyone in found] == [[1, 2, 2]] * 2
    assert [everyone[1:] for everyone in found] == [([1, 2], 0, 3), ([1, 2], 1, 3)]


def loss(z, label):
    """Every row against all rows of another label, from the place that offset and total name."""
    everyone = dc.gather_batch({"z": z, "norm": z.square().sum(1), "label": label})
    rows = torch.arange(len(z)) + everyone.offset
    weight = torch.arange(1.0, everyone.total + 1).double()  # of the rank that reads, and of the row that is read
    other = (label[:, None] != everyone.tree["label"]) * (1 + rows[:, None]) * weight
    return (other * (z @ everyone.tree["z"].T + everyone.tree["norm"]).tanh()).sum() / everyone.total


def test_gradients_are_those_of_one_process():
    batch = {"z": torch.randn(8, 3, generator=torch.Generator().manual_seed(0)).double(), "label": torch.arange(8) % 3}
    assert_matches_single_process(loss, loss, batch, rank_reduction="sum", order=2)


def test_one_small_message_and_one_per_dtype():
    """The digests with the numbers of rows, the features, and the labels with the mask as two more."""

    def body(r):
        return [name for name, _ in profiled(dc.gather_batch, sample(r))]

    assert gloo(body, range(3)) == [["all_gather"] * 4] * 3


def test_under_vmap():
    def body(r):
        def row_sums(z):
            everyone = dc.gather_batch(z)
            return everyone.tree.sum(0) * (everyone.offset + 1)

        return torch.func.vmap(row_sums)(torch.stack([sample(r).z, 2 * sample(r).z]))

    total = torch.cat([sample(r).z for r in range(3)]).sum(0)
    for y, first in zip(rules(body, range(3)), [1, 3, 3], strict=True):
        torch.testing.assert_close(y, torch.stack([total, 2 * total]) * first)


@compiles
def test_in_a_compiled_function():
    def body(r):
        f = one_graph(loss)
        found = []
        for run in loss, f:
            z = sample(r).z.requires_grad_()
            value = run(z, sample(r).label)
            found.append((value.item(), *torch.autograd.grad(value, z)))
        return found

    for eager, compiled in gloo(body, range(3)):
        torch.testing.assert_close(eager, compiled)


@pytest.mark.parametrize(
    ("tree", "error", "text"),
    [
        ({"z": torch.ones(2, 3), "label": torch.ones(3)}, ValueError, "tree['z']: got 2 rows, expected 3 rows"),
        ([torch.ones(2), torch.ones(3)], ValueError, "tree[1]: got 3 rows, expected 2 rows"),
        ([torch.ones(2), torch.tensor(1.0)], ValueError, "tree[1]: got a 0-d tensor, expected at least one dimension"),
        ([torch.ones(2), 5], TypeError, "tree[1]: got int, expected a tensor"),
        ({}, ValueError, "tree: got a tree without tensors"),
        (torch.ones(2).to_sparse(), TypeError, "torch.sparse_coo"),
        ({object(): torch.ones(2), 1: torch.ones(2)}, TypeError, "gather_batch: tree"),
    ],
)
def test_bad_input(tree, error, text):
    with pytest.raises(error, match=re.escape(text)):
        dc.gather_batch(tree)


@runs_on("rules", "gloo")
def test_trees_that_differ_are_an_error_on_all_ranks(run):
    """Without check mode; float16 and bfloat16 have the same number of bytes."""
    z = torch.ones(2, 3, dtype=torch.float16)
    odd = [z.bfloat16(), {"z": z}, torch.ones(3, 2, dtype=torch.float16), {"z": z, "label": z[:, 0]}]

    def body(r):
        texts = []
        for other in odd:
            texts.append(refusal(dc.CollectiveMismatchError, dc.gather_batch, other if r == 1 else z))
        return texts

    for r, texts in enumerate(run(body, range(2))):
        for text in texts:
            assert text.startswith("gather_batch: tree: rank 1 differs from rank 0 in paths, dtypes or dimensions")
        assert texts[0].endswith(f"rank {r} has tree: torch.{('float16', 'bfloat16')[r]} (*, 3)")
