"""SlowMo: a slow momentum on the mean of the workers, in units of the learning rate (arXiv 1910.00643).

    lowcomm run slowmo                                     2 local processes
    torchrun --nproc-per-node 2 -m lowcomm.recipes.slowmo  any machines
    lowcomm run slowmo --preset paper                      the paper's for more than 16 machines

The authors use beta 0 below 4 workers, 0.2 at 4, 0.5 at 8, 0.6 at 16, 0.7 above.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from lowcomm.compress import Codec
from lowcomm.optim import SlowMo
from lowcomm.recipes.recipe import run
from lowcomm.recipes.training import Settings, inner_optimizer
from torch import nn

__all__ = ["build", "main"]

SYNC_EVERY = 16
ALPHA = 1.0
BETA = 0.2
PAPER = {"sync_every": 48, "alpha": 1.0, "beta": 0.7}


def build(
    model: nn.Module,
    settings: Settings,
    *,
    sync_every: int = SYNC_EVERY,
    alpha: float = ALPHA,
    beta: float = BETA,
    buffers: Literal["maintain", "reset", "average"] = "maintain",
    compress: Codec | None = None,
) -> SlowMo:
    """The optimizer of this recipe."""
    inner = inner_optimizer(model, settings.lr)
    return SlowMo(inner, sync_every=sync_every, alpha=alpha, beta=beta, buffers=buffers, compress=compress)


def main(argv: Sequence[str] | None = None) -> int:
    return run(build, PAPER, argv)


if __name__ == "__main__":
    raise SystemExit(main())
