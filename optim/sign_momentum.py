"""DSM: distributed sign momentum with local steps, a Lion-type outer step (arXiv 2411.17866).

X anchor, m momentum, gamma the inner learning rate of the round's last step, lambda decay, eta_g global_lr:

    D = sum_i w_i (X - x_i) / gamma
    u = b1 m + (1 - b1) D
    X = X (1 - eta_g gamma lambda) - eta_g gamma sign(u)
    m = b2 m + (1 - b2) D
    x_i = X

Only the mean crosses the network; the sign acts after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import Unpack

from ..compress.philox import uniform
from .engine import LowCommOptimizer
from .options import SharedOptions
from .outer import OuterRule
from .schedules import Schedule
from .slowmo import positive_lr
from .state import InFlight

__all__ = ["SignMomentum"]

_STREAM = 0x44534D53  # of the shared random generator: draws of the random sign


class SignStep(OuterRule):
    """The outer step above. `sign` "exact", or a random sign with expectation u / bound."""

    buffers = ("sign_momentum_buffer",)

    def __init__(self, sign: str, bound: float, seed: int):
        self.sign, self.bound, self.seed = sign, bound, seed
        self.round, self.drawn = 0, 0  # the next draw: round, elements drawn in it so far

    def step_(self, anchor: Tensor, buffers: dict[str, Tensor], delta: Tensor, group: dict[str, Any]) -> None:
        gamma, m = positive_lr(group), buffers["sign_momentum_buffer"]
        (b1, b2), rate = group["sign_betas"], group["global_lr"] * gamma
        gradient = delta.div_(gamma)
        u = m * b1 + gradient * (1.0 - b1)
        anchor.mul_(1.0 - rate * group["outer_weight_decay"]).sub_(self._signs(u).mul_(rate))
        m.mul_(b2).add_(gradient.mul_(1.0 - b2))

    def _signs(self, u: Tensor) -> Tensor:
        if self.sign == "exact":
            return u.sign_()
        count = u.numel()
        draws = uniform(count, seed=self.seed + self.drawn, stream=_STREAM, step=self.round).to(u)
        self.drawn += count
        share = (u / self.bound).clamp_(-1.0, 1.0)
        if self.sign == "two-point":
            return torch.where(draws < (share + 1.0) / 2.0, 1.0, -1.0).to(u.dtype)
        return torch.where(draws < share.abs(), share.sign(), 0.0).to(u.dtype)


class SignMomentum(LowCommOptimizer):
    """DSM (arXiv 2411.17866): sign of the momentum of the averaged progress, scaled by the inner learning rate.

    The update is u = b1 m + (1 - b1) D, X = X (1 - eta gamma lambda) - eta gamma sign(u), m = b2 m + (1 - b2) D.

    Args:
        inner: the optimizer that trains this worker.
        sync_every: inner steps per round.
        global_lr: eta_g; a group key.
        betas: (b1, b2); a group key ("sign_betas").
        weight_decay: lambda of the outer step; a group key ("outer_weight_decay").
        sign: "exact"; "two-point": +1 with probability 1/2 + u/(2 bound), else -1; "ternary": sign(u) with probability
            |u|/bound, else 0. u is clamped to the bound. All workers draw the same values.
        bound: B of the random signs; required by them.
        seed: of the random signs.
        **shared: see `LowCommOptimizer`.

    Raises:
        ValueError: an argument is out of its range.
        RuntimeError: the inner learning rate is not positive at a sync.

    Example:
        >>> import torch
        >>> from lowcomm.optim import SignMomentum
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = SignMomentum(torch.optim.AdamW(model.parameters(), lr=5e-4), sync_every=12)

    `flush` takes the ordinary outer step with the partial round. The random sign's draws are ours.
    """

    def __init__(
        self,
        inner: Optimizer | Sequence[Optimizer],
        *,
        sync_every: int | Schedule = 12,
        global_lr: float = 1.0,
        betas: tuple[float, float] = (0.95, 0.98),
        weight_decay: float = 0.1,
        sign: Literal["exact", "two-point", "ternary"] = "exact",
        bound: float | None = None,
        seed: int = 0,
        **shared: Unpack[SharedOptions],
    ):
        if not global_lr > 0.0 or weight_decay < 0.0 or not all(0.0 <= b < 1.0 for b in betas):
            raise ValueError(
                "need global_lr > 0, weight_decay >= 0 and betas in [0, 1) but got "
                f"{global_lr}, {weight_decay}, {betas}"
            )
        if sign not in ("exact", "two-point", "ternary"):
            raise ValueError(f"sign must be 'exact', 'two-point' or 'ternary' but is: {sign!r}")
        if (sign == "exact") != (bound is None) or (bound is not None and not bound > 0.0):
            raise ValueError(f"bound must be > 0 for random signs and None for the exact one but is: {bound}")
        super().__init__(
            inner,
            sync_every=sync_every,
            rule=SignStep(sign, bound or 1.0, seed),
            outer_defaults={"global_lr": global_lr, "sign_betas": betas, "outer_weight_decay": weight_decay},
            **shared,
        )

    def _apply(self, exchange: InFlight) -> None:
        rule = self._rule
        assert isinstance(rule, SignStep)
        rule.round, rule.drawn = self._round, exchange.fragment.bucket << 40
        super()._apply(exchange)
