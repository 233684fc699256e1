"""DiLoCo: local steps, then one outer Nesterov step from the averaged pseudo-gradient (arXiv 2311.08105).

X anchor, x_i worker i's parameters, H = sync_every, nu = outer_lr, mu = outer_momentum:

    repeat:
        H inner steps on x_i
        D = sum_i w_i (X - x_i)          one all-reduce of the model
        B = mu B + D
        X = X - nu (D + mu B)            Nesterov;   X - nu B  for the heavy ball
        x_i = X

Inner optimizer state is neither sent nor reset.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch.optim import Optimizer
from typing_extensions import Unpack

from .engine import LowCommOptimizer
from .options import SharedOptions
from .outer import Nesterov
from .schedules import Schedule

__all__ = ["DiLoCo"]


class DiLoCo(LowCommOptimizer):
    """DiLoCo (arXiv 2311.08105): workers train apart for `sync_every` steps, then take one outer step together.

    The update is D = sum_i w_i (X - x_i), B = mu B + D, X = X - nu (D + mu B), x_i = X.

    Args:
        inner: the optimizer that trains this worker, built as usual.
        sync_every: inner steps per round. The paper's 500 suits long runs with large batches; short rounds want a
            smaller gain outer_lr / (1 - outer_momentum).
        outer_lr: nu, step size on the averaged pseudo-gradient; a parameter-group key.
        outer_momentum: mu in [0, 1); a parameter-group key.
        nesterov: Nesterov momentum; False gives the heavy ball that some public code uses under that name. The group
            key is "outer_nesterov", since SGD has a "nesterov" of its own.
        **shared: process_group, weights, average_state, warmup_steps, phase, compress, feedback, sync_buffers,
            on_failure, offload, init: see `LowCommOptimizer`.

    Raises:
        ValueError: an argument is out of its range, or workers start from different parameters and init="check".

    Example:
        >>> import torch
        >>> from lowcomm.optim import DiLoCo
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = DiLoCo(torch.optim.AdamW(model.parameters(), lr=1e-3), sync_every=2)
        >>> for step in range(4):
        ...     loss = model(torch.ones(8, 4)).square().mean()
        ...     loss.backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> optimizer.num_syncs
        2

    Memory beyond the inner optimizer: anchor, momentum and one send buffer, float32 each.
    """

    def __init__(
        self,
        inner: Optimizer | Sequence[Optimizer],
        *,
        sync_every: int | Schedule = 500,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        nesterov: bool = True,
        **shared: Unpack[SharedOptions],
    ):
        check_outer(outer_lr, outer_momentum)
        super().__init__(
            inner,
            sync_every=sync_every,
            rule=Nesterov(),
            outer_defaults={"outer_lr": outer_lr, "outer_momentum": outer_momentum, "outer_nesterov": nesterov},
            **shared,
        )


def check_outer(outer_lr: float, outer_momentum: float) -> None:
    """Raise ValueError unless outer_lr is finite and > 0, and 0 <= outer_momentum < 1."""
    if not 0.0 < outer_lr < math.inf:
        raise ValueError(f"outer_lr must be > 0 and finite but is: {outer_lr}")
    if not 0.0 <= outer_momentum < 1.0:
        raise ValueError(f"outer_momentum must be in [0, 1) but is: {outer_momentum}")
