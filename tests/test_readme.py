"""README, notes and examples run and are consistent with the code."""

import ast
import contextlib
import io
import re
import runpy
import sys

import pytest
import torch
from runs import python
from test_notes import ROOT, blocks
from torch.nn.parallel import DistributedDataParallel

import diffcoll
from diffcoll.collectives import COLLECTIVES
from diffcoll.testing import simulate

README = ROOT / "README.md"


LINES, PROGRAM = [code for _, code in blocks(README.read_text(encoding="utf-8"))]


class Model(torch.nn.Module):
    """Returns what `clip_loss` takes, with a learned scale."""

    def __init__(self):
        super().__init__()
        self.image, self.text = torch.nn.Linear(4, 3), torch.nn.Linear(5, 3)
        self.logit_scale = torch.nn.Parameter(torch.tensor(2.0))

    def forward(self, images, texts):
        return self.image(images), self.text(texts), self.logit_scale.exp()


def train(images, texts, wrap=DistributedDataParallel):
    def model():
        torch.manual_seed(0)
        return Model().double()

    names = {"dc": diffcoll, "DistributedDataParallel": wrap, "Model": model, "images": images, "texts": texts}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(LINES, names)
    return names["loss"].detach(), [p.grad for p in names["model"].parameters()]


def test_the_three_lines_are_one_process_on_the_whole_batch():
    generator = torch.Generator().manual_seed(1)
    images, texts = (torch.randn(7, n, generator=generator, dtype=torch.double) for n in (4, 5))
    whole = train(images, texts, wrap=lambda model: model)
    for rank in simulate(train, images.split([4, 2, 1]), texts.split([4, 2, 1])):
        torch.testing.assert_close(rank, whole)


def test_the_program_prints_what_stands_below_it():
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(PROGRAM, {"__name__": "README"})
    assert f"```\n\n```text\n{printed.getvalue()}```\n" in README.read_text(encoding="utf-8")


def test_the_public_api_is_one_list():
    assert set(COLLECTIVES) <= set(diffcoll.__all__)
    for name in diffcoll.__all__:
        value = getattr(diffcoll, name)
        assert value.__doc__, name
        if name in COLLECTIVES:
            for part in (">>>", "Args:", "Returns:", "Raises:", "Source: notes/collectives/"):
                assert part in value.__doc__, (name, part)


def test_the_index_of_the_examples():
    folder = ROOT / "examples"
    text = (folder / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[(.*?)\]\(\1\) \| (.*?) \|(?: `(.*?)` \|)?$", text, re.MULTILINE)
    sources = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.py")}
    first_lines = {name: ast.get_docstring(ast.parse(source)).split("\n")[0] for name, source in sources.items()}
    assert {name: about for name, about, _ in rows} == first_lines
    for name, _, command in rows:
        assert command.startswith(f"python examples/{name}") == ("__main__" in sources[name])
        assert command in sources[name]
    assert {*re.findall(r"\bexamples/(\w+\.py)", text)} <= {*sources}


#: Trainings, and the scores that their models exceed; of raw pixels, nearest neighbours have 71 %.
SCORES = {"two_views": [75, 80, 75], "clip": [71], "segmentation": [60], "retrieval": [60]}


# Each of the others would import PyTorch twice more: here, and in a server of its own that forks its ranks. A test of
# simulated ranks runs the largest.
@pytest.mark.parametrize(
    "path",
    sorted(
        path
        for path in (ROOT / "examples").glob("*.py")
        if "__main__" in path.read_text(encoding="utf-8") and path.stem != "will_it_hang"
    ),
    ids=lambda path: path.name,
)
def test_examples(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    # `make test-slow` runs trainings whole; without packages the audit takes PyTorch's own
    arguments = ["--steps", "3"] if path.stem in SCORES else ["broadcast"] if path.stem == "audit" else []
    monkeypatch.setattr(sys, "argv", [str(path), *arguments])
    monkeypatch.syspath_prepend(str(path.parent))  # as Python does for a script
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", SCORES)
def test_a_training_in_full(name, tmp_path):
    printed = python(ROOT / "examples" / f"{name}.py", cwd=tmp_path, timeout=300).stdout
    for scores, least in zip(re.findall(r"(\d+\.\d) %.* (\d+\.\d) %", printed), SCORES[name], strict=True):
        on_ranks, on_one_process = map(float, scores)
        assert on_ranks == on_one_process > least
