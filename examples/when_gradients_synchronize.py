"""When gradients are local and when they are averaged, around backward() on two processes.

python examples/when_gradients_synchronize.py
"""

import torch
from torch import nn

import diffcoll as dc
from diffcoll.testing import spawn


def watch(rank: int) -> tuple[list[str], list[float], float]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 1)).double()
    averager = dc.GradientAverager(net, bucket_mb=0.25)
    events: list[str] = []
    for name, p in net.named_parameters():
        p.register_post_accumulate_grad_hook(lambda _, name=name: events.append(name))
    x = torch.randn(8, 4, dtype=torch.double, generator=torch.Generator().manual_seed(rank))
    loss = net(x).square().mean()

    with averager.no_sync():
        loss.backward(retain_graph=True)
    norms = [norm(net)]  # local
    net.zero_grad()
    loss.backward(retain_graph=True)
    norms.append(norm(net))  # averaged
    loss.backward()  # accumulates the average a second time
    norms.append(norm(net))
    return events[: len(list(net.parameters()))], norms, loss.item()


def norm(net: nn.Module) -> float:
    return torch.cat([p.grad.flatten() for p in net.parameters()]).norm().item()


def main() -> None:
    (order, a, loss_a), (_, b, loss_b) = spawn(watch, range(2))
    print("gradients are accumulated in the order", ", ".join(order))
    print(f"loss of this rank's batch        {loss_a:.6f}  {loss_b:.6f}")
    for what, x, y in zip(("under no_sync", "after backward", "after a second"), a, b, strict=True):
        print(f"norm of .grad {what:18} {x:.6f}  {y:.6f}")
    assert order[0].startswith("4.") and order[-1].startswith("0.")
    assert loss_a != loss_b and a[0] != b[0]
    assert a[1] == b[1] and a[2] == b[2]
    assert abs(a[2] - 2 * a[1]) < 1e-12


if __name__ == "__main__":
    main()
