"""Gradients of half-precision features: within 3 roundings of the float64 gradient, also where the loss is small."""

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from references import CONTRASTIVE, data
from releases import compiles
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode

import diffcoll as dc
from diffcoll.nn import functional
from diffcoll.nn.contrastive import halves, normalized, product
from diffcoll.testing import simulate

SCALE = 20.0


def contrastive(kind, scale=SCALE, bias=0.0, more=(), **marks):
    """A loss of features and numbers of the samples; its labels and ids are functions of these."""

    def loss(x, y, n, **options):
        chosen = {name: of(n) for name, of in marks.items()}
        return CONTRASTIVE[kind].ours(x, y, scale, bias, **chosen, **dict(more), **options)

    return loss


CONTRASTIVES = {
    "clip": contrastive("clip"),
    "clip normalize": contrastive("clip", more=[("normalize", True)]),
    "clip ids": contrastive("clip", ids=lambda n: n // 2),
    "info_nce_loss": contrastive("info_nce"),
    "info_nce_loss labels": contrastive("info_nce", labels=lambda n: n),
    "info_nce_loss two positives": contrastive("info_nce", labels=lambda n: n // 2),
    "info_nce_loss hard negatives": contrastive("info_nce_of_hard_negatives"),
    "info_nce_loss two passages": contrastive("info_nce_of_passages"),
    "nt_xent_loss": contrastive("nt_xent"),
    "supcon": contrastive("supcon", labels=lambda n: n),
    "siglip": contrastive("siglip", 3 * SCALE, -1.7 * SCALE),
}
OTHERS = {
    "barlow twins": lambda x, y, n: functional.barlow_twins_loss(x, y),
    "vicreg": lambda x, y, n: functional.vicreg_loss(x, y),
    "koleo": lambda x, y, n: functional.koleo_loss(x) + functional.koleo_loss(y),
    "sigreg": lambda x, y, n: (
        functional.sigreg_loss(x, data(24, 256)) + functional.sigreg_loss(5 * y, data(24, 256, seed=1))
    ),
}
WAYS = [{}, {"chunk_size": 4}]
#: Noise between the features of a pair, from equal to independent, and whether pairs are wrong.
NOISE = [(0.35, 0), (0.8, 0), (1.2, 1)]


def features(noise, wrong, dtype, rows=12, common=0.0):
    g = torch.Generator().manual_seed(rows)
    x = F.normalize(common * torch.ones(24) + torch.randn(rows, 24, generator=g))
    y = F.normalize(x + noise * torch.randn(rows, 24, generator=g) / 24**0.5)
    return x.to(dtype), y.roll(wrong, 0).to(dtype)


def gradients(loss, x, y, sizes, scale=1.0, transformed=False, **options):
    """Return the loss of the whole batch and scale times the gradients of all ranks' features."""

    def program(x, y, n):
        def scaled(x, y):
            return loss(x, y, n, **options) * (scale / dc.get_world_size())

        if transformed:
            return scaled(x, y), *torch.func.grad(scaled, argnums=(0, 1))(x, y)
        x, y = x.clone().requires_grad_(), y.clone().requires_grad_()
        value = scaled(x, y)
        return value.detach(), *torch.autograd.grad(value, (x, y), materialize_grads=True)

    ranks = simulate(program, *(t.split(sizes) for t in (x, y, torch.arange(len(x)))))
    values, *found = zip(*ranks, strict=True)
    return sum(values) / scale, *(torch.cat(gs) for gs in found)


def roundings(found, right, scale, dtype):
    """Return the error of a gradient in units of one rounding of its norm."""
    return float((found.double() / scale - right).norm() / right.norm() / (torch.finfo(dtype).eps / 2))


@pytest.mark.parametrize("name", [*CONTRASTIVES, *OTHERS])
def test_each_loss(name):
    """From losses of 5, or what these features reach, down to 1e-4."""
    loss, seen = (CONTRASTIVES | OTHERS)[name], []
    for dtype, scale in ((torch.bfloat16, 1.0), (torch.float16, 1024.0)):  # as a GradScaler does
        for noise, wrong in NOISE:
            x, y = features(noise, wrong, dtype)
            value, *right = gradients(loss, x.double(), y.double(), [12])
            seen.append(value)
            ways = WAYS if dtype == torch.bfloat16 else WAYS[-1:]
            for options in ways if name in CONTRASTIVES else [{}]:
                for sizes in ([5, 0, 7],) if options else ([12], [5, 0, 7]):
                    _, *found = gradients(loss, x, y, sizes, scale, **options)
                    for a, b in zip(found, right, strict=True):
                        assert a.dtype == dtype
                        assert roundings(a, b, scale, dtype) < 3, (dtype, value, options, sizes)
    if name in CONTRASTIVES and "two" not in name:
        assert max(seen) > 4
        assert min(seen) < 2e-4


@pytest.mark.parametrize("name", [*CONTRASTIVES, "koleo"])
def test_each_loss_on_tensor_cores(name, cores):
    test_each_loss(name)


class Products(TorchDispatchMode):
    """Records the dtypes of the operands of matrix products."""

    def __init__(self):
        super().__init__()
        self.dtypes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm):
            self.dtypes += {x.dtype for x in args if isinstance(x, torch.Tensor)}
        return function(*args, **(kwargs or {}))


def of_vocabulary(hidden, weight, n, **options):
    bias = torch.zeros(len(weight), dtype=hidden.dtype)
    return functional.vocab_parallel_cross_entropy(hidden, weight, n, bias_shard=bias, **options)


MULTIPLIED = {
    "vocabulary": of_vocabulary,
    "info_nce_loss shared negatives": lambda x, y, n, **options: functional.info_nce_loss(x, x.detach(), y, **options),
    **{name: loss for name, loss in CONTRASTIVES.items() if "hard" not in name},
}


def number(name, needed, x, again=False):
    """Of products: one in forward, which may run again, and in backward two for each factor that needs a gradient."""
    if "nt_xent" in name or "supcon" in name:  # both factors are of x and y
        return 1 + again + 4
    of_x = any(x is each for each in needed)
    if "shared" in name:  # a product of x and keys that need no gradient, too
        return 2 * (1 + again + of_x) + 2 * len(needed)
    return 1 + again + 2 * len(needed)


@pytest.mark.parametrize("name", MULTIPLIED)
def test_products_are_of_halves(name, cores):
    """In each chunk."""
    (x, y), loss = features(0.35, 0, torch.bfloat16), MULTIPLIED[name]
    views = "nt_xent" in name or "supcon" in name
    for needed in ((x, y), (x,), (y,)):
        for options in WAYS:
            for t in (x, y):
                t.requires_grad_(any(t is other for other in needed))
            with Products() as seen:
                loss(x, y, torch.arange(12), **options).backward(inputs=needed)
            chunks = (6 if views else 3) if options else 1
            assert seen.dtypes == [torch.bfloat16] * chunks * number(name, needed, x, chunks > 1), (needed, options)


@compiles
@pytest.mark.filterwarnings("ignore:<class 'torch.autograd.function.Function'>:DeprecationWarning")  # Dynamo's
@pytest.mark.parametrize("name", ["clip normalize", "info_nce_loss shared negatives", "vocabulary"])
def test_products_in_a_graph_are_of_halves(name, cores):
    """With the gradients of eager code, and none that nobody needs."""

    def products_of(graph, inputs):
        seen.extend(node.target for node in graph.graph.nodes if "mm" in str(node.target))
        return make_boxed_func(graph)

    (x, y), loss = features(0.35, 0, torch.bfloat16), MULTIPLIED[name]
    for needed in ((x, y), (x,)):
        torch._dynamo.reset()
        seen = []
        compiled = torch.compile(loss, fullgraph=True, backend=aot_autograd(fw_compiler=products_of))
        for t in (x, y):
            t.requires_grad_(any(t is other for other in needed))
        values = [f(x, y, torch.arange(12)) for f in (compiled, loss)]
        torch.testing.assert_close(*values)
        torch.testing.assert_close(*(torch.autograd.grad(value, needed) for value in values))
        assert seen == [torch.ops.aten.mm.dtype] * number(name, needed, x)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("normalize", [False, True])
def test_a_product_of_halves(half, normalize, cores):
    """Exact, of rows of any norm; its gradients have 16 bits, also of numbers that float16 does not hold."""
    g = torch.Generator().manual_seed(0)
    norms = 10 ** torch.linspace(-2, 3, 5)[:, None]
    x, y = ((norms * torch.randn(5, 8, generator=g)).to(half).float().requires_grad_() for _ in range(2))
    w = 1e-6 * torch.randn(5, 5, generator=g)
    of = normalized if normalize else lambda x: x
    found, right = product(of(x), of(y), halves(x, half, normalize), halves(y, half, normalize)), of(x) @ of(y).T
    torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-6)
    for a, b in zip(*(torch.autograd.grad((w * s).sum(), (x, y)) for s in (found, right)), strict=True):
        assert ((a - b).norm(dim=1) <= 3e-5 * b.norm(dim=1)).all()


