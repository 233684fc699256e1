"""Local SGD: local steps, then the mean of the parameters (arXiv 1805.09767; post-local SGD, arXiv 1808.07217).

x_i worker i's parameters, H = sync_every:

    every inner step:    x_i <- inner(x_i, g_i)
    if t mod H == 0:     x_i <- sum_j w_j x_j

With `warmup_steps` = T0, gradients are averaged before each of the first T0 steps (post-local SGD), and H counts from
there. With a codec, the pseudo-gradient to the last agreed parameters X is sent: X <- X - sum_j w_j (X - x_j).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.optim import Optimizer
from typing_extensions import Unpack

from .engine import LowCommOptimizer
from .options import SharedOptions
from .outer import Average
from .schedules import Schedule

__all__ = ["LocalSGD"]


class LocalSGD(LowCommOptimizer):
    """Local SGD (arXiv 1805.09767), post-local SGD (arXiv 1808.07217), Local Adam, FedAvg weights.

    Every `sync_every` steps x_i = sum_j w_j x_j.

    Args:
        inner: the optimizer that trains this worker, built as usual.
        sync_every: inner steps between averages, or a schedule object.
        **shared: process_group, weights, average_state, warmup_steps, phase, compress, feedback, sync_buffers,
            on_failure, offload, init: see `LowCommOptimizer`. average_state=("exp_avg", "exp_avg_sq") with Adam is
            Local Adam; weights=number_of_samples is FedAvg's weighting.

    Example:
        >>> import torch
        >>> from lowcomm.optim import LocalSGD
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = LocalSGD(torch.optim.SGD(model.parameters(), lr=0.1), sync_every=8)
        >>> model(torch.ones(2, 4)).sum().backward()
        >>> optimizer.step()

    Memory beyond the inner optimizer: one send buffer; with a codec also the anchor (and the residual).
    """

    def __init__(
        self,
        inner: Optimizer | Sequence[Optimizer],
        *,
        sync_every: int | Schedule,
        **shared: Unpack[SharedOptions],
    ):
        super().__init__(inner, sync_every=sync_every, rule=rule_of_means(shared), **shared)


def rule_of_means(shared: SharedOptions) -> Average | None:
    """How parameters become their mean: as values, or with a codec by way of the pseudo-gradient."""
    return None if shared.get("compress") is None else Average()
