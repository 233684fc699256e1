"""Algorithm A1: every rank sends its encoded vector to every rank, each decodes and sums all of them.

    result = sum_r w_r decode(body_r) / sum_r w_r, in rank order (reduction.py)

One step, one lossy encoding, works with every codec. Traffic per rank and direction: (N - 1) F, F the frame length.
The summation order is fixed, so all ranks hold the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ..compress import Codec, Feedback
from .errors import Aborted, PeerFailure
from .exchange import Buffers, Exchange, Shares, Stopwatch, initial_state
from .frames import HEADER_BYTES, frame_bytes, parse_frame, write_header
from .hello import exchange_votes
from .loss_filter import LossFilter
from .peers import FIRST, Peers, sum_of_parts
from .plan import Traffic
from .reduction import Message, Reduction
from .robust import Rule

__all__ = ["AllGather"]


class AllGather:
    """A1 with one codec and an optional feedback rule."""

    name = "all_gather"

    def __init__(self, codec: Codec, feedback: Feedback | None, reduce: str | Rule, buffers: Buffers) -> None:
        self._codec, self._feedback, self._reduce, self._buffers = codec, feedback, reduce, buffers

    def settings(self) -> dict[str, object]:
        return {"codec": self._codec.config, "feedback": repr(self._feedback), "algorithm": self.name}

    def codec_id(self) -> int:
        return self._codec.id

    def traffic(self, elements: int, world_size: int) -> Traffic:
        return Traffic((world_size - 1) * frame_bytes(self._codec.nbytes(elements)), 1)

    def prepare(self, exchange: Exchange) -> None:
        length = self._codec.nbytes(exchange.elements)
        frames = self._buffers.take(frame_bytes(length), torch.uint8, exchange.flat.device)
        frames[HEADER_BYTES + length :].zero_()
        exchange.frames = frames
        encode(self._codec, self._feedback, exchange, frames[HEADER_BYTES : HEADER_BYTES + length])
        write_header(frames, replace(exchange.header, codec=self._codec.id))

    def own(self, exchange: Exchange) -> Tensor:
        assert exchange.frames is not None
        body = exchange.frames[HEADER_BYTES : HEADER_BYTES + self._codec.nbytes(exchange.elements)]
        decoded = torch.empty(exchange.elements, device=exchange.flat.device)
        self._codec.decode(body, decoded, step=exchange.round, rank=exchange.rank, bucket=exchange.bucket)
        return decoded

    def communicate(self, exchange: Exchange, peers: Peers, shares: Shares, lengths: Sequence[int]) -> None:
        assert exchange.frames is not None
        n, device = exchange.elements, exchange.flat.device
        slots = [self._buffers.take(length, torch.uint8, device) for length in lengths]
        arrival = peers.all_gather(exchange.frames, slots, FIRST)
        total = exchange.flat if exchange.candidate is None else self._buffers.take(n, torch.float32, device)
        together = Together(isinstance(self._reduce, LossFilter), peers)
        with arrival, Stopwatch() as watch:
            before = peers.wire_seconds
            reduction = Reduction(self._reduce, shares, total)
            with together:
                for rank in self._order(peers):
                    message = self._message(arrival.slot(rank), rank, exchange)
                    reduction.add(message, shares.factors[rank])
            self._combine(exchange, reduction, peers)
        exchange.receipt.decode_ms += watch.ms - (peers.wire_seconds - before) * 1e3
        self._buffers.give(exchange.frames, *slots)

    def _combine(self, exchange: Exchange, reduction: Reduction, peers: Peers) -> None:
        previous = exchange.owner_base.get("previous")
        total = partial(_over_ranks, peers) if isinstance(self._reduce, LossFilter) else _whole
        exchange.result = reduction.result(total, previous, exchange.round, peers.rank)
        if reduction.memory is not None and exchange.result is not None:
            exchange.owner_candidate = {"previous": reduction.memory}

    def _order(self, peers: Peers) -> Sequence[int]:
        """Rank order. Of two ranks the own message comes first, while the other's travels: a + b is b + a."""
        ranks = range(peers.world_size)
        own_first = peers.world_size == 2 and not isinstance(self._reduce, Rule)
        return ranks[:: -1 if own_first and peers.rank == 1 else 1]

    def _message(self, frame: Tensor, rank: int, exchange: Exchange) -> Message:
        codec = self._codec
        body = parse_frame(frame, codec.nbytes(exchange.elements), codec=codec.id, round=exchange.round, sender=rank)[1]
        return Message(codec, body, exchange.round, rank, exchange.bucket)


def _over_ranks(peers: Peers, part: Tensor) -> Tensor:
    return sum_of_parts(peers, part.to(peers.device)).to(part.device)


def _whole(part: Tensor) -> Tensor:
    return part


def encode(codec: Codec, feedback: Feedback | None, exchange: Exchange, body: Tensor) -> None:
    """Encode the vector of an exchange into `body`; a rank with weight 0 sends zeros and keeps its state."""
    if exchange.weight == 0.0:
        body.zero_()
        exchange.candidate = None if feedback is None else dict(initial_state(feedback, exchange))
        return
    key = {"step": exchange.round, "rank": exchange.rank, "bucket": exchange.bucket}
    if feedback is None:
        exchange.flags = codec.encode(exchange.flat, body, **key)
        return
    state = initial_state(feedback, exchange)
    exchange.flags, exchange.candidate = feedback.encode(codec, exchange.flat, state, body, **key)


class Together:
    """Ranks about to combine numbers check first that all of them got this far, or none would ever answer."""

    def __init__(self, needed: bool, peers: Peers) -> None:
        self._needed, self._peers = needed, peers

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if not self._needed or isinstance(error, PeerFailure):
            return
        votes = exchange_votes(self._peers, error is None)
        failed = [rank for rank, succeeded in enumerate(votes) if not succeeded]
        if failed and error is None:
            raise Aborted(f"ranks {failed} could not decode what they were sent", failed)
