"""A test for pytest that runs on every rank."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from copy import deepcopy
from functools import wraps
from typing import Any, Literal, TypeVar

from diffcoll.core import expect
from diffcoll.testing.simulate import simulate
from diffcoll.testing.spawn import spawn

F = TypeVar("F", bound=Callable[..., object])
#: The argument by which pytest passes the number of ranks; a part of the test's id.
_SIZE = "number_of_ranks"


def ranks(*sizes: int, on: Literal["simulated", "gloo"] = "simulated") -> Callable[[F], F]:
    """Run a test of pytest once on each of N ranks, for each N of `sizes`; a decorator of functions and methods.

    The test calls collectives, and backward, as a program on N ranks does; `diffcoll.get_rank()` is its rank. It fails
    if it fails on a rank. pytest evaluates fixtures and parameters once, and each rank gets a copy.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import ranks
    >>> @ranks(2, 3)
    ... def test_gradient_of_a_sum():
    ...     x = torch.tensor(1.0, requires_grad=True)
    ...     dc.all_reduce(x).backward()
    ...     assert x.grad == dc.get_world_size()

    Args:
        sizes: numbers of ranks; each is a test of its own.
        on: `"simulated"`, ranks in this process, see `simulate`; or `"gloo"`, processes of this machine, see `spawn`,
            to which fixtures are pickled.

    Raises:
        ModuleNotFoundError: pytest is not installed.
        TypeError, ValueError: a size is no number of ranks, or `on` is something else.
    """
    import pytest

    expect.choice("ranks", "on", on, ("simulated", "gloo"))
    numbers = [expect.integer("ranks", "sizes", n, least=1) for n in sizes]
    if not numbers:
        raise ValueError("ranks: sizes: got none, expected one or more numbers of ranks, such as ranks(2, 3)")

    def decorate(test: F) -> F:
        @wraps(test)
        def on_ranks(*instance: Any, **arguments: Any) -> None:
            n = arguments.pop(_SIZE)

            def body(own: dict[str, Any]) -> None:
                test(*instance, **own)

            if on == "simulated":
                simulate(body, [deepcopy(arguments) for _ in range(n)])
            else:
                spawn(body, [arguments] * n, backend=on)

        of_test = inspect.signature(test)
        size = inspect.Parameter(_SIZE, inspect.Parameter.KEYWORD_ONLY)
        on_ranks.__signature__ = of_test.replace(parameters=[*of_test.parameters.values(), size])  # type: ignore[attr-defined]
        ids = [f"{n} ranks" for n in numbers]
        marked: F = pytest.mark.parametrize(_SIZE, numbers, ids=ids)(on_ranks)
        return marked

    return decorate
