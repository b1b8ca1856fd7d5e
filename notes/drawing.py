"""Pictures, as SVG: each collective on two ranks, drawn from its truth, and the gradients that usual gathers lead to.

python notes/drawing.py        writes notes/gradients.svg, the picture of the README
"""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import diffcoll as dc
from diffcoll import truth
from diffcoll.testing import simulate

README = Path(__file__).parent / "gradients.svg"
#: The colour of what comes from rank 0, from rank 1, from both, and from none.
COLOURS = {(0,): "#9ec5f4", (1,): "#f9c68f", (0, 1): "#c9c9c9", (): "#f4f4f4"}
#: What the truths need besides the tensors; the collectives whose input is one variable, equal on all ranks.
ARGUMENTS = {"permute": ([(0, 1)],)}
COPIES = "split", "sum_gradients"
CELL, ROW = 44, 34


def picture(name: str) -> str:
    """Draw a collective on two ranks of two elements: what each output is made of, and each gradient."""
    parts = _head(560, 4 * ROW + 78, f"{name} on two ranks")
    for top, title, (before, after) in zip((30, 2 * ROW + 70), ("forward", "backward"), maps(name), strict=True):
        parts.append(_text(10, top - 10, title, "start"))
        for r in range(2):
            parts.append(_text(10, top + r * ROW + 19, f"rank {r}", "start"))
            for left, cells in ((70, before[r]), (330, after[r])):
                for i, (words, ranks) in enumerate(cells):
                    parts += _box(left + i * (CELL + 4), top + r * ROW, words, COLOURS[ranks])
                if not cells:
                    parts.append(_text(left, top + r * ROW + 19, "empty", "start"))
        parts.append(f'<path d="M270 {top + ROW}h44m-6 -5l6 5l-6 5" fill="none" stroke="#555" stroke-width="2"/>')
    return "\n".join([*parts, "</svg>\n"])


Cells = list[list[tuple[str, tuple[int, ...]]]]


def maps(name: str) -> tuple[tuple[Cells, Cells], tuple[Cells, Cells]]:
    """Return (x, y) and (gy, gx) of each rank: what is written in each cell, and the ranks that it comes from."""
    xs, ys = _run(name, [torch.zeros(2, dtype=torch.double, requires_grad=True) for _ in range(2)])
    letters = {(r, i): "ab"[i] if name in COPIES else "abcd"[2 * r + i] for r in range(2) for i in range(2)}
    before: Cells = [[(letters[r, i], (r,)) for i in range(len(x))] for r, x in enumerate(xs)]
    outputs = [(r, i) for r, y in enumerate(ys) for i in range(len(y))]
    # the derivative of each output, for gradients, and what each output is for one element of the input that is 1
    slopes = {at: torch.autograd.grad(ys[at[0]][at[1]], xs, retain_graph=True, allow_unused=True) for at in outputs}
    made = {at: [source for source in letters if _of_unit(name, source, at)] for at in outputs}
    after: Cells = [[_sum(letters, made[r, i], name in COPIES, r) for i in range(len(y))] for r, y in enumerate(ys)]
    names = {at: f"g{k}" for k, at in enumerate(outputs)}
    got: Cells = [[(names[r, i], (r,)) for i in range(len(y))] for r, y in enumerate(ys)]
    returned: Cells = [
        [_sum(names, [at for at, to in slopes.items() if to[r] is not None and to[r][i]]) for i in range(len(x))]
        for r, x in enumerate(xs)
    ]
    return (before, after), (got, returned)


def _run(name: str, xs: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    return xs, list(getattr(truth, name)(xs, *ARGUMENTS.get(name, ())))


def _of_unit(name: str, source: tuple[int, int], at: tuple[int, int]) -> bool:
    """Whether an output is made of an element of the input."""
    xs = [torch.zeros(2, dtype=torch.double) for _ in range(2)]
    for r in range(2) if name in COPIES else (source[0],):
        xs[r][source[1]] = 1
    return bool(_run(name, xs)[1][at[0]][at[1]])


def _sum(
    names: dict[tuple[int, int], str], of: list[tuple[int, int]], copies: bool = False, rank: int = 0
) -> tuple[str, tuple[int, ...]]:
    words = "+".join(dict.fromkeys(names[at] for at in of)) or "0"
    return words, (rank,) if copies and of else tuple(sorted({r for r, _ in of}))


def bars(values: dict[str, list[float]]) -> str:
    """Draw two bars for each name, one for each rank, with the values."""
    parts = _head(640, 24 * 2 * len(values) + 46, "gradients of a gathered tensor on two ranks")
    parts.append(
        _text(10, 22, "∂(ℓ₀ + ℓ₁)/∂x of x₀ (blue) and x₁ (orange); ℓ₀ = 1 · (y₀ + y₁), ℓ₁ = 10 · (y₀ + y₁)", "start")
    )
    for k, (name, of_ranks) in enumerate(values.items()):
        top = 38 + 48 * k
        parts.append(_text(280, top + 24, name, "end"))
        for r, value in enumerate(of_ranks):
            y, width = top + 4 + 18 * r, 24 * value
            parts.append(f'<rect x="290" y="{y}" width="{width:g}" height="15" fill="{COLOURS[(r,)]}"/>')
            parts.append(_text(296 + width, y + 12, f"{value:g}", "start"))
    return "\n".join([*parts, "</svg>\n"])


def gathers() -> dict[str, list[float]]:
    """Run the gathers of the README's picture on two ranks; return the gradients that they lead to."""

    def gradient(x: float, weight: float, gather: Callable[[Tensor], Tensor]) -> float:
        leaf = torch.tensor([x], requires_grad=True)
        loss = weight * gather(leaf).sum()
        return torch.autograd.grad(loss, leaf)[0].item() if loss.requires_grad else 0.0

    def plain(x: Tensor) -> Tensor:
        ys = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(ys, x.detach())
        return torch.cat(ys)

    def put_back(x: Tensor) -> Tensor:
        ys = list(plain(x).split(len(x)))
        ys[dist.get_rank()] = x
        return torch.cat(ys)

    class Averaged(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return plain(x)

        @staticmethod
        def backward(ctx: object, g: Tensor) -> Tensor:
            dist.all_reduce(g := g.clone())
            return g.chunk(dist.get_world_size())[dist.get_rank()] / dist.get_world_size()

    kinds: dict[str, Callable[[Tensor], Tensor]] = {
        "diffcoll.all_gather": dc.all_gather,
        "own tensor put back: own loss only": put_back,
        "GatherLayer that averages: 1/N": Averaged.apply,
        "torch.distributed.all_gather: none": plain,
    }
    return {name: simulate(gradient, [3.0, 5.0], [1.0, 10.0], [gather] * 2) for name, gather in kinds.items()}


def _head(width: int, height: int, title: str) -> list[str]:
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    font = 'font-family="sans-serif" font-size="13"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font} role="img" aria-label="{title}">'
    return [head, f'<rect width="{width}" height="{height}" rx="6" fill="#fff"/>']


def _text(x: float, y: float, words: str, anchor: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="#222">{html.escape(words)}</text>'


def _box(x: float, y: float, words: str, colour: str) -> Sequence[str]:
    box = f'<rect x="{x:g}" y="{y:g}" width="{CELL}" height="{ROW - 6}" rx="3" fill="{colour}" stroke="#888"/>'
    return box, _text(x + CELL / 2, y + 19, words, "middle")


if __name__ == "__main__":
    README.write_text(bars(gathers()), encoding="utf-8")
