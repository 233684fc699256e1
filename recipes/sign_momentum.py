"""Distributed sign momentum (DSM): the outer step is Lion on the mean pseudo-gradient (arXiv 2411.17866).

    lowcomm run sign_momentum                                     2 local processes
    torchrun --nproc-per-node 2 -m lowcomm.recipes.sign_momentum  any machines
    lowcomm run sign_momentum --preset paper                      the released code's

Every coordinate moves by global_lr * lr in a round, or not at all: with sync_every inner steps of Adam before it, a
global_lr of about their number covers the same way.
"""

from __future__ import annotations

from collections.abc import Sequence

from lowcomm.compress import Codec
from lowcomm.optim import SignMomentum
from lowcomm.recipes.recipe import run
from lowcomm.recipes.training import Settings, inner_optimizer
from torch import nn

__all__ = ["build", "main"]

SYNC_EVERY = 16
GLOBAL_LR = 3.0
BETA1, BETA2 = 0.5, 0.9
WEIGHT_DECAY = 0.1
PAPER = {"sync_every": 12, "global_lr": 1.0, "beta1": 0.95, "beta2": 0.98, "weight_decay": 0.1, "lr": 5e-4}


def build(
    model: nn.Module,
    settings: Settings,
    *,
    sync_every: int = SYNC_EVERY,
    global_lr: float = GLOBAL_LR,
    beta1: float = BETA1,
    beta2: float = BETA2,
    weight_decay: float = WEIGHT_DECAY,
    compress: Codec | None = None,
) -> SignMomentum:
    """The optimizer of this recipe."""
    return SignMomentum(
        inner_optimizer(model, settings.lr),
        sync_every=sync_every,
        global_lr=global_lr,
        betas=(beta1, beta2),
        weight_decay=weight_decay,
        compress=compress,
    )


def main(argv: Sequence[str] | None = None) -> int:
    return run(build, PAPER, argv)


if __name__ == "__main__":
    raise SystemExit(main())
