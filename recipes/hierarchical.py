"""Hierarchical local SGD: near workers average often, all workers seldom (arXiv 1808.07217).

    lowcomm run hierarchical                                     2 local processes
    torchrun --nproc-per-node 2 -m lowcomm.recipes.hierarchical  any machines

Workers of one node (consecutive ranks) average every sync_every steps, all of them every `blocks` times that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from lowcomm.optim import HierarchicalLocalSGD
from lowcomm.recipes.recipe import run
from lowcomm.recipes.training import Settings, inner_optimizer
from torch import nn

__all__ = ["build", "main"]

SYNC_EVERY = 4
BLOCKS = 4
PAPER: dict[str, Any] = {}  # it has a table of settings and recommends none of them


def build(
    model: nn.Module,
    settings: Settings,
    *,
    sync_every: int = SYNC_EVERY,
    blocks: int = BLOCKS,
    node: int | None = None,
) -> HierarchicalLocalSGD:
    """The optimizer of this recipe."""
    half = max(1, dist.get_world_size() // 2)  # two nodes, unless told otherwise
    levels = {sync_every: node or half, sync_every * blocks: None}
    return HierarchicalLocalSGD(inner_optimizer(model, settings.lr), sync_every=levels)


def main(argv: Sequence[str] | None = None) -> int:
    return run(build, PAPER, argv)


if __name__ == "__main__":
    raise SystemExit(main())
