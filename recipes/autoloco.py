"""AutoLoCo: DiLoCo whose rounds follow loss, learning rate and noise (arXiv 2609.36662).

    lowcomm run autoloco                                     2 local processes
    torchrun --nproc-per-node 2 -m lowcomm.recipes.autoloco  any machines
    lowcomm run autoloco --preset paper                      DiLoCo's, from which it starts

The interval rule and the correction of the outer learning rate are this library's: only the abstract and the rule for
the momentum were available. In a loop of your own call `optimizer.record(loss)` before `step()`.
"""

from __future__ import annotations

from collections.abc import Sequence

from lowcomm.compress import Codec
from lowcomm.optim import AutoLoCo
from lowcomm.recipes.recipe import run
from lowcomm.recipes.training import Settings, inner_optimizer
from torch import nn

__all__ = ["build", "main"]

SYNC_EVERY = 16
OUTER_LR = 0.9
OUTER_MOMENTUM = 0.3
MAX_INTERVAL = 64
PAPER = {"sync_every": 500, "outer_lr": 0.7, "outer_momentum": 0.9}


def build(
    model: nn.Module,
    settings: Settings,
    *,
    sync_every: int = SYNC_EVERY,
    outer_lr: float = OUTER_LR,
    outer_momentum: float = OUTER_MOMENTUM,
    max_interval: int = MAX_INTERVAL,
    compress: Codec | None = None,
) -> AutoLoCo:
    """The optimizer of this recipe."""
    return AutoLoCo(
        inner_optimizer(model, settings.lr),
        sync_every=sync_every,
        outer_lr=outer_lr,
        outer_momentum=outer_momentum,
        max_interval=max_interval,
        total_steps=settings.steps,
        lr_warmup_steps=settings.lr_warmup,
        compress=compress,
    )


def main(argv: Sequence[str] | None = None) -> int:
    return run(build, PAPER, argv)


if __name__ == "__main__":
    raise SystemExit(main())
