# ruff: noqa: D102
# The methods are those of the base class, without the overloads that torch itself does not call.
# mypy: disable-error-code="override,assignment"
"""`dist.ProcessGroup` of simulated ranks: the collectives and messages of torch.distributed, on `LocalEngine`.

torch.distributed, in Python and in C++, calls the methods of this class, whose names and arguments are those of torch.
Each collective is an exchange of blocks: a rank sends copies of its inputs, and the last rank to call it writes the
outputs of all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from typing_extensions import override

from diffcoll.core.torch_private.tracing import is_traced, unobserved
from diffcoll.core.torch_private.transforms import is_transformed
from diffcoll.core.torch_private.without_memory import has_memory, is_recorded
from diffcoll.engines.rank_state import THREAD
from diffcoll.engines.simulated.blocks import Blocks, Received, Row, cut, deliver, write
from diffcoll.engines.simulated.engine import LocalEngine
from diffcoll.engines.simulated.meetings import Entry, Meeting
from diffcoll.engines.simulated.world import expect_thread_of

Tensors = list[Tensor]
#: The source of a message that is received from any rank.
_ANY = -1


class SimulatedWork(dist.Work):
    """What `async_op=True`, isend and irecv return: a call, with copies of what it sends.

    Args:
        later: whether the program does something else before it waits. Until then outputs are NaN, or the largest
            integer, and inputs may not be modified: a program that does either is right by luck on real processes.
    """

    def __init__(self, engine: LocalEngine, name: str, later: bool = True) -> None:
        super().__init__()
        self.name, self._engine, self._later = name, engine, later
        self._inputs: list[tuple[Tensor, Tensor]] = []  # with their copies
        self.outputs: Tensors = []

    def sends(self, x: Tensor) -> Tensor:
        """Return a copy of x in 1-d."""
        if self._engine.in_one_graph and x.requires_grad:
            raise RuntimeError(f"{self.name}: has no gradient in the graph of all ranks; use diffcoll's")
        x = plain(x)
        if not has_memory(x):
            return x.reshape(-1)
        copy = x.clone(memory_format=torch.contiguous_format).view(-1)
        self._inputs += [(x, copy)] * self._later
        return copy

    def expects(self, y: Tensor) -> Tensor:
        """Return where to write what is received."""
        self.outputs.append(y)
        return plain(y)

    def start(self, wait: Callable[[], tuple[int, Received]]) -> SimulatedWork:
        """Overwrite the outputs."""
        self._wait = wait
        self._engine.me.works.add(self)
        outputs = [y for y in self.outputs if has_memory(y)] if self._later else []
        if outputs:
            written = {y.untyped_storage().data_ptr() for y in outputs}
            self._inputs = [pair for pair in self._inputs if pair[0].untyped_storage().data_ptr() not in written]
            with unobserved(), torch.inference_mode():
                for y in outputs:
                    fractional = y.is_floating_point() or y.is_complex()
                    y.fill_(torch.nan if fractional else True if y.dtype == torch.bool else torch.iinfo(y.dtype).max)
        return self

    @override
    def source_rank(self) -> int:
        """Wait, and write what was received to the outputs, once."""
        source, received = self._wait()
        for x, copy in self._inputs:
            if _differ(x, copy):
                raise RuntimeError(
                    f"{self.name}: the tensor that is sent was modified before the program waited for the call, "
                    "expected no modification: what is sent is not defined; modify it after wait()"
                )
        write(received)
        self._inputs, self._wait = [], lambda: (source, [])
        return source

    _source_rank = source_rank

    @override
    def wait(self, timeout: object = None) -> bool:
        """Return when the outputs are there; on simulated ranks there are no timeouts."""
        self.source_rank()
        return True

    # A rank that polls would never let another rank run, so a poll waits.
    is_completed = is_success = synchronize = block_current_stream = wait

    @override
    def result(self) -> Tensors:
        self.wait()
        return self.outputs

    @override
    def get_future(self) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(self.result())  # DistributedDataParallel waits for a future in C++, where no rank would run
        return future


class SimulatedGroup(dist.ProcessGroup):
    """A group of simulated ranks, as seen by one of them."""

    # `split_group` asks for it.
    supports_splitting = False
    group_desc = "simulated"
    _device_types = (torch.device("cpu"),)

    def __init__(self, engine: LocalEngine) -> None:
        super().__init__(engine.rank, engine.size)  # type: ignore[call-arg]
        self._engine = engine

    @property
    def engine(self) -> LocalEngine:
        """The engine of the rank that has made this; raises on other ranks."""
        expect_thread_of(self._engine.me)
        return self._engine

    # ── what torch asks a group ──────────────────────────────────────────────────────────────────────────

    @property
    def group_name(self) -> str:
        return self._engine.names[0]

    def rank(self) -> int:
        if THREAD.started_by is not self._engine.me:  # whose threads may ask
            expect_thread_of(self._engine.me)
        return self._engine.rank

    def getGroupName(self) -> str:
        return self._engine.names[0]

    def getBackendName(self) -> str:
        return "diffcoll"  # for a "gloo" group DistributedDataParallel asks for gloo's backend

    def _get_backend(self, device: object) -> SimulatedGroup:
        return self  # the method of the base class calls itself

    def set_timeout(self, timeout: object) -> None:
        pass

    # ── collectives ──────────────────────────────────────────────────────────────────────────────────────

    def _exchange(
        self, name: str, how: object, sends: Sequence[Blocks], recvs: Sequence[Blocks], opts: Any = None, op: str = ""
    ) -> SimulatedWork:
        """Exchange blocks, several times if calls were coalesced. They fit together if `how` is equal on all ranks.

        With `op` what a rank receives is all to be written to one output, reduced.
        """
        engine = self.engine
        work = SimulatedWork(engine, f"torch.distributed.{name}", getattr(opts, "asyncOp", True))
        payload = [
            (Row.of(engine.size, x, work.sends), Row.of(engine.size, y, work.expects))
            for x, y in zip(sends, recvs, strict=True)
        ]
        return work.start(engine.meet(work.name, (op, how, len(payload)), payload, partial(_delivered, op, 0)))

    def broadcast(self, tensors: Tensors, opts: Any) -> SimulatedWork:
        root = opts.rootRank
        sends = [x if self._engine.rank == root else None for x in tensors]
        return self._exchange("broadcast", f"from rank {root}", sends, [{root: x} for x in tensors], opts)

    def allreduce(self, tensors: Tensors, opts: Any = None) -> SimulatedWork:
        return self._exchange("all_reduce", "", tensors, tensors, opts, _op(opts))

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Tensors, opts: Any) -> SimulatedWork:
        root = opts.rootRank
        recvs = [x if self._engine.rank == root else None for x in tensors]
        return self._exchange("reduce", f"to rank {root}", [{root: x} for x in tensors], recvs, opts, _op(opts))

    def allgather(self, outputs: Sequence[Blocks], inputs: Tensors, opts: Any = None) -> SimulatedWork:
        return self._exchange("all_gather", "", inputs, outputs, opts)

    def allgather_coalesced(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> SimulatedWork:
        """The output at [s][i] is the input i of rank s."""
        return self.allgather([list(ys) for ys in zip(*outputs, strict=True)], inputs, opts)

    def allgather_into_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> SimulatedWork:
        return self.allgather([*map(self._cut, outputs)], inputs, opts)

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> SimulatedWork:
        return self.allgather_into_tensor_coalesced([output], [input], opts)

    def gather(self, outputs: Sequence[Blocks], inputs: Tensors, opts: Any) -> SimulatedWork:
        root, (x,) = opts.rootRank, inputs
        recvs = outputs[0] if self._engine.rank == root else None
        return self._exchange("gather", f"to rank {root}", [{root: x}], [recvs], opts)

    def gather_single(self, output: Tensor, input: Tensor, opts: Any) -> SimulatedWork:
        mine = self._engine.rank == opts.rootRank
        return self.gather([self._cut(output)] if mine else [], [input], opts)

    def scatter(self, outputs: Tensors, inputs: Sequence[Blocks], opts: Any) -> SimulatedWork:
        root, (y,) = opts.rootRank, outputs
        sends = inputs[0] if self._engine.rank == root else None
        return self._exchange("scatter", f"from rank {root}", [sends], [{root: y}], opts)

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Blocks], opts: Any = None) -> SimulatedWork:
        return self._exchange("reduce_scatter", "", inputs, outputs, opts, _op(opts))

    def reduce_scatter_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> SimulatedWork:
        return self.reduce_scatter(outputs, [*map(self._cut, inputs)], opts)

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any = None) -> SimulatedWork:
        return self.reduce_scatter_tensor_coalesced([output], [input], opts)

    def alltoall(self, outputs: Blocks, inputs: Blocks, opts: Any = None) -> SimulatedWork:
        return self._exchange("all_to_all", "", [inputs], [outputs], opts)

    def alltoall_base(
        self, output: Tensor, input: Tensor, output_sizes: Sequence[int], input_sizes: Sequence[int], opts: Any = None
    ) -> SimulatedWork:
        return self.alltoall(self._cut(output, output_sizes), self._cut(input, input_sizes), opts)

    def barrier(self, opts: Any = None) -> SimulatedWork:
        return self._exchange("barrier", "", [], [])

    def monitored_barrier(self, timeout: object = None, wait_all_ranks: bool = False) -> None:
        self._exchange("monitored_barrier", "", [], []).wait()

    # Names that later releases of torch have given to some of these.
    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base
    gather_into_tensor = gather_single

    def _cut(self, x: Tensor, sizes: Sequence[int] = ()) -> Blocks:
        """Cut dimension 0 into blocks of these sizes; none given: equal ones, of its memory if rows do not do."""
        whole, n = plain(x), self._engine.size
        if not sizes:
            whole = whole.view(-1) if not whole.dim() or len(whole) % n else whole
            sizes = [len(whole) // n] * n
        return cut(whole, sizes)

    # ── messages ─────────────────────────────────────────────────────────────────────────────────────────

    def send(self, tensors: Tensors, dst: int, tag: int) -> SimulatedWork:
        """Send to one rank. Ends when the message is received, as with gloo and NCCL: they do not buffer it."""
        return self._post(True, dst, tensors, tag)

    def recv(self, tensors: Tensors, src: int, tag: int) -> SimulatedWork:
        return self._post(False, src, tensors, tag)

    def recv_anysource(self, tensors: Tensors, tag: int) -> SimulatedWork:
        return self._post(False, _ANY, tensors, tag)

    recvAnysource = recv_anysource

    def _post(self, sends: bool, peer: int, tensors: Tensors, tag: int) -> SimulatedWork:
        """Deliver a message whose counterpart waits for it, or let it wait."""
        (x,) = tensors
        engine, world = self.engine, self._engine.world
        n, me = engine.size, engine.rank
        source, destination = (me, peer) if sends else (peer, me)
        step = (peer - me + n // 2) % n - n // 2  # around the ring of ranks
        names = ["any rank"] * 2 if peer == _ANY else [f"rank {peer}", f"rank r{step:+}"]
        more = f", tag {tag}" if tag else ""
        exact, relative = (f"torch.distributed.{'send to' if sends else 'recv from'} {name}{more}" for name in names)
        work, none = SimulatedWork(engine, exact), Row(None)
        rows = (Row.of(2, {1: x}, work.sends), none) if sends else (none, Row.of(2, {0: x}, work.expects))
        entry = Entry(exact, None, [rows], group=engine.mesh_dim, relative=relative)
        mailbox = engine.ranks, engine.names, destination, tag
        counterparts = world.mailboxes[mailbox, not sends]
        for other, meeting in counterparts:
            if source == other or _ANY in (source, other):
                counterparts.remove((other, meeting))
                wait = world.join(engine.me, meeting, entry)
                sender = max(source, other)
                pair = [engine.ranks[r] for r in (sender, destination)]
                world.complete(meeting, pair, partial(_delivered, "", sender))
                break
        else:
            ranks = engine.ranks if peer == _ANY else (engine.me.number, engine.ranks[peer])
            meeting = Meeting(ranks)
            wait = world.join(engine.me, meeting, entry)
            world.mailboxes[mailbox, sends].append((source, meeting))
        return work.start(wait)


def _delivered(op: str, source: int, ranks: Sequence[Any]) -> list[tuple[int, Received]]:
    return [(source, received) for received in deliver(op, ranks)]


# ── tensors of torch.distributed's calls ─────────────────────────────────────────────────────────────────


def _differ(x: Tensor, copy: Tensor) -> bool:
    """Whether x, which a program may have freed since, has other bytes than its copy."""
    if not x.untyped_storage().nbytes():
        return False
    with unobserved(), torch.inference_mode():
        return not torch.equal(*(y.contiguous().view(-1).view(torch.uint8) for y in (x, copy)))


def plain(x: Any) -> Tensor:
    """Return a tensor without its graph; raise if it is of a transform or a tracer."""
    if hasattr(x, "trigger_wait"):  # the result of a functional collective
        x = x.trigger_wait()
    traced = is_traced(x) if has_memory(x) else is_recorded()
    if is_transformed(x) or traced:
        raise RuntimeError(
            "torch.distributed: got a tensor of a torch.func transform or a tracer, expected one with memory; call it "
            "outside of these, or use diffcoll's collectives in torch.func"
        )
    return cast(Tensor, x.detach())


def _op(opts: Any) -> str:
    chosen: Any = dist.ReduceOp.SUM if opts is None else opts.reduceOp
    return str(getattr(chosen, "op", chosen).name)
