"""Audit of published collectives, losses and layers: do N ranks compute what one process computes with the whole?

    pip install '.[audit]'
    python examples/audit.py                # a line for each
    python examples/audit.py ClipLoss       # the reports of those whose names have this word

Each is called as its users call it, with its own torch.distributed calls, on simulated ranks or gloo processes, and is
compared with one process. Losses are compared three times: all ranks have as many rows; they differ; one has none. Of
their gradients either the mean over ranks or the sum has to be right. Packages that are not installed are skipped.

What it found wrong, on torch 2.13, where all ranks have as many rows; if they differ, or one has none, all losses raise
but BarlowTwinsLoss, which is wrong then, too:

    torch-distributed-nn 2.13.0
      all_reduce MAX, MIN, PRODUCT                      x: backward does not give the derivative of what the ranks …
      reduce_scatter AVG                                x: 2 = N times that of one process, exact under "mean" over …
    torch-distributed-functional-collectives 2.13.0
      all_reduce AVG, MAX, MIN, PRODUCT                 raise
      broadcast                                         x: no other rank's loss reaches it
      reduce_scatter_tensor AVG                         raises
    lightning 2.6.6
      all_gather(sync_grads=False)                      x: zero on every rank
    open-clip-torch 3.3.0
      ClipLoss()                                        argument[0] and argument[1]: 0.5 = 1/N times that of one …
      ClipLoss(local_loss)                              argument[0] and argument[1]: no other rank's loss reaches it
    lightly 1.6.0
      DCLWLoss                                          a and b: backward does not give the derivative of what the …
      BarlowTwinsLoss                                   a and b: backward gives the derivative of what the ranks …
    pytorch-metric-learning 2.9.0
      DistributedLossWrapper(NTXentLoss, efficient)     value: 2 = N times that of one process
      DistributedLossWrapper(ProxyAnchorLoss)           value and proxies: 2 = N times that of one process
    sentence-transformers 6.2.0
      all_gather(with_grad=False)                       x: no other rank's loss reaches it
    megatron-core 0.16.1
      vocab_parallel_cross_entropy(label_smoothing=0.3) logits: no other rank's loss reaches it
      sequence_parallel                                 down.bias, norm.weight and norm.bias: right after a sum over …
    transformers 5.24.0, six models by their own plans  nothing
    torchtitan 0.3.0, Llama 3                           nothing
"""

import importlib
import importlib.metadata
import importlib.util
import os
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Partial, Shard

from diffcoll.testing import GradientMismatchError, Report, assert_matches_single_process

#: Rows of each rank: as many on all, other numbers, one rank without any.
ROWS = {"equal": [(4, 4), (3, 3, 3)], "uneven": [(5, 3)], "one empty": [(5, 0, 3)]}


@dataclass
class Row:
    """A program on N ranks, and the same on one process."""

    name: str
    distributed: Callable[..., Any]
    single: Callable[..., Any]
    batch: Any
    #: Title of a run → what it runs on, for `assert_matches_single_process`.
    ranks: dict[str, Any] = field(default_factory=lambda: {"": {"tp": 2}})
    #: The first that is right is taken.
    reductions: tuple[Any, ...] = ({},)
    more: dict[str, Any] = field(default_factory=dict)

    def audit(self, ranks: Any) -> Report | Exception:
        """Compare them on these ranks; an error is that of the first run, as of a release with other functions."""
        wrong = []
        for reduction in self.reductions:
            more = {**self.more, "ranks": ranks, "losses": reduction, "dtype": None}
            try:
                return assert_matches_single_process(self.distributed, self.single, self.batch, **more)
            except GradientMismatchError as error:
                wrong.append(error.report)
            except Exception as error:
                return error
        return wrong[0]


def verdict(report: Report | Exception) -> str:
    """Return "right", that it raises, or what was observed first."""
    if isinstance(report, Exception) or any(table.raised for table in report.tables):
        return "raises"
    return "right" if report.ok else report.observed[0] if report.observed else "wrong"


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.double, generator=torch.Generator().manual_seed(seed))


# ── collectives: each rank weighs what it gets by 1, 10 or 100, and then by 1, 2, …; whole(x): of all ranks' rows ──


