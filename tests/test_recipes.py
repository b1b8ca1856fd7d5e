"""The programs of notes/how-to/recipes.md on gloo processes, and functions of the notes against one process."""

import pickle
from functools import partial
from types import SimpleNamespace

import cloudpickle
import pytest
import torch
import torch.nn.functional as F
from references import data
from runs import gloo
from test_notes import NOTES, blocks, run_blocks
from torch import nn

import diffcoll as dc
from diffcoll import testing
from diffcoll.testing import assert_matches_single_process, simulate


def test_recipes_on_processes(monkeypatch):
    """All programs of N ranks in one set of processes: each gives what it gives on simulated ranks."""
    programs, inputs, expected = [], [], []

    def recorded(fn, *per_rank, **options):
        programs.append(cloudpickle.dumps(fn))  # now: what it refers to changes later in the note
        inputs.append(list(zip(*per_rank, strict=True)))
        expected.append(simulate(fn, *per_rank, **options))
        return expected[-1]

    def every_program(chosen, *mine):
        return [pickle.loads(programs[i])(*arguments) for i, arguments in zip(chosen, mine, strict=True)]

    monkeypatch.setattr(testing, "simulate", recorded)
    run_blocks(NOTES / "how-to" / "recipes.md")
    assert len(programs) >= 9
    for n in {len(of_ranks) for of_ranks in inputs}:
        chosen = [i for i, of_ranks in enumerate(inputs) if len(of_ranks) == n]
        ranks = gloo(partial(every_program, chosen), *(inputs[i] for i in chosen))
        for i, found in zip(chosen, zip(*ranks, strict=True), strict=True):
            torch.testing.assert_close(list(found), expected[i], rtol=1e-10, atol=1e-12, equal_nan=True)


# ── functions that no program of the notes calls: on ranks, and what they compute on one process ──────────────


def page(name):
    """Return what the block of the notes defines that has this function."""
    texts = [path.read_text(encoding="utf-8") for path in NOTES.rglob("*.md")]
    (code,) = [code for text in texts for _, code in blocks(text) if f"def {name}(" in code]
    names = {"__name__": "page", "torch": torch, "F": F, "dc": dc}
    exec(code, names)
    return SimpleNamespace(**names)


X, Y, SCORES = data(7, 4), data(7, 4, seed=1), data(7, seed=2).round(decimals=1)
COUNT = torch.tensor([2, 0, 1, 3, 0, 1, 4])
PROMPT, LABEL, STEP = torch.tensor([0, 1, 1, 0, 3, 0, 1]), COUNT % 3 == 1, COUNT // 2 % 2
IS_TOKEN = torch.arange(5) < COUNT[:, None] + 1


def balance(*layers):
    shares = [(x.topk(2).indices.flatten().bincount(minlength=4) / len(x), x.softmax(1).mean(0)) for x in layers]
    return sum(4 * (chosen * p).sum() for chosen, p in shares)


def advantages(rewards, prompt):
    of = [rewards[prompt == i] for i in prompt]
    return torch.stack(
        [(r - x.mean()) / ((x.std() if len(x) > 1 else 0) + 1e-4) for r, x in zip(rewards, of, strict=True)]
    )


def policy_losses(losses, mask):
    of = [row[m] for row, m in zip(losses, mask, strict=True)]
    return torch.stack([x.mean() for x in of]).mean(), torch.cat(of).mean(), sum(x.sum() / 9 for x in of) / len(of)


def kto(ratio, kl, desirable):
    z = kl.detach().mean().clamp(min=0)
    signed = torch.where(desirable, ratio - z, z - ratio)
    return (1 - torch.sigmoid(0.1 * signed)).mean()


@torch.no_grad()
def move(m, x):
    m["center"].mul_(0.9).add_(0.1 * x.mean(0))
    own = (x[:, None] - m["codes"]).norm(dim=2).argmin(1)
    for i in range(3):
        m["counts"][i] = 0.99 * m["counts"][i] + 0.01 * (own == i).sum()
        m["sums"][i] = 0.99 * m["sums"][i] + 0.01 * x[own == i].sum(0)
        m["codes"][i] = m["sums"][i] / m["counts"][i]


def auc(score, label):
    difference = score[label][:, None] - score[~label]
    return ((difference > 0).double() + (difference == 0).double() / 2).mean()


def noise_scale(recipe, m, x):
    if recipe:
        return recipe.noise_scale(dc.GradientAverager(m), [*m.parameters()], m(x).square().mean(), len(x))
    m(x).square().mean().backward()
    weights = (*m.parameters(),)
    gradients = [torch.autograd.grad(m(part).square().mean(), weights) for part in x.chunk(3)]
    gradients = torch.stack([torch.cat([g.flatten() for g in each]) for each in gradients])
    noise = 2 * gradients.var(0).sum()
    return noise, gradients.mean(0).square().sum() - noise / 6


