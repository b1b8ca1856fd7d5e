"""Runs the tests on the test device, which becomes a process's accelerator for good, in a process of their own."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils import cpp_extension

from diffcoll.core.torch_private.release import RELEASE

FOLDER = Path(__file__).parent / "late_device"


pytestmark = pytest.mark.slow
COMPILER = shutil.which("c++") and cpp_extension.is_ninja_available()


@pytest.mark.timeout(600)
@pytest.mark.skipif(RELEASE < (2, 13), reason="the device is written for torch 2.13")
@pytest.mark.skipif(not COMPILER, reason="no C++ compiler, or no ninja")
@pytest.mark.parametrize(("path", "skipped"), [(FOLDER, 0), (FOLDER.parent / "gpu" / "test_accelerator.py", 4)])
def test_the_tests_on_the_test_device_pass(path, skipped):
    """All but the profiles of CUDA's calls."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(path)]
    done = subprocess.run(command, env={**os.environ, "DIFFCOLL_TEST_DEVICE": "late"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|skipped)", done.stdout)}
    assert counts.get("passed", 0) > 50
    assert counts.get("skipped", 0) == skipped


def test_the_tests_on_a_device_that_is_not_there_skip():
    """As with DEVICE=openreg where torch_openreg is not installed."""
    path = FOLDER.parent / "gpu" / "test_accelerator.py"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rs", str(path)]
    environment = {**os.environ, "DIFFCOLL_TEST_DEVICE": "absent"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert re.search(r"^\d+ skipped in", done.stdout, re.MULTILINE), done.stdout
    assert "expected absent" in done.stdout


def test_no_file_of_them_is_collected_elsewhere():
    """Importing one would register the device."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", str(FOLDER)]
    environment = {name: value for name, value in os.environ.items() if name != "DIFFCOLL_TEST_DEVICE"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED, done.stdout
