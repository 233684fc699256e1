"""Cut a vector into one slice per rank, each encoded on its own, at multiples of the codec's block."""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

from torch import Tensor

from ..compress import Codec
from .frames import HEADER_BYTES, frame_bytes

__all__ = ["Partition", "SlicedCodec", "common_block", "slice_bucket"]


@dataclass(frozen=True)
class Partition:
    """Slice r of an n-vector is [r w, min((r + 1) w, n)) with w = block * ceil(ceil(n / block) / parts).

    The last slices may be short or empty.

    >>> Partition(elements=10, parts=3, block=2).bounds
    ((0, 4), (4, 8), (8, 10))
    """

    elements: int
    parts: int
    block: int = 1

    @property
    def width(self) -> int:
        blocks = -(-self.elements // self.block)
        return self.block * -(-blocks // self.parts)

    @property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        n, width = self.elements, self.width
        return tuple((min(r * width, n), min((r + 1) * width, n)) for r in range(self.parts))

    def slot_bytes(self, codec: Codec) -> int:
        """Frame length of the first slice, the longest: every slot has this size."""
        return frame_bytes(codec.nbytes(min(self.width, self.elements)))


def slice_bucket(bucket: int, part: int) -> int:
    """The bucket number that slices give to the random generator: every slice draws its own noise."""
    return bucket + (part << 32)


@dataclass(frozen=True)
class SlicedCodec(Codec):
    """`codec` applied to every slice of a partition; the body is all slots of the partition, frame headers left blank.

    A feedback rule handles it like any codec, so its kernels run slice by slice and the residual stays one vector.
    """

    codec: Codec
    partition: Partition

    @property
    def unbiased(self) -> bool:
        return self.codec.unbiased

    def nbytes(self, n: int) -> int:
        return self.partition.parts * self.partition.slot_bytes(self.codec)

    def delta(self, n: int) -> float | None:
        return self.codec.delta(n)

    def omega(self, n: int) -> float | None:
        return self.codec.omega(n)

    def bodies(self, out: Tensor) -> list[Tensor]:
        """The body section of every slot."""
        slot = self.partition.slot_bytes(self.codec)
        starts = [part * slot + HEADER_BYTES for part in range(self.partition.parts)]
        lengths = [self.codec.nbytes(stop - start) for start, stop in self.partition.bounds]
        return [out[start : start + length] for start, length in zip(starts, lengths, strict=True)]

    def clear_padding(self, out: Tensor) -> None:
        """Zero what `encode` leaves untouched behind the bodies, so that reused buffers send no stale bytes."""
        slot = self.partition.slot_bytes(self.codec)
        for part, (start, stop) in enumerate(self.partition.bounds):
            out[part * slot + HEADER_BYTES + self.codec.nbytes(stop - start) : (part + 1) * slot].zero_()

    def encode(self, x: Tensor, out: Tensor, *, step: int = 0, rank: int = 0, bucket: int = 0) -> int:
        flags = 0
        for part, ((start, stop), body) in enumerate(zip(self.partition.bounds, self.bodies(out), strict=True)):
            key = slice_bucket(bucket, part)
            flags |= self.codec.encode(x[start:stop], body, step=step, rank=rank, bucket=key)
        return flags

    def decode(self, body: Tensor, out: Tensor, *, step: int = 0, rank: int = 0, bucket: int = 0) -> None:
        for part, ((start, stop), piece) in enumerate(zip(self.partition.bounds, self.bodies(body), strict=True)):
            self.codec.decode(piece, out[start:stop], step=step, rank=rank, bucket=slice_bucket(bucket, part))

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
        flags = 0
        for part, ((start, stop), body) in enumerate(zip(self.partition.bounds, self.bodies(out), strict=True)):
            where, key = slice(start, stop), slice_bucket(bucket, part)
            flags |= self.codec.encode_feedback(
                x[where], residual[where], candidate[where], body, decay=decay, step=step, rank=rank, bucket=key
            )
        return flags


def common_block(first: Codec, second: Codec) -> int:
    """The slice alignment that suits both codecs of a two-phase exchange."""
    return lcm(first.block, second.block)
