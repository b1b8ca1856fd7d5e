"""The linear collectives, one file each. Their maps are in `diffcoll.core.maps`.

`COLLECTIVES` is the list of them. The public API, the tests, `diffcoll verify` and notes/collectives/README.md are
generated from it or checked against it.
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
