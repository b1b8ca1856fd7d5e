"""The site of the notes: `make docs`. It makes a page of the reference for every public name."""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import re
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import diffcoll
from diffcoll.cli import main

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import drawing  # noqa: E402

#: Where the pages of the reference are written.
REFERENCE = HERE / "reference"
EXAMPLES = REFERENCE / "examples"
#: The modules that users import, and what a page says of each.
MODULES = {
    "diffcoll": "Collectives, averages of gradients, check mode and groups.",
    "diffcoll.nn": "Layers and losses as modules.",
    "diffcoll.nn.functional": "The same losses as functions.",
    "diffcoll.testing": "Simulated ranks, processes, and checks of gradients.",
    "diffcoll.truth": "The reference of each collective, in which N ranks live in one autograd graph.",
}
#: The functions whose pages have a picture.
DRAWN = [f"diffcoll.{part}{name}" for part in ("", "truth.") for name in diffcoll.collectives.COLLECTIVES]
#: The pages of the first page's contents, in order. A folder's pages are below its README, in the order of its links.
CONTENTS = ["start/README", "how-to/README", "symptoms", "training/README", "with/README", "collectives/README"]
CONTENTS += ["running/README", "why/README", "glossary", "reference", "reference/index"]

project, author = "diffcoll", "the diffcoll developers"
version = release = diffcoll.__version__
root_doc = "README"
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["_build"]
default_role = "code"
myst_heading_anchors = 4
autodoc_typehints = "none"  # one signature, short enough to read; the arguments' own lines say their types
autodoc_member_order = "bysource"
napoleon_use_rtype = False
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
html_theme = "furo"
html_title = f"diffcoll {version}"
html_show_sphinx = html_show_copyright = False
html_search_scorer = str(HERE / "scorer.js")


def public(module: ModuleType) -> list[str]:
    """Return the names that a module offers, without its submodules; those of the references are its functions."""
    own = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
    names = getattr(module, "__all__", [name for name in own if not name.startswith("_")])
    return [name for name in names if not isinstance(getattr(module, name), ModuleType)]


def write_reference(app: Any) -> None:
    """Write a page for each module and each of its public names."""
    EXAMPLES.mkdir(exist_ok=True, parents=True)
    lines = [
        "API reference",
        "=" * 13,
        "",
        "Every public name has a page: signature, shapes, dtypes, errors and an example.",
        "",
    ]
    names = [*MODULES, "commands", "examples", "benchmarks", "changes"]
    _write(REFERENCE / "index.rst", [*lines, ".. toctree::", "   :maxdepth: 2", "", *(f"   {name}" for name in names)])
    for name, about in MODULES.items():
        module = import_module(name)
        pages = {f"{name}.{member}": getattr(module, member) for member in public(module)}
        lines = [
            name,
            "=" * len(name),
            "",
            about,
            "",
            ".. toctree::",
            "   :maxdepth: 1",
            "",
            *(f"   {p}" for p in pages),
        ]
        _write(REFERENCE / f"{name}.rst", lines)
        for page, value in pages.items():
            kind = "autoclass" if inspect.isclass(value) else "autofunction" if callable(value) else "autodata"
            members = ["   :members:"] if kind == "autoclass" else []
            title = page.rpartition(".")[2]
            lines = [title, "=" * len(title), "", f".. {kind}:: {page}", *members]
            if page in DRAWN:
                _write(REFERENCE / f"{title}.svg", [drawing.picture(title)])
            _write(REFERENCE / f"{page}.rst", lines)
    lines = ["Commands", "=" * 20, ""]
    text = re.sub("^", "   ", help_of("verify"), flags=re.MULTILINE)
    lines += ["diffcoll verify", "-" * 20, "", ".. code-block:: text", "", text, ""]
    _write(REFERENCE / "commands.rst", lines)
    lines = ["Examples", "=" * 20, "", "Programs that train, measure and audit, on processes of this machine.", ""]
    for path in sorted((HERE.parent / "examples").glob("*.py")):
        about = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n")[0]
        about = about.replace("*", "\\*")
        lines.append(f"* :doc:`examples/{path.stem}`: {about}")
        source = f".. literalinclude:: ../../../examples/{path.name}"
        _write(EXAMPLES / f"{path.stem}.rst", [path.stem, "=" * len(path.stem), "", about, "", source])
    _write(REFERENCE / "examples.rst", [*lines, "", ".. toctree::", "   :hidden:", "   :glob:", "", "   examples/*"])
    included = [".. include:: ../../CHANGELOG.md", "   :parser: myst_parser.sphinx_"]
    _write(REFERENCE / "changes.rst", included)
    text = (HERE.parent / "benchmarks" / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"\]\((?=\w+\.py\))", "](../../benchmarks/", text)  # the page is deeper
    _write(REFERENCE / "benchmarks.md", [text.replace("](../notes/", "](../").replace("](../tests/", "](../../tests/")])


def help_of(command: str) -> str:
    """Return what `diffcoll COMMAND --help` prints."""
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
        main([command, "--help"])
    return printed.getvalue()


def _write(path: Path, lines: list[str]) -> None:
    """Write a page if it is not as it was, so that only what changed is built again."""
    text = "\n".join(lines) + "\n"
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


