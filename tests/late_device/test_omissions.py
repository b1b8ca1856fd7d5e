"""What the library does for streams, left out piece by piece: the programs notice each omission."""

import device_programs as programs
import late
import pytest
from device_programs import CALLS, differing
from planting import planted

from diffcoll.averaging import buckets, reducer, sending
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


Bucket, Reducer = buckets.Bucket, reducer.Reducer
C10D_WAIT = "return partial(of_backend, of_backend(call, *arguments).wait)"

OMISSIONS = [
    (Bucket, "enter_stream", "here.wait_stream(self.stream)", "pass", programs.reused_for_a_bucket),
    (Bucket, "enter_stream", "self._others.add(here)", "pass", two_streams),
    (Bucket, "join_streams", "self.stream.wait_stream(other)", "pass", two_streams),
    (Bucket, "join_streams", "here.wait_stream(self.stream)", "pass", three_streams),
    (Bucket, "join_streams", "p.tensor.grad.record_stream(here)", "pass", two_streams),
    (Bucket, "allocate", "current_stream(self.body.device)", "None", two_streams),
    (Reducer, "_put_flags", "can_pin(bucket.tail.device.type)", "False", one_bucket),
    (Reducer, "_must_skip", "self.buckets[-1].stream is not None", "False", one_bucket),
    (sending.Sender, "wait", "wait()", "pass", one_bucket),
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
