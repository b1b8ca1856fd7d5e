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


#: Everything that users may rely on, and how many mutants must break it at least.
PROMISES = {
    # what holds for every collective
    "law": 3,  # gradients of the sum of all ranks' losses
    "second_order": 3,
    "forward_mode": 3,
    "vmap": 3,
    "transforms": 3,  # nests of torch.func, checkpoints
    "compile": 3,
    "arguments": 6,  # a wrong argument raises before anything is sent, and is named
    "inputs": 3,  # inputs are not modified, results are their own
    "peers": 3,  # a peer that dies or does not come: CollectiveFailedError within the timeout, with the user's line
    "check_mode": 6,
    "joint_backward": 3,
    "streams": 6,  # waits, record_stream, host reads
    "one_group": 3,  # threads, default groups, what a group is, launched without a group
    # rows of the table of adjoints
    "all_reduce": 3,
    "all_gather": 3,
    "reduce_scatter": 3,
    "all_to_all": 3,
    "gather": 3,
    "scatter": 3,
    "broadcast": 3,
    "reduce": 3,
    "permute": 3,
    "shift": 3,
    "scan": 3,
    "replicate": 4,  # all_reduce, all_gather, broadcast with grad_placement="replicate"
    "sum_gradients": 3,
    "split": 3,
    "mean": 3,
    "product": 3,
    "max_min": 3,
    "logsumexp": 3,
    "complex": 3,
    # the rest of the public functions
    "op": 3,
    "sizes": 4,
    "trees": 3,
    "dtypes": 3,  # integers, bool, half precision; same bits on all ranks
    "async_op": 4,
    "gather_batch": 3,
    "ring": 3,
    "halo_exchange": 3,
    "mpi": 4,
    "gloo": 4,
    "nccl": 2,  # native tensor collectives
    "errors": 4,  # the classes, and what they name
    # the averager
    "averager_mean": 3,
    "averager_sum": 1,
    "averager_weights": 3,
    "averager_group": 1,
    "bucket_mb": 2,
    "comm_dtype": 1,
    "averager_broadcast": 1,
    "averager_unused": 3,
    "averager_microbatches": 2,
    "averager_failures": 3,
    "averager_uneven": 2,  # ranks with unequal numbers of batches
    "global_mean": 2,
    # diffcoll.nn
    "clip_loss": 3,
    "siglip_loss": 2,
    "info_nce_loss": 3,
    "nt_xent_loss": 2,
    "supcon_loss": 2,
    "barlow_twins_loss": 2,
    "vicreg_loss": 2,
    "dice_loss": 2,
    "koleo_loss": 1,
    "sigreg_loss": 1,
    "sinkhorn": 1,
    "token_mean": 2,
    "vocab_parallel": 3,
    "chunk_size": 2,
    "sync_batch_norm": 6,
    "moments": 3,
    "feature_queue": 2,
    # how programs are proved right
    "truth": 3,
    "simulate": 4,
    "true_gradients": 3,
    "spawn": 4,
    "ranks": 1,  # tests on ranks
    "assert_matches_single_process": 6,
    "sharded": 6,
    "check_gradients": 4,
    "verify": 3,
}
