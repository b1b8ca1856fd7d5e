"""Parameters and buffers that an averager leaves out.

note  notes/averaging.md
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from typing import Any, TypeAlias

from torch import Tensor, nn

from diffcoll.core.errors import message

#: The argument of the user.
Ignore: TypeAlias = Iterable[str] | Callable[[str, Tensor], bool] | None
#: Whether the parameter or buffer of this name is left out.
Ignored: TypeAlias = Callable[[str, Tensor], bool]
_EXPECTED = "names of parameters or buffers, or a function (name, tensor) -> bool"


def checked_ignore(
    operation: str, ignore: Any, module: nn.Module | None, named: Sequence[tuple[str, Tensor]]
) -> Ignored:
    """Return the function that says what is left out; raise if a name is unknown or the answer depends on the name.

    Args:
        operation: for errors.
        ignore: the argument.
        module: whose buffers may be left out too; None: parameters were given.
        named: all parameters, a shared one once for each of its names.
    """
    if ignore is None:
        return _nothing
    if callable(ignore):
        ignored: Ignored = lambda name, tensor: bool(ignore(name, tensor))  # noqa: E731
    else:
        buffers = [] if module is None else [name for name, _ in module.named_buffers()]
        names = _checked_names(operation, ignore, [*(name for name, _ in named), *buffers])
        ignored = lambda name, tensor: name in names  # noqa: E731
    aliases: dict[int, list[str]] = {}
    for name, p in named:
        aliases.setdefault(id(p), []).append(name)
    by_name = dict(named)
    for shared in aliases.values():
        left = [name for name in shared if ignored(name, by_name[name])]
        if left and len(left) < len(shared):
            others = ", ".join(name for name in shared if name not in left)
            got = f"{', '.join(left)}, which is the same parameter as {others}"
            raise ValueError(message(operation, "ignore", got, "all names of a shared parameter, or none"))
    return ignored


def _nothing(name: str, tensor: Tensor) -> bool:
    return False


def _checked_names(operation: str, ignore: Any, known: Sequence[str]) -> frozenset[str]:
    if isinstance(ignore, (str, Tensor)) or not isinstance(ignore, Iterable):
        raise TypeError(message(operation, "ignore", repr(ignore)[:80], _EXPECTED))
    names = list(ignore)
    for name in names:
        if not isinstance(name, str):
            raise TypeError(message(operation, "ignore", repr(name)[:80], _EXPECTED))
        if name not in known:
            near = [k for k in known if k.startswith(f"{name}.")] or get_close_matches(name, known, 3) or known
            raise ValueError(message(operation, "ignore", repr(name), f"a name such as {', '.join(near[:3])}"))
    return frozenset(names)
