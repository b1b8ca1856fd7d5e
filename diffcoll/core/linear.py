"""A collective is a linear map between the ranks, and its adjoint is another.

A map defines two things: what it does to plain tensors (`start`), and its `adjoint`. All derivatives follow from these,
see `diffcoll.core.derivatives`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeVar

from torch import Tensor
from typing_extensions import dataclass_transform, override

from diffcoll.engines.engine import Engine, Wait, done

#: Maps whose x may differ from rank to rank in its size along `dim`, if the map has `sizes`.
UNEVEN = ("all_gather", "gather", "scatter", "permute", "shift")
#: Fields of maps, and arguments of calls, whose value may differ from rank to rank.
PER_RANK = ("split_sizes", "concat_sizes")

#: The maps of `diffcoll.collectives` by the name of the class, for the modules of `diffcoll.core`.
MAPS: dict[str, Any] = {}


M = TypeVar("M")


@dataclass_transform(frozen_default=True, eq_default=False)
def linear_map(cls: type[M]) -> type[M]:
    """Make a class of a map a dataclass that type checkers take to be frozen.

    A frozen one has six functions that are compiled for each class on import, which were a third of the time of
    `import diffcoll`; this one has `__init__`, which is faster, too.
    """
    return dataclass(eq=False, repr=False)(cls)


@linear_map
class Linear(ABC):
    """A linear map from all ranks' x to all ranks' y, for the rank of `engine`.

    Dimensions are counted from the front. A map does not act on further dimensions of x, so the same object serves
    under vmap, which moves the batch dimension last.

    Maps are compared by their fields, and never changed.
    """

    #: Name of the collective, as in `diffcoll.truth` and `notes/`.
    name: ClassVar[str]
    #: Whether x has been read when `start` returns, so that it may change before the wait.
    reads_at_once: ClassVar[bool] = False

    engine: Engine

    def __init_subclass__(cls) -> None:
        """Add a map of the library to MAPS."""
        if cls.__module__.startswith("diffcoll.collectives."):
            MAPS[cls.__name__] = cls

    def _key(self) -> tuple[Any, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))

    @override
    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and isinstance(other, Linear) and self._key() == other._key()

    @override
    def __hash__(self) -> int:
        return hash((type(self), self._key()))

    @override
    def __repr__(self) -> str:
        values = ", ".join(f"{field.name}={getattr(self, field.name)!r}" for field in fields(self))
        return f"{type(self).__qualname__}({values})"

    @abstractmethod
    def start(self, x: Tensor) -> Callable[[], Tensor]:
        """Start on a plain tensor x; the returned function waits for y, in fresh memory.

        Unless the map `reads_at_once`, x must not change before the wait.
        """

    def shape(self, x: Sequence[int]) -> list[int]:
        """Return the shape of y for an x of this shape."""
        return list(x)

    def bytes(self, x: Tensor) -> int:
        """Return the number of bytes of x as it is sent."""
        return x.nbytes

    @property
    @abstractmethod
    def adjoint(self) -> Linear:
        """F* with Σ_r ⟨(F x)_r, y_r⟩ = Σ_r ⟨x_r, (F* y)_r⟩ for all x and y.

        If x or y is replicated, it is one tensor of which every rank has a copy, and its sum has one term, not N.
        """

    @property
    def averaging(self) -> Linear | None:
        """The map F / N, if there is one of its own; x is not a half precision."""
        return None

    @property
    def shared(self) -> tuple[bool, bool]:
        """Whether x, and whether y, is replicated: one tensor of which every rank has a copy."""
        return False, False


def common_shape(f: Linear, x: Tensor) -> list[int] | int:
    """Return the part of the shape of f's x that is equal on all ranks; -1: a size that may differ."""
    if f.name == "all_to_all":
        return x.dim()  # `agree_on_blocks` compares the sizes
    shape = list(x.shape)
    if f.name in UNEVEN and (fields := vars(f))["sizes"]:
        shape[fields["dim"]] = -1  # compared as the sizes of f
    return shape


def then(wait: Wait, y: Tensor | Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Return a function that waits and then returns y."""
    if wait is done:
        return (lambda: y) if isinstance(y, Tensor) else y

    def finish() -> Tensor:
        wait()
        return y if isinstance(y, Tensor) else y()

    return finish
