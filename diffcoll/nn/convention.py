"""What a loss returns on each rank, so that a reduction over the ranks gives the loss of the whole batch.

A loss of this package computes on each rank a *share*; the sum of the ranks' shares is the loss of the whole batch.

note  notes/which-convention.md
"""

from __future__ import annotations

import math
from copy import deepcopy
from typing import Any, Literal

import torch
from torch import Tensor, nn

from diffcoll.core import checks, expect
from diffcoll.core.errors import message, user_line
from diffcoll.core.groups import get_world_size, resolve
from diffcoll.engines.types import Group

RankReduction = Literal["mean", "sum"]


def check_rank_reduction(name: str, rank_reduction: object) -> None:
    """Raise unless `rank_reduction`, an argument of the loss `name`, is "mean" or "sum"."""
    remedy = '"mean" if gradients are averaged over the ranks (DDP, GradientAverager), "sum" if they are summed'
    expect.choice(name, "rank_reduction", rank_reduction, ("mean", "sum"), remedy)


def check_options(name: str, group: Group, rank_reduction: object, **options: object) -> None:
    """Raise unless `rank_reduction` is "mean" or "sum", and in check mode unless all ranks have the same options."""
    check_rank_reduction(name, rank_reduction)
    same_options(name, group, **options, rank_reduction=rank_reduction)


def same_options(name: str, group: Group, **options: object) -> None:
    """In check mode, raise unless all ranks have the same options.

    Ranks whose options differ send the same messages, and compute parts of different results. The numbers of tensors
    are not compared.
    """
    if checks.is_on() and not torch.compiler.is_compiling():
        facts = {key: "tensor" if isinstance(x, Tensor) else x for key, x in options.items()}
        words = ", ".join(f"{key}={x!r}" for key, x in facts.items())
        checks.compare(resolve(group, name), (name, facts), f"{name}({words}) at {user_line()}")


def returned(share: Tensor, rank_reduction: RankReduction, group: Group) -> Tensor:
    """Return N times the share for "mean", whose mean over the ranks is the whole loss; the share for "sum"."""
    return share * get_world_size(group) if rank_reduction == "mean" else share


class LossModule(nn.Module):
    """A loss as a module: keeps the keyword options as attributes and shows them.

    Args:
        learnable: make parameters of the numbers in `_LEARNED` that are among the options.
        options: of the function.
    """

    def __init__(self, *, learnable: bool = False, **options: Any) -> None:
        super().__init__()
        name_of_module = type(self).__name__
        check_rank_reduction(name_of_module, options["rank_reduction"])
        expect.flag(name_of_module, "learnable", learnable)
        self._learned = {name: _LEARNED[name] for name in options if learnable and name in _LEARNED}
        self._names = tuple(options)
        for name, value in options.items():
            learned = self._learned.get(name)
            if learned is None:
                setattr(self, name, value)
            else:
                setattr(self, learned, nn.Parameter(_start(name_of_module, name, value)))

    @property
    def options(self) -> dict[str, Any]:
        """The keyword options of the function."""
        return {name: self._option(name) for name in self._names}

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
        optional = ("group", "logit_scale", "logit_bias")
        shown = {name: value for name, value in self.options.items() if name not in optional or value is not None}
        read = {name for name, x in shown.items() if isinstance(x, Tensor) and x.numel() == 1 and not x.is_meta}
        values = {name: f"{x.item():g}" if name in read else repr(x) for name, x in shown.items()}
        learnable = {"learnable": True} if self._learned else {}
        return ", ".join(f"{name}={value}" for name, value in (values | learnable).items())


#: Options that may be parameters of a module → the parameter. Of factors it is the logarithm: they stay positive.
_LEARNED = {"temperature": "log_temperature", "logit_scale": "log_scale", "logit_bias": "logit_bias"}


def _start(module: str, name: str, value: Any) -> Tensor:
    """Return the value with which a learned option starts."""
    in_log = _LEARNED[name] != name
    if not expect.is_number(value) or not math.isfinite(value) or (in_log and value <= 0):
        expected = "a number above 0 to start with" if in_log else "a number to start with"
        remedy = "with learnable=False a parameter of your own may be passed"
        raise ValueError(message(module, name, repr(value), expected, remedy))
    return torch.tensor(math.log(value) if in_log else float(value))
