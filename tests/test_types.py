"""What type checkers and `help` show is what is accepted. `typed_uses.py` is what type checkers themselves check."""

import inspect
from typing import get_args, get_type_hints

import pytest

import diffcoll as dc
from diffcoll import testing
from diffcoll.core.reductions import SPELLINGS, Name


def test_names_of_reductions():
    assert set(get_args(Name)) == set(SPELLINGS)


def test_a_listing_shows_the_public_names_alone():
    assert dir(dc) == sorted(dc.__all__)


@pytest.mark.parametrize("module", [dc, dc.nn, dc.nn.functional, testing], ids=lambda module: module.__name__)
def test_annotations_can_be_evaluated(module):
    """At run time, as checkers there do; without an import for type checkers only."""
    for name in module.__all__:
        public = getattr(module, name)
        for each in [public, *(vars(public).values() if inspect.isclass(public) else ())]:
            if inspect.isfunction(each) or inspect.isclass(each):
                get_type_hints(each)
