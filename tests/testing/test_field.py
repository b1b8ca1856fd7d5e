"""Verdicts on programs of the field: no right one is called wrong, and each mistake is caught."""

import pytest
from field import RIGHT, WRONG, program
from verdicts import differs, matches


def on_both(names, of_fast_suite=1):
    """Each on simulated ranks, of which the fast suite has every so many-th, and on processes."""
    found = []
    for i, name in enumerate(names):
        found.append(pytest.param("simulated", name, marks=[pytest.mark.slow] * bool(i % of_fast_suite)))
        found.append(pytest.param("gloo", name, marks=pytest.mark.slow))
    return found


@pytest.mark.filterwarnings("ignore:.*torch.distributed.nn:FutureWarning")
@pytest.mark.parametrize(("on", "name"), on_both(RIGHT))
def test_a_right_program_passes(on, name):
    *family, uneven = RIGHT[name]
    matches(program(*family), ranks=[(5, 3), (0, 2, 4, 2)] if uneven else [(4, 4), (2, 2, 2)], on=[on])


@pytest.mark.parametrize(("on", "name"), on_both(WRONG, of_fast_suite=3))
def test_a_mistake_is_caught(on, name):
    assert differs(program(*WRONG[name]), ranks=(4, 4), on=[on]).observed
