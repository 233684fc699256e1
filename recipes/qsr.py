"""QSR: local SGD whose rounds grow as the learning rate falls (quadratic synchronisation rule, arXiv 2310.14423).

    lowcomm run qsr                                     2 local processes
    torchrun --nproc-per-node 2 -m lowcomm.recipes.qsr  any machines
    lowcomm run qsr --preset paper                      ViT-B with AdamW on ImageNet

H = max(base, (alpha / lr)^2). Choose alpha so that rounds begin to grow early in the decay: alpha / lr = sqrt(base) at
the learning rate where they should.
"""

from __future__ import annotations

from collections.abc import Sequence

from lowcomm.compress import Codec
from lowcomm.optim import QSR, LocalSGD
from lowcomm.recipes.recipe import run
from lowcomm.recipes.training import Settings, inner_optimizer
from torch import nn

__all__ = ["build", "main"]

ALPHA = 0.01
BASE = 8
PAPER = {"alpha": 0.0175, "base": 4, "lr": 8e-3, "lr_warmup": 10_000}


def build(
    model: nn.Module,
    settings: Settings,
    *,
    alpha: float = ALPHA,
    base: int = BASE,
    compress: Codec | None = None,
) -> LocalSGD:
    """The optimizer of this recipe."""
    rule = QSR(alpha, base, settings.steps, warmup_steps=settings.lr_warmup, peak_lr=settings.lr)
    return LocalSGD(inner_optimizer(model, settings.lr), sync_every=rule, compress=compress)


def main(argv: Sequence[str] | None = None) -> int:
    return run(build, PAPER, argv)


if __name__ == "__main__":
    raise SystemExit(main())
