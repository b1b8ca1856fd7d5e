"""The GPU memory that a collective needs, in units of this rank's input."""

import torch

import diffcoll as dc
from gpu.measuring import peak
from gpu.row import row


@row(ranks=(2,), seconds=60)
def collective_memory(rank):
    """Peaks of forward, its output included, and of backward."""
    elements = 1 << 24 if rank.on_gpu else 1 << 8
    rows = [elements // 16, elements // 32]
    x, shorter = (torch.randn(n, 16, device=rank.device, requires_grad=True) for n in (rows[0], rows[rank.r]))
    odd = {"sizes=[…]": rows, "sizes='auto'": "auto"}
    #: The call, and what forward and backward need at most, if that is decided.
    calls = {
        "all_reduce": (lambda: dc.all_reduce(x), None),
        **{f"all_reduce {op}": (lambda op=op: dc.all_reduce(x, op), None) for op in ("mean", "max", "product")},
        "all_gather": (lambda: dc.all_gather(x), (2, 1)),
        "all_gather dim=1": (lambda: dc.all_gather(x, dim=1), (4, None)),
        "all_gather stack": (lambda: dc.all_gather(x, stack=True), (2, 1)),
        **{
            f"all_gather {name}": (lambda sizes=sizes: dc.all_gather(shorter, sizes=sizes), None)
            for name, sizes in odd.items()
        },
        "reduce_scatter": (lambda: dc.reduce_scatter(x), (0.5, None)),
        "reduce_scatter dim=1": (lambda: dc.reduce_scatter(x, dim=1), None),
        "all_to_all": (lambda: dc.all_to_all(x), None),
        "broadcast": (lambda: dc.broadcast(x), None),
        "reduce": (lambda: dc.reduce(x), None),
        "gather": (lambda: dc.gather(x), None),
        "shift": (lambda: dc.shift(x), None),
        "scan": (lambda: dc.scan(x), None),
    }
    for name, (call, goals) in calls.items():
        leaf = shorter if "sizes" in name else x
        with rank.part(name):
            y = call()
            g = torch.randn_like(y)

            def backward(y=y, g=g, leaf=leaf):
                return torch.autograd.grad(y, leaf, g, retain_graph=True)

            inputs = [peak(rank, f) / (leaf.numel() * leaf.element_size()) for f in (call, backward)]
            for what, found, goal in zip(("forward", "backward"), inputs, goals or (None, None), strict=True):
                if goal is None:
                    rank.figure(what, found)
                else:
                    rank.goal(what, found, 1.02 * goal)
