"""torchrun and mpiexec on three hosts."""

import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from namespaces import ends
from namespaces import network as made_of

PROGRAMS = Path(__file__).parent / "host_programs.py"
ELASTIC = PROGRAMS.with_name("elastic.py")
LONG = 200


def torchrun(network, *command, per_host=1, environment=None, timeout=LONG, restarts=0):
    """Start torchrun on every host, with a rendezvous on the first one; return how each ended."""
    first = network.hosts[0]
    options = ["--nnodes", len(network.hosts), "--nproc-per-node", per_host, "--rdzv-id", "tests"]
    options += ["--max-restarts", restarts]
    options += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{first.name}:29400"]
    launch = [sys.executable, "-m", "torch.distributed.run", *options, *command]
    return ends([host.start(*launch, environment=environment) for host in network.hosts], timeout)


def right(name, ended):
    """All ranks have printed that they are right, on the host where they were started."""
    assert [code for code, _, _ in ended] == [0] * len(ended), "\n".join(err for _, _, err in ended)
    found = re.findall(rf"{name}: rank (\d+) of (\d+) on (\w+): right", "".join(out for _, out, _ in ended))
    assert len({host for _, _, host in found}) == len(ended)
    return sorted(int(rank) for rank, _, _ in found)


@pytest.mark.parametrize("per_host", [1, 2])
def test_a_training_under_torchrun(network, per_host):
    if per_host == 2:
        network.hosts.pop().end()  # four ranks
    ended = torchrun(network, PROGRAMS, "training", "gloo", per_host=per_host)
    assert right("training", ended) == list(range(len(network.hosts) * per_host))


def test_check_mode(network):
    ended = torchrun(network, PROGRAMS, "disagreement", "gloo", environment={"DIFFCOLL_CHECK": "1"})
    assert right("disagreement", ended) == [0, 1, 2]


def test_verify(network):
    ended = torchrun(network, "-m", "diffcoll", "verify", "--only", "all_reduce,all_gather,shift")
    assert [code for code, _, _ in ended] == [0, 0, 0], ended
    assert re.search(r"(\d+) of \1 calls are right", ended[0][1]), ended[0][1]


def test_ipv6_only():
    with made_of(ipv6=True) as network:
        ended = torchrun(network, PROGRAMS, "training", "gloo")
        assert right("training", ended) == [0, 1, 2]


def loopback(network):
    """Let each host's own name mean loopback there, as Debian's /etc/hosts does."""
    for host in network.hosts:
        network.resolve({other.name: other.address for other in network.hosts} | {host.name: "127.0.1.1"}, on=host)


def as_torchrun_sets(network, rank):
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(len(network.hosts)),
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": network.hosts[0].address,
        "MASTER_PORT": "29400",
    }


def started(network, *command, environment=None, timeout=LONG):
    """Start a command as a rank on each host, without an agent; return how each ended."""
    ranks = [{**as_torchrun_sets(network, r), **(environment or {})} for r in range(len(network.hosts))]
    command = [sys.executable, *command]
    begun = [host.start(*command, environment=env) for host, env in zip(network.hosts, ranks, strict=True)]
    return ends(begun, timeout)


def test_loopback_names_and_a_named_interface(network):
    """What the error advises."""
    loopback(network)
    ended = started(network, PROGRAMS, "training", "gloo", environment={"GLOO_SOCKET_IFNAME": "eth0"})
    assert right("training", ended) == [0, 1, 2]


def test_pytorchs_own_error_about_loopback(network):
    """What the note says of a program that sets gloo up itself; with this release of PyTorch."""
    loopback(network)
    ended = started(network, PROGRAMS, "training", "gloo", timeout=20)
    raised = [err for code, _, err in ended if code == 1]  # on which ranks differs from run to run
    assert raised and not any(code == 0 for code, _, _ in ended), ended
    for err in raised:
        assert "Connection refused, remote=[127.0.1.1]" in err and "GLOO_SOCKET_IFNAME" not in err


def test_two_interfaces(network):
    """Other names of interfaces on each host; the bytes go through the chosen one."""
    names = {host: f"fast{r}" for r, host in enumerate(network.hosts)}
    network.connect("fast", names, {host: f"10.78.0.{r + 1}" for r, host in enumerate(network.hosts)})
    before = [(host.bytes_of(names[host]), host.bytes_of("eth0")) for host in network.hosts]
    ranks = [{**as_torchrun_sets(network, r), "GLOO_SOCKET_IFNAME": names[h]} for r, h in enumerate(network.hosts)]
    command = [sys.executable, PROGRAMS, "bytes", "gloo"]
    begun = [host.start(*command, environment=env) for host, env in zip(network.hosts, ranks, strict=True)]
    assert right("bytes", ends(begun, LONG)) == [0, 1, 2]
    for host, (fast, slow) in zip(network.hosts, before, strict=True):
        assert host.bytes_of(names[host]) - fast > 4 * 8 << 20
        assert host.bytes_of("eth0") - slow < 1 << 20  # the store's


