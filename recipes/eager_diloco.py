"""Eager DiLoCo: the own progress at once, the others' one round later (arXiv 2502.12996).

    lowcomm run eager_diloco                                     2 local processes
    torchrun --nproc-per-node 2 -m lowcomm.recipes.eager_diloco  any machines
    lowcomm run eager_diloco --preset paper                      the paper's

The exchange has a whole round to finish. --delayed applies the stale mean only, the paper's baseline; lower outer_lr
for it.
"""

from __future__ import annotations

from collections.abc import Sequence

from lowcomm.compress import Codec
from lowcomm.optim import EagerDiLoCo
from lowcomm.recipes.recipe import run
from lowcomm.recipes.training import Settings, inner_optimizer
from torch import nn

__all__ = ["build", "main"]

SYNC_EVERY = 16
OUTER_LR = 0.9
OUTER_MOMENTUM = 0.3
PAPER = {"sync_every": 30, "outer_lr": 0.4, "outer_momentum": 0.9}


def build(
    model: nn.Module,
    settings: Settings,
    *,
    sync_every: int = SYNC_EVERY,
    delay: int = 1,
    delayed: bool = False,
    outer_lr: float = OUTER_LR,
    outer_momentum: float = OUTER_MOMENTUM,
    compress: Codec | None = None,
) -> EagerDiLoCo:
    """The optimizer of this recipe."""
    return EagerDiLoCo(
        inner_optimizer(model, settings.lr),
        sync_every=sync_every,
        delay=delay,
        delayed=delayed,
        outer_lr=outer_lr,
        outer_momentum=outer_momentum,
        compress=compress,
    )


def main(argv: Sequence[str] | None = None) -> int:
    return run(build, PAPER, argv)


if __name__ == "__main__":
    raise SystemExit(main())
