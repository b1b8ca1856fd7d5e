"""exchange="ring": first order by its own rules, all else by a differentiable loop of shifts; both are exact."""

import pytest
import torch
from references import CONTRASTIVE, batch, each_way
from releases import compiles
from runs import gloo, profiled, refusal, rules, runs_on

import diffcoll as dc
from diffcoll.nn.functional import clip_loss, info_nce_loss, nt_xent_loss, siglip_loss
from diffcoll.testing import simulate


def features(rows, dtype=torch.double):
    return batch(rows, dtype, seed=0)[:2]


def split(tensors, sizes):
    return [x.split(sizes) for x in tensors]


@each_way
def test_transforms(options):
    """torch.func and forward mode give the gradients that backward gives."""

    def program(x, y):
        def loss(x, y):
            return clip_loss(x, y, 2.0, **options)

        x, y = x.clone().requires_grad_(), y.clone().requires_grad_()
        gradients = torch.autograd.grad(loss(x, y), (x, y))
        transformed = torch.func.grad(loss, argnums=(0, 1))(x.detach(), y.detach())
        torch.testing.assert_close(transformed, gradients)
        total = sum((g * v).sum() for g, v in zip(gradients, (x.detach().sin(), y.detach().cos()), strict=True))
        _, tangent = torch.func.jvp(loss, (x.detach(), y.detach()), (x.detach().sin(), y.detach().cos()))
        return dc.all_reduce(total), dc.all_reduce(tangent)

    for total, tangent in rules(program, *split(features(8), [5, 3])):
        torch.testing.assert_close(tangent, total)


@each_way
def test_vmap_over_labels_and_ids_of_the_same_features(options):
    x, y = features(8)
    marks = torch.randint(0, 3, (3, 8), generator=torch.Generator().manual_seed(1))
    parts = split((x, y), [5, 3]), marks.split([5, 3], 1)

    def losses(run, x, y, marks):
        return run(lambda ids: nt_xent_loss(x, y, ids=ids, **options) + clip_loss(x, y, 2.0, labels=ids, **options))(
            marks
        )

    def each(f):
        return lambda marks: torch.stack([f(row) for row in marks])

    found, right = (rules(lambda *z, run=run: losses(run, *z), *parts[0], parts[1]) for run in (torch.func.vmap, each))
    torch.testing.assert_close(found, right)


@each_way
def test_each_rank_sends_the_same_messages_whatever_it_trains(options):
    """On rank 0 a tower is frozen, or both are; its loss has no gradient then but those of the other ranks."""

    def gradient(x, y, labels, kind, trained, options):
        x, y = (t.clone().requires_grad_(on) for t, on in zip((x, y), trained, strict=True))
        scale = 2.0 if not any(trained) else torch.tensor(2.0, dtype=x.dtype, requires_grad=True)
        CONTRASTIVE[kind].ours(
            x, y, scale, -1.0, **options, **({} if labels is None else {"labels": labels})
        ).backward()
        return x.grad, y.grad

    parts, of_ranks = split(features(8), [5, 3]), batch(8)[2].split([5, 3])
    for kind, loss in CONTRASTIVE.items():
        for labels in [[None, None]] * (() in loss.marks) + [of_ranks] * (("labels",) in loss.marks):
            want = rules(gradient, *parts, labels, [kind] * 2, [(True, True)] * 2, [{}] * 2)
            for trained in ((True, False), (False, True), (False, False)):
                found = rules(gradient, *parts, labels, [kind] * 2, [trained, (True, True)], [options] * 2)
                mine = tuple(g if on else None for g, on in zip(want[0], trained, strict=True))
                torch.testing.assert_close(found, [mine, want[1]])


@each_way
def test_a_rank_may_ask_for_the_gradient_of_one_tensor(options):
    """torch.autograd.grad of other tensors on each rank."""

    def gradient(x, y, which):
        bias = torch.tensor(-1.0, dtype=x.dtype)
        xs = [t.clone().requires_grad_() for t in (x, y, bias)]
        loss = siglip_loss(xs[0], xs[1], 2.0, xs[2], **options) + 0 * xs[2]
        loss = loss + clip_loss(xs[0], xs[1], 2.0, **options)
        return torch.autograd.grad(loss, [xs[i] for i in which])

    parts = split(features(8), [3, 2, 3])
    want = rules(gradient, *parts, [(0, 1, 2)] * 3)
    found = rules(gradient, *parts, [(0,), (1,), (0, 1)])
    torch.testing.assert_close(found, [want[0][:1], want[1][1:2], want[2][:2]])


def test_gradients_of_features_that_no_rank_trains_are_not_sent():
    def messages(x, y, exchange, trained):
        x, y = x.clone().requires_grad_(), y.clone().requires_grad_(trained)
        loss = siglip_loss(x, y, 2.0, -1.0, exchange=exchange)
        return [name for name, _ in profiled(loss.backward)]

    def body(*xs):
        return {(how, trained): messages(*xs, how, trained) for how in ("gather", "ring") for trained in (True, False)}

    for found in gloo(body, *split(features(7), [4, 3])):
        assert found == {
            ("gather", True): ["all_gather backward"],
            ("gather", False): [],
            ("ring", True): ["all_gather", *["all_to_all"] * 6],
            ("ring", False): ["all_gather", *["all_to_all"] * 2],  # of the features
        }


