"""Verdicts of the check of sharded programs."""

import pytest
from sharded_programs import PROGRAMS

from diffcoll.testing import GradientMismatchError, assert_matches_single_process

ON = ["simulated", pytest.param("gloo", marks=pytest.mark.slow)]
WRONG = [(make, bug, cause) for make, bugs in PROGRAMS.items() for bug, cause in bugs.items()]


@pytest.mark.parametrize("on", ON)
@pytest.mark.parametrize("make", PROGRAMS, ids=lambda make: make.__name__)
def test_a_right_program_passes(make, on):
    distributed, single, batch, more = make("")
    report = assert_matches_single_process(distributed, single, batch, **{"on": [on], **more})
    assert report.ok and not report.causes


@pytest.mark.parametrize("on", ON)
@pytest.mark.parametrize(("make", "bug", "cause"), WRONG, ids=[f"{make.__name__}-{bug}" for make, bug, _ in WRONG])
def test_a_wrong_program_is_caught(make, bug, cause, on):
    distributed, single, batch, more = make(bug)
    with pytest.raises(GradientMismatchError) as error:
        assert_matches_single_process(distributed, single, batch, **{"on": [on], **more})
    found = [each.name for each in error.value.report.causes]
    assert found == [cause] if cause else set(found) <= {"another loss", "wrong in direction"}, str(error.value)