SQUARE = torch.tensor([[3.0, 2.0, 4.0], [5.0, 7.0, 6.0], [1.0, 8.0, 9.0]], dtype=torch.double)


def collective(name: str, on_rank: Callable[[Tensor], Any], whole: Callable[[Tensor], Tensor]) -> Row:
    def batch(n: int) -> tuple[Tensor, Tensor]:
        return SQUARE[:n, :n].clone(), 10.0 ** torch.arange(n, dtype=torch.double)

    def loss(f: Callable[[Tensor], Any], x: Tensor, weights: Tensor) -> Tensor:
        y = f(x)
        y = (torch.stack([*y]) if isinstance(y, (tuple, list)) else y).reshape(len(weights), -1)
        return (weights[:, None] * y * torch.arange(1, y.shape[1] + 1)).sum()

    def distributed(x: Tensor, weights: Tensor) -> Tensor:
        return loss(lambda x: on_rank(x[0]), x, weights)

    def single(x: Tensor, weights: Tensor) -> Tensor:
        return loss(whole, x, weights)

    simulated: dict[str, Any] = {"on": ["simulated"]}
    return Row(name, distributed, single, batch, {"": [(1, 1), (1, 1, 1)]}, ("sum",), simulated)


WHOLE: dict[str, Callable[[Tensor], Tensor]] = {
    "SUM": lambda x: x.sum(0).expand(len(x), -1),
    "AVG": lambda x: x.mean(0).expand(len(x), -1),
    "MAX": lambda x: x.amax(0).expand(len(x), -1),
    "MIN": lambda x: x.amin(0).expand(len(x), -1),
    "PRODUCT": lambda x: x.prod(0).expand(len(x), -1),
    "all_gather": lambda x: x.flatten().expand(len(x), -1),
    "broadcast": lambda x: x[:1].expand(len(x), -1),
    "reduce_scatter AVG": lambda x: x.mean(0)[:, None],
}


def torch_distributed_nn() -> Iterator[Row]:
    of = importlib.import_module("torch.distributed.nn.functional")
    for op in ("SUM", "AVG", "MAX", "MIN", "PRODUCT"):
        yield collective(f"all_reduce {op}", partial(of.all_reduce, op=getattr(dist.ReduceOp, op)), WHOLE[op])
    yield collective("all_gather", lambda x: torch.cat(of.all_gather(x)), WHOLE["all_gather"])
    yield collective("broadcast", partial(of.broadcast, src=0), WHOLE["broadcast"])

    def reduce_scatter(x: Tensor) -> Tensor:
        return of.reduce_scatter(torch.empty_like(x[:1]), [*x.split(1)], op=dist.ReduceOp.AVG)

    yield collective("reduce_scatter AVG", reduce_scatter, WHOLE["reduce_scatter AVG"])


def torch_distributed_functional_collectives() -> Iterator[Row]:
    of = importlib.import_module("torch.distributed._functional_collectives")

    def called(name: str, *arguments: Any) -> Callable[[Tensor], Tensor]:
        return lambda x: getattr(of, name)(x, *arguments, dist.group.WORLD)

    for op in ("SUM", "AVG", "MAX", "MIN", "PRODUCT"):
        yield collective(f"all_reduce {op}", called("all_reduce", op.lower()), WHOLE[op])
    yield collective("all_gather_tensor", called("all_gather_tensor", 0), WHOLE["all_gather"])
    yield collective("broadcast", called("broadcast", 0), WHOLE["broadcast"])
    yield collective(
        "reduce_scatter_tensor AVG", called("reduce_scatter_tensor", "avg", 0), WHOLE["reduce_scatter AVG"]
    )


def lightning() -> Iterator[Row]:
    of = importlib.import_module("lightning.fabric.utilities.distributed")._all_gather_ddp_if_available
    for sync_grads in (True, False):
        name = f"all_gather(sync_grads={sync_grads})"
        yield collective(name, lambda x, s=sync_grads: of(x, sync_grads=s).flatten(), WHOLE["all_gather"])


