"""The programs of notes/recipes.md, which test_notes.py runs on simulated ranks, on gloo processes."""

import pickle

import cloudpickle
import torch
from runs import gloo
from test_notes import NOTES, run_blocks

from diffcoll import testing
from diffcoll.testing import simulate


def test_recipes_on_processes(monkeypatch):
    """All programs in one set of processes: each gives what it gives on simulated ranks."""
    programs, inputs, expected = [], [], []

    def recorded(fn, *per_rank, rules):
        programs.append(cloudpickle.dumps(fn))  # now: what it refers to changes later in the note
        inputs.append(list(zip(*per_rank, strict=True)))
        expected.append(simulate(fn, *per_rank, rules=rules))
        return expected[-1]

    def every_program(*mine):
        return [pickle.loads(program)(*arguments) for program, arguments in zip(programs, mine, strict=True)]

    monkeypatch.setattr(testing, "simulate", recorded)
    run_blocks(NOTES / "recipes.md")
    assert len(programs) >= 9
    for found in zip(*gloo(every_program, *inputs), strict=True):
        torch.testing.assert_close(list(found), expected.pop(0), rtol=1e-10, atol=1e-12)
