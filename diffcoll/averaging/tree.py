"""Detects parameters that a module gets after an averager was attached to it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from diffcoll.averaging.ignoring import Ignored
from diffcoll.averaging.parameters import Watch, is_sharded
from diffcoll.averaging.state import NAME
from diffcoll.core.torch_private.tracing import untraced


class ModuleTree:
    """Checks that every parameter of a module that requires a gradient is averaged.

    Args:
        module: held weakly.
        named: the names and parameters that its averager averages.
        ignored: whether a parameter is left out.
    """

    def __init__(self, module: nn.Module, named: list[tuple[str, Tensor]], ignored: Ignored) -> None:
        self._module, self._named, self._ignored = weakref.ref(module), named, ignored
        self._watch: weakref.ref[Watch] | None = None
        #: Handles of hooks, and the new parameters that have one.
        self._handles: list[Any] = []
        self._hooked: list[Tensor] = []
        #: Whether the module was found unchanged since its last forward.
        self.is_checked = False

    def attach(
        self,
        averager: object,
        averaged: Callable[[], set[int]],
        on_gradient: Callable[[], None],
    ) -> None:
        """Check the module before each forward.

        Args:
            averager: kept alive by the module.
            averaged: returns the ids of the parameters of all averagers.
            on_gradient: called when a gradient of an unaveraged parameter is accumulated.
        """
        module = self._module()
        assert module is not None
        self._averaged, self._on_gradient = averaged, on_gradient
        watch = Watch(module, self._before_forward, averager)
        self._watch = weakref.ref(watch)  # the module holds it
        self._handles.append(module.register_forward_pre_hook(watch))
        self._is_attached = True

    def detach(self) -> None:
        """Remove all hooks."""
        self._is_attached = False
        for handle in self._handles:
            handle.remove()
        self._hooked.clear()

    def check(self) -> None:
        """Raise if the module has trainable parameters that no averager averages."""
        if self.is_checked:
            return
        for name, _ in self._unaveraged():
            raise RuntimeError(
                f"{NAME}: {name}: the module got this parameter after {NAME} was attached, and no averager averages "
                "its gradient; load_state_dict(assign=True), parametrizations and m.weight = … make new parameters; "
                f"make a new {NAME}, which replaces this one, or give it parameters instead of the module"
            )

    def _unaveraged(self) -> list[tuple[str, Tensor]]:
        """Return the module's trainable parameters that no averager averages."""
        watch = None if self._watch is None else self._watch()
        if watch is None or not watch.has_changed():
            self.is_checked = True
            return []
        module, averaged = watch.module(), self._averaged()
        named = [] if module is None else module.named_parameters()
        unaveraged = [(name, t) for name, t in named if id(t) not in averaged and not self._ignored(name, t)]
        sharded = is_sharded(module, [t for _, t in (*self._named, *unaveraged)])
        if sharded:
            raise RuntimeError(f"{NAME}: FSDP shards {sharded} and reduces its gradient; call detach()")
        if not unaveraged:  # the same parameters under other names, as after pruning
            watch.record()
        return [(name, t) for name, t in unaveraged if t.requires_grad]

    def _before_forward(self) -> None:
        """Hook new parameters: if all were replaced, no averager's hook would run in backward."""
        self.is_checked = False
        for _, t in self._unaveraged():
            if not any(t is p for p in self._hooked) and isinstance(t, nn.Parameter) and t.is_leaf:
                self._hooked.append(t)
                self._handles.append(t.register_post_accumulate_grad_hook(_after_accumulate(self)))  # type: ignore[no-untyped-call]

    def _after_accumulate(self, p: Tensor) -> None:
        if self._is_attached and any(p is q for _, q in self._unaveraged()):
            self._on_gradient()


def _after_accumulate(tree: ModuleTree) -> Callable[[Tensor], None]:
    """Return a hook of a new parameter; it holds the tree weakly."""
    ref = weakref.ref(tree)

    def hook(p: Tensor) -> None:
        alive = ref()
        if alive is not None:
            alive._after_accumulate(p)

    return untraced(hook)