# ── losses ───────────────────────────────────────────────────────────────────────────────────────────────


def loss(name: str, distributed: Any, single: Any, batch: Any, module: nn.Module | None = None) -> Row:
    """A row of a loss; a module is in the closures, and copied with them."""
    functions = (distributed, single)
    if module is not None:
        functions = tuple(lambda module, *batch, f=f: f(*batch) for f in functions)  # type: ignore[assignment]
    more: dict[str, Any] = {"module": module, "on": ["simulated"]}
    return Row(name, *functions, batch, ROWS, ("mean", "sum"), more)


def views(rows: int) -> tuple[Tensor, Tensor]:
    return F.normalize(numbers(rows, 4, seed=rows)), F.normalize(numbers(rows, 4, seed=rows + 1))


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


def open_clip_torch() -> Iterator[Row]:
    losses = load("open_clip.loss")

    def of(kind: str, *more: float, **options: Any) -> Row:
        parameters = nn.ParameterList(nn.Parameter(torch.tensor(value, dtype=torch.double)) for value in (2.0, *more))

        def distributed(image: Tensor, text: Tensor) -> Tensor:
            on_ranks = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
            return getattr(losses, kind)(**options, **on_ranks)(image, text, *parameters)

        def single(image: Tensor, text: Tensor) -> Tensor:
            return getattr(losses, kind)()(image, text, *parameters)

        name = ", ".join(key if value is True else str(value) for key, value in options.items())
        return loss(f"{kind}({name})", distributed, single, views, parameters)

    yield of("ClipLoss")
    yield of("ClipLoss", local_loss=True)
    yield of("ClipLoss", gather_with_grad=True)
    yield of("ClipLoss", local_loss=True, gather_with_grad=True)
    for kind in ("bidir", "shift", "reduce", "gather"):
        yield of("SigLipLoss", -1.0, dist_impl=kind)


def lightly() -> Iterator[Row]:
    files = {"DCLLoss": "dcl_loss", "DCLWLoss": "dcl_loss", "VICRegLoss": "vicreg_loss"}
    files |= {"BarlowTwinsLoss": "barlow_twins_loss"}
    for name, file in files.items():
        make = getattr(load(f"lightly.loss.{file}"), name)
        yield loss(name, lambda a, b, make=make: make(gather_distributed=True)(a, b), make(), views)


def pytorch_metric_learning() -> Iterator[Row]:
    losses = importlib.import_module("pytorch_metric_learning.losses")
    wrapper = importlib.import_module("pytorch_metric_learning.utils.distributed").DistributedLossWrapper

    def labelled(rows: int) -> tuple[Tensor, Tensor]:
        return views(rows)[0], torch.arange(rows) % 3

    def wrapped(whole: Any, efficient: bool = False) -> Row:
        name = f"DistributedLossWrapper({type(whole).__name__}{', efficient' if efficient else ''})"
        module = whole if list(whole.parameters()) else None
        return loss(name, lambda x, y: wrapper(whole, efficient)(x, y), lambda x, y: whole(x, y), labelled, module)

    yield wrapped(losses.NTXentLoss(), efficient=True)
    for name in ("NTXentLoss", "SupConLoss", "TripletMarginLoss", "MultiSimilarityLoss"):
        yield wrapped(getattr(losses, name)())
    yield wrapped(losses.ProxyAnchorLoss(3, 4).double())


def sentence_transformers() -> Iterator[Row]:
    gather = importlib.import_module("sentence_transformers.util.distributed").all_gather
    for grad in (True, False):
        yield collective(f"all_gather(with_grad={grad})", partial(gather, with_grad=grad), WHOLE["all_gather"])
    make = importlib.import_module("sentence_transformers.sentence_transformer.losses").MultipleNegativesRankingLoss

    def of(a: Tensor, b: Tensor, **options: bool) -> Tensor:
        return make(None, **options).compute_loss_from_embeddings([a, b], None)

    yield loss(make.__name__, partial(of, gather_across_devices=True), of, views)


# ── sharded layers and models ────────────────────────────────────────────────────────────────────────────


