"""SparseLoCo: DiLoCo whose messages are 1/64 dense, with decayed error feedback (arXiv 2508.15706).

    lowcomm run sparseloco                                     2 local processes
    torchrun --nproc-per-node 2 -m lowcomm.recipes.sparseloco  any machines
    lowcomm run sparseloco --preset paper                      the 72B run of arXiv 2603.08163

A combination: DiLoCo without outer momentum, top-k with 2-bit values, EFDecay. What is rarely sent builds up in the
residual, which takes momentum's place.
"""

from __future__ import annotations

from collections.abc import Sequence

from lowcomm.compress import EFDecay, TopK
from lowcomm.optim import DiLoCo
from lowcomm.recipes.recipe import run
from lowcomm.recipes.training import Settings, inner_optimizer
from torch import nn

__all__ = ["build", "main"]

SYNC_EVERY = 16
OUTER_LR = 1.0
DENSITY = 1 / 64
BETA = 0.95
PAPER = {"sync_every": 30, "outer_lr": 1.0, "density": 1 / 64, "beta": 0.95, "lr": 1.2e-4, "lr_warmup": 1500}


def build(
    model: nn.Module,
    settings: Settings,
    *,
    sync_every: int = SYNC_EVERY,
    outer_lr: float = OUTER_LR,
    density: float = DENSITY,
    beta: float = BETA,
) -> DiLoCo:
    """The optimizer of this recipe."""
    return DiLoCo(
        inner_optimizer(model, settings.lr),
        sync_every=sync_every,
        outer_lr=outer_lr,
        outer_momentum=0.0,
        compress=TopK(density=density),
        feedback=EFDecay(beta),
    )


def main(argv: Sequence[str] | None = None) -> int:
    return run(build, PAPER, argv)


if __name__ == "__main__":
    raise SystemExit(main())
