"""Feedback state of all buckets of one AllReduce, and the rule that only successful exchanges change it.

An exchange encodes against the newest state of its bucket: the committed one, or the candidate of an exchange that is
still under way. Candidates become committed in the order of the exchanges; when one is dropped, those that build on it
fail too.
"""

from __future__ import annotations

import threading

from ..compress import Feedback
from .errors import Aborted
from .exchange import Buffers, Exchange, State

__all__ = ["States"]

_REDUCING_SIDE = ("owner_residual", "owner_previous", "previous")


class States:
    """Committed states, and the chain of exchanges under way for each bucket.

    Args:
        feedback: the rule that gives the states their meaning, or None.
        buffers: where tensors go that no state needs any more.
        chained: whether exchanges have any state at all; without it, none depends on another.
    """

    def __init__(self, feedback: Feedback | None, buffers: Buffers, chained: bool) -> None:
        self._feedback, self._buffers, self._chained = feedback, buffers, chained
        self._lock = threading.RLock()
        self._committed: dict[int, State] = {}
        self._owner: dict[int, State] = {}
        self._latest: dict[int, Exchange] = {}

    def open(self, exchange: Exchange) -> None:
        """Set what a new exchange builds on. Called in the order of the exchanges.

        Raises:
            ValueError: it would be committed before one that is held.
        """
        if not self._chained:
            return
        with self._lock:
            pending = self._latest.get(exchange.bucket)
            if pending is not None and not pending.settled:
                if pending.hold and not exchange.hold:
                    raise ValueError(
                        f"bucket {exchange.bucket} has an exchange with hold=True that is not committed; commit or "
                        f"discard it, or start this one with hold=True too"
                    )
                # A copy: relink changes the candidate's entries, and compares with what this exchange was encoded on.
                exchange.previous, exchange.base = pending, dict(pending.candidate or pending.base or {}) or None
            else:
                exchange.base = self._committed.get(exchange.bucket)
            self._latest[exchange.bucket] = exchange

    def relink(self, exchange: Exchange) -> None:
        """Bring in what earlier exchanges have added since this one was encoded. Called before it communicates.

        What encoding did not replace (EF21's aggregate, or everything where this rank's weight is 0) is shared with the
        state before it.
        """
        with self._lock:
            newest = self._newest(exchange.previous, exchange.bucket)
            exchange.owner_base = self._newest_owner(exchange.previous, exchange.bucket)
            if exchange.candidate is None or exchange.base is None:  # to be encoded later
                exchange.base = dict(newest) or exchange.base
                return
            for name, tensor in exchange.candidate.items():
                if tensor is exchange.base.get(name):
                    exchange.candidate[name] = exchange.base[name] = newest.get(name, tensor)

    def _newest(self, before: Exchange | None, bucket: int) -> State:
        if before is not None and not before.settled and before.candidate is not None:
            return before.candidate
        return self._committed.get(bucket, {})

    def _newest_owner(self, before: Exchange | None, bucket: int) -> State:
        if before is not None and not before.settled:
            return before.owner_candidate or self._newest_owner(before.previous, bucket)
        return self._owner.get(bucket, {})

    def conclude(self, exchange: Exchange) -> None:
        """After the communication: complete the candidate and the result, and commit unless held or without result."""
        if exchange.result is None or exchange.receipt.skipped:
            exchange.hold = False
            self.drop(exchange)
            return
        if exchange.hold and exchange.candidate is not None and exchange.base is not None:
            with self._lock:  # what is shared with the state before must survive a discard
                shared = [name for name, tensor in exchange.candidate.items() if tensor is exchange.base.get(name)]
                exchange.candidate.update({name: exchange.candidate[name].clone() for name in shared})
        if exchange.candidate is not None and self._feedback is not None:
            exchange.result = self._feedback.aggregate(exchange.result, exchange.candidate)
        exchange.frames = None
        if not exchange.hold:
            self._commit(exchange)

    def drop(self, exchange: Exchange) -> None:
        """Forget the candidate of an exchange that failed or was skipped."""
        with self._lock:
            exchange.settle()

    def commit(self, exchange: Exchange) -> None:
        """Commit a held exchange that has ended well; does nothing if it was settled before.

        Raises:
            RuntimeError: an earlier held exchange of the bucket is neither committed nor discarded.
        """
        with self._lock:
            if exchange.settled:
                return
            if exchange.previous is not None and not exchange.previous.settled:
                raise RuntimeError(
                    f"the exchange before this one of bucket {exchange.bucket} is not committed; commit in the order "
                    f"of start"
                )
            self._commit(exchange)

    def discard(self, exchange: Exchange) -> None:
        """Undo a held exchange; those that build on it fail. Does nothing if it was settled before."""
        with self._lock:
            if not exchange.settled:
                exchange.error = Aborted("this exchange was discarded by its caller")
                exchange.settle()

    def _commit(self, exchange: Exchange) -> None:
        with self._lock:
            if exchange.owner_candidate:
                kept = {id(tensor) for tensor in exchange.owner_candidate.values()}
                self._buffers.give(*(t for t in self._owner.get(exchange.bucket, {}).values() if id(t) not in kept))
                self._owner[exchange.bucket] = exchange.owner_candidate
            if exchange.candidate is not None:
                old = self._committed.get(exchange.bucket) or exchange.base or {}
                self._committed[exchange.bucket] = exchange.candidate
                kept = {id(tensor) for tensor in (*exchange.candidate.values(), exchange.result)}
                self._buffers.give(*(tensor for tensor in old.values() if id(tensor) not in kept))
            exchange.settle()

    def copy(self, bucket: int) -> State:
        """Clones of the newest state: the committed one, or that of the last held exchange that has ended well."""
        with self._lock:
            last, best = self._latest.get(bucket), None
            while last is not None and not last.settled:
                if best is None and last.finished.is_set() and not last.broken:
                    best = last
                last = last.previous
            state = {**self._newest(best, bucket), **self._newest_owner(best, bucket)}
            return {name: tensor.clone() for name, tensor in state.items()}

    def load(self, bucket: int, state: State) -> None:
        """Replace a bucket's state by clones of `state`; {} starts afresh."""
        with self._lock:
            pending = self._latest.pop(bucket, None)
            if pending is not None and not pending.settled:
                self._latest[bucket] = pending
                raise RuntimeError(
                    f"bucket {bucket} has an exchange in flight; wait for it (and commit it) before load"
                )
            copies = {name: tensor.detach().clone() for name, tensor in state.items()}
            owner = {name: copies.pop(name) for name in state if name in _REDUCING_SIDE}
            self._committed.pop(bucket, None)
            self._owner.pop(bucket, None)
            if copies:
                self._committed[bucket] = copies
            if owner:
                self._owner[bucket] = owner

    def snapshot(self) -> tuple[dict[int, State], dict[int, State]]:
        """Clones of all committed states, for copying and pickling."""
        with self._lock:
            tables = (self._committed, self._owner)
            first, second = (
                {bucket: {name: tensor.clone() for name, tensor in state.items()} for bucket, state in table.items()}
                for table in tables
            )
            return first, second

    def restore(self, snapshot: tuple[dict[int, State], dict[int, State]]) -> None:
        """Take over a snapshot."""
        self._committed, self._owner = dict(snapshot[0]), dict(snapshot[1])
