"""Algorithm A2: each rank owns one slice, sums it for everybody, and sends the encoded sum back to everybody.

    phase 1   encode x slice by slice; slice r travels to rank r
    reduce    the owner sums the N decoded messages in rank order, then one division (reduction.py)
    phase 2   the owner encodes acc (plus its own residual) and sends it to all; all decode the same bytes

Two steps, two lossy encodings. Traffic per rank and direction: 2 (N - 1) / N F', F' the length of all N slice frames.
The owner too takes its slice from the bytes: were it to keep its exact sum, ranks would drift apart by one quantum a
round.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ..compress import EF14, Codec, Feedback
from .errors import PeerFailure
from .exchange import Buffers, Exchange, Shares, Stopwatch
from .frames import ABSENT, FAILED, HEADER_BYTES, FrameHeader, parse_frame, write_header
from .gather import Together, encode
from .peers import FIRST, SECOND, Arrival, Peers, sum_of_parts
from .plan import Traffic
from .reduction import Message, Reduction
from .robust import Rule
from .slices import Partition, SlicedCodec, common_block, slice_bucket

__all__ = ["TwoPhase"]


class TwoPhase:
    """A2: `first` codes what ranks send to owners, `second` what owners send to all."""

    name = "two_phase"

    def __init__(
        self,
        first: Codec,
        second: Codec,
        feedback: Feedback | None,
        reduce: str | Rule,
        buffers: Buffers,
        world_size: int,
    ) -> None:
        self._first, self._second, self._feedback = first, second, feedback
        self._reduce, self._buffers, self._world_size = reduce, buffers, world_size

    def settings(self) -> dict[str, object]:
        return {
            "codec": self._first.config,
            "second codec": self._second.config,
            "feedback": repr(self._feedback),
            "algorithm": self.name,
        }

    def codec_id(self) -> int:
        return self._first.id

    def partition(self, elements: int) -> Partition:
        """Which rank owns what of a vector."""
        return Partition(elements, self._world_size, common_block(self._first, self._second))

    def traffic(self, elements: int, world_size: int) -> Traffic:
        partition = self.partition(elements)
        slots = partition.slot_bytes(self._first) + partition.slot_bytes(self._second)
        return Traffic((world_size - 1) * slots, 2)

    def prepare(self, exchange: Exchange) -> None:
        sliced = SlicedCodec(self._first, self.partition(exchange.elements))
        frames = self._buffers.take(sliced.nbytes(exchange.elements), torch.uint8, exchange.flat.device)
        exchange.frames = frames
        sliced.clear_padding(frames)
        encode(sliced, self._feedback, exchange, frames)
        for slot in self._slots(frames):
            write_header(slot, replace(exchange.header, codec=self._first.id))

    def own(self, exchange: Exchange) -> Tensor:
        assert exchange.frames is not None
        sliced = SlicedCodec(self._first, self.partition(exchange.elements))
        decoded = torch.empty(exchange.elements, device=exchange.flat.device)
        key = {"step": exchange.round, "rank": exchange.rank, "bucket": exchange.bucket}
        sliced.decode(exchange.frames, decoded, **key)
        return decoded

    def communicate(self, exchange: Exchange, peers: Peers, shares: Shares, lengths: Sequence[int]) -> None:
        assert exchange.frames is not None
        incoming = self._buffers.take(exchange.frames.numel(), torch.uint8, exchange.frames.device)
        arrival = peers.all_to_all(self._slots(exchange.frames), self._slots(incoming), FIRST)
        gathered, error = self._own_slice(exchange, arrival, shares, peers)
        second = peers.all_gather(self._slots(gathered)[peers.rank], self._slots(gathered), SECOND)
        with second:
            if error is not None:
                raise error
            exchange.result = self._decode(exchange, second)
        self._buffers.give(exchange.frames, incoming, gathered)

    def _own_slice(
        self, exchange: Exchange, arrival: Arrival, shares: Shares, peers: Peers
    ) -> tuple[Tensor, Exception | None]:
        """(buffer for all phase-2 frames with this owner's frame in it, what went wrong)"""
        length = self._world_size * self.partition(exchange.elements).slot_bytes(self._second)
        gathered = self._buffers.take(length, torch.uint8, exchange.flat.device)
        slot = self._slots(gathered)[peers.rank]
        start = time.perf_counter() - peers.wire_seconds
        try:
            total = self._reduce_own_slice(exchange, arrival, shares, peers)
            self._encode_own_slice(exchange, total, slot, peers.rank)
        except PeerFailure:
            raise
        except Exception as error:
            # The others wait for this slice: tell them.
            slot.zero_()
            write_header(slot, FrameHeader(self._second.id, FAILED, exchange.round))
            return gathered, error
        exchange.receipt.decode_ms += (time.perf_counter() - peers.wire_seconds - start) * 1e3
        return gathered, None

    def _decode(self, exchange: Exchange, second: Arrival) -> Tensor | None:
        n, device = exchange.elements, exchange.flat.device
        result = exchange.flat if exchange.candidate is None else self._buffers.take(n, torch.float32, device)
        skipped = False
        for rank in range(self._world_size):
            frame = second.slot(rank)
            with Stopwatch() as watch:
                skipped |= bool(self._decode_slice(exchange, frame, rank, result) & ABSENT)
            exchange.receipt.decode_ms += watch.ms
        return None if skipped else result

    def _slots(self, frames: Tensor) -> list[Tensor]:
        return list(frames.view(self._world_size, -1))

    def _reduce_own_slice(self, exchange: Exchange, arrival: Arrival, shares: Shares, peers: Peers) -> Tensor | None:
        start, stop = self.partition(exchange.elements).bounds[peers.rank]
        length, key, codec = self._first.nbytes(stop - start), slice_bucket(exchange.bucket, peers.rank), self._first
        total = self._buffers.take(stop - start, torch.float32, exchange.flat.device)
        needs_totals = isinstance(self._reduce, Rule) and self._reduce.needs_totals
        with arrival, Together(needs_totals, peers):
            reduction = Reduction(self._reduce, shares, total)
            for rank, factor in enumerate(shares.factors):
                frame = arrival.slot(rank)
                body = parse_frame(frame, length, codec=codec.id, round=exchange.round, sender=rank)[1]
                reduction.add(Message(codec, body, exchange.round, rank, key), factor)
        together = partial(sum_of_parts, peers)
        result = reduction.result(together, exchange.owner_base.get("owner_previous"), exchange.round)
        if reduction.memory is not None and result is not None:
            exchange.owner_candidate["owner_previous"] = reduction.memory
        return result

    def _encode_own_slice(self, exchange: Exchange, total: Tensor | None, slot: Tensor, owner: int) -> None:
        start, stop = self.partition(exchange.elements).bounds[owner]
        length = self._second.nbytes(stop - start)
        if total is None:  # the rule skips the round; all owners say so
            slot.zero_()
            write_header(slot, FrameHeader(self._second.id, ABSENT, exchange.round))
            return
        slot[HEADER_BYTES + length :].zero_()
        flags = self._encode_total(exchange, total, slot[HEADER_BYTES : HEADER_BYTES + length], owner)
        write_header(slot, FrameHeader(self._second.id, flags, exchange.round))

    def _encode_total(self, exchange: Exchange, total: Tensor, body: Tensor, owner: int) -> int:
        # Another stream than the owner's phase 1, or both roundings of its slice would use the same noise.
        bucket = slice_bucket(exchange.bucket, self._world_size + owner)
        key = {"step": exchange.round, "rank": owner, "bucket": bucket}
        if self._feedback is None:
            flags = self._second.encode(total, body, **key)
            self._buffers.give(total)
            return flags
        residual = exchange.owner_base.get("owner_residual")
        if residual is None or residual.numel() != total.numel():
            residual = torch.zeros_like(total)
        flags, state = EF14().encode(self._second, total, {"residual": residual}, body, **key)
        exchange.owner_candidate["owner_residual"] = state["residual"]
        return flags

    def _decode_slice(self, exchange: Exchange, frame: Tensor, owner: int, result: Tensor) -> int:
        """Decode one owner's slice into the result; returns its flags."""
        start, stop = self.partition(exchange.elements).bounds[owner]
        length, codec = self._second.nbytes(stop - start), self._second
        header, body = parse_frame(frame, length, codec=codec.id, round=exchange.round, sender=owner)
        if not header.flags & ABSENT:
            exchange.receipt.flags |= header.flags & 0xFF
            bucket = slice_bucket(exchange.bucket, self._world_size + owner)
            Message(codec, body, exchange.round, owner, bucket).decode(result[start:stop])
        return header.flags
