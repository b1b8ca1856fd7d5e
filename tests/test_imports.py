"""Which module may import which: a layer imports itself and the layers listed before it."""

import ast
import re
from collections import Counter
from pathlib import Path

from runs import python

import diffcoll
from diffcoll.collectives import COLLECTIVES

ROOT = Path(diffcoll.__file__).parent

#: Lowest first.
ORDER = ["truth", "ground", "engines", "core", "collectives", "composed", "averaging", "nn", "diffcoll", "integrations"]
ORDER += ["testing", "cli"]
#: These import nothing else of the library.
GROUND = ("core.torch_private", "core.errors", "core.dtypes")
#: Imported when something is first traced, as it takes time, or after mpi4py.
DEFERRED = {
    ("core.rules", "core.compiled"),
    ("core.groups", "engines.mpi"),
}


def name_of(path):
    """Return the module's name, e.g. core.maps; a package has the name of its folder."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__") or "diffcoll"


def imports(tree):
    """Yield the full name of every import, which may be a module or a name in one, and whether it is in a function."""
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    within = {id(node) for function in functions for node in ast.walk(function)}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            yield from ((module + alias.name, id(node) in within) for alias in node.names)


MODULES = {name_of(path): path for path in ROOT.rglob("*.py")}
FOREIGN = {module: [] for module in MODULES}
OWN = {module: set() for module in MODULES}
ARROWS = {module: {} for module in MODULES}
for module, path in MODULES.items():
    for name, deferred in imports(ast.parse(path.read_text(encoding="utf-8"))):
        if name.split(".")[0] != "diffcoll":
            FOREIGN[module].append(name)
            continue
        OWN[module].add(name)
        inner = name.removeprefix("diffcoll").removeprefix(".")
        while inner and inner not in MODULES:
            inner = inner.rpartition(".")[0]
        ARROWS[module][inner or "diffcoll"] = deferred


def layer(module):
    name = module.split(".")[0]
    return ORDER.index("ground" if module.startswith(GROUND) else "cli" if name == "__main__" else name)


def test_arrows_go_down():
    """Only the package and `testing` import truth; nothing imports the adapters, which alone import frameworks."""
    assert MODULES.keys() >= {"diffcoll", "core.maps", "collectives.all_reduce", "cli.verify", "__main__"}
    for module, to in ARROWS.items():
        for other in to:
            assert layer(other) <= layer(module), f"{module} imports {other}, which stands above it"
            assert module != "truth" and (other != "truth" or ORDER[layer(module)] in ("diffcoll", "testing")), module
            assert not other.startswith("integrations."), module
        assert module.startswith("integrations.") or not any(name.startswith("lightning") for name in FOREIGN[module])


def test_no_modules_import_each_other():
    """Pairs of adjoint maps stand in one file."""
    library = [module for module in MODULES if layer(module) < ORDER.index("testing")]
    assert {(a, b) for a in library for b, deferred in ARROWS[a].items() if deferred} == DEFERRED
    left = {module: {other for other, deferred in to.items() if not deferred} for module, to in ARROWS.items()}
    while free := [module for module, to in left.items() if not to & left.keys()]:
        for module in free:
            del left[module]
    assert not left, f"these import each other in a circle: {sorted(left)}"


def test_a_listing_of_collectives_is_the_list_of_collectives():
    assert {path.stem for path in (ROOT / "collectives").glob("*.py")} == {"__init__", *COLLECTIVES}


def test_private_torch_api_is_used_where_its_reason_is_stated():
    for module, names in FOREIGN.items():
        private = module == "core.compiled" or module.startswith(("core.torch_private", "engines."))
        assert private or not any(re.match(r"torch.*\._(?!_)", name) for name in names), (module, names)


def test_only_these_modules_run_maps():
    """So every message is compared in check mode and named in profiles: `core.moves` does both."""
    run = {f"diffcoll.core.moves.{name}" for name in ("move", "Flight")}
    assert {module for module, names in OWN.items() if names & run} == {"core.rules", "core.compiled"}


# ── what `import diffcoll` imports ───────────────────────────────────────────────────────────────────────


def test_importing_imports_the_collectives_alone():
    """No module outside of the library that torch has not imported, and none that most programs do not use."""
    code = "import sys, torch\nbefore = set(sys.modules)\nimport diffcoll\nprint(*sorted(set(sys.modules) - before))"
    imported = python("-c", code).stdout.split()
    assert [name for name in imported if name.split(".")[0] != "diffcoll"] == []
    assert {name.split(".")[1] for name in imported if "." in name} == {"collectives", "core", "engines"}
    assert {"diffcoll.engines.mpi", "diffcoll.core.compiled"}.isdisjoint(imported)


def test_deferred_names_are_imported_at_first_use():
    """As by a star import, which needs all of them."""
    python("-c", "import diffcoll\nfrom diffcoll import *\nassert set(diffcoll.__all__) <= set(globals())")


def test_helpers_of_tests_have_names_of_their_own():
    """In one run the folders of tests, examples and notes are on the path together: the first of a name is imported."""
    top = ROOT.parent
    tests = [path for path in top.glob("tests/**/*.py") if not (path.parent / "__init__.py").exists()]
    paths = [*top.glob("examples/*.py"), *top.glob("notes/*.py"), *tests]
    names = Counter(path.stem for path in paths if path.stem not in ("conftest", "__init__"))
    assert len(names) > 100
    assert not [name for name, count in names.items() if count > 1]
