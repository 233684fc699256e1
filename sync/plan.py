"""What an exchange will send, before it is started."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Plan", "Traffic", "ring_bytes"]


@dataclass(frozen=True)
class Traffic:
    """Payload that one rank sends, and the messages that must follow one another."""

    payload_bytes: int
    steps: int

    def seconds(self, latency: float, bandwidth: float) -> float:
        """Time on the wire; arguments as in `Plan.seconds`."""
        return self.steps * latency + self.payload_bytes / bandwidth


@dataclass(frozen=True)
class Plan:
    """The exchange that `AllReduce` has chosen for a vector, and its cost for one rank.

    Attributes:
        algorithm: as in receipts.
        elements: length of the vector.
        world_size: N.
        bytes_sent: all bytes that one rank sends, agreement included. Exact, except where it depends on the values
            ("union", codecs of variable size): there it is an upper bound.
        steps: messages that must follow one another, agreement included.
        dense_bytes: what an uncompressed float32 all-reduce would send.

    >>> Plan("two_phase", 1000, 4, bytes_sent=1500, steps=4, dense_bytes=6000).reduction
    4.0
    """

    algorithm: str
    elements: int
    world_size: int
    bytes_sent: int
    steps: int
    dense_bytes: int

    @property
    def reduction(self) -> float:
        """How many times fewer bytes than uncompressed."""
        return self.dense_bytes / self.bytes_sent if self.bytes_sent else 1.0

    def seconds(self, latency: float = 1e-3, bandwidth: float = 125e6) -> float:
        """Time on the wire: steps * latency + bytes / bandwidth.

        Args:
            latency: seconds per message. Default 1 ms.
            bandwidth: bytes per second and rank, each direction. Default 125e6, 1 Gbit/s.
        """
        return self.steps * latency + self.bytes_sent / bandwidth


def ring_bytes(num_bytes: int, world_size: int) -> int:
    """2 (N - 1) / N of a vector of `num_bytes`."""
    return 2 * (world_size - 1) * num_bytes // world_size
