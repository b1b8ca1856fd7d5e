"""In which submodule's forward a simulated rank is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from diffcoll.engines.rank_state import THREAD


@contextmanager
def followed() -> Iterator[None]:
    """Let each rank keep the names of the modules whose forward it runs, within the outermost one."""

    def enter(module: nn.Module, args: Any) -> None:
        if (rank := THREAD.rank) is not None:
            if not rank.submodules:
                rank.names = {id(m): name for name, m in module.named_modules()}
            rank.submodules.append(rank.names.get(id(module)) or type(module).__name__)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        if THREAD.rank is not None:
            THREAD.rank.submodules.pop()

    hooks = register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
