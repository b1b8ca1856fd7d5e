"""Two hosts simulated on one machine: two network namespaces, connected by a slow link only.

Namespaces for users, mounts and processes need no privileges on most kernels; where they do, the test is skipped. The
namespaces end with the process.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

ALONE = ["unshare", "--user", "--map-root-user", "--net", "--mount", "--pid", "--fork", "--kill-child"]

# The link has a delay of 5 ms if the kernel supports it, else a low bandwidth.
HOSTS = """
set -e
mount -t tmpfs none /run
mkdir /run/netns
ip netns add host0
ip netns add host1
ip link add dc0 netns host0 type veth peer name dc1 netns host1
for h in 0 1; do
    ip -n host$h link set lo up
    ip -n host$h addr add 10.77.0.1$h/24 dev dc$h
    ip -n host$h link set dc$h up
    tc -n host$h qdisc add dev dc$h root netem delay 5ms 2> /dev/null ||
        tc -n host$h qdisc add dev dc$h root tbf rate 100mbit burst 16kb latency 1s
    tc -n host$h qdisc show dev dc$h
done
"""

# `diffcoll` without PyTorch's own beside it.
OURS = """
import sys
from digits_contrastive import difference, differentiable, load, train
from diffcoll.cli import competitors, main, ranks
for system in list(competitors.SYSTEMS)[1:]:
    del competitors.SYSTEMS[system]
close = ranks.Launched.close

def train_and_close(world):
    images = load()
    print("largest difference from one process:", *difference(train(images, differentiable), train(images, None)))
    close(world)

ranks.Launched.close = train_and_close
sys.exit(main(sys.argv[1:]))
"""

VERIFY = """
run() {
    ip netns exec host$1 env GLOO_SOCKET_IFNAME=dc$1 "$PYTHON" -m torch.distributed.run --nnodes 2 --node-rank $1 \
        --nproc-per-node 1 --master-addr 10.77.0.10 --master-port 29500 \
        "$OUT/ours.py" verify --only all_gather --json "$OUT/$1.json"
}
run 0 & first=$!
run 1
wait $first
for h in 0 1; do ip -n host$h -s -json link show dc$h > "$OUT/line$h.json"; done
"""


def alone(script, **variables):
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{ROOT}/examples",
        "OMP_NUM_THREADS": "1",
        "PYTHON": sys.executable,
        **variables,
    }
    return subprocess.run(
        [*ALONE, "bash", "-c", script], capture_output=True, text=True, timeout=110, env=environment, check=False
    )


@pytest.mark.slow
def test_torchrun_on_two_hosts(tmp_path):
    if not all(map(shutil.which, ("unshare", "ip", "tc", "bash"))):
        pytest.skip("needs unshare, ip and tc")
    line = alone(HOSTS)
    if line.returncode:
        pytest.skip(f"no network namespaces here: {line.stderr.strip()}")
    assert line.stdout.count("qdisc netem") + line.stdout.count("qdisc tbf") == 2
    (tmp_path / "ours.py").write_text(OURS)
    done = alone(HOSTS + VERIFY, OUT=str(tmp_path))
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "0.json").read_text())
    assert found["passed"]
    assert "2 launched gloo processes" in found["about"]
    assert {row["collective"] for row in found["rows"]} == {"all_gather"}
    trained = re.findall("difference from one process: (.*) (.*)", done.stdout)
    assert len(trained) == 2 and max(float(x) for pair in trained for x in pair) < 1e-9
    assert not (tmp_path / "1.json").exists()  # rank 0 reports
    for h in (0, 1):
        (end,) = json.loads((tmp_path / f"line{h}.json").read_text())
        assert end["stats64"]["rx"]["bytes"] > 100_000  # results were exchanged over this link
