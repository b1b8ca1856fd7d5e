"""In which submodule's forward a simulated rank is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from diffcoll.engines.rank_state import THREAD


class Submodules:
    """The modules whose forward a rank runs, from the outermost on."""

    def __init__(self) -> None:
        self._stack: list[nn.Module] = []
        self._names: dict[int, str] = {}  # of the outermost module's submodules, by id

    @property
    def innermost(self) -> str:
        """The name of the innermost one in the outermost one; "": there is none."""
        if not self._stack:
            return ""
        root, module = self._stack[0], self._stack[-1]
        if id(module) not in self._names:
            self._names = {id(m): name for name, m in root.named_modules()}
        return self._names.get(id(module)) or type(module).__name__

    def enter(self, module: nn.Module) -> None:
        """Begin the forward of a module."""
        if not self._stack:
            self._names = {}
        self._stack.append(module)

    def leave(self, module: nn.Module) -> None:
        """End it; also that of modules which it has called and which have raised."""
        while self._stack and self._stack.pop() is not module:
            pass


@contextmanager
def followed() -> Iterator[None]:
    """Let each rank follow the modules whose forward it runs."""

    def enter(module: nn.Module, args: Any) -> None:
        if THREAD.rank is not None:
            THREAD.rank.submodules.enter(module)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        if THREAD.rank is not None:
            THREAD.rank.submodules.leave(module)

    hooks = register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
