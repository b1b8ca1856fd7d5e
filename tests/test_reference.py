"""notes/reference.md has every public name, as it is."""

import sys

from runs import ROOT

sys.path.append(str(ROOT / "notes"))
import listing


def test_the_reference_is_generated_from_the_code():
    assert listing.PAGE.read_text(encoding="utf-8") == listing.page(), "run python notes/listing.py"
