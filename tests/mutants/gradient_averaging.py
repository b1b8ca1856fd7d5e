"""Defects of the averager: what gradients are divided by, which are sent, in which order, what an error leaves."""

from mutants.mutant import Mutant

_ONE, _ERRORS = "tests/averaging/test_one_process.py", "tests/averaging/test_failing_blocks.py"
_COUNTS, _MEMORY = "tests/averaging/test_count_and_in_step.py", "tests/averaging/test_held_gradients.py"
_LOOPS = "tests/averaging/test_random_loops.py"
_ONE_PROCESS = f"{_ONE}::test_one_process_on_the_whole_batch"
_UNUSED = f"{_ONE}::test_unused_frozen_and_unfrozen_parameters"
_FAILS = f"{_ERRORS}::test_one_rank_fails"
#: A count on a device, beside gradients in float64.
_ON_DEVICE = "-p tests.late_device.on tests/late_device/test_training.py"
_ON_RANKS = "-p tests.late_device.on tests/late_device/test_on_ranks.py"
_GLOBAL = "tests/averaging/test_global_mean.py"
_REDUCER, _BUCKETS = "averaging/reducer.py", "averaging/buckets.py"

MUTANTS = [
    # the mean over ranks
    Mutant(_REDUCER, "Block.__init__", "1 / reducer.engine.size if", "1.0 if", "averager_mean", _ONE_PROCESS),
    Mutant(_BUCKETS, "Bucket.complete", "*= scale", "*= 1", "averager_mean", _ONE_PROCESS),
    Mutant(_BUCKETS, "Bucket.pack", "mul(sent, scale,", "mul(sent, 1,", "averager_mean", f"{_ONE} -k layouts"),
    Mutant(_BUCKETS, "Bucket.pack", ".mul_(scale)", "", "averager_mean comm_dtype", f"{_ONE} -k mixed_dtypes"),
    Mutant(_BUCKETS, "Bucket.pack", "alpha=scale", "alpha=1", "averager_mean averager_microbatches", _LOOPS),
    Mutant(_BUCKETS, "Bucket.begin", "> uses or", "> uses + 1 or", "averager_mean", _MEMORY),
    Mutant(_BUCKETS, "Parameter.assign", "reduced.data", "reduced", "averager_mean", _MEMORY),
    # the sum
    Mutant(_REDUCER, "Block.__init__", "if reducer.is_mean and", "if True and", "averager_sum", _ONE_PROCESS),
    Mutant(
        _REDUCER,
        "Block.__enter__",
        "if not reducer.is_mean or count is not None:",
        "if False:",
        "averager_sum",
        f"{_ERRORS}::test_sums_and_counts_into_what_was_reduced",
    ),
    # the count
    Mutant(_REDUCER, "Block.__init__", "and count is None else", "else", "averager_weights", _ONE_PROCESS),
    Mutant(_REDUCER, "Block._assign", "+ note.total", "+ 0", "averager_weights", _ONE_PROCESS),
    Mutant(_REDUCER, "Block.__enter__", "tail.copy_(count)", "tail.zero_()", "averager_weights", _ON_DEVICE),
    Mutant(
        _REDUCER,
        "Block._assign",
        "torch.where(count == 0, torch.inf, count)",
        "count",
        "averager_weights",
        f"{_COUNTS}::test_all_counts_zero_and_counts_of_any_dtype",
    ),
    Mutant(_BUCKETS, "cut", "< 1e-6", "< 1e-1", "averager_weights", _ON_RANKS),
    Mutant(
        _BUCKETS,
        "Bucket.divide",
        "self.body.to(wider(self.dtype))",
        "self.body",
        "averager_weights",
        f"{_ONE} -k half_precision",
    ),
    Mutant(
        "averaging/messages.py",
        "note_to_send",
        "dtype=torch.float64",
        "dtype=torch.float32",
        "averager_weights",
        f"{_COUNTS}::test_all_counts_zero_and_counts_of_any_dtype",
    ),
    # its group, and messages of its own
    Mutant(
        _REDUCER,
        "Block.__init__",
        "1 / reducer.engine.size if",
        "1 / torch.distributed.get_world_size() if",
        "averager_group",
        f"{_ONE}::test_in_a_subgroup",
    ),
    Mutant(
        "averaging/averager.py",
        "GradientAverager.__init__",
        "twin(engine, self), how",
        "engine, how",
        "averager_group",
        f"{_ONE} -k collectives_in_the_loss",
    ),
    Mutant(
        "averaging/averager.py",
        "GradientAverager.__init__",
        "in tensors], group)",
        "in tensors], None)",
        "averager_group averager_broadcast",
        f"{_ONE}::test_in_a_subgroup",
    ),
    # buckets: their size and order, when they are sent, and what comes after that
    Mutant(
        _BUCKETS, "_distribute", "before + more > nbytes", "before > nbytes", "bucket_mb", f"{_ONE} -k buckets_are_sent"
    ),
    Mutant(
        _REDUCER,
        "Reducer.follow",
        "Control(self.engine, NAME).numbers_of_first([*mine])",
        "[*mine]",
        "bucket_mb",
        f"{_ONE} -k buckets_are_sent",
    ),
    Mutant(_REDUCER, "Block.after_accumulate", "if ready.pending:", "if True:", "bucket_mb", f"{_ONE} -k buckets_are"),
    Mutant(_REDUCER, "Block._assign", "p.bucket.memory[p] += memory", "pass", "bucket_mb", f"{_ONE}::test_checkpoints"),
    Mutant(_REDUCER, "Reducer.follow", "if new:", "if False:", "bucket_mb", f"{_ONE} -k unfrozen"),
    # the dtype in which gradients are sent
    Mutant(
        _BUCKETS,
        "Parameter.__init__",
        "if comm_dtype is None or",
        "if True or",
        "comm_dtype",
        f"{_ONE} -k in_the_dtype",
    ),
    Mutant(
        _BUCKETS,
        "_as_sent",
        "and not dtype.is_complex else x",
        "and not dtype.is_complex else x.real",
        "averager_mean complex",
        f"{_ONE}::test_gradients_in_other_layouts",
    ),
    Mutant(
        _BUCKETS, "Bucket.pack", "memory.itemsize > sent.itemsize", "False", "comm_dtype", f"{_ONE} -k in_the_dtype"
    ),
    # at construction
    Mutant(
        "averaging/averager.py",
        "GradientAverager.__init__",
        "*(buffers if broadcast else [])",
        "",
        "averager_broadcast",
        f"{_MEMORY} -k broadcast",
    ),
    Mutant(
        "averaging/messages.py",
        "broadcast_from_first",
        "mine.copy_(first)",
        "pass",
        "averager_broadcast",
        _ONE_PROCESS,
    ),
    Mutant(
        "averaging/averager.py",
        "GradientAverager.__init__",
        "*(_fact(*pair) for pair in tensors)",
        "",
        "averager_broadcast averager_failures",
        f"{_ERRORS} -k that_differ",
    ),
    # parameters that some ranks do not use
    Mutant(_BUCKETS, "Bucket.pack", "memory.zero_()", "pass", "averager_unused", _UNUSED),
    Mutant(_REDUCER, "Block._assign", "!= UNUSED and", "!= UNUSED or", "averager_unused", _UNUSED),
    Mutant("averaging/messages.py", "read_note", "USED if s else", "USED if s > 1 else", "averager_unused", _LOOPS),
    Mutant(_REDUCER, "Block._pack", "and p in p.bucket.packed else", "else", "averager_unused", _UNUSED),
    Mutant(
        _BUCKETS,
        "Bucket.complete",
        "not p.is_small or not p.tensor.requires_grad",
        "not p.is_small",
        "averager_unused",
        f"{_ERRORS}::test_a_frozen_parameter_keeps_its_gradient",
    ),
    # micro-batches
    Mutant(
        _REDUCER,
        "_hook",
        "(alive.block or alive)",
        "alive",
        "averager_microbatches",
        f"{_ONE_PROCESS} {_LOOPS}",
    ),
    # failures
    Mutant(_REDUCER, "Block._refuse", "if note.failed:", "if False:", "averager_failures", _FAILS),
    Mutant(_REDUCER, "Block.__exit__", "self._end(error)", "self._end(None)", "averager_failures", _FAILS),
    Mutant(_REDUCER, "Block.__exit__", "p.drop()", "pass", "averager_failures", _FAILS),
    Mutant(
        "averaging/unreduced.py",
        "Watch.forbids",
        "self.is_open or is_local",
        "is_local",
        "averager_failures",
        _FAILS,
    ),
    Mutant(
        _REDUCER,
        "Block._pack",
        "witness.grad is not seen or",
        "",
        "averager_failures",
        _FAILS,
    ),
    Mutant(
        _REDUCER,
        "Block._pack",
        "or version(seen) != self._version",
        "",
        "averager_failures",
        _FAILS,
    ),
    Mutant(
        _REDUCER,
        "Block._refuse",
        "if 0 < note.n_counting < n:",
        "if False:",
        "averager_failures averager_weights",
        f"{_ERRORS}::test_counts_on_some_ranks_only",
    ),
    Mutant(
        "averaging/unreduced.py",
        "_before_step",
        "if not callable(closure):",
        "if True:",
        "averager_failures",
        f"{_ERRORS} -k no_block",
    ),
    Mutant(
        "averaging/unreduced.py",
        "Watch.forbids",
        "any(id(p) in self._ids for p in parameters)",
        "False",
        "averager_failures",
        f"{_ERRORS} -k no_block",
    ),
    Mutant(
        _REDUCER,
        "Reducer.after_accumulate",
        "p.version += 1",
        "pass",
        "averager_failures averager_sum",
        f"{_ERRORS}::test_sums_and_counts_into_what_was_reduced",
    ),
    Mutant(
        "averaging/messages.py",
        "Message._named",
        "raise CollectiveFailedError(",
        "raise RuntimeError(",
        "averager_failures errors",
        f"{_ERRORS}::test_a_peer_that_does_not_come",
    ),
    # ranks with unequal numbers of batches
    Mutant(
        "averaging/in_step.py",
        "_steps",
        "if _HAS_BATCH not in statuses:",
        "if _RAN_OUT in statuses:",
        "averager_uneven",
        _COUNTS,
    ),
    Mutant(
        "averaging/in_step.py",
        "_steps",
        "last if empty is not None else emptied(last)",
        "last",
        "averager_uneven",
        _COUNTS,
    ),
    Mutant(
        "averaging/in_step.py",
        "emptied",
        "return batch[:0] if batch.dim() else batch",
        "return batch[:1] if batch.dim() else batch",
        "averager_uneven",
        _COUNTS,
    ),
    # global_mean
    Mutant(
        "averaging/global_mean.py",
        "global_mean",
        "w.to(wide).expand(v.shape)",
        "torch.ones_like(wide)",
        "global_mean",
        _GLOBAL,
    ),
    Mutant(
        "averaging/global_mean.py",
        "global_mean",
        "torch.where(w == 0, torch.zeros_like(wide), wide * w)",
        "wide * w",
        "global_mean",
        _GLOBAL,
    ),
    Mutant(
        "averaging/global_mean.py",
        "global_mean",
        "v.is_complex() else torch.float64)",
        "v.is_complex() else torch.float32)",
        "global_mean",
        _GLOBAL,
    ),
    Mutant(
        "averaging/global_mean.py",
        "global_mean",
        '"sum", group=group)',
        '"sum")',
        "global_mean",
        f"{_ONE}::test_in_a_subgroup",
    ),
]
