"""Verdicts on programs of the field: no right one is called wrong, and each mistake is named as what it is."""

import pytest
from field import RIGHT, WRONG
from verdicts import causes, differs, matches


def on_both(names, of_fast_suite=1):
    """Each on simulated ranks, of which the fast suite has every so many-th, and on processes."""
    found = []
    for i, name in enumerate(names):
        found.append(pytest.param("simulated", name, marks=[pytest.mark.slow] * bool(i % of_fast_suite)))
        found.append(pytest.param("gloo", name, marks=pytest.mark.slow))
    return found


@pytest.mark.filterwarnings("ignore:.*torch.distributed.nn:FutureWarning", "ignore::diffcoll.testing.UncheckedWarning")
@pytest.mark.parametrize(("on", "name"), on_both(RIGHT))
def test_a_right_program_passes(on, name):
    make, family, how, uneven = RIGHT[name]
    matches(make(family, how), sizes=[(5, 3), (0, 2, 4, 2)] if uneven else [(4, 4), (2, 2, 2)], on=[on])


@pytest.mark.parametrize(("on", "name"), on_both(WRONG, of_fast_suite=3))
def test_a_mistake_is_named(on, name):
    make, family, mistake = WRONG[name]
    report = differs(make(family, mistake.way, mistake.factor), sizes=[(4, 4)], on=[on])
    assert set(causes(report)) in mistake.causes, str(report)
