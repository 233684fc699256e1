"""When the next synchronisation happens.

A schedule is asked once per round, right before the first inner step after a sync, and answers with the step number of
the next sync. Steps are counted 1, 2, 3, ...; a sync at step s happens inside the call of `step()` that completes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

__all__ = ["Every", "Schedule"]


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
