"""Modules of losses that hold scale, bias or temperature."""

import copy
import inspect
import math
import pickle
import pydoc

import pytest
import torch
from runs import refusal
from torch import nn

import diffcoll.nn as nn_
from diffcoll.nn import CLIPLoss, InfoNCELoss, SigLIPLoss, functional
from diffcoll.nn.functional import clip_loss, info_nce_loss, siglip_loss
from diffcoll.nn.loss_module import LossOptions
from diffcoll.testing import assert_matches_single_process

X, Y = (torch.randn(8, 3, generator=torch.Generator().manual_seed(k)).double() for k in (1, 2))
LEARNABLE = {
    "clip": (
        lambda: CLIPLoss(learnable=True).double(),
        lambda x, y, p: clip_loss(x, y, p["log_scale"].exp()),
        {"log_scale": torch.tensor(1 / 0.07).log()},
    ),
    "siglip": (
        lambda: SigLIPLoss(learnable=True, logit_scale=3.0, normalize=True).double(),
        lambda x, y, p: siglip_loss(x, y, p["log_scale"].exp(), p["logit_bias"], normalize=True),
        {"log_scale": torch.tensor(3.0).log(), "logit_bias": torch.tensor(-10.0)},
    ),
    "info_nce": (
        lambda: InfoNCELoss(learnable=True, temperature=0.2, chunk_size=3).double(),
        lambda x, y, p: info_nce_loss(x, y, temperature=p["log_temperature"].exp()),
        {"log_temperature": torch.tensor(0.2).log()},
    ),
}


@pytest.mark.parametrize("name", LEARNABLE)
def test_learnable(name):
    """On uneven ranks with one process on the whole batch, and with the function, also after an optimizer's step."""
    make, function, starts = LEARNABLE[name]
    module = make()
    assert {key: pytest.approx(p.item()) for key, p in module.named_parameters()} == {
        key: start.item() for key, start in starts.items()
    }
    other = copy.deepcopy(module)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss = module(X, Y)
        loss.backward()
        parameters = {key: p.detach().clone().requires_grad_() for key, p in module.named_parameters()}
        expected = function(X, Y, parameters)
        expected.backward()
        torch.testing.assert_close(loss, expected)
        for key, p in module.named_parameters():
            torch.testing.assert_close(p.grad, parameters[key].grad)
        optimizer.step()
    assert all(not a.equal(b) for a, b in zip(module.parameters(), other.parameters(), strict=True))
    assert_matches_single_process(module, module, (X, Y), module=module, sizes=[(4, 4), (5, 0, 3)], on=["simulated"])
    make().load_state_dict(module.state_dict())


def test_held_and_not_learned():
    """A number, or a parameter of the user's; by default no parameter."""
    mine = nn.Parameter(torch.tensor(4.0))
    assert not [*CLIPLoss().parameters(), *SigLIPLoss().parameters(), *InfoNCELoss().parameters()]
    assert [*CLIPLoss(logit_scale=mine).parameters()] == [mine]
    torch.testing.assert_close(CLIPLoss(logit_scale=4.0)(X, Y), clip_loss(X, Y, 4.0))
    torch.testing.assert_close(CLIPLoss(logit_scale=mine)(X, Y), clip_loss(X, Y, 4.0))
    torch.testing.assert_close(SigLIPLoss(logit_bias=-1.0)(X, Y, 2.0), siglip_loss(X, Y, 2.0, -1.0))


def test_how_they_are_shown():
    assert repr(CLIPLoss(logit_scale=4.0, learnable=True)) == (
        "CLIPLoss(logit_scale=4, normalize=False, label_smoothing=0.0, rank_reduction='mean', chunk_size=None, "
        "exchange='gather', learnable=True)"
    )
    assert "temperature=0.2, normalize=True" in repr(InfoNCELoss(temperature=0.2, learnable=True))


