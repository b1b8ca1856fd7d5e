"""Verdicts of the check of sharded programs."""

import pytest
import torch
from programs import cached_rank
from sharded_programs import (
    MLP,
    PROGRAMS,
    Plain,
    ShardedMLP,
    data_and_tensor,
    layer,
    loss,
    mlp,
    pipeline,
    sequence,
)
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from verdicts import SIMULATED, causes, differs, matches, numbers, ruled

import diffcoll as dc
from diffcoll.testing import assert_matches_single_process

ON = ["simulated", pytest.param("gloo", marks=pytest.mark.slow)]
WRONG = [(make, bug, cause) for make, bugs in PROGRAMS.items() for bug, cause in bugs.items()]


@pytest.mark.parametrize("on", ON)
@pytest.mark.parametrize("make", PROGRAMS, ids=lambda make: make.__name__)
def test_a_right_program_passes(make, on):
    matches(make(""), on=[on])


@pytest.mark.parametrize("on", ON)
@pytest.mark.parametrize(("make", "bug", "cause"), WRONG, ids=[f"{make.__name__}-{bug}" for make, bug, _ in WRONG])
def test_a_wrong_program_is_caught(make, bug, cause, on):
    report = differs(make(bug), on=[on])
    found = causes(report)
    assert found == [cause] if cause else set(found) <= {"another loss", "wrong in direction"}, str(report)


def test_somebody_may_sum_later():
    matches(sequence("said to be partial"))


def test_the_first_submodule_that_differs():
    report = differs(mlp("g"))
    assert report.first.output == "down"
    line = "  first output that differs: down; first gradient in backward order that differs: down"
    assert str(report).splitlines()[1] == line
    report = differs(mlp("f"))
    assert (report.first.output, report.first.gradient) == (None, None) and "first" not in str(report).splitlines()[1]
    assert matches(mlp("")).first is None


def test_what_was_taken_from_shapes_is_said():
    notes = differs(mlp("f")).notes
    assert "down.weight: taken to be Shard(1) on tp, by its shape; placements= may say otherwise" in notes
    assert not matches(mlp("")).notes


def test_numbers_settle_what_shapes_leave_open():
    """With axes of the same size a shape may be a piece of either; the numbers that a module holds say which."""
    more = {"mesh": {"dp": 2, "tp": 2}, "placements": {"x": {"dp": Shard(0)}}}

    def copied(whole, mesh):
        module = ShardedMLP(mesh, "")
        group = mesh["tp"].get_group()
        with torch.no_grad():
            module.up.weight.copy_(whole.up.weight.chunk(2)[group.rank()])
            module.up.bias.copy_(whole.up.bias.chunk(2)[group.rank()])
            module.down.weight.copy_(whole.down.weight.chunk(2, 1)[group.rank()])
        return module

    *functions, given = data_and_tensor("")
    matches((*functions, {**given, **more, "shard": copied}))
    words = r"up.weight: got shapes \(4, 3\) of \(8, 3\) on the ranks of dp=2, tp=2, which may be Shard\(0\) on tp or "
    with pytest.raises(ValueError, match=words):
        matches((*functions, given), mesh=more["mesh"])


def test_numbers_in_another_order_are_asked_for():
    """A layer that is divided otherwise than its shape suggests, and filled from the whole, would be called wrong."""

    def interleaved(whole, at):
        return whole[at["tp"] :: at.mesh["tp"]]

    def shard(whole, mesh):
        module, rank = ShardedMLP(mesh, ""), mesh.get_local_rank("tp")
        with torch.no_grad():
            module.up.weight.copy_(whole.up.weight[rank::2])
            module.up.bias.copy_(whole.up.bias[rank::2])
            module.down.weight.copy_(whole.down.weight[:, rank::2])
        return module

    more = {"module": MLP(), "shard": shard, "mesh": {"tp": 2}}
    with pytest.raises(ValueError, match=r"up.weight: got numbers of the whole in another order than Shard\(0\) on tp"):
        matches((loss, loss, numbers(5, 3), more))
    said = {"up.*": interleaved, "down.weight": {"tp": lambda whole, at: interleaved(whole.T, at).T}}
    matches((loss, loss, numbers(5, 3), more), placements=said)


