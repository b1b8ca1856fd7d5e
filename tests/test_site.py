"""The site. `make docs` builds it, with warnings as errors, and runs this file once more with DIFFCOLL_SITE."""

import importlib.util
import json
import os
import pkgutil
import shutil
import subprocess

import pytest
import torch
from runs import ROOT

import diffcoll
from diffcoll.testing import simulate

pytest.importorskip("sphinx")


@pytest.fixture(scope="module")
def conf():
    spec = importlib.util.spec_from_file_location("site_conf", ROOT / "notes" / "conf.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", diffcoll.collectives.COLLECTIVES)
def test_a_picture_shows_the_rule(conf, name):
    """What stands in its cells is what the library's own forward and backward return."""
    torch.manual_seed(0)
    drawing = conf.drawing
    xs = [torch.randn(2, dtype=torch.double) for _ in range(2)]
    xs = [xs[0], xs[0].clone()] if name in drawing.COPIES else xs
    gys = [torch.randn(8, dtype=torch.double) for _ in range(2)]

    def both(x, gy):
        x.requires_grad_()
        y = getattr(diffcoll, name)(x, *drawing.ARGUMENTS.get(name, ()))
        gx = torch.autograd.grad(y, x, gy[: len(y)])[0]
        return y.detach(), gx

    expected = simulate(both, xs, gys)
    for shown, inputs, which in zip(drawing.maps(name), (xs, gys), range(2), strict=True):
        before, after = shown
        values = {"0": 0.0}
        for cells, x in zip(before, inputs, strict=True):
            values |= {words: value for (words, _), value in zip(cells, x.tolist(), strict=False)}
        for cells, rank in zip(after, expected, strict=True):
            found = [sum(values[word] for word in words.split("+")) for words, _ in cells]
            torch.testing.assert_close(torch.tensor(found, dtype=torch.double), rank[which].detach())
    assert drawing.picture(name).count("<rect") > 8


def test_the_picture_of_the_readme_is_measured(conf):
    drawing = conf.drawing
    values = drawing.gathers()
    assert [of_ranks for of_ranks in values.values()] == [[11, 11], [1, 10], [5.5, 5.5], [0, 0]]
    assert drawing.README.read_text(encoding="utf-8") == drawing.bars(values), "run python notes/drawing.py"


def test_the_reference_has_every_public_module(conf):
    folders = {f"diffcoll.{module.name}" for module in pkgutil.iter_modules(diffcoll.__path__)}
    folders -= {"diffcoll.__main__", "diffcoll.cli", "diffcoll.integrations"}
    offered = {name for name in folders if hasattr(importlib.import_module(name), "__all__")}
    assert offered and offered <= {*conf.MODULES}


#: What newcomers look for, and the page that answers.
QUESTIONS = {
    "CLIP under DDP": "how-to/clip-under-ddp",
    "batch norm": "training/batch-norm",
    "hang": "how-to/find-a-hang",
    "pytest": "how-to/testing",
    "tensor parallelism": "how-to/tensor-parallelism",
    "tokens in the HF Trainer": "with/trainer",
    "unequal micro-batches": "training/averaging",
    "MAX of torch.distributed.nn": "how-to/migrating",
    "FSDP2": "with/fsdp",
    "split of the batch": "how-to/trainers",
    "nothing for a module": "how-to/trainers",
    "Lightning": "with/lightning",
    "Accelerate": "with/accelerate",
    "costs": "running/costs",
    "NCCL": "running/engines",
    "releases": "running/versions",
    "platforms": "running/versions",
    "compile": "running/compile",
    "gradient penalty": "how-to/gradient-penalty",
    "WGAN-GP": "how-to/gradient-penalty",
    "MPI": "running/engines",
    "all_gather": "reference/diffcoll.all_gather",
    "clip loss": "how-to/clip-under-ddp",
    "GradientAverager": "training/averaging",
    "replicate": "how-to/tensor-parallelism",
    "grad_placement": "how-to/tensor-parallelism",
    "unused parameters": "how-to/find-a-hang",
    "clip the norm": "how-to/clip-gradients",
    "notebook": "how-to/notebooks",
    "API reference": "reference/index",
    "stability": "running/versions",
    "logit_scale": "how-to/clip-under-ddp",
    "clamp logit_scale": "how-to/clip-under-ddp",
    "contrastive loss": "training/contrastive",
    "accumulate contrastive": "training/contrastive",
    "loss rose with more GPUs": "training/contrastive",
    "SyncBatchNorm": "training/batch-norm",
    "statistics of batch norm": "training/batch-norm",
    "GradScaler": "training/averaging",
    "NCCL hang": "how-to/find-a-hang",
    "watchdog": "how-to/find-a-hang",
    "hang in init": "how-to/find-a-hang",
    "timeout": "how-to/find-a-hang",
    "check mode": "how-to/find-a-hang",
    "CI": "how-to/testing",
    "sharded model": "how-to/testing",
    "Trainer": "with/trainer",
    "HF Trainer": "with/trainer",
    "GPT-2": "with/trainer",
    "test your loss": "start/test-your-loss",
    "which rank hangs": "how-to/find-a-hang",
    "CLIP": "how-to/clip-under-ddp",
    "learned temperature": "how-to/clip-under-ddp",
    "SyncBN": "training/batch-norm",
    "SyncBatchNorm uneven": "training/batch-norm",
    "wheel": "running/versions",
    "GitHub Actions": "running/versions",
    "FSDP CLIP": "with/fsdp",
    "gradient accumulation": "training/averaging",
    "mpirun": "running/engines",
    "MAX": "how-to/migrating",
    "memory": "running/costs",
    "bytes": "running/costs",
    "time of a gather": "running/costs",
    "fullgraph": "running/compile",
    "mpiexec": "running/engines",
    "openmpi": "running/engines",
    "install": "running/versions",
    "vocabulary": "training/vocab-parallel",
    "Dice": "training/segmentation",
    "IoU": "training/segmentation",
    "DataParallel or DDP": "training/data-parallel",
    "learning rate": "why/learning-rate",
    "parameter server": "why/parameter-server",
}


def test_the_first_hit_answers():
    """Of the site's own search."""
    site = os.environ.get("DIFFCOLL_SITE")
    if not site or not shutil.which("node"):
        pytest.skip("make docs sets DIFFCOLL_SITE; the search needs node")
    command = ["node", str(ROOT / "tests" / "site_search.js"), site, *QUESTIONS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    first = [hits[0] if hits else None for hits in json.loads(done.stdout)]
    assert first == [*QUESTIONS.values()]
