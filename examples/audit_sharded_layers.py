"""Audit of published tensor-parallel layers: do two ranks compute what one process computes with the whole weights?

    pip install '.[audit]'
    python examples/audit_sharded_layers.py                    # one line for each layer
    python examples/audit_sharded_layers.py label_smoothing    # the full reports of layers with this word

Each layer is made by its own package on every rank of a mesh, gets that rank's pieces of the whole's numbers, and runs
on gloo processes. Packages that are not installed are skipped. Megatron-core asks for the current CUDA device where it
gathers; here that is the CPU. Its groups are global to a process, so simulated ranks cannot run it.

What it found, on torch 2.13:

    layer, on 2 ranks                                 verdict  causes
  megatron-core 0.16.1
    ColumnParallelLinear                              right
    RowParallelLinear                                 right
    Column- and RowParallelLinear                     right
    VocabParallelEmbedding                            right
    vocab_parallel_cross_entropy(label_smoothing=0)   right
    vocab_parallel_cross_entropy(label_smoothing=0.3) wrong    another loss
    sequence_parallel=True                            wrong    part of a sum
    sequence_parallel=True, summed after backward     right
  transformers 5.23.0
    LlamaForCausalLM                                  right
    Qwen2ForCausalLM                                  right
    Qwen3ForCausalLM                                  right
    MistralForCausalLM                                right
    Gemma2ForCausalLM                                 right
    MixtralForCausalLM                                right
    Qwen3MoeForCausalLM                               right
    GptOssForCausalLM                                 right

The label smoothing takes means over this rank's words. With sequence_parallel=True the weights of norms and the bias
of the second layer have the gradient of this rank's part of the sequence; Megatron-LM sums them after backward, which
`Partial()` states. Torchtitan is not here: the attention of its language models (0.3.0: flex or varlen) has no backward
on a CPU.
"""

import importlib
import importlib.metadata
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Partial, Shard

from diffcoll.testing import GradientMismatchError, Report, assert_matches_single_process


@dataclass
class Layer:
    """A published layer or loss on a tensor-parallel mesh, and the whole on one process."""

    name: str
    batch: Any
    distributed: Callable[..., Any]
    single: Callable[..., Any]
    module: nn.Module | None = None
    shard: Callable[[Any, Any], nn.Module] | None = None
    placements: dict[str, Any] = field(default_factory=dict)

    def audit(self) -> Report:
        """Compare them."""
        try:
            return assert_matches_single_process(
                self.distributed,
                self.single,
                self.batch,
                module=self.module,
                shard=self.shard,
                mesh={"tp": 2},
                placements=self.placements,
                on=["gloo"],
            )
        except GradientMismatchError as error:
            return error.report


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.double, generator=torch.Generator().manual_seed(seed))


def output_of(y: Any) -> Tensor:
    """Return the output without what layers of Megatron-core return beside it."""
    return y[0] if isinstance(y, tuple) else y


def sine(module: nn.Module, x: Tensor) -> Tensor:
    return output_of(module(x)).sin()


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


# ── Megatron-core ────────────────────────────────────────────────────────────────────────────────────────


def of_megatron(ranks: int, **more: Any) -> Any:
    """Set up its groups in this process, and return the configuration of its layers."""
    from megatron.core import ModelParallelConfig, parallel_state

    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    common = {"tensor_model_parallel_size": ranks, "use_cpu_initialization": True, "params_dtype": torch.double}
    return ModelParallelConfig(**common, **more)


def column(mesh: Any, gather_output: bool, **more: Any) -> nn.Module:
    from megatron.core.tensor_parallel import ColumnParallelLinear

    config = of_megatron(mesh["tp"].size(), **more)
    return ColumnParallelLinear(4, 8, config=config, init_method=nn.init.normal_, gather_output=gather_output)


def row(mesh: Any, input_is_parallel: bool, **more: Any) -> nn.Module:
    from megatron.core.tensor_parallel import RowParallelLinear

    kinds = {"bias": True, "skip_bias_add": False, "input_is_parallel": input_is_parallel}
    config = of_megatron(mesh["tp"].size(), **more)
    return RowParallelLinear(8, 4, config=config, init_method=nn.init.normal_, **kinds)


def embedding(whole: nn.Module, mesh: Any) -> nn.Module:
    from megatron.core.tensor_parallel import VocabParallelEmbedding

    return VocabParallelEmbedding(6, 4, config=of_megatron(mesh["tp"].size()), init_method=nn.init.normal_)


