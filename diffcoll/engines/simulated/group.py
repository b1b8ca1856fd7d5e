# ruff: noqa: D102
# The methods are those of the base class, without the overloads that torch itself does not call.
# mypy: disable-error-code="override,assignment"
"""`dist.ProcessGroup` of simulated ranks: the collectives and messages of torch.distributed, on `LocalEngine`.

torch.distributed, in Python and in C++, calls the methods of this class, whose names and arguments are those of torch.
Each collective is an exchange of blocks: a rank sends copies of its inputs, and the last rank to call it writes the
outputs of all.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from typing_extensions import override

from diffcoll.core.errors import CollectiveMismatchError, message, user_line
from diffcoll.core.torch_private.tracing import is_traced
from diffcoll.core.torch_private.transforms import is_transformed
from diffcoll.engines.engine import Blocks, Wait
from diffcoll.engines.rank_state import THREAD
from diffcoll.engines.simulated.engine import NO_GRAPHS, LocalEngine, unlike

Tensors = list[Tensor]

_FOLDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


class SimulatedWork(dist.Work):
    """What `async_op=True`, isend and irecv return."""

    def __init__(self, wait: Wait, outputs: Tensors, source: int | None = None) -> None:
        super().__init__()
        self._wait: Wait | None = wait
        self._outputs = outputs
        self.source = source

    @override
    def wait(self, timeout: object = None) -> bool:
        """Return when the outputs are there; on simulated ranks there are no timeouts."""
        if self._wait is not None:
            self._wait()
            self._wait = None
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
    def source_rank(self) -> int | None:
        return self.source

    _source_rank = source_rank


@dataclass(eq=False)
class Message:
    """A send or a receive that waits for its counterpart."""

    what: str
    sends: bool
    source: int | None  # None: any rank
    tag: int
    x: Tensor
    work: SimulatedWork
    finish: Callable[[], None]


class SimulatedGroup(dist.ProcessGroup):
    """A group of simulated ranks, as seen by one of them."""

    # `split_group` asks for it.
    supports_splitting = False
    group_desc = "simulated"
    _device_types = (torch.device("cpu"),)

    def __init__(self, engine: LocalEngine, name: str) -> None:
        super().__init__(engine.rank, engine.size)  # type: ignore[call-arg]
        self._engine = engine
        self._name = name
        self._owner = THREAD.rank

    @property
    def engine(self) -> LocalEngine:
        """This rank's engine; raises on other ranks."""
        if THREAD.rank is not self._owner:
            raise RuntimeError(
                f"got a process group that simulated rank {self._engine.group.ranks[self._engine.rank]} has made, on "
                "another rank; make groups on every rank, and do not keep them in globals or caches, which simulated "
                "ranks share; a program that keeps them runs on processes (diffcoll.testing.spawn)"
            )
        return self._engine

    # ── what torch asks a group ──────────────────────────────────────────────────────────────────────────

    @property
    def group_name(self) -> str:
        return self._name

    def getGroupName(self) -> str:
        return self._name

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
        n = self._engine.size
        if any(len(blocks) != n for blocks in (*sends, *recvs)):
            raise ValueError(
                message(f"torch.distributed.{name}", "tensors", "another number", f"one for each of {n} ranks")
            )
        if self._engine.in_one_graph and any(x is not None and x.requires_grad for blocks in sends for x in blocks):
            raise RuntimeError(f"torch.distributed.{name}: has no gradient in the graph of all ranks; use diffcoll's")
        outputs = list({id(y): y for blocks in recvs for y in blocks if y is not None}.values())
        for y in outputs:
            if torch.is_grad_enabled() and y.requires_grad:
                warn = partial(_warn, f"torch.distributed.{name}, called at {user_line()},")
                y.register_hook(warn)  # type: ignore[no-untyped-call]
        into = [[y if y is None else plain(y) for y in blocks] for blocks in recvs]
        payload = list(zip(map(_copies, sends), into, strict=True))
        wait = self.engine.meet(f"torch.distributed.{name}", (op, how, len(payload)), payload, partial(_deliver, op))
        return SimulatedWork(wait, outputs)

    def _everybody(self, x: Tensor | None) -> Blocks:
        return [x] * self._engine.size

    def _only(self, rank: int, x: Tensor) -> Blocks:
        return [x if s == rank else None for s in range(self._engine.size)]

    def broadcast(self, tensors: Tensors, opts: Any) -> SimulatedWork:
        root, nothing = opts.rootRank, self._everybody(None)
        sends = [self._everybody(x) if self._engine.rank == root else nothing for x in tensors]
        return self._exchange("broadcast", f"from rank {root}", sends, [self._only(root, x) for x in tensors])

    def allreduce(self, tensors: Tensors, opts: Any = None, name: str = "all_reduce") -> SimulatedWork:
        blocks = [self._everybody(x) for x in tensors]
        return self._exchange(name, "", blocks, blocks, _reduction(name, opts))

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> SimulatedWork:
        return self.allreduce(tensors, opts, "all_reduce_coalesced")

    def reduce(self, tensors: Tensors, opts: Any) -> SimulatedWork:
        root = opts.rootRank
        recvs = [self._everybody(x if self._engine.rank == root else None) for x in tensors]
        sends = [self._only(root, x) for x in tensors]
        return self._exchange("reduce", f"to rank {root}", sends, recvs, _reduction("reduce", opts))

    def allgather(
        self, outputs: list[Tensors], inputs: Tensors, opts: Any = None, name: str = "all_gather"
    ) -> SimulatedWork:
        return self._exchange(name, "", [self._everybody(x) for x in inputs], outputs)

    def allgather_coalesced(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> SimulatedWork:
        """The output at [s][i] is the input i of rank s."""
        return self.allgather([list(ys) for ys in zip(*outputs, strict=True)], inputs, opts, "all_gather_coalesced")

    def allgather_into_tensor_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None, name: str = "all_gather_into_tensor"
    ) -> SimulatedWork:
        cut = [self._cut(y, x) for y, x in zip(outputs, inputs, strict=True)]
        return self.allgather(cut, inputs, opts, name)

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> SimulatedWork:
        return self.allgather_into_tensor_coalesced([output], [input], opts)

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

    def reduce_scatter(
        self, outputs: Tensors, inputs: list[Tensors], opts: Any = None, name: str = "reduce_scatter"
    ) -> SimulatedWork:
        return self._exchange(name, "", inputs, [self._everybody(y) for y in outputs], _reduction(name, opts))

    def reduce_scatter_tensor_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None, name: str = "reduce_scatter_tensor"
    ) -> SimulatedWork:
        cut = [self._cut(x, y) for x, y in zip(inputs, outputs, strict=True)]
        return self.reduce_scatter(outputs, cut, opts, name)

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any = None) -> SimulatedWork:
        return self.reduce_scatter_tensor_coalesced([output], [input], opts)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> SimulatedWork:
        return self._exchange("all_to_all", "", [inputs], [outputs])

    def alltoall_base(
        self, output: Tensor, input: Tensor, output_sizes: Sequence[int], input_sizes: Sequence[int], opts: Any = None
    ) -> SimulatedWork:
        sends, recvs = self._cut_rows(input, input_sizes), self._cut_rows(output, output_sizes)
        return self._exchange("all_to_all_single", "", [sends], [recvs])

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

    def recv(self, tensors: Tensors, src: int | None, tag: int) -> SimulatedWork:
        source = "any rank" if src is None else f"rank {src}"
        return self._post(f"recv from {source}", tensors, False, src, self.engine.rank, tag)

    def recv_anysource(self, tensors: Tensors, tag: int) -> SimulatedWork:
        return self.recv(tensors, None, tag)

    recvAnysource = recv_anysource

    def _post(
        self, what: str, tensors: Tensors, sends: bool, source: int | None, destination: int, tag: int
    ) -> SimulatedWork:
        """Deliver a message whose counterpart waits for it, or let it wait."""
        (x,) = map(plain, tensors)
        what = f"torch.distributed.{what}{f', tag {tag}' if tag else ''}"
        finish, wait = self.engine.world.suspend(what)
        mine = Message(f"{what} at {user_line()}", sends, source, tag, x, SimulatedWork(wait, [x], source), finish)
        waiting = self._engine.world.mailboxes[self._engine.group, destination]
        for other in waiting:
            known = {mine.source, other.source} - {None}
            if (other.sends, other.tag) == (not sends, tag) and len(known) == 1:
                waiting.remove(other)
                sent, expected = (mine, other) if sends else (other, mine)
                _hand_over(sent, expected, destination)
                return mine.work
        waiting.append(mine)
        return mine.work


