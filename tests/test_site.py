"""The site of `make docs`, without building it: CI does, and a warning is an error."""

import importlib.util
import pkgutil

import pytest
from runs import ROOT

import diffcoll

pytest.importorskip("sphinx")


@pytest.fixture(scope="module")
def conf():
    spec = importlib.util.spec_from_file_location("site_conf", ROOT / "notes" / "conf.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_public_name_has_a_page(conf, tmp_path, monkeypatch):
    monkeypatch.setattr(conf, "REFERENCE", tmp_path)
    conf.write_reference(None)
    pages = {path.stem for path in tmp_path.iterdir()}
    for name in conf.MODULES:
        module = importlib.import_module(name)
        for public in getattr(module, "__all__", diffcoll.collectives.COLLECTIVES):
            assert f"{name}.{public}" in pages, public
    folders = {f"diffcoll.{module.name}" for module in pkgutil.iter_modules(diffcoll.__path__)}
    folders -= {"diffcoll.__main__", "diffcoll.cli", "diffcoll.integrations"}
    offered = {name for name in folders if hasattr(importlib.import_module(name), "__all__")}
    assert offered <= {*conf.MODULES}
    assert "usage: diffcoll verify" in (tmp_path / "commands.rst").read_text(encoding="utf-8")


def test_every_page_is_in_the_contents(conf):
    index = ["text"]
    conf.add_contents(None, "README", index)
    notes = ROOT / "notes"
    pages = {path.relative_to(notes).with_suffix("").as_posix() for path in notes.rglob("*.md")} - {"README"}
    assert len(pages) > 40
    assert not [page for page in sorted(pages) if index[0].count(f"\n{page}\n") != 1]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("see [truth.py](../diffcoll/truth.py)", "see `diffcoll/truth.py`"),
        (
            "[their tests](../tests/nn) and [a note](losses.md#simclr)",
            "their tests (`tests/nn`) and [a note](losses.md#simclr)",
        ),
        ("[torch](https://pytorch.org/docs)", "[torch](https://pytorch.org/docs)"),
    ],
)
def test_links_to_files_of_the_repository(conf, text, shown):
    source = [text]
    conf.name_files(None, "costs", source)
    assert source == [shown]


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("`a * b`, c * d, *so*", r"`a * b`, c \* d, *so*"),
        (">>> 2 * 3\n6\n\n|x| of clip_grad_norm_", ">>> 2 * 3\n6\n\n" + r"\|x\| of clip_grad_norm\_"),
    ],
)
def test_docstrings_mean_what_they_say(conf, text, escaped):
    lines = text.split("\n")
    conf.escape(None, "function", "", None, None, lines)
    assert "\n".join(lines) == escaped
