"""CO2: an outer loop one round late, with a staleness penalty and clipped momentum (arXiv 2401.16265).

Round r starts everywhere from x_i = X_r; gamma_r is the inner learning rate of its last step, Mbar(r) = sum_i w_i x_i
at its end. Averaging launched at the end of round r overlaps round r + 1:

    end of round r >= 2:   D = (X_{r-1} - Mbar(r-1)) / gamma_{r-1}
                           Lambda = 1 + ||X_r - X_{r-1}|| / ||X_{r-1} - Mbar(r-1)||
                           m = beta m + D / Lambda
                           X_{r+1} = X_r - alpha gamma_r clip(m, -phi, phi)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import Unpack

from .eager import OneRoundLate
from .fragment import Fragment
from .options import SharedOptions
from .outer import OuterRule
from .schedules import Schedule
from .slowmo import positive_lr
from .state import InFlight

__all__ = ["CO2"]


class PenalisedMomentum(OuterRule):
    """m = beta m + D / Lambda; X = X - alpha gamma clip(m, -phi, phi)."""

    buffers = ("outer_momentum_buffer",)

    def __init__(self) -> None:
        self.penalty = 1.0  # Lambda

    def step_(self, anchor: Tensor, buffers: dict[str, Tensor], delta: Tensor, group: dict[str, Any]) -> None:
        m = buffers["outer_momentum_buffer"]
        m.mul_(group["co2_beta"]).add_(delta.div_(self.penalty))
        anchor.sub_(clipped_step(m, group))


def clipped_step(m: Tensor, group: dict[str, Any]) -> Tensor:
    """alpha gamma clip(m, -phi, phi), what the anchor moves by."""
    phi = group["co2_clip"]
    return (m if phi is None else m.clamp(-phi, phi)) * (float(group["co2_alpha"]) * positive_lr(group))


class CO2(OneRoundLate):
    """CO2 (arXiv 2401.16265): averaging that overlaps a whole round, with a penalty for how stale it is.

    Args:
        inner: the optimizer that trains this worker.
        sync_every: tau, inner steps per round; 12 to 48 in the paper.
        alpha: outer learning rate; a group key ("co2_alpha").
        beta: outer momentum; a group key ("co2_beta"). The authors use 0 below 4 nodes, 0.2 at 4, 0.5 at 8, 0.6 at 16.
        gap_penalty: True: Lambda as above; False: Lambda = 1; a number >= 1: that constant.
        clip: phi, bound of every coordinate of the momentum used in the step; None: no clipping. The stored momentum
            stays as it is. The paper uses 1.
        **shared: see `LowCommOptimizer`.

    Raises:
        ValueError: an argument is out of its range.
        RuntimeError: the inner learning rate is not positive at a sync.

    Example:
        >>> import torch
        >>> from lowcomm.optim import CO2
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = CO2(torch.optim.SGD(model.parameters(), lr=0.1), sync_every=12, beta=0.5, clip=1.0)

    The formula of Lambda was not available to us; ours is the gap-aware one. `flush` applies the mean in flight, then
    the partial round without penalty.
    """

    _rounds = 1

    def __init__(
        self,
        inner: Optimizer | Sequence[Optimizer],
        *,
        sync_every: int | Schedule,
        alpha: float = 1.0,
        beta: float = 0.5,
        gap_penalty: bool | float = True,
        clip: float | None = None,
        **shared: Unpack[SharedOptions],
    ):
        if not 0.0 < alpha < math.inf or not 0.0 <= beta < 1.0 or (clip is not None and not clip > 0.0):
            raise ValueError(f"need alpha > 0, 0 <= beta < 1 and clip > 0 or None but got {alpha}, {beta}, {clip}")
        if not isinstance(gap_penalty, bool) and not 1.0 <= gap_penalty < math.inf:
            raise ValueError(f"gap_penalty must be True, False or a number of at least 1 but is: {gap_penalty}")
        self._gap = gap_penalty
        super().__init__(
            inner,
            sync_every=sync_every,
            rule=PenalisedMomentum(),
            outer_defaults={
                "co2_alpha": alpha,
                "co2_beta": beta,
                "co2_clip": clip,
                "last_move": 0.0,
                "coming_lr": 0.0,
                "previous_lr": 0.0,
            },
            **shared,
        )

    def _message(self, fragment: Fragment) -> Tensor:
        """The progress of the round in gradient units, so that it does not matter when it is applied."""
        message = super()._message(fragment)
        for start, stop, _, group in fragment.pieces():
            message[start:stop].div_(positive_lr(self.param_groups[group]))
        return message

    def _after_send(self, sent: list[InFlight], step: int) -> None:
        super()._after_send(sent, step)
        for group in self.param_groups:
            group["coming_lr"], group["previous_lr"] = float(group["lr"]), group["coming_lr"]

    def _before_apply(self, due: list[InFlight]) -> None:
        rule = self._rule
        assert isinstance(rule, PenalisedMomentum)
        rule.penalty = 1.0 if any(exchange.partial for exchange in due) else self._penalty(due)

    def _finish(self, due: list[InFlight]) -> bool:
        done = super()._finish(due)
        if done and self._gap is True:
            self._set_all("last_move", math.sqrt(sum(self._squared_move(x.fragment) for x in due)))
        return done

    def _squared_move(self, fragment: Fragment) -> float:
        """Squared length of the outer step that was just taken, which the momentum tells."""
        m = fragment.buffers["outer_momentum_buffer"]
        return fragment.squared_norm(m, lambda part, group: clipped_step(part, self.param_groups[group]))

    def _penalty(self, due: list[InFlight]) -> float:
        """Lambda: how far the anchor has moved since the mean was formed, in units of the mean's own length."""
        if self._gap is not True:
            return float(self._gap or 1.0)
        groups = self.param_groups
        squares = sum(
            x.fragment.squared_norm(x.work.result, lambda part, group: part * groups[group]["previous_lr"]) for x in due
        )
        return 1.0 + float(self.param_groups[0]["last_move"]) / (math.sqrt(squares) + 1e-12)
