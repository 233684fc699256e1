"""E3M0: 4-bit floats of one sign and three exponent bits.

For every block of B neighbours, with s = max |x| and y = fl(|x| / s):

    c = 0 for y < 2^-7, else k + 7 with k = the power of two nearest to y (ties up), within -6 .. 0
    code = c, plus 8 for a negative x with c > 0         decoded = sign * 2^(c-7) * s, or 0 for c = 0

Stochastic rounding goes up from 2^k with probability (y - 2^k) / 2^k, and from 0 to 2^-6 with probability 2^6 y.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .blocks import (
    BlockCodec,
    as_bytes,
    check_block,
    check_choice,
    divide,
    from_bytes,
    pow2_scale_up,
    rounding_arguments,
)
from .codec import TINY
from .packing import as_blocks
from .qsgd import stochastic_octave

__all__ = ["E3M0"]


@dataclass(frozen=True)
class E3M0(BlockCodec):
    """Sign and power of two of every element, relative to the largest of its block: 4 + 32/block bits per element.

    Its error, 3.8 % of the energy of Gaussian data, hardly depends on the distribution or on the block size: worse than
    `Int4` on well-behaved data in small blocks, much better on heavy tails and in large blocks.

    Guarantees (nearest): an element with y >= 2^-6 is off by at most a third of itself, and none grows in error beyond
    its own magnitude; delta >= 8/9 - B 2^-14, with "pow2" 3/4 - B 2^-12 (maxima above 2^127 are halved); encoding a
    decoded vector again changes nothing. Stochastic: unbiased, omega <= 1/8 + B 2^-14.

    Args:
        block: elements that share a scale. With 4096 the scales cost next to nothing.
        rounding: "nearest" or "stochastic".
        scale: "f32", or "pow2": one byte per block, the maximum rounded up to a power of two.
        seed: of the stochastic rounding. Ranks draw different noise from the same seed.

    Raises:
        ValueError: a setting outside the above.

    Example:
        >>> codec = E3M0(block=8)
        >>> x = torch.tensor([1, -2, 0.5, 4, -0.25, 0, 3, -1])
        >>> body = torch.empty(codec.nbytes(8), dtype=torch.uint8)
        >>> codec.encode(x, body)
        0
        >>> out = torch.empty(8)
        >>> codec.decode(body, out)
        >>> out.tolist()
        [1.0, -2.0, 0.5, 4.0, -0.25, 0.0, 4.0, -1.0]

    Source: the format in which Streaming DiLoCo sends outer gradients (arXiv 2501.18512). The paper gives neither
    scale, bias, rounding nor zero; those are chosen here.
    """

    block: int = 256
    rounding: str = "nearest"
    scale: str = "f32"
    seed: int = 0

    id = 0x3A
    bits = 4
    _encode_kernel = ("lc_e3m0_encode", "pipfplliiuwwpi")
    _decode_kernel = ("lc_e3m0_decode", "pllipifi")
    _cuda_kernels = "e3m0"

    def __post_init__(self) -> None:
        check_block(self.block)
        check_choice("rounding", self.rounding, ("nearest", "stochastic"))
        check_choice("scale", self.scale, ("f32", "pow2"))

    @property
    def unbiased(self) -> bool:
        return self.rounding == "stochastic"

    @property
    def scale_bytes(self) -> int:
        return 1 if self.scale == "pow2" else 4

    def _format(self) -> tuple[int, ...]:
        return (self.scale == "pow2",)

    def _rounding(self, step: int, rank: int, bucket: int) -> tuple[int, ...]:
        return rounding_arguments(self.rounding, self.seed, step, rank, bucket)

    def _quantize(self, values: Tensor, u: Tensor | None) -> tuple[Tensor, Tensor, int]:
        blocks = as_blocks(values, self.block)
        absmax = blocks.abs().amax(1)
        scale = absmax.masked_fill(absmax < TINY, 0.0)
        stored = as_bytes(scale)
        if self.scale == "pow2":
            scale = pow2_scale_up(scale, 1.0)
            stored = (scale.view(torch.int32) >> 23).to(torch.uint8)
        used = torch.where(scale > 0, scale, torch.inf).unsqueeze(1).expand_as(blocks)
        y = divide(blocks.abs(), used).view(-1)[: values.numel()]
        codes = _nearest(y) if u is None else stochastic_octave(y, u, 7)
        return stored, torch.where(torch.signbit(values) & (codes > 0), codes + 8, codes), 0

    def _dequantize(self, scales: Tensor, codes: Tensor) -> Tensor:
        if self.scale == "pow2":
            scale = (scales.to(torch.int32) << 23).view(torch.float32)
        else:
            scale = from_bytes(scales, torch.float32)
        sizes = torch.tensor([0.0] + [2.0 ** (c - 7) for c in range(1, 8)], device=codes.device)
        values = torch.cat((sizes, -sizes))[codes]
        return (as_blocks(values, self.block) * scale.unsqueeze(1)).view(-1)[: codes.numel()]

    def delta(self, n: int) -> float | None:
        size = max(1, min(self.block, n))
        # a maximum above 2^127, the largest power, is off by up to a half of itself
        error = 1 / 9 + size * 2.0**-14 if self.scale == "f32" else 1 / 4 + size * 2.0**-12
        return 1 - error if not self.unbiased and error < 1 else None

    def omega(self, n: int) -> float | None:
        size = max(1, min(self.block, n))
        return 1 / 8 + size * (2.0**-14 if self.scale == "f32" else 2.0**-12) if self.unbiased else None


def _nearest(y: Tensor) -> Tensor:
    octave = ((y.view(torch.int32) + 0x00400000) >> 23) - 127
    return torch.where(y < 2.0**-7, 0, octave.clamp(-6, 0) + 7)
