"""Block integer quantizers.

Symmetric, with Q = 2^(bits-1) - 1 levels on each side, for every block of B neighbours:

    a = max |x|      s = fl(a / Q)      q = clamp(rne(fl(x * fl(Q / a))), -Q, Q)      decoded = fl(q * s)

Affine, with Qu = 2^bits - 1 steps from the minimum to the maximum of the block:

    r = fl(max - min)      s = fl(r / Qu)      q = clamp(rne(fl(fl(x - min) * fl(Qu / r))), 0, Qu)
    decoded = fl(min + fl(q * s))

Stochastic rounding replaces rne(y) by floor(fl(y + u)) with u uniform in [0, 1). A block with a (or r) below 2^-100 has
scale 0. Body: the scales of all blocks (affine: pairs of minimum and scale), then one LSB-first stream of codes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .blocks import (
    BlockCodec,
    as_bytes,
    bf16_scale_up,
    block_scale,
    check_block,
    check_choice,
    divide,
    from_bytes,
    pow2_scale_up,
    rounding_arguments,
)
from .codec import SATURATED, TINY
from .packing import as_blocks

__all__ = ["Int", "Int2", "Int4", "Int8"]

_SCALE_BYTES = {"f32": 4, "bf16": 2, "pow2": 1}
_SCALE_CODES = {"f32": 0, "bf16": 1, "pow2": 2}
_SCALE_STRETCH = {"f32": 1.0, "bf16": 1 + 2.0**-7, "pow2": 2.0}  # stored scale / exact scale, at most
_IDS = {(8, False): 0x30, (4, False): 0x31, (8, True): 0x32, (4, True): 0x33}
AFFINE_LIMIT = 2.0**126  # larger elements are clipped, so that max - min cannot overflow


@dataclass(frozen=True)
class Int(BlockCodec):
    """Signed integers of any width with one scale per block.

    Symmetric by default; the formulas are at the top of this module. Costs `bits + 32/block` bits per element with
    float32 scales (affine: `bits + 64/block`).

    Guarantees (symmetric): with rounding to nearest every element is off by at most s/2 and never by more than its own
    magnitude, so delta >= max(1/B, 1 - B/(4 Q^2)); encoding a decoded vector again gives the same codes. Stochastic
    rounding is unbiased with omega <= min(B/(4 Q^2), sqrt(B)/Q) and about twice the error of rounding to nearest: use
    it when many ranks are averaged without error feedback. Affine: every element is off by at most
    (max - min)/(2 Qu); zero is not exact.

    Args:
        bits: width of a code, 2 to 16.
        block: elements that share a scale. Blocks of up to 4096 elements are encoded by the C++ kernels; multiples of
            64 with 2, 4 or 8 bits by the fast ones.
        affine: minimum and range instead of the absolute maximum; better for one-sided data. Elements beyond 2^126
            are clipped and flagged as SATURATED.
        rounding: "nearest" (to even) or "stochastic".
        scale: format of the scales of a symmetric codec. "f32"; "bf16", rounded up so that nothing clips; or "pow2",
            one byte, 2^ceil(log2(a/Q)), which makes every decoded value exact.
        seed: of the stochastic rounding. Ranks draw different noise from the same seed.

    Raises:
        ValueError: a setting outside the above.

    Example:
        >>> codec = Int(bits=4, block=8)
        >>> x = torch.tensor([1, -2, 0.5, 4, -0.25, 0, 3, -1])
        >>> body = torch.empty(codec.nbytes(8), dtype=torch.uint8)
        >>> codec.encode(x, body)
        0
        >>> out = torch.empty(8)
        >>> codec.decode(body, out)
        >>> out.mul(7 / 4).round().tolist()
        [2.0, -4.0, 1.0, 7.0, 0.0, 0.0, 5.0, -2.0]

    Source: block absmax quantization as in arXiv 2110.02861. Chosen here: the order of roundings, the handling of tiny
    blocks, and a scale one step lower where Q * s would overflow (a block whose maximum is the largest float).
    """

    bits: int = 8
    block: int = 256
    affine: bool = False
    rounding: str = "nearest"
    scale: str = "f32"
    seed: int = 0

    _encode_kernel = ("lc_int_encode", "pipfplliiiiuwwpi")
    _decode_kernel = ("lc_int_decode", "plliiipifi")
    _cuda_kernels = "int"

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 16:
            raise ValueError(f"bits must be 2 to 16 but is: {self.bits}")
        check_block(self.block)
        check_choice("rounding", self.rounding, ("nearest", "stochastic"))
        check_choice("scale", self.scale, tuple(_SCALE_BYTES))
        if self.affine and self.scale != "f32":
            raise ValueError(f"an affine codec stores float32 scales only but scale is: {self.scale!r}")
        # the number in frames tells the settings apart, so it belongs to the instance
        object.__setattr__(self, "id", _IDS.get((self.bits, self.affine), 0x37 if self.affine else 0x36))

    @property
    def unbiased(self) -> bool:
        return self.rounding == "stochastic"

    @property
    def scale_bytes(self) -> int:
        return 8 if self.affine else _SCALE_BYTES[self.scale]

    @property
    def _levels(self) -> int:
        return (1 << self.bits) - 1 if self.affine else (1 << (self.bits - 1)) - 1

    def _format(self) -> tuple[int, ...]:
        return self.bits, self.affine, _SCALE_CODES[self.scale]

    def _rounding(self, step: int, rank: int, bucket: int) -> tuple[int, ...]:
        return rounding_arguments(self.rounding, self.seed, step, rank, bucket)

    def _quantize(self, values: Tensor, u: Tensor | None) -> tuple[Tensor, Tensor, int]:
        if self.affine:
            return _quantize_affine(values, self.block, self._levels, u)
        return *_quantize_symmetric(values, self.block, self._levels, u, self.scale), 0

    def _dequantize(self, scales: Tensor, codes: Tensor) -> Tensor:
        sign = 0 if self.affine else 1 << (self.bits - 1)
        numbers = as_blocks(((codes ^ sign) - sign).to(torch.float32), self.block)
        if self.affine:
            low, step = from_bytes(scales, torch.float32).view(-1, 2).unsqueeze(2).unbind(1)
            values = low + numbers * step
        else:
            values = numbers * self._read_scales(scales).unsqueeze(1)
        return values.view(-1)[: codes.numel()]

    def _read_scales(self, scales: Tensor) -> Tensor:
        if self.scale == "f32":
            return from_bytes(scales, torch.float32)
        if self.scale == "bf16":
            return from_bytes(scales, torch.bfloat16).to(torch.float32)
        return (scales.to(torch.int32) << 23).view(torch.float32)

    def delta(self, n: int) -> float | None:
        if self.unbiased or self.affine:
            return None
        size = max(1, min(self.block, n))
        error = _SCALE_STRETCH[self.scale] / (2 * self._levels)  # of the largest element, relative
        largest_exact = 1.0 if self.scale == "f32" else 1 - error**2
        return max(largest_exact / size, 1 - size * error**2)

    def omega(self, n: int) -> float | None:
        if not self.unbiased or self.affine:
            return None
        size, step = max(1, min(self.block, n)), _SCALE_STRETCH[self.scale] / self._levels
        return min(size * step**2 / 4, math.sqrt(size) * step)


@dataclass(frozen=True)
class Int8(Int):
    """`Int` with 8 bits: Q = 127, blocks of 256, 8.125 bits per element, relative squared error 4.9e-5 (Gaussian)."""

    bits: int = field(default=8, init=False)
    block: int = 256


@dataclass(frozen=True)
class Int4(Int):
    """`Int` with 4 bits: Q = 7, blocks of 64, 4.5 bits per element, relative squared error 1.2e-2 (Gaussian)."""

    bits: int = field(default=4, init=False)
    block: int = 64


@dataclass(frozen=True)
class Int2(Int):
    """`Int` with 2 bits: Q = 1, so codes are -1, 0 and 1; blocks of 64, 2.5 bits per element.

    The absolute maximum is a poor scale at this width: `Ternary` has a smaller error for fewer bits.
    """

    bits: int = field(default=2, init=False)
    block: int = 64


def _round(y: Tensor, u: Tensor | None, lowest: int, highest: int) -> Tensor:
    rounded = torch.round(y) if u is None else torch.floor(y + u)
    return rounded.clamp_(lowest, highest)


def _quantize_symmetric(
    values: Tensor, block: int, levels: int, u: Tensor | None = None, scale: str = "f32"
) -> tuple[Tensor, Tensor]:
    """(bytes of the scales, (n,) codes) of finite float32 `values`; u: (n,) uniform noise or None."""
    blocks = as_blocks(values, block)
    absmax = blocks.abs().amax(1)
    tiny = absmax < TINY
    step = block_scale(absmax, levels).masked_fill_(tiny, 0.0)
    inverse = divide(levels, absmax).masked_fill_(tiny, 0.0)
    stored = as_bytes(step)
    if scale == "bf16":
        step = bf16_scale_up(step, levels)
        stored = as_bytes(step.to(torch.bfloat16))
    elif scale == "pow2":
        step = pow2_scale_up(step, levels)
        stored = (step.view(torch.int32) >> 23).to(torch.uint8)
    if scale != "f32":
        inverse = divide(1.0, step).masked_fill_(tiny, 0.0)
    noise = None if u is None else as_blocks(u, block)
    codes = _round(blocks * inverse.unsqueeze(1), noise, -levels, levels)
    return stored, codes.view(-1)[: values.numel()]


def _quantize_affine(values: Tensor, block: int, levels: int, u: Tensor | None = None) -> tuple[Tensor, Tensor, int]:
    """(bytes of the pairs (minimum, scale), (n,) codes, flags) of finite float32 `values`; u: (n,) noise or None."""
    n = values.numel()
    if n == 0:
        return as_bytes(values), values, 0
    clipped = values.clamp(-AFFINE_LIMIT, AFFINE_LIMIT)
    flags = 0 if torch.equal(clipped, values) else SATURATED
    # the last block is filled up with its last element, which changes neither minimum nor maximum
    blocks = as_blocks(torch.cat((clipped, clipped[-1:].expand(-n % block))), block)
    low = blocks.amin(1) + 0.0  # turns -0 into +0
    extent = blocks.amax(1) - low
    tiny = extent < TINY
    step = divide(extent, levels).masked_fill_(tiny, 0.0)
    inverse = divide(levels, extent).masked_fill_(tiny, 0.0)
    noise = None if u is None else as_blocks(u, block)
    codes = _round((blocks - low.unsqueeze(1)) * inverse.unsqueeze(1), noise, 0, levels)
    return as_bytes(torch.stack((low, step), dim=1)), codes.view(-1)[:n], flags
