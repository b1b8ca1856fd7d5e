"""Losses as modules. An option is stated once, as a keyword argument of the loss's function.

note  notes/training/losses.md
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from inspect import Parameter, Signature, signature
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from typing_extensions import TypedDict, Unpack

from diffcoll.core import expect
from diffcoll.core.errors import message
from diffcoll.engines.types import Group
from diffcoll.nn.convention import RankReduction, check_rank_reduction

#: How ranks get the other ranks' features: all at once, or one rank's block after the other.
Exchange = Literal["gather", "ring"]
#: What is done over the tokens.
Reduction = Literal["mean", "sum", "none"]
#: What one ratio of a segmentation is of.
Dims = int | Sequence[int] | Literal["per class"] | None

#: Options that may be parameters of a module → the parameter. Of factors it is the logarithm: they stay positive.
_LEARNED = {"temperature": "log_temperature", "logit_scale": "log_scale", "logit_bias": "logit_bias"}


class LossOptions(TypedDict, total=False):
    """The options of all losses, for type checkers. Which of them a module has, its signature says."""

    temperature: Tensor | float
    logit_scale: Tensor | float | None
    logit_bias: Tensor | float | None
    learnable: bool
    normalize: bool
    decoupled: bool
    label_smoothing: float
    symmetric: bool
    only_rows_with_positives: bool
    smooth: float
    dims: Dims
    alpha: float
    beta: float
    lambd: float
    eps: float
    sim_coeff: float
    std_coeff: float
    cov_coeff: float
    num_slices: int
    num_points: int
    t_max: float
    z_loss: float
    ignore_index: int
    reduction: Reduction
    group: Group
    rank_reduction: RankReduction
    chunk_size: int | None
    exchange: Exchange


class LossModule(nn.Module):
    """A loss as a module: keeps the options of the loss's function as attributes and shows them."""

    __signature__: ClassVar[Signature | None] = None
    #: The options and their defaults.
    _defaults: ClassVar[dict[str, Any]]
    _starts: ClassVar[Mapping[str, float]]

    def __init_subclass__(cls, of: Callable[..., Tensor] | None = None, starts: Mapping[str, float] = {}) -> None:
        """Give the module the keyword arguments of a loss that `forward` does not take, and `learnable`.

        Args:
            of: the function of the loss; None: the class inherits the options.
            starts: arguments of `forward` that are options too, with the value that they start with if learned.
        """
        super().__init_subclass__()
        if of is None:
            if "__init__" in vars(cls):
                cls.__signature__ = None  # inspect reads the signature of this __init__ then
            return
        called, keyword = signature(cls.forward).parameters, Parameter.KEYWORD_ONLY
        options = [Parameter(name, keyword, default=None, annotation="Tensor | float | None") for name in starts]
        options += [option for name, option in signature(of).parameters.items() if name not in called]
        if any(option.name in _LEARNED for option in options):
            options.append(Parameter("learnable", keyword, default=False, annotation="bool"))
        cls.__signature__ = Signature(options)
        cls._defaults, cls._starts = {option.name: option.default for option in options}, starts

    def __init__(self, **options: Unpack[LossOptions]) -> None:
        super().__init__()
        module = type(self).__name__
        for name in options.keys() - self._defaults:
            expected = f"one of its options: {', '.join(self._defaults)}"
            raise TypeError(message(module, name, "an option that this loss does not have", expected))
        values: dict[str, Any] = {**self._defaults, **options}
        learnable = expect.flag(module, "learnable", values.pop("learnable", False))
        if "rank_reduction" in values:  # not that of a loss that is the same on all ranks
            check_rank_reduction(module, values["rank_reduction"])
        # A number that no module learns is a coefficient.
        numbers = {name for name, x in self._defaults.items() if isinstance(x, float)} - _LEARNED.keys()
        expect.not_negative(module, **{name: values[name] for name in values if name in numbers})
        self._learned = {name: _LEARNED[name] for name in values if learnable and name in _LEARNED}
        for name, value in values.items():
            if name in self._learned:
                start = self._starts.get(name) if value is None else value
                setattr(self, self._learned[name], nn.Parameter(_start(module, name, start)))
            else:
                setattr(self, name, value)

    @property
    def options(self) -> dict[str, Any]:
        """The keyword options of the function."""
        return {name: self._option(name) for name in self._defaults if name != "learnable"}

    def _option(self, name: str) -> Any:
        learned = self._learned.get(name, name)
        value = getattr(self, learned)
        return value if learned == name else value.exp()

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse to set an option of which the module has a parameter: the loss would not use what was set."""
        if name in self.__dict__.get("_learned", ()) and name != self._learned[name]:
            parameter, expected = self._learned[name], "it learned, with learnable=True"
            remedy = f"set the parameter, module.{parameter}.data.fill_(math.log({name}))"
            raise AttributeError(message(type(self).__name__, name, repr(value), expected, remedy))
        super().__setattr__(name, value)

    def _called_with(self, **given: Tensor | float | None) -> dict[str, Any]:
        """Return the options, with scales and biases from the call where the module has none."""
        options = self.options
        for name, value in given.items():
            if (value is None) == (options[name] is None):
                got = "none" if value is None else "one in the call and one of the module"
                remedy = f"pass {name}, make the module with {name}=…, or with learnable=True"
                raise ValueError(message(type(self).__name__, name, got, "one", remedy))
            options[name] = options[name] if value is None else value
        return options

    def __deepcopy__(self, memo: dict[int, Any]) -> LossModule:
        """Copy all but the group, which the copy uses too."""
        memo[id(self.group)] = self.group
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update(deepcopy(self.__dict__, memo))
        return copied

    def extra_repr(self) -> str:
        """Show the options, the group only if there is one."""
        optional = ("group", *self._starts)
        shown = {name: value for name, value in self.options.items() if name not in optional or value is not None}
        read = {name for name, x in shown.items() if isinstance(x, Tensor) and x.numel() == 1 and not x.is_meta}
        values = {name: f"{x.item():g}" if name in read else repr(x) for name, x in shown.items()}
        learnable = {"learnable": True} if self._learned else {}
        return ", ".join(f"{name}={value}" for name, value in (values | learnable).items())


def _start(module: str, name: str, value: Any) -> Tensor:
    """Return the value with which a learned option starts."""
    in_log = _LEARNED[name] != name
    if not expect.is_number(value) or not math.isfinite(value) or (in_log and value <= 0):
        expected = "a number above 0 to start with" if in_log else "a number to start with"
        remedy = "with learnable=False a parameter of your own may be passed"
        raise ValueError(message(module, name, repr(value), expected, remedy))
    return torch.tensor(math.log(value) if in_log else float(value))
