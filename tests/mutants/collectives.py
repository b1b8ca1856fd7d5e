"""The collectives, the reductions, and what they are made of: maps, blocks, trees, dtypes."""

from mutants.mutant import Mutant

TABLE = "tests/test_rules.py::test_the_table_in_simulated_worlds"
PROCESSES = "tests/test_rules.py::test_the_table_on_processes"
COMPLEX = "tests/test_rules.py::test_reductions_of_complex_numbers"
LAYOUTS = "tests/test_dtypes.py::test_layouts_that_differ_from_rank_to_rank"
EXAMPLES = "tests/collectives"
REDUCTIONS = "tests/core/test_reductions.py"
TREES = "tests/core/test_trees.py"
PENDING = "tests/core/test_pending.py::test_memory_may_change_once_a_collective_has_been_started"
COMPOSED = "tests/composed"
WRONG = "tests/test_mistakes.py::test_mistakes"
AUTO = "tests/test_disagreements.py::test_dimensions_beside_that_of_auto_sizes"


def of(name: str) -> str:
    """Return a collective's rows of the table of properties."""
    return f"{TABLE} -m 'not slow' -k '[{name}-'"


def of_map(function: str, old: str, new: str, promise: str, tests: str = "") -> Mutant:
    """Return a mutant of core/maps.py; the first promise names the collective."""
    return Mutant("core/maps.py", function, old, new, promise, tests or of(promise.split()[0]))


def of_reduction(function: str, old: str, new: str, promise: str, tests: str = REDUCTIONS) -> Mutant:
    """Return a mutant of core/reductions.py."""
    return Mutant("core/reductions.py", function, old, new, promise, tests)


