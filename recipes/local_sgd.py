"""Local SGD and post-local SGD: train apart, then average the parameters (arXiv 1805.09767, 1808.07217).

    lowcomm run local_sgd                                     2 local processes
    torchrun --nproc-per-node 2 -m lowcomm.recipes.local_sgd  any machines
    lowcomm run local_sgd --preset paper                      post-local SGD, switched after half of the run

--post-local 0.5 averages gradients at every step of the first half (post-local SGD). --average-state also averages
Adam's moments (Local Adam): three times the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

from lowcomm.compress import Codec
from lowcomm.optim import LocalSGD
from lowcomm.recipes.recipe import run
from lowcomm.recipes.training import Settings, inner_optimizer
from torch import nn

__all__ = ["build", "main"]

SYNC_EVERY = 16
POST_LOCAL = 0.0  # part of the run in which gradients are averaged at every step
PAPER = {"sync_every": 16, "post_local": 0.5}


def build(
    model: nn.Module,
    settings: Settings,
    *,
    sync_every: int = SYNC_EVERY,
    post_local: float = POST_LOCAL,
    average_state: bool = False,
    compress: Codec | None = None,
) -> LocalSGD:
    """The optimizer of this recipe."""
    return LocalSGD(
        inner_optimizer(model, settings.lr),
        sync_every=sync_every,
        warmup_steps=round(post_local * settings.steps),
        average_state=("exp_avg", "exp_avg_sq") if average_state else (),
        compress=compress,
    )


def main(argv: Sequence[str] | None = None) -> int:
    return run(build, PAPER, argv)


if __name__ == "__main__":
    raise SystemExit(main())
