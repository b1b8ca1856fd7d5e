"""A cable is pulled, a rank is killed: every other rank raises within the group's timeout, says where, and ends."""

import json
import sys
import time
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("rank_of_a_host.py")
#: The group's timeout in the program, and the seconds that the error and the end of a process may take more.
TIMEOUT, MORE, END = 3.0, 5.0, 10.0
#: What the error names: a call's operation and direction, or the averager.
WHERE = {
    "forward": "all_gather, forward",
    "backward": "all_gather, backward",
    "async_op": "all_reduce, forward",
    "averager": "",  # the backward of either collective, or the averager's own messages
}


@pytest.mark.parametrize("victim", [0, 2])  # rank 0 serves the store
@pytest.mark.parametrize("fault", ["cable", "kill"])
@pytest.mark.parametrize("where", WHERE)
def test_a_fault(hosts, where, fault, victim, tmp_path):
    common = {"WORLD_SIZE": f"{len(hosts)}", "MASTER_ADDR": hosts[0].address, "MASTER_PORT": "29400"}
    command = sys.executable, PROGRAM, where, victim, tmp_path
    ranks = [host.start(*command, environment={**common, "RANK": f"{r}"}) for r, host in enumerate(hosts)]
    limit = time.monotonic() + 60
    while not (tmp_path / "here").exists():
        assert time.monotonic() < limit and all(rank.poll() is None for rank in ranks)
        time.sleep(0.01)
    hosts[victim].pull() if fault == "cable" else ranks[victim].kill()
    (tmp_path / "go").touch()
    begin = time.monotonic()
    if fault == "kill":
        ranks.pop(victim).communicate()
    for rank in ranks:
        printed, errors = rank.communicate(timeout=60)
        end = time.monotonic()
        assert rank.returncode == 0, errors
        found = json.loads(printed)
        assert found["error"] is not None
        assert WHERE[where] in found["error"] and (where == "averager" or f"{PROGRAM.name}:" in found["error"])
        assert found["at"] - begin < TIMEOUT + MORE
        assert end - found["at"] < END
