"""Mutants of how programs are run on ranks: simulated ones, real processes, tests on ranks, `diffcoll verify`."""

from mutants.mutant import Mutant

SIMULATE = "tests/testing/test_simulate.py"
TRUTH = "tests/testing/test_truth.py"
SPAWN = "tests/testing/test_spawn.py"
RANKS = "tests/testing/test_ranks.py"
TORCH = "tests/testing/test_torch_distributed.py"
DELIVERY = "tests/engines/test_delivery.py"
VERIFY = "tests/cli/test_verify.py"
AS_GLOO = f"{TORCH}::test_same_as_gloo"

MUTANTS = [
    # the order of results and of what ranks bring
    Mutant(
        "engines/simulated/world.py",
        "World.run",
        "[rank.result for rank in ranks]",
        "[rank.result for rank in (*ranks[1:], ranks[0])]",
        "simulate true_gradients",
        SIMULATE,
    ),
    Mutant(
        "engines/simulated/world.py",
        "World.meet",
        "combine([meeting.entries[r].payload for r in ranks])",
        "combine([entry.payload for entry in meeting.entries.values()])",
        "simulate true_gradients",
        f"{SIMULATE} {DELIVERY}",
    ),
    # random numbers by (seed, rank), and what else each rank has for itself
    Mutant("engines/rank_state.py", "_stream", "seed * 1_000_003 + rank", "seed + rank", "simulate spawn", SIMULATE),
    Mutant(
        "engines/rank_state.py", "RankState.of_rank", "random.Random(stream)", "random.Random(0)", "simulate", SIMULATE
    ),
    Mutant("engines/rank_state.py", "RankState.set", "random.setstate(self.python)", "pass", "simulate", SIMULATE),
    Mutant(
        "engines/rank_state.py",
        "RankState.of_process",
        "numpy and numpy.random.get_state()",
        "None",
        "simulate",
        SIMULATE,
    ),
    Mutant(
        "engines/rank_state.py",
        "RankState.of_rank",
        "launched_as(rank, size)",
        "launched_as(0, size)",
        "simulate",
        SIMULATE,
    ),
    Mutant("engines/rank_state.py", "refuse_thread", "if outsiders and", "if False and", "simulate", SIMULATE),
    Mutant("engines/simulated/world.py", "World.run", "keep.set()", "pass", "simulate", SIMULATE),
    # mismatches and deadlocks
    Mutant(
        "engines/simulated/world.py",
        "World.meet",
        "elif entry.what != first.what:",
        "elif False:",
        "simulate",
        DELIVERY,
    ),
    Mutant(
        "engines/simulated/world.py",
        "World.meet",
        "elif entry.how != first.how:",
        "elif False:",
        "simulate",
        f"{DELIVERY} {TORCH}",
    ),
    Mutant(
        "engines/simulated/world.py",
        "World.leave",
        "if not self._ready and any(r.waits_for for r in self._ranks):",
        "if False:",
        "simulate",
        f"{TORCH} --timeout 20",
    ),
    Mutant(
        "engines/simulated/world.py", "World.run", "= self.failures[0]", "= self.failures[-1]", "simulate", SIMULATE
    ),
    Mutant("engines/simulated/engine.py", "LocalEngine.exchange", "self.now.detail", "None", "simulate", DELIVERY),
    Mutant(
        "engines/simulated/engine.py",
        "deliver",
        "(into.shape, into.dtype) != (block.shape, block.dtype)",
        "into.dtype != block.dtype",
        "simulate",
        DELIVERY,
    ),
    Mutant(
        "engines/simulated/engine.py",
        "LocalEngine.twin",
        "(*self.group.number, self._twins)",
        "self.group.number",
        "simulate",
        "tests/engines/test_laws.py",
    ),
    # torch.distributed on simulated ranks
    Mutant(
        "engines/simulated/group.py",
        "SimulatedGroup._exchange",
        "y.div_(self._engine.size,",
        "y.div_(2,",
        "simulate",
        AS_GLOO,
    ),
    Mutant(
        "engines/simulated/group.py", "SimulatedGroup.send", "if expected.tag == tag and", "if", "simulate", AS_GLOO
    ),
    Mutant("engines/simulated/group.py", "SimulatedGroup.recv", "and src in (None, source)", "", "simulate", AS_GLOO),
    Mutant("engines/simulated/c10d.py", "_of_maker", "and maker != _who()", "and False", "simulate", TORCH),
    # the ground truth of a program
    Mutant(
        "testing/truth.py",
        "_truth",
        "common[key] = [a[key] for a in arguments]",
        "common[key] = arguments[0][key]",
        "true_gradients",
        TRUTH,
    ),
    Mutant("testing/truth.py", "_truth", "if facts[r][1] != kind:", "if False:", "true_gradients", TRUTH),
    Mutant("testing/truth.py", "_refuse_on_ranks", "if THREAD.rank is not None:", "if False:", "true_gradients", TRUTH),
    Mutant("testing/truth.py", "true_gradients", "x.detach().requires_grad_()", "x", "true_gradients", TRUTH),
    Mutant(
        "testing/truth.py",
        "true_gradients",
        "map(torch.zeros_like, flat)",
        "map(torch.ones_like, flat)",
        "true_gradients",
        TRUTH,
    ),
    # processes
    Mutant("testing/spawn.py", "_answer", "seed_rank(call.seed, call.rank)", "seed_rank(0, call.rank)", "spawn", SPAWN),
    Mutant(
        "testing/spawn.py",
        "_answer",
        "launched_as(call.rank, call.size, call.port)",
        "launched_as(0, call.size, call.port)",
        "spawn",
        SPAWN,
    ),
    Mutant("testing/spawn.py", "_answer", "check_mode(set_in_environment())", "pass", "spawn", SPAWN),
    Mutant(
        "testing/spawn.py", "_answers", "time.monotonic() + timeout", "time.monotonic() + 10 * timeout", "spawn", SPAWN
    ),
    Mutant("testing/spawn.py", "_answers", "end = min(end, time.monotonic() + GRACE)", "pass", "spawn", SPAWN),
    Mutant("testing/spawn.py", "_end_with_caller", "os.killpg(0, signal.SIGKILL)", "os._exit(1)", "spawn", SPAWN),
    Mutant(
        "testing/spawn.py", "Ranks.call", "if any(failures.values()):", "if all(failures.values()):", "spawn", SPAWN
    ),
    Mutant(
        "testing/failures.py",
        "_first",
        'return 2 if failure.type.endswith("CollectiveFailedError")',
        'return -1 if failure.type.endswith("CollectiveFailedError")',
        "spawn",
        SPAWN,
    ),
    Mutant("testing/pickling.py", "dumps", "obj.co_filename if a == _NO_FILE else a", "a", "spawn", SPAWN),
    # the arguments of each rank, and the order of results
    # random numbers by (seed, rank), and what else each rank has for itself
    # ranks that disagree, and that wait for ever
    # groups: their ranks in the order of the list, each with its own messages
    # what the last rank to arrive does for all
    # programs that call torch.distributed
    # the gradients that PyTorch derives with all ranks in one graph
    # real processes
    # tests on ranks
    Mutant(
        "testing/ranks.py",
        "ranks.decorate.on_ranks",
        "[deepcopy(arguments) for _ in range(n)]",
        "[arguments] * n",
        "ranks",
        f"{RANKS}::test_each_rank_has_copies",
    ),
    Mutant(
        "testing/ranks.py",
        "ranks.decorate.on_ranks",
        "spawn(body, [arguments] * n, backend=on)",
        "simulate(body, [deepcopy(arguments) for _ in range(n)])",
        "ranks",
        f"{RANKS}::test_on_processes",
    ),
    Mutant(
        "testing/ranks.py",
        "ranks.decorate.on_ranks",
        "n = arguments.pop(_SIZE)",
        "n = min(arguments.pop(_SIZE), 2)",
        "ranks",
        f"{RANKS}::test_each_number_of_ranks",
    ),
    # diffcoll verify
    Mutant(
        "cli/verify.py",
        "_check",
        "max(worst) <= TOLERANCE",
        "min(worst) <= TOLERANCE",
        "verify",
        f"{VERIFY}::test_a_wrong_gradient",
    ),
    Mutant(
        "cli/verify.py",
        "_check",
        "torch.stack(of_ranks).amax(0)",
        "of_ranks[0]",
        "verify",
        f"{VERIFY}::test_a_wrong_gradient",
    ),
    Mutant(
        "cli/verify.py",
        "_worst",
        "max(errors[name]",
        "min(errors[name]",
        "verify",
        f"{VERIFY}::test_a_wrong_gradient",
    ),
    Mutant(
        "cli/verify.py",
        "run",
        "return 0 if found.right == found.calls else 1",
        "return 0",
        "verify",
        f"{VERIFY}::test_a_wrong_gradient",
    ),
    Mutant(
        "cli/verify.py",
        "_on_spawned",
        "right + found.right, calls + found.calls",
        "found.right, found.calls",
        "verify",
        f"{VERIFY}::test_every_number_of_ranks_counts",
    ),
    Mutant(
        "cli/verify.py",
        "_on_spawned",
        "COMPILES and n == max(sizes)",
        "COMPILES",
        "verify",
        f"{VERIFY}::test_on_processes_of_this_machine",
    ),
    Mutant(
        "cli/verify.py",
        "_on_launched",
        "        os._exit(1)",
        "        os._exit(0)",
        "verify",
        f"{VERIFY}::test_a_call_that_raises_under_torchrun",
    ),
    # the program that every collective is checked by
    Mutant(
        "testing/cases.py",
        "Case.w",
        "0 if self.shared[1] else rank",
        "0",
        "verify truth",
        "tests/test_planted.py::test_the_program_of_verify_sees_what_is_wrong",
    ),
    Mutant(
        "testing/cases.py",
        "_measured",
        "y.sin()",
        "y",
        "verify truth",
        "tests/test_planted.py::test_the_program_of_verify_sees_what_is_wrong",
    ),
    Mutant(
        "testing/cases.py",
        "errors",
        "is not None}",
        'is not None and f.name != "second"}',
        "verify truth",
        "tests/test_planted.py::test_the_program_of_verify_sees_what_is_wrong",
    ),
    Mutant(
        "testing/numbers.py",
        "relative_errors",
        "nan_to_num(nan=math.inf, posinf=math.inf)",
        "nan_to_num()",
        "verify assert_matches_single_process",
        "tests/testing/test_verdicts.py::test_a_wrong_program_is_caught -k finite",
    ),
    Mutant(
        "testing/numbers.py",
        "numbers",
        "(seed * 1000 + rank) * 10 + stream",
        "seed * 10 + stream",
        "verify check_gradients",
        "tests/test_planted.py::test_the_program_of_verify_sees_what_is_wrong tests/testing/test_check_gradients.py",
    ),
]
