"""What one exchange cost and what it found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

__all__ = ["Receipt"]

_SUMMED = (
    "elements",
    "bytes_sent",
    "bytes_received",
    "header_bytes",
    "island_bytes",
    "encode_ms",
    "wire_ms",
    "decode_ms",
    "blocked_ms",
)


@dataclass
class Receipt:
    """The account of one exchange on this rank.

    Bytes are those handed to the transport, counted where they are handed over. A dense all-reduce is counted as the
    ring that backends run: 2 (N - 1) / N of the vector in each direction.

    Attributes:
        round: the round number given to `start`.
        bucket: the bucket given to `start`.
        algorithm: "dense", "all_gather" or "two_phase"; "none" when every rank was optional, so nothing was sent.
        elements: length of the vector.
        world_size: ranks in the process group, N.
        contributors: ranks whose weight was not zero.
        weight_total: sum of all weights.
        bytes_sent: all bytes this rank sent, agreement messages and frame headers included.
        bytes_received: all bytes this rank received.
        header_bytes: of those, the agreement messages before and after (the same number in each direction).
        encode_ms: feedback and encoding, in the thread that called `start`.
        wire_ms: waiting for the network, in the thread that drives the exchange.
        decode_ms: decoding, summing and encoding the sum, in the thread that drives the exchange.
        blocked_ms: time the caller spent inside `wait`.
        flags: OR over all ranks of HAS_NAN, HAS_INF and SATURATED.
        skipped: the round was dropped because of non-finite values (`nonfinite="skip"`); the result is zero.
        island_bytes: bytes this rank sent inside its island, which are not in `bytes_sent`.
        density: share of elements of the result that are not zero; this and the next two with `statistics=True` only.
        residual_norm: Euclidean norm of this rank's residual after the exchange; None without a residual.
        cosine: of the angle between this rank's vector and the result.
        identical: all ranks offered the very same values; found out in the first exchange of an AllReduce only.
        failure: what went wrong and what was done about it, where the caller's policy let training go on.
    """

    round: int
    bucket: int
    algorithm: str
    elements: int
    world_size: int
    contributors: int = 0
    weight_total: float = 0.0
    bytes_sent: int = 0
    bytes_received: int = 0
    header_bytes: int = 0
    encode_ms: float = 0.0
    wire_ms: float = 0.0
    decode_ms: float = 0.0
    blocked_ms: float = 0.0
    flags: int = 0
    skipped: bool = False
    identical: bool = False
    failure: str = ""
    island_bytes: int = 0
    density: float | None = None
    residual_norm: float | None = None
    cosine: float | None = None

    @classmethod
    def combined(cls, receipts: Sequence[Receipt]) -> Receipt:
        """The account of exchanges that belong together: sums of elements, bytes and times, the last round.

        >>> Receipt.combined([Receipt(1, 0, "dense", 5, 2), Receipt(2, 1, "dense", 6, 2)]).elements
        11
        """
        first = receipts[0]
        if len(receipts) == 1:
            return first
        sums = {name: sum(getattr(receipt, name) for receipt in receipts) for name in _SUMMED}
        flags = 0
        for receipt in receipts:
            flags |= receipt.flags
        skipped = any(receipt.skipped for receipt in receipts)
        identical = any(receipt.identical for receipt in receipts)
        return replace(first, round=receipts[-1].round, flags=flags, skipped=skipped, identical=identical, **sums)

    @property
    def payload_bytes(self) -> int:
        """Bytes sent without the agreement messages: the traffic formula of the algorithm."""
        return self.bytes_sent - self.header_bytes
