"""MT-DAO: a slow momentum that survives long rounds, mixed with the gradient (arXiv 2510.05361).

    lowcomm run mtdao                                     2 local processes
    torchrun --nproc-per-node 2 -m lowcomm.recipes.mtdao  any machines
    lowcomm run mtdao --preset paper                      QH-ADOPT, everything averaged every 32 steps

The inner optimizer is quasi-hyperbolic Adam or ADOPT. Choose momentum so that its half-life, ln 0.5 / ln momentum, is
at least sync_every. omega has no published default.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from lowcomm.compress import Codec
from lowcomm.optim import MTDAO
from lowcomm.recipes.recipe import run
from lowcomm.recipes.training import Settings, decay_groups
from torch import nn

__all__ = ["build", "main"]

SYNC_EVERY = 16
MOMENTUM = 0.95
OMEGA = 0.9
BETA2 = 0.99
FORM: Literal["adam", "adopt"] = "adam"
PAPER = {"sync_every": 32, "momentum": 0.99, "omega": 0.95, "beta2": 0.9999, "form": "adopt"}


def build(
    model: nn.Module,
    settings: Settings,
    *,
    sync_every: int = SYNC_EVERY,
    momentum: float = MOMENTUM,
    omega: float = OMEGA,
    beta2: float = BETA2,
    form: Literal["adam", "adopt"] = FORM,
    compress: Codec | None = None,
) -> MTDAO:
    """The optimizer of this recipe."""
    return MTDAO(
        decay_groups(model.named_parameters()),
        lr=settings.lr,
        sync_every=sync_every,
        momenta=(momentum,),
        omegas=(omega,),
        beta2=beta2,
        form=form,
        compress=compress,
    )


def main(argv: Sequence[str] | None = None) -> int:
    return run(build, PAPER, argv)


if __name__ == "__main__":
    raise SystemExit(main())
