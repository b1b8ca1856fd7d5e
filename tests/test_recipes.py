"""The programs of notes/how-to/recipes.md, which test_notes.py runs on simulated ranks, on gloo processes."""

import pickle
from functools import partial

import cloudpickle
import torch
from runs import gloo
from test_notes import NOTES, run_blocks

from diffcoll import testing
from diffcoll.testing import simulate


def test_recipes_on_processes(monkeypatch):
    """All programs of N ranks in one set of processes: each gives what it gives on simulated ranks."""
    programs, inputs, expected = [], [], []

    def recorded(fn, *per_rank, **options):
        programs.append(cloudpickle.dumps(fn))  # now: what it refers to changes later in the note
        inputs.append(list(zip(*per_rank, strict=True)))
        expected.append(simulate(fn, *per_rank, **options))
        return expected[-1]

    def every_program(chosen, *mine):
        return [pickle.loads(programs[i])(*arguments) for i, arguments in zip(chosen, mine, strict=True)]

    monkeypatch.setattr(testing, "simulate", recorded)
    run_blocks(NOTES / "how-to" / "recipes.md")
    assert len(programs) >= 9
    for n in {len(of_ranks) for of_ranks in inputs}:
        chosen = [i for i, of_ranks in enumerate(inputs) if len(of_ranks) == n]
        ranks = gloo(partial(every_program, chosen), *(inputs[i] for i in chosen))
        for i, found in zip(chosen, zip(*ranks, strict=True), strict=True):
            torch.testing.assert_close(list(found), expected[i], rtol=1e-10, atol=1e-12, equal_nan=True)
