"""What one exchange cost and what it found."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

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
        header_bytes: of those sent, the agreement messages before and after, and what rules and statistics share.
        sent, received: the same bytes by phase: "agreement"; "first" (messages), "second" (encoded sums) or "sum" (what
            the backend's all-reduce sums); "scalars".
        encode_ms: feedback and encoding, in the thread that called `start`.
        wire_ms: waiting for the network, in the thread that drives the exchange.
        decode_ms: decoding, summing and encoding the sum, in the thread that drives the exchange.
        blocked_ms: time the caller spent inside `wait`.
        flags: OR over all ranks of HAS_NAN, HAS_INF and SATURATED.
        skipped: the round was dropped because of non-finite values (`nonfinite="skip"`); the result is zero.
        island_bytes: bytes this rank sent inside its island, which are not in `bytes_sent`.
        density: share of elements of the result that are not zero; this and all that follow but `failure` with
            `statistics=True` only.
        residual_norm: Euclidean norm of this rank's residual after the exchange; None without a residual.
        norm: of this rank's vector.
        cosine: of the angle between this rank's vector and the result.
        norm_dispersion: standard deviation of the norms of all ranks' vectors over their mean.
        loss_dispersion: standard deviation of the losses that ranks gave to `start`; None where none did.
        direction_consistency: mean cosine of all pairs of ranks' messages, weighted by their norms; None where weights
            differ, with rules and shared supports.
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
    norm: float | None = None
    norm_dispersion: float | None = None
    loss_dispersion: float | None = None
    direction_consistency: float | None = None
    sent: dict[str, int] = field(default_factory=dict)
    received: dict[str, int] = field(default_factory=dict)

    @classmethod
    def combined(cls, receipts: Sequence[Receipt]) -> Receipt:
        """The account of exchanges that belong together: sums of elements, bytes and times, the last round.

        Norms and density are those of all vectors together; angles and the dispersion of norms are left out.

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
        sent, received = (_added([getattr(r, name) for r in receipts]) for name in ("sent", "received"))
        return replace(
            first,
            round=receipts[-1].round,
            flags=flags,
            skipped=skipped,
            sent=sent,
            received=received,
            norm=_together([r.norm for r in receipts]),
            identical=any(receipt.identical for receipt in receipts),
            residual_norm=_together([r.residual_norm for r in receipts]),
            density=_density(receipts),
            cosine=None,
            norm_dispersion=None,
            direction_consistency=None,
            **sums,
        )

    @property
    def payload_bytes(self) -> int:
        """Bytes sent without the agreement messages: the traffic formula of the algorithm."""
        return self.bytes_sent - self.header_bytes

    def count(self, sent: Mapping[str, int], received: Mapping[str, int]) -> None:
        """Take over the bytes of all phases."""
        self.sent, self.received = dict(sent), dict(received)
        self.bytes_sent, self.bytes_received = sum(sent.values()), sum(received.values())
        self.header_bytes = sent.get("agreement", 0) + sent.get("scalars", 0)

    def scalars(self, prefix: str = "") -> dict[str, float]:
        """Everything that is a number, by name: what loggers take. Unknown values are left out.

        >>> Receipt(3, 0, "dense", 5, 2, bytes_sent=7).scalars("sync/")["sync/bytes_sent"]
        7.0
        """
        numbers = {f.name: getattr(self, f.name) for f in fields(self)}
        for name in ("sent", "received"):
            numbers |= {f"{name}_{phase}": count for phase, count in numbers.pop(name).items()}
        return {prefix + name: float(v) for name, v in numbers.items() if isinstance(v, int | float)}


def _together(norms: Sequence[float | None]) -> float | None:
    """The norm of vectors behind one another."""
    known = [norm for norm in norms if norm is not None]
    return math.hypot(*known) if known else None


def _density(receipts: Sequence[Receipt]) -> float | None:
    known = [(r.density, r.elements) for r in receipts if r.density is not None]
    total = sum(elements for _, elements in known)
    return sum(density * elements for density, elements in known) / total if total else None


def _added(counts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for count in counts:
        total.update(count)
    return dict(total)
