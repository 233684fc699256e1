"""Combine the messages of all ranks into one vector, in rank order, the same bits wherever it is done.

    acc = w_0 d_0;  for r = 1 .. N-1: acc = fl(acc + fl(w_r * d_r));  result = acc / sum w

which is the sum from zero, but for the sign of zeros, and saves a pass over memory. Or coordinate by coordinate divided
by the number of contributors, or by a robust rule.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..compress import Codec, decode_sum
from ..compress.fused import fuses
from .errors import CorruptFrame, SyncError
from .exchange import Shares
from .loss_filter import LossFilter
from .robust import Rule

__all__ = ["Message", "Reduction", "checked"]

Total = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Message:
    """A body and the key it was encoded with."""

    codec: Codec
    body: Tensor
    step: int
    rank: int
    bucket: int

    def decode(self, out: Tensor) -> None:
        """Overwrite `out`, (n,) float32."""
        with checked(self.rank):
            self.codec.decode(self.body, out, step=self.step, rank=self.rank, bucket=self.bucket)

    def add_to(self, total: Tensor, factor: float) -> None:
        """total = fl(total + fl(factor * decoded))."""
        with checked(self.rank):
            self.codec.decode_add(self.body, total, factor, step=self.step, rank=self.rank, bucket=self.bucket)


class checked:
    """A block in which a ValueError means that the message of `rank` is not one that the codec wrote."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, ValueError):
            raise CorruptFrame(f"the message of rank {self._rank} cannot be decoded: {error}", self._rank) from error


class Reduction:
    """Takes messages one by one, in rank order, and gives the combined vector.

    Args:
        kind: "mean", "sum", "mean_contributors" or a robust rule.
        shares: how much each rank counts.
        total: (n,) float32, becomes the result. Its contents do not matter.
    """

    def __init__(self, kind: str | Rule, shares: Shares, total: Tensor) -> None:
        self._kind, self._shares, self._total = kind, shares, total
        self._rows: list[Tensor] = []
        self._ranks: list[int] = []
        self.memory: Tensor | None = None  # what a rule wants to see again in the next round
        self._counts = torch.zeros_like(total) if kind == "mean_contributors" else None
        self._empty = True
        self._later: list[tuple[Message, float]] | None = [] if total.is_cuda and kind in ("mean", "sum") else None
        if isinstance(kind, Rule) and shares.weighted:
            raise SyncError(
                f"{type(kind).__name__} counts all ranks alike, but their weights differ; use equal weights, or 0 for "
                f"ranks that are to be left out"
            )

    def add(self, message: Message, factor: float) -> None:
        """Take in one message; factor 0 leaves it out."""
        if factor == 0.0:
            return
        if self._later is not None:  # on a GPU one kernel decodes all messages at the end, and writes the result once
            self._later.append((message, factor))
        else:
            self._take(message, factor)

    def _take(self, message: Message, factor: float) -> None:
        if isinstance(self._kind, Rule):
            self._rows.append(torch.empty_like(self._total))
            self._ranks.append(message.rank)
            message.decode(self._rows[-1])
        elif self._empty or self._counts is not None:
            decoded = self._total if self._empty else torch.empty_like(self._total)
            message.decode(decoded)
            if self._counts is not None:
                self._counts.add_((decoded != 0).to(decoded.dtype).mul_(factor))
            if factor != 1.0:
                decoded.mul_(factor)
            if not self._empty:
                self._total.add_(decoded)
        else:
            message.add_to(self._total, factor)
        self._empty = False

    def result(self, total: Total, previous: Tensor | None, round: int, own_rank: int = 0) -> Tensor | None:
        """The combined vector; None: the rule says to skip this round.

        Args:
            total: completes float64 sums over the slices of the vector.
            previous: the memory of the round before, for rules that need it.
            own_rank: this rank.
        """
        if isinstance(self._kind, Rule):
            combined = self._combined(self._kind, total, previous, round, own_rank)
            return None if combined is None else self._total.copy_(combined)
        if self._later and self._decode_together(self._later):
            return self._total
        for message, factor in self._later or ():
            self._take(message, factor)
        if self._counts is not None:
            return self._total.div_(torch.where(self._counts > 0, self._counts, 1.0))
        return self._total if self._shares.divisor == 1.0 else self._total.div_(self._shares.divisor)

    def _decode_together(self, messages: list[tuple[Message, float]]) -> bool:
        """The result from all messages in one pass. False: not possible, or one of them is damaged."""
        codec, bodies = messages[0][0].codec, [message.body for message, _ in messages]
        if not fuses(codec, bodies, self._total):
            return False
        try:
            decode_sum(codec, bodies, self._total, [factor for _, factor in messages], self._shares.divisor)
        except ValueError:
            return False  # one by one they tell whose
        return True

    def _combined(self, rule: Rule, total: Total, previous: Tensor | None, round: int, own_rank: int) -> Tensor | None:
        rows = torch.stack(self._rows)
        if isinstance(rule, LossFilter):
            world_size = len(self._shares.factors)
            keys = {"judge": own_rank, "total": total, "memory": previous, "round": round}
            combined, self.memory = rule.judge(rows, self._ranks, world_size, **keys)  # type: ignore[arg-type]
            return combined
        combined = rule.combine(rows, total=total, previous=previous, round=round)
        if rule.stateful and combined is not None:
            self.memory = combined.clone()
        return combined
