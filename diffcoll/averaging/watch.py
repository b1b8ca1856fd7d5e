"""Forward hooks of an averager, and the detection of parameters that a module gets after it was attached."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from diffcoll.averaging.ownership import Ignored, Named, averaged, is_sharded
from diffcoll.averaging.policy import NAME
from diffcoll.core.torch_private.tensors import registries
from diffcoll.core.torch_private.tracing import untraced


class ForwardHook:
    """A forward pre-hook of a module, which it holds weakly. Copies of the module do not have it."""

    def __init__(self, module: nn.Module | None) -> None:
        self.module: Callable[[], nn.Module | None] = (lambda: None) if module is None else weakref.ref(module)
        self._handles: list[Any] = []

    def before_forward(self) -> None:
        """Called before each forward that is not compiled."""
        raise NotImplementedError

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Call the method, except while Dynamo traces the forward."""
        if not torch.compiler.is_compiling():
            self.before_forward()

    def attach(self, callback: Callable[[], None]) -> None:
        """Register the hook; each subclass says when it calls `callback`."""
        self._callback = callback
        module = self.module()
        if module is not None:
            self._handles.append(module.register_forward_pre_hook(self))

    def detach(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def __getattr__(self, name: str) -> Any:
        """Explain, to torch.jit.script, that it cannot compile this hook: it asks for the hook's name first."""
        if name == "__name__":
            raise AttributeError(
                f"{NAME}: torch.jit.script compiles forward hooks, and cannot compile this averager's; call detach() "
                f"first; to train the scripted module, make a {NAME} of its named_parameters()"
            )
        raise AttributeError(name)

    def __reduce__(self) -> tuple[Any, ...]:
        """Make copies and pickles of a module contain `{}.get` as the hook: a no-op, loaded without diffcoll."""
        return getattr, ({}, "get")


class ModuleTree(ForwardHook):
    """Checks before each forward that every parameter of a module that requires a gradient is averaged, or ignored.

    The module keeps the averager alive. Without a module there is nothing to check. The callback is called after a
    gradient of a new parameter was accumulated.
    """

    def __init__(self, module: nn.Module | None, named: Named, ignored: Ignored, averager: object) -> None:
        super().__init__(module)
        self._named, self._ignored, self._averager = named, ignored, averager
        #: New parameters that have a hook.
        self._hooked: list[Tensor] = []
        #: Whether the module was found unchanged since its last forward.
        self.is_checked = False
        self._record()

    def detach(self) -> None:
        """Remove all hooks."""
        super().detach()
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

    def before_forward(self) -> None:
        """Hook new parameters: if all were replaced, no averager's hook would run in backward."""
        self.is_checked = False
        for _, t in self._unaveraged():
            if not any(t is p for p in self._hooked) and isinstance(t, nn.Parameter) and t.is_leaf:
                self._hooked.append(t)
                self._handles.append(t.register_post_accumulate_grad_hook(_after_accumulate(self)))  # type: ignore[no-untyped-call]

    def _after_accumulate(self, p: Tensor) -> None:
        if self._handles and any(p is q for _, q in self._unaveraged()):
            self._callback()

    def _unaveraged(self) -> Named:
        """Return the module's trainable parameters that no averager averages."""
        module = self.module()
        now, before = self._registered(), self._recorded
        if module is None or (len(now) == len(before) and all(map(is_, now, before))):
            self.is_checked = True
            return []
        ids = averaged()
        unaveraged = [
            (name, t) for name, t in module.named_parameters() if id(t) not in ids and not self._ignored(name, t)
        ]
        for name, t in (*unaveraged, *self._named):
            if is_sharded(t):
                raise RuntimeError(
                    f"{NAME}: {name}: FSDP shards this parameter and reduces its gradient; call detach()"
                )
        if not unaveraged:  # the same parameters under other names, as after pruning
            self._record()
        return [(name, t) for name, t in unaveraged if t.requires_grad]

    def _record(self) -> None:
        """Record the module's current submodules and parameters.

        The objects, not their ids: a new object may have the id of one that was freed.
        """
        module = self.module()
        self._registries = [] if module is None else registries(module)
        self._recorded = self._registered()

    def _registered(self) -> list[Any]:
        return [*chain.from_iterable(map(dict.values, self._registries))]


def _after_accumulate(tree: ModuleTree) -> Callable[[Tensor], None]:
    """Return a hook of a new parameter; it holds the tree weakly."""
    ref = weakref.ref(tree)

    def hook(p: Tensor) -> None:
        alive = ref()
        if alive is not None:
            alive._after_accumulate(p)

    return untraced(hook)
