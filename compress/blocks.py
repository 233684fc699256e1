"""What the block quantizers share: choice of kernels, layout of the body, and arithmetic (torch operations) that is
rounded exactly as in the C++ and CUDA kernels.

Body: the scales of all blocks, padded to 4 bytes; one LSB-first stream of codes, padded to 4 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from . import launches
from .codec import Codec, check_decode, check_encode, check_feedback, pad4
from .kernels import dtype_code, kernel, runs_on_kernels, threads
from .launches import Launcher, Sink, Source
from .packing import pack_bits, unpack_bits
from .philox import bucket_seed, noise_stream, uniform
from .ranges import finite_part

MAX_KERNEL_BLOCK = 4096  # larger blocks are encoded by torch operations on every level


@dataclass(frozen=True)
class BlockCodec(Codec):
    """Base of the block quantizers. A subclass has `block` and `bits` (fields or properties) and says how finite values
    become scales and codes, and back; where it names no kernels it runs on torch operations."""

    _encode_kernel: ClassVar[tuple[str, str] | None] = None
    _decode_kernel: ClassVar[tuple[str, str] | None] = None
    _cuda_kernels: ClassVar[str | None] = None  # file in cuda/, and middle of the names lc_..._encode, lc_..._decode

    @property
    def bits(self) -> int:
        """Width of a code."""
        raise NotImplementedError

    @property
    def scale_bytes(self) -> int:
        """Bytes in front of the codes for every block."""
        return 4

    def _quantize(self, values: Tensor, u: Tensor | None) -> tuple[Tensor, Tensor, int]:
        """(bytes of the scales, (n,) integer codes, flags) of (n,) finite float32; u: (n,) uniform noise or None."""
        raise NotImplementedError

    def _dequantize(self, scales: Tensor, codes: Tensor) -> Tensor:
        """(n,) float32 from the bytes of the scales and (n,) int64 codes without sign extension."""
        raise NotImplementedError

    @property
    def _on_cuda(self) -> bool:
        return self._cuda_kernels is not None and self.bits in (2, 4, 8) and launches.takes_block(self.block, most=4096)

    def _launch_encode(self, on: Launcher, source: Source, out: Tensor, n: int, place: tuple[int, int, int]) -> int:
        assert self._cuda_kernels is not None
        settings = (*self._format(), *self._rounding(*place))
        body = out.data_ptr(), self._codes_at(n)
        return launches.blocks(on, self._cuda_kernels, source, n, self.block, settings, *body)

    def _launch_decode(self, on: Launcher, body: Tensor, sink: Sink, n: int) -> None:
        assert self._cuda_kernels is not None
        rest = (n, self.block, *self._format(), self._codes_at(n))
        launches.blocks_decode(on, self._cuda_kernels, body.data_ptr(), sink, rest)

    def _format(self) -> tuple[int, ...]:
        """The settings that the kernels need to read a body."""
        return ()

    def _rounding(self, step: int, rank: int, bucket: int) -> tuple[int, ...]:
        """(whether rounding is stochastic, seed, stream, step): nothing for a codec that only rounds to nearest."""
        return ()

    def nbytes(self, n: int) -> int:
        return self._codes_at(n) + pad4((n * self.bits + 7) // 8)

    def _codes_at(self, n: int) -> int:
        return pad4(-(-n // self.block) * self.scale_bytes)

    def encode(self, x: Tensor, out: Tensor, *, step: int = 0, rank: int = 0, bucket: int = 0) -> int:
        check_encode(self, x, out)
        if launches.runs(self, x, out):
            return launches.encode(self, x, out, place=(step, rank, bucket))
        if self._encode_kernel and self.block <= MAX_KERNEL_BLOCK and runs_on_kernels(x, out):
            return self._encode_fast(self._encode_kernel, x, None, 1.0, None, out, (step, rank, bucket))
        u, rounding = None, self._rounding(step, rank, bucket)
        if rounding and rounding[0]:
            _, seed, stream, _ = rounding
            u = uniform(x.numel(), seed=seed, stream=stream, step=step, device=x.device)
        values, flags = finite_part(x)
        scales, codes, more_flags = self._quantize(values, u)
        write_sections(out, scales, pack_bits(codes, self.bits))
        return flags | more_flags

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
        if self._encode_kernel and self.block <= MAX_KERNEL_BLOCK and runs_on_kernels(x, residual, candidate, out):
            return self._encode_fast(self._encode_kernel, x, residual, decay, candidate, out, (step, rank, bucket))
        return super().encode_feedback(x, residual, candidate, out, decay=decay, step=step, rank=rank, bucket=bucket)

    def _encode_fast(
        self,
        name: tuple[str, str],
        x: Tensor,
        residual: Tensor | None,
        decay: float,
        candidate: Tensor | None,
        out: Tensor,
        place: tuple[int, int, int],
    ) -> int:
        flags = kernel(*name)(
            x.data_ptr(),
            dtype_code(x.dtype),
            None if residual is None else residual.data_ptr(),
            decay,
            None if candidate is None else candidate.data_ptr(),
            x.numel(),
            self.block,
            *self._format(),
            *self._rounding(*place),
            out.data_ptr(),
            threads(),
        )
        return int(flags)

    def decode(self, body: Tensor, out: Tensor, *, step: int = 0, rank: int = 0, bucket: int = 0) -> None:
        check_decode(self, body, out)
        if launches.runs(self, body, out):
            return launches.decode(self, body, out)
        if self._decode_kernel and runs_on_kernels(body, out):
            self._decode_fast(self._decode_kernel, body, out, False, 1.0)
            return
        n = out.numel()
        scales = body[: -(-n // self.block) * self.scale_bytes]
        out.copy_(self._dequantize(scales, unpack_bits(body[self._codes_at(n) :], self.bits, n)))

    def decode_add(
        self, body: Tensor, acc: Tensor, weight: float = 1.0, *, step: int = 0, rank: int = 0, bucket: int = 0
    ) -> None:
        check_decode(self, body, acc)
        if launches.runs(self, body, acc):
            return launches.decode(self, body, acc, weight)
        if self._decode_kernel and runs_on_kernels(body, acc):
            self._decode_fast(self._decode_kernel, body, acc, True, weight)
        else:
            super().decode_add(body, acc, weight, step=step, rank=rank, bucket=bucket)

    def _decode_fast(self, name: tuple[str, str], body: Tensor, out: Tensor, add: bool, weight: float) -> None:
        kernel(*name)(body.data_ptr(), out.numel(), self.block, *self._format(), out.data_ptr(), add, weight, threads())


def check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raise ValueError unless a setting is one of the allowed words."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))} but is: {value!r}")


def check_block(block: int) -> None:
    """Raise ValueError unless a block has an element."""
    if block < 1:
        raise ValueError(f"block must be at least 1 element but is: {block}")


def rounding_arguments(rounding: str, seed: int, step: int, rank: int, bucket: int) -> tuple[int, ...]:
    """`_rounding` of a codec that can round stochastically."""
    return rounding == "stochastic", bucket_seed(seed, bucket), noise_stream(rank), step


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
