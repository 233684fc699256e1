"""SlowMo: slow momentum on the mean of the workers, in gradient units (arXiv 1910.00643).

X anchor, M = sum_i w_i x_i, gamma the inner learning rate of the round's last step, u slow momentum:

    every sync_every steps:   u = beta u + (X - M) / gamma
                              X = X - alpha gamma u
                              x_i = X
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import Unpack

from ..sync import Receipt
from .engine import LowCommOptimizer
from .options import SharedOptions
from .outer import OuterRule
from .schedules import Schedule
from .state import InFlight

__all__ = ["SlowMo"]


class SlowMomentum(OuterRule):
    """u = beta u + D / gamma; X = X - alpha gamma u."""

    buffers = ("slow_momentum_buffer",)

    def step_(self, anchor: Tensor, buffers: dict[str, Tensor], delta: Tensor, group: dict[str, Any]) -> None:
        gamma, u = positive_lr(group), buffers["slow_momentum_buffer"]
        u.mul_(group["slow_beta"]).add_(delta.div_(gamma))
        anchor.sub_(u * (group["slow_alpha"] * gamma))


def positive_lr(group: dict[str, Any]) -> float:
    """gamma, the learning rate of the last inner step, by which the rule divides.

    Raises:
        RuntimeError: it is not positive.
    """
    gamma = float(group["lr"])
    if not gamma > 0.0:
        raise RuntimeError(f"the rule divides by the inner learning rate, which must be > 0 at a sync but is: {gamma}")
    return gamma


class SlowMo(LowCommOptimizer):
    """SlowMo (arXiv 1910.00643): u = beta u + (X - mean x) / gamma, X = X - alpha gamma u.

    For a constant inner learning rate this is DiLoCo with a heavy ball, (outer_lr, outer_momentum) = (alpha, beta).

    Args:
        inner: the optimizer that trains this worker.
        sync_every: tau, inner steps per round; the paper uses 12 to 48.
        alpha: slow learning rate; a group key ("slow_alpha").
        beta: slow momentum in [0, 1); a group key ("slow_beta"). The authors use 0 below 4 workers, 0.2 at 4, 0.5 at 8,
            0.6 at 16, 0.7 above.
        buffers: what happens at a sync to the inner optimizer's state tensors that have the parameter's shape:
            "maintain", "reset" (zero) or "average".
        **shared: see `LowCommOptimizer`.

    Raises:
        ValueError: an argument is out of its range.
        RuntimeError: the inner learning rate is not positive at a sync.

    Example:
        >>> import torch
        >>> from lowcomm.optim import SlowMo
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = SlowMo(torch.optim.SGD(model.parameters(), lr=0.1), sync_every=4, beta=0.5)
    """

    def __init__(
        self,
        inner: Optimizer | Sequence[Optimizer],
        *,
        sync_every: int | Schedule,
        alpha: float = 1.0,
        beta: float = 0.7,
        buffers: Literal["maintain", "reset", "average"] = "maintain",
        **shared: Unpack[SharedOptions],
    ):
        if not 0.0 < alpha < math.inf or not 0.0 <= beta < 1.0:
            raise ValueError(f"need alpha > 0 and 0 <= beta < 1 but got alpha={alpha}, beta={beta}")
        if buffers not in ("maintain", "reset", "average"):
            raise ValueError(f"buffers must be 'maintain', 'reset' or 'average' but is: {buffers!r}")
        self._base_buffers = buffers
        super().__init__(
            inner,
            sync_every=sync_every,
            rule=SlowMomentum(),
            outer_defaults={"slow_alpha": alpha, "slow_beta": beta},
            **shared,
        )

    def _others_due(self, due: list[InFlight], receipts: list[Receipt]) -> tuple[Sequence[str], bool]:
        names, buffers = super()._others_due(due, receipts)
        if buffers and self._base_buffers == "average":
            names = self._average_state = tuple(dict.fromkeys([*self._average_state, *self._momentum_names()]))
        return names, buffers

    def _apply(self, exchange: InFlight) -> None:
        super()._apply(exchange)
        if self._base_buffers == "reset":
            for p in exchange.fragment.tensors:
                for name in self._momentum_names():
                    if isinstance(self._inner_state(p).get(name), Tensor):
                        self._inner_state(p)[name].zero_()

    def _momentum_names(self) -> list[str]:
        """State tensors of the inner optimizer that have their parameter's shape, in a common order."""
        names = {
            name
            for p in self._trainable()
            for name, value in self._inner_state(p).items()
            if torch.is_tensor(value) and value.shape == p.shape and name != "step"
        }
        return sorted(names)
