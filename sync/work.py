"""`Work`: the handle of one exchange."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from .exchange import Exchange
from .receipt import Receipt
from .streams import take_over

__all__ = ["Work"]

logger = logging.getLogger(__name__)


class Settling(Protocol):
    """Who commits or discards a held exchange."""

    def commit(self, exchange: Exchange) -> None: ...

    def discard(self, exchange: Exchange) -> None: ...


class Work:
    """Handle of one exchange. `wait` first, then `result`."""

    _reported = False

    def __init__(
        self, exchange: Exchange, states: Settling, on_receipt: Callable[[Receipt], object] | None = None
    ) -> None:
        self._exchange, self._states, self._on_receipt = exchange, states, on_receipt

    def wait(self) -> Receipt:
        """Block until the exchange has ended and return its receipt. May be called again.

        Raises:
            SyncError: it failed on this rank; nothing was committed.
        """
        start = time.perf_counter()
        self._exchange.finished.wait()
        self._exchange.receipt.blocked_ms += (time.perf_counter() - start) * 1e3
        if self._exchange.error is None and self._exchange.broken:
            self._states.discard(self._exchange)
        if self._exchange.error is not None:
            raise self._exchange.error
        if self._exchange.result is not None:
            take_over(self._exchange.result)
        self._report()
        return self._exchange.receipt

    def _report(self) -> None:
        if self._reported:
            return
        self._reported = True
        logger.debug("exchange: %s", self._exchange.receipt)
        if self._on_receipt is not None:
            self._on_receipt(self._exchange.receipt)

    def done(self) -> bool:
        """Whether `wait` would return (or raise) at once."""
        return self._exchange.finished.is_set()

    def then(self, callback: Callable[[], None]) -> None:
        """Call `callback`, which must not raise, when the exchange has ended, well or not: in the helper thread, or now
        if it has ended already."""
        self._exchange.when_finished(callback)

    def commit(self) -> None:
        """Make the feedback state of an exchange with `hold=True` the committed one; a second call does nothing.

        Raises:
            SyncError: the exchange failed.
            RuntimeError: an earlier held exchange of the bucket is neither committed nor discarded.
        """
        self.wait()
        self._states.commit(self._exchange)

    def discard(self) -> None:
        """Undo an exchange with `hold=True`, as if it had not taken place; waits for its end. Later exchanges of the
        bucket that were started before this call build on it, and fail. Does nothing to one that has failed itself or
        was committed."""
        self._exchange.finished.wait()
        self._states.discard(self._exchange)

    @property
    def own(self) -> Tensor:
        """This rank's own message as all ranks decode it, (n,); for exchanges started with keep_own=True."""
        if self._exchange.own is None:
            raise RuntimeError("own is there only for exchanges started with keep_own=True")
        return self._exchange.own

    @property
    def result(self) -> Tensor:
        """The reduced vector, (n,), in memory that now belongs to the caller.

        Raises:
            RuntimeError: `wait` has not been called, or the exchange failed.
        """
        if not self.done() or self._exchange.result is None:
            raise RuntimeError("no result: call wait() first, and use the result only when it did not raise")
        return self._exchange.result
