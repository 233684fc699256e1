"""DiLoCo: train apart, then one outer Nesterov step (arXiv 2311.08105).

    lowcomm run diloco                                     2 local processes
    torchrun --nproc-per-node 2 -m lowcomm.recipes.diloco  any machines
    lowcomm run diloco --preset paper                      the paper's, on models of 60M to 400M

The gain outer_lr / (1 - outer_momentum) belongs to the length of the run in rounds: 7 with hundreds of rounds, near 1
with ten. One worker (--workers 1) is Lookahead, with outer momentum SNOO (arXiv 2510.15830).
"""

from __future__ import annotations

from collections.abc import Sequence

from lowcomm.compress import Codec
from lowcomm.optim import DiLoCo
from lowcomm.recipes.recipe import run
from lowcomm.recipes.training import Settings, inner_optimizer
from torch import nn

__all__ = ["build", "main"]

SYNC_EVERY = 16
OUTER_LR = 0.9
OUTER_MOMENTUM = 0.3
PAPER = {
    "sync_every": 500,
    "outer_lr": 0.7,
    "outer_momentum": 0.9,
    "lr": 4e-4,
    "lr_warmup": 1000,
    "batch": 512,
    "context": 1024,
}


def build(
    model: nn.Module,
    settings: Settings,
    *,
    sync_every: int = SYNC_EVERY,
    outer_lr: float = OUTER_LR,
    outer_momentum: float = OUTER_MOMENTUM,
    nesterov: bool = True,
    compress: Codec | None = None,
) -> DiLoCo:
    """The optimizer of this recipe."""
    return DiLoCo(
        inner_optimizer(model, settings.lr),
        sync_every=sync_every,
        outer_lr=outer_lr,
        outer_momentum=outer_momentum,
        nesterov=nesterov,
        compress=compress,
    )


def main(argv: Sequence[str] | None = None) -> int:
    return run(build, PAPER, argv)


if __name__ == "__main__":
    raise SystemExit(main())
