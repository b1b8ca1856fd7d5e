"""The linear collectives, one file each, on the base in linear.py.

`COLLECTIVES` is the one list of them; the public API, the tests, `diffcoll verify` and the index in
`notes/README.md` are made from it or checked against it.
"""

from __future__ import annotations

COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "permute",
    "shift",
    "scan",
    "sum_gradients",
    "split",
)
