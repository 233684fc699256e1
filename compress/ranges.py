"""Keep block statistics finite: non-finite elements, and blocks whose sums or squares would leave float32."""

from __future__ import annotations

import torch
from torch import Tensor

from .codec import nonfinite_flags

__all__ = ["exact_sqrt", "finite_part", "range_factor"]

SMALL, LARGE = 2.0**-40, 2.0**40  # between these no sum or square of 65536 elements overflows or underflows


def finite_part(x: Tensor) -> tuple[Tensor, int]:
    """`x` as float32 with NaN and infinities replaced by 0, and the flags that say which were met."""
    values = x.to(torch.float32)
    flags = nonfinite_flags(values)
    return (torch.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0) if flags else values), flags


def range_factor(absmax: Tensor) -> Tensor:
    """The power of two by which a block of this absolute maximum is multiplied before its statistics are taken.

    1 for ordinary blocks. The statistic is divided by it afterwards, so nothing but range changes.
    """
    factor = torch.ones_like(absmax)
    factor[absmax >= LARGE] = 2.0**-80
    factor[absmax < SMALL] = 2.0**80
    return factor


def exact_sqrt(x: Tensor) -> Tensor:
    """Correctly rounded float32 square root; torch.sqrt on float32 is not (it is off by one bit in 1 of 5 numbers)."""
    return x.to(torch.float64).sqrt().to(torch.float32)
