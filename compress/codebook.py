"""8-bit codebook quantizers.

Every element of a block becomes the number of its bin, decoded as the mean of the elements in that bin. The bins are

    uniform    q = clamp(rne(fl((x - mean) / w)) + 128, 0, 255), w = 6 sigma / 256, sigma the unbiased deviation
    quantile   between 255 estimated quantiles
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .blocks import BlockCodec, as_bytes, check_block, check_choice, divide, from_bytes
from .codec import TINY
from .packing import chunked_tree_sum
from .ranges import exact_sqrt, range_factor

__all__ = ["Codebook"]

_BINS = 256
_CHUNK = 100_000  # elements whose quantiles are taken at once


@dataclass(frozen=True)
class Codebook(BlockCodec):
    """256 bins and the mean of each: 8 + 8192/block bits per element.

    It is here for comparisons with hivemind and PRIME: `Int8` is faster by far and more exact on most data. "uniform"
    covers three standard deviations; what lies beyond falls into the outermost bins, so there is no bound on a single
    error. "quantile" fills all bins equally and serves data whose shape is unknown. A block of equal elements is exact.
    Runs on torch operations.

    Args:
        method: "uniform" or "quantile".
        block: elements that share a codebook of 1024 bytes.

    Raises:
        ValueError: a setting outside the above.

    Example:
        >>> codec = Codebook("quantile")
        >>> body = torch.empty(codec.nbytes(4), dtype=torch.uint8)
        >>> codec.encode(torch.tensor([1.0, -2.0, 1.0, -2.0]), body)
        0
        >>> out = torch.empty(4)
        >>> codec.decode(body, out)
        >>> out.tolist()
        [1.0, -2.0, 1.0, -2.0]

    Source: hivemind's Uniform8BitQuantization and Quantile8BitQuantization, PRIME's int8 ring (arXiv 2412.01152).
    Chosen here: a codebook per block; sums in one fixed order; quantile k of m sorted numbers is number
    floor(k (m-1) / 256); with more than 100 000 elements, the same of the quantiles of all chunks of that size.
    """

    method: str = "uniform"
    block: int = 2**20

    id = 0x3B
    bits = 8
    scale_bytes = 4 * _BINS

    def __post_init__(self) -> None:
        check_choice("method", self.method, ("uniform", "quantile"))
        check_block(self.block)

    def _quantize(self, values: Tensor, u: Tensor | None) -> tuple[Tensor, Tensor, int]:
        parts = [self._quantize_block(block) for block in values.split(self.block)] if values.numel() else []
        if not parts:
            return as_bytes(values), values.to(torch.uint8), 0
        return as_bytes(torch.cat([table for table, _ in parts])), torch.cat([codes for _, codes in parts]), 0

    def _quantize_block(self, values: Tensor) -> tuple[Tensor, Tensor]:
        absmax = values.abs().amax()
        if float(absmax) < TINY:
            return values.new_zeros(_BINS), torch.zeros_like(values, dtype=torch.int64)
        factor = range_factor(absmax)
        scaled = values * factor
        codes = uniform_codes(scaled, _BINS) if self.method == "uniform" else _quantile_codes(scaled)
        return divide(bin_means(scaled, codes, _BINS), factor.expand(_BINS)), codes

    def _dequantize(self, scales: Tensor, codes: Tensor) -> Tensor:
        tables = from_bytes(scales, torch.float32)
        return tables[codes + torch.arange(codes.numel(), device=codes.device) // self.block * _BINS]


def uniform_codes(values: Tensor, bins: int) -> Tensor:
    """(n,) int64: the bin of every element among `bins` equal ones over six standard deviations around the mean."""
    n = values.numel()
    middle = torch.full((n,), bins // 2, dtype=torch.int64, device=values.device)
    if n == 1:
        return middle
    centered = values - _mean(values)
    variance = divide(chunked_tree_sum(centered * centered), float(n - 1))
    width = exact_sqrt(variance) * 6.0 * (1 / bins)
    if not float(width) > 0:
        return middle
    return (torch.round(divide(centered, width.expand(n))) + bins // 2).clamp_(0, bins - 1).to(torch.int64)


def bin_means(values: Tensor, codes: Tensor, bins: int) -> Tensor:
    """(bins,) mean of the elements of every bin, 0 for an empty one, summed in order of index on any device."""
    order = torch.sort(codes, stable=True).indices
    runs = values[order].split(torch.bincount(codes, minlength=bins).tolist())
    return torch.stack([_mean(run) if run.numel() else values.new_zeros(()) for run in runs])


def _quantile_codes(values: Tensor) -> Tensor:
    chunks = -(-values.numel() // _CHUNK)
    borders = torch.cat([_quantiles(chunk) for chunk in values.tensor_split(chunks)])
    return torch.bucketize(values, _quantiles(borders) if chunks > 1 else borders, right=True)


def _quantiles(values: Tensor) -> Tensor:
    """The 255 inner quantiles, each an element."""
    k = torch.arange(1, _BINS, device=values.device)
    return values.sort().values[k * (values.numel() - 1) // _BINS]


def _mean(values: Tensor) -> Tensor:
    return divide(chunked_tree_sum(values), float(values.numel()))
