"""The module of an averager, watched for parameters that it gets after the averager was attached."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from diffcoll.averaging.parameters import Watch, is_sharded
from diffcoll.averaging.state import NAME
from diffcoll.core._torch import untraced

__all__ = ["ModuleTree"]


class ModuleTree:
    """The parameters of a module, of which all that require a gradient are to be averaged.

    Args:
        module: held weakly.
        named: the names and parameters that its averager averages.
    """

    def __init__(self, module: nn.Module, named: list[tuple[str, Tensor]]) -> None:
        self._module, self._named = weakref.ref(module), named
        self._watch: weakref.ref[Watch] | None = None
        #: Handles of hooks, by the id of what they are registered on.
        self._handles: dict[int, Any] = {}
        #: Whether the module was found unchanged in this step.
        self.has_looked = False

    def attach(self, averaged: Callable[[], set[int]], on_gradient: Callable[[], None]) -> None:
        """Watch the module before each forward.

        Args:
            averaged: returns the ids of the parameters of all averagers.
            on_gradient: a method, held weakly; called when a parameter that nobody averages has a gradient.
        """
        module = self._module()
        assert module is not None
        self._averaged, self._on_gradient = averaged, weakref.WeakMethod(on_gradient)
        watch = Watch(module, self._before_forward)
        self._watch = weakref.ref(watch)  # the module holds it
        self._handles[id(module)] = module.register_forward_pre_hook(watch)
        self._is_attached = True

    def detach(self) -> None:
        """Remove all hooks."""
        self._is_attached = False
        for handle in self._handles.values():
            handle.remove()

    def check(self) -> None:
        """Raise if the module has parameters that nobody averages."""
        if self.has_looked:
            return
        for name, _ in self._foreign():
            raise RuntimeError(
                f"{NAME}: {name}: the module has this parameter only since {NAME} was attached, and nobody averages "
                "its gradient; load_state_dict(assign=True), parametrizations and m.weight = … make new parameters; "
                f"make the {NAME} anew, which takes over, or give it parameters instead of the module"
            )

    def _foreign(self) -> list[tuple[str, Tensor]]:
        """Return the module's parameters that are not frozen and that nobody averages."""
        watch = None if self._watch is None else self._watch()
        if watch is None or not watch.has_changed():
            self.has_looked = True
            return []
        module, averaged = watch.module(), self._averaged()
        foreign = [] if module is None else [pair for pair in module.named_parameters() if id(pair[1]) not in averaged]
        sharded = is_sharded(module, [t for _, t in (*self._named, *foreign)])
        if sharded:
            raise RuntimeError(f"{NAME}: FSDP shards {sharded} and reduces its gradient; call detach()")
        if not foreign:  # parameters have other names, as in pruning
            watch.record()
        return [(name, t) for name, t in foreign if t.requires_grad]

    def _before_forward(self) -> None:
        """Hook new parameters: where all were replaced, no hook of the old ones runs in backward."""
        self.has_looked = False
        for _, t in self._foreign():
            if id(t) not in self._handles and isinstance(t, nn.Parameter) and t.is_leaf:
                self._handles[id(t)] = t.register_post_accumulate_grad_hook(_after_accumulate(self))  # type: ignore[no-untyped-call]

    def _after_accumulate(self, p: Tensor) -> None:
        on_gradient = self._on_gradient()
        if self._is_attached and on_gradient is not None and any(p is q for _, q in self._foreign()):
            on_gradient()


def _after_accumulate(tree: ModuleTree) -> Callable[[Tensor], None]:
    """Return a hook of a new parameter, which does not hold the tree."""
    ref = weakref.ref(tree)

    def hook(p: Tensor) -> None:
        alive = ref()
        if alive is not None:
            alive._after_accumulate(p)

    return untraced(hook)
