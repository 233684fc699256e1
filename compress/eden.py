"""DRIVE and EDEN: rotate at random, then send one to four bits per coordinate.

    y = H(D x) / sqrt(P)        D: random signs, H: Walsh-Hadamard matrix, P: size of a block
    z = y sqrt(P) / ||y||       close to N(0, 1) in every coordinate, whatever x was
    c = nearest of the 2^bits Lloyd-Max levels of N(0, 1) to z
    C(x) = D H(S c) / sqrt(P)   with one scale S per block

The rotation spreads every element over the block, so the error hardly depends on the distribution of x.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from . import launches
from .codec import SATURATED, TINY, Codec, check_decode, check_encode, check_feedback, pad4
from .kernels import dtype_code, kernel, runs_on_kernels, threads
from .launches import Launcher, Sink, Source
from .packing import as_blocks, pack_bits, tree_sum, unpack_bits
from .philox import bucket_seed, rademacher
from .ranges import LARGE, exact_sqrt, finite_part, range_factor
from .sketch import hadamard

__all__ = ["Eden"]

# Positive Lloyd-Max levels of N(0, 1) for 1, 2, 3 and 4 bits, ascending
_LEVELS: dict[int, tuple[float, ...]] = {
    1: (0.7978845608,),
    2: (0.4527800346, 1.5104176085),
    3: (0.2450941789, 0.7560052812, 1.3439092785, 2.1519457045),
    4: (
        *(0.1283950299, 0.3880482995, 0.6567591185, 0.9423404565),
        *(1.2562311973, 1.6180463860, 2.0690172265, 2.7325895710),
    ),
}
_DISTORTION = {1: 0.36338, 2: 0.11748, 3: 0.03455, 4: 0.00950}
_MODES = {"biased": 0, "unbiased": 1, "matched": 2}  # as in eden.cpp
_MAX_SCALE = 2.0**100  # so that no sum of the inverse rotation overflows
_ROWS = 2**20  # elements the torch path rotates at a time


@dataclass(frozen=True)
class Eden(Codec):
    """Random rotation and Lloyd-Max quantization to 1, 2, 3 or 4 bits; one bit is DRIVE.

    | mode | scale S | property, exactly for every x |
    |---|---|---|
    | "biased" | <c, y> / ||c||^2 | least error: ||x - C(x)||^2 = ||x||^2 - ||C(x)||^2 |
    | "unbiased" | ||y||^2 / <c, y> | <x, C(x)> = ||x||^2; E C(x) = x over the rotation |
    | "matched" | ||y|| / ||c|| | ||C(x)|| = ||x|| |

    Expected error ||x - C(x)||^2 / ||x||^2 for any x that is not tiny or sparse, with D = 0.363, 0.117, 0.0345, 0.0095
    for 1 to 4 bits: biased D, unbiased D / (1 - D), that is 0.571, 0.133, 0.0358, 0.0096.

    Use "biased" with error feedback: it is contractive, in the worst case by delta = 1/P for one bit and
    (least level / greatest level)^2 / P for more. Its signs D are the same on all ranks. Use "unbiased" without: every
    rank and round has a rotation of its own, so the error of a mean over N ranks shrinks as 1/N.

    `bits` + 32/P bits per element. Body: one float32 scale per block, then `bits` bits for each coordinate (with one
    bit set for y < 0 and decoded +-S; with more, the number of the level in ascending order); each section padded to 4
    bytes. The last block is padded with zeros to a power of two, and all its coordinates are sent. A block whose
    absolute maximum is below 2^-100 is sent as zeros; a scale above 2^100 is sent as 2^100 and flagged as SATURATED.

    Args:
        bits: 1 to 4 (default).
        mode: "biased" (default), "unbiased" or "matched".
        block: P, a power of two from 8 to 65536 (default 4096). For powers of 4 the factor 1/sqrt(P) is exact and
            moved to the scale.
        seed: of the signs. With `step`, `bucket` and, if unbiased, `rank` it determines D, at both ends.

    Raises:
        ValueError: an argument outside these.

    Example:
        >>> x = torch.randn(10000, generator=torch.Generator().manual_seed(0))
        >>> codec = Eden(bits=4)
        >>> body, out = torch.empty(codec.nbytes(10000), dtype=torch.uint8), torch.empty(10000)
        >>> codec.encode(x, body, step=3)
        0
        >>> codec.decode(body, out, step=3)
        >>> bool((x - out).square().sum() < 0.011 * x.square().sum())
        True

    Source: DRIVE arXiv 2105.08339, EDEN arXiv 2108.08842. The papers rotate whole tensors; blocks are our choice.
    """

    bits: int = 4
    mode: Literal["biased", "unbiased", "matched"] = "biased"
    block: int = 4096
    seed: int = 0

    def __post_init__(self) -> None:
        if self.bits not in _LEVELS:
            raise ValueError(f"bits must be 1, 2, 3 or 4 but is: {self.bits}")
        if self.mode not in _MODES:
            raise ValueError(f"mode must be one of {tuple(_MODES)} but is: {self.mode!r}")
        if not 8 <= self.block <= 65536 or self.block & (self.block - 1):
            raise ValueError(f"block must be a power of two from 8 to 65536 but is: {self.block}")
        object.__setattr__(self, "id", 0x40 if self.bits == 1 else 0x41)

    @property
    def unbiased(self) -> bool:
        return self.mode == "unbiased"

    def nbytes(self, n: int) -> int:
        return 4 * -(-n // self.block) + pad4((self._coordinates(n) * self.bits + 7) // 8)

    def encode(self, x: Tensor, out: Tensor, *, step: int = 0, rank: int = 0, bucket: int = 0) -> int:
        check_encode(self, x, out)
        if launches.runs(self, x, out):
            return launches.encode(self, x, out, place=(step, rank, bucket))
        key = self._key(rank, bucket)
        if not runs_on_kernels(x, out):
            return self._encode_torch(x, out, key, step)
        call = kernel("lc_eden_encode", "pippll" + "iiuwi")
        source = (x.data_ptr(), dtype_code(x.dtype), *self._sections(out, x.numel()), x.numel(), self.block)
        return int(call(*source, self.bits, _MODES[self.mode], key, step, threads()))

    def decode(self, body: Tensor, out: Tensor, *, step: int = 0, rank: int = 0, bucket: int = 0) -> None:
        check_decode(self, body, out)
        if launches.runs(self, body, out):
            sink = Sink(out=out.data_ptr())
            return self._launch_decode(launches.launcher(out), body, sink, out.numel(), (step, rank, bucket))
        key = self._key(rank, bucket)
        if not runs_on_kernels(body, out):
            self._decode_torch(body, out, key, step)
            return
        call = kernel("lc_eden_decode", "pppll" + "iuwi")
        target = (*self._sections(body, out.numel()), out.data_ptr(), out.numel(), self.block)
        call(*target, self.bits, key, step, threads())

    def decode_add(
        self, body: Tensor, acc: Tensor, weight: float = 1.0, *, step: int = 0, rank: int = 0, bucket: int = 0
    ) -> None:
        check_decode(self, body, acc)
        if launches.runs(self, body, acc):
            sink = Sink(out=acc.data_ptr(), add=True, weight=weight)
            return self._launch_decode(launches.launcher(acc), body, sink, acc.numel(), (step, rank, bucket))
        if not runs_on_kernels(body, acc):
            super().decode_add(body, acc, weight, step=step, rank=rank, bucket=bucket)
            return
        call = kernel("lc_eden_decode_add", "pppfll" + "iuwi")
        target = (*self._sections(body, acc.numel()), acc.data_ptr(), weight, acc.numel(), self.block)
        call(*target, self.bits, self._key(rank, bucket), step, threads())

    def encode_feedback(
        self,
        x: Tensor,
        residual: Tensor,
        candidate: Tensor,
        out: Tensor,
        *,
        decay: float = 1.0,
        step: int = 0,
        rank: int = 0,
        bucket: int = 0,
    ) -> int:
        check_feedback(self, x, residual, candidate, out)
        if launches.runs(self, x, residual, candidate, out):
            return launches.encode(self, x, out, residual, candidate, decay, (step, rank, bucket))
        if not runs_on_kernels(x, residual, candidate, out):
            return super().encode_feedback(
                x, residual, candidate, out, decay=decay, step=step, rank=rank, bucket=bucket
            )
        call = kernel("lc_eden_feedback", "pppfppll" + "iiuwi")
        buffers = (x.data_ptr(), residual.data_ptr(), candidate.data_ptr(), decay)
        target = (*self._sections(out, x.numel()), x.numel(), self.block)
        return int(call(*buffers, *target, self.bits, _MODES[self.mode], self._key(rank, bucket), step, threads()))

    def delta(self, n: int) -> float | None:
        if self.mode != "biased":
            return None
        levels = _LEVELS[self.bits]
        return (levels[0] / levels[-1]) ** 2 / self.block

    _seeded_decode = True

    @property
    def _on_cuda(self) -> bool:
        return launches.takes_block(self.block, most=4096)

    def _launch_encode(self, on: Launcher, source: Source, out: Tensor, n: int, place: tuple[int, int, int]) -> int:
        step, rank, bucket = place
        job = (n, self.block, self.bits, _MODES[self.mode], self._key(rank, bucket), step)
        return launches.eden(on, source, *self._sections(out, n), *job)

    def _launch_decode(
        self, on: Launcher, body: Tensor, sink: Sink, n: int, place: tuple[int, int, int] = (0, 0, 0)
    ) -> None:
        step, rank, bucket = place
        job = (n, self.block, self.bits, self._key(rank, bucket), step)
        scales, codes = self._sections(body, n)
        launches.eden_decode(on, scales, codes, sink, *job)

    def _key(self, rank: int, bucket: int) -> int:
        own = (rank + 1) << 32 if self.mode == "unbiased" else 0
        return bucket_seed(self.seed + own, bucket)

    def _coordinates(self, n: int) -> int:
        """Coordinates of all blocks, the padding of the last one included."""
        rest = n % self.block
        return n - rest + (1 << (rest - 1).bit_length() if rest else 0)

    def _sections(self, body: Tensor, n: int) -> tuple[int, int]:
        return body.data_ptr(), body.data_ptr() + 4 * -(-n // self.block)

    def _runs(self, n: int) -> list[tuple[int, int, int]]:
        """(first element, coordinates, size of a block) of pieces whose blocks are of one size."""
        whole, step = n - n % self.block, max(self.block, _ROWS)
        runs = [(first, min(step, whole - first), self.block) for first in range(0, whole, step)]
        rest = self._coordinates(n) - whole
        return [*runs, (whole, rest, rest)] if rest else runs

    def _encode_torch(self, x: Tensor, out: Tensor, key: int, step: int) -> int:
        values, flags = finite_part(x)
        total = self._coordinates(x.numel())
        padded = torch.nn.functional.pad(values, (0, total - x.numel()))
        signs = rademacher(total, seed=key, step=step, device=x.device)
        scales, codes = [], []
        for first, count, size in self._runs(x.numel()):
            part = slice(first, first + count)
            scale, code = _quantize(as_blocks(padded[part], size), as_blocks(signs[part], size), self.bits, self.mode)
            scales.append(scale)
            codes.append(code.view(-1))
        if not scales:
            return flags
        scale = torch.cat(scales)
        if bool((scale > _MAX_SCALE).any()):
            flags |= SATURATED
        packed = pack_bits(torch.cat(codes), self.bits)
        out[: 4 * scale.numel()] = scale.clamp(max=_MAX_SCALE).view(torch.uint8)
        section = out[4 * scale.numel() :]
        section[: packed.numel()] = packed
        section[packed.numel() :] = 0
        return flags

    def _decode_torch(self, body: Tensor, out: Tensor, key: int, step: int) -> None:
        n = out.numel()
        total, blocks = self._coordinates(n), -(-n // self.block)
        scales = body[: 4 * blocks].clone().view(torch.float32)
        codes = unpack_bits(body[4 * blocks :], self.bits, total)
        signs = rademacher(total, seed=key, step=step, device=out.device)
        for first, count, size in self._runs(n):
            part, rows = slice(first, first + count), slice(first // self.block, -(-(first + count) // self.block))
            decoded = _dequantize(scales[rows], as_blocks(codes[part], size), self.bits) * as_blocks(signs[part], size)
            # zero blocks are +0 everywhere, whatever their codes
            decoded = torch.where(scales[rows].unsqueeze(1) == 0, 0.0, decoded)
            out[part].copy_(decoded.view(-1)[: n - first])


def levels(bits: int) -> Tensor:
    """All 2^bits levels in ascending order, float32."""
    positive = torch.tensor(_LEVELS[bits], dtype=torch.float64)
    return torch.cat((-positive.flip(0), positive)).to(torch.float32)


def boundaries(bits: int) -> Tensor:
    """The midpoints between neighbouring levels, float32."""
    positive = torch.tensor(_LEVELS[bits], dtype=torch.float64)
    both = torch.cat((-positive.flip(0), positive))
    return ((both[1:] + both[:-1]) / 2).to(torch.float32)


def _split_factor(size: int) -> tuple[float, float]:
    """1/sqrt(P) as (what the elements are multiplied by, what the scale is): exact where P is a power of 4."""
    factor = float(torch.tensor(size**-0.5))
    return (1.0, factor) if size.bit_length() % 2 else (factor, 1.0)


def _quantize(rows: Tensor, signs: Tensor, bits: int, mode: str) -> tuple[Tensor, Tensor]:
    """Scales, (m,) float32, and codes, (m, P), of the blocks `rows`, (m, P). The scales may exceed the maximum."""
    size = rows.shape[1]
    on_elements, on_scale = _split_factor(size)
    absmax = rows.abs().amax(1)
    factor = range_factor(absmax)
    factor[absmax >= LARGE] = 2.0**-100
    y = hadamard(rows * factor.unsqueeze(1) * signs) * on_elements
    energy = tree_sum(y * y) * on_scale**2
    if bits == 1:
        codes = (y < 0).to(torch.int64)
        scale = _scale_of_signs(tree_sum(y.abs()) * on_scale, energy, size, mode)
    else:
        stretch = torch.tensor(size**0.5, device=y.device) / exact_sqrt(energy) * on_scale
        codes = (y * stretch.unsqueeze(1)).unsqueeze(2).gt(boundaries(bits).to(y.device)).sum(2)
        c = levels(bits).to(y.device)[codes]
        scale = _scale_of_levels(tree_sum(c * y) * on_scale, energy, tree_sum(c * c), mode)
    alive = absmax >= TINY
    return torch.where(alive, scale / factor, 0.0), torch.where(alive.unsqueeze(1), codes, 0)


def _scale_of_signs(l1: Tensor, energy: Tensor, size: int, mode: str) -> Tensor:
    """S for one bit, where the levels +-1 stand for c."""
    if mode == "biased":
        return l1 / size
    return energy / l1 if mode == "unbiased" else exact_sqrt(energy / size)


def _scale_of_levels(dot: Tensor, energy: Tensor, norm: Tensor, mode: str) -> Tensor:
    """S from <c, y>, ||y||^2 and ||c||^2."""
    if mode == "biased":
        return dot / norm
    return energy / dot if mode == "unbiased" else exact_sqrt(energy / norm)


def _dequantize(scales: Tensor, codes: Tensor, bits: int) -> Tensor:
    """H(S c) / sqrt(P) of every row."""
    on_elements, on_scale = _split_factor(codes.shape[1])
    c = 1.0 - 2.0 * codes.to(torch.float32) if bits == 1 else levels(bits).to(codes.device)[codes]
    return hadamard((scales * on_scale).unsqueeze(1) * c) * on_elements