def take_steps(recipe, m, x):
    """Two steps; without the recipe, on one process."""
    make = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    if recipe:
        recipe.step_in_backward(m.parameters(), make)
    optimizer = None if recipe else make(m.parameters())
    for _ in range(2):
        dc.nn.functional.token_mean(m(x).square()).backward()
        if optimizer:
            optimizer.step()
            optimizer.zero_grad()


def sparse(recipe, m, ids):
    dc.nn.functional.token_mean(m(ids).sin()).backward()
    if recipe:
        recipe.reduce_sparse(m.weight)
    rows, m.weight.grad = m.weight.grad.coalesce().indices(), m.weight.grad.to_dense()
    return rows


def rescaled(recipe, m, ids):
    if recipe:
        recipe.rescale(m, ids)
    return m(ids)


def late_interaction(recipe, x, documents, is_token):
    longest = int(is_token.sum(1).max()) if len(is_token) else 1  # of this rank's documents
    key = {"x": documents[:, :longest], "is_token": is_token[:, :longest]}
    return recipe.in_batch(x.view(len(x), 2, 2), key, [recipe.max_sim])


def in_batch(x, *scores):
    return sum(F.cross_entropy(s / 0.05, torch.arange(len(x))) for s in scores) / len(scores)


def cosines(x, y):
    return F.normalize(x) @ F.normalize(y).T


def max_sim(x, documents, is_token):
    of = [[(q @ d[m].T).amax(1).sum() for d, m in zip(documents, is_token, strict=True)] for q in x.view(-1, 2, 2)]
    return torch.stack([torch.stack(row) for row in of])


def by_step(x, step):
    return [x[step == s] for s in range(2) if s == 0 or (step == s).any()]


CODES = {"codes": data(3, 4, seed=3), "counts": torch.ones(3), "sums": data(3, 4, seed=3)}
#: What ranks compute with the functions beside the one of this name, what one process computes, data, and a module.
RECIPES = {
    "balance": (lambda r, x, y: r.balance([x, y], 2), balance, (X, Y)),
    "hardest": (lambda r, x: r.hardest(x, 3), lambda x: x.sort().values[-3:].mean(), (SCORES,)),
    "per_box": (
        lambda r, x, n: [r.per_box(x, int(boxes.sum())) for boxes in (n, 0 * n)],
        lambda x, n: [x.sum() / n.sum(), x.sum()],
        (X, COUNT),
    ),
    "advantages": (
        lambda r, x, prompt: r.advantages(x.detach(), prompt, 4),
        lambda x, prompt: advantages(x.detach(), prompt),
        (SCORES, PROMPT),
    ),
    "policy_loss": (
        lambda r, x, mask: [r.policy_loss(x, mask, kind, 9) for kind in ("GRPO", "DAPO", "Dr. GRPO")],
        policy_losses,
        (data(7, 5), IS_TOKEN),
    ),
    "kto": (
        lambda r, x, kl, mask: [r.kto(x, mask, kl), r.kto(x, mask, -kl)],
        lambda x, kl, mask: [kto(x, kl, mask), kto(x, -kl, mask)],
        (SCORES, data(7, seed=4), LABEL),
    ),
    "move_codes": (
        lambda r, m, x: [r.move_center(m["center"], x), r.move_codes(m["codes"], m["counts"], m["sums"], x)],
        move,
        (X,),
        nn.ParameterDict({"center": data(4), **CODES}),
    ),
    "auc": (lambda r, x, y: r.auc(x.round(), y), lambda x, y: auc(x.round(), y), (SCORES, LABEL)),  # with ties
    "quantile": (lambda r, x: r.quantile(x, 0.3), lambda x: x.quantile(0.3), (SCORES,)),
    "noise_scale": (noise_scale, partial(noise_scale, None), (X[:6],), nn.Linear(4, 2)),
    "step_in_backward": (take_steps, partial(take_steps, None), (X,), nn.Linear(4, 2)),
    "reduce_sparse": (sparse, partial(sparse, None), (COUNT,), nn.Embedding(6, 4, sparse=True)),
    "rescale": (rescaled, partial(rescaled, None), (COUNT,), nn.Embedding(6, 4, max_norm=1.0)),
    "update_bn": (
        lambda r, m, *x: r.update_bn(by_step(*x), m),
        lambda m, *x: torch.optim.swa_utils.update_bn(by_step(*x), m),
        (X, STEP),
        nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)),
    ),
    "prefix": (
        lambda r, x, y: r.in_batch(x, y, [r.prefix(2), r.prefix(4)]),
        lambda x, y: in_batch(x, cosines(x[:, :2], y[:, :2]), cosines(x, y)),
        (X, Y),
    ),
    "max_sim": (late_interaction, lambda x, *key: in_batch(x, max_sim(x, *key)), (X, data(7, 5, 2), IS_TOKEN)),
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_function_of_a_page(name):
    ours, single, batch, *module = RECIPES[name]
    ranks = [(2, 2, 2)] if name == "noise_scale" else [(7,), (4, 3), (5, 0, 2)]
    module = module[0] if module else None
    report = assert_matches_single_process(partial(ours, page(name)), single, batch, ranks=ranks, module=module)
    assert not report.notes  # of a number that is off by N
