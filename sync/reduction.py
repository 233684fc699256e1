"""The ordered float32 sum that every compressed algorithm uses, and its division."""

from __future__ import annotations

import torch
from torch import Tensor

from ..compress import Codec
from .errors import CorruptFrame

__all__ = ["add_message", "divide"]


def add_message(
    codec: Codec,
    body: Tensor,
    total: Tensor,
    counts: Tensor | None,
    factor: float,
    step: int,
    rank: int,
    bucket: int,
) -> None:
    """total += factor * decode(body); counts += factor where the decoded value is not zero.

    Args:
        total: (n,) float32.
        counts: (n,) float32, or None where nobody counts contributors.
        step, rank, bucket: those the body was encoded with.

    Raises:
        CorruptFrame: the codec refuses the body.
    """
    try:
        if counts is None:
            codec.decode_add(body, total, factor, step=step, rank=rank, bucket=bucket)
            return
        decoded = torch.empty_like(total)
        codec.decode(body, decoded, step=step, rank=rank, bucket=bucket)
    except ValueError as error:
        raise CorruptFrame(f"the message of rank {rank} cannot be decoded: {error}", rank) from error
    counts.add_((decoded != 0).to(counts.dtype).mul_(factor))
    total.add_(decoded if factor == 1.0 else decoded.mul_(factor))


def divide(total: Tensor, counts: Tensor | None, divisor: float) -> Tensor:
    """total / divisor, or coordinate by coordinate / counts (where somebody contributed); in place."""
    if counts is not None:
        return total.div_(torch.where(counts > 0, counts, 1.0))
    return total if divisor == 1.0 else total.div_(divisor)
