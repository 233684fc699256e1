"""Uncompressed all-reduce: one sum by the backend, our own scaling.

The backend's own averaging is not used: gloo's has been wrong and NCCL's differs in rounding. Traffic of a ring:
2 (N - 1) / N of the vector in each direction.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .exchange import Exchange, Shares, finite_flags
from .peers import Peers

__all__ = ["Dense"]


class Dense:
    """float32 or float64 as they are."""

    name = "dense"

    def __init__(self, reduce: str) -> None:
        self._reduce = reduce

    def settings(self) -> dict[str, object]:
        return {"codec": None, "algorithm": self.name}

    def codec_id(self) -> int:
        return 0

    def prepare(self, exchange: Exchange) -> None:
        exchange.flags = finite_flags(exchange.flat) if exchange.weight > 0 else 0

    def own(self, exchange: Exchange) -> Tensor:
        return exchange.flat.clone()

    def communicate(self, exchange: Exchange, peers: Peers, shares: Shares, lengths: Sequence[int]) -> None:
        x, factor = exchange.flat, shares.factors[peers.rank]
        if factor == 0.0:
            x.zero_()
        counts = (x != 0).to(x.dtype).mul_(factor) if self._reduce == "mean_contributors" else None
        divisor = shares.divisor
        if shares.weighted:
            # Scaled before the sum, so that large token counts as weights cannot overflow it.
            x.mul_(factor / divisor if counts is None else factor)
            divisor = 1.0 if counts is None else divisor
        peers.all_reduce(x)
        if counts is not None:
            peers.all_reduce(counts)
            x.div_(torch.where(counts > 0, counts, 1.0))
        elif divisor != 1.0:
            x.div_(divisor)
        exchange.result = x
