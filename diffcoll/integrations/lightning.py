"""Lightning's Trainer with `GradientAverager`.

note  notes/with/lightning.md
"""

from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from diffcoll.averaging.averager import GradientAverager


class GradientAveragerStrategy(DDPStrategy):
    """`Trainer(strategy=GradientAveragerStrategy())`: as `strategy="ddp"`, with `GradientAverager` in place of DDP.

    It is `trainer.strategy.averager`. Each backward whose gradients the Trainer steps on is a block.

    Args:
        process_group_backend: of torch.distributed; None: Lightning's choice for the accelerator.
        timeout: of the process group; None: PyTorch's.
        options: arguments of `GradientAverager`.
    """

    def __init__(
        self, *, process_group_backend: str | None = None, timeout: timedelta | None = None, **options: Any
    ) -> None:
        limits = {} if timeout is None else {"timeout": timeout}
        super().__init__(process_group_backend=process_group_backend, **limits)
        self.averager: GradientAverager | None = None
        self._options, self._is_accumulating = options, False

    def configure_ddp(self) -> None:  # noqa: D102
        assert self.model is not None
        self.averager = GradientAverager(self.model, **self._options)

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:  # noqa: D102
        self._is_accumulating = True
        try:
            yield
        finally:
            self._is_accumulating = False

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:  # noqa: D102
        module, plugin = self.lightning_module, self.precision_plugin
        assert module is not None and self.averager is not None
        self.pre_backward(closure_loss)
        closure_loss = plugin.pre_backward(closure_loss, module)
        with nullcontext() if self._is_accumulating else self.averager.reduce():  # before on_after_backward
            plugin.backward(closure_loss, module, optimizer, *args, **kwargs)
        closure_loss = plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    def teardown(self) -> None:  # noqa: D102
        if self.averager is not None:
            self.averager.close()
        super().teardown()
