"""8-bit floats with a scale per block.

For every block of B neighbours, with a = max |x| and M the largest number of the format:

    s = fl(a / M)      number = the one of the format nearest to fl(x * fl(M / a)), ties to even
    decoded = fl(number * s)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .blocks import BlockCodec, as_bytes, block_scale, check_block, check_choice, divide, from_bytes
from .codec import TINY
from .packing import as_blocks

__all__ = ["Float8"]

_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}
_SMALLEST_STEP = {"e4m3": 2.0**-9, "e5m2": 2.0**-16}
_MANTISSA_BITS = {"e4m3": 3, "e5m2": 2}


@dataclass(frozen=True)
class Float8(BlockCodec):
    """`e4m3` (the fn variant: no infinities, largest 448) or `e5m2` (largest 57344): 8 + 32/block bits per element.

    The error, 6.8e-4 (e4m3) or 2.7e-3 (e5m2) of the energy, depends on neither distribution nor block size: `Int8` has
    a ten times smaller one on well-behaved data.

    Guarantees: elements that are normal in the format after scaling are off by at most 2^-4 (e4m3) or 2^-3 (e5m2) of
    themselves, the others by half the smallest step; delta follows. Encoding a decoded vector again changes nothing.

    Args:
        format: "e4m3" or "e5m2".
        block: elements that share a scale.

    Raises:
        ValueError: a setting outside the above.

    Example:
        >>> codec = Float8("e4m3", block=8)
        >>> x = torch.tensor([1, -2, 0.5, 4, -0.25, 0, 3, -1])
        >>> body = torch.empty(codec.nbytes(8), dtype=torch.uint8)
        >>> codec.encode(x, body)
        0
        >>> out = torch.empty(8)
        >>> codec.decode(body, out)
        >>> out.tolist()[:4]
        [1.0, -2.0, 0.5, 4.0]

    Source: the formats are those of arXiv 2209.05433. Chosen here: blocks over the flat vector instead of rows.
    """

    format: str = "e4m3"
    block: int = 256

    bits = 8
    _encode_kernel = ("lc_float8_encode", "pipfpllipi")
    _decode_kernel = ("lc_float8_decode", "pllipifi")
    _cuda_kernels = "float8"

    def __post_init__(self) -> None:
        check_choice("format", self.format, tuple(_DTYPES))
        check_block(self.block)
        # the number in frames tells the formats apart, so it belongs to the instance
        object.__setattr__(self, "id", 0x38 if self.format == "e4m3" else 0x39)

    def _format(self) -> tuple[int, ...]:
        return (self.format == "e5m2",)

    def _quantize(self, values: Tensor, u: Tensor | None) -> tuple[Tensor, Tensor, int]:
        blocks, largest = as_blocks(values, self.block), _LARGEST[self.format]
        absmax = blocks.abs().amax(1)
        tiny = absmax < TINY
        scale = block_scale(absmax, largest).masked_fill_(tiny, 0.0)
        inverse = divide(largest, absmax).masked_fill_(tiny, 0.0)
        scaled = (blocks * inverse.unsqueeze(1)).clamp_(-largest, largest)
        # not a negative zero in a block of zeros
        scaled.masked_fill_(tiny.unsqueeze(1), 0.0)
        return as_bytes(scale), scaled.view(-1)[: values.numel()].to(_DTYPES[self.format]).view(torch.uint8), 0

    def _dequantize(self, scales: Tensor, codes: Tensor) -> Tensor:
        numbers = codes.to(torch.uint8).view(_DTYPES[self.format]).to(torch.float32)
        scale = from_bytes(scales, torch.float32)
        return (as_blocks(numbers, self.block) * scale.unsqueeze(1)).view(-1)[: codes.numel()]

    def delta(self, n: int) -> float | None:
        relative = 2.0 ** -(_MANTISSA_BITS[self.format] + 1)
        absolute = _SMALLEST_STEP[self.format] / 2 / _LARGEST[self.format]  # of the block's maximum
        return 1 - relative**2 - max(1, min(self.block, n)) * absolute**2
