"""What a mutant is, how it is written, and what mutants must break.

A file `AREA.diff` has one block for each mutant: where it stands, what it breaks, who is likely to notice; then the
text that stands there, behind "- ", and the text in its place, behind "+ ". `$NAME = …` shortens arguments of pytest.

    @@ core/rules.py _Apply.backward | law | $TABLE broadcast-2
    - ctx.f.adjoint
    + ctx.f
"""

import ast
import re
from pathlib import Path
from string import Template
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
LIBRARY = ROOT / "diffcoll"


class Mutant(NamedTuple):
    """One planted defect: in a function of the library, text that stands there once is replaced.

    file: within diffcoll/. function: "name", "Class.name", or "*" for the whole file. promise: the names, from
    `PROMISES`, of what it breaks, separated by spaces. tests: those likely to notice, as arguments of pytest separated
    by spaces; they run first.
    """

    file: str
    function: str
    old: str
    new: str
    promise: str
    tests: str

    @property
    def name(self) -> str:
        """Return what identifies this mutant in the table and for `-k`."""
        return f"{self.file}:{self.function}: {self.old.strip()} → {self.new.strip()}"

    def source(self, root: Path = ROOT) -> str:
        """Return the file's text with the defect.

        Raises:
            LookupError: the function or the text is not there, or the text is there twice.
        """
        text = (root / "diffcoll" / self.file).read_text(encoding="utf-8")
        start, end = _span(text, self.function)
        before, function, after = text[:start], text[start:end], text[end:]
        if function.count(self.old) != 1:
            raise LookupError(f"{self.name}: the text stands there {function.count(self.old)} times, expected once")
        return before + function.replace(self.old, self.new) + after


def mutants_of(path: Path) -> list[Mutant]:
    """Return the mutants that a file describes."""
    names: dict[str, str] = {}
    found = []
    for block in re.split(r"^(?=@@ |\$)", path.read_text(encoding="utf-8"), flags=re.MULTILINE):
        head, *lines = block.splitlines()
        if head.startswith("$"):
            name, value = head[1:].split(" = ")
            names[name] = Template(value).substitute(names)
        elif head.startswith("@@ "):
            where, promise, tests = head[3:].split(" | ")
            old, new = ("\n".join(line[2:] for line in lines if line.startswith(sign)) for sign in "-+")
            found.append(Mutant(*where.split(), old, new, promise, Template(tests).substitute(names)))
    return found


def _span(text: str, function: str) -> tuple[int, int]:
    """Return where a function, or a class, begins and ends in a file's text."""
    if function == "*":
        return 0, len(text)
    nodes: list[ast.stmt] = ast.parse(text).body
    for name in function.split("."):
        found = [node for node in nodes if getattr(node, "name", None) == name]
        if not found:
            raise LookupError(f"no {function} in this file")
        last = found[-1]  # after overloads
        nodes = last.body  # type: ignore[attr-defined]
    lines = text.splitlines(keepends=True)
    return sum(map(len, lines[: last.lineno - 1])), sum(map(len, lines[: last.end_lineno]))


#: How many mutants must at least break each of these promises, which are all that users may rely on.
_LEAST = {
    1: "averager_sum averager_group comm_dtype averager_broadcast koleo_loss sigreg_loss sinkhorn ranks",
    2: (
        "nccl bucket_mb averager_microbatches averager_uneven global_mean siglip_loss nt_xent_loss supcon_loss "
        "barlow_twins_loss vicreg_loss dice_loss token_mean chunk_size feature_queue"
    ),
    3: (
        "law second_order forward_mode vmap transforms compile inputs peers joint_backward one_group all_reduce "
        "all_gather reduce_scatter all_to_all gather scatter broadcast reduce permute shift scan sum_gradients "
        "split mean product max_min logsumexp complex op trees dtypes gather_batch ring halo_exchange "
        "averager_mean averager_weights averager_unused averager_failures clip_loss info_nce_loss vocab_parallel "
        "moments truth true_gradients verify"
    ),
    4: "replicate sizes async_op mpi gloo errors simulate spawn check_gradients",
    6: "arguments check_mode streams sync_batch_norm assert_matches_single_process sharded",
}
PROMISES = {name: least for least, names in _LEAST.items() for name in names.split()}
