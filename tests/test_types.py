"""What type checkers and `help` show is what is accepted. `typed_uses.py` is what type checkers themselves check."""

from typing import get_args

import diffcoll as dc
from diffcoll.core.reductions import SPELLINGS, Name


def test_names_of_reductions():
    assert set(get_args(Name)) == set(SPELLINGS)


def test_a_listing_shows_the_public_names_alone():
    assert dir(dc) == sorted(dc.__all__)
