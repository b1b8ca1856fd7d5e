# ruff: noqa: D102
# The methods are those of the base class, without the overloads that torch itself does not call.
# mypy: disable-error-code="override,assignment"
"""`dist.ProcessGroup` of simulated ranks: the collectives and messages of torch.distributed, on `LocalEngine`.

torch.distributed, in Python and in C++, calls the methods of this class, whose names and arguments are those of torch.
Each collective is an exchange of blocks: a rank sends copies of its inputs, and writes its outputs when it waits.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
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
from diffcoll.engines.simulated.engine import NO_GRAPHS, LocalEngine, deliver, unlike

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

    def __init__(self, wait: Wait, outputs: Tensors, source: int = -1) -> None:
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
    def source_rank(self) -> int:
        return self.source

    _source_rank = source_rank


@dataclass(eq=False)
class Message:
    """A send or receive that waits for its counterpart."""

    what: str
    x: Tensor
    #: Of the other side; None: any.
    peer: int | None
    tag: int
    work: SimulatedWork
    finish: Callable[[], None]


@dataclass
class Mailbox:
    """Messages to one rank of a group that were sent, or expected, and not yet delivered; in their order."""

    sends: list[tuple[int, Message]] = field(default_factory=list)
    recvs: list[Message] = field(default_factory=list)


class SimulatedGroup(dist.ProcessGroup):
    """A group of simulated ranks, as seen by one of them."""

    # `split_group` asks for it.
    supports_splitting = False
    group_desc = "simulated"
    # Types of the devices of its backends. Set when torch has made the group, for which it must be empty till then.
    _device_types: tuple[torch.device, ...] = ()

    def __init__(self, engine: LocalEngine, name: str, mailboxes: list[Mailbox]) -> None:
        super().__init__(engine.rank, engine.size)  # type: ignore[call-arg]
        self._engine = engine
        self._name = name
        self._mailboxes = mailboxes
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
        if self._engine.in_one_graph and any(x is not None and x.requires_grad for blocks in sends for x in blocks):
            raise RuntimeError(f"torch.distributed.{name}: has no gradient in the graph of all ranks; use diffcoll's")
        outputs = [y for blocks in recvs for y in blocks if y is not None]
        outputs = list({id(y): y for y in outputs}.values())
        copies = [_each(blocks, _copy) for blocks in sends]
        received = [[None if y is None else _empty(y) for y in blocks] for blocks in recvs]
        for y in outputs:
            _warn_in_backward(f"torch.distributed.{name}, called at {user_line()},", y)

        def combine(ranks: list[Any]) -> list[None]:
            for calls in zip(*ranks, strict=True):
                deliver(calls)
            return [None] * len(ranks)

        payload = list(zip(copies, received, strict=True))
        wait = self.engine.meet(f"torch.distributed.{name}", (op, how, len(payload)), payload, combine)

        def finish() -> None:
            wait()
            with torch.inference_mode():  # outputs of a rank in inference mode can be written in that mode only
                for into, blocks in zip(recvs, received, strict=True):
                    if op and blocks[0] is not None:
                        blocks = [_folded(op, blocks)] * len(blocks)
                    for y, block in zip(into, blocks, strict=True):
                        if y is not None and block is not None:
                            plain(y).copy_(block.view(y.shape))
            if op == "AVG":  # as on gloo, autograd records the division; as on NCCL, whole numbers are truncated
                for y in outputs:
                    fractional = y.is_floating_point() or y.is_complex()
                    y.div_(self._engine.size, rounding_mode=None if fractional else "trunc")

        return SimulatedWork(finish, outputs)

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
        recvs = [self._one_each(name, ys) for ys in outputs]
        return self._exchange(name, "", [self._everybody(x) for x in inputs], recvs)

    def allgather_coalesced(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> SimulatedWork:
        """The output at [s][i] is the input i of rank s."""
        name = "all_gather_coalesced"
        lengths = [len(ys) for ys in outputs]
        if lengths != [len(inputs)] * self._engine.size:
            expected = f"for each of the {self._engine.size} ranks a list of {len(inputs)} tensors, as many as inputs"
            raise _wrong(name, "output_tensor_lists", f"lengths {lengths}", expected)
        return self.allgather([list(ys) for ys in zip(*outputs, strict=True)], inputs, opts, name)

    def allgather_into_tensor_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None, name: str = "all_gather_into_tensor"
    ) -> SimulatedWork:
        cut = [self._cut(name, "output_tensor", y, x) for y, x in zip(outputs, inputs, strict=True)]
        return self.allgather(cut, inputs, opts, name)

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> SimulatedWork:
        return self.allgather_into_tensor_coalesced([output], [input], opts)

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> SimulatedWork:
        root, (x,) = opts.rootRank, inputs
        recvs = self._one_each("gather", outputs[0]) if self._engine.rank == root else self._everybody(None)
        return self._exchange("gather", f"to rank {root}", [self._only(root, x)], [recvs])

    def gather_single(self, output: Tensor, input: Tensor, opts: Any) -> SimulatedWork:
        mine = self._engine.rank == opts.rootRank
        return self.gather([self._cut("gather_single", "output", output, input)] if mine else [], [input], opts)

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> SimulatedWork:
        root, (y,) = opts.rootRank, outputs
        sends = self._one_each("scatter", inputs[0]) if self._engine.rank == root else self._everybody(None)
        return self._exchange("scatter", f"from rank {root}", [sends], [self._only(root, y)])

    def reduce_scatter(
        self, outputs: Tensors, inputs: list[Tensors], opts: Any = None, name: str = "reduce_scatter"
    ) -> SimulatedWork:
        sends = [self._one_each(name, xs) for xs in inputs]
        return self._exchange(name, "", sends, [self._everybody(y) for y in outputs], _reduction(name, opts))

    def reduce_scatter_tensor_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None, name: str = "reduce_scatter_tensor"
    ) -> SimulatedWork:
        cut = [self._cut(name, "input", x, y) for x, y in zip(inputs, outputs, strict=True)]
        return self.reduce_scatter(outputs, cut, opts, name)

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any = None) -> SimulatedWork:
        return self.reduce_scatter_tensor_coalesced([output], [input], opts)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> SimulatedWork:
        sends, recvs = self._one_each("all_to_all", inputs), self._one_each("all_to_all", outputs)
        return self._exchange("all_to_all", "", [sends], [recvs])

    def alltoall_base(
        self, output: Tensor, input: Tensor, output_sizes: Sequence[int], input_sizes: Sequence[int], opts: Any = None
    ) -> SimulatedWork:
        name = "all_to_all_single"
        sends = self._cut_rows(name, "input", input, input_sizes)
        return self._exchange(name, "", [sends], [self._cut_rows(name, "output", output, output_sizes)])

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

    def _one_each(self, name: str, xs: Tensors) -> Tensors:
        if len(xs) != self._engine.size:
            expected = f"one tensor for each of the {self._engine.size} ranks"
            raise _wrong(name, "tensors", f"{len(xs)} tensors", expected)
        return list(xs)

    def _cut(self, name: str, argument: str, x: Tensor, block: Tensor) -> Tensors:
        """Cut the tensor of all blocks, one behind the other, into blocks: along dimension 0, or of its memory."""
        x, n = plain(x), self._engine.size
        if block.dim() and x.shape == (n * block.shape[0], *block.shape[1:]):
            return list(x.split_with_sizes([block.shape[0]] * n))
        if x.numel() % n or not x.is_contiguous():
            got, expected = f"shape {tuple(x.shape)}", f"a contiguous tensor with a multiple of {n} numbers"
            raise _wrong(name, argument, got, expected)
        return list(x.view(n, -1) if x.numel() else x.new_empty(n, 0))

    def _cut_rows(self, name: str, argument: str, x: Tensor, sizes: Sequence[int]) -> Tensors:
        """Cut dimension 0 into blocks of the given sizes; none given: equal ones."""
        x, n = plain(x), self._engine.size
        rows = x.shape[0] if x.dim() else 0
        sizes = list(sizes) or [rows // n] * n
        if not x.dim() or len(sizes) != n or sum(sizes) != rows:
            got, expected = f"shape {tuple(x.shape)}, split sizes {sizes}", f"{n} sizes that add up to dimension 0"
            raise _wrong(name, argument, got, expected)
        return list(x.split_with_sizes(sizes))

    # ── messages ─────────────────────────────────────────────────────────────────────────────────────────

    def send(self, tensors: Tensors, dst: int, tag: int) -> SimulatedWork:
        """Send to one rank. Ends when the message is received, as with gloo and NCCL: they do not buffer it."""
        me, mailbox = self.engine.rank, self._mailboxes[dst]
        sent = self._message(f"send to rank {dst}", tensors, dst, tag)
        for expected in mailbox.recvs:
            if expected.tag == tag and expected.peer in (None, me):
                mailbox.recvs.remove(expected)
                _hand_over(me, dst, sent, expected)
                return sent.work
        mailbox.sends.append((me, sent))
        return sent.work

    def recv(self, tensors: Tensors, src: int | None, tag: int) -> SimulatedWork:
        me = self.engine.rank
        mailbox = self._mailboxes[me]
        expected = self._message(f"recv from {'any rank' if src is None else f'rank {src}'}", tensors, src, tag)
        for source, sent in mailbox.sends:
            if sent.tag == tag and src in (None, source):
                mailbox.sends.remove((source, sent))
                _hand_over(source, me, sent, expected)
                return expected.work
        mailbox.recvs.append(expected)
        return expected.work

    def recv_anysource(self, tensors: Tensors, tag: int) -> SimulatedWork:
        return self.recv(tensors, None, tag)

    recvAnysource = recv_anysource

    def _message(self, what: str, tensors: Tensors, peer: int | None, tag: int) -> Message:
        (x,) = map(plain, tensors)
        what = f"torch.distributed.{what}{f', tag {tag}' if tag else ''}"
        finish, wait = self.engine.world.suspend(what)
        return Message(f"{what} at {user_line()}", x, peer, tag, SimulatedWork(wait, [x]), finish)


def _hand_over(source: int, destination: int, sent: Message, expected: Message) -> None:
    """Move a message to its receiver, and let both sides go on."""
    if (sent.x.numel(), sent.x.dtype) != (expected.x.numel(), expected.x.dtype):
        error = unlike(destination, expected.x, source, sent.x)
        lines = f"  rank {source} is in {sent.what}\n  rank {destination} is in {expected.what}"
        raise CollectiveMismatchError(f"simulated ranks cannot go on: {error}\n{lines}")
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


def _copy(x: Tensor) -> Tensor:
    return plain(x).reshape(-1).clone()


def _empty(y: Tensor) -> Tensor:
    return y.new_empty(y.numel())


def _each(blocks: Blocks, call: Callable[[Tensor], Tensor]) -> Blocks:
    """Call a function of every block, once for those that are the same tensor."""
    done = {id(x): call(x) for x in blocks if x is not None}
    return [None if x is None else done[id(x)] for x in blocks]


def _folded(op: str, blocks: Sequence[Any]) -> Tensor:
    """Return the reduction of what a rank has received, in the order of ranks."""
    total: Tensor = reduce(_FOLDS[op], blocks)
    return total


def _reduction(name: str, opts: Any) -> str:
    chosen: Any = dist.ReduceOp.SUM if opts is None else opts.reduceOp
    op = str(getattr(chosen, "op", chosen).name)
    if op not in _FOLDS:
        raise _wrong(name, "op", op, f"one of {', '.join(_FOLDS)}")
    return op


class LostGradientWarning(UserWarning):
    """A backward passes a gradient on through values that a collective has replaced."""


def _warn_in_backward(call: str, y: Tensor) -> None:
    """Warn in a backward through y, whose values a collective has replaced; torch does so on processes."""
    if not (torch.is_grad_enabled() and y.requires_grad):
        return

    def warn(_: Tensor) -> None:
        warnings.warn(
            f"{call} has replaced the values of a tensor of an autograd graph, and backward passes its gradient on as "
            "if it had not; diffcoll's collectives have gradients, see notes/why/law.md",
            LostGradientWarning,
            stacklevel=2,
        )

    y.register_hook(warn)  # type: ignore[no-untyped-call]


def _wrong(name: str, argument: str, got: object, expected: str) -> ValueError:
    """Return the error about an argument of a function of torch.distributed."""
    return ValueError(message(f"torch.distributed.{name}", argument, got, expected))
