"""Programs of many ranks on tensors without memory: right ones end, and a rank that errs is named."""

import logging
import runpy
import threading
import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from runs import ROOT, line_of, refusal
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

import diffcoll as dc
from diffcoll.testing import simulate
from diffcoll.testing.cases import table

pytestmark = pytest.mark.filterwarnings("ignore:.?torch.distributed:FutureWarning")
WIDTH = 16
f = dc.nn.functional


# ── programs, of a rank, the number of ranks, and what this rank does wrong ──────────────────────────────


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.out(scaled_dot_product_attention(*self.qkv(x)[:, None].chunk(3, -1))[:, 0])


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(self.up(x).relu())


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.mlp, self.skips = Attention(), MLP(), False

    def forward(self, x):
        x = x + self.attention(x)
        return x if self.skips else x + self.mlp(x)


def layers(bug):
    model = nn.Sequential(*(Layer() for _ in range(2 if bug != "deleted layer" else 1)))
    model[0].skips = bug == "skipped layer"
    return model


def tensor_and_data(r, n, bug):
    mesh = init_device_mesh("cpu", (n // 4, 4), mesh_dim_names=("dp", "tp"))
    ways = {"qkv": ColwiseParallel(), "out": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    with torch.device("meta"):
        model = layers(bug)
        for layer in model:
            for part in (layer.attention, layer.mlp):
                parallelize_module(part, mesh["tp"], {name: ways[name] for name, _ in part.named_children()})
        y = model(torch.ones(2, 3 if bug == "shape" else 5, WIDTH)).sum()
        if bug != "backward":
            y.backward()
    group = mesh["tp" if bug == "group" else "dp"].get_group()
    grads = [p.grad.to_local() for p in model.parameters() if p.grad is not None]
    for g in grads[::-1] if bug == "order" else grads:
        dist.all_reduce(g, group=group)


def sharded(r, n, bug, dims=("shard",)):
    mesh = init_device_mesh("cpu", (2, n // 2), mesh_dim_names=("replicate", "shard"))[dims]
    with FakeTensorMode():
        model = layers(bug)
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        y = model(torch.ones(2, 5, WIDTH)).sum()
        if bug != "backward":
            y.backward()
            optimizer.step()


def hybrid(r, n, bug):
    sharded(r, n, bug, ("replicate", "shard"))


def data(r, n, bug):
    with torch.device("meta"):
        model = DistributedDataParallel(MLP(), init_sync=False)
        y = model(torch.ones(2, WIDTH)).sum()
        if bug != "backward":
            y.backward()
        dist.all_reduce(y.detach())


def pipeline(r, n, bug):
    with torch.device("meta"):
        stage, passed = MLP(), []
        for i in range(2):
            x = torch.empty(2, 4 if bug == "shape" else 5, WIDTH, requires_grad=True)
            if r:
                dist.recv(x.data, r - 1)
            passed.append((x, stage(x)))
            if r < n - 1 and not (bug == "skipped send" and i == 1):
                dist.isend(passed[-1][1].detach(), r + 1).wait()
        for x, y in passed:
            g = torch.empty_like(y)
            if r < n - 1:
                dist.irecv(g, r + 1).wait()
            y.backward(g)
            if r:
                dist.send(x.grad, r - 1)


def experts(r, n, bug):
    world = dist.group.WORLD
    with torch.device("meta"):
        expert = nn.Linear(WIDTH, WIDTH)
        x = torch.ones((3 if bug == "shape" else 2) * n, WIDTH, requires_grad=True)
        y = fc.all_to_all_single_autograd(x, None, None, world)
        fc.all_to_all_single_autograd(expert(y), [2] * n, [2] * n, world).sum().backward()
        if bug != "skipped":
            dist.all_reduce(expert.weight.grad)


def own(r, n, bug):
    with torch.device("meta"):
        x = torch.ones(3, 4, requires_grad=True)
        y = x * 2 if bug == "skipped" else dc.all_reduce(x * 2)
        y = dc.reduce_scatter(dc.all_gather(y, dim=1).reshape(3 * n, 4))
        y = dc.shift(dc.broadcast(dc.all_reduce(y, "min" if bug == "op" else "max"), 1))
        y = dc.all_to_all(y.repeat(n, 1))
        dc.all_gather(torch.ones(r % 3, 2), sizes=[s % 3 for s in range(n)])
        if bug != "backward":
            y.sum().backward()


#: program: by the number of ranks, what one of them does wrong; "": nothing. A rank of DTensor's takes 0.2 s.
PROGRAMS = {
    tensor_and_data: {16: [""], 8: ["skipped layer", "order", "group", "shape", "backward"]},
    sharded: {16: [""], 4: ["skipped layer", "deleted layer", "backward"]},
    hybrid: {16: ["skipped layer"], 4: [""]},
    data: {64: ["", "backward"]},
    pipeline: {64: ["", "skipped send"], 16: ["shape"]},
    experts: {64: ["", "skipped"], 16: ["shape"]},
    own: {64: ["", "skipped"], 16: ["op", "backward"]},
}
LARGE = {
    tensor_and_data: {64: ["", "group"], 256: ["", "skipped layer"]},
    hybrid: {64: ["", "skipped layer"]},
    data: {1024: ["", "backward"]},
    pipeline: {256: ["", "shape"], 1024: ["", "skipped send"]},
    experts: {256: ["", "shape"]},
    own: {256: ["", "op"]},
}


def cases(programs):
    return [(program, n, bug) for program, sizes in programs.items() for n, bugs in sizes.items() for bug in bugs]


@pytest.mark.parametrize("program, n, bug", cases(PROGRAMS), ids=lambda case: getattr(case, "__name__", str(case)))
def test_programs(program, n, bug):
    wrong = n // 2 + 1
    bugs = [bug if r == wrong else "" for r in range(n)]
    if bug:
        text = refusal(dc.CollectiveMismatchError, simulate, program, range(n), [n] * n, bugs)
        assert f"rank {wrong} " in text or f"{n} ranks" in text
        assert f" at {__file__}:" in text and len(text.splitlines()) <= 24
    else:
        simulate(program, range(n), [n] * n, bugs)


#: What a rank does of a call: (forward, backward).
SKIPPED = (False, False), (True, False)


def averaged(x):
    module = nn.Linear(4, 2)
    dc.GradientAverager(module.parameters()).backward(module(x).square().mean())
    return module.weight


def labels(x):
    return torch.ones(len(x), dtype=torch.int64)


#: What nn, averaging and composed functions return of two batches of features.
LAYERS_AND_LOSSES = [
    lambda x, y: f.clip_loss(x, y, torch.ones(())),
    lambda x, y: f.siglip_loss(x, y, torch.ones(()), logit_bias=torch.ones(())),
    lambda x, y: f.info_nce_loss(x, y),
    lambda x, y: f.nt_xent_loss(x, y),
    lambda x, y: f.supcon_loss(x, labels(x)),
    lambda x, y: f.barlow_twins_loss(x, y),
    lambda x, y: f.vicreg_loss(x, y),
    lambda x, y: f.koleo_loss(x),
    lambda x, y: f.token_mean(x[:, 0]),
    lambda x, y: f.dice_loss(x, y.detach()),
    lambda x, y: f.vocab_parallel_cross_entropy(x, y, labels(x)),
    lambda x, y: dc.nn.SyncBatchNorm(4)(x),
    lambda x, y: dc.gather_batch([x, y]).tree[1],
    lambda x, y: torch.stack([block.sum() for _, block in dc.ring(x)]),
    lambda x, y: dc.halo_exchange(x, 0, 1, 1),
    lambda x, y: averaged(x),
]


def batches():
    return [torch.ones(3, 4, requires_grad=True) for _ in range(2)]


@pytest.mark.parametrize("n", [1, 3])
def test_the_library(n):
    """Every collective, layer and loss, forward and backward; results have the shapes that they have with memory."""

    def body(r, device):
        with torch.device(device):
            xs = [torch.ones(case.shapes[r], dtype=torch.double, requires_grad=True) for case in table(n)]
            found = [case.call(x, r) for case, x in zip(table(n), xs, strict=True)]
            x, y = batches()
            found += [call(x, y) for call in LAYERS_AND_LOSSES]
            for z in found:
                z.sum().backward()
            return [z.shape for z in found], [x.grad.shape for x in (*xs, x)]

    assert simulate(body, range(n), ["meta"] * n) == simulate(body, range(n), ["cpu"] * n)


def test_what_a_rank_skips_is_found():
    """Of every collective, layer and loss: the call, or its backward, wherever ranks with memory would wait for it."""

    def body(r, device, run, runs, differentiates):
        with torch.device(device):
            y = run(r) if runs else torch.ones((), requires_grad=True)
            if differentiates:
                y.sum().backward()

    def hangs(device, run, *does):
        try:
            simulate(body, range(3), [device] * 3, [run] * 3, *([what, True, True] for what in does))
        except dc.CollectiveMismatchError:
            return True
        return False

    calls = [lambda r, case=case: case.call(torch.ones(case.shapes[r], requires_grad=True), r) for case in table(3)]
    for run in (*calls, *(lambda r, call=call: call(*batches()) for call in LAYERS_AND_LOSSES)):
        found, right = ([hangs(device, run, *does) for does in SKIPPED] for device in ("meta", "cpu"))
        assert found == right and right[0]


@pytest.mark.slow
@pytest.mark.parametrize("case", cases(LARGE), ids=lambda case: f"{case[0].__name__}-{case[1]}-{case[2]}")
def test_large_programs(case):
    test_programs(*case)


# ── the report ───────────────────────────────────────────────────────────────────────────────────────────


def test_the_example(monkeypatch, capsys):
    """The rank with its coordinates, its line and its submodule, in 20 lines."""
    path = ROOT / "examples" / "will_it_hang.py"
    monkeypatch.setattr("sys.argv", [str(path), "29"])
    runpy.run_path(str(path), run_name="__main__")
    text = capsys.readouterr().out
    assert len(text.splitlines()) <= 20
    for words in ("rank 29 (dp 3, tp 5) in layers.2", "layers.1", line_of(path, "x + self.down")):
        assert words in text


def test_coordinates_and_lines():
    """Equal lines are one; messages are compared by the other rank's distance."""

    def body(r):
        mesh = init_device_mesh("cpu", (3, 2, 2), mesh_dim_names=("a", "b", "c"))
        if r in (4, 5):
            return
        dist.all_reduce(torch.ones(1), group=mesh["b"].get_group()) if r < 8 else dist.recv(torch.ones(1), r - 1)

    text = refusal(dc.CollectiveMismatchError, simulate, body, range(12))
    assert "6 ranks (a 0; a 1, b 0) returned" in text and "2 ranks (a 1, b 1) wait in" in text
    assert "4 ranks (a 2) wait in" in text and "rank r-1 " in text and "all_reduce of b" in text
    assert len([line for line in text.splitlines() if line.startswith("  ")]) == 3


def test_ranks_that_wait_for_one_another():
    def body(r):
        if r in (1, 2):
            dist.recv(torch.ones(1), 3 - r)
        dist.barrier()

    text = refusal(dc.CollectiveMismatchError, simulate, body, range(10))
    root = text.partition("for one another")[2]
    assert "rank 1 in" in root and "rank 2 in" in root and "barrier" not in root
    assert "ranks 0, 3–9 wait in" in text


def test_a_circle_of_many_ranks():
    text = refusal(dc.CollectiveMismatchError, simulate, lambda r: dist.send(torch.ones(1), (r + 1) % 64), range(64))
    assert "all 64 ranks wait in torch.distributed.send to rank r+1 at" in text and len(text.splitlines()) < 20


def test_the_submodule_of_two_ranks():
    class Sum(nn.Module):
        def forward(self, x):
            dist.all_reduce(x)
            return x

    def body(r):
        model = nn.Sequential(Sum(), nn.Sequential(Sum()), Sum())
        if r:
            del model[0]
        model(torch.ones(1))

    text = refusal(dc.CollectiveMismatchError, simulate, body, range(2))
    assert "rank 0 in 0" in text and "rank 1 in 0.0" in text

    def outside(r):
        nn.Identity()(r) if r else nn.Flatten()(torch.ones(1, 1))
        dist.barrier()
        return r or dist.barrier()

    assert "submodules" not in refusal(dc.CollectiveMismatchError, simulate, outside, range(2))


# ── what nobody waited for ───────────────────────────────────────────────────────────────────────────────

UNNOTICED = {
    "mismatch": lambda r: dist.all_reduce(torch.ones(r + 1), async_op=True),
    "op": lambda r: dist.all_reduce(torch.ones(1), [dist.ReduceOp.SUM, dist.ReduceOp.MAX][r], async_op=True),
    "before a barrier": lambda r: (dist.all_reduce(torch.ones(r + 1), async_op=True), dist.barrier()),
    "one rank": lambda r: r or dist.all_reduce(torch.ones(1), async_op=True),
    "message": lambda r: r or dist.irecv(torch.ones(1), 1),
    "functional": lambda r: r or fc.all_reduce(torch.ones(1, device="meta"), "sum", dist.group.WORLD),
    "diffcoll": lambda r: r or dc.all_reduce(torch.ones(1), async_op=True),
}


@pytest.mark.parametrize("name", UNNOTICED)
@pytest.mark.filterwarnings("ignore")
def test_what_nobody_waited_for(name):
    def body(r):
        UNNOTICED[name](r)

    text = refusal(dc.CollectiveMismatchError, simulate, body, range(2))
    assert f" at {__file__}:" in text


def test_before_the_wait():
    """An output has no right number by luck; what is sent may not be modified."""

    def body(r):
        x, whole, row = torch.full((2,), r + 1.0), torch.tensor([r, 5]), torch.ones(4)
        works = [dist.all_reduce(x, async_op=True), dist.all_reduce(whole, async_op=True)]
        works.append(dist.all_gather_into_tensor(row, row[2 * r : 2 * r + 2] * 3, async_op=True))
        early = x.isnan().all(), (whole == torch.iinfo(whole.dtype).max).all(), row.isnan().all()
        assert all(early)
        works[0].get_future().then(lambda future: future.value()[0].add_(1)).wait()
        [work.wait() for work in works]
        sent = torch.ones(2)
        work = dist.reduce_scatter_tensor(torch.ones(1), sent, async_op=True)
        sent += r
        if r:
            with pytest.raises(RuntimeError, match="modified"):
                work.wait()
        else:
            work.wait()
        return x.tolist(), whole.tolist(), row.tolist()

    assert simulate(body, range(2)) == [([4, 4], [1, 10], [3] * 4)] * 2


# ── tensors without memory ───────────────────────────────────────────────────────────────────────────────


def exchanged(x, name):
    peers = [1 - dist.get_rank()] * 2
    both = torch.ops._c10d_functional.batch_p2p_ops(["isend", "irecv"], peers, [0, 0], [x, x * 1], name)
    return [fc.wait_tensor(y) for y in both][1]


def with_autograd(x, name):
    halves = [len(x) // 2] * 2
    with torch.inference_mode():
        return fc.wait_tensor(torch.ops._c10d_functional_autograd.all_to_all_single(x, halves, halves, name))


def has_kernel(name, key):
    found = torch._C._dispatch_has_kernel(name) and torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
    return pytest.mark.skipif(not found, reason=f"this release of PyTorch has no {name}")


FUNCTIONAL = [
    lambda x, name: fc.all_reduce(x, "sum", name),
    lambda x, name: fc.all_gather_tensor(x, 0, name),
    lambda x, name: fc.reduce_scatter_tensor(x, "sum", 0, name),
    lambda x, name: fc.all_to_all_single(x, None, None, name),
    lambda x, name: fc.broadcast(x, 1, name),
    lambda x, name: fc.all_reduce_coalesced([x, x], "sum", name)[1],
    lambda x, name: fc.all_gather_into_tensor_coalesced([x], name)[0],
    lambda x, name: fc.reduce_scatter_tensor_coalesced([x], "sum", [0], name)[0],
    lambda x, name: torch.ops._dtensor.shard_dim_alltoall(x.view(2, -1), 0, 1, name),
    pytest.param(exchanged, marks=has_kernel("_c10d_functional::batch_p2p_ops", "Meta")),
    pytest.param(
        with_autograd, marks=has_kernel("_c10d_functional_autograd::all_to_all_single", "CompositeExplicitAutograd")
    ),
]


@pytest.mark.parametrize("fake", [False, True])
@pytest.mark.parametrize("call", FUNCTIONAL)
def test_functional_collectives_meet(call, fake):
    """A rank with another size is found."""

    def body(r, size):
        with FakeTensorMode() if fake else torch.device("meta"):
            return (call(torch.ones(size), dist.group.WORLD.group_name) * 1).numel()

    assert simulate(body, range(2), [4] * 2)[0] in (2, 4, 8)
    refusal(dc.CollectiveMismatchError, simulate, body, range(2), [4, 8])


@pytest.mark.parametrize("fake", [False, True])
def test_the_use_of_a_result_waits(fake):
    """Else an order of collectives that hangs would pass, and a right one differ from real ranks."""
    order = []

    def body(r):
        with FakeTensorMode() if fake else torch.device("meta"):
            order.append(r)
            fc.all_reduce(torch.ones(2), "sum", dist.group.WORLD) * 1
            order.append(r)
            torch.ops._dtensor.shard_dim_alltoall(torch.ones(2, 2), 0, 1, dist.group.WORLD.group_name)
            order.append(r)

    simulate(body, range(2))
    assert order == [0, 1, 1, 0, 0, 1]


def test_off_the_ranks_and_in_traces():
    """PyTorch's own kernels run in threads that are no rank, and for graphs."""
    shapes = []

    def traced(r):
        with FakeTensorMode() as mode:
            x = mode.from_tensor(torch.ones(4))
        graph = make_fx(lambda x: fc.all_reduce(x, "sum", dist.group.WORLD) * 2, tracing_mode="fake")(torch.ones(4))
        assert "all_reduce" in str(graph.graph) and x.shape == (4,)
        return graph(torch.full((4,), r + 1.0)).tolist()

    def outside():
        shapes.append(torch.ops._c10d_functional.all_reduce(torch.ones(3, device="meta"), "sum", "0").shape)

    def body(r):
        thread = threading.Thread(target=outside)
        thread.start()
        thread.join()

    assert simulate(traced, range(2)) == [[6.0] * 4] * 2
    simulate(body, range(2))
    outside()
    assert shapes == [(3,)] * 3


def test_ranks_in_modes_of_their_own(caplog):
    """A report is made in a rank's FakeTensorMode, and nothing is logged once more on every rank."""

    def body(r):
        init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        with FakeTensorMode():
            if r == 0:
                (fc.all_reduce(torch.ones(2), "sum", dist.group.WORLD) + 1).sum()

    with caplog.at_level(logging.ERROR):
        assert "rank 1" in refusal(dc.CollectiveMismatchError, simulate, body, range(2))
    assert not caplog.records


# ── time ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_time(device):
    """Linear in the number of ranks. 256 take about 13 s of CPU, and twice as much on a busy machine."""

    def body(r):
        x = torch.ones(8, device=device)
        for _ in range(200):
            dist.all_reduce(x)

    seconds = {}
    for n in (256, 1024):
        start = time.process_time()
        simulate(body, range(n))
        seconds[n] = time.process_time() - start
    assert seconds[256] < 40 and seconds[1024] < 8 * seconds[256]
