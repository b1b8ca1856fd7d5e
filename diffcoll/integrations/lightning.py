"""Lightning's Trainer with `GradientAverager`.

note  notes/with/lightning.md
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from lightning.pytorch.strategies import DDPStrategy

from diffcoll.averaging.averager import GradientAverager


class GradientAveragerStrategy(DDPStrategy):
    """`Trainer(strategy=GradientAveragerStrategy())`: as `strategy="ddp"`, with `GradientAverager` in place of DDP.

    It is `trainer.strategy.averager`. The model is not wrapped; parameters may be unused.

    Args:
        options: arguments of `GradientAverager`. With `reduction="weighted"` nothing is to be divided by the number of
            micro-batches, but the Trainer does: multiply the loss by `accumulate_grad_batches`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.averager: GradientAverager | None = None
        self._options = options

    def configure_ddp(self) -> None:  # noqa: D102
        self.averager = GradientAverager(self.model, **self._options)

    def block_backward_sync(self) -> AbstractContextManager[None]:  # noqa: D102
        assert self.averager is not None
        return self.averager.no_sync()

    def teardown(self) -> None:  # noqa: D102
        if self.averager is not None:
            self.averager.detach()
        super().teardown()
