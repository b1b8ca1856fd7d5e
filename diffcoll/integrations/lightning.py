"""Lightning's Trainer with `GradientAverager`.

note  notes/with/lightning.md
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.strategies import DDPStrategy

from diffcoll.averaging.averager import GradientAverager


class GradientAveragerStrategy(DDPStrategy):
    """`Trainer(strategy=GradientAveragerStrategy())`: as `strategy="ddp"`, with `GradientAverager` in place of DDP.

    It is `trainer.strategy.averager`. Args: those of `GradientAverager`. With `reduction="weighted"` multiply the loss
    by `accumulate_grad_batches`, by which the Trainer divides.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.averager: GradientAverager | None = None
        self._options = options

    def configure_ddp(self) -> None:  # noqa: D102
        assert self.model is not None
        self.averager = GradientAverager(self.model, **self._options)

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:  # noqa: D102
        assert self.averager is not None
        with self.averager.no_sync():
            yield

    def teardown(self) -> None:  # noqa: D102
        if self.averager is not None:
            self.averager.detach()
        super().teardown()