@pytest.mark.parametrize(
    ("module", "loss", "of_the_module", "of_the_call"),
    [
        (CLIPLoss, clip_loss, {"logit_scale": None, "learnable": False}, {"labels", "ids"}),
        (SigLIPLoss, siglip_loss, {"logit_scale": None, "logit_bias": None, "learnable": False}, {"labels", "ids"}),
        (InfoNCELoss, info_nce_loss, {"learnable": False}, {"negatives", "targets", "labels", "ids"}),
        (nn_.NTXentLoss, functional.nt_xent_loss, {"learnable": False}, {"ids"}),
        (nn_.SupConLoss, functional.supcon_loss, {"learnable": False}, {"ids"}),
        (nn_.DiceLoss, functional.dice_loss, {}, set()),
        (nn_.IoULoss, functional.iou_loss, {}, set()),
        (nn_.TverskyLoss, functional.tversky_loss, {}, set()),
        (nn_.BarlowTwinsLoss, functional.barlow_twins_loss, {}, set()),
        (nn_.VICRegLoss, functional.vicreg_loss, {}, set()),
        (nn_.KoLeoLoss, functional.koleo_loss, {}, set()),
        (nn_.SIGRegLoss, functional.sigreg_loss, {}, {"seed"}),
        (nn_.VocabParallelCrossEntropy, functional.vocab_parallel_cross_entropy, {}, {"bias_shard"}),
    ],
)
def test_options_of_a_module_are_those_of_the_loss(module, loss, of_the_module, of_the_call):
    """What `help` shows, what type checkers accept, and what the module accepts."""
    function = {name: p for name, p in inspect.signature(loss).parameters.items() if p.kind is p.KEYWORD_ONLY}
    shown = inspect.signature(module).parameters
    assert {name: p.default for name, p in shown.items()} == of_the_module | {
        name: p.default for name, p in function.items() if name not in of_the_call
    }
    types = {name: annotation.__forward_arg__ for name, annotation in LossOptions.__annotations__.items()}
    assert all(p.kind is p.KEYWORD_ONLY and p.annotation == types[name] for name, p in shown.items())
    text = pydoc.plain(pydoc.render_doc(module))
    assert all(f"{name}: '{p.annotation}' = {p.default!r}" in text for name, p in shown.items())
    assert repr(module(**{name: p.default for name, p in shown.items()})) == repr(module())


def test_a_subclass_shows_its_own_arguments():
    class Fixed(CLIPLoss):
        def __init__(self, scale: float):
            super().__init__(logit_scale=scale, chunk_size=3)

    class Renamed(CLIPLoss):
        pass

    assert list(inspect.signature(Fixed).parameters) == ["scale"]
    assert inspect.signature(Renamed) == inspect.signature(CLIPLoss)
    torch.testing.assert_close(Fixed(4.0)(X, Y), clip_loss(X, Y, 4.0))
    assert "chunk_size=3" in repr(copy.deepcopy(Fixed(4.0)))


@pytest.mark.parametrize("module", [nn_.NTXentLoss, nn_.SupConLoss])
def test_learnable_temperature_of_views(module):
    loss = module(learnable=True, temperature=0.2).double()
    assert [name for name, _ in loss.named_parameters()] == ["log_temperature"]
    tensors = (X, Y) if module is nn_.NTXentLoss else (X, torch.tensor([0, 1, 2, 0, 1, 2, 3, 0]))
    torch.testing.assert_close(loss(*tensors), module(temperature=0.2)(*tensors))
    loss(*tensors).backward()
    assert loss.log_temperature.grad.abs() > 0


