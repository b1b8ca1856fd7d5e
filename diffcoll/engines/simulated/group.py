# ruff: noqa: D102
# The methods are those of the base class, without the overloads that torch itself does not call.
# mypy: disable-error-code="override,assignment"
"""`dist.ProcessGroup` of simulated ranks: the collectives and messages of torch.distributed, on `LocalEngine`.

torch.distributed, in Python and in C++, calls the methods of this class, whose names and arguments are those of torch.
Each collective is an exchange of blocks: a rank sends copies of its inputs, and the last rank to call it writes the
outputs of all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from typing_extensions import override

from diffcoll.core.torch_private.tracing import is_traced, unobserved
from diffcoll.core.torch_private.transforms import is_transformed
from diffcoll.core.torch_private.without_memory import has_memory, is_recorded
from diffcoll.engines.rank_state import THREAD
from diffcoll.engines.simulated.blocks import Block, Misfit, Part, Row, deliver, fits, kind
from diffcoll.engines.simulated.engine import LocalEngine
from diffcoll.engines.simulated.meetings import Entry, Meeting
from diffcoll.engines.simulated.world import expect_thread_of

Tensors = list[Tensor]
#: What is sent to each rank, or expected from it: the same for all, for some of them, or one for each.
Blocks: TypeAlias = Part | Mapping[int, Part] | Sequence[Part]
#: The source of a message that is received from any rank.
_ANY = -1


class SimulatedWork(dist.Work):
    """What `async_op=True`, isend and irecv return."""

    def __init__(self, wait: Callable[[], Any], outputs: Tensors) -> None:
        super().__init__()
        self._wait = wait
        self._outputs = outputs

    @override
    def wait(self, timeout: object = None) -> bool:
        """Return when the outputs are there; on simulated ranks there are no timeouts."""
        self._wait()
        return True

    # A rank that polls would never let another rank run, so a poll waits.
    is_completed = is_success = synchronize = block_current_stream = wait

    @override
    def result(self) -> Tensors:
        self.wait()
        return self._outputs

    @override
    def get_future(self) -> Future[Any]:
        self.wait()  # DistributedDataParallel waits for a future in C++, where no other rank would run
        future: Future[Any] = Future()
        future.set_result(self._outputs)
        return future

    @override
    def source_rank(self) -> int:
        return int(self._wait())

    _source_rank = source_rank


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
        if self._engine.in_one_graph and any(x.requires_grad for blocks in sends for x in _tensors(blocks)):
            raise RuntimeError(f"torch.distributed.{name}: has no gradient in the graph of all ranks; use diffcoll's")
        call = _Call(f"torch.distributed.{name}", getattr(opts, "asyncOp", True))
        n = self._engine.size
        payload = [(_row(n, s, call.sent), _row(n, r, call.expected)) for s, r in zip(sends, recvs, strict=True)]
        call.start()
        wait = self.engine.meet(call.name, (op, how, len(payload)), payload, partial(deliver, op), of_torch=True)
        outputs = {id(y): y for blocks in recvs for y in _tensors(blocks)}
        return SimulatedWork(partial(call.finish, wait), list(outputs.values()))

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
        return self.allgather([self._cut(y, x) for y, x in zip(outputs, inputs, strict=True)], inputs, opts)

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> SimulatedWork:
        return self.allgather_into_tensor_coalesced([output], [input], opts)

    def gather(self, outputs: Sequence[Blocks], inputs: Tensors, opts: Any) -> SimulatedWork:
        root, (x,) = opts.rootRank, inputs
        recvs = outputs[0] if self._engine.rank == root else None
        return self._exchange("gather", f"to rank {root}", [{root: x}], [recvs], opts)

    def gather_single(self, output: Tensor, input: Tensor, opts: Any) -> SimulatedWork:
        mine = self._engine.rank == opts.rootRank
        return self.gather([self._cut(output, input)] if mine else [], [input], opts)

    def scatter(self, outputs: Tensors, inputs: Sequence[Blocks], opts: Any) -> SimulatedWork:
        root, (y,) = opts.rootRank, outputs
        sends = inputs[0] if self._engine.rank == root else None
        return self._exchange("scatter", f"from rank {root}", [sends], [{root: y}], opts)

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Blocks], opts: Any = None) -> SimulatedWork:
        return self._exchange("reduce_scatter", "", inputs, outputs, opts, _op(opts))

    def reduce_scatter_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> SimulatedWork:
        return self.reduce_scatter(outputs, [self._cut(x, y) for x, y in zip(inputs, outputs, strict=True)], opts)

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any = None) -> SimulatedWork:
        return self.reduce_scatter_tensor_coalesced([output], [input], opts)

    def alltoall(self, outputs: Blocks, inputs: Blocks, opts: Any = None) -> SimulatedWork:
        return self._exchange("all_to_all", "", [inputs], [outputs], opts)

    def alltoall_base(
        self, output: Tensor, input: Tensor, output_sizes: Sequence[int], input_sizes: Sequence[int], opts: Any = None
    ) -> SimulatedWork:
        return self.alltoall(self._cut_rows(output, output_sizes), self._cut_rows(input, input_sizes), opts)

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

    def _cut(self, x: Tensor, block: Tensor) -> Blocks:
        """Cut the tensor of all blocks, one behind the other, into blocks: along dimension 0, or of its memory."""
        whole, n = plain(x), self._engine.size
        if isinstance(whole, Block):
            return whole.cut(n)
        if block.dim() and whole.shape == (n * block.shape[0], *block.shape[1:]):
            return list(whole.split_with_sizes([block.shape[0]] * n))
        return list(whole.view(n, whole.numel() // n))

    def _cut_rows(self, x: Tensor, sizes: Sequence[int]) -> Blocks:
        """Cut dimension 0 into blocks of the given sizes; none given: equal ones."""
        whole, n = plain(x), self._engine.size
        if isinstance(whole, Block):
            return [whole.rows(size) for size in sizes] if sizes else whole.cut(n)
        return list(whole.split_with_sizes(list(sizes) or [whole.shape[0] // n] * n))

    # ── messages ─────────────────────────────────────────────────────────────────────────────────────────

    def send(self, tensors: Tensors, dst: int, tag: int) -> SimulatedWork:
        """Send to one rank. Ends when the message is received, as with gloo and NCCL: they do not buffer it."""
        return self._post("send to rank", dst, tensors, True, self.engine.rank, dst, tag)

    def recv(self, tensors: Tensors, src: int, tag: int) -> SimulatedWork:
        return self._post("recv from rank", src, tensors, False, src, self.engine.rank, tag)

    def recv_anysource(self, tensors: Tensors, tag: int) -> SimulatedWork:
        return self._post("recv from any rank", _ANY, tensors, False, _ANY, self.engine.rank, tag)

    recvAnysource = recv_anysource

    def _post(
        self, what: str, peer: int, tensors: Tensors, sends: bool, source: int, destination: int, tag: int
    ) -> SimulatedWork:
        """Deliver a message whose counterpart waits for it, or let it wait."""
        (x,) = tensors
        engine, world = self.engine, self._engine.world
        tagged, step = f", tag {tag}" if tag else "", (peer - engine.rank + engine.size // 2) % engine.size
        step -= engine.size // 2  # to the peer, around the ring of ranks
        exact, relative = ("", "") if peer == _ANY else (f" {peer}", f" r {'+' if step >= 0 else '−'} {abs(step)}")
        call = _Call(f"torch.distributed.{what}{exact}{tagged}", True)
        part = (call.sent if sends else call.expected)(x)
        call.start()
        words = f"torch.distributed.{what}{relative}{tagged}"
        entry = Entry(call.name, None, part, None, relative=words, group=engine.mesh_dim, of_torch=True)
        mailbox = engine.number, destination, tag
        counterparts = world.mailboxes[mailbox, not sends]
        for other, meeting in counterparts:
            if source == other or _ANY in (source, other):
                counterparts.remove((other, meeting))
                meeting.entries[engine.me.number] = entry
                sender = max(source, other)
                pair = [engine.ranks[r] for r in (sender, destination)]
                world.complete(meeting, pair, partial(_receive, sender))
                break
        else:
            ranks = engine.ranks if peer == _ANY else (engine.me.number, engine.ranks[peer])
            meeting = Meeting(ranks, {engine.me.number: entry})
            world.mailboxes[mailbox, sends].append((source, meeting))
        return SimulatedWork(partial(call.finish, partial(world.wait, engine.me, meeting)), [x])


def _receive(source: int, xs: Sequence[Part]) -> list[int]:
    """Write a message to where its receiver expects it; the result of both is the source."""
    sent, into = xs
    if not fits(kind(into), kind(sent)):
        raise Misfit(1, 0, kind(into), kind(sent))
    if isinstance(into, Tensor) and isinstance(sent, Tensor):
        with unobserved(), torch.inference_mode():
            into.copy_(sent.view(into.shape))
    return [source, source]


# ── tensors of torch.distributed's calls ─────────────────────────────────────────────────────────────────


class _Call:
    """The tensors of one call: copies of what is sent, and where what is received stays until the program waits.

    Args:
        name: of the call.
        later: whether the program does something else before it waits. Until then outputs are NaN, or the largest
            integer, and inputs may not be modified: a program that does either is right by luck on real processes.
    """

    def __init__(self, name: str, later: bool) -> None:
        self.name, self._later = name, later
        self._inputs: list[tuple[Tensor, Tensor]] = []
        self._outputs: list[tuple[Tensor, Tensor]] = []

    def sent(self, x: Part) -> Part:
        """Return a copy of x in 1-d."""
        x = plain(x)
        if not isinstance(x, Tensor):
            return x if x is None else x.rows()
        copy = x.clone(memory_format=torch.contiguous_format).view(-1)
        self._inputs += [(x, copy)] if self._later else []
        return copy

    def expected(self, y: Part) -> Part:
        """Return where to write what is received."""
        y = plain(y)
        if not isinstance(y, Tensor) or not self._later:
            return y
        self._outputs.append((y, torch.empty_like(y, memory_format=torch.contiguous_format)))
        return self._outputs[-1][1]

    def start(self) -> None:
        """Overwrite the outputs."""
        if not self._outputs:
            return
        written = {y.untyped_storage().data_ptr() for y, _ in self._outputs}
        self._inputs = [pair for pair in self._inputs if pair[0].untyped_storage().data_ptr() not in written]
        with unobserved(), torch.inference_mode():
            for y, _ in self._outputs:
                fractional = y.is_floating_point() or y.is_complex()
                y.fill_(torch.nan if fractional else True if y.dtype == torch.bool else torch.iinfo(y.dtype).max)

    def finish(self, wait: Callable[[], Any]) -> Any:
        """Wait, and write what was received to the outputs, once."""
        result = wait()
        if not self._inputs and not self._outputs:
            return result
        with unobserved(), torch.inference_mode():
            for x, copy in self._inputs:
                if x.untyped_storage().nbytes() and not torch.equal(_bytes(x), _bytes(copy)):
                    raise RuntimeError(
                        f"{self.name}: the tensor that is sent was modified before the program waited for the call, "
                        "expected no modification: what is sent is not defined; modify it after wait()"
                    )
            for y, received in self._outputs:
                y.copy_(received)
        self._inputs, self._outputs = [], []
        return result


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(-1).view(torch.uint8)


def plain(x: Any) -> Any:
    """Return a tensor, or what is compared of one without memory; raise if it is of a transform or a tracer."""
    if not isinstance(x, Tensor):
        return x
    if hasattr(x, "trigger_wait"):  # the result of a functional collective
        x = x.trigger_wait()
    traced = is_traced(x) if has_memory(x) else is_recorded()
    if is_transformed(x) or traced:
        raise RuntimeError(
            "torch.distributed: got a tensor of a torch.func transform or a tracer, expected one with memory; call it "
            "outside of these, or use diffcoll's collectives in torch.func"
        )
    return x.detach() if has_memory(x) else kind(x)


def _tensors(blocks: Blocks) -> list[Any]:
    """Return the tensors among blocks."""
    if isinstance(blocks, (Tensor, Block)) or blocks is None:
        blocks = [blocks]
    return [x for x in (blocks.values() if isinstance(blocks, Mapping) else blocks) if isinstance(x, Tensor)]


def _row(n: int, blocks: Blocks, of: Callable[[Part], Part]) -> Row:
    """Return the row of `of` each block, for n ranks; it is called once for each tensor."""
    if isinstance(blocks, (Tensor, Block)) or blocks is None:
        return Row(of(blocks))
    if isinstance(blocks, Mapping):
        return Row(None, {r: of(x) for r, x in blocks.items()})
    if len(blocks) != n:
        raise ValueError(f"torch.distributed: got {len(blocks)} tensors, expected {n}, one for each rank")
    by_id = {id(x): of(x) for x in {id(x): x for x in blocks}.values()}
    return Row.of([by_id[id(x)] for x in blocks])


def _op(opts: Any) -> str:
    chosen: Any = dist.ReduceOp.SUM if opts is None else opts.reduceOp
    return str(getattr(chosen, "op", chosen).name)
