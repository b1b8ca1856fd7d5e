"""How many wrong programs the check finds in each dtype; it calls no right one wrong.

A figure of the suite: what rounding hides is not decided, and a wrong program whose wrong part is smaller than the
tolerance is missed.
"""

import os
import random
from collections import Counter

import pytest
import torch
from field import RIGHT as RIGHT_OF_FIELD
from field import WRONG as WRONG_OF_FIELD
from planted import PLANTED
from planted import RIGHT as RIGHT_LOSSES
from sharded_programs import PROGRAMS
from test_gradients_fuzz import SIZES, Program
from test_gradients_fuzz import batch as batch_of_fuzz
from verdicts import with_more

from diffcoll.testing import GradientMismatchError, assert_matches_single_process

#: Fuzzed programs of each dtype in the long run.
COUNT = int(os.environ.get("DIFFCOLL_FUZZ", "500"))
EVEN = (4, 4)


def fuzzed(seed, wrong):
    rng, sizes = random.Random(seed), SIZES[seed % len(SIZES)]
    right = Program(seed)
    place = (rng.randrange(right.count_places()), rng.randrange(60)) if wrong else None
    more = {"module": right.weights(), "ranks": sizes, "losses": "sum"}
    return Program(seed, place), right, batch_of_fuzz(sum(sizes)), more


def of_kind(wrong, count):
    """Return what makes each program."""
    if wrong:
        found = [with_more(make, ranks=EVEN) for make in WRONG_OF_FIELD.values()]
        found += [with_more(make, ranks=ranks[2]) for make, ranks, _ in PLANTED.values()]
        found += [lambda make=make, bug=bug: make(bug) for make, bugs in PROGRAMS.items() for bug in bugs]
    else:
        found = [with_more(make, ranks=EVEN) for make in (*RIGHT_OF_FIELD.values(), *RIGHT_LOSSES.values())]
        found += [lambda make=make: make("") for make in PROGRAMS]
    return found + [lambda seed=seed: fuzzed(seed, wrong) for seed in range(count)]


def in_dtype(program, dtype):
    """The program with all numbers in a dtype, also those of what `shard` makes."""
    *functions, given = program
    shard = given.get("shard")
    more = {"shard": lambda whole, mesh: shard(whole, mesh).to(dtype)} if shard else {}
    return *functions, {**given, **more, "dtype": dtype, "on": ["simulated"]}


def verdict(program):
    """Return "wrong", "right", "not decided", or that the program does not run in this dtype."""
    *given, more = program
    try:
        report = assert_matches_single_process(*given, **more)
    except GradientMismatchError:
        return "wrong"
    except Exception as error:
        return "not decided" if "rounding hides" in str(error) else "not run"
    return "right" if all(row.decided for table in report.tables for row in table.rows) else "not decided"


def power(dtype, wrong, count):
    """Count verdicts."""
    return Counter(verdict(in_dtype(make(), dtype)) for make in of_kind(wrong, count))


#: The least part of the wrong programs that run which must be found.
LEAST = {torch.float32: 0.9, torch.bfloat16: 0.78}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", LEAST, ids=str)
def test_the_power_of_a_dtype(dtype):
    right, wrong = (power(dtype, wrong, COUNT) for wrong in (False, True))
    print(f"{dtype}: right programs {dict(right)}, wrong programs {dict(wrong)}")
    assert not right["wrong"]
    assert wrong["wrong"] >= LEAST[dtype] * (wrong.total() - wrong["not run"])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", LEAST, ids=str)
def test_some_programs(dtype):
    for seed in (*range(6), 68, 424):  # of the last two, the noise of few samples is too small
        assert verdict(in_dtype(fuzzed(seed, wrong=False), dtype)) != "wrong"
    assert sum(verdict(in_dtype(fuzzed(seed, wrong=True), dtype)) == "wrong" for seed in range(6)) >= 3
