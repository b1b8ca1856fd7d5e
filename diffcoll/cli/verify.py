"""`diffcoll verify`: check every collective against a reference gradient, on real processes, next to PyTorch's own.

Starts processes on this machine, with gloo or, with `--engine mpi`, under mpiexec, and keeps them for all checks. Under
`torchrun` (or any launcher that sets RANK and WORLD_SIZE) and under `mpiexec` it uses the launched processes, which may
be on several hosts. PyTorch's own collectives always run on torch.distributed.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

import torch
import torch.distributed as dist

from diffcoll.cli import report
from diffcoll.cli.checks import jobs
from diffcoll.cli.competitors import SYSTEMS
from diffcoll.cli.ranks import Launched, LaunchedByMpi, Spawned
from diffcoll.cli.report import Row
from diffcoll.core.torch_private.release import COMPILES


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    world: Spawned | Launched
    if options.launched:
        world = LaunchedByMpi() if options.launched == "mpi" else Launched(options.backend)
    else:
        world = Spawned("mpi" if options.engine == "mpi" else options.backend)
    sizes = [dist.get_world_size()] if options.launched else options.world_size or [2, 3]
    todo = list(jobs(sizes, options.names))
    rows: list[Row] = []
    with report.progress(len(todo) * len(SYSTEMS), quiet=not world.speaks) as advance:
        for checks, timeout in todo:
            new = [Row(check.collective, check.call, check.world_size) for check in checks]
            for system in SYSTEMS:
                advance(f"{checks[0].collective}, {checks[0].world_size} processes")
                for row, outcome in zip(new, world.run(checks, timeout, system, options.seed), strict=True):
                    row.systems[system] = outcome
            rows += new
    passed = all(row.passes() for row in rows)
    if world.speaks:
        about = f"{world.description}, torch {torch.__version__}, float64, seed {options.seed}"
        about += "" if COMPILES else "; compiled: not run, which needs torch 2.12 or later"
        report.show(rows, about)
        content = {"about": about, "torch": torch.__version__, "passed": passed, "rows": [asdict(row) for row in rows]}
        try:
            if options.json:
                options.json.write_text(json.dumps(content, indent=1) + "\n")
            if options.html:
                options.html.write_text(report.page(rows, about))
        except OSError as error:  # the file was writable when the run began
            print(f"diffcoll verify: {error}", file=sys.stderr)
            passed = False
    world.close()
    return 0 if passed else 1