def megatron_core() -> Iterator[Layer]:
    importlib.metadata.version("megatron-core")
    up, down = nn.Linear(4, 8, dtype=torch.double), nn.Linear(8, 4, dtype=torch.double)
    ids, labels = torch.tensor([[0, 5], [2, 2], [4, 1]]), torch.tensor([[1, 0], [5, 3], [3, 3]])

    def mlp(kind: type[MLP], whole: nn.Module, mesh: Any, **more: Any) -> nn.Module:
        return kind(column(mesh, gather_output=False, **more), row(mesh, input_is_parallel=True, **more))

    def cross_entropy(smoothing: float) -> Layer:
        def distributed(logits: Tensor, labels: Tensor) -> Tensor:
            from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

            of_megatron(torch.distributed.get_world_size())
            return vocab_parallel_cross_entropy(logits, labels, smoothing).mean()

        def single(logits: Tensor, labels: Tensor) -> Tensor:
            """As its docstring says: 1 / (K - 1) of the mass to each word that is not the label."""
            words = logits.shape[-1]
            others = smoothing * words / (words - 1)
            chances = logits.log_softmax(-1)
            own = chances.gather(-1, labels[..., None]).squeeze(-1)
            return -((1 - others) * own + others * chances.mean(-1)).mean()

        name = f"vocab_parallel_cross_entropy(label_smoothing={smoothing:g})"
        logits = numbers(3, 2, 6).float()  # it computes in float32
        return Layer(name, (logits, labels), distributed, single, placements={"logits": {"tp": Shard(2)}})

    x = numbers(4, 2, 4)
    yield Layer("ColumnParallelLinear", x, sine, sine, up, lambda whole, mesh: column(mesh, gather_output=True))
    yield Layer(
        "RowParallelLinear", numbers(4, 2, 8), sine, sine, down, lambda whole, mesh: row(mesh, input_is_parallel=False)
    )
    yield Layer("Column- and RowParallelLinear", x, sine, sine, MLP(up, down), lambda *a: mlp(MLP, *a))
    table = nn.Embedding(6, 4, dtype=torch.double)
    yield Layer("VocabParallelEmbedding", ids, sine, sine, table, embedding)
    yield from map(cross_entropy, (0.0, 0.3))

    def shard(whole: nn.Module, mesh: Any) -> nn.Module:
        return mlp(Block, whole, mesh, sequence_parallel=True)

    said: dict[str, Any] = {"x": {"tp": Shard(0)}}
    yield Layer("sequence_parallel=True", x, sine, sine, Block(up, down), shard, said)
    later = said | {name: {"tp": Partial()} for name in ("norm.*", "down.bias")}
    yield Layer("sequence_parallel=True, summed after backward", x, sine, sine, Block(up, down), shard, later)


# ── Transformers ─────────────────────────────────────────────────────────────────────────────────────────


def by_its_plan(whole: Any, mesh: Any) -> nn.Module:
    """Shard a model by its own plan, as from_pretrained does with a distributed_config."""
    from transformers.distributed import DistributedConfig
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    plan, *_ = whole._resolve_parallel_plans(DistributedConfig(tp_size=mesh["tp"].size()))
    return apply_tensor_parallelism(whole, mesh["tp"], plan)


def transformers() -> Iterator[Layer]:
    package = importlib.import_module("transformers")
    common = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    common |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 32}
    common |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "attn_implementation": "eager"}

    def loss(module: Any, ids: Tensor) -> Tensor:
        return module(input_ids=ids, labels=ids, use_cache=False).loss

    def of(name: str, **more: int) -> Layer:
        config = getattr(package, f"{name}Config")(**common, **more, tie_word_embeddings=False)
        torch.manual_seed(0)
        model = getattr(package, f"{name}ForCausalLM")(config).float()
        with torch.no_grad():
            for p in model.parameters():  # norms and biases start as ones and zeros
                p.add_(0.1 * torch.randn_like(p))
        return Layer(f"{name}ForCausalLM", torch.randint(3, 16, (2, 6)), loss, loss, model, by_its_plan)

    yield from map(of, ("Llama", "Qwen2", "Qwen3", "Mistral", "Gemma2"))
    yield of("Mixtral", num_local_experts=4, num_experts_per_tok=2)
    yield of("Qwen3Moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8)
    yield of("GptOss", num_local_experts=4, num_experts_per_tok=2)


PACKAGES = (megatron_core, transformers)


def line(layer: Layer, report: Report) -> str:
    causes = ", ".join(cause.name for cause in report.causes)
    return f"  {layer.name:49} {'right' if report.ok else 'wrong':8} {causes}".rstrip()


def audited(packages: Sequence[Callable[[], Iterator[Any]]], line: Callable[[Any, Report], str], asked: str) -> None:
    """Print a line for each layer or loss of each package, and the reports of those that are asked for."""
    for package in packages:
        name = package.__name__.replace("_", "-")
        try:
            found = list(package())
        except ImportError as error:
            print(f"{name}: skipped: {error}")
            continue
        print(f"{name} {importlib.metadata.version(name)}")
        for each in found:
            if asked in each.name:
                report = each.audit()
                print(line(each, report), flush=True)
                if asked:
                    print(report)


def main() -> None:
    warnings.simplefilter("ignore")
    print(f"  {'layer, on 2 ranks':49} verdict  causes")
    audited(PACKAGES, line, " ".join(sys.argv[1:]))


if __name__ == "__main__":
    main()
