"""Algorithm A5, for linear codecs: their bodies are float vectors, which the backend sums like any other.

    result = decode(mean_r body_r)

One lossy encoding however many ranks there are, 2 (N - 1) / N of the body in each direction, and decoding happens once.
Ranks end with the same bits as long as the backend's all-reduce gives all of them the same, as gloo's and NCCL's do.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..compress import Codec, Feedback
from .dense import reduce_dense
from .exchange import Buffers, Exchange, Shares, Stopwatch, finite_flags
from .gather import encode
from .peers import Peers
from .plan import Traffic, ring_bytes

__all__ = ["Linear"]


class Linear:
    """A5 with one linear codec and an optional feedback rule."""

    name = "linear"

    def __init__(self, codec: Codec, feedback: Feedback | None, buffers: Buffers) -> None:
        self._codec, self._feedback, self._buffers = codec, feedback, buffers

    def settings(self) -> dict[str, object]:
        return {"codec": self._codec.config, "feedback": repr(self._feedback), "algorithm": self.name}

    def codec_id(self) -> int:
        return self._codec.id

    def traffic(self, elements: int, world_size: int) -> Traffic:
        return Traffic(ring_bytes(self._codec.nbytes(elements), world_size), 2 * (world_size - 1))

    def prepare(self, exchange: Exchange) -> None:
        length = self._codec.nbytes(exchange.elements)
        exchange.frames = self._buffers.take(length, torch.uint8, exchange.flat.device)
        encode(self._codec, self._feedback, exchange, exchange.frames)

    def own(self, exchange: Exchange) -> Tensor:
        assert exchange.frames is not None
        decoded = torch.empty(exchange.elements, device=exchange.flat.device)
        self._codec.decode(exchange.frames, decoded, step=exchange.round, rank=exchange.rank, bucket=exchange.bucket)
        return decoded

    def communicate(self, exchange: Exchange, peers: Peers, shares: Shares, lengths: Sequence[int]) -> None:
        body, n, device = exchange.frames, exchange.elements, exchange.flat.device
        assert body is not None
        reduce_dense(body.view(torch.float32), peers, shares)
        with Stopwatch() as watch:
            exchange.receipt.flags |= finite_flags(body.view(torch.float32))
            result = exchange.flat if exchange.candidate is None else self._buffers.take(n, torch.float32, device)
            if not exchange.receipt.flags & 3:
                self._codec.decode(body, result, step=exchange.round, bucket=exchange.bucket)
        exchange.receipt.decode_ms += watch.ms
        exchange.result = result
        self._buffers.give(body)
