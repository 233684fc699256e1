"""MuLoCo: DiLoCo around Muon for matrices and AdamW for the rest (arXiv 2505.23725).

    lowcomm run muloco                                     2 local processes
    torchrun --nproc-per-node 2 -m lowcomm.recipes.muloco  any machines
    lowcomm run muloco --preset paper                      the first author's repository; the paper has 8 workers

Muon (torch 2.9 or newer) takes the matrices of the blocks; embeddings and norms stay with AdamW. Its updates are
scaled to the size of AdamW's, so that both share one learning rate.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from lowcomm.compress import Codec
from lowcomm.optim import DiLoCo
from lowcomm.recipes.recipe import run
from lowcomm.recipes.training import BETAS, WEIGHT_DECAY, Settings, decay_groups
from torch import nn

__all__ = ["build", "main"]

SYNC_EVERY = 16
OUTER_LR = 0.9
OUTER_MOMENTUM = 0.3
MUON_MOMENTUM = 0.95
PAPER = {"sync_every": 30, "outer_lr": 0.7, "outer_momentum": 0.6, "muon_momentum": 0.95, "workers": 8}


def build(
    model: nn.Module,
    settings: Settings,
    *,
    sync_every: int = SYNC_EVERY,
    outer_lr: float = OUTER_LR,
    outer_momentum: float = OUTER_MOMENTUM,
    muon_momentum: float = MUON_MOMENTUM,
    compress: Codec | None = None,
) -> DiLoCo:
    """The optimizer of this recipe."""
    if not hasattr(torch.optim, "Muon"):
        raise RuntimeError(f"torch {torch.__version__} has no Muon; MuLoCo takes torch 2.9 or newer")
    hidden = [(name, p) for name, p in model.named_parameters() if p.dim() == 2 and "embedding" not in name]
    others = [(name, p) for name, p in model.named_parameters() if p.dim() != 2 or "embedding" in name]
    muon = torch.optim.Muon(
        hidden,
        lr=settings.lr,
        weight_decay=WEIGHT_DECAY,
        momentum=muon_momentum,
        adjust_lr_fn="match_rms_adamw",
    )
    adamw = torch.optim.AdamW(decay_groups(others), lr=settings.lr, betas=BETAS)
    return DiLoCo(
        [muon, adamw],
        sync_every=sync_every,
        outer_lr=outer_lr,
        outer_momentum=outer_momentum,
        compress=compress,
    )


def main(argv: Sequence[str] | None = None) -> int:
    return run(build, PAPER, argv)


if __name__ == "__main__":
    raise SystemExit(main())
