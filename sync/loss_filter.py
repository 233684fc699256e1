"""`LossFilter`: average the messages that lower a loss, as the ranks themselves measure it.

    own_r, other_r   how much message r, taken `step` far, lowers the loss on the data rank r says it trained on, and on
                     other data; the mean over the ranks that judged it
    mu_r             moving average of sign(own_r - other_r): a rank that trained does better on its own data
    score_r          moving average of other_r
    kept             those with mu > 0 and score > 0, at most `keep`, by mu * score;  result = their mean

Every rank judges messages with the user's function; the numbers are summed over ranks, so all ranks decide alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .errors import SyncError
from .robust import Rule

__all__ = ["LossFilter"]

Evaluate = Callable[[Tensor | None, int, bool], float]
Total = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class LossFilter(Rule):
    """Against ranks that send noise, copies or nothing of use: keep the messages that measurably help.

    Give it to `AllReduce(reduce=...)`; vectors are then gathered whole. Its memory, two numbers for each rank, is part
    of `AllReduce.state`. Rounds in which no message passes are skipped.

    Args:
        evaluate: called as evaluate(update, rank, own): the loss after `update`, (n,) float32 or None for zero, has
            been subtracted from the parameters; on the data assigned to `rank` (own=True) or on other data (own=False).
            The same data for the same round and rank, or noise decides. It must leave the model as it was.
        keep: messages that enter the mean at most, or None for all that pass.
        step: share of an update that is tried; large steps make rankings inconsistent. Default 0.2.
        rate: of the moving averages. Default 0.05.
        judged: messages that each rank judges in a round, taking turns, or None for all.

    Raises:
        ValueError: step or rate outside (0, 1], keep or judged below 1.

    Source: Gauntlet (arXiv 2505.21684) as described by its users; moving averages in place of its OpenSkill ratings are
    ours.

    >>> def loss(update, rank, own):
    ...     return 0.0 if update is None else float(update.sum()) * (2 if own else 1)
    >>> kept, memory = LossFilter(loss).judge(torch.tensor([[-1.0], [3.0], [-2.0]]), [0, 1, 2], 3)
    >>> kept
    tensor([-1.5000])
    """

    evaluate: Evaluate = field(repr=False)  # its text differs between processes, and settings are compared as text
    keep: int | None = None
    step: float = 0.2
    rate: float = 0.05
    judged: int | None = None

    def __post_init__(self) -> None:
        for name in ("step", "rate"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must be in (0, 1] but is: {getattr(self, name)}")
        for name in ("keep", "judged"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1 or None but is: {getattr(self, name)}")

    @property
    def stateful(self) -> bool:
        return True

    @property
    def whole(self) -> bool:
        return True

    def combine(
        self, x: Tensor, *, total: Total = lambda part: part, previous: Tensor | None = None, round: int = 0
    ) -> Tensor | None:
        return self.judge(x, range(len(x)), len(x), total=total, memory=previous, round=round)[0]

    def judge(
        self,
        x: Tensor,
        ranks: Sequence[int],
        world_size: int,
        *,
        judge: int = 0,
        total: Total = lambda part: part,
        memory: Tensor | None = None,
        round: int = 0,
    ) -> tuple[Tensor | None, Tensor]:
        """(mean of the messages kept, or None; the new memory, (2 * world_size,) float32).

        Args:
            x: (m, n), the messages of `ranks`.
            judge: this rank.
            total: sums a float64 tensor over all ranks.
            memory: of the round before, or None.
            round: whose turn it is, where not all are judged by all.
        """
        counts, own, other = self._verdicts(x, ranks, world_size, judge, total, round)
        table = torch.zeros(2, world_size) if memory is None else memory.view(2, world_size).cpu().clone()
        mu, score = table
        for rank in (rank for rank in ranks if counts[rank] > 0):
            better = torch.sign(own[rank] - other[rank]).float()
            mu[rank] += self.rate * (better - mu[rank])
            score[rank] += self.rate * ((other[rank] / counts[rank]).float() - score[rank])
        rows = [row for row, rank in enumerate(ranks) if mu[rank] > 0 and score[rank] > 0]
        rows.sort(key=lambda row: -float(mu[ranks[row]] * score[ranks[row]]))
        kept = sorted(rows[: self.keep])
        mean = None if not kept else torch.stack([x[row] for row in kept]).sum(0).div_(len(kept))
        return mean, table.flatten().to(x.device)

    def _verdicts(
        self, x: Tensor, ranks: Sequence[int], world_size: int, judge: int, total: Total, round: int
    ) -> Tensor:
        """(3, world_size) float64: number of judges, sums of loss decreases on own and on other data."""
        table = torch.zeros(4, world_size, dtype=torch.float64)
        error: Exception | None = None
        count = len(ranks) if self.judged is None else min(self.judged, len(ranks))
        try:
            for i in range(count):
                row = (round + judge + i) % len(ranks)
                decreases = [self._decrease(x[row], ranks[row], own) for own in (True, False)]
                table[:3, ranks[row]] = torch.tensor([1.0, *decreases], dtype=torch.float64)
        except Exception as failure:  # the other ranks wait for the numbers: they get them, with the news
            error, table[3] = failure, 1.0
        table = total(table)
        if error is not None:
            raise error
        if bool(table[3].any()):
            raise SyncError("the evaluation function of a LossFilter failed on another rank")
        return table[:3]

    def _decrease(self, update: Tensor, rank: int, own: bool) -> float:
        return float(self.evaluate(None, rank, own)) - float(self.evaluate(update * self.step, rank, own))