def _hand_over(sent: Message, expected: Message, destination: int) -> None:
    """Move a message to its receiver, and let both sides go on."""
    source = sent.source
    assert source is not None
    try:
        _expect_fits(destination, expected.x, source, sent.x)
    except CollectiveMismatchError as error:
        lines = f"  rank {source} is in {sent.what}\n  rank {destination} is in {expected.what}"
        raise CollectiveMismatchError(f"simulated ranks cannot go on: {error}\n{lines}") from None
    with torch.inference_mode():
        expected.x.copy_(sent.x.reshape(expected.x.shape))
    expected.work.source = source
    sent.finish()
    expected.finish()


# ── tensors of torch.distributed's calls ─────────────────────────────────────────────────────────────────


def plain(x: Tensor) -> Tensor:
    """Return a tensor with memory; raise if a transform or tracer watches it."""
    if hasattr(x, "trigger_wait"):  # the result of a functional collective
        x = x.trigger_wait()
    if is_transformed(x):
        raise RuntimeError(
            "torch.distributed: called within a transform of torch.func, which it does not support; use diffcoll's "
            "collectives"
        )
    if is_traced(x):
        raise RuntimeError(f"torch.distributed: {NO_GRAPHS}")
    return x.detach()


def _copies(blocks: Blocks) -> Blocks:
    """Return copies of blocks, one for those that are the same tensor."""
    copies = {id(x): plain(x).clone(memory_format=torch.contiguous_format) for x in blocks if x is not None}
    return [None if x is None else copies[id(x)] for x in blocks]