def test_two_axes_of_pytorchs_own():
    """FSDP of a model that tensor parallelism has divided: rows are divided twice."""
    from torch.distributed.fsdp import fully_shard

    def shard(whole, mesh):
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel(use_local_output=False)}
        return fully_shard(parallelize_module(whole, mesh["tp"], plan), mesh=mesh["dp"])

    more = {"placements": {"x": {"dp": Shard(0)}}, "rank_reduction": {"dp": "mean"}}
    model = Plain()
    model.up.bias.requires_grad_(False)
    for dtype in (torch.double, torch.float):
        of_dtype = {"module": model.to(dtype), "shard": shard, "mesh": {"dp": 2, "tp": 2}, **more}
        matches((loss, loss, numbers(6, 3).to(dtype), of_dtype))


def test_a_layer_of_data_and_tensor_parallelism():
    """Outputs whose rows are spread over an axis on which gradients are averaged."""
    distributed, single, _, more = data_and_tensor("", layer)
    matches((distributed, single, numbers(6, 3), more))


def test_wrapped_layers_of_pytorch():
    """A norm of a part of the sequence, whose gradient DTensor leaves as parts of a sum, and a checkpoint's wrapper."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    class Model(Plain):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(3, dtype=torch.double)

        def forward(self, x):
            return super().forward(self.norm(x))

    def shard(whole, mesh):
        plan = {"norm": SequenceParallel(), "up": ColwiseParallel(input_layouts=Shard(1))}
        parallelize_module(whole, mesh["tp"], {**plan, "down": RowwiseParallel(output_layouts=Shard(1))})
        whole.up = checkpoint_wrapper(whole.up)
        return whole

    more = {"module": Model(), "shard": shard, "mesh": {"tp": 2}, "placements": {"x": {"tp": Shard(1)}}}
    matches((layer, layer, numbers(2, 6, 3), more))


def test_an_argument_holds_no_parameter():
    """An argument that is called as a submodule is: its placement is not that of the submodule's parameters."""

    class Encoders(nn.Module):
        def __init__(self):
            super().__init__()
            self.image, self.text = (nn.Linear(3, 2, dtype=torch.double) for _ in range(2))

    def product(model, image, text):
        return (model.image(image) * model.text(text)).sum(1).sin().mean()

    placed = {"image": {"dp": Shard(0)}, "text": {"dp": Shard(0)}}
    more = {"module": Encoders(), "shard": lambda whole, mesh: whole, "mesh": {"dp": 2}, "placements": placed}
    matches((product, product, (numbers(6, 3), numbers(3, 6).T), more | {"rank_reduction": {"dp": "mean"}}))


def causes_of(*program, **more):
    report = differs((*program, more))
    return set(causes(report)), " ".join(str(report).split())


def test_what_two_causes_explain_is_not_named():
    """Equal parts of a sum are a factor; a factor of two axes is said of both; a mask explains no right value."""
    more = data_and_tensor("")[3] | {"mesh": {"dp": 2, "tp": 2}}
    more["placements"] |= {"up.*": {"tp": Shard(0)}, "down.weight": {"tp": Shard(1)}}
    names, text = causes_of(lambda module, x: loss(module, x) / 2, loss, numbers(6, 3), **more)
    assert names == {"scaled over an axis"} and "1 divided by the size of dp or 1 divided by the size of tp" in text

    twice = ruled(torch.clone, lambda g: g * min(2, dc.get_world_size()))

    def masked(x, mask):
        return (twice(x).sin() * mask).sum()

    mask = torch.tensor([True, False] * 3)[:, None]
    names, text = causes_of(masked, masked, (numbers(6, 2), mask), mesh={"tp": 3})
    assert names == {"multiplied"} and "mask" not in text.partition("diagnosis")[2]


def test_the_piece_of_another_rank():
    x = numbers(6, 2)
    placed = {"x": {"cp": Shard(0)}}
    names, text = causes_of(dc.shift, lambda x: x * 1, x, mesh={"cp": 3}, placements=placed)
    assert names == {"another piece"} and "output: rank 0 has that of rank 2, rank 1 has that of rank 0" in text

    def doubled(x):  # two ranks should have the same
        return torch.cat([x[:4], x[:2]])

    def of_others(x):
        return dc.all_gather(x).chunk(3)[(1, 0, 0)[dc.get_rank()]]

    names, _ = causes_of(of_others, doubled, x, mesh={"cp": 3}, placements=placed)
    assert "another piece" not in names


