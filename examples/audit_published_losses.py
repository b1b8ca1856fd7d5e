"""Audit of published losses: are their gradients right on several ranks?

    pip install '.[audit]'
    python examples/audit_published_losses.py                # one line for each loss
    python examples/audit_published_losses.py ClipLoss       # the full reports of losses with this name

Each loss is called as its users call it, with its own torch.distributed calls, on simulated ranks, and compared with
the loss of the whole batch on one process. Packages that are not installed are skipped. The extra installs the first
four; solo-learn (`--no-deps`: it asks for an old PyTorch), inf-cl and fairscale are audited if they are there.
Sharded layers and models of Megatron-core, Transformers and torchtitan follow, which audit_sharded_layers.py and
audit_sharded_models.py beside this file audit; of these packages the extra installs the first two.

What it found, on torch 2.13:

    loss                                           features   parameters     uneven  empty   cause
  open-clip-torch 3.3.0
    ClipLoss()                                     sum        mean           raises  raises  no reduction
    ClipLoss(local_loss)                           off by 0.6 mean           raises  raises  graph cut
    ClipLoss(gather_with_grad)                     mean       mean           raises  raises
    ClipLoss(local_loss, gather_with_grad)         mean       mean           raises  raises
    SigLipLoss(bidir)                              mean       mean           raises  raises
    SigLipLoss(shift)                              mean       mean           raises  raises
    SigLipLoss(reduce)                             mean       mean           raises  raises
    SigLipLoss(gather)                             mean       mean           raises  raises
  lightly 1.6.0
    DCLLoss                                        mean       –              raises  raises
    DCLWLoss                                       off by 4   –              raises  raises  local statistics
    VICRegLoss                                     mean       –              raises  raises
    BarlowTwinsLoss                                off by 8   –              wrong   wrong   local statistics
    NTXentLoss                                     mean       –              raises  raises
  pytorch-metric-learning 2.9.0
    DistributedLossWrapper(NTXentLoss)             mean       –              raises  raises  value scaled
    DistributedLossWrapper(NTXentLoss, efficient)  off by 4   –              raises  raises  value scaled, local slice
    DistributedLossWrapper(SupConLoss)             mean       –              raises  raises  value scaled
    DistributedLossWrapper(TripletMarginLoss)      mean       –              raises  raises  value scaled
    DistributedLossWrapper(MultiSimilarityLoss)    mean       –              raises  raises  value scaled
    DistributedLossWrapper(ProxyAnchorLoss)        mean       mean, N times  raises  raises  value scaled, reduced twice
  sentence-transformers 6.2.0
    MultipleNegativesRankingLoss                   mean       –              raises  raises

The features and parameters have exact gradients if those of the ranks are summed, or averaged; else the error is given.
The last two columns are runs with other numbers of rows on each rank, and with one rank without rows.
"""

import importlib
import importlib.metadata
import importlib.util
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import audit_sharded_layers
import audit_sharded_models
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from diffcoll.testing import GradientMismatchError, Report, assert_matches_single_process

SIZES = [(4, 4), (3, 3, 3), (5, 3), (5, 0, 3)]  # rows of each rank: equal, uneven, one rank without rows


@dataclass
class Loss:
    """A published loss or layer, on N ranks and on one process."""

    name: str
    distributed: Callable[..., Any]
    single: Callable[..., Any]
    batch: Callable[[int], Any]
    module: nn.Module | None = None
    rank_reduction: str = ""
    order: int = 1

    def audit(self) -> Report:
        """Compare them; by default with the gradients averaged, or summed if that is right."""
        averaged = self.under(self.rank_reduction or "mean")
        summed = averaged if averaged.ok or self.rank_reduction else self.under("sum")
        return summed if summed.ok else averaged

    def under(self, rank_reduction: str) -> Report:
        """Compare them under one reduction over ranks."""
        functions = (self.distributed, self.single)
        if self.module is not None:  # it is in their closures, and copied with them
            functions = tuple(lambda module, *batch, f=f: f(*batch) for f in functions)  # type: ignore[assignment]
        more: dict[str, Any] = {"module": self.module, "order": self.order, "dtype": None}
        try:
            return assert_matches_single_process(
                *functions, self.batch, ranks=SIZES, rank_reduction=rank_reduction, on=["simulated"], **more
            )
        except GradientMismatchError as error:
            return error.report


def load(name: str) -> Any:
    """Import one file of an installed package, without the `__init__` of its packages, which import models."""
    package, *rest = name.split(".")
    for part in rest:
        if package not in sys.modules:
            spec = importlib.util.find_spec(package)
            if spec is None:
                raise ModuleNotFoundError(f"{package} is not installed")
            sys.modules[package] = importlib.util.module_from_spec(spec)
        package = f"{package}.{part}"
    return importlib.import_module(name)