class MLP(nn.Module):
    """Two layers, of which the second takes the features that the first has on this rank; a norm, if asked for."""

    def __init__(self, up: nn.Module, down: nn.Module, norm: bool) -> None:
        super().__init__()
        self.up, self.down = up, down
        self.norm = nn.LayerNorm(4, dtype=torch.double) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return x + output_of(self.down(output_of(self.up(self.norm(x))).tanh()))


def output_of(y: Any) -> Tensor:
    """Return the output; layers of Megatron-core return a bias beside it, which is None here."""
    return y[0] if isinstance(y, tuple) else y


def sine(module: nn.Module, x: Tensor) -> Tensor:
    return module(x).sin()


def megatron_core() -> Iterator[Row]:
    layers = importlib.import_module("megatron.core.tensor_parallel")
    state = importlib.import_module("megatron.core.parallel_state")
    make_config = importlib.import_module("megatron.core.model_parallel_config").ModelParallelConfig
    whole = nn.Linear(4, 8, dtype=torch.double), nn.Linear(8, 4, dtype=torch.double)
    x, ids = numbers(4, 2, 4), torch.tensor([[0, 5], [2, 3], [1, 4]])

    def on_cpu() -> None:  # in every process of gloo
        torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]

    def linears(mesh: Any, **more: Any) -> tuple[nn.Module, nn.Module]:
        on_cpu()
        group = mesh["tp"].get_group()
        sizes = {"tensor_model_parallel_size": group.size(), "params_dtype": torch.double}
        config = make_config(**sizes, use_cpu_initialization=True, **more)
        options = {"config": config, "init_method": nn.init.normal_, "tp_group": group}
        options |= {"bias": True, "skip_bias_add": False}
        up = layers.ColumnParallelLinear(4, 8, gather_output=False, **options)
        return up, layers.RowParallelLinear(8, 4, input_is_parallel=True, **options)

    def global_groups() -> None:  # of `parallel_state`, of which a process has one
        if state.model_parallel_is_initialized():
            state.destroy_model_parallel()
        state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())

    def sequence_parallel(whole: nn.Module, mesh: Any) -> nn.Module:
        global_groups()
        return MLP(*linears(mesh, sequence_parallel=True), norm=True)

    def of(name: str, norm: bool, shard: Any, **more: Any) -> Row:
        return Row(name, sine, sine, x, more={"module": MLP(*whole, norm), "shard": shard, **more})

    yield of("Column- and RowParallelLinear", False, lambda module, mesh: MLP(*linears(mesh), norm=False))

    def cross_entropy(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
        """As the docstring of Megatron-core's says: 1 / (K − 1) of the mass to each word that is not the label."""
        words = logits.shape[-1]
        return F.cross_entropy(logits.movedim(-1, 1), labels, label_smoothing=smoothing * words / (words - 1))

    for smoothing in (0.0, 0.3):

        def sharded(logits: Tensor, labels: Tensor, smoothing: float = smoothing) -> Tensor:
            on_cpu()
            global_groups()
            return layers.vocab_parallel_cross_entropy(logits.clone(), labels, smoothing).mean()

        name = f"vocab_parallel_cross_entropy(label_smoothing={smoothing:g})"
        batch = numbers(3, 2, 6).float(), ids  # it computes in float32
        more = {"placements": {"logits": {"tp": Shard(2)}}, "on": ["gloo"]}
        yield Row(name, sharded, partial(cross_entropy, smoothing=smoothing), batch, more=more)

    split = {"x": {"tp": Shard(0)}, "output": {"tp": Shard(0)}}
    yield of("sequence_parallel", True, sequence_parallel, placements=split, on=["gloo"])
    later = split | {name: {"tp": Partial()} for name in ("norm.*", "down.bias")}  # finalize_model_grads sums them
    yield of("sequence_parallel, summed later", True, sequence_parallel, placements=later, on=["gloo"])


def transformers() -> Iterator[Row]:
    package = importlib.import_module("transformers")
    package.logging.set_verbosity_error()
    of = importlib.import_module("transformers.distributed")
    plans = importlib.import_module("transformers.distributed.tensor_parallel")
    sizes = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 32}
    sizes |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    sizes |= {"num_experts_per_tok": 2, "num_local_experts": 4}  # of Mixtral

    def loss(module: Any, ids: Tensor) -> Tensor:
        return module(input_ids=ids, labels=ids, use_cache=False).loss

    def shard(whole: Any, mesh: Any) -> nn.Module:
        """Shard the model by its own plan, as from_pretrained does with a DistributedConfig."""
        plan, _, _ = whole._resolve_parallel_plans(of.DistributedConfig(tp_size=mesh["tp"].size()))
        return plans.apply_tensor_parallelism(whole, mesh["tp"], plan)

    for name in ("Llama", "Qwen2", "Qwen3", "Mistral", "Gemma2", "Mixtral"):
        torch.manual_seed(0)
        make_config = getattr(package, f"{name}Config")
        config = make_config(**sizes, attn_implementation="eager", tie_word_embeddings=False)
        model = getattr(package, f"{name}ForCausalLM")(config).float()
        ids = torch.randint(3, 16, (2, 6))
        yield Row(f"{name}ForCausalLM", loss, loss, ids, more={"module": model, "shard": shard})


