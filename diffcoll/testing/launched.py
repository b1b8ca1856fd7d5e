"""The same call on the ranks that a launcher has started, on one host or several; all of them make it.

Every rank has the arguments of all already, and receives the results of all, so that all come to the same verdict. What
comes through the network is JSON and the bytes of tensors; it is not unpickled.
"""

from __future__ import annotations

import json
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, is_dataclass
from datetime import timedelta
from functools import partial
from hashlib import blake2b
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from diffcoll.core.control import Control
from diffcoll.core.errors import message
from diffcoll.core.groups import resolve, set_default_group
from diffcoll.core.trees import tree_flatten
from diffcoll.engines.guards import THREAD
from diffcoll.engines.process_state import process_state, seed_rank, set_process_state
from diffcoll.testing._calls import seconds
from diffcoll.testing.pool import failed
from diffcoll.testing.processes import GRACE, RankFailure

#: The kind of ranks.
LAUNCHED = "launched"
#: What errors begin with.
_NAME = "launched ranks"

#: Of torch's default group, by timeout: a group for what the ranks tell each other, which users' errors leave usable.
_controls: weakref.WeakKeyDictionary[Any, dict[float, Control]] = weakref.WeakKeyDictionary()
#: Default groups in which ranks may wait for others that have failed.
_out_of_step: weakref.WeakSet[Any] = weakref.WeakSet()


def expect_launched(name: str, argument: str, sizes: Sequence[int]) -> int:
    """Return N; raise unless this process is a rank of a group, and each run, on so many ranks, uses all of them."""
    got = f'"{LAUNCHED}"'
    if THREAD.rank is not None:
        remedy = 'call it in a process that torchrun has started, or name "simulated"'
        raise RuntimeError(message(name, "on", f"{got} on a simulated rank", "a process of a launcher", remedy))
    if not (dist.is_available() and dist.is_initialized()):
        expected = "ranks that a launcher has started and a group connects"
        remedy = 'call torch.distributed.init_process_group() on each first, under torchrun, or name "gloo"'
        raise RuntimeError(message(name, "on", f"{got} without a process group", expected, remedy))
    n = dist.get_world_size()
    if other := next((size for size in sizes if size != n), None):
        raise ValueError(message(name, argument, f"a run on {other} ranks", f"{n}, as many as were launched"))
    return n


def call(fn: Callable[..., Any], rows: Sequence[Sequence[Any]], seed: int, timeout: float) -> list[Any]:
    """Run fn on this rank with its row of arguments, and return the results of all ranks, which all call this.

    Raises:
        CollectiveMismatchError: the ranks have other arguments.
        RanksFailedError: a rank raised an error, or was not ready within the timeout.
        RuntimeError: a rank failed before, and others may wait for it.
    """
    world, rank, timeout = dist.group.WORLD, dist.get_rank(), seconds(_NAME, timeout)
    if world in _out_of_step:
        raise RuntimeError(f"{_NAME}: a rank failed before, and others may wait for it; start the program again")
    control = _control(world, timeout)
    control.agree_on_each(_facts(fn, rows, seed), "arguments (to be made with one seed, or broadcast)")
    text, tensors, failure = "", list[Tensor](), None
    state = process_state()
    try:
        seed_rank(seed, rank)
        with set_default_group(world):
            text, tensors = packed(fn(*rows[rank]))
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        failure = RankFailure.of(error)
    finally:
        set_process_state(state)
    failures = _failures(control, failure, timeout)
    if any(failures.values()):
        if not all(failures.values()):  # those that have not failed may be in step with nobody
            _out_of_step.add(world)
        raise failed(_NAME, failures, timeout)
    data = torch.cat([_bytes(x) for x in tensors]) if tensors else torch.empty(0, dtype=torch.uint8)
    texts, lengths = control.texts(text), [n for (n,) in control.numbers([len(data)])]
    return [unpacked(*each) for each in zip(texts, control.gather(data, lengths), strict=True)]


def _control(world: Any, timeout: float) -> Control:
    of_world = _controls.setdefault(world, {})
    if timeout not in of_world:
        limit = timedelta(seconds=timeout)
        group = dist.new_group(backend="gloo", timeout=limit)
        of_world[timeout] = Control(resolve(group, _NAME), _NAME)
    return of_world[timeout]


