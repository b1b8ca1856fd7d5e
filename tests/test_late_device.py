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
COMPILER = shutil.which("c++") and cpp_extension.is_ninja_available()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(RELEASE < (2, 13), reason="the device is written for torch 2.13")
@pytest.mark.skipif(not COMPILER, reason="no C++ compiler, or no ninja")
def test_the_tests_on_the_test_device_pass():
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(FOLDER)]
    done = subprocess.run(command, env={**os.environ, "DIFFCOLL_TEST_DEVICE": "late"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|skipped)", done.stdout)}
    assert counts.get("passed", 0) > 50
    assert counts.get("skipped", 0) == 0