def torchtitan() -> Iterator[Row]:
    titan = partial(importlib.import_module, package="torchtitan")
    attention, llama3 = titan(".models.common.attention"), titan(".models.llama3")
    distributed, settings = titan(".distributed"), titan(".config")

    def on_cpu() -> None:  # in every process of gloo
        attention.ScaledDotProductAttention.sdpa_backends = [torch.nn.attention.SDPBackend.MATH]
        titan(".distributed.parallel_dims").device_type = "cpu"

    def llama(sequence_parallel: bool) -> nn.Module:
        on_cpu()
        config = llama3.llama3_configs["debugmodel"]("varlen")
        config.layers = config.layers[:1]
        config.layers[0].attention.inner_attention = attention.ScaledDotProductAttention.Config()
        titan(".models.llama3.sharding").set_llama3_sharding_config(config, enable_sp=sequence_parallel)
        torch.manual_seed(0)
        model = config.build()
        model.init_states()
        return model

    def shard(sequence_parallel: bool, whole: Any, mesh: Any) -> nn.Module:
        on_cpu()
        tp = {"tensor_parallel_degree": mesh.size(), "enable_sequence_parallel": sequence_parallel}
        parallelism = settings.ParallelismConfig(**tp, spmd_backend="partial_dtensor")
        dims = distributed.ParallelDims.from_config(parallelism, mesh.size())
        dims.build_mesh()
        whole.parallelize(dims)
        return whole

    def logits(module: Any, ids: Tensor) -> Tensor:
        return module(ids)

    ids = torch.randint(32, (4, 8), generator=torch.Generator().manual_seed(0))
    for parallel in (False, True):
        more = {"module": llama(parallel), "shard": partial(shard, parallel)}
        yield Row(f"Llama3(enable_sequence_parallel={parallel})", logits, logits, ids, more=more)


PACKAGES = (
    *(torch_distributed_nn, torch_distributed_functional_collectives, lightning),
    *(open_clip_torch, lightly, pytorch_metric_learning, sentence_transformers),
    *(megatron_core, transformers, torchtitan),
)


def main(asked: str) -> None:
    warnings.simplefilter("ignore")
    os.environ["PYTHONWARNINGS"] = "ignore"  # of gloo processes
    for package in PACKAGES:
        name = package.__name__.replace("_", "-")
        try:
            rows = [row for row in package() if asked in row.name]
        except ImportError as error:
            print(f"{name}: skipped: {error}")
            continue
        version = importlib.metadata.version("torch" if name.startswith("torch-dist") else name)
        print(name, version.partition("+")[0])
        for row in rows:
            reports = {title: row.audit(ranks) for title, ranks in row.ranks.items()}
            said = [f"{title}: {verdict(report)}" if title else verdict(report) for title, report in reports.items()]
            print(f"  {row.name:50}{textwrap.shorten('; '.join(said), 62, placeholder=' …')}", flush=True)
            if asked:
                print(*reports.values(), sep="\n")


if __name__ == "__main__":
    main(" ".join(sys.argv[1:]))
