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
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from typing_extensions import override

from diffcoll.core.torch_private.tracing import is_traced
from diffcoll.core.torch_private.transforms import is_transformed
from diffcoll.engines.engine import Blocks
from diffcoll.engines.simulated.engine import LocalEngine, deliver, expect_like
from diffcoll.engines.simulated.world import Entry, Meeting, expect_thread_of

Tensors = list[Tensor]
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
        return self.engine.rank

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
        self, name: str, how: object, sends: Sequence[Blocks], recvs: Sequence[Blocks], op: str = ""
    ) -> SimulatedWork:
        """Exchange blocks, several times if calls were coalesced. They fit together if `how` is equal on all ranks.

        With `op` what a rank receives is all to be written to one output, reduced.
        """
        if self._engine.in_one_graph and any(x is not None and x.requires_grad for blocks in sends for x in blocks):
            raise RuntimeError(f"torch.distributed.{name}: has no gradient in the graph of all ranks; use diffcoll's")
        into = [[y if y is None else plain(y) for y in blocks] for blocks in recvs]
        payload = list(zip(map(_copies, sends), into, strict=True))
        wait = self.engine.meet(f"torch.distributed.{name}", (op, how, len(payload)), payload, partial(deliver, op))
        return SimulatedWork(wait, list({id(y): y for blocks in recvs for y in blocks if y is not None}.values()))

    def _everybody(self, x: Tensor | None) -> Blocks:
        return [x] * self._engine.size

    def _only(self, rank: int, x: Tensor) -> Blocks:
        return [x if s == rank else None for s in range(self._engine.size)]

    def broadcast(self, tensors: Tensors, opts: Any) -> SimulatedWork:
        root, nothing = opts.rootRank, self._everybody(None)
        sends = [self._everybody(x) if self._engine.rank == root else nothing for x in tensors]
        return self._exchange("broadcast", f"from rank {root}", sends, [self._only(root, x) for x in tensors])

    def allreduce(self, tensors: Tensors, opts: Any = None) -> SimulatedWork:
        blocks = [self._everybody(x) for x in tensors]
        return self._exchange("all_reduce", "", blocks, blocks, _op(opts))

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Tensors, opts: Any) -> SimulatedWork:
        root = opts.rootRank
        recvs = [self._everybody(x if self._engine.rank == root else None) for x in tensors]
        sends = [self._only(root, x) for x in tensors]
        return self._exchange("reduce", f"to rank {root}", sends, recvs, _op(opts))

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> SimulatedWork:
        return self._exchange("all_gather", "", [self._everybody(x) for x in inputs], outputs)

    def allgather_coalesced(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> SimulatedWork:
        """The output at [s][i] is the input i of rank s."""
        return self.allgather([list(ys) for ys in zip(*outputs, strict=True)], inputs)

    def allgather_into_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> SimulatedWork:
        return self.allgather([self._cut(y, x) for y, x in zip(outputs, inputs, strict=True)], inputs)

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> SimulatedWork:
        return self.allgather_into_tensor_coalesced([output], [input])

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> SimulatedWork:
        root, (x,) = opts.rootRank, inputs
        recvs = outputs[0] if self._engine.rank == root else self._everybody(None)
        return self._exchange("gather", f"to rank {root}", [self._only(root, x)], [recvs])

    def gather_single(self, output: Tensor, input: Tensor, opts: Any) -> SimulatedWork:
        mine = self._engine.rank == opts.rootRank
        return self.gather([self._cut(output, input)] if mine else [], [input], opts)

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> SimulatedWork:
        root, (y,) = opts.rootRank, outputs
        sends = inputs[0] if self._engine.rank == root else self._everybody(None)
        return self._exchange("scatter", f"from rank {root}", [sends], [self._only(root, y)])

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> SimulatedWork:
        return self._exchange("reduce_scatter", "", inputs, [self._everybody(y) for y in outputs], _op(opts))

    def reduce_scatter_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> SimulatedWork:
        return self.reduce_scatter(outputs, [self._cut(x, y) for x, y in zip(inputs, outputs, strict=True)], opts)

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any = None) -> SimulatedWork:
        return self.reduce_scatter_tensor_coalesced([output], [input], opts)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> SimulatedWork:
        return self._exchange("all_to_all", "", [inputs], [outputs])

    def alltoall_base(
        self, output: Tensor, input: Tensor, output_sizes: Sequence[int], input_sizes: Sequence[int], opts: Any = None
    ) -> SimulatedWork:
        return self.alltoall(self._cut_rows(output, output_sizes), self._cut_rows(input, input_sizes))

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

    def _cut(self, x: Tensor, block: Tensor) -> Tensors:
        """Cut the tensor of all blocks, one behind the other, into blocks: along dimension 0, or of its memory."""
        x, n = plain(x), self._engine.size
        if block.dim() and x.shape == (n * block.shape[0], *block.shape[1:]):
            return list(x.split_with_sizes([block.shape[0]] * n))
        return list(x.view(n, x.numel() // n))

    def _cut_rows(self, x: Tensor, sizes: Sequence[int]) -> Tensors:
        """Cut dimension 0 into blocks of the given sizes; none given: equal ones."""
        x, n = plain(x), self._engine.size
        return list(x.split_with_sizes(list(sizes) or [x.shape[0] // n] * n))

    # ── messages ─────────────────────────────────────────────────────────────────────────────────────────

    def send(self, tensors: Tensors, dst: int, tag: int) -> SimulatedWork:
        """Send to one rank. Ends when the message is received, as with gloo and NCCL: they do not buffer it."""
        return self._post(f"send to rank {dst}", tensors, True, self.engine.rank, dst, tag)

    def recv(self, tensors: Tensors, src: int, tag: int) -> SimulatedWork:
        return self._post(f"recv from rank {src}", tensors, False, src, self.engine.rank, tag)

    def recv_anysource(self, tensors: Tensors, tag: int) -> SimulatedWork:
        return self._post("recv from any rank", tensors, False, _ANY, self.engine.rank, tag)

    recvAnysource = recv_anysource

    def _post(self, what: str, tensors: Tensors, sends: bool, source: int, destination: int, tag: int) -> SimulatedWork:
        """Deliver a message whose counterpart waits for it, or let it wait."""
        (x,) = map(plain, tensors)
        engine, world = self.engine, self._engine.world
        entry = Entry(f"torch.distributed.{what}{f', tag {tag}' if tag else ''}", None, x, None)
        mailbox = engine.ranks, engine.names, destination, tag
        counterparts = world.mailboxes[mailbox, not sends]
        for other, meeting in counterparts:
            if source == other or _ANY in (source, other):
                counterparts.remove((other, meeting))
                meeting.entries[engine.me.number] = entry
                sender = max(source, other)
                pair = [engine.ranks[r] for r in (sender, destination)]
                world.complete(meeting, pair, partial(_receive, sender, destination))
                break
        else:
            meeting = Meeting({engine.me.number: entry})
            world.mailboxes[mailbox, sends].append((source, meeting))
        return SimulatedWork(partial(world.wait, engine.me, meeting), [x])


def _receive(source: int, destination: int, xs: Tensors) -> list[int]:
    """Write a message to where its receiver expects it; the result of both is the source."""
    sent, into = xs
    expect_like(destination, into, source, sent.reshape(-1))
    with torch.inference_mode():
        into.copy_(sent.reshape(into.shape))
    return [source, source]


# ── tensors of torch.distributed's calls ─────────────────────────────────────────────────────────────────


def plain(x: Tensor) -> Tensor:
    """Return a tensor with memory; raise if it is one of a transform or a tracer."""
    if hasattr(x, "trigger_wait"):  # the result of a functional collective
        x = x.trigger_wait()
    if is_transformed(x) or is_traced(x):
        raise RuntimeError(
            "torch.distributed: got a tensor of a torch.func transform or a tracer, expected one with memory; call it "
            "outside of these, or use diffcoll's collectives in torch.func"
        )
    return x.detach()


def _copies(blocks: Blocks) -> Blocks:
    """Return copies of blocks in 1-d, one for those that are the same tensor."""
    copies = {id(x): plain(x).clone(memory_format=torch.contiguous_format).view(-1) for x in blocks if x is not None}
    return [None if x is None else copies[id(x)] for x in blocks]


def _op(opts: Any) -> str:
    chosen: Any = dist.ReduceOp.SUM if opts is None else opts.reduceOp
    return str(getattr(chosen, "op", chosen).name)
