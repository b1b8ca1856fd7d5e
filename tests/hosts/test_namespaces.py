"""Nothing of a run's hosts stays, however it ends."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import namespaces
import pytest

RUN = """
import time
from pathlib import Path

def test(network):
    with network.hosts[0].start("sleep", "1000"):
        while not network.hosts[0].processes():
            time.sleep(0.01)
        Path("ready").write_text(network.tag)
        time.sleep(1000)
"""


@pytest.fixture
def run(tmp_path):
    """A run of pytest with this folder's configuration, in the middle of a test with hosts; and the hosts' tag."""
    here = Path(__file__).parent
    shutil.copy(here / "conftest.py", tmp_path)
    (tmp_path / "test_run.py").write_text(RUN)
    environment = {**os.environ, "PYTHONPATH": str(here)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", tmp_path]
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            end = time.monotonic() + 60
            while not (tmp_path / "ready").exists() or not (tmp_path / "ready").read_text():
                assert process.poll() is None and time.monotonic() < end
                time.sleep(0.02)
            tag = (tmp_path / "ready").read_text()
            assert len(left(tag)) == 4 + 3
            yield process, tag
        finally:
            process.kill()
            namespaces.end_those_left()


def left(tag):
    """Namespaces, and folders of names."""
    folders = [f.name for f in Path("/etc/netns").iterdir()]
    return [name for name in namespaces.ip("netns", "list").split() + folders if name.startswith(tag)]


def test_a_run_that_is_ended(run):
    process, tag = run
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert "KeyboardInterrupt" in out
    assert process.returncode == pytest.ExitCode.INTERRUPTED
    assert not left(tag)


def test_a_run_that_is_killed(run):
    process, tag = run
    (sleeper,) = namespaces.ip("netns", "pids", f"{tag}h0").split()
    process.kill()
    process.wait()
    assert len(left(tag)) == 4 + 3
    with namespaces.network() as mine:  # what is in use stays
        namespaces.end_those_left()
        assert len(left(mine.tag)) == 4 + 3
    assert not left(tag)
    stat = Path("/proc", sleeper, "stat")
    assert not stat.exists() or stat.read_text().split()[2] == "Z"  # the init of a container may not wait for it
