"""Streaming DiLoCo: fragments take turns, four bits each, while training goes on (arXiv 2501.18512).

    lowcomm run streaming_diloco                                     2 local processes
    torchrun --nproc-per-node 2 -m lowcomm.recipes.streaming_diloco  any machines
    lowcomm run streaming_diloco --preset paper                      the paper's; its models have 3 blocks in a fragment

A fragment is sent every sync_every steps and applied `delay` steps later. alpha is the worker's own share then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from lowcomm.compress import E3M0, Codec
from lowcomm.optim import StreamingDiLoCo
from lowcomm.recipes.recipe import run
from lowcomm.recipes.training import NAMED_PARAMETERS, Settings, inner_optimizer
from torch import nn

__all__ = ["build", "main"]

SYNC_EVERY = 16
DELAY = 1
ALPHA = 0.5
LAYERS_PER_FRAGMENT = 1
OUTER_LR = 0.9
OUTER_MOMENTUM = 0.3
COMPRESS = E3M0()
PAPER = {
    "sync_every": 100,
    "delay": 1,
    "layers_per_fragment": 3,
    "outer_lr": 0.4,
    "outer_momentum": 0.9,
    "first_send": "full",
    "compress": E3M0(),
}


def build(
    model: nn.Module,
    settings: Settings,
    *,
    sync_every: int = SYNC_EVERY,
    delay: int = DELAY,
    alpha: float = ALPHA,
    layers_per_fragment: int = LAYERS_PER_FRAGMENT,
    first_send: Literal["early", "full"] = "early",
    outer_lr: float = OUTER_LR,
    outer_momentum: float = OUTER_MOMENTUM,
    compress: Codec | None = COMPRESS,
) -> StreamingDiLoCo:
    """The optimizer of this recipe."""
    return StreamingDiLoCo(
        inner_optimizer(model, settings.lr),  # of named parameters: names tell the blocks
        sync_every=sync_every,
        fragments="strided" if NAMED_PARAMETERS else "bytes",
        delay=delay,
        alpha=alpha,
        layers_per_fragment=layers_per_fragment,
        first_send=first_send,
        outer_lr=outer_lr,
        outer_momentum=outer_momentum,
        compress=compress,
        feedback=None,  # as in the paper
    )


def main(argv: Sequence[str] | None = None) -> int:
    return run(build, PAPER, argv)


if __name__ == "__main__":
    raise SystemExit(main())
