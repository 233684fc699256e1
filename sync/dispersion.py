"""How far apart ranks are: the numbers that show silent inconsistency before the averaged loss does.

    loss dispersion        standard deviation of the ranks' losses
    norm dispersion        standard deviation of |x_r| over the ranks, divided by its mean
    direction consistency  (|sum_r x_r|^2 - sum_r |x_r|^2) / ((sum_r |x_r|)^2 - sum_r |x_r|^2)

The last is the mean of the cosines of all pairs of ranks, each weighted by the product of the two norms: 1 when all
point the same way, 0 when they are orthogonal. It needs no vector but the result, so it costs no traffic.

Source: the three metrics of "Silent inconsistency in data-parallel full fine-tuning"; norms instead of all pairs is
ours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, pstdev

import torch
from torch import Tensor

from .exchange import Exchange
from .peers import Peers, gather_numbers

__all__ = ["STATISTICS_BYTES", "add_statistics", "norm", "share_statistics"]

STATISTICS_BYTES = 24


def share_statistics(exchange: Exchange, peers: Peers, weights: Sequence[float]) -> None:
    """Tell all ranks this rank's loss and norms: 24 bytes from each rank to each rank."""
    assert exchange.original is not None
    loss = math.nan if exchange.loss is None else exchange.loss
    numbers = [loss, norm(exchange.original), exchange.message_norm]
    mine = torch.tensor(numbers, dtype=torch.float64, device=peers.device)
    rows = [row.tolist() for row in gather_numbers(peers, mine)]
    counted = [row for row, weight in zip(rows, weights, strict=True) if weight > 0]
    losses, norms, exchange.norms = (list(column) for column in zip(*counted, strict=True))
    known = [loss for loss in losses if not math.isnan(loss)]
    receipt = exchange.receipt
    receipt.loss_dispersion = pstdev(known) if known and all(map(math.isfinite, known)) else None
    if all(map(math.isfinite, norms)):
        mean = fmean(norms)
        receipt.norm_dispersion = pstdev(norms) / mean if mean > 0 else 0.0


def add_statistics(exchange: Exchange, residual: Tensor | None) -> None:
    """Fill in what is known once the result is there."""
    local, result, receipt, shares = exchange.original, exchange.result, exchange.receipt, exchange.shares
    exchange.original = None
    if local is None or result is None or receipt.skipped:
        return
    receipt.density = float((result != 0).double().mean()) if result.numel() else 0.0
    receipt.residual_norm = None if residual is None else norm(residual)
    receipt.norm = norm(local)
    length = receipt.norm * norm(result)
    receipt.cosine = float((local.double() @ result.double()) / length) if length > 0 else 0.0
    known = all(map(math.isfinite, exchange.norms))
    if shares is not None and not shares.weighted and known:
        receipt.direction_consistency = consistency(exchange.norms, norm(result) * shares.divisor)


def norm(x: Tensor) -> float:
    """Euclidean, in float64."""
    return float(torch.linalg.vector_norm(x, dtype=torch.float64))


def consistency(norms: Sequence[float], norm_of_sum: float) -> float | None:
    """Mean cosine of all pairs, weighted by their norms; None for fewer than two vectors that are not zero.

    >>> consistency([3.0, 4.0], 5.0), consistency([1.0, 1.0], 2.0)
    (0.0, 1.0)
    """
    squares = math.fsum(length * length for length in norms)
    pairs = math.fsum(norms) ** 2 - squares
    return (norm_of_sum**2 - squares) / pairs if pairs > 0 else None
