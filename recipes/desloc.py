"""DES-LOC: parameters and each of Adam's moments are averaged at periods of their own (arXiv 2505.22549).

    lowcomm run desloc                                     2 local processes
    torchrun --nproc-per-node 2 -m lowcomm.recipes.desloc  any machines
    lowcomm run desloc --preset paper                      periods 64, 192, 384

Moments change slowly, so they may be averaged seldom: 1-3-6 has half the traffic of Local Adam, which is
--exp-avg-every 1 --exp-avg-sq-every 1.
"""

from __future__ import annotations

from collections.abc import Sequence

from lowcomm.compress import Codec
from lowcomm.optim import DESLOC
from lowcomm.recipes.recipe import run
from lowcomm.recipes.training import Settings, inner_optimizer
from torch import nn

__all__ = ["build", "main"]

SYNC_EVERY = 16
EXP_AVG_EVERY = 3  # parameter syncs
EXP_AVG_SQ_EVERY = 6
PAPER = {"sync_every": 64, "exp_avg_every": 3, "exp_avg_sq_every": 6}


def build(
    model: nn.Module,
    settings: Settings,
    *,
    sync_every: int = SYNC_EVERY,
    exp_avg_every: int = EXP_AVG_EVERY,
    exp_avg_sq_every: int = EXP_AVG_SQ_EVERY,
    compress: Codec | None = None,
) -> DESLOC:
    """The optimizer of this recipe."""
    periods = {
        "params": sync_every,
        "exp_avg": exp_avg_every * sync_every,
        "exp_avg_sq": exp_avg_sq_every * sync_every,
    }
    return DESLOC(inner_optimizer(model, settings.lr), sync_every=periods, compress=compress)


def main(argv: Sequence[str] | None = None) -> int:
    return run(build, PAPER, argv)


if __name__ == "__main__":
    raise SystemExit(main())
