"""What a user's code may lose: changes of the public API since a commit, by griffe.

    python tests/api_breaks.py [REF]        REF: a tag, a branch or a commit; default: the last tag

The public API is what the modules below export, wherever it is defined, so a function may be moved. Signatures are
compared, not types; those of the loss modules are made from the loss functions, and are compared there. Nothing is
imported, so the commit need not run. The exit status is 1 if something breaks.
"""

import subprocess
import sys
from pathlib import Path

#: The modules that users import.
MODULES = (
    "diffcoll",
    "diffcoll.nn",
    "diffcoll.nn.functional",
    "diffcoll.testing",
    "diffcoll.truth",
    "diffcoll.integrations.lightning",
)


def breaks(repository: Path, ref: str) -> list[str]:
    """Return one line for each change since ref, in the files of a repository, that may break a user's code."""
    import griffe  # here, since pytest imports this file to look for doctests

    before = griffe.load_git("diffcoll", ref=ref, repo=repository, allow_inspection=False)
    after = griffe.load("diffcoll", search_paths=[repository], try_relative_path=False, allow_inspection=False)
    found = []
    for module in MODULES:
        old, new = _public(before, module), _public(after, module)
        for breakage in griffe.find_breaking_changes(old, new):
            name = getattr(breakage.old_value, "name", "")
            of = f"({name})" if isinstance(breakage.old_value, griffe.Parameter) else ""
            found.append(f"{breakage.obj.path}{of}: {breakage.kind.value}")
    return sorted(found)


def _public(package, path):
    """Return a module that holds what the module of this path exports; empty if there is no such module."""
    public = type(package)(path)
    try:
        module = package if path == package.path else package[path.partition(".")[2]]
    except KeyError:
        return public
    names = module.exports or [n for n, x in module.members.items() if not n.startswith("_") and not x.is_alias]
    for name in map(str, names):
        found = module[name].final_target if module[name].is_alias else module[name]
        if not found.is_module:  # such as nn, which is compared itself
            public.set_member(name, found)
    return public


def main(arguments: list[str]) -> int:
    repository = Path(__file__).parent.parent
    describe = ["git", "describe", "--tags", "--abbrev=0"]
    ref = arguments[0] if arguments else subprocess.run(describe, cwd=repository, capture_output=True, text=True).stdout
    if not ref.strip():
        print("no tag to compare with; name a commit", file=sys.stderr)
        return 2
    found = breaks(repository, ref.strip())
    print("\n".join(found) or f"nothing of the public API has changed since {ref.strip()} in a way that breaks code")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
