"""When the next synchronisation happens.

A schedule is asked once per round, right before the first inner step after a sync, and answers with the step number of
the next sync. Steps are counted 1, 2, 3, ...; a sync at step s happens inside the call of `step()` that completes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

__all__ = ["QSR", "AtSteps", "Every", "Intervals", "LateBudget", "Schedule"]

NEVER = 1 << 40  # a step number beyond any run


@runtime_checkable
class Schedule(Protocol):
    """Anything with this method can be given as `sync_every`. All workers must answer alike."""

    def next_sync(self, step: int, lr: float) -> int:
        """The step number (> `step`) of the next sync.

        Args:
            step: completed inner steps.
            lr: inner learning rate in force for the coming step (first parameter group).
        """
        ...


@dataclass(frozen=True)
class Every:
    """Sync when (step - start) mod interval == phase mod interval, never at or before `start`.

    `phase=1` imitates torch's PeriodicModelAverager, which averages after steps 1, interval + 1, ...

    >>> schedule = Every(4)
    >>> schedule.next_sync(0, lr=0.1), schedule.next_sync(4, lr=0.1)
    (4, 8)
    """

    interval: int
    phase: int = 0
    start: int = 0

    def next_sync(self, step: int, lr: float) -> int:
        earliest = max(step, self.start) + 1
        return earliest + (self.phase - (earliest - self.start)) % self.interval


@dataclass(frozen=True)
class AtSteps:
    """Sync at the given step numbers, and never after the last.

    >>> AtSteps((2, 5)).next_sync(2, lr=0.1)
    5
    """

    steps: tuple[int, ...]

    def __post_init__(self) -> None:
        if list(self.steps) != sorted(set(self.steps)) or (self.steps and self.steps[0] < 1):
            raise ValueError(f"steps must be ascending and at least 1 but is: {self.steps}")

    def next_sync(self, step: int, lr: float) -> int:
        return next((due for due in self.steps if due > step), NEVER)


@dataclass(frozen=True)
class LateBudget:
    """A fixed number of syncs, spent late: none before the last `share` of the run, the last one at its very end.

    With syncs=1 workers train apart and are merged once (arXiv 2507.06542, which finds that late syncs help most and
    that a single merge at the end does much of it). How the others are spread, evenly, is ours.

    Args:
        total_steps: T, length of the run.
        syncs: how many in all, at steps T (1 - share (1 - k / syncs)) for k = 1, ..., syncs, rounded.
        share: part of the run in which they lie, 0 < share <= 1.

    >>> LateBudget(total_steps=100, syncs=4, share=0.2).steps
    (85, 90, 95, 100)
    """

    total_steps: int
    syncs: int = 1
    share: float = 0.5

    def __post_init__(self) -> None:
        if not 0.0 < self.share <= 1.0 or self.syncs < 1 or len(set(self.steps)) < self.syncs or self.steps[0] < 1:
            raise ValueError(
                f"need 0 < share <= 1 and 1 <= syncs <= share * total_steps but got share={self.share}, "
                f"syncs={self.syncs}, total_steps={self.total_steps}"
            )

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps after which workers are synchronised."""
        late = self.share * self.total_steps
        return tuple(self.total_steps - math.floor(late * k / self.syncs) for k in reversed(range(self.syncs)))

    def next_sync(self, step: int, lr: float) -> int:
        return AtSteps(self.steps).next_sync(step, lr)


@dataclass(frozen=True)
class Intervals:
    """The length of every round from a function of the completed steps, H(t), the same on all workers.

    >>> Intervals(lambda step: 1 if step < 3 else 10).next_sync(3, lr=0.1)
    13
    """

    interval: Callable[[int], int]

    def next_sync(self, step: int, lr: float) -> int:
        return step + self.interval(step)


@dataclass(frozen=True)
class QSR:
    """Quadratic synchronisation rule (arXiv 2310.14423): longer rounds as the learning rate decays.

    For a round that starts after t steps, with inner learning rate eta in force for its first step:

        H = max(base, floor((alpha / eta)^power)), at most max_interval; the last round ends exactly at total_steps

    Args:
        alpha: growth coefficient; 0 keeps H at `base`. The paper uses 0.0175 for ViT-B with AdamW.
        base: shortest round.
        total_steps: T, length of the run; None: no truncation.
        warmup_steps: rounds that start before it have length `warmup_interval`: the rule explodes at a warm-up rate.
        warmup_interval: default: the rule at `peak_lr`, or `base` where that is not given.
        peak_lr: highest learning rate.
        power: 2; 1 is the linear and 3 the cubic rule.
        max_interval: longest round of the rule; ours.

    >>> rule = QSR(alpha=0.0175, base=4)
    >>> [rule.interval(eta) for eta in (0.008, 0.005, 0.001)]
    [4, 12, 306]
    """

    alpha: float
    base: int = 4
    total_steps: int | None = None
    warmup_steps: int = 0
    warmup_interval: int | None = None
    peak_lr: float | None = None
    power: float = 2.0
    max_interval: int | None = None

    def __post_init__(self) -> None:
        if self.alpha < 0 or self.base < 1:
            raise ValueError(f"need alpha >= 0 and base >= 1 but got alpha={self.alpha}, base={self.base}")

    def interval(self, lr: float) -> int:
        """H for a learning rate, before truncation."""
        longest = self.max_interval or NEVER
        if lr <= 0.0:
            return longest
        # the exact quotient decides: 3.5^2 is 12, whatever the division leaves in the last bits
        rule = math.floor(math.pow(self.alpha / lr, self.power) * (1 + 1e-12))
        return min(max(self.base, rule), longest)

    def next_sync(self, step: int, lr: float) -> int:
        if step < self.warmup_steps:
            length = self.warmup_interval or (self.interval(self.peak_lr) if self.peak_lr else self.base)
        else:
            length = self.interval(lr)
        if self.total_steps is not None and step < self.total_steps:
            length = max(1, min(length, self.total_steps - step))
        return step + length
