"""Arithmetic shared by the block quantizers (torch operations), rounded exactly as in the C++ and CUDA kernels."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_KERNEL_BLOCK = 4096  # larger blocks are encoded by torch operations on every level


def divide(a: Tensor | float, b: Tensor | float) -> Tensor:
    """fl(a / b). With a Python number, `/` would multiply by a rounded reciprocal on some devices."""
    tensor = a if isinstance(a, Tensor) else b
    assert isinstance(tensor, Tensor)
    numerator = a if isinstance(a, Tensor) else torch.full_like(tensor, a)
    return numerator / (b if isinstance(b, Tensor) else torch.full_like(tensor, b))


def block_scale(absmax: Tensor, levels: float) -> Tensor:
    """fl(absmax / levels), or the float below where levels * scale would overflow although the block is finite."""
    scale = divide(absmax, levels)
    return torch.where(torch.isfinite(scale * levels), scale, _next_below(scale))


def bf16_scale_up(scale: Tensor, levels: float) -> Tensor:
    """The smallest bfloat16 that is not below a scale >= 0, or the one below that where levels * scale overflows."""
    code = (scale.view(torch.int32) + 0xFFFF) >> 16
    return _lower_if_overflow(code, 16, levels)


def pow2_scale_up(scale: Tensor, levels: float) -> Tensor:
    """The smallest power of two not below a scale >= 0 (0 for 0), or its half where levels * scale overflows."""
    code = (scale.view(torch.int32) + 0x7FFFFF) >> 23
    return _lower_if_overflow(code, 23, levels)


def as_bytes(values: Tensor) -> Tensor:
    """The little-endian bytes of a contiguous vector."""
    return values.contiguous().view(torch.uint8).view(-1)


def from_bytes(body: Tensor, dtype: torch.dtype) -> Tensor:
    """The vector that these bytes are; the bytes may start at any address."""
    return body.clone().view(dtype)


def write_sections(out: Tensor, *sections: Tensor) -> None:
    """Fill a body with uint8 sections, each padded with zeros to 4 bytes."""
    at = 0
    for section in sections:
        end = at + section.numel()
        out[at:end] = section
        at = (end + 3) // 4 * 4
        out[end:at] = 0


def _next_below(positive: Tensor) -> Tensor:
    return (positive.view(torch.int32) - 1).view(torch.float32)


def _lower_if_overflow(code: Tensor, shift: int, levels: float) -> Tensor:
    value = (code << shift).view(torch.float32)
    return torch.where(torch.isfinite(value * levels), value, ((code - 1) << shift).view(torch.float32))
