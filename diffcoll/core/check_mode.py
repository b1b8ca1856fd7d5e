"""Check mode: before a collective sends anything, its ranks compare their calls."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import fields
from types import TracebackType

import torch
from torch import Tensor

from diffcoll.core import expect
from diffcoll.core.control import Control
from diffcoll.core.dtypes import rounding
from diffcoll.core.errors import CollectiveFailedError, CollectiveMismatchError, Origin, failure, of_uneven, user_line
from diffcoll.core.maps import AllGather, AllToAll, Linear
from diffcoll.core.torch_private.tracing import unobserved
from diffcoll.engines.engine import Engine
from diffcoll.engines.rank_state import PROCESS, THREAD


class _State:
    """Whether check mode is on, and the groups that were compared within the innermost block.

    At the end of a block the ranks compare in the order of their first use, so ranks in several groups cannot deadlock.
    A group whose last comparison has found a difference is not compared again: all its ranks know.
    """

    def __init__(self, on: bool) -> None:
        self.on = on
        #: Whether the last comparison in each group has found a difference.
        self.used: dict[Engine, bool] | None = None


def set_in_environment() -> bool:
    """Whether the environment enables check mode."""
    return os.environ.get("DIFFCOLL_CHECK", "0") not in ("", "0")


PROCESS.check_mode = _State(set_in_environment())
#: Whether check mode was ever on in this process: a fast first test for `is_on`.
ever_on = PROCESS.check_mode.on


class check_mode:
    """Raise an error on all ranks if they disagree about a collective; a function, and a context manager.

    Before each collective, forward and backward, its ranks compare the number of the forward call, the operation with
    its arguments, dtype and shape. If they differ, every rank raises the same `CollectiveMismatchError`, which lists
    each rank's call and its line, before any data is sent. Tensors, and gradients of results, that are declared
    replicated are compared by value too. The environment variable `DIFFCOLL_CHECK=1` enables check mode at import. No
    overhead when disabled.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> def f(x):
    ...     with dc.check_mode():
    ...         return dc.all_reduce(x)
    >>> simulate(f, [torch.ones(2), torch.ones(2)])
    [tensor([2., 2.]), tensor([2., 2.])]

    The ranks also compare at the end of a `with` block, in the groups that were used in it. If a rank skipped the last
    collectives or left the block by an exception, the other ranks raise instead of waiting for it. That rank's own
    exception propagates.

    The setting is per process, in a simulated world per rank, and must be the same on all ranks of a group.

    Args:
        on: whether to compare from this call on.

    Source: notes/how-to/find-a-hang.md.
    """

    def __init__(self, on: bool = True) -> None:
        expect.flag("check_mode", "on", on)
        global ever_on
        state = _state()
        self._before, state.on = state.on, on
        ever_on = ever_on or on
        self._outer: dict[Engine, bool] | None = None

    def __enter__(self) -> None:
        """Start a new record of the groups used. `__init__` has set the mode already."""
        state = _state()
        self._outer, state.used = state.used, {}

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Compare that all ranks leave the block, and restore the previous mode."""
        state = _state()
        used, on = state.used or {}, state.on
        state.on = self._before
        try:
            if on and not isinstance(error, (CollectiveFailedError, KeyboardInterrupt)):
                _compare_end(used, error)
        finally:
            state.used = self._outer
            if self._outer is not None:
                self._outer.update(used)


def _compare_end(used: dict[Engine, bool], error: BaseException | None) -> None:
    """Raise if other ranks do not leave the block here, unless this rank leaves it by an error, which propagates.

    In all groups, also after a difference in one: ranks of the others wait there.
    """
    how = "" if error is None else f" by {type(error).__name__}: {error}"
    found: CollectiveMismatchError | None = None
    for engine in [engine for engine, differs in used.items() if not differs and not engine.ended]:
        try:
            facts = "end", type(error or found).__name__
            compare(engine, "check mode", facts, lambda: f"the end of check mode at {user_line()}{how}")
        except CollectiveMismatchError as difference:
            found = found or difference
        except CollectiveFailedError:
            if error is None and found is None:
                raise
    if error is None and found is not None:
        raise found


def _state() -> _State:
    """Return the state of this simulated rank, or of this process."""
    holder = THREAD.rank or PROCESS
    state: _State = holder.check_mode or _State(PROCESS.check_mode.on)
    holder.check_mode = state
    return state


def is_on() -> bool:
    """Whether check mode is on for this rank."""
    return ever_on and _state().on


def compares(engine: Engine) -> bool:
    """Whether the ranks of this group compare their calls; graphs that are compiled contain no comparison."""
    return is_on() and engine.size > 1 and not engine.compiling


def compare_calls(engine: Engine, call: str) -> None:
    """Compare what the ranks are about to call, `name(…)` in words."""
    compare(engine, call.partition("(")[0], call, lambda: f"{call} at {user_line()}")


