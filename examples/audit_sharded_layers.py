"""Audit of Megatron-core's parallel layers: do two ranks compute what one process computes with the whole weights?

    pip install '.[audit]'
    python examples/audit_sharded_layers.py                    # one line for each layer
    python examples/audit_sharded_layers.py label_smoothing    # the full reports of layers with this word

Each layer is made by its own package on every rank of a mesh, and gets that rank's pieces of the whole's numbers. Where
a layer takes its group as an argument, it runs on simulated ranks and on gloo processes. Where it takes groups and
buffers from `parallel_state`, which is global to a process, it runs on gloo alone. What it asks of CUDA (the current
device, a stream, random numbers, where losses are logged) is replaced, and so is a name that the router reads and that
is not defined without Transformer Engine. If the package is not installed, its layers are skipped.

What it found, on torch 2.13:

    layer                                                mesh      on             verdict causes
  megatron-core 0.16.1
    ColumnParallelLinear                                 tp=2      simulated gloo right
    RowParallelLinear                                    tp=2      simulated gloo right
    Column- and RowParallelLinear                        tp=2      simulated gloo right
    MLP(gated_linear_unit)                               tp=2      simulated gloo right
    SelfAttention                                        tp=2      gloo           right
    VocabParallelEmbedding                               tp=2      simulated gloo right
    vocab_parallel_cross_entropy(label_smoothing=0)      tp=2      gloo           right
    vocab_parallel_cross_entropy(label_smoothing=0.3)    tp=2      gloo           wrong   another loss
    sequence_parallel                                    tp=2      gloo           wrong   part of a sum
    sequence_parallel, summed later                      tp=2      gloo           right
    MoELayer(allgather), sequence_parallel               tp=2      gloo           right
    MoELayer(allgather)                                  ep=2      gloo           right
    MoELayer(alltoall), sequence_parallel                tp=2      gloo           right
    MoELayer(alltoall)                                   ep=2      gloo           right
    MoELayer(aux_loss), sequence_parallel                tp=2      gloo           right

The label smoothing takes means over this rank's words; on one rank it is right. With sequence_parallel=True the weights
of norms, of the router, and the bias of the second layer have the gradient of this rank's part of the sequence;
Megatron-core's finalize_model_grads sums them after backward, which `Partial()` states. Where the ranks of "ep" have
tokens of their own, the router's gradient is a part too; data parallelism reduces it. On each rank the first layer of
a gated MLP has rows of both halves of the whole's, which a function in `placements` states.
"""

import contextlib
import importlib
import importlib.metadata
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Partial, Shard

from diffcoll.testing import GradientMismatchError, Report, assert_matches_single_process


@dataclass
class Layer:
    """A published layer, loss or model on a mesh, and the whole on one process."""

    name: str
    batch: Any
    distributed: Callable[..., Any]
    single: Callable[..., Any]
    module: nn.Module | None = None
    shard: Callable[[Any, Any], nn.Module] | None = None
    placements: dict[str, Any] = field(default_factory=dict)
    mesh: dict[str, int] = field(default_factory=lambda: {"tp": 2})
    rank_reduction: dict[str, str] = field(default_factory=dict)
    on: tuple[str, ...] = ("simulated", "gloo")

    def audit(self) -> Report:
        """Compare them."""
        try:
            return assert_matches_single_process(
                self.distributed,
                self.single,
                self.batch,
                module=self.module,
                shard=self.shard,
                ranks=self.mesh,
                placements=self.placements,
                rank_reduction=self.rank_reduction,
                on=self.on,
                dtype=None,
            )
        except GradientMismatchError as error:
            return error.report


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.double, generator=torch.Generator().manual_seed(seed))


# ── the same on one process ──────────────────────────────────────────────────────────────────────────────