def test_a_sum_in_two_steps_sends_less_between_hosts(network):
    network.hosts.pop().end()
    sent = []
    for steps in "1", "2":
        before = network.hosts[0].bytes_of("eth0")
        ended = torchrun(network, PROGRAMS, "summed", "gloo", per_host=2, environment={"STEPS": steps})
        assert right("summed", ended) == [0, 1, 2, 3]
        sent.append((network.hosts[0].bytes_of("eth0") - before) / 2**20)
    print(f"\none step: {sent[0]:.1f} MB, two steps: {sent[1]:.1f} MB")
    assert sent[1] < 0.8 * sent[0]


_chance = random.Random(0)
KILLS = [(i % 3, _chance.randrange(6)) for i in range(int(os.environ.get("DIFFCOLL_RESTARTS", "4")))]


@pytest.mark.parametrize(("victim", "step"), KILLS)
def test_a_rank_is_killed_and_all_are_restarted(network, tmp_path, victim, step):
    """The other ranks raise, so that torchrun's agents start all ranks again; the training ends as on one process.

    Without the variable the store keeps the addresses of the ranks that have ended, and gloo may connect to those.
    """
    own = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    ended = torchrun(network, ELASTIC, tmp_path, victim, step, restarts=3, environment=own)
    assert right("elastic", ended) == [0, 1, 2]
    assert (tmp_path / "killed").exists()
    first = re.findall(r"right, first step (\d)", "".join(out for _, out, _ in ended))
    assert first == [str(step)] * 3
    assert not any(host.processes() for host in network.hosts)


# ── MPI ──────────────────────────────────────────────────────────────────────────────────────────────────

#: In the place of ssh: mpiexec calls it with options of ssh, the name of a host and a command, on any host.
AGENT = """#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
host=$1; shift
exec ip netns exec {tag}h"${{host#node}}" unshare --uts sh -c "hostname $host; $*"
"""


def agent_of(network, folder):
    agent = folder / "agent"
    agent.write_text(AGENT.format(tag=network.tag), encoding="utf-8")
    agent.chmod(0o755)
    return agent


def mpiexec(network, folder, *command, timeout=LONG, environment=None):
    """Run one rank on each host under Open MPI, from the first host."""
    agent = agent_of(network, folder)
    hosts = ",".join(f"{host.name}:1" for host in network.hosts)
    options = ["--host", hosts, "-n", len(network.hosts), "--allow-run-as-root", "--prtemca", "plm_ssh_agent", agent]
    options += ["--prtemca", "prte_if_include", "eth0", "--mca", "btl_tcp_if_include", "eth0"]
    options += ["-x", "PYTHONPATH", "-x", "OMP_NUM_THREADS"]
    mpi = Path(sys.executable).parent / "mpiexec"
    given = [network.hosts[0].start(mpi, *options, sys.executable, *command, environment=environment)]
    return ends(given, timeout)


def test_a_training_on_mpi(network, tmp_path):
    [(code, out, err)] = mpiexec(network, tmp_path, PROGRAMS, "training", "mpi")
    assert code == 0, err
    found = re.findall(r"training: rank (\d) of 3 on (\w+): right", out)
    assert sorted(found) == [("0", "node0"), ("1", "node1"), ("2", "node2")]


def test_verify_on_mpi(network, tmp_path):
    [(code, out, err)] = mpiexec(network, tmp_path, "-m", "diffcoll", "verify", "--only", "shift")
    assert code == 0, err
    assert re.search(r"(\d+) of \1 calls are right", re.sub(r"\x1b\[[\d;]*m", "", out)), (
        out
    )  # in colour, on its terminal


def test_verify_on_mpi_where_names_mean_loopback(network, tmp_path):
    """PyTorch's own collectives are called on gloo, next to MPI."""
    loopback(network)
    [(code, out, err)] = mpiexec(network, tmp_path, "-m", "diffcoll", "verify", "--only", "shift", timeout=60)
    assert code == 2, (out, err)
    assert "gloo on several hosts: the host name 'node0' means 127.0.1.1" in err


#: Python in an environment with MPICH and its launcher hydra, PyTorch and mpi4py, in which no Open MPI is installed.
MPICH = os.environ.get("DIFFCOLL_MPICH")


@pytest.mark.skipif(MPICH is None, reason="DIFFCOLL_MPICH does not name the Python of an environment with MPICH")
@pytest.mark.parametrize("what", ["training", "verify"])
def test_mpich(network, tmp_path, what):
    """Under hydra, one rank on each host."""
    library = [MPICH, "-c", "from mpi4py import MPI; print(MPI.Get_library_version())"]
    assert subprocess.run(library, capture_output=True, text=True, timeout=60).stdout.startswith("MPICH Version:")
    options = ["-launcher", "ssh", "-launcher-exec", agent_of(network, tmp_path), "-iface", "eth0", "-ppn", 1]
    options += ["-hosts", ",".join(host.name for host in network.hosts), "-n", len(network.hosts)]
    command = [PROGRAMS, "training", "mpi"] if what == "training" else ["-m", "diffcoll", "verify", "--only", "shift"]
    hydra = Path(MPICH).parent / "mpiexec.hydra"
    [(code, out, err)] = ends([network.hosts[0].start(hydra, *options, MPICH, *command)], LONG)
    assert code == 0, err
    if what == "verify":
        assert re.search(r"(\d+) of \1 calls are right", out), out
        return
    found = re.findall(r"training: rank (\d) of 3 on (\w+): right", out)
    assert sorted(found) == [("0", "node0"), ("1", "node1"), ("2", "node2")]
