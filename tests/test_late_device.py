"""Runs the tests on the test device, which becomes a process's accelerator for good, in a process of their own."""

import shutil

import pytest
from releases import RELEASE
from runs import ROOT, python
from torch.utils import cpp_extension


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(RELEASE < (2, 13), reason="the device is written for torch 2.13")
@pytest.mark.skipif(
    not (shutil.which("c++") and cpp_extension.is_ninja_available()), reason="no C++ compiler, or no ninja"
)
def test_the_tests_on_the_test_device_pass():
    python("-m", "pytest", "-p", "no:cacheprovider", ROOT / "tests" / "late_device", timeout=600)
