"""Plain sums of float vectors: one sum by the backend, our own scaling.

The backend's own averaging is not used: gloo's has been wrong and NCCL's differs in rounding. Traffic of a ring:
2 (N - 1) / N of the vector in each direction.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .exchange import Exchange, Shares, scale_and_check
from .peers import Peers
from .plan import Traffic, ring_bytes

__all__ = ["Dense", "reduce_dense"]


class Dense:
    """float32 or float64 as they are."""

    name = "dense"

    def __init__(self, reduce: str, world_size: int) -> None:
        self._reduce = reduce
        # Dividing by a power of two is exact before the sum as after it, and before it needs no pass of its own.
        exact = reduce == "mean" and world_size & (world_size - 1) == 0
        self._divided_by = world_size if exact else 1

    def settings(self) -> dict[str, object]:
        return {"codec": None, "algorithm": self.name}

    def codec_id(self) -> int:
        return 0

    def traffic(self, elements: int, world_size: int) -> Traffic:
        count = 2 if self._reduce == "mean_contributors" else 1
        return Traffic(count * ring_bytes(4 * elements, world_size), 2 * count * (world_size - 1))

    def prepare(self, exchange: Exchange) -> None:
        if exchange.weight > 0:
            exchange.flags = scale_and_check(exchange.flat, 1 / self._divided_by)

    def own(self, exchange: Exchange) -> Tensor:
        return exchange.flat * self._divided_by

    def communicate(self, exchange: Exchange, peers: Peers, shares: Shares, lengths: Sequence[int]) -> None:
        x = exchange.flat
        if self._reduce == "mean_contributors":
            factor = shares.factors[peers.rank]
            counts = (x != 0).to(x.dtype).mul_(factor)
            x.mul_(factor) if factor else x.zero_()
            peers.all_reduce(x)
            peers.all_reduce(counts)
            x.div_(torch.where(counts > 0, counts, 1.0))
        else:
            reduce_dense(x, peers, shares, self._divided_by)
        exchange.result = x


def reduce_dense(x: Tensor, peers: Peers, shares: Shares, divided_by: int = 1) -> None:
    """x = sum_r factors[r] x_r / divisor, in place, where x_r has been divided by `divided_by` already."""
    factor, divisor = shares.factors[peers.rank], shares.divisor / divided_by
    if factor == 0.0:
        x.zero_()
    if shares.weighted:
        # Scaled before the sum, so that large token counts as weights cannot overflow it.
        x.mul_(factor / divisor)
        divisor = 1.0
    peers.all_reduce(x)
    if divisor != 1.0:
        x.div_(divisor)
