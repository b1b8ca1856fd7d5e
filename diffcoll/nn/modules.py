"""The losses as modules, which hold the options of the function; and modules of a group.

note  notes/training/losses.md
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any, ClassVar

from torch import Tensor

from diffcoll.core.arguments import Sizes
from diffcoll.engines.types import Group
from diffcoll.nn import functional
from diffcoll.nn.dice import Dims
from diffcoll.nn.in_group import InGroup
from diffcoll.nn.vocab_parallel import Reduction


class LossModule(InGroup):
    """Its arguments are the options of a function; one that is an `nn.Parameter` becomes a parameter of the module.

    `forward` takes the function's other arguments, by position or keyword. An option of None that the function
    requires, such as CLIP's scale, is one of these.
    """

    _function: ClassVar[Callable[..., Tensor]]

    def __init_subclass__(cls, function: Callable[..., Tensor] | None = None) -> None:
        if function is not None:
            cls._function = staticmethod(function)

    def __init__(self, arguments: dict[str, Any]) -> None:
        """Keep the arguments of the subclass, its `locals()`."""
        super().__init__()
        options = {name: value for name, value in arguments.items() if name not in ("self", "__class__")}
        of_function = signature(self._function).parameters
        #: Each option, and whether the function requires it.
        self._options = {name: of_function[name].default is of_function[name].empty for name in options}
        for name, value in options.items():
            setattr(self, name, value)

    def forward(self, *tensors: Any, **more: Any) -> Tensor:
        """Return the loss, as the function does."""
        values = {name: getattr(self, name) for name in self._options}
        options = {name: x for name, x in values.items() if x is not None or not self._options[name]}
        return self._function(*tensors, **options, **more)

    def extra_repr(self) -> str:
        """Show the options that are not the default."""
        defaults, shown = signature(type(self)).parameters, []
        for name in self._options:
            value = getattr(self, name)
            if isinstance(value, Tensor) or value != defaults[name].default:
                shown.append(f"{name}={tuple(value.shape) if isinstance(value, Tensor) else repr(value)}")
        return ", ".join(shown)


class CLIPLoss(LossModule, function=functional.clip_loss):
    """`clip_loss` as a module.

    The scale, not its logarithm, is passed to `forward`, as open_clip does, or here: a number, or an `nn.Parameter`.
    Then the module is a part of the model whose gradients are averaged.

    >>> import torch
    >>> from diffcoll.nn import CLIPLoss
    >>> CLIPLoss(chunk_size=512)
    CLIPLoss(chunk_size=512)
    >>> [name for name, _ in CLIPLoss(torch.nn.Parameter(torch.tensor(14.3))).named_parameters()]
    ['logit_scale']
    """

    def __init__(
        self,
        logit_scale: Tensor | float | None = None,
        *,
        normalize: bool = False,
        chunk_size: int | None = None,
        sizes: Sizes = "auto",
        group: Group = None,
    ) -> None:
        super().__init__(locals())


class SigLIPLoss(LossModule, function=functional.siglip_loss):
    """`siglip_loss` as a module. Scale and bias are passed to `forward`, or here: a number or an `nn.Parameter` each.

    >>> from diffcoll.nn import SigLIPLoss
    >>> SigLIPLoss(10.0, -10.0)
    SigLIPLoss(logit_scale=10.0, logit_bias=-10.0)
    """

    def __init__(
        self,
        logit_scale: Tensor | float | None = None,
        logit_bias: Tensor | float | None = None,
        *,
        normalize: bool = False,
        chunk_size: int | None = None,
        sizes: Sizes = "auto",
        group: Group = None,
    ) -> None:
        super().__init__(locals())


class InfoNCELoss(LossModule, function=functional.info_nce_loss):
    """`info_nce_loss` as a module; `forward` takes the negatives third.

    >>> from diffcoll.nn import InfoNCELoss
    >>> InfoNCELoss(decoupled=True)
    InfoNCELoss(decoupled=True)
    """

    def __init__(
        self,
        temperature: Tensor | float = 0.1,
        *,
        false_negative_margin: float | None = None,
        normalize: bool = True,
        decoupled: bool = False,
        chunk_size: int | None = None,
        sizes: Sizes = "auto",
        group: Group = None,
    ) -> None:
        super().__init__(locals())


class NTXentLoss(LossModule, function=functional.nt_xent_loss):
    """`nt_xent_loss` as a module.

    >>> from diffcoll.nn import NTXentLoss
    >>> NTXentLoss(0.2)
    NTXentLoss(temperature=0.2)
    """

    def __init__(
        self,
        temperature: Tensor | float = 0.5,
        *,
        normalize: bool = True,
        decoupled: bool = False,
        chunk_size: int | None = None,
        sizes: Sizes = "auto",
        group: Group = None,
    ) -> None:
        super().__init__(locals())


class SupConLoss(LossModule, function=functional.supcon_loss):
    """`supcon_loss` as a module.

    >>> from diffcoll.nn import SupConLoss
    >>> SupConLoss(normalize=False).temperature
    0.1
    """

    def __init__(
        self,
        temperature: Tensor | float = 0.1,
        *,
        normalize: bool = True,
        chunk_size: int | None = None,
        sizes: Sizes = "auto",
        group: Group = None,
    ) -> None:
        super().__init__(locals())


class BarlowTwinsLoss(LossModule, function=functional.barlow_twins_loss):
    """`barlow_twins_loss` as a module.

    >>> from diffcoll.nn import BarlowTwinsLoss
    >>> BarlowTwinsLoss(0.01)
    BarlowTwinsLoss(lambda_param=0.01)
    """

    def __init__(self, lambda_param: float = 5e-3, *, eps: float = 1e-5, group: Group = None) -> None:
        super().__init__(locals())


class VICRegLoss(LossModule, function=functional.vicreg_loss):
    """`vicreg_loss` as a module.

    >>> from diffcoll.nn import VICRegLoss
    >>> VICRegLoss(nu_param=2.0)
    VICRegLoss(nu_param=2.0)
    """

    def __init__(
        self,
        lambda_param: float = 25.0,
        mu_param: float = 25.0,
        nu_param: float = 1.0,
        *,
        eps: float = 1e-4,
        group: Group = None,
    ) -> None:
        super().__init__(locals())


class DiceLoss(LossModule, function=functional.dice_loss):
    """`dice_loss` as a module.

    >>> from diffcoll.nn import DiceLoss
    >>> DiceLoss(dims="per class")
    DiceLoss(dims='per class')
    """

    def __init__(self, *, smooth: float = 1.0, dims: Dims = None, group: Group = None) -> None:
        super().__init__(locals())


class IoULoss(LossModule, function=functional.iou_loss):
    """`iou_loss` as a module.

    >>> from diffcoll.nn import IoULoss
    >>> IoULoss(smooth=0.0)
    IoULoss(smooth=0.0)
    """

    def __init__(self, *, smooth: float = 1.0, dims: Dims = None, group: Group = None) -> None:
        super().__init__(locals())


class TverskyLoss(LossModule, function=functional.tversky_loss):
    """`tversky_loss` as a module.

    >>> from diffcoll.nn import TverskyLoss
    >>> TverskyLoss(alpha=0.3, beta=0.7)
    TverskyLoss(alpha=0.3, beta=0.7)
    """

    def __init__(
        self, *, alpha: float = 0.5, beta: float = 0.5, smooth: float = 1.0, dims: Dims = None, group: Group = None
    ) -> None:
        super().__init__(locals())


class KoLeoLoss(LossModule, function=functional.koleo_loss):
    """`koleo_loss` as a module.

    >>> from diffcoll.nn import KoLeoLoss
    >>> KoLeoLoss(normalize=False)
    KoLeoLoss(normalize=False)
    """

    def __init__(
        self, *, eps: float = 1e-8, normalize: bool = True, sizes: Sizes = "auto", group: Group = None
    ) -> None:
        super().__init__(locals())


class SIGRegLoss(LossModule, function=functional.sigreg_loss):
    """`sigreg_loss` as a module; `forward` takes the features and the directions.

    >>> from diffcoll.nn import SIGRegLoss
    >>> SIGRegLoss(num_points=9)
    SIGRegLoss(num_points=9)
    """

    def __init__(self, *, num_points: int = 17, t_max: float = 3.0, group: Group = None) -> None:
        super().__init__(locals())


class VocabParallelCrossEntropy(LossModule, function=functional.vocab_parallel_cross_entropy):
    """`vocab_parallel_cross_entropy` as a module without parameters; `forward` takes the rows of the output layer.

    >>> import torch, diffcoll as dc
    >>> loss = dc.nn.VocabParallelCrossEntropy(label_smoothing=0.1, chunk_size=4)
    >>> loss
    VocabParallelCrossEntropy(label_smoothing=0.1, chunk_size=4)
    >>> hidden, layer, target = torch.randn(6, 3), torch.nn.Linear(3, 10), torch.arange(6)
    >>> whole = torch.nn.functional.cross_entropy(layer(hidden), target, label_smoothing=0.1)
    >>> torch.testing.assert_close(loss(hidden, layer.weight, target, bias_shard=layer.bias), whole)
    """

    def __init__(
        self,
        *,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        chunk_size: int | None = None,
        sizes: Sizes = "auto",
        group: Group = None,
    ) -> None:
        super().__init__(locals())