@pytest.mark.parametrize("loss", [CONTRASTIVES["clip normalize"], of_vocabulary])
def test_further_derivatives_on_tensor_cores(loss, cores):
    """A second backward, and a batch of backwards within vmap."""

    def derivatives(x, y):
        x, y = x.clone().requires_grad_(), y.clone().requires_grad_()
        value = loss(x, y, torch.arange(len(x)))
        batch = torch.func.vmap(lambda g: torch.autograd.grad(value, x, g, retain_graph=True)[0])
        first = torch.autograd.grad(value, (x, y), create_graph=True)
        second = torch.autograd.grad(sum((g * x.detach().cos()).sum() for g in first), (x, y), retain_graph=True)
        return *second, *batch(torch.tensor([1.0, -2.0], dtype=value.dtype))

    x, y = features(0.35, 0, torch.bfloat16)
    for a, b in zip(derivatives(x, y), derivatives(x.double(), y.double()), strict=True):
        assert roundings(a, b, 1, torch.bfloat16) < 4


@pytest.mark.parametrize("dims", [None, "per class", 1], ids=str)
@pytest.mark.parametrize("kind", ["dice_loss", "iou_loss", "tversky_loss"])
def test_ratios_of_sums(kind, dims):
    """Of half-precision probabilities, and of logits in half precision with the sigmoid in float32."""
    g, seen = torch.Generator().manual_seed(1), []
    targets = torch.rand(12, 8, generator=g) < 0.4
    noise = torch.randn(12, 8, generator=g) / 2

    def of_probabilities(p, _, n, **options):
        return getattr(functional, kind)(p, targets[n], dims=dims, **options)

    def of_logits(z, _, n, **options):
        wide = z if z.dtype == torch.double else z.float()
        return of_probabilities(wide.sigmoid(), None, n, **options)

    for dtype, scale in ((torch.bfloat16, 1.0), (torch.float16, 1024.0)):
        for far in (0.0, 5.0, 9.0):
            logits = ((targets * 2 - 1) * far + noise).to(dtype)
            for loss, x in ((of_logits, logits), (of_probabilities, logits.float().sigmoid().to(dtype))):
                value, right, _ = gradients(loss, x.double(), x.double(), [12])
                _, found, _ = gradients(loss, x, x, [5, 0, 7], scale)
                assert found.dtype == dtype
                assert roundings(found, right, scale, dtype) < 3, (dtype, value)
                seen.append(value)
    assert max(seen) > 0.3
    assert min(seen) < 3e-4


