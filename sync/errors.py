"""What can go wrong in an exchange. Every error leaves the feedback state as it was before the exchange started."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["Aborted", "CorruptFrame", "Disagreement", "NonFinite", "PeerFailure", "PeerTimeout", "SyncError"]


class SyncError(RuntimeError):
    """An exchange failed and nothing of it was committed on this rank."""


class Disagreement(SyncError):
    """The ranks did not start the same exchange: another codec, round, length, bucket or hyper-parameter.

    Attributes:
        name: what differs.
        values: its value on each rank.
    """

    def __init__(self, name: str, values: Sequence[object]) -> None:
        self.name = name
        self.values = list(values)
        listing = ", ".join(f"rank {rank}: {value!r}" for rank, value in enumerate(values))
        super().__init__(f"{name} must be the same on all ranks but is {listing}; nothing was exchanged")


class PeerFailure(SyncError):
    """The connection to some ranks broke. The process group cannot be used any more.

    Attributes:
        ranks: the ranks concerned (ranks of the process group); empty where the backend does not tell.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        self.ranks = tuple(ranks)
        super().__init__(message)


class PeerTimeout(PeerFailure):
    """Some ranks did not take part within the process group's timeout."""


class NonFinite(SyncError):
    """Some ranks offered NaN or infinity.

    Attributes:
        ranks: those ranks.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        self.ranks = tuple(ranks)
        super().__init__(message)


class CorruptFrame(SyncError):
    """A message arrived that this exchange cannot have produced.

    Attributes:
        rank: the sender.
    """

    def __init__(self, message: str, rank: int) -> None:
        self.rank = rank
        super().__init__(message)


class Aborted(SyncError):
    """Some ranks could not take part in this exchange although they are reachable.

    Attributes:
        ranks: those ranks.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        self.ranks = tuple(ranks)
        super().__init__(message)