def _facts(fn: Callable[..., Any], rows: Sequence[Sequence[Any]], seed: int) -> list[str]:
    """Return what must be the same on all ranks, in words: what is called, and the numbers that it is called with."""
    from diffcoll.testing.harness.packing import Packed

    while isinstance(fn, partial):
        fn = next((x for x in fn.args if callable(x)), fn.func)
    found = [f"a call of {getattr(fn, '__name__', fn)} on {len(rows)} ranks, seed {seed}"]
    for row in rows:
        for x in row:
            leaves = x.unpack().tensors if isinstance(x, Packed) else tree_flatten(getattr(x, "tensor", x))[0]
            what = "the module" if isinstance(x, Packed) else "the batch"
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            found += [f"a tensor of {what}: {x.dtype} {tuple(x.shape)}, digest {_digest(x)}" for x in tensors]
    return found


def _digest(x: Tensor) -> str:
    return blake2b(_bytes(x).numpy().tobytes(), digest_size=7).hexdigest()


# ── failures ─────────────────────────────────────────────────────────────────────────────────────────────


def _failures(control: Control, mine: RankFailure | None, timeout: float) -> dict[int, RankFailure | None]:
    """Return how each rank failed. A rank that has failed prints it if the others do not come soon."""
    rank, n = dist.get_rank(), dist.get_world_size()
    notice = threading.Timer(GRACE, _print, [f"rank {rank} of {n} waits for the others, and failed:", mine])
    notice.daemon = True
    if mine is not None:
        notice.start()
    try:
        texts = control.texts(json.dumps(mine and asdict(mine)))
    except RuntimeError as error:
        _out_of_step.add(dist.group.WORLD)
        other = RankFailure("hung", f"not known: a rank was not ready within {timeout:g} s, or has ended")
        raise failed(_NAME, {r: mine if r == rank else other for r in range(n)}, timeout) from error
    finally:
        notice.cancel()
    return {r: said and RankFailure(**said) for r, said in enumerate(map(json.loads, texts))}


def _print(words: str, failure: RankFailure) -> None:
    print(f"{_NAME}: {words}\n{failure.text}", file=sys.stderr, flush=True)


# ── what travels ─────────────────────────────────────────────────────────────────────────────────────────

#: Where dataclasses are found that are made of what comes through the network.
_HOME = "diffcoll.testing."


def packed(x: Any) -> tuple[str, list[Tensor]]:
    """Return a tree of lists, tuples, dicts, this package's dataclasses and tensors as JSON, and its tensors."""
    tensors: list[Tensor] = []

    def plain(x: Any) -> Any:
        if isinstance(x, Tensor):
            tensors.append(x.detach().cpu())
            return {"tensor": [str(x.dtype).removeprefix("torch."), *x.shape]}
        if is_dataclass(x) and not isinstance(x, type):
            kind = type(x)
            parts = {part.name: plain(getattr(x, part.name)) for part in fields(x)}
            return {"class": [kind.__module__.removeprefix(_HOME), kind.__name__], "fields": parts}
        if isinstance(x, dict):
            return {"dict": [[plain(key), plain(value)] for key, value in x.items()]}
        if isinstance(x, tuple):
            return {"tuple": [plain(each) for each in x]}
        if isinstance(x, list):
            return [plain(each) for each in x]
        if x is None or isinstance(x, (bool, int, float, str)):
            return x
        raise TypeError(f"{_NAME}: a result holds {type(x).__name__}, which does not travel between them")

    return json.dumps(plain(x)), tensors


def unpacked(text: str, data: Tensor) -> Any:
    """Return what was packed, of the bytes of its tensors."""
    at = 0

    def tensor(name: str, *shape: int) -> Tensor:
        nonlocal at
        dtype = getattr(torch, name)
        end = at + torch.Size(shape).numel() * dtype.itemsize
        part, at = data[at:end].clone(), end
        return part.view(dtype).view(shape)

    def built(x: Any) -> Any:
        if isinstance(x, list):
            return [built(each) for each in x]
        if not isinstance(x, dict):
            return x
        if "tensor" in x:
            return tensor(*x["tensor"])
        if "dict" in x:
            return {built(key): built(value) for key, value in x["dict"]}
        if "tuple" in x:
            return tuple(built(each) for each in x["tuple"])
        module, name = x["class"]
        kind = vars(sys.modules[_HOME + module]).get(name)
        if not (isinstance(kind, type) and is_dataclass(kind)):
            raise TypeError(f"{_NAME}: {name} is no dataclass of {_HOME}{module}")
        return kind(**{name: built(value) for name, value in x["fields"].items()})

    return built(json.loads(text))


def _bytes(x: Tensor) -> Tensor:
    """Return the numbers of a tensor as bytes."""
    x = x if x.layout == torch.strided else x.to_dense()
    return x.detach().cpu().resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8)
