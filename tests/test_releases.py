"""Features that an older release of PyTorch lacks raise, and name the release."""

import ast
from pathlib import Path

import pytest
import torch
from releases import RELEASE

import diffcoll as dc
from diffcoll.core.torch_private import names

ROOT = Path(dc.__file__).parent


@pytest.mark.skipif(RELEASE >= (2, 12), reason="collectives are compiled here")
def test_compilers_and_tracers_before_2_12():
    words = f"torch.compile and torch.export need torch 2.12 or later, and this is torch {RELEASE[0]}"
    x = torch.ones(2, requires_grad=True)
    for backend in ("eager", "aot_eager"):
        for fullgraph in (False, True):
            torch._dynamo.reset()
            with pytest.raises(Exception, match=words):
                torch.compile(lambda x: dc.all_reduce(2 * x, "max").sum(), fullgraph=fullgraph, backend=backend)(x)


@pytest.mark.parametrize("subsystem", names.NAMES)
def test_this_release_has_the_private_names(subsystem):
    names.require(subsystem)


def test_a_private_name_that_is_gone_is_named(monkeypatch):
    for name in ("torch._C._gone", "torch.distributed.ProcessGroup._gone", "torch._gone.module"):
        monkeypatch.setitem(names.NAMES, "a subsystem", {name: "a test"})
        with pytest.raises(ImportError, match=rf"{name}.*tested on torch 2"):
            names.require("a subsystem")


#: What the library sets, or reads where an object may lack it.
OWN = {"_dynamo_marked_constant", "_inter_node_pg", "_torchdynamo_disable"}


def test_every_private_name_is_in_the_table():
    known = {part for of in names.NAMES.values() for name in of for part in name.split(".")}
    files = [
        *(ROOT / "core/torch_private").glob("*.py"),
        ROOT / "core/compiled.py",
        *(ROOT / "engines").glob("c10d*.py"),
    ]
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            used = [node.attr] if isinstance(node, ast.Attribute) else []
            used += [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else []
            owner = getattr(getattr(node, "value", None), "id", "")
            private = {name for name in used if name.startswith("_") and not name.startswith("__")}
            if owner not in ("self", "sys", "engine"):
                assert private <= known | OWN, f"{file.name}:{node.lineno}"
