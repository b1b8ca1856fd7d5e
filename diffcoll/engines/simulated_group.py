# ruff: noqa: D102
# The methods are those of the base class, without the overloads that torch itself does not call.
# mypy: disable-error-code="override,assignment"
"""`dist.ProcessGroup` of simulated ranks: the collectives and messages of torch.distributed, on `LocalEngine`.

torch.distributed, in Python and in C++, calls the methods of this class, whose names and arguments are those of torch.
Each collective is one call, or several that were coalesced, of a method of `Delivery`, which the last rank to arrive
carries out for all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from diffcoll.core.errors import user_line
from diffcoll.engines.delivery import joined, unlike
from diffcoll.engines.engine import Blocks
from diffcoll.engines.guards import THREAD
from diffcoll.engines.local import LocalEngine
from diffcoll.engines.simulated_moves import (
    Mailbox,
    Message,
    SimulatedWork,
    carry_out,
    contiguous,
    deliver,
    divide,
    layout,
    plain,
    reduction,
    warn_in_backward,
    wrong,
)

Tensors = list[Tensor]


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
                f"got a process group that simulated rank {self._engine.group.ranks[self._engine.rank]} has made, in a "
                "thread that is not that rank; groups belong to a rank, so call new_group on every rank and do not "
                "keep groups in globals or caches, which simulated ranks share; a program that keeps them, as "
                'Megatron-core does, runs on processes: use spawn, or on=("gloo",)'
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

    def _meet(
        self, name: str, step: str, calls: Sequence[Any], outputs: Tensors, how: str = "", op: str = "SUM"
    ) -> SimulatedWork:
        """Join a collective by calls of a method of `Delivery`. They fit together if `how` is equal on all ranks."""
        what = f"torch.distributed.{name}{how and f' ({how})'}"
        wait = self.engine._meet(what, "", calls, partial(carry_out, step, op))
        for y in outputs:
            warn_in_backward(f"torch.distributed.{name}, called at {user_line()},", y)

        def finish() -> None:
            wait()
            if op == "AVG":
                for y in outputs:
                    divide(y, self._engine.size)

        return SimulatedWork(finish, outputs)

    def _everybody(self, x: Tensor | None) -> Blocks:
        return [x] * self._engine.size

    def _only(self, rank: int, x: Tensor) -> Blocks:
        return [x if s == rank else None for s in range(self._engine.size)]

    def broadcast(self, tensors: Tensors, opts: Any) -> SimulatedWork:
        calls = [(plain(x), opts.rootRank) for x in tensors]
        how = f"from rank {opts.rootRank}{layout('broadcast', tensors)}"
        return self._meet("broadcast", "broadcast", calls, tensors, how)

    def allreduce(self, tensors: Tensors, opts: Any = None, name: str = "all_reduce") -> SimulatedWork:
        op, blocks = reduction(name, opts, tensors)
        calls = [*zip(blocks, tensors, strict=True)]
        return self._meet(name, "all_reduce", calls, tensors, f"{op}{layout(name, tensors)}", op)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> SimulatedWork:
        return self.allreduce(tensors, opts, "all_reduce_coalesced")

    def reduce(self, tensors: Tensors, opts: Any) -> SimulatedWork:
        op, blocks = reduction("reduce", opts, tensors)
        root = opts.rootRank
        calls = [(b, x, root) for b, x in zip(blocks, tensors, strict=True)]
        how = f"{op}, to rank {root}{layout('reduce', tensors)}"
        return self._meet("reduce", "reduce", calls, tensors if self._engine.rank == root else [], how, op)

    def allgather(
        self, outputs: list[Tensors], inputs: Tensors, opts: Any = None, name: str = "all_gather"
    ) -> SimulatedWork:
        calls = [(self._everybody(plain(x)), self._one_each(name, ys)) for ys, x in zip(outputs, inputs)]  # noqa: B905
        return self._meet(name, "exchange", calls, [y for ys in outputs for y in ys])

    def allgather_coalesced(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> SimulatedWork:
        """The output at [s][i] is the input i of rank s."""
        name = "all_gather_coalesced"
        lengths = [len(ys) for ys in outputs]
        if lengths != [len(inputs)] * self._engine.size:
            expected = f"for each of the {self._engine.size} ranks a list of {len(inputs)} tensors, as many as inputs"
            raise wrong(name, "output_tensor_lists", f"lengths {lengths}", expected)
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
        calls = [(self._only(root, plain(x)), recvs)]
        return self._meet("gather", "exchange", calls, [y for ys in outputs for y in ys], f"to rank {root}")

    def gather_single(self, output: Tensor, input: Tensor, opts: Any) -> SimulatedWork:
        mine = self._engine.rank == opts.rootRank
        return self.gather([self._cut("gather_single", "output", output, input)] if mine else [], [input], opts)

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> SimulatedWork:
        root, (y,) = opts.rootRank, outputs
        sends = self._one_each("scatter", inputs[0]) if self._engine.rank == root else self._everybody(None)
        for x in sends:
            contiguous("scatter", y if x is None else x)
        calls = [(sends, self._only(root, plain(y)))]
        return self._meet("scatter", "exchange", calls, outputs, f"from rank {root}")

    def reduce_scatter(
        self, outputs: Tensors, inputs: list[Tensors], opts: Any = None, name: str = "reduce_scatter"
    ) -> SimulatedWork:
        calls, op, me = [], "", self._engine.rank
        for xs, y in zip(inputs, outputs, strict=True):
            op, blocks = reduction(name, opts, self._one_each(name, xs))
            if (blocks[me].dtype, blocks[me].numel()) != (y.dtype, y.numel()):
                raise unlike(me, y, me, blocks[me])
            calls.append((joined([x.reshape(-1) for x in blocks]), [x.numel() for x in blocks], plain(y)))
        return self._meet(name, "reduce_scatter", calls, outputs, op, op)

    def reduce_scatter_tensor_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None, name: str = "reduce_scatter_tensor"
    ) -> SimulatedWork:
        cut = [self._cut(name, "input", x, y) for x, y in zip(inputs, outputs, strict=True)]
        return self.reduce_scatter(outputs, cut, opts, name)

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any = None) -> SimulatedWork:
        return self.reduce_scatter_tensor_coalesced([output], [input], opts)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> SimulatedWork:
        calls = [(self._one_each("all_to_all", inputs), self._one_each("all_to_all", outputs))]
        return self._meet("all_to_all", "exchange", calls, outputs)

    def alltoall_base(
        self, output: Tensor, input: Tensor, output_sizes: Sequence[int], input_sizes: Sequence[int], opts: Any = None
    ) -> SimulatedWork:
        name = "all_to_all_single"
        sends = self._cut_rows(name, "input", input, input_sizes)
        calls = [(sends, self._cut_rows(name, "output", output, output_sizes))]
        return self._meet(name, "exchange", calls, [output])

    def barrier(self, opts: Any = None) -> SimulatedWork:
        return self._meet("barrier", "", [], [])

    def monitored_barrier(self, timeout: object = None, wait_all_ranks: bool = False) -> None:
        self._meet("monitored_barrier", "", [], []).wait()

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
            raise wrong(name, "tensors", f"{len(xs)} tensors", expected)
        return [plain(x) for x in xs]

    def _cut(self, name: str, argument: str, x: Tensor, block: Tensor) -> Tensors:
        """Cut the tensor of all blocks, one behind the other, into blocks: along dimension 0, or of its memory."""
        x, n = plain(x), self._engine.size
        if block.dim() and x.shape == (n * block.shape[0], *block.shape[1:]):
            return list(x.split_with_sizes([block.shape[0]] * n))
        if x.numel() % n or not x.is_contiguous():
            got, expected = f"shape {tuple(x.shape)}", f"a contiguous tensor with a multiple of {n} numbers"
            raise wrong(name, argument, got, expected)
        return list(x.view(n, -1) if x.numel() else x.new_empty(n, 0))

    def _cut_rows(self, name: str, argument: str, x: Tensor, sizes: Sequence[int]) -> Tensors:
        """Cut dimension 0 into blocks of the given sizes; none given: equal ones."""
        x, n = contiguous(name, x), self._engine.size
        rows = x.shape[0] if x.dim() else 0
        sizes = list(sizes) or [rows // n] * n
        if not x.dim() or len(sizes) != n or sum(sizes) != rows:
            got, expected = f"shape {tuple(x.shape)}, split sizes {sizes}", f"{n} sizes that add up to dimension 0"
            raise wrong(name, argument, got, expected)
        return list(x.split_with_sizes(sizes))

    # ── messages ─────────────────────────────────────────────────────────────────────────────────────────

    def send(self, tensors: Tensors, dst: int, tag: int) -> SimulatedWork:
        """Send to one rank. Ends when the message is received, as with gloo and NCCL: they do not buffer it."""
        me, mailbox = self.engine.rank, self._mailboxes[dst]
        sent = self._message(f"send to rank {dst}", tensors, dst, tag)
        for expected in mailbox.recvs:
            if expected.tag == tag and expected.peer in (None, me):
                mailbox.recvs.remove(expected)
                deliver(me, dst, sent, expected)
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
                deliver(source, me, sent, expected)
                return expected.work
        mailbox.recvs.append(expected)
        return expected.work

    def recv_anysource(self, tensors: Tensors, tag: int) -> SimulatedWork:
        return self.recv(tensors, None, tag)

    recvAnysource = recv_anysource

    def _message(self, what: str, tensors: Tensors, peer: int | None, tag: int) -> Message:
        (x,) = (contiguous(what.partition(" ")[0], x) for x in tensors)
        what = f"torch.distributed.{what}{f', tag {tag}' if tag else ''}"
        finish, wait = self.engine.world.suspend(what)
        return Message(f"{what} at {user_line()}", x, peer, tag, SimulatedWork(wait, [x]), finish)