def _deliver(op: str, ranks: Sequence[Sequence[tuple[Blocks, Blocks]]]) -> list[None]:
    """Write what every rank sends to where its receiver expects it, with `op` reduced over its senders."""
    with torch.inference_mode():  # outputs of a rank in inference mode can be written in that mode only
        for calls in zip(*ranks, strict=True):
            reduced: dict[tuple[int, ...], Tensor] = {}  # once for all ranks that receive the same tensors
            for r, (_, recvs) in enumerate(calls):
                blocks = [sends[r] for sends, _ in calls]
                for s, (into, block) in enumerate(zip(recvs, blocks, strict=True)):
                    _expect_fits(r, into, s, block)
                if op and recvs[0] is not None:
                    key = tuple(map(id, blocks))
                    if key not in reduced:
                        reduced[key] = _reduced(op, blocks)
                    recvs, blocks = recvs[:1], [reduced[key]]
                for into, block in zip(recvs, blocks, strict=True):
                    if into is not None and block is not None:
                        into.copy_(block.view(into.shape))
    return [None] * len(ranks)


def _expect_fits(r: int, into: Tensor | None, s: int, block: Tensor | None) -> None:
    facts = [None if x is None else (x.numel(), x.dtype) for x in (into, block)]
    if facts[0] != facts[1]:
        raise unlike(r, into, s, block)


def _reduced(op: str, blocks: Sequence[Any]) -> Tensor:
    """Return the reduction of blocks, in the order of ranks; whole numbers are truncated, as on NCCL."""
    total: Tensor = reduce(_FOLDS[op], blocks)
    if op != "AVG":
        return total
    fractional = total.is_floating_point() or total.is_complex()
    return total.div(len(blocks), rounding_mode=None if fractional else "trunc")


def _reduction(name: str, opts: Any) -> str:
    chosen: Any = dist.ReduceOp.SUM if opts is None else opts.reduceOp
    op = str(getattr(chosen, "op", chosen).name)
    if op not in _FOLDS:
        raise ValueError(message(f"torch.distributed.{name}", "op", op, f"one of {', '.join(_FOLDS)}"))
    return op


class LostGradientWarning(UserWarning):
    """A backward passes a gradient on through values that a collective has replaced; torch warns on processes, too."""


def _warn(call: str, _: Tensor) -> None:
    warnings.warn(
        f"{call} has replaced the values of a tensor of an autograd graph, and backward passes its gradient on as "
        "if it had not; diffcoll's collectives have gradients, see notes/why/law.md",
        LostGradientWarning,
        stacklevel=2,
    )
