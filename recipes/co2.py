"""CO2: slow momentum on a mean that is one round old, so that the exchange is hidden (arXiv 2401.16265).

    lowcomm run co2                                     2 local processes
    torchrun --nproc-per-node 2 -m lowcomm.recipes.co2  any machines
    lowcomm run co2 --preset paper                      the paper's, with 8 machines

--clip bounds the momentum, --gap-penalty divides what is stale by how far the model has moved since.
"""

from __future__ import annotations

from collections.abc import Sequence

from lowcomm.compress import Codec
from lowcomm.optim import CO2
from lowcomm.recipes.recipe import run
from lowcomm.recipes.training import Settings, inner_optimizer
from torch import nn

__all__ = ["build", "main"]

SYNC_EVERY = 16
ALPHA = 0.7
BETA = 0.0
PAPER = {"sync_every": 48, "alpha": 1.0, "beta": 0.5, "clip": 1.0}


def build(
    model: nn.Module,
    settings: Settings,
    *,
    sync_every: int = SYNC_EVERY,
    alpha: float = ALPHA,
    beta: float = BETA,
    gap_penalty: bool = True,
    clip: float | None = None,
    compress: Codec | None = None,
) -> CO2:
    """The optimizer of this recipe."""
    return CO2(
        inner_optimizer(model, settings.lr),
        sync_every=sync_every,
        alpha=alpha,
        beta=beta,
        gap_penalty=gap_penalty,
        clip=clip,
        compress=compress,
    )


def main(argv: Sequence[str] | None = None) -> int:
    return run(build, PAPER, argv)


if __name__ == "__main__":
    raise SystemExit(main())