MUTANTS = [
    # all_reduce: the gradient without its sum, N times too large; memory, not values
    of_map("AllReduce.adjoint", "if self.replicated else self", "", "all_reduce law"),
    of_map("AllReduce.adjoint", "SumGradients(self.engine) if self.replicated else", "", "all_reduce replicate law"),
    of_map(
        "AllReduce.start",
        "torch.empty_like(x) if x.is_contiguous() else",
        "torch.empty_like(x) if True else",
        "all_reduce gloo",
        LAYOUTS,
    ),
    of_map(
        "Linear.shared",
        'getattr(self, "replicated", False)',
        "False",
        "all_reduce replicate",
        of("all_reduce"),
    ),
    # sum_gradients and split: no sum; N times too large in second order; no copy; offsets of uneven blocks
    of_map("SumGradients.adjoint", "return AllReduce(self.engine, True)", "return self", "sum_gradients law"),
    of_map(
        "SumGradients.adjoint", "AllReduce(self.engine, True)", "AllReduce(self.engine)", "sum_gradients second_order"
    ),
    of_map("SumGradients.start", "x.clone(memory_format=_DENSE)", "x.contiguous()", "sum_gradients inputs"),
    of_map("Split.start", "sum(sizes[:rank])", "rank * sizes[rank]", "split sizes"),
    of_map("Split.adjoint", "self.sizes, True)", "self.sizes, False)", "split second_order"),
    of_map("Split.start", ".clone(memory_format=_DENSE)", ".contiguous()", "split inputs"),
    # scan: the direction of the gradient; this rank's own; one round too few where N is no power of two
    of_map("Scan.adjoint", "not self.reverse", "self.reverse", "scan law"),
    of_map("Scan.adjoint", "not self.reverse, self.exclusive", "not self.reverse", "scan"),
    of_map("Scan.start", "while distance < self.engine.size", "while distance <= self.engine.size // 2", "scan"),
    of_map("Scan.start", "wider(x.dtype)", "x.dtype", "scan dtypes", EXAMPLES),
    of_map("Scan._shift", "0 <= source < n", "source < n", "scan"),
    of_map("Scan.start", "y += before", "y = before.clone()", "scan"),
    # all_gather and reduce_scatter: the local slice kept; N times too large; off in second order only
    of_map("AllGather.adjoint", "Split if self.replicated else ReduceScatter", "Split", "all_gather law"),
    of_map("AllGather.adjoint", "Split if self.replicated else ReduceScatter", "ReduceScatter", "all_gather replicate"),
    of_map("AllGather.adjoint", "self.dim, self.sizes)", "self.dim, self.sizes[::-1])", "all_gather sizes"),
    of_map(
        "AllGather.shape",
        "x[self.dim] * self.engine.size",
        "x[self.dim]",
        "all_gather compile",
        "tests/core/test_compiled.py",
    ),
    Mutant(
        "collectives/all_gather.py",
        "block_of",
        'call.arguments.get("stack", False) or x.dim() == 0',
        "x.dim() == 0",
        "all_gather",
        of("all_gather"),
    ),
    of_map(
        "ReduceScatter.adjoint", "self.dim, self.sizes)", "self.dim, self.sizes, True)", "reduce_scatter second_order"
    ),
    of_map("ReduceScatter.adjoint", "self.dim, self.sizes)", "self.dim, self.sizes[::-1])", "reduce_scatter sizes"),
    Mutant("core/blocks.py", "row_of", "prod(x.shape[:dim]) == 1", "dim <= 1", "reduce_scatter", of("reduce_scatter")),
    # all_to_all, and so gather and scatter: dimensions or sizes of the way back are those of the way there
    of_map("AllToAll.adjoint", "self.concat_dim, self.split_dim,", "self.split_dim, self.concat_dim,", "all_to_all"),
    of_map(
        "AllToAll.adjoint",
        "self.concat_sizes, self.split_sizes",
        "self.split_sizes, self.concat_sizes",
        "all_to_all sizes",
    ),
    of_map("AllToAll.start", "self.split_sizes), recvs", "self.split_sizes), recvs[::-1]", "all_to_all gather"),
    Mutant(
        "core/blocks.py", "join", "prod(shape[:dim]) == 1", "dim <= 1", "gather all_gather all_to_all", of("gather")
    ),
    Mutant(
        "core/blocks.py",
        "cut",
        "[block.contiguous() for block in x.split_with_sizes(list(sizes), dim)]",
        "list(x.split_with_sizes(list(sizes), dim))",
        "scatter all_to_all gloo",
        f"{LAYOUTS} {EXAMPLES}",
    ),
    of_map("AllToAll.to_root", "sizes if rank == root else (0,) * n", "sizes", "gather"),
    of_map("AllToAll.to_root", "sizes[rank] if s == root", "sizes[rank] if s == 0", "gather law"),
    Mutant(
        "collectives/gather.py",
        "gather",
        "to_root(call.engine, root, d, lengths)",
        "to_root(call.engine, root, d, lengths[::-1])",
        "gather sizes",
        of("gather"),
    ),
    Mutant(
        "collectives/scatter.py",
        "scatter",
        "root, d, parts)",
        "root, d, parts[::-1])",
        "scatter sizes",
        of("scatter"),
    ),
    Mutant(
        "collectives/scatter.py",
        "scatter",
        "x.narrow(d, 0, 0)",
        "x.detach().narrow(d, 0, 0)",
        "scatter law",
        of("scatter"),
    ),
    Mutant(
        "collectives/scatter.py",
        "scatter",
        "to_root(call.engine, root,",
        "to_root(call.engine, 0,",
        "scatter",
        of("scatter"),
    ),
    # broadcast and reduce: only the loss of one rank counts; N times too large; the input of the root
    of_map("Broadcast.adjoint", "Keep if self.replicated else Reduce", "Keep", "broadcast law"),
    of_map("Broadcast.adjoint", "Keep if self.replicated else Reduce", "Reduce", "broadcast replicate"),
    of_map("Keep.start", "if mine else torch.zeros_like(x, memory_format=_DENSE)", "", "broadcast replicate"),
    of_map("Keep.adjoint", "self.src, replicated=True", "self.src", "broadcast replicate second_order"),
    of_map("Broadcast.start", "x.clone(memory_format=_DENSE)", "x.clone()", "broadcast", LAYOUTS),
    of_map(
        "Reduce.start",
        "y if self.engine.rank == self.dst else torch.zeros_like(x, memory_format=_DENSE)",
        "y",
        "reduce inputs",
    ),
    of_map("Reduce.start", "x.clone(memory_format=_DENSE) if self.engine.rank == self.dst else", "", "reduce inputs"),
    of_map("Reduce.adjoint", "Broadcast(self.engine, self.dst)", "Keep(self.engine, self.dst)", "reduce law"),
    of_map("Reduce.adjoint", "self.engine, self.dst)", "self.engine, self.dst, True)", "reduce second_order"),
    # permute and shift: pairs not reversed; one's own x where none is received; directions, ends of the line
    of_map("Permute.adjoint", "tuple((dst, src) for src, dst in self.pairs)", "self.pairs", "permute shift law"),
    of_map(
        "Permute.start",
        "(x.new_zeros if source is None else x.new_empty)(x.shape)",
        "x.clone() if source is None else x.new_empty(x.shape)",
        "permute",
    ),
    of_map(
        "Permute.start",
        "x.contiguous() if s == target",
        "x.contiguous() if s == target != rank",
        "permute",
        f"{EXAMPLES}/test_broadcast.py -k permute",
    ),
    Mutant("collectives/shift.py", "shift", "(r, (r + by) % n)", "(r, (r - by) % n)", "shift", of("shift")),
    Mutant("collectives/shift.py", "shift", "0 <= r + by < n", "r + by < n", "shift", of("shift")),
    Mutant("collectives/shift.py", "shift", "if wraps or 0 <= r + by < n", "", "shift", of("shift")),
    # on one rank every map but two is the identity
    of_map("Scan", "identity_alone: ClassVar[bool] = False", "identity_alone: ClassVar[bool] = True", "scan one_group"),
    of_map(
        "Permute.identity_alone",
        "bool(self.pairs)",
        "True",
        "permute one_group",
        "tests/core/test_groups.py::test_no_group_is_a_world_of_one",
    ),
    # what op may be
    of_reduction("", '"avg": "mean"', '"avg": "sum"', "op mean"),
    of_reduction("", '"prod": "product"', '"prod": "sum"', "op product"),
    of_reduction(
        "spelled",
        "SPELLINGS.get(name.lower(), name)",
        'SPELLINGS.get(name.lower(), "sum")',
        "op arguments",
        f"{WRONG} {REDUCTIONS}",
    ),
    of_reduction(
        "",
        'Reduction("mean", "fractions")',
        'Reduction("mean", "numbers")',
        "op arguments dtypes",
        f"{WRONG} tests/test_dtypes.py",
    ),
    of_reduction("", '"max", "ordered"', '"max", "fractions"', "op arguments", f"{WRONG} tests/test_dtypes.py"),
    # the mean: not divided, divided twice; rounded before it is added up
    of_reduction("_mean", "divided(x.to(wide), f.engine.size)", "x.to(wide)", "mean law", of("all_reduce")),
    of_reduction(
        "_mean",
        "divided(x.to(wide), f.engine.size)",
        "divided(x, f.engine.size).to(wide)",
        "mean dtypes",
        f"{REDUCTIONS} tests/test_dtypes.py",
    ),
    of_reduction(
        "_mean",
        "if f.engine.size == 1:",
        "if f.engine.size == 2:",
        "mean",
        of("all_reduce"),
    ),
    # reductions that are not linear: each loss alone, or N times; whole stacks of small tensors, parts of large ones
    of_reduction(
        "_on_all_ranks", "apply(SumGradients(engine), y)", "y.clone()", "max_min law", f"{REDUCTIONS} {PROCESSES}"
    ),
    of_reduction(
        "_on_all_ranks",
        "if replicated or engine.size == 1:",
        "if engine.size == 1:",
        "op replicate",
        f"{REDUCTIONS} {PROCESSES}",
    ),
    of_reduction(
        "_on_all_ranks",
        "AllGather(engine, 0, sizes, replicated)",
        "AllGather(engine, 0, sizes, True)",
        "product law",
        of("all_reduce"),
    ),
    of_reduction(
        "_whole",
        "AllGather(engine, 0, (), True)",
        "AllGather(engine, 0, (), False)",
        "logsumexp law",
        f"{REDUCTIONS} {PROCESSES}",
    ),
    of_reduction("_on_all_ranks", "y.clone(memory_format=_DENSE)", "y", "max_min inputs", of("all_reduce")),
    of_reduction(
        "_blocks",
        "reduction.of(stack).clone(memory_format=_DENSE)",
        "reduction.of(stack)",
        "reduce_scatter inputs",
        of("reduce_scatter"),
    ),
    of_reduction(
        "_on_rank", "to_root(engine, dst, 0, sizes)", "to_root(engine, 0, 0, sizes)", "op reduce", of("reduce")
    ),
    of_reduction("_on_rank", "concatenated([y, y.new_zeros(x.numel())])", "x", "op reduce", of("reduce")),
    of_reduction("_on_rank", "apply(Keep(engine, dst), y)", "y", "reduce max_min", f"{PROCESSES} {REDUCTIONS}"),
    # max, min, product, logsumexp: one rank's alone, a wrong function, half precisions not in float32
    of_reduction("", "stack.amax(0)", "stack.max(0).values", "max_min", REDUCTIONS),
    of_reduction("", "stack.amin(0)", "stack.min(0).values", "max_min", REDUCTIONS),
    of_reduction("", "stack.amin(0)", "stack.detach().amin(0) + 0 * stack.sum(0)", "max_min law", of("all_reduce")),
    of_reduction(
        "",
        "fold(mul, stack.unbind(0))",
        "stack.prod(0)",
        "product forward_mode",
        "tests/test_nests.py tests/core/test_reductions.py",
    ),
    of_reduction(
        "",
        "fold(mul, stack.unbind(0))",
        "fold(mul, stack.unbind(0)[:-1]) * stack[-1].detach()",
        "product law",
        of("all_reduce"),
    ),
    of_reduction("", "fold(mul, stack.unbind(0))", "stack.log().sum(0).exp()", "product", of("all_reduce")),
    of_reduction("", "torch.logsumexp(stack, 0)", "stack.exp().sum(0).log()", "logsumexp", REDUCTIONS),
    of_reduction(
        "",
        "torch.logsumexp(stack, 0)",
        "torch.logsumexp(stack, 0) - 0.5 * (stack - stack.detach()).sum(0)",
        "logsumexp law",
        of("all_reduce"),
    ),
    of_reduction("Reduction.of", "stack.to(wider(stack.dtype))", "stack", "product logsumexp dtypes", REDUCTIONS),
    # pieces of a large stack, in their order
    of_reduction("_in_pieces.reduced", "return concatenated(pieces)", "return concatenated(pieces[::-1])", "max_min"),
    of_reduction("_in_pieces.reduced", "stack.flatten(1), columns, 1)", "stack.flatten(1), columns, 1)[:1]", "max_min"),
    # truth's and the rules' conjugates
    Mutant(
        "core/torch_private/tensors.py",
        "divided",
        "div.Scalar(x, divisor)",
        "div.Scalar(x, divisor * 2)",
        "mean complex",
        of("all_reduce"),
    ),
    # sizes that ranks exchange, and what must be equal then
    Mutant("core/exchange.py", "sizes_of_ranks", "-1, *x.shape[dim + 1 :]", "-1", "sizes errors", AUTO),
    Mutant(
        "core/exchange.py",
        "exchanged_alike",
        "if mine:",
        "if False:",
        "sizes errors",
        AUTO,
    ),
    Mutant(
        "core/exchange.py",
        "sizes_of_ranks",
        "[x.shape[dim] for x, dim in blocks]",
        "[len(x) for x, dim in blocks]",
        "sizes trees",
        TREES,
    ),
    Mutant(
        "core/exchange.py",
        "sizes_of_ranks",
        "zip(*rows, strict=True)",
        "zip(*rows[::-1], strict=True)",
        "sizes",
        of("all_gather"),
    ),
    Mutant(
        "core/arguments.py",
        "Call.sizes_of_blocks",
        "row[rank] for row",
        "row[0] for row",
        "sizes all_to_all",
        of("all_to_all"),
    ),
    # parts without numbers stay in the graph, or a rank lacks a message of the second backward; autocast
    Mutant("core/blocks.py", "as_row", "t.reshape(-1, 1)", "t.reshape(-1)", "trees law second_order", TREES),
    Mutant(
        "core/blocks.py",
        "_cat",
        "if not torch.is_autocast_enabled(kind):",
        "if kind:",
        "trees dtypes",
        "tests/test_dtypes.py::test_autocast_to_the_other_half_precision",
    ),
    # trees: order of leaves and ranks; a leaf's dtype and memory are its own; keys in another order
    Mutant(
        "core/trees.py",
        "by_dtype",
        "(leaf.dtype, leaf.device), []",
        "(leaf.is_floating_point(), leaf.device), []",
        "trees dtypes",
        TREES,
    ),
    Mutant("core/trees.py", "unpacked", ".clone() for i", " for i", "trees inputs", f"{TREES} {COMPOSED}"),
    Mutant(
        "core/tree_calls.py",
        "by_blocks.unpack",
        "for s in range(n) for i in indices",
        "for i in indices for s in range(n)",
        "trees all_gather",
        TREES,
    ),
    Mutant("core/trees.py", "_keys", "return sorted(tree)", "return list(tree)", "trees", TREES),
    Mutant(
        "core/tree_calls.py",
        "by_blocks",
        "sizes_of_all(b, d) or",
        "sizes_of_all(b, 0) or",
        "trees sizes",
        TREES,
    ),
    Mutant("core/tree_calls.py", "by_message", "call.tensor(leaf)", "pass", "trees errors", WRONG),
    # dtypes
    Mutant(
        "core/dtypes.py",
        "",
        "torch.bfloat16: torch.float32, ",
        "",
        "dtypes",
        "tests/test_dtypes.py::test_half_precisions_are_added_up_in_single",
    ),
    Mutant("core/dtypes.py", "", "{torch.float16: torch.float32, ", "{", "dtypes mean", EXAMPLES),
    # a result that is taken before it has come; uneven sizes are no disagreement
    of_map("_then", "        wait()\n", "", "async_op gloo", f"{PROCESSES} {EXAMPLES}"),
    of_map(
        "AllGather.common_shape",
        "_with(x, self.dim, -1) if self.sizes else list(x)",
        "list(x)",
        "check_mode sizes",
        "tests/test_disagreements.py",
    ),
    # x is read at once, so it may change before the wait
    of_map("AllGather._start", "if not later:", "if True:", "async_op inputs all_gather", PENDING),
    of_map(
        "Reduce",
        'name: ClassVar[str] = "reduce"\n',
        'name: ClassVar[str] = "reduce"\n    reads_at_once: ClassVar[bool] = True\n',
        "async_op inputs reduce",
        PENDING,
    ),
    of_map(
        "AllToAll",
        'name: ClassVar[str] = "all_to_all"\n',
        'name: ClassVar[str] = "all_to_all"\n    reads_at_once: ClassVar[bool] = True\n',
        "async_op inputs all_to_all",
        PENDING,
    ),
    # on one rank and on many: what the call of a wrong map would send
    Mutant(
        "core/arguments.py",
        "Call.perform",
        "return y if after is None else after(y)",
        "return y",
        "op mean dtypes",
        f"{REDUCTIONS} {of('all_reduce')}",
    ),
]