OTHER_WAYS = {
    # at scale 100 each rank's part of a gradient is much larger than their sum
    "parts of ranks that cancel": (features(0.3, 0, torch.bfloat16, rows=32, common=10.0), [8] * 4, {}),
    "transforms": (features(0.35, 0, torch.bfloat16), [5, 0, 7], {"transformed": True}),
    "chunks in transforms": (features(0.35, 0, torch.bfloat16), [5, 0, 7], {"transformed": True, "chunk_size": 4}),
}


@pytest.mark.parametrize(("pairs", "sizes", "options"), OTHER_WAYS.values(), ids=OTHER_WAYS)
@pytest.mark.parametrize("name", ["clip", "info_nce_loss", "nt_xent_loss", "supcon"])
def test_other_ways(name, pairs, sizes, options):
    _, *right = gradients(CONTRASTIVES[name], *(x.double() for x in pairs), [sum(sizes)])
    _, *found = gradients(CONTRASTIVES[name], *pairs, sizes, **options)
    assert all(roundings(a, b, 1, torch.bfloat16) < 3 for a, b in zip(found, right, strict=True))


@pytest.mark.parametrize("name", ["clip", "info_nce_loss", "nt_xent_loss", "supcon"])
@pytest.mark.parametrize("way", OTHER_WAYS)
def test_other_ways_on_tensor_cores(name, way, cores):
    test_other_ways(name, *OTHER_WAYS[way])


def cross_entropy(x, y):
    return F.cross_entropy(SCALE * x @ y.T, torch.arange(len(x)))


USUAL = {
    "info_nce": (contrastive("info_nce", more=[("normalize", False)]), cross_entropy),
    "clip": (contrastive("clip"), lambda x, y: (cross_entropy(x, y) + cross_entropy(y, x)) / 2),
}


@pytest.mark.parametrize(("ours", "usual_loss"), USUAL.values(), ids=USUAL)
def test_float32_is_as_accurate_as_cross_entropy(ours, usual_loss):
    """In float32 a gradient of cross-entropy is wrong by a rounding divided by the loss; ours is not, nor the loss."""
    for noise, wrong in NOISE:
        x, y = features(noise, wrong, torch.float32)
        value, *right = gradients(ours, x.double(), y.double(), [12])
        usual = [t.clone().requires_grad_() for t in (x, y)]
        usual = torch.autograd.grad(usual_loss(*usual), usual)
        for options in WAYS:
            near, *found = gradients(ours, x, y, [5, 0, 7], **options)
            assert abs(near.double() / value - 1) < 1e-5
            for a, b, other in zip(found, right, usual, strict=True):
                error, of_usual = (roundings(t, b, 1, torch.float32) for t in (a, other))
                assert error < 50, (value, options)
                assert value > 0.1 or error < of_usual, (value, options)
        assert value > 1e-3 or of_usual > 200


@pytest.mark.parametrize("name", ["clip", "info_nce_loss", "nt_xent_loss", "siglip", *OTHERS])
def test_autocast_to_the_other_half_precision(name):
    loss, (x, y) = (CONTRASTIVES | OTHERS)[name], features(0.8, 0, torch.float16)
    right = loss(x, y, torch.arange(len(x)))
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(loss(x, y, torch.arange(len(x))), right)
