"""What rounding hides is not decided; what it does not hide is right or wrong, in any dtype."""

import pytest
import torch
from sharded_programs import called
from torch import nn
from verdicts import differs, loss, matches, numbers, rows, ruled, several, summed

import diffcoll as dc

EVEN = (4, 4)


def coarse(x):
    """The numbers of x with the last digits of bfloat16; the gradient passes."""
    return x + (x.bfloat16().to(x.dtype) - x).detach()


def program(rule=lambda g: g, speed=1.0, rank=0, width=16, rounds=coarse):
    """A sum over rows, of which one rank has another gradient; `speed` times its rounding errors."""

    def value(x, backward):
        return (speed * rounds(backward(x))).sin().sum() / speed

    def distributed(x):
        return value(x, ruled(torch.clone, rule) if several() and dc.get_rank() == rank else torch.clone)

    x = numbers(8, width, seed=3)
    return summed(distributed, lambda x: value(x, torch.clone), x, ranks=EVEN)


def seen(report):
    """The largest factor beside 1 that could not have been seen."""
    return max(row.seen for row in report.tables[0].rows if row.what == "gradient of x")


def times(factor, at=slice(None)):
    def rule(g):
        g = g.clone()
        g[at] *= factor
        return g

    return rule


@pytest.mark.parametrize(
    ("dtype", "noise"), [(torch.double, 1e-6), (torch.float, 1e-3), (torch.bfloat16, 0.0)], ids=str
)
def test_what_a_report_says_it_sees(dtype, noise):
    """A factor that is further from 1 is wrong; one process computes in bfloat16."""
    report = matches(program(times(1 + noise), speed=3.0), dtype=dtype)
    limit = seen(report)
    assert limit > 1e-3 and any("factors within" in words for words in report.not_compared)
    differs(program(times(1 + 2.5 * limit), speed=3.0), dtype=dtype)
    differs(program(times(1 - 2.5 * limit), speed=3.0, rank=1), dtype=dtype)


def test_a_number_a_row_and_a_column_that_a_slope_does_not_show():
    """One process rounds to bfloat16 within float64; only some numbers of one rank are wrong."""
    differs(program(times(-1, (1, 5)), speed=3.0))
    differs(program(times(1.2, 2), speed=3.0))
    differs(program(times(1.2, (slice(None), 7)), speed=3.0, rank=1))
    differs(program(times(1.02), speed=3.0))
    limit = seen(matches(program(times(1 + 1e-6), speed=3.0)))
    # too little for each number, and nothing for the slope
    differs(program(times(1 + 13 * limit * torch.tensor([1.0, -1.0] * 8), 2), speed=3.0))


def test_a_number_that_is_rounded_more_than_the_others():
    speeds = torch.full((8, 16), 1e-3, dtype=torch.double)
    speeds[1, 3] = 3.0

    def single(x, speeds):
        return ((speeds * coarse(x)).sin() / speeds).sum()

    def other_digits(x, speeds, change=1e-2):
        return single(x + change * several() * x.detach(), speeds)

    right = summed(other_digits, single, (numbers(8, 16, seed=3).requires_grad_(), speeds), ranks=EVEN)
    matches(right)
    differs((lambda x, speeds: other_digits(x, speeds, 0.5), *right[1:]))


def test_a_less_precise_dtype_of_one_process():
    """What one process rounds is judged by that; what only ranks round is wrong."""
    single = program()[1]

    def other_digits(x):
        return single(x * (1 + 1e-4 * several()))

    matches(summed(other_digits, single, rows, ranks=EVEN))
    for fn in (lambda x: x.float().sin().double().sum(), lambda x: coarse(x).sin().sum()):
        differs(summed(lambda x, fn=fn: fn(x) if several() else x.sin().sum(), batch=rows, ranks=EVEN))

    def counted(x):
        """Numbers that are integers are no computation."""
        return x.sin().sum() * (1 + 1e-7 * several()) + 0 * torch.arange(3.0, dtype=torch.float).sum()

    differs(summed(counted, batch=rows, ranks=EVEN))


class Normalized(nn.Module):
    """The gradient of the first bias is zero but for rounding."""

    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 4, dtype=dtype)
        self.norm = dc.nn.SyncBatchNorm(4).to(dtype)

    def forward(self, x):
        return self.norm(self.layer(x))


def adam(further=1.0, left_out=""):
    def step(model, x):
        optimizer = torch.optim.Adam(model.parameters(), 0.1 * (further if several() else 1), eps=1e-30)
        model(x).sin().sum(1).mean().backward()
        for name, p in model.named_parameters():
            if several() and name != left_out:
                p.grad = dc.all_reduce(p.grad, "mean")
        optimizer.step()

    return step


@pytest.mark.parametrize("dtype", [torch.double, torch.float], ids=str)
def test_a_step_on_a_parameter_whose_gradient_is_rounding(dtype):
    given = {"module": Normalized(dtype), "ranks": EVEN, "dtype": dtype}
    report = matches((adam(), adam(), numbers(8, 3), given))
    undecided = {row.what for row in report.tables[0].rows if not row.decided}
    assert undecided == {"parameter layer.bias"}
    assert any("layer.bias" in words for words in report.not_compared)
    differs((adam(further=2), adam(), numbers(8, 3), given))
    report = differs((adam(further=1e3), adam(), numbers(8, 3), given))  # also in what is not decided
    assert not any("not decided" in words for words in report.not_compared)
    differs((adam(left_out="layer.weight"), adam(), numbers(8, 3), given))


def test_nothing_is_decided():
    """All that trains is hidden by rounding: the check says so, and names a dtype that hides less."""

    class Only(nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = nn.Parameter(numbers(3))

        def forward(self, x):
            y = 1e4 * (x + self.bias)
            return (y - dc.all_reduce(y.sum(0)) / 8).sin().sum()

    x = numbers(8, 3).requires_grad_(False)
    given = {"module": Only(), "ranks": EVEN, "losses": "sum", "dtype": torch.bfloat16}
    with pytest.raises(ValueError, match="float64"):
        matches((called, called, (x,), given))


def test_moves_of_a_low_precision():
    """A step twice as far is seen in bfloat16, where the parameter is a number of few digits."""

    def step(model, x, further=1.0):
        loss(model, x).backward()
        with torch.no_grad():
            for p in model.parameters():
                p.grad = dc.all_reduce(p.grad, "mean")
                p -= (further if several() else 1) * p.grad

    given = {"module": nn.Linear(3, 2), "ranks": EVEN, "dtype": torch.bfloat16}
    x = numbers(8, 3)
    matches((step, step, x, given))
    for further in (0.0, 2.0, 3.0):
        differs((lambda model, x, f=further: step(model, x, f), step, x, given))
