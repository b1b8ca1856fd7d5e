"""Numbers of ranks, sizes of their blocks, pairs of ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from diffcoll.core.errors import message
from diffcoll.core.expect import integer

Draw = Callable[..., Any]


def worlds(most: int = 6, *, least: int = 1) -> st.SearchStrategy[int]:
    """World sizes N, from `least` to `most`.

    >>> from hypothesis import find
    >>> from diffcoll.testing import strategies
    >>> find(strategies.worlds(least=2), lambda n: True)
    2

    Raises:
        TypeError, ValueError: `least` is not an integer, below 1, or above `most`.
    """
    return integers("worlds", least, most, 1)


def sizes(n: int, most: int = 3, *, least: int = 0) -> st.SearchStrategy[list[int]]:
    """One size per rank, from `least` to `most`: numbers of rows, or the `sizes` of a collective.

    >>> from hypothesis import find
    >>> from diffcoll.testing import strategies
    >>> find(strategies.sizes(3), lambda each: sum(each) == 4 and 0 in each)
    [0, 1, 3]

    Raises:
        TypeError, ValueError: n is not an integer from 1; `least` is not an integer, negative, or above `most`.
    """
    n = integer("sizes", "n", n, 1)
    return st.lists(integers("sizes", least, most, 0), min_size=n, max_size=n)


def pairs(n: int) -> st.SearchStrategy[list[tuple[int, int]]]:
    """Pairs (src, dst) of n ranks for `permute`, each rank at most once on each side.

    >>> from hypothesis import find
    >>> from diffcoll.testing import strategies
    >>> find(strategies.pairs(3), lambda pairs: len(pairs) == 2)
    [(0, 0), (1, 1)]

    Raises:
        TypeError, ValueError: n is not an integer from 1.
    """
    return _pairs(integer("pairs", "n", n, 1))


@st.composite
def _pairs(draw: Draw, n: int) -> list[tuple[int, int]]:
    count = draw(st.integers(0, n))
    sources, targets = draw(st.permutations(range(n))), draw(st.permutations(range(n)))
    return list(zip(sources[:count], targets[:count], strict=True))


def integers(name: str, least: Any, most: Any, floor: int) -> st.SearchStrategy[int]:
    """Integers from `least` to `most`, which are arguments of the strategy `name`."""
    least, most = integer(name, "least", least, floor), integer(name, "most", most, floor)
    if least > most:
        raise ValueError(message(name, "least", least, f"at most {most}, the value of most"))
    return st.integers(least, most)
