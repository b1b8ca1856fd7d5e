"""An error names the user's line, wherever the user's code, the library and torch are installed."""

import dataclasses
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from runs import line_of

import diffcoll as dc
from diffcoll.core.errors import user_line

ROOT = Path(dc.__file__).parent.parent
TORCH = Path(torch.__file__).parent

#: File names of a call in line 2, and whether they are the user's.
FILES = {
    "a project in a folder torch": ("/home/me/torch/train.py", True),
    "a project in lib/torch": ("/opt/lib/torch/lib/loss.py", True),
    "a project named like it": (f"{TORCH}_project/loss.py", True),
    "a project named like the library": (f"{ROOT}/diffcoll_project/loss.py", True),
    "an installed package": (f"{TORCH.parent}/losses/clip.py", True),
    "a package below the standard library": (os.path.dirname(os.__file__) + "/site-packages/losses/clip.py", True),
    "python -c, exec": ("<string>", True),
    "stdin": ("<stdin>", True),
    "code.interact": ("<console>", True),
    "Jupyter": ("/tmp/ipykernel_1234/567890123.py", True),
    "torch": (f"{TORCH}/nn/modules/module.py", False),
    "the library": (f"{ROOT}/diffcoll/nn/losses.py", False),
    "the standard library": (threading.__file__, False),
    "importlib": ("<frozen importlib._bootstrap>", False),
    "torch.fx": ("<eval_with_key>.12", False),
    "beartype": ("<@beartype(train.loss) at 0x7f0123456789>", False),
}


def called(file, call, **names):
    """Return the result of a call that is made in the second line of this file."""
    names["call"] = call
    exec(compile("if True:\n    found = call()", file, "exec"), names)
    return names["found"]


here = partial(line_of, __file__)


@pytest.mark.parametrize(("file", "users"), FILES.values(), ids=FILES)
def test_files(file, users):
    assert called(file, user_line) == (f"{file}:2" if users else here("exec(compile("))


def test_code_that_names_no_file_of_its_module():
    """Code that dataclasses generates for a module of the library, and modules that Inductor generates."""
    for module in ("diffcoll.collectives.all_gather", "torch._inductor.runtime.compile_tasks.cabc"):
        for file in ("<string>", "/tmp/torchinductor_me/ab/cabc.py"):
            assert called(file, user_line, __name__=module) == here("exec(compile(")
            for users in ("__main__", "torchvision.ops", "diffcoll_losses"):
                assert called(file, user_line, __name__=users) == f"{file}:2"

    @dataclasses.dataclass
    class Found:
        line: str = dataclasses.field(default_factory=user_line)

    assert Found().line.startswith("<string>:")  # generated for this module, which is the user's


def test_threads():
    with ThreadPoolExecutor(1, thread_name_prefix="pool") as pool:
        assert pool.submit(lambda: user_line()).result() == here("submit(lambda: user_line())")
        assert pool.submit(user_line).result() == "<start of thread 'pool_0'>"