def test_tied_parameters_buffers_and_integers():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = (nn.Linear(3, 3, bias=False, dtype=torch.double) for _ in range(2))
            self.second.weight = self.first.weight
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
            self.frozen = nn.Parameter(torch.zeros(1), requires_grad=False)

        def forward(self, x):
            self.calls += 1
            return self.second(self.first(x).tanh())

    def results(module, x):
        return loss(module, x), len(x), x > 0

    more = {"module": Model(), "shard": lambda whole, mesh: whole, "mesh": {"dp": 2}}
    more |= {"placements": {"x": {"dp": Shard(0)}}, "rank_reduction": {"dp": "mean"}}
    report = matches((results, results, numbers(6, 3), more))
    rows = [row.what for row in report.tables[0].rows]
    assert {"gradient of second.weight", "buffer calls", "value[0]", "output[1]", "output[2]"} <= set(rows)

    def counts_ranks(module, x):
        with torch.no_grad():
            module.frozen += dc.get_world_size()
        return loss(module, x)

    assert causes(differs((counts_ranks, counts_ranks, numbers(6, 3), more))) == ["another state"]

    def untied(whole, mesh):
        whole.second.weight = nn.Parameter(whole.first.weight.detach().clone())
        return whole

    differs((results, results, numbers(6, 3), more), shard=untied)


def test_state_that_simulated_ranks_share():
    def distributed(module, x):
        return layer(module, x) * (cached_rank() + 1)

    def single(module, x):
        return layer(module, x) * (1 + torch.arange(len(x)) // 3)[:, None]

    more = {"module": Plain(), "shard": lambda whole, mesh: whole, "rank_reduction": {"dp": "sum"}}
    more |= {"mesh": {"dp": 2}, "placements": {"x": {"dp": Shard(0)}}, "on": ["simulated", "gloo"]}
    cached_rank.cache_clear()
    report = differs((distributed, single, numbers(6, 3), more))
    assert causes(report) == ["shared state"], str(report)


MLP_ARGUMENTS = {"module": MLP(), "shard": lambda whole, mesh: ShardedMLP(mesh, ""), "mesh": {"tp": 2}}


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"mesh": 2}, r"mesh: got 2, expected the sizes of the axes by name"),
        ({"mesh": []}, r"mesh: got \[\], expected the sizes"),
        ({"mesh": {"tp": 0}}, r"mesh: got 'tp': 0, expected .* at least 1"),
        ({"mesh": [{"tp": 2}, {"dp": 2}]}, r"mesh: got axes \['dp'\], expected those of the first mesh, \['tp'\]"),
        ({"mesh": None}, r"shard: got no mesh with it, expected mesh= too"),
        ({"sizes": [(2, 3)]}, r"sizes: got sizes with mesh=, expected one of the two"),
        ({"order": 2}, r"order: got 2 with mesh=, expected 1"),
        ({"on": ["mpi"]}, r'on: got "mpi" with mesh=, expected "simulated", "gloo" or "nccl"'),
        (
            {"rank_reduction": "mean"},
            r'rank_reduction: got \'mean\', expected "mean" or "sum" by axis, such as {"tp": "mean"}',
        ),
        ({"rank_reduction": {"dp": "mean"}}, r"rank_reduction: got 'dp', expected \"tp\""),
        ({"rank_reduction": {"tp": "max"}}, r"rank_reduction\['tp'\]: got 'max', expected \"mean\" or \"sum\""),
        ({"placements": [Shard(0)]}, r"placements: got .*, expected placements by the name of a tensor"),
        ({"placements": {"x": Shard(0)}}, r"placements\['x'\]: got .*, expected placements by axis, or one function"),
        ({"placements": {"x": {"dp": Shard(0)}}}, r"placements\['x'\]: got 'dp', expected \"tp\""),
        ({"placements": {"x": {"tp": 0}}}, r"placements\['x'\]\['tp'\]: got 0, expected Shard\(dim\), Replicate"),
        ({"placements": {"y": {"tp": Shard(0)}}}, r"placements: got 'y', expected one of x, up.weight, .*, output"),
        (
            {"placements": {"x": {"tp": Shard(2)}}},
            r"placements\['x'\]: got Shard.* on tp of a tensor of shape \(5, 3\)",
        ),
        ({"placements": {"x": lambda whole, at: None}}, r"placements\['x'\]: got a function that returned NoneType"),
        ({"placements": {"up.*": {"tp": Replicate()}}}, r"up.weight: got shape \(4, 3\) on rank 0, expected \(8, 3\)"),
        ({"shard": lambda whole, mesh: None}, r"shard: got a function that returned NoneType, expected a module"),
        ({"shard": lambda whole, mesh: nn.Linear(3, 3)}, r"shard: got a module with parameter weight, expected those"),
        ({"shard": lambda whole, mesh: nn.Tanh()}, r"shard: got no up.weight on any rank, expected every parameter"),
        ({"shard": 3}, r"shard: got int, expected a function"),
        ({"compare": ["state"]}, r"compare: got only state, of which there is nothing"),
        ({"module": None}, r"module: got NoneType, expected an nn.Module, which shard= gets"),
    ],
)
def test_wrong_arguments(more, words):
    with pytest.raises((TypeError, ValueError), match=words):
        assert_matches_single_process(loss, loss, numbers(5, 3), **{**SIMULATED, **MLP_ARGUMENTS, **more})


