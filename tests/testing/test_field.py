"""Verdicts on programs of the field: no right one is called wrong, and each mistake is caught."""

import pytest
from field import RIGHT, WRONG
from verdicts import differs, matches

EVEN, UNEVEN = (4, 4), [(5, 3), (0, 2, 4, 2)]
ON = ["simulated", pytest.param("gloo", marks=pytest.mark.slow)]


@pytest.mark.filterwarnings("ignore:.*torch.distributed.nn:FutureWarning")
@pytest.mark.parametrize("on", ON)
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_program_passes(name, on):
    matches(RIGHT[name](), ranks=[EVEN, (2, 2, 2)] if "torch.distributed.nn" in name else UNEVEN, on=[on])


@pytest.mark.parametrize("on", ON)
@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_caught(name, on):
    assert differs(WRONG[name](), ranks=EVEN, on=[on]).observed
