"""The GPU memory that a collective needs, in units of this rank's input."""

import torch

import diffcoll as dc
from gpu.calls import collectives
from gpu.measuring import peak
from gpu.row import row

#: What forward and backward of two ranks need at most, if that is decided.
GOALS = {
    "all_gather": (2, 1),
    "all_gather stack": (2, 1),
    "all_gather dim=1": (4, None),
    "reduce_scatter": (0.5, None),
}


@row(ranks=(2,), seconds=60)
def collective_memory(rank):
    """Peaks of forward, its output included, and of backward."""
    elements = 1 << 24 if rank.on_gpu else 1 << 8
    rows = [elements // 16, elements // 32]
    x, shorter = (torch.randn(n, 16, device=rank.device, requires_grad=True) for n in (rows[0], rows[rank.r]))
    calls = collectives(x, rank.n) | {
        f"all_gather of other sizes, {name}": lambda sizes=sizes: dc.all_gather(shorter, sizes=sizes)
        for name, sizes in {"sizes=[…]": rows, "sizes='auto'": "auto"}.items()
    }
    for name, call in calls.items():
        leaf = shorter if "other sizes" in name else x
        with rank.part(name):
            y = call()
            g = torch.randn_like(y)

            def backward(y=y, g=g, leaf=leaf):
                return torch.autograd.grad(y, leaf, g, retain_graph=True)

            inputs = [peak(rank, f) / (leaf.numel() * leaf.element_size()) for f in (call, backward)]
            for what, found, goal in zip(("forward", "backward"), inputs, GOALS.get(name, (None, None)), strict=True):
                if goal is None:
                    rank.figure(what, found)
                else:
                    rank.goal(what, found, 1.02 * goal)