# ── data and parameters ──────────────────────────────────────────────────────────────────────────────────


def two_views(rows: int) -> tuple[Tensor, ...]:
    torch.manual_seed(rows)
    return torch.randn(rows, 4, dtype=torch.double), torch.randn(rows, 4, dtype=torch.double)


def normalized(rows: int) -> tuple[Tensor, ...]:
    return tuple(F.normalize(x) for x in two_views(rows))


def normalized_float(rows: int) -> tuple[Tensor, ...]:
    return tuple(x.float() for x in normalized(rows))


def two_views_float(rows: int) -> tuple[Tensor, ...]:
    return tuple(x.float() for x in two_views(rows))


def labelled(rows: int) -> tuple[Tensor, ...]:
    return two_views(rows)[0], torch.arange(rows) % 3


def images(rows: int) -> Tensor:
    torch.manual_seed(rows)
    return torch.randn(rows, 3, 2, 2, dtype=torch.double)


class Scale(nn.Module):
    """The parameters of a contrastive loss: logit_scale and, if it has one, logit_bias."""

    def __init__(self, *bias: float, dtype: torch.dtype = torch.double) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor(2.0, dtype=dtype))
        for value in bias:
            self.logit_bias = nn.Parameter(torch.tensor(value, dtype=dtype))


def world() -> dict[str, int]:
    return {"rank": dist.get_rank(), "world_size": dist.get_world_size()}


# ── the losses, by package ───────────────────────────────────────────────────────────────────────────────


def open_clip_torch() -> Iterator[Loss]:
    losses = load("open_clip.loss")

    def clip(**flags: bool) -> Loss:
        model = Scale()

        def distributed(image: Tensor, text: Tensor) -> Tensor:
            return losses.ClipLoss(**flags, **world())(image, text, model.logit_scale)

        def single(image: Tensor, text: Tensor) -> Tensor:
            return losses.ClipLoss()(image, text, model.logit_scale)

        return Loss(f"ClipLoss({', '.join(flags)})", distributed, single, normalized, model)

    def siglip(kind: str) -> Loss:
        model = Scale(-1.0)

        def distributed(image: Tensor, text: Tensor) -> Tensor:
            loss = losses.SigLipLoss(**world(), dist_impl=kind)
            return loss(image, text, model.logit_scale, model.logit_bias)

        def single(image: Tensor, text: Tensor) -> Tensor:
            return losses.SigLipLoss()(image, text, model.logit_scale, model.logit_bias)

        return Loss(f"SigLipLoss({kind})", distributed, single, normalized, model)

    yield clip()
    yield clip(local_loss=True)
    yield clip(gather_with_grad=True)
    yield clip(local_loss=True, gather_with_grad=True)
    yield from map(siglip, ("bidir", "shift", "reduce", "gather"))


def lightly() -> Iterator[Loss]:
    def gathered(file: str, name: str) -> Loss:
        make = getattr(load(f"lightly.loss.{file}"), name)

        def distributed(a: Tensor, b: Tensor) -> Tensor:
            return make(gather_distributed=True)(a, b)

        def single(a: Tensor, b: Tensor) -> Tensor:
            return make()(a, b)

        return Loss(name, distributed, single, two_views)

    yield gathered("dcl_loss", "DCLLoss")
    yield gathered("dcl_loss", "DCLWLoss")
    yield gathered("vicreg_loss", "VICRegLoss")
    yield gathered("barlow_twins_loss", "BarlowTwinsLoss")
    load("torchvision.ops")  # NTXentLoss imports it; the rest of torchvision needs its own build of PyTorch
    yield gathered("ntx_ent_loss", "NTXentLoss")


def pytorch_metric_learning() -> Iterator[Loss]:
    losses = importlib.import_module("pytorch_metric_learning.losses")
    wrapper = importlib.import_module("pytorch_metric_learning.utils.distributed").DistributedLossWrapper

    def wrapped(loss: Any, *, efficient: bool = False) -> Loss:
        def distributed(x: Tensor, labels: Tensor) -> Tensor:
            return wrapper(loss, efficient)(x, labels)

        def single(x: Tensor, labels: Tensor) -> Tensor:
            return loss(x, labels)

        name = f"{type(loss).__name__}{', efficient' if efficient else ''}"
        module = loss if list(loss.parameters()) else None
        return Loss(f"DistributedLossWrapper({name})", distributed, single, labelled, module)

    yield wrapped(losses.NTXentLoss())
    yield wrapped(losses.NTXentLoss(), efficient=True)
    yield wrapped(losses.SupConLoss())
    yield wrapped(losses.TripletMarginLoss())
    yield wrapped(losses.MultiSimilarityLoss())
    yield wrapped(losses.ProxyAnchorLoss(3, 4).double())