def compare(engine: Engine, name: str, facts: object, text: Callable[[], str], origin: Origin | None = None) -> None:
    """Raise on all ranks unless facts are equal on all; text describes this rank's call, in the backward of `origin`.

    The group counts as used, for the end of a `with` block. An error of the backend has the name of the call.
    """
    state = _state()
    used = {} if state.used is None else state.used
    used[engine] = False
    try:
        Control(engine, origin=origin).agree(facts, text)
    except CollectiveMismatchError:
        used[engine] = True
        engine.calls = 0  # on all ranks: one may have made a call that the others have not
        raise
    except CollectiveFailedError as error:
        cause = error.__cause__ or error
        raise failure(name, engine.description, engine.rank, origin, cause, compared=True) from cause


def common(f: Linear, x: Tensor) -> str:
    """Return what must be equal on all ranks that apply a map to their x; −1 is a size that may differ."""
    shape = list(x.shape)
    if isinstance(f, AllGather) and f.sizes:
        shape[f.dim] = -1
    elif isinstance(f, AllToAll):
        shape[f.split_dim] = shape[f.concat_dim] = -1  # `_compare_blocks` compares the sizes of the blocks
    given = [f"{name}={value!r}" for name, value in _arguments(f) if name not in ("split_sizes", "concat_sizes")]
    return f"{f.name} {f.detail}({', '.join([f'{x.dtype} {shape}', *given])})"


def _arguments(f: Linear) -> list[tuple[str, object]]:
    return [(field.name, getattr(f, field.name)) for field in fields(f) if field.name != "engine"]


def _shown(f: Linear) -> list[str]:
    """Return the arguments as errors show them: without those of the map alone, and without defaults."""
    given = dict(_arguments(f))
    if given.pop("replicated", False):
        given["grad_placement"] = "replicate"
    if f.name != "all_to_all":  # the user has passed none
        given = {name: value for name, value in given.items() if name not in ("split_sizes", "concat_sizes")}
    values = [f"{name}={value!r}" for name, value in given.items() if value and name != "sent"]
    return [*values, f.detail] if f.detail else values


def compare_moves(f: Linear, x: Tensor, origin: Origin | None, *, later: bool) -> None:
    """Compare what the ranks are about to send: f of x, in the forward call of this number or in its backward."""
    engine = f.engine
    if engine.size == 1:
        return
    number, order = (engine.calls, 0) if origin is None else (origin.number, origin.order)
    facts = number, order, common(f, x), later

    def text() -> str:
        if origin is None:
            shown = [f"{x.dtype} {tuple(x.shape)}", *_shown(f), *["async_op=True"] * later]
            return f"call {number}: {f.name}({', '.join(shown)}) at {user_line()}"
        of = f"{origin.backward} of call {number}, {origin.name} at {origin.line}"
        return f"{of}: gradient {x.dtype} {tuple(x.shape)}"

    try:
        compare(engine, f.name, facts, text, origin)
        if isinstance(f, AllToAll):
            _compare_blocks(f, Control(engine), text)
    except CollectiveMismatchError as error:
        are_gathers = origin is None and str(error).count(f": {f.name}({x.dtype} ") == engine.size
        raise CollectiveMismatchError(f"{error}{of_uneven(f.name) if are_gathers else ''}") from None
    if f.of_replicated:
        remedy = 'pass grad_placement="partial" if each rank has its own loss' if origin else "pass what all ranks have"
        same_everywhere(engine, x, text, remedy)


def _compare_blocks(f: AllToAll, control: Control, text: Callable[[], str]) -> None:
    """Raise on all ranks unless each rank sends blocks of the sizes that the others expect."""
    n = f.engine.size
    rows = control.numbers([*f.split_sizes, *f.concat_sizes])
    same = f.split_dim == f.concat_dim
    for r, row in enumerate(rows):
        for s, other in enumerate(rows):
            # Along two dimensions all ranks have the same lists of sizes.
            if row[s] != other[n + r] if same else row != other:
                why = f"rank {r} sends other sizes than rank {s} expects"
                control.refuse(text(), f"the ranks of {f.engine.description} disagree: {why}")


@unobserved()
def same_everywhere(
    engine: Engine,
    x: Tensor,
    text: Callable[[], str],
    remedy: str = 'pass grad_placement="partial" if each rank has its own loss',
) -> None:
    """Raise on all ranks if x, which is declared replicated, differs between ranks by more than rounding."""
    row = x.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    xs = Control(engine).gather(row, [x.numel()] * engine.size)
    tolerance = rounding(x.dtype)
    # PyTorch does not compare all dtypes that it moves.
    wide = [t.cpu().to(torch.complex128 if t.is_complex() else torch.float64) for t in xs]
    for r, other in enumerate(wide):
        same = torch.allclose(other, wide[0], rtol=tolerance, atol=tolerance, equal_nan=True)
        if not (same if tolerance else torch.equal(xs[r], xs[0])):
            why = f"declared replicated, but it differs between rank 0 and rank {r}"
            raise CollectiveMismatchError(f"{text()}: {why}; {remedy}")
