"""Audit of models of Transformers and torchtitan, each sharded by its own plan: do two ranks compute what one does?

    pip install '.[audit]'
    python examples/audit_sharded_models.py            # one line for each model
    python examples/audit_sharded_models.py Mixtral    # the full reports of models with this word

Small models with random weights, on simulated ranks and on gloo processes. The extra installs Transformers. torchtitan
is audited if it is there, and with it Triton, which its wheel imports and builds of PyTorch for CPUs lack.

What it found, on torch 2.13:

    layer                                                mesh      on             verdict causes
  transformers 5.23.0
    LlamaForCausalLM                                     tp=2      simulated gloo right
    Qwen2ForCausalLM                                     tp=2      simulated gloo right
    Qwen3ForCausalLM                                     tp=2      simulated gloo right
    MistralForCausalLM                                   tp=2      simulated gloo right
    Gemma2ForCausalLM                                    tp=2      simulated gloo right
    MixtralForCausalLM                                   tp=2      simulated gloo right
    Qwen3MoeForCausalLM                                  tp=2      simulated gloo right
    MixtralForCausalLM, experts by all_to_all            tp=2      simulated gloo right
    Qwen3MoeForCausalLM, experts by all_to_all           tp=2      simulated gloo right
    GptOssForCausalLM, experts by all_to_all             tp=2      simulated gloo right
    MixtralForCausalLM, experts by all_reduce            tp=2      simulated gloo right
    Qwen3MoeForCausalLM, experts by all_reduce           tp=2      simulated gloo right
    GptOssForCausalLM, experts by all_reduce             tp=2      simulated gloo right
  torchtitan 0.3.0
    Llama3(spmd_types)                                   tp=2      simulated gloo right
    Llama3(spmd_types), sequence parallel                tp=2      simulated      wrong   part of a sum
    Llama3(spmd_types), sequence parallel, summed later  tp=2      simulated gloo right
    Llama3(partial_dtensor)                              tp=2      simulated gloo right
    Llama3(partial_dtensor), sequence parallel           tp=2      simulated gloo right
    parallelize_llama(partial_dtensor), with FSDP        dp=2,tp=2 simulated gloo right

In torchtitan's default backend, `spmd_types`, the weights of norms have the gradient of this rank's part of the
sequence. Its source says that FSDP sums them after backward, which `Partial()` states. FSDP itself was run with the
backend `partial_dtensor` alone: fully_shard of PyTorch 2.13 refuses the plain tensors of the other. The tensor-parallel
plan of GptOss divides the embedding alone. The attention of torchtitan's language models (flex or varlen) has no
backward on a CPU; in its place the model has torchtitan's ScaledDotProductAttention here.
"""

import contextlib
import importlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from audit_sharded_layers import Layer, main
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Partial, Shard


def perturbed(model: nn.Module) -> nn.Module:
    """Change all parameters: norms and biases start as ones and zeros."""
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model


# ── Transformers ─────────────────────────────────────────────────────────────────────────────────────────


def by_its_plan(whole: Any, mesh: Any, experts: str = "") -> nn.Module:
    """Make the model in this process and shard it by its own plan, as from_pretrained does with a DistributedConfig."""
    from transformers.distributed import DistributedConfig
    from transformers.distributed.expert_parallel import apply_expert_parallelism
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism
    from transformers.utils.logging import set_verbosity_error

    set_verbosity_error()
    tp = mesh["tp"]
    settings = {"ep_size": tp.size(), "ep_implementation": experts} if experts else {}
    model = type(whole)(whole.config)
    plan, of_experts, _ = model._resolve_parallel_plans(DistributedConfig(tp_size=tp.size(), **settings))
    model = apply_tensor_parallelism(model, tp, plan)
    return apply_expert_parallelism(model, tp, tp, of_experts, ep_implementation=experts) if experts else model


