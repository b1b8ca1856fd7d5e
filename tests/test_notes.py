"""Notes: their examples run, links lead somewhere, and what they say of the collectives is what the rules say."""

import inspect
import re
import traceback

import pytest
from releases import compiles
from runs import ROOT

import diffcoll
from diffcoll.collectives import COLLECTIVES

pytest_plugins = ["pytester"]

NOTES = ROOT / "notes"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]*)#?([^)\s]*)\)")


def blocks(text):
    """Yield the line number and the code of every python block."""
    for match in FENCE.finditer(text):
        if match[1] == "python":
            yield text.count("\n", 0, match.start(2)) + 1, match[2]


#: Pages whose programs are pasted one after the other, and pages whose first block has helpers for each of the others.
STEPS = {"start/first-gradient.md", "start/whole-batch-loss.md", "start/test-your-loss.md"}
AFTER_THE_FIRST = {"how-to/recipes.md"}


def run_blocks(path):
    """Run a note's python blocks, each in a namespace of its own; an error names the file and the lines."""
    page = path.relative_to(NOTES).as_posix() if path.is_relative_to(NOTES) else path.name
    kept = {"__name__": path.stem}
    for number, (line, code) in enumerate(blocks(path.read_text(encoding="utf-8"))):
        namespace = kept if page in STEPS else {**kept}
        try:
            # empty lines give the code the line numbers of the file
            exec(compile("\n" * (line - 1) + code, str(path), "exec"), namespace)
        except Exception as error:
            lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
            at = f"{path.name}:{lines[-1] if lines else getattr(error, 'lineno', line)}"
            raise AssertionError(f"{at}, in the block at line {line}: {type(error).__name__}: {error}") from error
        if page in AFTER_THE_FIRST and number == 0:
            kept = namespace


def prose(text):
    """Return the note without its code."""
    return FENCE.sub("", text)


def is_ours(path):
    """Whether the page's programs need PyTorch alone; `make test-frameworks` runs the others."""
    return path.relative_to(NOTES).parts[0] not in ("with", "reference")


PAGES = sorted(path.relative_to(NOTES).as_posix() for path in NOTES.rglob("*.md") if is_ours(path))


@pytest.mark.parametrize("page", [pytest.param(page, marks=compiles if "compile" in page else ()) for page in PAGES])
def test_examples_run(page):
    run_blocks(NOTES / page)


def test_their_tests_pass(pytester):
    """Where a page defines tests, as pytest runs them."""
    of_pages = {page: [code for _, code in blocks((NOTES / page).read_text(encoding="utf-8"))] for page in PAGES}
    programs = [["\n".join(codes)] if page in STEPS else codes for page, codes in of_pages.items()]
    tests = [code for codes in programs for code in codes if "\ndef test_" in code]
    pytester.makepyfile(**{f"test_{i}": code for i, code in enumerate(tests)})
    outcomes = pytester.runpytest_inprocess("-p", "no:cacheprovider").parseoutcomes()
    assert set(outcomes) == {"passed"} and outcomes["passed"] > len(tests)  # one runs for two numbers of ranks


@pytest.mark.parametrize("name", COLLECTIVES)
def test_note_rule_and_truth_go_together(name):
    """The signature, the formulas of the rule's header, a program that calls it, and the formulas in the index."""
    page = (NOTES / "collectives" / "collectives.md").read_text(encoding="utf-8")
    (section,) = re.findall(rf"^## {name}\n(.*?)(?=^## )", page, re.MULTILINE | re.DOTALL)
    signature = inspect.signature(getattr(diffcoll, name))
    empty = inspect.Parameter.empty
    bare = [parameter.replace(annotation=empty) for parameter in signature.parameters.values()]
    written = str(signature.replace(parameters=bare, return_annotation=empty)).replace("'", '"')
    assert section.startswith(f"\n`dc.{name}{written}`\n\n")
    header = (ROOT / "diffcoll" / "collectives" / f"{name}.py").read_text(encoding="utf-8").split('"""')[1]
    formulas = re.search(r"^forward .*?(?=^note )", header, re.MULTILINE | re.DOTALL)[0]
    assert f"```text\n{formulas}```\n" in section
    ((_, code),) = blocks(section)
    assert f"dc.{name}(" in code
    assert f"notes/collectives/collectives.md#{name} " in header and f"diffcoll.truth.{name}\n" in header
    assert callable(getattr(diffcoll.truth, name))
    index = (NOTES / "collectives" / "README.md").read_text(encoding="utf-8")
    _, *cells = (
        cell.strip() for cell in re.search(rf"^\| \[{name}\]\(.*$", index, re.MULTILINE)[0].strip("|").split("|")
    )
    lines = [re.search(rf"^{label} +(.*)$", header, re.MULTILINE)[1] for label in ("forward", "adjoint")]
    assert cells == [re.sub(r" +=", " =", line).split("  ")[0] for line in lines]


#: Pages whose links are checked: those of the notes, the first one, and what only developers read.
LINKING = sorted(
    [
        *NOTES.rglob("*.md"),
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md", "examples/README.md")),
    ]
)


def anchors(text):
    """The anchors that GitHub gives a page's headings."""
    headings = re.findall(r"^#+ (.*)$", prose(text), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", LINKING, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(path):
    for file, anchor in LINK.findall(prose(path.read_text(encoding="utf-8"))):
        target = path.parent / file
        assert "://" in file or target.exists(), f"{path.name} links to {file}"
        if anchor and "://" not in file:
            text = (target if file else path).read_text(encoding="utf-8")
            assert anchor in anchors(text), f"{path.name} links to {file}#{anchor}"


def test_mentioned_notes_exist():
    """Docstrings, comments, error texts, pages and issue forms name notes by their path; each is there."""
    folders = [ROOT / name for name in ("diffcoll", "notes", "tests", "examples", "benchmarks", ".github")]
    paths = [path for folder in folders for kind in ("*.py", "*.md", "*.yml") for path in folder.rglob(kind)]
    found = {
        (str(path.relative_to(ROOT)), note)
        for path in [ROOT / "README.md", *paths]
        for note in re.findall(r"(?<![\w/-])notes/[\w/-]+\.md", path.read_text(encoding="utf-8"))
    }
    assert found
    assert not [(path, note) for path, note in sorted(found) if not (ROOT / note).exists()]
