"""Every mutant applies to the library as it is, and every promise has mutants. `make mutants` runs the tests on them."""

import ast
import collections

import pytest
from mutants.mutant import LIBRARY, PROMISES
from mutants.run import all_mutants

MUTANTS = all_mutants()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_it_is_a_change_of_the_code(mutant):
    original = (LIBRARY / mutant.file).read_text(encoding="utf-8")
    assert ast.dump(ast.parse(mutant.source())) != ast.dump(ast.parse(original))


def test_they_are_different():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


def test_every_promise_has_enough():
    counts = collections.Counter(name for mutant in MUTANTS for name in mutant.promise.split())
    assert set(counts) <= set(PROMISES)
    assert {name: (counts[name], least) for name, least in PROMISES.items() if counts[name] < least} == {}