#: A group of questions of the first page that is named after its reader, and its rows.
_GROUP = re.compile(r"^### (I .*)\n\n((?:[* ] .*\n)+)", re.MULTILINE)


def add_first_screen(app: Any, name: str, source: list[str]) -> None:
    """Begin the first page as the README does."""
    if name == root_doc:
        readme = (HERE.parent / "README.md").read_text(encoding="utf-8")
        screen = readme.partition("\n## Where to go")[0].replace("](notes/", "](")
        index = source[0].partition("\n\n")[2].partition("\n\n")[2]  # without its title and first paragraph
        source[0] = f"{screen}\n## All pages\n\n{index}"


def add_cards(app: Any, name: str, source: list[str]) -> None:
    """Put a card for each reader on the first page; it leads to the questions that readers of that kind have."""
    if name == root_doc:
        lines = ["````{grid} 1 1 2 2", ":gutter: 3", ""]
        for reader, rows in _GROUP.findall(source[0]):
            anchor = re.sub(r"[^\w -]", "", reader.lower()).replace(" ", "-")
            lines += [f"```{{grid-item-card}} [{reader}](#{anchor})"]
            questions = re.findall(r"^\* (.*) \[.*?\]\((.*?)\)", rows, re.MULTILINE)
            lines += [f"- [{question}]({answer})" for question, answer in questions[:3]]
            lines += ["```", ""]
        about, title, rest = source[0].partition("## All pages\n")
        source[0] = "\n".join([about, *lines, "````", "", title + rest])


def add_contents(app: Any, name: str, source: list[str]) -> None:
    """Put the table of contents at the end of the pages that are folders' indices; GitHub lists folders itself."""
    if Path(name).name == root_doc:
        links = re.findall(r"\]\(([\w-]+)\.md[)#]", source[0])
        pages = CONTENTS if name == root_doc else [*dict.fromkeys(links)]
        source[0] += "\n".join(["", "```{toctree}", ":hidden:", "", *pages, "```", ""])


#: A link to a file of the repository that is not below the notes.
_OUTSIDE = re.compile(r"\[([^\]]*)\]\((?:\.\./)+((?!notes/)[^)\s#]*)([^)\s]*)\)")
#: The pages of the site that are made of such files.
PAGES = {"benchmarks/README.md": "benchmarks.md", "CHANGELOG.md": "changes.rst"}
PAGES |= {f"examples/{path.name}": f"examples/{path.stem}.rst" for path in (HERE.parent / "examples").glob("*.py")}


def name_files(app: Any, name: str, source: list[str]) -> None:
    """Lead links to files to their pages; replace those to files that are not on the site by the files' names."""
    depth = name.count("/") + 1

    def named(link: re.Match[str]) -> str:
        text, path, anchor = link.groups()
        if link[0].count("../") < depth:
            return link[0]
        if path in PAGES:
            return f"[{text}]({'../' * (depth - 1)}reference/{PAGES[path]}{anchor})"
        return f"`{path}`" if text.strip("`") in (path, Path(path).name) else f"{text} (`{path}`)"

    source[0] = _OUTSIDE.sub(named, source[0])


#: In a docstring: an example with what it prints, code, or emphasis, which stay; or what only reStructuredText reads.
_MARKUP = re.compile(
    r"(^ *>>>.*(?:\n *\S.*)*|`[^`]*`|(?<!\w)\*\w[^*`]*\w\*(?!\w))|(\*+|\||(?<=\w)_(?!\w))", re.MULTILINE
)
_whole: list[str] = []


def escape(app: Any, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Escape what docstrings mean as it stands: products, absolute values, names that end in an underscore.

    Napoleon takes the words before a colon in the first line of an attribute's for its type: it does not get these.
    """
    text = _MARKUP.sub(lambda found: found[1] or "".join(f"\\{c}" for c in found[2]), "\n".join(lines))
    lines[:] = text.split("\n")
    if what in ("attribute", "property", "data"):
        _whole[:], lines[:] = lines, []


def bring_back(app: Any, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Undo that, after napoleon; make links of the notes that are named; draw what a collective does."""
    if what in ("attribute", "property", "data"):
        lines[:] = _whole
    if name in DRAWN:
        title = name.rpartition(".")[2]
        drawn = [f".. image:: {title}.svg", f"   :alt: {title} on two ranks, forward and backward", ""]
        first = lines.index("") + 1  # after the first sentence
        lines[first:first] = drawn
    lines[:] = [re.sub(r"notes/([\w/-]+)\.md(#[\w-]+)?", r":doc:`/\1`", line) for line in lines]


def redirect(app: Any, error: Exception | None) -> None:
    """Make the folder of the site open at the first page."""
    if error is None and app.builder.name == "html":
        page = (
            f'<meta charset="utf-8"><meta http-equiv="refresh" content="0; url={root_doc}.html"><title>diffcoll</title>'
        )
        Path(app.outdir, "index.html").write_text(page, encoding="utf-8")


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("source-read", add_first_screen)
    app.connect("source-read", name_files)
    app.connect("source-read", add_cards)
    app.connect("autodoc-process-docstring", escape, priority=400)
    app.connect("autodoc-process-docstring", bring_back, priority=600)
    app.connect("build-finished", redirect)
    app.connect("builder-inited", write_reference)
    app.connect("source-read", add_contents)