def sentence_transformers() -> Iterator[Loss]:
    make = importlib.import_module("sentence_transformers.sentence_transformer.losses").MultipleNegativesRankingLoss

    def distributed(query: Tensor, document: Tensor) -> Tensor:
        return make(None, gather_across_devices=True).compute_loss_from_embeddings([query, document], None)

    def single(query: Tensor, document: Tensor) -> Tensor:
        return make(None).compute_loss_from_embeddings([query, document], None)

    yield Loss(make.__name__, distributed, single, two_views)


def solo_learn() -> Iterator[Loss]:
    simclr, barlow = load("solo.losses.simclr").simclr_loss_func, load("solo.losses.barlow").barlow_loss_func
    gather = load("solo.utils.misc").gather

    def distributed(a: Tensor, b: Tensor) -> Tensor:
        return simclr(gather(a), gather(b))

    def whole_barlow(a: Tensor, b: Tensor) -> Tensor:
        a, b = (F.batch_norm(z, None, None, training=True) for z in (a, b))
        c = a.T @ b / len(a)
        on, off = (c.diagonal() - 1) ** 2, c**2 - torch.diag(c.diagonal() ** 2)
        return 0.025 * (on.sum() + 5e-3 * off.sum())

    yield Loss("simclr_loss_func(gather(z1), gather(z2))", distributed, simclr, two_views)
    yield Loss("barlow_loss_func", barlow, whole_barlow, two_views_float)


def inf_cl() -> Iterator[Loss]:
    loss, model = load("inf_cl.ring").cal_ring_loss, Scale(dtype=torch.float)

    def distributed(image: Tensor, text: Tensor) -> Tensor:
        return loss(image, text, scale=model.logit_scale, head_dim=4)

    def single(image: Tensor, text: Tensor) -> Tensor:
        return F.cross_entropy(model.logit_scale * image @ text.T, torch.arange(len(image)))

    yield Loss("cal_ring_loss", distributed, single, normalized_float, model)


def fairscale() -> Iterator[Loss]:
    norm = load("fairscale.experimental.nn.sync_batchnorm").SyncBatchNorm(3).double()

    def single(x: Tensor) -> Tensor:
        return F.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias, training=True)

    yield Loss("SyncBatchNorm", norm, single, images, norm, "sum")
    yield Loss("SyncBatchNorm, second order", norm, single, images, norm, "sum", order=2)


PACKAGES = (open_clip_torch, lightly, pytorch_metric_learning, sentence_transformers, solo_learn, inf_cl, fairscale)

# ── what is printed ──────────────────────────────────────────────────────────────────────────────────────


def convention(loss: Loss, report: Report, *, parameters: bool) -> str:
    """Say how far the gradients of the features, or of the parameters, are off."""
    names = {name for name, _ in loss.module.named_parameters()} if loss.module is not None else set()
    found: list[str] = []
    for row in (row for table in report.tables[:-1] for row in table.rows):
        what = row.what.removeprefix("gradient of ").removeprefix("second order of ")
        if what != row.what and (what in names) == parameters:
            found.append("right" if row.ok else f"times {row.ratio:.3g}" if row.ratio else f"off by {row.error:.1g}")
    return " or ".join(dict.fromkeys(found)) or "–"


def line(loss: Loss, report: Report) -> str:
    ends = ["raises" if table.raised else "right" if table.ok else "wrong" for table in report.tables]
    exact = convention(loss, report, parameters=False), convention(loss, report, parameters=True)
    seen = "; ".join(report.observed[:1])
    return f"  {loss.name:46} {exact[0]:20} {exact[1]:20} {ends[-2]:7} {ends[-1]:7} {seen}".rstrip()


def main() -> None:
    warnings.simplefilter("ignore")
    asked = " ".join(sys.argv[1:])
    print(f"  {'loss':46} {'features':20} {'parameters':20} {'uneven':7} {'empty':7} observed")
    audit_sharded_layers.audited(PACKAGES, line, asked)
    print("features, parameters: their gradients if the ranks' are averaged, or summed if that is right")
    print("uneven, empty: ranks with different numbers of rows; one rank without rows")
    audit_sharded_layers.main(audit_sharded_layers.PACKAGES + audit_sharded_models.PACKAGES)


if __name__ == "__main__":
    main()
