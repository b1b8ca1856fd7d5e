"""Silent bugs in notes/how-to/migrating.md: bold in its table of gradients, or in a list; deprecated functions."""

import inspect
import re
import warnings
from importlib import import_module

import pytest
import torch
import torch.distributed as dist
from test_migrating import NOTE, RAISES, RELEASE, releases, table

from diffcoll.testing import simulate


def test_what_is_bold_is_a_silent_bug():
    """In the table of gradients: a number that is not the right one, and no error."""
    rows = table("Which numbers change?")
    for row in rows:
        for head, cell in row.items():
            if releases(head):
                assert cell.startswith("**") == (cell.strip("*") not in (row["right"], RAISES)), (head, row)
    assert sum(cell.startswith("**") for row in rows for cell in row.values()) == 22


def test_reduce_scatter():
    """The gradient of torch.distributed.nn's reduce_scatter is that of the sum, whatever its op is; the list has it."""
    (row,) = (
        row for row in table("Which release has which silent bug?") if "nn.functional.reduce_scatter" in row["bug"]
    )
    first, last = releases(row["wrong in"])
    if not first <= RELEASE <= last:
        pytest.skip("the note says nothing of this release")

    def gradients(r, op):
        nn = import_module("torch.distributed.nn.functional")
        blocks = [torch.tensor([v], requires_grad=True) for v in ((1.0, 2.0), (3.0, 1.0))[r]]
        y = nn.reduce_scatter(torch.empty(1), blocks, getattr(dist.ReduceOp, op))
        ((1.0, 10.0)[r] * y.sum()).backward()
        return [x.grad.item() for x in blocks]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        for op in ("SUM", "AVG", "MAX", "PRODUCT"):
            found = simulate(gradients, range(2), [op] * 2, torch_distributed=True)
            assert found == [[1, 10], [1, 10]], op  # that of the maximum is 0 where x is not the largest


@pytest.mark.skipif(RELEASE != (2, 13), reason="the note counts the functions of 2.13")
def test_how_many_functions_are_deprecated():
    """Five functions of torch.distributed.nn.functional warn, and five do not, as the note lists them."""
    nn = import_module("torch.distributed.nn.functional")
    functions = {name: f for name, f in vars(nn).items() if inspect.isfunction(f) and f.__module__ == nn.__name__}
    warn = {name for name, f in functions.items() if "_deprecated(" in inspect.getsource(f)} - {"_deprecated"}
    text = " ".join(NOTE.split()).partition("Five of the ten functions")[2].partition("(counted in 2.13)")[0]
    deprecated, _, silent = text.partition("The warnings name")
    known = {name for name in re.findall(r"`(\w+)`", text) if name in functions}
    assert known == {name for name, f in functions.items() if "group" in inspect.signature(f).parameters}
    assert warn == {name for name in known if f"`{name}`" in deprecated}
    assert known - warn == {name for name in known if f"`{name}`" in silent}
    assert (len(warn), len(known)) == (5, 10)
