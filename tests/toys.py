"""Toy problems with closed-form gradients that differ between workers, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# (gradient of worker i at x) for scalar problems with known optima
P: list[Callable[[Tensor], Tensor]] = [lambda p: p - 1, lambda p: 2 * (p + 1)]
Q: list[Callable[[Tensor], Tensor]] = [lambda q: 2 * (q - 1), lambda q: q + 3]
R: list[Callable[[Tensor], Tensor]] = [
    lambda x: 1 * (x - 1),
    lambda x: 2 * (x + 1),
    lambda x: 1 * (x - 3),
    lambda x: 2 * (x - 0),
]
START = {"P": 2.0, "Q": 0.0, "R": 2.0}
PROBLEMS = {"P": P, "Q": Q, "R": R}


def scalar(value: float) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.tensor([value], dtype=torch.float64))


def run_toy(
    rank: int,
    build: Callable[[list[torch.nn.Parameter]], Any],
    steps: int,
    problems: str = "P",
    watch: Callable[[Any, list[torch.nn.Parameter]], Any] | None = None,
) -> list[Any]:
    """Run `steps` steps of worker `rank`; after each, record the parameters, or what `watch` returns.

    `problems` names one scalar problem for each parameter: "P", or "PQ" for the two-parameter model.
    """
    parameters = [scalar(START[name]) for name in problems]
    optimizer = build(parameters)
    record = []
    for _ in range(steps):
        for name, p in zip(problems, parameters, strict=True):
            p.grad = PROBLEMS[name][rank](p.detach())
        optimizer.step()
        values = [p.item() for p in parameters]
        record.append(values if watch is None else watch(optimizer, parameters))
    return record


def anchor_of(optimizer: Any, parameters: list[torch.nn.Parameter]) -> list[float]:
    return [float(optimizer.state[p]["anchor"]) for p in parameters]


def momentum_of(optimizer: Any, parameters: list[torch.nn.Parameter]) -> list[float]:
    return [float(optimizer.state[p]["outer_momentum_buffer"]) for p in parameters]
