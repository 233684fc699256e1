"""Frames: the 16-byte header in front of every codec body, and the checks on arrival.

    offset  type  field
    0       u32   magic, the bytes "LCP1"
    4       u16   codec id
    6       u16   flags: 1 HAS_NAN, 2 HAS_INF, 4 ABSENT, 8 SATURATED, 16 WEIGHTED
    8       u32   round
    12      f32   averaging weight (1.0 unless WEIGHTED)

Little-endian. The body follows, then zeros up to a multiple of 16 bytes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import Aborted, CorruptFrame

__all__ = [
    "ABSENT",
    "FAILED",
    "HEADER_BYTES",
    "MAGIC",
    "WEIGHTED",
    "FrameHeader",
    "frame_bytes",
    "parse_frame",
    "write_header",
]

MAGIC = 0x3150434C
HEADER_BYTES = 16
ABSENT = 4  # the rank takes no part in this round; its body is zeros
WEIGHTED = 16
FAILED = 0x4000  # the sender could not produce the body; it is zeros. Never stored, only sent
_HEADER = struct.Struct("<IHHIf")


@dataclass(frozen=True)
class FrameHeader:
    """The header of one frame.

    >>> FrameHeader(codec=0x31, flags=0, round=7, weight=1.0).pack().hex()
    '4c43503131000000070000000000803f'
    """

    codec: int
    flags: int
    round: int
    weight: float = 1.0

    def pack(self) -> bytes:
        """The 16 bytes. The round counter wraps at 2^32."""
        return _HEADER.pack(MAGIC, self.codec, self.flags, self.round & 0xFFFFFFFF, self.weight)

    @classmethod
    def parse(cls, data: bytes) -> FrameHeader:
        """Read a header from the first 16 bytes of `data`.

        Raises:
            ValueError: fewer than 16 bytes, or another magic.
        """
        if len(data) < HEADER_BYTES:
            raise ValueError(f"a frame header has {HEADER_BYTES} bytes but only {len(data)} are there")
        magic, codec, flags, round_, weight = _HEADER.unpack_from(data)
        if magic != MAGIC:
            raise ValueError(f"a frame starts with the magic {MAGIC:#010x} but found {magic:#010x}")
        return cls(codec, flags, round_, weight)


def frame_bytes(body_bytes: int) -> int:
    """Length of the frame around a body: header, body, padding to 16.

    >>> frame_bytes(0), frame_bytes(1), frame_bytes(16), frame_bytes(17)
    (16, 32, 32, 48)
    """
    return HEADER_BYTES + (body_bytes + 15) // 16 * 16


def write_header(frame: Tensor, header: FrameHeader) -> None:
    """Write `header` into the first 16 bytes of `frame`, a uint8 tensor on any device."""
    frame[:HEADER_BYTES].copy_(torch.frombuffer(bytearray(header.pack()), dtype=torch.uint8))


def parse_frame(frame: Tensor, body_bytes: int, *, codec: int, round: int, sender: int) -> tuple[FrameHeader, Tensor]:
    """Check an incoming frame and return (header, body view).

    Args:
        frame: uint8, at least header and body long.
        body_bytes: length of the body that this exchange expects.
        codec: expected codec id.
        round: expected round.
        sender: rank that sent it, for the message.

    Raises:
        CorruptFrame: truncated, or magic, codec id or round are not those expected.
        Aborted: the sender says that it failed.
    """
    if frame.numel() < HEADER_BYTES + body_bytes:
        raise CorruptFrame(
            f"the frame of rank {sender} has {frame.numel()} bytes but {HEADER_BYTES + body_bytes} were expected",
            sender,
        )
    try:
        header = FrameHeader.parse(bytes(frame[:HEADER_BYTES].tolist()))
    except ValueError as error:
        raise CorruptFrame(f"the frame of rank {sender} is not one: {error}", sender) from None
    if header.codec != codec:
        raise CorruptFrame(
            f"the frame of rank {sender} has codec id {header.codec:#06x} but {codec:#06x} was expected", sender
        )
    if header.round != round & 0xFFFFFFFF:
        raise CorruptFrame(
            f"the frame of rank {sender} belongs to round {header.round} but this is round {round}", sender
        )
    if header.flags & FAILED:
        raise Aborted(f"rank {sender} could not complete its part of the exchange", [sender])
    return header, frame[HEADER_BYTES : HEADER_BYTES + body_bytes]
