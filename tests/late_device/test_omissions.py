"""What the library does for streams, left out piece by piece: the programs notice each omission."""

import device_programs as programs
import late
import pytest
from device_programs import CALLS, differing
from planting import planted

from diffcoll.averaging import buckets
from diffcoll.averaging.messages import Message
from diffcoll.core import moves
from diffcoll.engines import c10d

pytestmark = pytest.mark.usefixtures("two_ranks")


def elsewhere():
    """Pairs of every call that is awaited on another stream."""
    return [pair for call in CALLS.values() for pair in programs.awaited_elsewhere(call)]


def at_once():
    return [pair for call in CALLS.values() for pair in programs.collective(call, "collective")]


def one_bucket():
    return programs.averaged()


def three_streams():
    return programs.averaged(bucket_mb=12e-3, sides=2)


def two_streams():
    return programs.averaged(bucket_mb=12e-3)


Bucket = buckets.Bucket
C10D_WAIT = "return partial(of_backend, of_backend(call, *arguments).wait)"

OMISSIONS = [
    (Bucket, "enter_stream", "self._others.add(here)", "pass", three_streams),
    (Bucket, "_join_streams", "here.wait_stream(other)", "pass", three_streams),
    (Bucket, "complete", "grad.record_stream(here)", "pass", two_streams),
    (Bucket, "_lay_out", "current_stream(memory.device)", "None", two_streams),
    (Message, "wait", "self._wait()", "pass", one_bucket),
    (moves, "_wait_across_streams", "start.wait_stream(here)", "pass", elsewhere),
    (moves, "_wait_across_streams", "y.record_stream(here)", "pass", elsewhere),
    (c10d.C10dEngine, "_wait", C10D_WAIT, "of_backend(call, *arguments); return int", at_once),
]


@pytest.mark.parametrize(
    ("owner", "name", "line", "instead", "program"),
    OMISSIONS,
    ids=[f"{name}: {line}" for _, name, line, *_ in OMISSIONS],
)
def test_an_omission_is_noticed(owner, name, line, instead, program, monkeypatch):
    planted(owner, name, line, instead, monkeypatch.setattr)
    noticed = []
    for order in late.ORDERS:
        with late.order(order):
            noticed += differing(program())
    assert noticed


@pytest.mark.parametrize("program", {omission[-1] for omission in OMISSIONS}, ids=lambda program: program.__name__)
def test_nothing_is_noticed_without_one(program, order):
    assert differing(program()) == []