def test_wrong_batches():
    more = {**MLP_ARGUMENTS, **SIMULATED}
    with pytest.raises(TypeError, match=r"batch: got a function with mesh=, expected the whole batch"):
        assert_matches_single_process(loss, loss, lambda rows: numbers(rows, 3), **more)
    equal = torch.ones(4, 3, dtype=torch.double)
    with pytest.raises(ValueError, match=r"batch: got the same pieces of x on ranks 0 and 1, expected different ones"):
        assert_matches_single_process(loss, loss, equal, placements={"x": {"tp": Shard(0)}}, **more)
    with pytest.raises(ValueError, match=r"single: got gradients that are all zero"):
        assert_matches_single_process(loss, lambda module, x: x.detach().sum() + 0 * x.sum(), numbers(5, 3), **more)


def test_a_module_that_the_functions_do_not_use():
    def without(x):
        return x.sin().mean()

    with pytest.raises(ValueError, match=r"module: got parameters of which none has a gradient"):
        assert_matches_single_process(without, without, numbers(5, 3), module=Plain(), mesh={"tp": 2})


def test_nothing_of_the_users_is_modified():
    module, x = MLP(), numbers(5, 3)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    kept = x.clone()
    matches((loss, loss, x, MLP_ARGUMENTS), module=module, on=["simulated", "gloo"])
    assert torch.equal(x, kept) and all(p.grad is None for p in module.parameters())
    assert all(torch.equal(p, before[name]) for name, p in module.named_parameters())


def test_a_pipeline_has_each_parameter_on_one_rank():
    rows = [(row.what, row.rank) for row in matches(pipeline("")).tables[0].rows if "weight" in row.what]
    assert rows == [("gradient of up.weight", 0), ("gradient of down.weight", 1)]


class FabricLike(nn.Module):
    """Has the module twice, as the wrapper of Lightning's Fabric."""

    def __init__(self, module):
        super().__init__()
        self._forward_module, self._original_module = nn.parallel.DistributedDataParallel(module), module

    def forward(self, x):
        return self._forward_module(x)


def inner_in_ddp(module, mesh):
    module[0] = nn.parallel.DistributedDataParallel(module[0])
    return module


@pytest.mark.parametrize("shard", [lambda module, mesh: FabricLike(module), inner_in_ddp], ids=["Fabric", "inner DDP"])
def test_wrappers_leave_the_names(shard):
    matches(
        (
            lambda module, x: dc.nn.functional.token_mean(module(x).sin()),
            lambda module, x: module(x).sin().mean(),
            {
                "batch": numbers(7, 3),
                "module": nn.Sequential(nn.Linear(3, 2), nn.Tanh()).double(),
                "shard": shard,
                "mesh": {"dp": 3},
                "placements": {"x": {"dp": Shard(0)}},
                "rank_reduction": {"dp": "mean"},
            },
        )
    )
