"""The composed functions, and the definitions."""

from mutants.mutant import Mutant

BATCH, RING, HALO = (f"tests/composed/test_{name}.py" for name in ("gather_batch", "ring", "halo_exchange"))


def of(name: str) -> str:
    """Return the worked examples of a collective."""
    return f"tests/collectives/test_{name}.py -k truth"


MUTANTS = [
    # gather_batch: where this rank's rows are; the sum of the ranks' gradients; which trees fit
    Mutant(
        "composed/leaves.py",
        "number_of_rows",
        "if len(leaf) != len(leaves[0]):",
        "if len(leaf) < len(leaves[0]):",
        "gather_batch arguments",
        BATCH,
    ),
    Mutant("composed/leaves.py", "_facts", "leaf.shape[1:]", "leaf.shape[2:]", "gather_batch errors", BATCH),
    Mutant("composed/leaves.py", "_facts", "{leaf.dtype} ", "", "gather_batch ring errors", f"{BATCH} {RING}"),
    # ring: whose block it is; sizes of the blocks under way; gradients of received blocks; memory
    Mutant("composed/ring.py", "_blocks", "sum(sizes[(r - i) % n][j]", "sum(sizes[r][j]", "ring sizes", RING),
    Mutant("core/trees.py", "unpacked", ".view(shapes[i]).clone()", ".view(shapes[i])", "ring inputs", RING),
    Mutant("composed/ring.py", "_blocks", "if i + 1 < n:", "if n:", "ring", f"{RING}::test_messages"),
    # halo_exchange: widths; ends; sides; the gradient of rows that others have received
    # groups that are not the default one
    # the definitions, each against numbers that were computed by hand
    Mutant(
        "truth.py",
        "_Copies.backward",
        "one(list(gys)), None",
        "fold(add, gys), None",
        "truth replicate",
        of("all_reduce"),
    ),
    Mutant(
        "truth.py",
        "_One.backward",
        "copies(gx, ctx.n)",
        "copies(gx / ctx.n, ctx.n)",
        "truth sum_gradients split",
        of("sum_gradients"),
    ),
    Mutant("truth.py", "_One.forward", "if not same:", "if not same and False:", "truth", of("sum_gradients")),
    Mutant(
        "truth.py",
        "_everywhere",
        "[y.clone() for _ in range(n)]",
        "[y] * n",
        "truth inputs",
        "tests/testing/test_simulate.py::test_results_in_a_joint_graph_share_no_memory_with_inputs",
    ),
    Mutant("truth.py", "all_to_all", "blocks[s][r]", "blocks[r][s]", "truth all_to_all", of("all_to_all")),
    Mutant("truth.py", "reduce", "if r == dst else _zero(y)", "", "truth reduce", of("reduce")),
    Mutant(
        "truth.py",
        "permute",
        "ys[dst] = _instead(xs[src], xs[dst])",
        "ys[src] = _instead(xs[dst], xs[src])",
        "truth permute shift",
        of("permute"),
    ),
    Mutant("truth.py", "shift", "0 <= r + offset < n", "r + offset < n", "truth shift", of("shift")),
    Mutant("truth.py", "scan", "(s > r) == reverse", "s > r", "truth scan", of("scan")),
    Mutant(
        "truth.py",
        "",
        '"mean": lambda xs: fold(add, xs) / len(xs)',
        '"mean": lambda xs: fold(add, xs) / (len(xs) - 1 or 1)',
        "truth mean",
        of("all_reduce"),
    ),
    Mutant(
        "truth.py",
        "",
        '"max": lambda xs: torch.stack(xs).amax(0)',
        '"max": lambda xs: torch.stack(xs).max(0).values',
        "truth max_min",
        "tests/core/test_reductions.py::test_ties",
    ),
    Mutant(
        "truth.py",
        "",
        "torch.logsumexp(torch.stack(xs), 0)",
        "torch.stack(xs).exp().sum(0).log()",
        "truth logsumexp",
        "tests/core/test_reductions.py::test_logsumexp_is_shifted",
    ),
    Mutant(
        "truth.py",
        "_wide",
        "return x.to(wider.get(x.dtype, x.dtype))",
        "return x",
        "truth dtypes",
        "tests/collectives/test_scan.py tests/collectives/test_all_reduce.py",
    ),
    Mutant(
        "truth.py",
        "_fitting",
        'if declared != "auto" and x.shape[dim] != declared[r]:',
        "if sizes and declared != sizes:",
        "truth sizes",
        "tests/testing/test_simulate.py::test_shapes_that_do_not_fit",
    ),
    Mutant(
        "truth.py",
        "_instead",
        "return torch.cat([y.reshape(-1, 1), none]).view(y.shape)",
        "return y",
        "truth broadcast",
        of("broadcast"),
    ),
    # gather_batch: this rank's place, a group, N times too large, what was padded
    Mutant("composed/gather_batch.py", "gather_batch", "sum(lengths[: engine.rank])", "engine.rank * rows",
           "gather_batch", "tests/composed/test_gather_batch.py"),
    Mutant("composed/gather_batch.py", "gather_batch", "engine = resolve(group, _NAME)", "engine = resolve(None, _NAME)",
           "gather_batch one_group", "tests/composed/test_gather_batch.py"),
    Mutant("composed/gather_batch.py", "gather_batch", "sizes=lengths)", 'sizes=lengths, grad_placement="replicate")',
           "gather_batch law", "tests/composed/test_gather_batch.py"),
    Mutant("composed/gather_batch.py", "gather_batch", "sum(lengths), mask", "rows * len(lengths), mask", "gather_batch",
           "tests/composed/test_gather_batch.py"),
    Mutant("composed/gather_batch.py", "_padded", "y[tuple(slice(size) for size in x.shape)] = x",
           "y[tuple(slice(size) for size in x.shape)] = x.detach()", "gather_batch law",
           "tests/composed/test_gather_batch.py"),
    Mutant("composed/gather_batch.py", "_mask", "first += rows", "first += 0", "gather_batch",
           "tests/composed/test_gather_batch.py"),
    Mutant("composed/gather_batch.py", "_lengths", "return [rows] * engine.size", "return [rows]", "gather_batch sizes",
           "tests/composed/test_gather_batch.py"),
    # ring: the direction, a block without its gradient, the group
    Mutant("composed/ring.py", "_blocks", "source, pending = (rank - i) % n, []", "source, pending = (rank + i) % n, []",
           "ring", "tests/composed/test_ring.py"),
    Mutant("composed/ring.py", "_blocks", "rebuild(unpacked(zip(groups, rows, strict=True), shapes)) if i else tree",
           "rebuild([x.detach() for x in unpacked(zip(groups, rows, strict=True), shapes)]) if i else tree", "ring law",
           "tests/composed/test_ring.py"),
    Mutant("composed/ring.py", "passed_on", "all_to_all(row, group=group,", "all_to_all(row,", "ring one_group",
           "tests/composed/test_ring.py"),
    # halo_exchange: the other end's rows, the ends of the line, no gradient to the neighbour
    Mutant("composed/halo_exchange.py", "halo_exchange", "x.narrow(d, rows - left, left), 1,",
           "x.narrow(d, 0, left), 1,", "halo_exchange", "tests/composed/test_halo_exchange.py"),
    Mutant("composed/halo_exchange.py", "halo_exchange", "x.narrow(d, 0, right), -1,", "x.narrow(d, 0, right), 1,",
           "halo_exchange", "tests/composed/test_halo_exchange.py"),
    Mutant("composed/halo_exchange.py", "halo_exchange", 'padding_mode == "circular", [x]', 'True, [x]',
           "halo_exchange", "tests/composed/test_halo_exchange.py"),
    Mutant("composed/halo_exchange.py", "halo_exchange", "engine.rank == engine.size - 1", "engine.rank == engine.size",
           "halo_exchange", "tests/composed/test_halo_exchange.py"),
    Mutant("composed/halo_exchange.py", "halo_exchange", "after.narrow(d, 0, 0) if nothing else after",
           "after.detach()", "halo_exchange law", "tests/composed/test_halo_exchange.py"),
    Mutant("composed/halo_exchange.py", "halo_exchange", "-1, wrap=wrap, group=group)", "-1, wrap=wrap)",
           "halo_exchange one_group", "tests/composed/test_halo_exchange.py"),
    Mutant("composed/halo_exchange.py", "halo_exchange", "if rows < max(left, right):", "if False:",
           "halo_exchange arguments", "tests/composed/test_halo_exchange.py"),
    Mutant("truth.py", "_everywhere", 'if grad_placement == "replicate"', 'if grad_placement == "partial"',
           "truth replicate", "tests/collectives"),
]
