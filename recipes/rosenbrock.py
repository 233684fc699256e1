"""DES-LOC's toy: 256 workers on the Rosenbrock function with noise, in one process (arXiv 2505.22549).

    lowcomm run rosenbrock --plot rosenbrock.png

f(a, b) = (1 - a)^2 + 100 (b - a^2)^2, Gaussian noise of deviation 1.5 on both gradients, Adam. Parameters are averaged
every 192 steps. Adam's moments stay with the workers ("keep"), are zeroed at every average ("reset"), or are averaged
at periods of their own (DES-LOC: 192 and 692, the half-lives of their decays 0.9964 and 0.999).

Moments of their own pull the workers apart as soon as they leave the average; zeroed ones make the first steps after it
too long. Both swing from sync to sync more than DES-LOC does. The paper gives noise, number of workers and periods;
learning rate, decays and start are this library's.

The workers are the rows of one tensor: torch.optim.Adam works element by element, so that it is 256 optimizers at once.
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lowcomm.optim.desloc import Periods
from lowcomm.recipes.report import align
from torch import Tensor

__all__ = ["METHODS", "Trace", "gradient", "main", "simulate"]

WORKERS, NOISE = 256, 1.5
K_X, K_U, K_V = 192, 192, 692
LR, BETAS = 1e-2, (0.9964, 0.999)
START, OPTIMUM = (-1.2, 1.0), (1.0, 1.0)
STEPS = 6000
METHODS: dict[str, tuple[tuple[tuple[str, int], ...], tuple[str, ...]]] = {  # periods, and what a sync zeroes
    "DES-LOC": ((("params", K_X), ("exp_avg", K_U), ("exp_avg_sq", K_V)), ()),
    "keep": ((("params", K_X),), ()),
    "reset": ((("params", K_X),), ("exp_avg", "exp_avg_sq")),
}


@dataclass(frozen=True)
class Trace:
    """One run, step by step.

    Attributes:
        distance: (steps,) mean distance of the workers from the optimum.
        spread: (steps,) root mean square distance of the workers from their mean.
    """

    distance: Tensor
    spread: Tensor

    def late(self) -> dict[str, float]:
        """Of the last third: mean distance, largest spread, and the swing of the distance, largest less smallest."""
        distance, spread = (values[-(len(values) // 3) :] for values in (self.distance, self.spread))
        swing = float(distance.max() - distance.min())
        return {"distance": float(distance.mean()), "spread": float(spread.max()), "swing": swing}


def gradient(x: Tensor) -> Tensor:
    """Of the Rosenbrock function at every row of x, (workers, 2).

    >>> gradient(torch.tensor([[1.0, 1.0], [0.0, 1.0]])).tolist()
    [[0.0, 0.0], [-2.0, 200.0]]
    """
    a, b = x.unbind(1)
    return torch.stack((2 * (a - 1) - 400 * a * (b - a * a), 200 * (b - a * a)), dim=1)


@torch.no_grad()
def simulate(
    periods: tuple[tuple[str, int], ...],
    reset: Sequence[str] = (),
    *,
    steps: int = STEPS,
    noise: float = NOISE,
    lr: float = LR,
    seed: int = 0,
) -> Trace:
    """All workers, one step after the other; `periods` and `reset` are those of `DESLOC`."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.tensor(START, dtype=torch.float64).repeat(WORKERS, 1).requires_grad_()
    optimizer = torch.optim.Adam([x], lr=lr, betas=BETAS)
    optimum, schedule = torch.tensor(OPTIMUM, dtype=torch.float64), Periods(periods)
    distance, spread = torch.empty(steps), torch.empty(steps)
    for t in range(1, steps + 1):
        x.grad = gradient(x) + noise * torch.randn(x.shape, generator=generator, dtype=x.dtype)
        optimizer.step()
        distance[t - 1] = (x - optimum).norm(dim=1).mean()
        spread[t - 1] = (x - x.mean(0)).square().sum(1).mean().sqrt()
        due = schedule.due(t)
        for name in due:
            tensor = x if name == "params" else optimizer.state[x][name]
            tensor.copy_(tensor.mean(0).expand_as(tensor))
        for name in reset if "params" in due else ():
            optimizer.state[x][name].zero_()
    return Trace(distance, spread)


def draw(traces: dict[str, Trace], output: Path) -> None:
    """Distance from the optimum and spread of the workers, against steps.

    Raises:
        ImportError: matplotlib is missing.
    """
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(10, 4), layout="constrained")
    panels = figure.subplots(1, 2)
    for name, trace in traces.items():
        for panel, values in zip(panels, (trace.distance, trace.spread), strict=True):
            panel.plot(values.tolist(), label=name, linewidth=0.8)
    panels[0].set(xlabel="step", ylabel="mean distance of the workers from the optimum", yscale="log")
    panels[1].set(xlabel="step", ylabel="distance of the workers from their mean", yscale="log")
    panels[0].legend()
    figure.savefig(output, dpi=120)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="lowcomm run rosenbrock",
        description=(__doc__ or "").split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=STEPS, help="of every worker")
    parser.add_argument("--noise", type=float, default=NOISE, help="standard deviation, on each coordinate")
    parser.add_argument("--lr", type=float, default=LR, help="Adam's learning rate")
    parser.add_argument("--seed", type=int, default=0, help="of the noise")
    parser.add_argument("--plot", type=Path, metavar="PATH", help="picture to write; takes matplotlib")
    options = parser.parse_args(argv)
    settings: dict[str, Any] = {"steps": options.steps, "noise": options.noise, "lr": options.lr, "seed": options.seed}
    traces = {name: simulate(periods, reset, **settings) for name, (periods, reset) in METHODS.items()}
    late = {name: trace.late() for name, trace in traces.items()}
    columns = list(next(iter(late.values())))
    print(
        align(
            [["last third", *columns], *([name, *(f"{row[c]:.4f}" for c in columns)] for name, row in late.items())], 1
        )
    )
    if options.plot is not None:
        draw(traces, options.plot)
    print(json.dumps({"recipe": "rosenbrock", **settings, "workers": WORKERS, "late": late}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
