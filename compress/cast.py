"""Cast: floating-point numbers of 32 or 16 bits, without scales."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import launches
from .codec import HAS_INF, HAS_NAN, SATURATED, Codec, check_decode, check_encode, check_feedback, nonfinite_flags, pad4
from .launches import Launcher, Sink, Source

__all__ = ["Cast"]

_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_KINDS = {"f32": 0, "bf16": 1, "fp16": 2}  # as in cast.cu
_IDS = {"f32": 0x00, "fp16": 0x01, "bf16": 0x02}


@dataclass(frozen=True)
class Cast(Codec):
    """Every element rounded to nearest even in a narrower format, C(x) = fl_format(x): 32 or 16 bits per element.

    "f32" is exact. "bf16" keeps the range of float32 with a relative error of at most 2^-9, "fp16" is finer (2^-12) but
    ends at 65504. Finite elements beyond the largest number become that number and are flagged as SATURATED.

    Args:
        format: "f32", "bf16" or "fp16".

    Raises:
        ValueError: another format.

    Example:
        >>> codec = Cast("bf16")
        >>> body = torch.empty(codec.nbytes(2), dtype=torch.uint8)
        >>> codec.encode(torch.tensor([1.0, -2.5]), body)
        0
        >>> out = torch.empty(2)
        >>> codec.decode(body, out)
        >>> out
        tensor([ 1.0000, -2.5000])
    """

    format: str = "bf16"

    def __post_init__(self) -> None:
        if self.format not in _DTYPES:
            raise ValueError(f"format must be one of {sorted(_DTYPES)} but is: {self.format!r}")
        # the number in frames tells the formats apart, so it belongs to the instance
        object.__setattr__(self, "id", _IDS[self.format])

    @property
    def _dtype(self) -> torch.dtype:
        return _DTYPES[self.format]

    def nbytes(self, n: int) -> int:
        return pad4(n * self._dtype.itemsize)

    def encode(self, x: Tensor, out: Tensor, *, step: int = 0, rank: int = 0, bucket: int = 0) -> int:
        check_encode(self, x, out)
        n, flags, values = x.numel(), 0, x
        if n == 0:
            return 0
        if launches.runs(self, x, out):
            return launches.encode(self, x, out)
        low, high = torch.aminmax(x)
        largest = torch.finfo(self._dtype).max
        if not (-largest <= float(low) and float(high) <= largest):  # also when either is NaN
            values, flags = self._within_range(x, largest)
        length = n * self._dtype.itemsize
        target = _as(out[:length], self._dtype)
        target.copy_(values)
        if target.data_ptr() != out.data_ptr():
            out[:length] = target.view(torch.uint8)
        out[length:] = 0
        return flags

    def _within_range(self, x: Tensor, largest: float) -> tuple[Tensor, int]:
        flags = nonfinite_flags(x)
        values = x.to(torch.float32)
        values = torch.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0) if flags & (HAS_NAN | HAS_INF) else values
        clipped = values.clamp(-largest, largest)
        return clipped, flags | (0 if torch.equal(clipped, values) else SATURATED)

    def decode(self, body: Tensor, out: Tensor, *, step: int = 0, rank: int = 0, bucket: int = 0) -> None:
        check_decode(self, body, out)
        if launches.runs(self, body, out):
            return launches.decode(self, body, out)
        out.copy_(_as(body[: out.numel() * self._dtype.itemsize], self._dtype))

    def decode_add(
        self, body: Tensor, acc: Tensor, weight: float = 1.0, *, step: int = 0, rank: int = 0, bucket: int = 0
    ) -> None:
        check_decode(self, body, acc)
        if launches.runs(self, body, acc):
            return launches.decode(self, body, acc, weight)
        values = _as(body[: acc.numel() * self._dtype.itemsize], self._dtype)
        acc.add_(values if weight == 1.0 else values.to(torch.float32).mul(weight))

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
            return launches.encode(self, x, out, residual, candidate, decay)
        return super().encode_feedback(x, residual, candidate, out, decay=decay)

    @property
    def _on_cuda(self) -> bool:
        return True

    def _launch_encode(self, on: Launcher, source: Source, out: Tensor, n: int, place: tuple[int, int, int]) -> int:
        return launches.cast(on, source, n, _KINDS[self.format], out.data_ptr())

    def _launch_decode(self, on: Launcher, body: Tensor, sink: Sink, n: int) -> None:
        launches.cast_decode(on, body.data_ptr(), sink, n, _KINDS[self.format])

    def delta(self, n: int) -> float | None:
        """1 for "f32"; elements that are normal in the narrow format are off by at most 2^-9 or 2^-12 of themselves."""
        return 1.0 if self.format == "f32" else None


def _as(data: Tensor, dtype: torch.dtype) -> Tensor:
    """The bytes as a vector of `dtype`: a view where the address allows, else a copy."""
    aligned = data.storage_offset() % dtype.itemsize == 0 and data.data_ptr() % dtype.itemsize == 0
    return (data if aligned else data.clone()).view(dtype)
