"""test_accelerator.py: every collective to second order, dtypes, transforms, the averager, streams, host waits."""

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

from gpu.row import row

TESTS = Path(__file__).with_name("test_accelerator.py")


@row(ranks=(2,), seconds=180, starts_ranks=True, nccl=False)
def accelerator_gloo(rank):
    """Tensors of the GPU on gloo. The table of collectives takes long there, and `make verify` has it on the CPU."""
    run_tests(rank, "gloo and not nccl" + " and not second_order" * (not rank.on_gpu))


@row(seconds=180, starts_ranks=True)
def accelerator_nccl(rank):
    run_tests(rank, "nccl and not gloo")


@row(ranks=(2,), seconds=180, starts_ranks=True, dry=False)
def accelerator_nccl_of_two(rank):
    run_tests(rank, "nccl and not gloo")


@row(ranks=(3,), seconds=120, starts_ranks=True, dry=False)
def accelerator_nccl_of_three(rank):
    """The table of collectives, dtypes and sizes alone."""
    run_tests(rank, "nccl and not gloo and (second_order or every_dtype or sizes_that)")


@row(ranks=(1, 2), seconds=180, starts_ranks=True, dry=False)
def accelerator_mixed(rank):
    """A group of NCCL for the GPU and gloo for the CPU."""
    run_tests(rank, "nccl and gloo")


def run_tests(rank, which):
    """Run the tests that pytest's -k selects, and report each as a part."""
    file = rank.folder / "tests.xml"
    plugins = ("-p", "no:cacheprovider", "-p", "no:benchmark")  # pytest-benchmark warns, and warnings are errors
    command = [sys.executable, "-m", "pytest", *plugins, f"--junitxml={file}", "-k", which, str(TESTS)]
    around = {**os.environ, "DIFFCOLL_TEST_DEVICE": rank.device, "DIFFCOLL_TEST_RANKS": str(rank.n)}
    output = subprocess.run(command, env=around, capture_output=True, text=True, check=False).stdout
    assert file.exists(), f"pytest has not run: {output[-500:]}"
    tests = [test for test in ElementTree.parse(file).iter("testcase") if test.find("skipped") is None]
    for test in tests:
        name = test.get("name")
        with rank.part(name.removeprefix("test_")):
            failure = test.find("failure") if test.find("error") is None else test.find("error")
            if failure is not None:
                raise AssertionError(_reason(failure))
    rank.figure("tests", f"{len(tests)}")
    assert tests, f"no test was run: {output[-500:]}"


def _reason(failure):
    """Return the lines of a failed test that say what was wrong."""
    lines = [line for line in (failure.text or "").splitlines() if line.startswith("E ")]
    return " ".join(" ".join(lines or [failure.get("message", "")]).split())[:300]
