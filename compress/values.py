"""Values of kept entries as bytes (torch operations). A row holds k values; scales are per row unless said otherwise.

    f32     raw float32
    bf16    rounded to the nearest bfloat16, ties to even; beyond its range the largest finite number
    mag2    sign and one of two magnitudes: 2 bits, and two bfloat16 levels. Lloyd's iteration on m = |v| from the mean:
                large = m > t;  levels = means of m over the two classes;  t = fl(fl(small + large) * 0.5)
            An empty class takes the level of the other. On the kept values of Gaussian data the error is 0.4 % of the
            energy, against 1.3 % with one level.
    sign1   sign times the mean magnitude: 1 bit, and one bfloat16
    int8, int4   a = max |v|;  q = clamp(round(fl(v * fl(Q / a))), -Q, Q) with Q = 127 or 7;  decoded fl(q * fl(a / Q));
            one float32 scale
    bins4   2 bits, and four float32 levels for all rows together: four equal bins over +-3 standard deviations around
            the mean, each decoded as the mean of its values. The format of the first chunk-wise top-k runs, kept for
            comparison: on top-k values, which are bimodal, mag2 has a third of its error.

Sums are `tree_sum` over the row with zeros in the other class's places, so that all devices agree on every bit. Rows
whose largest magnitude is below 2^-100 become zeros in the scaled formats. Only the first `count` values of a row are
real; the others, and their codes, are 0 and enter no mean.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .codec import SATURATED, TINY, pad4
from .packing import as_blocks, chunked_tree_sum, pack_bits, tree_sum, unpack_bits
from .ranges import range_factor

__all__ = ["VALUE_CODECS", "code_nbytes", "decode_values", "encode_values", "scale_nbytes"]

VALUE_CODECS = ("f32", "bf16", "mag2", "sign1", "int8", "int4", "bins4")

BF16_MAX = 3.3895313892515355e38
_BITS = {"f32": 32, "bf16": 16, "mag2": 2, "sign1": 1, "int8": 8, "int4": 4, "bins4": 2}
_SCALE_BYTES = {"f32": 0, "bf16": 0, "mag2": 4, "sign1": 2, "int8": 4, "int4": 4, "bins4": 0}
_MAX_CODE = {"int8": 127, "int4": 7}


def scale_nbytes(value: str, rows: int) -> int:
    """Bytes of the scales of `rows` rows, padded to 4."""
    return pad4(rows * _SCALE_BYTES[value]) + (16 if value == "bins4" and rows else 0)


def code_nbytes(value: str, k: int, rows: int) -> int:
    """Bytes of the codes of `rows` rows of k values: one stream over all rows, padded to 4."""
    return pad4((rows * k * _BITS[value] + 7) // 8)


def encode_values(value: str, values: Tensor, counts: Tensor, iterations: int) -> tuple[Tensor, Tensor, int]:
    """Encode (rows, k) float32 values, of which counts[i] are real in row i; the others must be 0.

    Returns:
        The scales and the codes, uint8, and SATURATED or 0.
    """
    if value == "f32":
        return values.new_zeros(0, dtype=torch.uint8), _as_bytes(values), 0
    if value == "bf16":
        rounded, flags = _to_bf16(values)
        return values.new_zeros(0, dtype=torch.uint8), _padded(_as_bytes(rounded)), flags
    values = values.masked_fill(values.abs().amax(1, keepdim=True) < TINY, 0.0)
    if value == "mag2":
        scales, codes, flags = _encode_mag2(values, counts, iterations)
    elif value == "sign1":
        factor = range_factor(values.abs().amax(1))
        scales, flags = _to_bf16(_row_sum(values.abs() * factor.unsqueeze(1)) / counts / factor)
        codes = (values < 0).to(torch.int64)
    elif value == "bins4":
        scales, codes, flags = *_encode_bins4(values, counts), 0
    else:
        scales, codes, flags = *_encode_int(values, _MAX_CODE[value]), 0
    return _padded(_as_bytes(scales)), _padded(pack_bits(codes.view(-1), _BITS[value])), flags


def decode_values(value: str, scales: Tensor, codes: Tensor, k: int, rows: int) -> Tensor:
    """Read (rows, k) float32 values back.

    Raises:
        ValueError: a scale or a raw value is not finite, which no encoder writes.
    """
    if value in ("f32", "bf16"):
        raw = codes[: rows * k * _BITS[value] // 8].clone()
        return _finite(raw.view(torch.float32 if value == "f32" else torch.bfloat16).float()).view(rows, k)
    fields = unpack_bits(codes, _BITS[value], rows * k, signed=value in _MAX_CODE).view(rows, k)
    if value == "bins4":
        return _finite(scales.clone().view(torch.float32))[fields]
    raw = scales[: rows * _SCALE_BYTES[value]].clone()
    if value in _MAX_CODE:
        return fields.to(torch.float32) * _finite(raw.view(torch.float32)).unsqueeze(1)
    levels = _finite(raw.view(torch.bfloat16).float()).view(rows, -1)
    magnitudes = levels.gather(1, fields >> 1) if value == "mag2" else levels.expand(rows, k)
    return torch.where(fields & 1 == 1, -magnitudes, magnitudes)


def _encode_mag2(values: Tensor, counts: Tensor, iterations: int) -> tuple[Tensor, Tensor, int]:
    factor = range_factor(values.abs().amax(1, keepdim=True))
    magnitudes = values.abs() * factor
    threshold = _row_sum(magnitudes) / counts
    for _ in range(iterations + 1):
        large = magnitudes > threshold.unsqueeze(1)
        num_large = large.sum(1)
        small_level = _row_sum(magnitudes.masked_fill(large, 0.0)) / (counts - num_large)
        large_level = _row_sum(magnitudes.masked_fill(~large, 0.0)) / num_large
        large_level = torch.where(num_large == 0, small_level, large_level)
        # rounding can put the mean of equal values below them
        small_level = torch.where(num_large == counts, large_level, small_level)
        threshold = (small_level + large_level) * 0.5
    levels, flags = _to_bf16(torch.stack((small_level, large_level), dim=1) / factor)
    return levels, (values < 0).to(torch.int64) | large.to(torch.int64) << 1, flags


def _encode_int(values: Tensor, max_code: int) -> tuple[Tensor, Tensor]:
    absmax = values.abs().amax(1)
    # as a tensor: torch divides scalars by way of a rounded reciprocal
    largest = torch.full_like(absmax, max_code)
    inverse = torch.where(absmax > 0, largest / absmax, 0.0)
    codes = (values * inverse.unsqueeze(1)).round().clamp(-max_code, max_code)
    scale = absmax / largest
    overflows = torch.isinf(scale * max_code)  # only the largest float32 does
    return torch.where(overflows, torch.nextafter(scale, torch.zeros_like(scale)), scale), codes.to(torch.int64)


def _encode_bins4(values: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    real = torch.arange(values.shape[1], device=values.device) < counts.unsqueeze(1)
    num_values = counts.sum()
    factor = range_factor(values.abs().amax())
    values = values * factor
    mean = chunked_tree_sum(values.reshape(-1)) / num_values
    centred = (values - mean).masked_fill(~real, 0.0)
    deviation = (chunked_tree_sum((centred * centred).view(-1)) / (num_values - 1)).sqrt()
    scale = deviation * 6 / 4
    scale = torch.where(torch.isfinite(scale) & (scale > 0), scale, 1.0)
    codes = (centred / scale + 2).round().clamp(0, 3).to(torch.int64)
    levels = [mean + _bin_mean(centred, real & (codes == code)) for code in range(4)]
    return torch.stack(levels) / factor, codes.masked_fill(~real, 0)


def _bin_mean(centred: Tensor, members: Tensor) -> Tensor:
    total = chunked_tree_sum(centred.masked_fill(~members, 0.0).view(-1))
    return torch.where(members.any(), total / members.sum(), 0.0)


def _row_sum(values: Tensor) -> Tensor:
    """`tree_sum` of each row, of its blocks of 4096 first where the row is longer."""
    if values.shape[1] <= 4096:
        return tree_sum(values)
    return torch.stack([tree_sum(tree_sum(as_blocks(row, 4096))) for row in values])


def _to_bf16(values: Tensor) -> tuple[Tensor, int]:
    rounded = values.to(torch.bfloat16)
    if bool(torch.isinf(rounded).any()):
        return rounded.clamp(-BF16_MAX, BF16_MAX), SATURATED
    return rounded, 0


def _finite(values: Tensor) -> Tensor:
    if not bool(torch.isfinite(values).all()):
        raise ValueError("scales and values must be finite but one is NaN or Inf; the body is damaged")
    return values


def _as_bytes(values: Tensor) -> Tensor:
    return values.contiguous().view(-1).view(torch.uint8)


def _padded(section: Tensor) -> Tensor:
    return torch.nn.functional.pad(section, (0, -section.numel() % 4))