class MLP(nn.Module):
    """Two layers, of which the second takes the features that the first has on this rank."""

    def __init__(self, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.up, self.down = up, down

    def forward(self, x: Tensor) -> Tensor:
        return output_of(self.down(output_of(self.up(x)).tanh()))


class Block(MLP):
    """With a norm before, which runs on each rank's part of the sequence."""

    def __init__(self, up: nn.Module, down: nn.Module) -> None:
        super().__init__(up, down)
        self.norm = nn.LayerNorm(4, dtype=torch.double)

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(self.norm(x))


class Gated(nn.Module):
    """A gated MLP: the first half of what the first layer returns is the gate."""

    def __init__(self) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(8, 24, dtype=torch.double)
        self.linear_fc2 = nn.Linear(12, 8, dtype=torch.double)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.linear_fc1(x).chunk(2, -1)
        return self.linear_fc2(F.silu(gate) * up)


def gate_and_up(whole: Tensor, at: Any) -> Tensor:
    """Return this rank's rows of both halves."""
    return torch.cat([half.chunk(at.mesh["tp"])[at["tp"]] for half in whole.chunk(2)])


class Attention(nn.Module):
    """Causal attention of 4 heads over 2 groups of keys; rows of the weight are a group's queries, key and value."""

    def __init__(self) -> None:
        super().__init__()
        self.linear_qkv = nn.Linear(8, 16, dtype=torch.double)
        self.linear_proj = nn.Linear(8, 8, dtype=torch.double)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.linear_qkv(x).unflatten(-1, (2, 4, 2)).split([2, 1, 1], -2)  # (S, B, groups, heads of it, 2)
        q, k, v = (y.expand(-1, -1, -1, 2, -1).flatten(2, 3).permute(1, 2, 0, 3) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.linear_proj(y.permute(2, 0, 1, 3).flatten(2))


class WithAuxiliary(torch.autograd.Function):
    """Passes on the first, and adds the gradient of the second to what is backpropagated."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, auxiliary: Tensor) -> Tensor:
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g, g.new_ones(())


class Experts(nn.Module):
    """Each token goes to two of four experts. float32: Megatron-core's router computes in it."""

    def __init__(self, coefficient: float = 0.0) -> None:
        super().__init__()
        self.coefficient = coefficient
        self.router, self.experts = nn.Linear(8, 4, bias=False), nn.Module()
        each = (MLP(nn.Linear(8, 12, bias=False), nn.Linear(12, 8, bias=False)) for _ in range(4))
        self.experts.local_experts = nn.ModuleList(
            nn.ModuleDict({"linear_fc1": mlp.up, "linear_fc2": mlp.down}) for mlp in each
        )

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        logits = self.router(tokens)
        best, which = logits.topk(2)
        weights = torch.zeros_like(logits).scatter(1, which, best.softmax(-1))
        if self.coefficient:
            shares = (weights > 0).float().mean(0) / 2
            auxiliary = self.coefficient * 4 * (shares * logits.softmax(-1).mean(0)).sum()
            weights = WithAuxiliary.apply(weights, auxiliary)
        y = [e["linear_fc2"](F.gelu(e["linear_fc1"](tokens))) for e in self.experts.local_experts]
        return torch.einsum("te,etf->tf", weights, torch.stack(y)).view_as(x)


def cross_entropy(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    """As the docstring of Megatron-core's says: 1 / (K - 1) of the mass to each word that is not the label."""
    words = logits.shape[-1]
    others = smoothing * words / (words - 1)
    chances = logits.log_softmax(-1)
    own = chances.gather(-1, labels[..., None]).squeeze(-1)
    return -((1 - others) * own + others * chances.mean(-1)).mean()


def output_of(y: Any) -> Tensor:
    """Return the output; some layers of Megatron-core return a bias beside it that the caller adds."""
    output, bias = y if isinstance(y, tuple) else (y, None)
    return output if bias is None else output + bias


def sine(module: nn.Module, x: Tensor) -> Tensor:
    return output_of(module(x)).sin()


def attended(module: nn.Module, x: Tensor) -> Tensor:
    hidden = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)[None, None]
    return output_of(module(x) if isinstance(module, Attention) else module(x, hidden)).sin()


# ── Megatron-core's ──────────────────────────────────────────────────────────────────────────────────────


def megatron(name: str) -> Any:
    """Import a module of Megatron-core, and replace what it asks of CUDA."""
    warnings.simplefilter("ignore")
    module = importlib.import_module(f"megatron.core.{name}")
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    return module


def with_streams_of_cpu() -> None:
    """Let the layers of experts and attention do without streams and random numbers of CUDA."""
    nothing = contextlib.nullcontext
    stream = SimpleNamespace(wait_stream=id, record_event=lambda: SimpleNamespace(synchronize=nothing))
    torch.cuda.Stream = torch.cuda.current_stream = lambda *a: stream  # type: ignore[assignment,misc,return-value]
    torch.cuda.stream = lambda *a: nothing()  # type: ignore[assignment]
    megatron("tensor_parallel").get_cuda_rng_tracker = lambda *a: SimpleNamespace(fork=lambda *a: nothing())
    megatron("transformer.moe.moe_utils").te_general_gemm = None  # not defined without Transformer Engine, but read
    megatron("transformer.moe.router").save_to_aux_losses_tracker = lambda *a, **k: None
    dispatcher = megatron("transformer.moe.token_dispatcher")
    dispatcher.maybe_move_tensor_to_cpu = lambda x, as_numpy=False, **k: x.numpy() if as_numpy else x


def global_groups(**sizes: int) -> None:
    """Set up the groups of this process."""
    state = megatron("parallel_state")
    if state.model_parallel_is_initialized():
        state.destroy_model_parallel()
    state.initialize_model_parallel(**{f"{kind}_model_parallel_size": n for kind, n in sizes.items()})


def config(tp: int, **more: Any) -> Any:
    common = {"tensor_model_parallel_size": tp, "use_cpu_initialization": True, "params_dtype": torch.double}
    return megatron("model_parallel_config").ModelParallelConfig(**common, **more)


def config_of_transformer(tp: int, **more: Any) -> Any:
    common = {"num_layers": 1, "hidden_size": 8, "ffn_hidden_size": 12, "num_attention_heads": 4, "num_query_groups": 2}
    common |= {"attention_dropout": 0.0, "hidden_dropout": 0.0, "masked_softmax_fusion": False}
    common |= {"tensor_model_parallel_size": tp, "use_cpu_initialization": True, "params_dtype": torch.double}
    return megatron("transformer.transformer_config").TransformerConfig(**(common | more))


def linear(kind: str, mesh: Any, *sizes: int, **more: Any) -> nn.Module:
    group, parallel = mesh["tp"].get_group(), more.pop("sequence_parallel", False)
    common = {"config": config(group.size(), sequence_parallel=parallel), "init_method": nn.init.normal_}
    common |= {"bias": True, "skip_bias_add": False, "tp_group": group}
    return getattr(megatron("tensor_parallel"), f"{kind}ParallelLinear")(*sizes, **common, **more)


def column(whole: nn.Module, mesh: Any) -> nn.Module:
    return linear("Column", mesh, 4, 8, gather_output=True)


def row(whole: nn.Module, mesh: Any) -> nn.Module:
    return linear("Row", mesh, 8, 4, input_is_parallel=False)


def two_layers(whole: nn.Module, mesh: Any, **more: Any) -> nn.Module:
    up = linear("Column", mesh, 4, 8, gather_output=False, **more)
    return type(whole)(up, linear("Row", mesh, 8, 4, input_is_parallel=True, **more))  # type: ignore[call-arg]


def sequence_parallel(whole: nn.Module, mesh: Any) -> nn.Module:
    global_groups(tensor=mesh["tp"].size())
    return two_layers(whole, mesh, sequence_parallel=True)


def embedding(whole: nn.Module, mesh: Any) -> nn.Module:
    group = mesh["tp"].get_group()
    make = megatron("tensor_parallel").VocabParallelEmbedding
    return make(6, 4, config=config(group.size()), init_method=nn.init.normal_, tp_group=group)


def linears() -> dict[str, Any]:
    layers = megatron("tensor_parallel")
    return {"linear_fc1": layers.ColumnParallelLinear, "linear_fc2": layers.RowParallelLinear}


def gated(whole: nn.Module, mesh: Any) -> nn.Module:
    group, of = mesh["tp"].get_group(), megatron("transformer.mlp")
    settings = config_of_transformer(group.size(), gated_linear_unit=True, activation_func=F.silu)
    return of.MLP(settings, of.MLPSubmodules(**linears()), ffn_hidden_size=12, tp_group=group)


def attention(whole: nn.Module, mesh: Any) -> nn.Module:
    global_groups(tensor=mesh["tp"].size())
    with_streams_of_cpu()
    of, core = megatron("transformer.attention"), megatron("transformer.dot_product_attention").DotProductAttention
    up, down = linears().values()
    parts = of.SelfAttentionSubmodules(linear_qkv=up, core_attention=core, linear_proj=down)
    causal = megatron("transformer.enums").AttnMaskType.causal
    return of.SelfAttention(config_of_transformer(mesh["tp"].size()), parts, layer_number=1, attn_mask_type=causal)


def experts(dispatcher: str, coefficient: float = 0.0) -> Callable[[Any, Any], nn.Module]:
    def shard(whole: nn.Module, mesh: Any) -> nn.Module:
        sizes = {axis: mesh[axis].size() for axis in mesh.mesh_dim_names}
        tp, ep = sizes.get("tp", 1), sizes.get("ep", 1)
        global_groups(tensor=tp, expert=ep)
        with_streams_of_cpu()
        settings = {"expert_model_parallel_size": ep, "expert_tensor_parallel_size": tp, "sequence_parallel": tp > 1}
        settings |= {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 12, "add_bias_linear": False}
        settings |= {"moe_token_dispatcher_type": dispatcher, "params_dtype": torch.float}
        settings |= {"moe_router_load_balancing_type": "aux_loss" if coefficient else "none"}
        settings |= {"moe_aux_loss_coeff": coefficient}
        of, parts = megatron("transformer.moe.moe_layer"), megatron("transformer.mlp").MLPSubmodules(**linears())
        sequential = megatron("transformer.moe.experts").SequentialMLP
        spec = megatron("transformer.spec_utils").ModuleSpec(module=sequential, submodules=parts)
        layer = of.MoELayer(config_of_transformer(tp, **settings), of.MoESubmodules(experts=spec), layer_number=1)
        mine = layer.experts.local_experts
        first = mesh.get_local_rank("ep") * len(mine) if ep > 1 else 0
        mine._modules = {str(first + i): expert for i, expert in enumerate(mine)}  # as the whole calls them
        return layer

    return shard


def megatron_core() -> Iterator[Layer]:
    importlib.metadata.version("megatron-core")
    torch.manual_seed(0)
    up, down = nn.Linear(4, 8, dtype=torch.double), nn.Linear(8, 4, dtype=torch.double)
    x, wide, split = numbers(4, 2, 4), numbers(6, 2, 8), {"x": {"tp": Shard(0)}}
    ids, labels = torch.tensor([[0, 5], [2, 2], [4, 1]]), torch.tensor([[1, 0], [5, 3], [3, 3]])

    def vocabulary(smoothing: float) -> Layer:
        def distributed(logits: Tensor, labels: Tensor) -> Tensor:
            global_groups(tensor=torch.distributed.get_world_size())
            return megatron("tensor_parallel").vocab_parallel_cross_entropy(logits, labels, smoothing).mean()

        def single(logits: Tensor, labels: Tensor) -> Tensor:
            return cross_entropy(logits, labels, smoothing)

        name = f"vocab_parallel_cross_entropy(label_smoothing={smoothing:g})"
        batch = numbers(3, 2, 6).float(), labels  # it computes in float32
        return Layer(name, batch, distributed, single, placements={"logits": {"tp": Shard(2)}}, on=("gloo",))

    def of_module(name: str, x: Tensor, module: nn.Module, shard: Any, f: Any = sine, **more: Any) -> Layer:
        return Layer(name, x, f, f, module, shard, **more)

    yield of_module("ColumnParallelLinear", x, up, column)
    yield of_module("RowParallelLinear", numbers(4, 2, 8), down, row)
    yield of_module("Column- and RowParallelLinear", x, MLP(up, down), two_layers)
    yield of_module("MLP(gated_linear_unit)", wide, Gated(), gated, placements={"linear_fc1.*": gate_and_up})
    yield of_module("SelfAttention", wide, Attention(), attention, attended, on=("gloo",))
    yield of_module("VocabParallelEmbedding", ids, nn.Embedding(6, 4, dtype=torch.double), embedding)
    yield from map(vocabulary, (0.0, 0.3))

    common: dict[str, Any] = {"placements": split, "on": ("gloo",)}
    yield of_module("sequence_parallel", x, Block(up, down), sequence_parallel, **common)
    common["placements"] = split | {name: {"tp": Partial()} for name in ("norm.*", "down.bias")}
    yield of_module("sequence_parallel, summed later", x, Block(up, down), sequence_parallel, **common)

    common["placements"] = split | {"router.weight": {"tp": Partial()}}
    of_rank: dict[str, Any] = {"mesh": {"ep": 2}, "on": ("gloo",)}
    of_rank["placements"] = {"x": {"ep": Shard(1)}, "router.weight": {"ep": Partial()}}
    for kind in ("allgather", "alltoall"):
        yield of_module(f"MoELayer({kind}), sequence_parallel", wide.float(), Experts(), experts(kind), **common)
        yield of_module(f"MoELayer({kind})", wide.float(), Experts(), experts(kind), **of_rank)
    balanced = Experts(0.1), experts("allgather", 0.1)
    yield of_module("MoELayer(aux_loss), sequence_parallel", wide.float(), *balanced, **common)


PACKAGES = (megatron_core,)


def line(layer: Layer, report: Report) -> str:
    mesh = ",".join(f"{axis}={n}" for axis, n in layer.mesh.items())
    on = " ".join(dict.fromkeys(table.title.partition(",")[0] for table in report.tables))
    seen = "; ".join(report.observed[:1])
    return f"  {layer.name:52} {mesh:9} {on:14} {'right' if report.ok else 'wrong':7} {seen}".rstrip()


def audited(packages: Sequence[Callable[[], Iterator[Any]]], line: Callable[[Any, Report], str], asked: str) -> None:
    """Print a line for each layer or loss of each package, and the reports of those that are asked for."""
    for package in packages:
        name = package.__name__.replace("_", "-")
        distribution = "torch" if name.startswith("torch-distributed") else name
        try:
            found = list(package())
        except ImportError as error:
            print(f"{name}: skipped: {error}")
            continue
        print(f"{name} {importlib.metadata.version(distribution).partition('+')[0]}")
        for each in found:
            if asked in each.name:
                try:
                    report = each.audit()
                except Exception as error:  # such as a release of the package that has other functions
                    print(f"  {each.name:52} raises {type(error).__name__}: {error}", flush=True)
                    continue
                print(line(each, report), flush=True)
                if asked:
                    print(report)


def main(packages: Sequence[Callable[[], Iterator[Layer]]] = PACKAGES) -> None:
    warnings.simplefilter("ignore")
    print(f"  {'layer':52} {'mesh':9} {'on':14} verdict observed")
    audited(packages, line, " ".join(sys.argv[1:]))


if __name__ == "__main__":
    main()
