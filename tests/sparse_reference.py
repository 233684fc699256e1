"""Slow, readable twins of the sparse formats, written element by element in numpy and Python integers."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

F = np.float32


def kept_positions(x: np.ndarray, k: int) -> list[int]:
    """The k largest magnitudes, ties to the lower position, ascending; NaN and infinities count as 0."""
    magnitude = np.where(np.isfinite(x), np.abs(x), 0)
    return sorted(sorted(range(len(x)), key=lambda i: (-magnitude[i], i))[:k])


def tree_sum(values: list[np.float32]) -> np.float32:
    width = 1
    while width < len(values):
        width *= 2
    values = [*values, *[F(0)] * (width - len(values))]
    while width > 1:
        width //= 2
        values = [values[i] + values[i + width] for i in range(width)]
    return values[0] if values else F(0)


def to_bf16(value: float) -> float:
    return float(torch.tensor(float(value)).to(torch.bfloat16))


def mag2(values: np.ndarray, iterations: int) -> tuple[float, float, list[int]]:
    """(small level, large level, codes) of one row; levels as float32, before they are rounded to bfloat16."""
    m = [abs(F(v)) for v in values]
    t = tree_sum(m) / F(len(m))
    for _ in range(iterations + 1):
        large = [v > t for v in m]
        count = sum(large)
        small_sum = tree_sum([F(0) if is_large else v for v, is_large in zip(m, large, strict=True)])
        large_sum = tree_sum([v if is_large else F(0) for v, is_large in zip(m, large, strict=True)])
        levels = [small_sum / F(len(m) - count) if count < len(m) else None, large_sum / F(count) if count else None]
        small = levels[1] if levels[0] is None else levels[0]
        big = levels[0] if levels[1] is None else levels[1]
        t = (small + big) * F(0.5)
    codes = [int(v < 0) | int(is_large) << 1 for v, is_large in zip(values, large, strict=True)]
    return float(small), float(big), codes


def pack(fields: list[int], width: int) -> bytes:
    stream = sum((field & ((1 << width) - 1)) << (i * width) for i, field in enumerate(fields))
    return stream.to_bytes((len(fields) * width + 7) // 8, "little")


def pad4(section: bytes) -> bytes:
    return section + bytes(-len(section) % 4)


def elias_fano(positions: list[int], c: int) -> bytes:
    k, low = len(positions), (c // len(positions)).bit_length() - 1
    stream = sum((p & ((1 << low) - 1)) << (j * low) for j, p in enumerate(positions))
    stream |= sum(1 << (k * low + (p >> low) + j) for j, p in enumerate(positions))
    return stream.to_bytes((k * low + k + (c >> low) + 7) // 8, "little")


def topk_mag2(x: Tensor, k: int, c: int, iterations: int = 3) -> tuple[bytes, Tensor]:
    """Body and decoded vector of chunk-wise top-k with Elias-Fano positions and two levels."""
    decoded = np.zeros(x.numel(), dtype=np.float32)
    scales, records, codes = b"", b"", []
    for start in range(0, x.numel(), c):
        chunk = x[start : start + c].float().numpy()
        kept = kept_positions(chunk, min(k, len(chunk)))
        values = np.array([chunk[i] if np.isfinite(chunk[i]) else 0 for i in kept], dtype=np.float32)
        small, large, row = mag2(values, iterations)
        for i, code in zip(kept, row, strict=True):
            level = to_bf16(large if code & 2 else small)
            decoded[start + i] = -level if code & 1 else level
        scales += torch.tensor([small, large]).to(torch.bfloat16).view(torch.uint8).numpy().tobytes()
        records += elias_fano([*kept, *range(len(kept), k)], c)
        codes += [*row, *[0] * (k - len(row))]
    return pad4(scales) + pad4(records) + pad4(pack(codes, 2)), torch.from_numpy(decoded)
