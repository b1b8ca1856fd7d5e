"""The list of silent bugs in notes/how-to/migrating.md follows from its tables; deprecated are torch's functions."""

import inspect
import re
import warnings
from importlib import import_module

import pytest
import torch
import torch.distributed as dist
from test_migrating import NOTE, RAISES, RELEASE, releases, table

from diffcoll.testing import simulate

#: Rows of the table of silent bugs that follow from the table of gradients: a system and its rows there.
SILENT = {
    "nn.functional.all_reduce: max, min, product": ("nn.functional", ["max", "min", "product"]),
    "_functional_collectives.all_reduce: sum, mean, if the law is meant": ("_functional_collectives", ["sum", "mean"]),
    "_functional_collectives.all_reduce: max, min": ("_functional_collectives", ["max", "min"]),
    "_functional_collectives.all_reduce: product": ("_functional_collectives", ["product"]),
    "_functional_collectives.broadcast": ("_functional_collectives", ["broadcast from rank 0"]),
    "_functional_collectives: torch.func.grad": ("_functional_collectives", ["torch.func.grad of the sum"]),
    "_functional_collectives: torch.func.jvp, forward_ad": (
        "_functional_collectives",
        ["torch.func.jvp of the sum", "forward_ad of the sum"],
    ),
}


def test_the_list_of_silent_bugs():
    """It says what the table of gradients says, where a cell is a wrong number."""
    cells = {row.pop("x = (3, 5), weights (1, 10)").replace("`", ""): {**row} for row in table("Which numbers change?")}
    rows = {row["bug"].replace("`", ""): row for row in table("Which release has which silent bug?")}
    assert SILENT.keys() <= rows.keys()
    for bug, (system, names) in SILENT.items():
        for name in names:
            columns = {h: c for h, c in cells[name].items() if h.split()[0].strip("`,") == system}
            wrong = [releases(head) for head, cell in columns.items() if cell.startswith("**")]
            first, last = releases(rows[bug]["wrong in"])
            assert (first, last) == (min(wrong)[0], max(wrong)[1]), (bug, name)
            last_cell = columns[max(columns, key=lambda head: releases(head)[1])]
            now = RAISES if last_cell == RAISES else "still wrong" if last_cell.startswith("**") else "right"
            assert rows[bug]["in 2.15"] == now, (bug, name)


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