def transformers() -> Iterator[Layer]:
    package = importlib.import_module("transformers")
    package.logging.set_verbosity_error()
    common = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    common |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 32}
    common |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "attn_implementation": "eager"}
    experts = {"num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.1}

    def loss(module: Any, ids: Tensor) -> Tensor:
        return module(input_ids=ids, labels=ids, use_cache=False).loss

    def of(name: str, dispatch: str = "", **more: Any) -> Layer:
        def shard(whole: Any, mesh: Any) -> nn.Module:
            return by_its_plan(whole, mesh, dispatch)

        torch.manual_seed(0)
        config = getattr(package, f"{name}Config")(**common, **more, tie_word_embeddings=False)
        model = perturbed(getattr(package, f"{name}ForCausalLM")(config).float())
        title = f"{name}ForCausalLM" + (f", experts by {dispatch}" if dispatch else "")
        return Layer(title, torch.randint(3, 16, (2, 6)), loss, loss, model, shard)

    yield from map(of, ("Llama", "Qwen2", "Qwen3", "Mistral", "Gemma2"))
    for dispatch in ("", "all_to_all", "all_reduce"):
        yield of("Mixtral", dispatch, num_local_experts=4, **experts)
        yield of("Qwen3Moe", dispatch, num_experts=4, moe_intermediate_size=8, **experts)
        if dispatch:
            yield of("GptOss", dispatch, num_local_experts=4, **experts)


# ── torchtitan ───────────────────────────────────────────────────────────────────────────────────────────


def titan(name: str) -> Any:
    """Import a module of torchtitan, and let it use the CPU."""
    warnings.simplefilter("ignore")
    importlib.import_module("torchtitan.distributed.parallel_dims").device_type = "cpu"
    attention = importlib.import_module("torchtitan.models.common.attention").ScaledDotProductAttention
    attention.sdpa_backends = [importlib.import_module("torch.nn.attention").SDPBackend.MATH]
    return importlib.import_module(f"torchtitan.{name}")


def llama(sequence_parallel: bool) -> nn.Module:
    of, common = titan("models.llama3"), titan("models.common")
    make = titan("models.common.config_utils")
    init = {"weight": nn.init.normal_}

    def norm() -> Any:
        return common.RMSNorm.Config(normalized_shape=16, param_init={"weight": nn.init.ones_})

    def block() -> Any:
        return titan("models.llama3.model").Llama3TransformerBlock.Config(
            attention_norm=norm(),
            ffn_norm=norm(),
            attention=make.make_gqa_config(
                dim=16,
                n_heads=4,
                n_kv_heads=2,
                wqkv_param_init=init,
                wo_param_init=init,
                inner_attention=titan("models.common.attention").ScaledDotProductAttention.Config(),
                rope=common.ComplexRoPE.Config(dim=4, max_seq_len=16, theta=10000, scaling="none"),
            ),
            feed_forward=make.make_ffn_config(dim=16, hidden_dim=32, w1_param_init=init, w2w3_param_init=init),
        )

    config = of.Llama3Model.Config(
        dim=16,
        vocab_size=32,
        tok_embeddings=common.Embedding.Config(num_embeddings=32, embedding_dim=16, param_init=init),
        norm=norm(),
        lm_head=common.Linear.Config(in_features=16, out_features=32, param_init=init),
        layers=[block(), block()],
    )
    titan("models.llama3.sharding").set_llama3_sharding_config(config, enable_sp=sequence_parallel)
    torch.manual_seed(0)
    model = config.build()
    model.init_states()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.2)
    return perturbed(model)


def sharded_by_titan(backend: str, sequence_parallel: bool, whole_function: bool) -> Callable[[Any, Any], nn.Module]:
    """Shard by `Module.parallelize`, which divides the weights, or by `parallelize_llama`, which goes on to FSDP."""

    def shard(whole: Any, mesh: Any) -> nn.Module:
        of, settings = titan("distributed"), titan("config")
        tp = mesh["tp"].size()
        parallelism = settings.ParallelismConfig(
            tensor_parallel_degree=tp,
            data_parallel_shard_degree=mesh.size() // tp,
            enable_sequence_parallel=sequence_parallel,
            spmd_backend=backend,
        )
        dims = of.ParallelDims.from_config(parallelism, mesh.size())
        dims.build_mesh()
        whole.context = titan("distributed.utils").get_spmd_context(parallel_dims=dims)
        if not whole_function:
            whole.parallelize(dims)
            return whole
        titan("models.llama3").parallelize_llama(
            whole,
            parallel_dims=dims,
            training=settings.TrainingConfig(mixed_precision_param="float32", mixed_precision_reduce="float32"),
            parallelism=parallelism,
            compile_config=settings.CompileConfig(enable=False),
            ac_config=None,
            dump_folder="",
        )
        for each in whole.modules():
            if isinstance(each, FSDPModule):
                each.set_force_sum_reduction_for_comms(True)  # gloo has no other
        return whole

    return shard


def logits(module: Any, ids: Tensor) -> Tensor:
    with getattr(module, "context", contextlib.nullcontext)():
        return module(ids)


def torchtitan() -> Iterator[Layer]:
    titan("distributed")
    ids = torch.randint(32, (4, 8), generator=torch.Generator().manual_seed(0))
    for backend in ("spmd_types", "partial_dtensor"):
        said = {"output": {"tp": Shard(2)}} if backend == "spmd_types" else {}
        for parallel in (False, True):
            name = f"Llama3({backend})" + (", sequence parallel" if parallel else "")
            shard = sharded_by_titan(backend, parallel, False)
            yield Layer(name, ids, logits, logits, llama(parallel), shard, said)
            if said and parallel:
                later = said | {"*norm.weight": {"tp": Partial()}}
                yield Layer(name + ", summed later", ids, logits, logits, llama(parallel), shard, later)
    yield Layer(
        "parallelize_llama(partial_dtensor), with FSDP",
        ids,
        logits,
        logits,
        llama(True),
        sharded_by_titan("partial_dtensor", True, True),
        {"ids": {"dp": Shard(0)}, "output": {"dp": Shard(0)}},
        mesh={"dp": 2, "tp": 2},
        rank_reduction={"dp": "sum"},
    )


PACKAGES = (transformers, torchtitan)

if __name__ == "__main__":
    main(PACKAGES)
