"""What ranks say to one another in one exchange: agree, exchange, confirm.

Every exchange begins with 64 bytes from each rank (hello.py). They settle, before anything large is sent, that all
ranks mean the same exchange, who is missing, whose vector is not finite and how much each counts. It ends with one byte
from each rank: whether it came to the end.
"""

from __future__ import annotations

from collections import Counter

from ..compress import HAS_INF, HAS_NAN
from .dispersion import share_statistics
from .errors import Aborted, PeerFailure
from .exchange import Algorithm, Exchange, Shares
from .hello import (
    ABORTED,
    OPTIONAL,
    SKIPPED,
    UNABLE,
    Hello,
    all_the_same,
    check_able,
    check_agreement,
    combined_flags,
    exchange_hellos,
    exchange_votes,
    hash64,
    nonfinite_error,
)
from .peers import Peers
from .robust import Rule

__all__ = ["Conversation"]


class Conversation:
    """The options that all ranks must share, and the protocol of an exchange under them.

    Args:
        reduce, nonfinite, confirm, statistics: as in `AllReduce`.
    """

    def __init__(self, reduce: str | Rule, nonfinite: str, confirm: bool, statistics: bool) -> None:
        self._reduce, self._nonfinite, self._confirm, self._statistics = reduce, nonfinite, confirm, statistics

    def hold(self, exchange: Exchange, algorithm: Algorithm, peers: Peers) -> None:
        """Exchange with all ranks, in the lane; fills in the result and the receipt."""
        receipt = exchange.receipt
        sent, received, wire = Counter(peers.sent_in), Counter(peers.received_in), peers.wire_seconds
        try:
            hellos = self._agree(exchange, algorithm, peers)
            if all(hello.flags & OPTIONAL for hello in hellos):
                receipt.algorithm = "none"
            else:
                self._perform(exchange, algorithm, peers, hellos)
        finally:
            receipt.count(peers.sent_in - sent, peers.received_in - received)
            receipt.wire_ms = (peers.wire_seconds - wire) * 1e3

    def _agree(self, exchange: Exchange, algorithm: Algorithm, peers: Peers) -> list[Hello]:
        hellos = exchange_hellos(peers, self.hello(exchange, algorithm))
        receipt = exchange.receipt
        check_agreement(peers, hellos, lambda: self.description(exchange, algorithm))
        if exchange.error is not None:
            raise exchange.error
        check_able(hellos)
        receipt.contributors = sum(hello.weight > 0 for hello in hellos)
        receipt.weight_total = sum(hello.weight for hello in hellos)
        receipt.flags = combined_flags(hellos)
        receipt.identical = all_the_same(hellos)
        if self._statistics and receipt.contributors:
            share_statistics(exchange, peers, [hello.weight for hello in hellos])
        return hellos

    def hello(self, exchange: Exchange, algorithm: Algorithm) -> Hello:
        """What this rank says before the exchange."""
        flags = exchange.header.flags | (UNABLE if exchange.error is not None else 0)
        flags |= OPTIONAL if exchange.optional else 0
        if exchange.previous is not None and exchange.previous.broken:
            flags |= ABORTED
        if exchange.previous is not None and exchange.previous.receipt.skipped:
            flags |= SKIPPED
        return Hello(
            codec=algorithm.codec_id(),
            flags=flags,
            round=exchange.round,
            settings=hash64(repr(self._settings(exchange, algorithm))),
            check=exchange.check,
            elements=exchange.elements,
            weight=exchange.weight,
            bucket=exchange.bucket,
            sequence=exchange.sequence,
            frame_bytes=0 if exchange.frames is None else exchange.frames.numel(),
            sample=exchange.sample,
        )

    def _settings(self, exchange: Exchange, algorithm: Algorithm) -> dict[str, object]:
        reduce = self._reduce if isinstance(self._reduce, str) else repr(self._reduce)
        options = {
            "reduce": reduce,
            "nonfinite": self._nonfinite,
            "confirm": self._confirm,
            "statistics": self._statistics,
        }
        return {**algorithm.settings(), "dtype": str(exchange.flat.dtype), **options}

    def description(self, exchange: Exchange, algorithm: Algorithm) -> dict[str, object]:
        """Names and values of everything that ranks must agree on."""
        named = {"bucket": exchange.bucket, "round": exchange.round, "vector length": exchange.elements}
        theirs = {} if exchange.describe is None else exchange.describe()
        return {**self._settings(exchange, algorithm), **named, **theirs}

    def _perform(self, exchange: Exchange, algorithm: Algorithm, peers: Peers, hellos: list[Hello]) -> None:
        receipt = exchange.receipt
        if any(hello.flags & SKIPPED for hello in hellos):
            self._skip(exchange)
            return
        if receipt.flags & (HAS_NAN | HAS_INF) and self._refuse(exchange, hellos):
            return
        shares = Shares.of([hello.weight for hello in hellos], self._reduce == "sum")
        exchange.shares = shares if self._reduce in ("mean", "sum") else None
        lengths = [hello.frame_bytes for hello in hellos]
        error: Exception | None = None
        try:
            algorithm.communicate(exchange, peers, shares, lengths)
        except Exception as own:
            error = own
        self._vote(exchange, peers, error)
        if exchange.result is None:
            self._skip(exchange)  # a robust rule found nothing to agree on
            return
        # The sum of finite vectors may overflow: owners report that in the second phase.
        if receipt.flags & (HAS_NAN | HAS_INF):
            self._refuse(exchange, hellos)

    def _vote(self, exchange: Exchange, peers: Peers, error: Exception | None) -> None:
        """Raise if the exchange failed here or, where ranks confirm, anywhere."""
        if isinstance(error, PeerFailure) or (error is not None and not self._confirm):
            raise error  # the network is broken: the others notice by themselves
        if not self._confirm:
            return
        votes = exchange_votes(peers, error is None)
        if error is not None:
            raise error
        failed = [rank for rank, succeeded in enumerate(votes) if not succeeded]
        if failed:
            raise Aborted(f"ranks {failed} could not complete the exchange; it was undone on all ranks", failed)

    def _refuse(self, exchange: Exchange, hellos: list[Hello]) -> bool:
        """Apply the policy for non-finite values; True: the round is dropped."""
        if self._nonfinite == "raise":
            raise nonfinite_error(hellos)
        if self._nonfinite == "use":
            return False
        self._skip(exchange)
        return True

    def _skip(self, exchange: Exchange) -> None:
        exchange.receipt.skipped = True
        exchange.result = exchange.flat.zero_()
