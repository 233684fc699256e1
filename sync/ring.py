"""Algorithm A3: a ring in which the running sum is encoded afresh at every hop.

    reduce    N - 1 hops: rank r sends chunk r - s, adds what arrives to its own chunk r - s - 1, and passes that on
    gather    N - 1 hops: the owner divides, encodes once, and the bytes travel on unchanged; all decode the same bytes

Traffic 2 (N - 1) / N F' as in two phases, over links between neighbours only. But a chunk is encoded N times, so the
error grows with N, where that of two phases shrinks. Here for comparison with systems that work like this, and for
networks that have links between neighbours only. No error feedback.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..compress import Codec
from .exchange import Buffers, Exchange, Shares, finite_flags
from .frames import FAILED, HEADER_BYTES, FrameHeader, parse_frame, write_header
from .peers import FIRST, SECOND, Peers
from .plan import Traffic
from .reduction import Message
from .slices import Partition, slice_bucket

__all__ = ["Ring"]


class Ring:
    """A3 with one codec."""

    name = "ring"

    def __init__(self, codec: Codec, buffers: Buffers, world_size: int) -> None:
        self._codec, self._buffers, self._world_size = codec, buffers, world_size

    def settings(self) -> dict[str, object]:
        return {"codec": self._codec.config, "feedback": repr(None), "algorithm": self.name}

    def codec_id(self) -> int:
        return self._codec.id

    def traffic(self, elements: int, world_size: int) -> Traffic:
        slot = self._partition(elements).slot_bytes(self._codec)
        return Traffic(2 * (world_size - 1) * slot, 2 * (world_size - 1))

    def prepare(self, exchange: Exchange) -> None:
        # What is encoded depends on what arrives: all of it happens in the lane.
        exchange.flags = finite_flags(exchange.flat) if exchange.weight > 0 else 0

    def own(self, exchange: Exchange) -> Tensor:
        raise ValueError('algorithm="ring" encodes sums, never a rank\'s own vector: keep_own=True cannot work with it')

    def communicate(self, exchange: Exchange, peers: Peers, shares: Shares, lengths: Sequence[int]) -> None:
        factor, x = shares.factors[peers.rank], exchange.flat
        if factor == 0.0:
            x.zero_()
        elif factor != 1.0:
            x.mul_(factor)
        if exchange.flags:
            x.masked_fill_(~torch.isfinite(x), 0.0)
        frames = self._buffers.take(self._frame_bytes(x) * (self._world_size + 1), torch.uint8, x.device)
        error = self._reduce(exchange, peers, list(frames.view(self._world_size + 1, -1)), shares.divisor)
        error = self._gather(exchange, peers, list(frames.view(self._world_size + 1, -1)), error)
        if error is not None:
            raise error
        self._buffers.give(frames)
        exchange.result = x

    def _reduce(self, exchange: Exchange, peers: Peers, slots: Sequence[Tensor], divisor: float) -> Exception | None:
        """Hop by hop; at the end slot (rank + 1) holds this rank's finished chunk. Returns what went wrong."""
        world_size, rank, error = self._world_size, peers.rank, None
        outgoing, incoming = slots[-1], slots[(rank + 1) % world_size]
        for hop in range(world_size - 1):
            chunk = (rank - hop) % world_size
            error = error or self._encode(exchange, chunk, outgoing, rank, rank)
            self._mark(exchange, outgoing, error)
            peers.shift(outgoing, incoming, FIRST)
            error = error or self._add(exchange, incoming, (chunk - 1) % world_size, (rank - 1) % world_size)
        own = (rank + 1) % world_size
        start, stop = self._partition(exchange.elements).bounds[own]
        if divisor != 1.0:
            exchange.flat[start:stop].div_(divisor)
        error = error or self._encode(exchange, own, slots[own], rank, world_size + own)
        self._mark(exchange, slots[own], error)
        return error

    def _gather(
        self, exchange: Exchange, peers: Peers, slots: Sequence[Tensor], error: Exception | None
    ) -> Exception | None:
        world_size, rank = self._world_size, peers.rank
        for hop in range(world_size - 1):
            chunk = (rank + 1 - hop) % world_size
            peers.shift(slots[chunk], slots[(chunk - 1) % world_size], SECOND)
        for chunk in range(world_size):
            error = error or self._decode(exchange, slots[chunk], chunk)
        return error

    def _encode(self, exchange: Exchange, chunk: int, frame: Tensor, rank: int, part: int) -> Exception | None:
        start, stop = self._partition(exchange.elements).bounds[chunk]
        length = self._codec.nbytes(stop - start)
        key = {"step": exchange.round, "rank": rank, "bucket": slice_bucket(exchange.bucket, part)}
        frame[HEADER_BYTES + length :].zero_()
        try:
            flags = self._codec.encode(exchange.flat[start:stop], frame[HEADER_BYTES : HEADER_BYTES + length], **key)
        except Exception as error:
            return error
        write_header(frame, FrameHeader(self._codec.id, flags, exchange.round))
        return None

    def _mark(self, exchange: Exchange, frame: Tensor, error: Exception | None) -> None:
        # The ring goes on after an error, so that all ranks come to its end and none waits.
        if error is not None:
            frame.zero_()
            write_header(frame, FrameHeader(self._codec.id, FAILED, exchange.round))

    def _message(self, exchange: Exchange, frame: Tensor, chunk: int, rank: int, part: int) -> tuple[Message, Tensor]:
        start, stop = self._partition(exchange.elements).bounds[chunk]
        length = self._codec.nbytes(stop - start)
        header, body = parse_frame(frame, length, codec=self._codec.id, round=exchange.round, sender=rank)
        exchange.receipt.flags |= header.flags & 0xFF
        bucket = slice_bucket(exchange.bucket, part)
        return Message(self._codec, body, exchange.round, rank, bucket), exchange.flat[start:stop]

    def _add(self, exchange: Exchange, frame: Tensor, chunk: int, sender: int) -> Exception | None:
        try:
            message, part = self._message(exchange, frame, chunk, sender, sender)
            message.add_to(part, 1.0)
        except Exception as error:
            return error
        return None

    def _decode(self, exchange: Exchange, frame: Tensor, chunk: int) -> Exception | None:
        owner = (chunk - 1) % self._world_size
        try:
            message, part = self._message(exchange, frame, chunk, owner, self._world_size + chunk)
            message.decode(part)
        except Exception as error:
            return error
        return None

    def _partition(self, elements: int) -> Partition:
        return Partition(elements, self._world_size, self._codec.block)

    def _frame_bytes(self, x: Tensor) -> int:
        return self._partition(x.numel()).slot_bytes(self._codec)
