"""Mutants of what moves bytes: torch.distributed, MPI, streams of accelerators, and the turn in which they are called."""

from mutants.mutant import Mutant

LAWS = "tests/engines/test_laws.py::test_laws_hold -k"
OTHER = "tests/engines/test_other_backends.py::"
MPI = "tests/engines/test_mpi.py::"
GROUPS = "tests/core/test_groups.py::"
LATE = "-p tests.late_device.on tests/late_device/test_synchronization.py"
TRAINING = "-p tests.late_device.on tests/late_device/test_training.py::test_parameters_are_those_of_one_cpu"
RANKS = "-p tests.late_device.on tests/late_device/test_on_ranks.py::"

MUTANTS = [
    # streams: waits, memory that another stream reads, and reads of the host
    Mutant("averaging/buckets.py", "Bucket.enter_stream", "here.wait_stream(self.stream)", "pass", "streams", f"{LATE}::test_memory_that_becomes_a_buckets"),
    Mutant("averaging/buckets.py", "Bucket.enter_stream", "self._others.add(here)", "pass", "streams", f"{LATE}::test_averager"),
    Mutant("averaging/buckets.py", "Bucket.join_streams", "self.stream.wait_stream(other)", "pass", "streams", f"{LATE}::test_averager"),
    Mutant("averaging/buckets.py", "Bucket.join_streams", "here.wait_stream(self.stream)", "pass", "streams", f"{LATE}::test_averager"),
    Mutant("averaging/buckets.py", "Bucket.join_streams", "p.tensor.grad.record_stream(here)", "pass", "streams", f"{LATE}::test_averager"),
    Mutant("averaging/buckets.py", "Bucket.allocate", "current_stream(self.body.device)", "None", "streams", f"{LATE}::test_averager"),
    Mutant("averaging/reducer.py", "Reducer._put_flags", "can_pin(bucket.tail.device.type)", "False", "streams", f"{LATE}::test_averager"),
    Mutant("averaging/reducer.py", "Reducer._must_skip", "self.buckets[-1].stream is not None", "False", "streams", f"{LATE}::test_averager"),
    Mutant("averaging/sending.py", "Sender.wait", "wait()", "pass", "streams averager_mean", f"{LATE}::test_averager"),
    Mutant("core/moves.py", "_wait_across_streams", "start.wait_stream(here)", "pass", "streams async_op", f"{LATE}::test_awaited_on_another_stream"),
    Mutant("core/moves.py", "_wait_across_streams", "y.record_stream(here)", "pass", "streams async_op", f"{LATE}::test_awaited_on_another_stream"),
    Mutant("engines/c10d.py", "C10dEngine._wait", "return partial(work.wait)", "return done", "streams", f"{LATE}::test_collectives"),
    Mutant("core/moves.py", "InFlight.__init__", "wait if x.is_cpu else _wait_across_streams(wait, x.device)", "wait", "streams async_op", f"{LATE}::test_awaited_on_another_stream"),
    Mutant("engines/mpi.py", "MpiEngine._pieces", "if not x.is_cpu:", "if False:", "streams mpi", f"{RANKS}test_an_mpi_that_reaches_the_device"),
    Mutant("engines/mpi.py", "MpiEngine.all_gather", "if not row.is_cpu:", "if False:", "streams mpi", f"{RANKS}test_an_mpi_that_reaches_the_device"),
    # sums and blocks of `Engine`, which every backend falls back to
    Mutant("engines/engine.py", "add_up", "wide, n = wider(out.dtype), len(terms)", "wide, n = out.dtype, len(terms)", "dtypes law", f"{LAWS} gloo-3"),
    Mutant("engines/engine.py", "Engine.reduce_scatter_in_order", "terms[rank] = mine", "terms[rank] = terms.pop()\n            terms.append(mine)", "dtypes", f"{LAWS} gloo-3"),
    Mutant("engines/engine.py", "Engine.reduce_scatter_in_order", "if self.size == 1:\n            out.copy_(row)", "if self.size == 1:\n            out = row", "law one_group", f"{LAWS} solo"),
    Mutant("engines/engine.py", "Engine.gather_and_add", "self.scratch.take(self.size * y.numel(), like=y)", "self.scratch.take(self.size * y.numel(), like=y)\n        self.scratch.give(memory)", "async_op gloo", f"{LAWS} gloo-3"),
    Mutant("engines/engine.py", "even_sizes", "(numel + n - 1 - r) // n", "numel // n + (r == 0) * (numel % n)", "law", f"{LAWS} gloo-3"),
    # gloo
    Mutant("engines/c10d.py", "C10dEngine.messages", "(nbytes + (KINDS[t.dtype] ^ number)) % TAG", "(KINDS[t.dtype] ^ number) % TAG", "gloo errors", "tests/test_failures.py::test_messages_of_another_size_do_not_meet"),
    Mutant("engines/c10d.py", "", '"gloo": {torch.float32, torch.float64, torch.int8,', '"gloo": {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8,', "gloo dtypes", "tests/test_dtypes.py::test_half_precisions_are_added_up_in_single"),
    Mutant("engines/c10d.py", "_bytes", "x.as_strided((x.numel(),), (1,))", "x.view(-1)", "gloo", f"{LAWS} gloo-3"),
    Mutant("engines/c10d.py", "_real", "torch.view_as_real(x) if", "x.real if", "gloo complex", f"{LAWS} gloo-3"),
    Mutant("engines/c10d_polling.py", "wait_for", "for work in works:", "for work in works[:1]:", "gloo async_op", f"{LAWS} gloo-3"),
    Mutant("engines/c10d.py", "C10dEngine.all_reduce", "if x is not y:", "if x is not y and x.is_contiguous():", "gloo law", "tests/test_dtypes.py::test_layouts_that_differ_from_rank_to_rank"),
    Mutant("engines/c10d.py", "C10dEngine.broadcast", "group_src=src", "src=src", "gloo broadcast one_group", f"{GROUPS}test_ranks_are_ranks_within_the_group"),
    Mutant("engines/c10d.py", "C10dEngine.__init__", "rank=dist.get_rank(group)", "rank=dist.get_rank()", "gloo one_group", f"{GROUPS}test_two_groups_at_once"),
    Mutant("engines/messages.py", "MessageEngine.exchange", "and own is not into:\n            into.copy_(own)", "and own is into:\n            into.copy_(own)", "gloo mpi", f"{LAWS} gloo-3"),
    Mutant("engines/messages.py", "MessageEngine._through_cpu", "t.copy_(copy)", "pass", "law mpi", f"{MPI}test_memory_that_mpi_cannot_read_is_copied_to_the_cpu"),
    # native collectives of tensors, as on NCCL
    Mutant("engines/c10d.py", "C10dEngine.reduce", "y if self.rank == dst else y.clone()", "y", "nccl inputs", f"{LAWS} gloo-as-nccl"),
    Mutant("engines/c10d.py", "C10dEngine.reduce_scatter", "and is_even(counts)", "", "nccl", f"{LAWS} gloo-as-nccl"),
    Mutant("engines/c10d.py", "C10dEngine.reduce", "group_dst=dst", "dst=dst", "nccl reduce one_group", f"{LAWS} gloo-as-nccl"),
    Mutant("engines/c10d.py", "C10dEngine.connect", 'if self.backends[device.type] != "gloo":', "if False:", "nccl", f"{OTHER}test_all_ranks_connect_before_the_first_message"),
    Mutant("core/moves.py", "_begin", "if not x.is_cpu:", "if x.is_cuda:", "nccl", f"{OTHER}test_all_ranks_connect_before_the_first_message"),
    # MPI
    Mutant("engines/mpi.py", "MpiEngine._pieces", "[at(here + i, min", "[at(here, min", "mpi", f"{LAWS} mpi-3"),
    Mutant("engines/mpi.py", "MpiEngine.all_gather", "[0, *accumulate(sizes[:-1])]", "[0, *sizes[:-1]]", "mpi all_gather sizes", f"{LAWS} mpi-3"),
    Mutant("engines/mpi.py", "MpiEngine.reduce_scatter_in_order", "and is_even(counts) and", "and", "mpi reduce_scatter sizes", f"{LAWS} mpi-3"),
    Mutant("engines/mpi.py", "MpiEngine.all_reduce", "mpi, x = self._mpi, x.contiguous()", "mpi = self._mpi", "mpi law", "tests/engines/test_layouts.py::test_layouts_that_differ_from_rank_to_rank -k mpi"),
    Mutant("engines/mpi.py", "MpiEngine.all_reduce", "x = y.copy_(x)", "pass", "mpi inputs async_op", f"{LAWS} mpi-3"),
    Mutant("engines/mpi.py", "MpiEngine.all_reduce", "spare = self.scratch.take(x.numel(), like=x)\n            x = spare.view(x.shape).copy_(x)", "x = y.copy_(x)", "mpi", "tests/engines/test_layouts.py::test_mpi_calls_the_same_collectives_for_all_layouts"),
    Mutant("engines/mpi.py", "MpiEngine._do", 'name = "I" + name.lower()\n', 'return [getattr(self.comm, name)(*call) for call in calls] and done\n', "mpi async_op", f"{LAWS} mpi-3"),
    Mutant("engines/mpi.py", "MpiEngine._begin", "wait = start(self._duplicate or self.comm)", "wait = start(self.users)", "mpi", f"{MPI}test_with_the_users_messages_and_gloo_in_the_same_program"),
    Mutant("engines/mpi.py", "MpiEngine.exchange", "if self._duplicate is None:", "if False:", "mpi", f"{MPI}test_the_first_call_on_a_communicator_may_have_ranks_without_messages"),
    Mutant("engines/mpi_requests.py", "Wanted.refuse_other", "!= self.nbytes:", "> self.nbytes:", "mpi errors", f"{MPI}test_a_message_shorter_than_expected_is_an_error"),
    Mutant("engines/mpi.py", "engine_of", "not known._mpi.Is_finalized()", "True", "mpi errors", f"{MPI}test_a_communicator_after_mpi_was_finalized"),
    Mutant("engines/mpi.py", "_close", "del _by_identity[id(engine.users)]", "pass", "mpi one_group", f"{MPI}test_which_communicators"),
    Mutant("engines/mpi.py", "MpiEngine.comm", "if self.size > 1:", "if self.size > 2:", "mpi peers", f"{MPI}test_an_exception_on_one_rank_ends_the_job"),
    Mutant("engines/mpi.py", "MpiEngine.global_ranks", "Translate_ranks(mine, list(range(self.size)), world)", "Translate_ranks(world, list(range(self.size)), mine)", "mpi one_group", GROUPS),
    # inputs are left as they are, and memory is lent to one call at a time
    Mutant("engines/c10d.py", "C10dEngine.all_reduce", "y.copy_(x)\n        return self._wait(dist.all_reduce(_real(y),", "y.copy_(x)\n            y = x\n        return self._wait(dist.all_reduce(_real(y),", "inputs", f"{TRAINING}"),
    Mutant("engines/scratch.py", "Scratch.take", "kept = self._kept.pop()", "kept = self._kept[-1]", "inputs async_op", "tests/engines/test_engines.py"),
    Mutant("engines/engine.py", "Engine.broadcast", "y if self.rank != src and s == src else None", "y if s == src else None", "inputs", f"{LAWS} gloo-3"),
    # errors of the backend, and peers that do not come
    Mutant("engines/turn.py", "Turn.__exit__", "engine.rank, self.origin, error", "engine.rank, None, error", "errors peers", "tests/test_failures.py::test_a_rank_that_does_not_come"),
    Mutant("engines/turn.py", "Turn.__exit__", "CollectiveMismatchError, torch.OutOfMemoryError", "CollectiveMismatchError", "errors", "tests/core/test_control.py"),
    Mutant("engines/turn.py", "Turn.__exit__", "engine.lock.release()", "error is None and engine.lock.release()", "peers errors", "tests/core/test_control.py"),
    Mutant("engines/c10d.py", "C10dEngine.twin", "timeout=timeout, ", "", "peers", "tests/averaging/test_lost_peers.py"),
    Mutant("engines/watch.py", "_look", "elif now - watched.since >= seconds:", "elif now - watched.since >= 2 * seconds + 60:", "peers", "tests/engines/test_watch.py::test_a_rank_that_waits_warns_once -k gloo"),
    Mutant("engines/watch.py", "_look", "if turn is IDLE or turn is not watched.turn:", "if turn is IDLE or turn.name != watched.turn.name:", "peers", "tests/engines/test_watch.py::test_a_rank_that_waits_warns_once -k gloo"),
    # what a group is
    Mutant("engines/c10d.py", "engine_of", "if not _exists(group):", "if False:", "one_group", f"{GROUPS}test_groups_that_are_no_more"),
    Mutant("engines/c10d.py", "_group_of", "if mesh.ndim != 1:", "if mesh.ndim > 2:", "one_group", f"{GROUPS}test_device_mesh"),
    Mutant("engines/turn.py", "Turn.__enter__", "engine.unwaited and not self._waits and", "engine.unwaited and", "one_group async_op", f"tests/core/test_pending.py::test_two_threads_with_a_collective_in_flight"),
]  # fmt: skip
