"""notes/how-to/testing.md shows what the example prints."""

import contextlib
import io
import re
import runpy
from pathlib import Path

import diffcoll

ROOT = Path(diffcoll.__file__).parent.parent
NOTE = ROOT / "notes" / "how-to" / "testing.md"
EXAMPLE = "examples/check_your_loss.py"
REPORT = re.compile(rf"(?<=^```text\n)\$ python {re.escape(EXAMPLE)}\n.*?(?=^```$)", re.MULTILINE | re.DOTALL)


def without_rounding(text):
    """Two machines may differ in the last bit."""
    return re.sub(r"\d\.\de-1\d", "0.0e-16", text.replace(" 0.0e+00", " 0.0e-16"))


def test_the_note_shows_what_the_example_prints():
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path(str(ROOT / EXAMPLE), run_name="__main__")
    found = REPORT.search(NOTE.read_text(encoding="utf-8"))
    assert found and without_rounding(found[0]) == without_rounding(f"$ python {EXAMPLE}\n{out.getvalue()}")
