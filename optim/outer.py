"""Outer rules: what the averaged pseudo-gradient does to the anchor.

A rule works on flat slices and keeps no state of its own, so it can be applied piece by piece while the piece is in
the cache. Two rules are here; methods with their own rule define it in their file.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from ..compress import kernels

__all__ = ["Average", "Nesterov", "OuterRule", "outer_step_"]


def outer_step_(
    anchor: Tensor, momentum: Tensor, delta: Tensor, *, lr: float, momentum_decay: float, nesterov: bool
) -> None:
    """SGD with momentum on the anchor, as torch.optim.SGD with dampening 0.

    X anchor, B momentum, D pseudo-gradient, nu lr, mu momentum_decay; every product and sum is rounded on its own:

        B <- mu B + D
        d <- D + mu B  (nesterov)  or  B  (heavy ball)
        X <- X - nu d

    Args:
        anchor, momentum, delta: (n,) tensors of one dtype, float32 or float64, contiguous. `delta` is left undefined.
    """
    if anchor.dtype == torch.float32 and kernels.runs_on_kernels(anchor, momentum, delta):
        kernels.kernel("lc_outer_sgd", "ppplffii")(
            anchor.data_ptr(),
            momentum.data_ptr(),
            delta.data_ptr(),
            anchor.numel(),
            lr,
            momentum_decay,
            int(nesterov),
            kernels.threads(),
        )
        return
    momentum.mul_(momentum_decay).add_(delta)
    step = delta.add_(momentum * momentum_decay) if nesterov else delta.copy_(momentum)
    anchor.sub_(step.mul_(lr))


class OuterRule:
    """Base class: `buffers` names the flat outer buffers the rule keeps besides the anchor."""

    buffers: ClassVar[tuple[str, ...]] = ()

    def step_(self, anchor: Tensor, buffers: dict[str, Tensor], delta: Tensor, group: dict[str, Any]) -> None:
        """Update `anchor` and `buffers` in place from `delta`, which may be destroyed.

        Args:
            anchor, delta: (n,) slices of the flat anchor and of the averaged pseudo-gradient.
            buffers: (n,) slices, one for each name in `self.buffers`.
            group: the parameter group, with the outer hyper-parameters.
        """
        raise NotImplementedError

    def sgd_settings(self, group: dict[str, Any]) -> tuple[float, float, bool] | None:
        """(lr, momentum, nesterov) when the rule is plain SGD on one buffer, which has a fused kernel; else None."""
        return None


class Average(OuterRule):
    """X <- X - D: the anchor becomes the mean of the workers' parameters."""

    def step_(self, anchor: Tensor, buffers: dict[str, Tensor], delta: Tensor, group: dict[str, Any]) -> None:
        anchor.sub_(delta)


class Nesterov(OuterRule):
    """SGD with (Nesterov) momentum; reads `outer_lr`, `outer_momentum` and `outer_nesterov` from the group."""

    buffers = ("outer_momentum_buffer",)

    def step_(self, anchor: Tensor, buffers: dict[str, Tensor], delta: Tensor, group: dict[str, Any]) -> None:
        lr, momentum_decay, nesterov = self.sgd_settings(group)
        buffer = buffers["outer_momentum_buffer"]
        outer_step_(anchor, buffer, delta, lr=lr, momentum_decay=momentum_decay, nesterov=nesterov)

    def sgd_settings(self, group: dict[str, Any]) -> tuple[float, float, bool]:
        return float(group["outer_lr"]), float(group["outer_momentum"]), bool(group["outer_nesterov"])