def test_on_processes_with_a_tower_frozen_on_one_rank():
    def gradients(x, y, trained):
        xs = [x.clone().requires_grad_(), y.clone().requires_grad_(trained)]
        for exchange in ("gather", "ring"):
            (clip_loss(*xs, 2.0, exchange=exchange) + siglip_loss(*xs, 2.0, -1.0, exchange=exchange)).backward()
        return [t.grad for t in xs]

    parts = split(features(8), [5, 3])
    want = rules(gradients, *parts, [True, True])
    found = gloo(gradients, *parts, [False, True])
    torch.testing.assert_close(found, [[want[0][0], None], want[1]])


def test_a_ring_in_a_transform_on_one_rank_only_is_an_error_on_all_ranks():
    def gradient(x, y, transformed):
        def loss(x):
            return clip_loss(x, y, 2.0, exchange="ring")

        with pytest.raises(
            dc.CollectiveMismatchError, match="clip_loss: the ranks differ in labels, ids, negatives or"
        ):
            torch.func.grad(loss)(x) if transformed else loss(x)

    rules(gradient, *split(features(8), [5, 3]), [True, False])


@runs_on("rules", "gloo")
def test_create_graph_on_one_rank_only_is_an_error_on_all_ranks(run):
    def gradient(x, y, create_graph):
        x = x.clone().requires_grad_()
        return refusal(
            dc.CollectiveMismatchError,
            torch.autograd.grad,
            clip_loss(x, y, 2.0, exchange="ring"),
            x,
            create_graph=create_graph,
        )

    parts = split(features(8), [5, 3])
    first, second = run(gradient, *parts, [False, True])
    assert first.startswith("ring: tree: rank 1 differs from rank 0 in paths")
    assert first.endswith("rank 0 has tree['backward without create_graph']: torch.float64 (*, 6)")
    assert second.endswith("rank 1 has tree['backward with create_graph=True']: torch.float64 (*, 6)")


def test_half_precision():
    x, y = features(8, torch.bfloat16)

    def gradients(*x, exchange):
        xs = [t.clone().requires_grad_() for t in x[:2]]
        loss = info_nce_loss(*xs, temperature=0.05, exchange=exchange)
        return loss.detach(), *torch.autograd.grad(loss, xs)

    found = rules(lambda *x: gradients(*x, exchange="ring"), *split((x, y), [5, 3]))
    value, *right = gradients(x.float(), y.float(), exchange="gather")
    torch.testing.assert_close(sum(v for v, *_ in found) / 2, value)
    for i in (0, 1):
        mine = torch.cat([gs[1 + i] for gs in found])
        assert mine.dtype == torch.bfloat16
        assert (mine.float() / 2 - right[i]).abs().max() < 0.01 * right[i].abs().max()


@pytest.mark.parametrize("exchange", ["gather", "ring"])
def test_it_joins_joint_backward_and_check_mode(exchange):
    """Rank 1 does not use its loss."""

    def program(x, y, used):
        x, y = x.clone().requires_grad_(), y.clone().requires_grad_()
        with dc.check_mode(), dc.joint_backward() as joint:
            loss = clip_loss(x, y, 2.0, exchange=exchange, chunk_size=2, rank_reduction="sum")
            joint(loss if used else x.sum()).backward()
        return x.grad, y.grad

    parts = split(features(8), [5, 3])
    found = rules(program, *parts, [True, False])
    xs, ys = ([t.clone().requires_grad_() for t in part] for part in parts)
    losses = simulate(lambda x, y: clip_loss(x, y, 2.0, rank_reduction="sum"), xs, ys)
    torch.autograd.backward([losses[0], xs[1].sum()])
    torch.testing.assert_close(found, [(x.grad, y.grad) for x, y in zip(xs, ys, strict=True)])


def test_it_is_deterministic():
    def gradients(x, y):
        found = []
        for _ in range(3):
            xs = [t.clone().requires_grad_() for t in (x, y)]
            loss = clip_loss(*xs, 20.0, exchange="ring", chunk_size=3)
            found.append((loss.detach(), *torch.autograd.grad(loss, xs)))
        return found

    for found in gloo(gradients, *split(features(16, torch.float32), [10, 6])):
        assert all(torch.equal(a, b) for again in found[1:] for a, b in zip(found[0], again, strict=True))


@compiles
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # Dynamo's, after a graph break
@pytest.mark.parametrize("options", [{"chunk_size": 3}, {"exchange": "ring"}], ids=str)
def test_it_compiles(options):
    x, y = (t.requires_grad_() for t in features(8))

    def loss(x, y):
        return clip_loss(x, y, 2.0, **options)

    compiled = torch.compile(loss, backend="aot_eager")  # breaks the graph where sizes are exchanged
    found, right = (torch.autograd.grad(f(x, y), (x, y)) for f in (compiled, loss))
    torch.testing.assert_close(found, right)


def test_features_that_depend_on_one_another():
    """To second order: the gradient of the queries does not include what reaches them through the keys."""

    def gradients(exchange):
        def body(r, x):
            x = x.clone().requires_grad_()
            loss = (r + 1) * dc.nn.functional.info_nce_loss(x, x.sin(), normalize=False, exchange=exchange)
            (g,) = torch.autograd.grad(loss, x, create_graph=True)
            (h,) = torch.autograd.grad((g * (x.detach() + r).cos()).sum(), x)
            return g.detach(), h

        xs = torch.randn(9, 4, generator=torch.Generator().manual_seed(3)).double().split([4, 0, 5])
        return rules(body, range(3), xs)

    torch.testing.assert_close(gradients("ring"), gradients("gather"))