WRONG = [
    (
        lambda: CLIPLoss(chunksize=3),
        TypeError,
        "CLIPLoss: chunksize: got an option that this loss does not have, expected one of its options: logit_scale, "
        "normalize, label_smoothing, group, rank_reduction, chunk_size, exchange, learnable",
    ),
    (
        lambda: nn_.VocabParallelCrossEntropy(rank_reduction="mean"),
        TypeError,
        "VocabParallelCrossEntropy: rank_reduction: got an option that this loss does not have, expected one of its "
        "options: label_smoothing, z_loss, ignore_index, reduction, chunk_size, group",
    ),
    (
        lambda: nn_.VocabParallelCrossEntropy(z_loss=-1.0),
        ValueError,
        "VocabParallelCrossEntropy: z_loss: got -1.0, expected a finite non-negative number",
    ),
    (lambda: nn_.DiceLoss(learnable=True), TypeError, "DiceLoss: learnable: got an option that this loss does not"),
    (lambda: CLIPLoss()(X, Y), ValueError, "CLIPLoss: logit_scale: got none, expected one; pass logit_scale, make the"),
    (
        lambda: CLIPLoss(learnable=True)(X, Y, 3.0),
        ValueError,
        "CLIPLoss: logit_scale: got one in the call and one of the module, expected one",
    ),
    (lambda: SigLIPLoss(logit_scale=3.0)(X, Y), ValueError, "SigLIPLoss: logit_bias: got none, expected one"),
    (lambda: CLIPLoss(learnable=1), TypeError, "CLIPLoss: learnable: got int, expected True or False"),
    (
        lambda: CLIPLoss(logit_scale=0.0, learnable=True),
        ValueError,
        "CLIPLoss: logit_scale: got 0.0, expected a number above 0 to start with; with learnable=False a parameter of",
    ),
    (
        lambda: InfoNCELoss(temperature=nn.Parameter(torch.tensor(0.1)), learnable=True),
        ValueError,
        "InfoNCELoss: temperature: got Parameter containing",
    ),
    (
        lambda: setattr(InfoNCELoss(learnable=True), "temperature", 0.2),
        AttributeError,
        "InfoNCELoss: temperature: got 0.2, expected it learned, with learnable=True; set the parameter, "
        "module.log_temperature.data.fill_(math.log(temperature))",
    ),
    (lambda: setattr(SigLIPLoss(learnable=True), "logit_scale", 3), AttributeError, "logit_scale: got 3, expected it"),
    (
        lambda: InfoNCELoss(temperature=math.inf, learnable=True),
        ValueError,
        "temperature: got inf, expected a number ab",
    ),
    (lambda: SigLIPLoss(logit_bias=math.nan, learnable=True), ValueError, "logit_bias: got nan, expected a number to"),
    (lambda: SigLIPLoss(logit_bias="0", learnable=True), ValueError, "logit_bias: got '0', expected a number to start"),
]


@pytest.mark.parametrize(("call", "error", "text"), WRONG)
def test_wrong_arguments(call, error, text):
    assert text in refusal(error, call)


def test_an_option_that_is_no_parameter_may_be_set():
    loss = InfoNCELoss()
    loss.temperature = 0.7
    torch.testing.assert_close(loss(X, Y), InfoNCELoss(temperature=0.7)(X, Y))


SUMS = [
    (nn_.DiceLoss, functional.dice_loss, {"smooth": 0.1, "dims": "per class", "rank_reduction": "sum"}),
    (nn_.IoULoss, functional.iou_loss, {"smooth": 0.2, "dims": (1,)}),
    (nn_.TverskyLoss, functional.tversky_loss, {"alpha": 0.2, "beta": 0.9, "smooth": 0.3, "dims": 0}),
    (nn_.BarlowTwinsLoss, functional.barlow_twins_loss, {"lambd": 0.1, "eps": 1e-3, "rank_reduction": "sum"}),
    (nn_.VICRegLoss, functional.vicreg_loss, {"sim_coeff": 2.0, "std_coeff": 3.0, "cov_coeff": 4.0, "eps": 0.1}),
]


@pytest.mark.parametrize(("module", "loss", "options"), SUMS)
def test_losses_of_sums(module, loss, options):
    made, xs = module(**options), (X.sigmoid(), Y.sigmoid())
    assert made(*xs) == loss(*xs, **options)
    assert repr(pickle.loads(pickle.dumps(made))) == repr(made)
    assert all(f"{name}={value!r}" in repr(made) for name, value in options.items())
    assert isinstance(made, nn.Module) and not list(made.parameters())
    for wrong in ({"rank_reduction": "none"}, {"smooth" if "smooth" in options else "eps": -1}):
        [(name, value)] = wrong.items()
        assert refusal(ValueError, module, **wrong).startswith(f"{module.__name__}: {name}: got {value!r}")
