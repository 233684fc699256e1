"""Delayed and eager outer updates: the exchange of a round overlaps the whole next round (arXiv 2502.12996).

d = delay rounds (1 by default), D_i(r) worker i's pseudo-gradient of round r, Dbar(r) its mean, D(r) = 0 for r < 1:

    end of round r:   D_i(r) = X - x_i;  start averaging it
    delayed           X, B = outer_step(X, B, Dbar(r-d))                             (no step while nothing has arrived)
    eager             X_i, B_i = outer_step(X_i, B_i, Dbar(r-d) + w_i (D_i(r) - D_i(r-d)))
                      x_i = X_i

Eager takes its own share fresh and the others' d rounds late. Its anchors and momenta differ between workers by their
latest own shares; the difference does not accumulate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import Unpack

from ..sync import Receipt
from .diloco import check_outer
from .engine import LowCommOptimizer
from .fragment import Fragment
from .options import SharedOptions
from .outer import Nesterov
from .schedules import Schedule
from .state import InFlight

__all__ = ["EagerDiLoCo"]

_NOT_YET = 1 << 40  # due when a later round says so


class OneRoundLate(LowCommOptimizer):
    """Shared by methods that consume an exchange `delay` rounds later; x returns to the anchor when a round ends."""

    _rounds: int  # d

    def _delay(self, fragment: Fragment) -> int:
        return _NOT_YET

    def _slots(self) -> int:
        return self._rounds

    def _has_progress(self, fragment: Fragment) -> bool:
        return self._steps > max(fragment.last_send, self._warmup_steps)

    def _after_send(self, sent: list[InFlight], step: int) -> None:
        for exchange in sent:
            fragment = exchange.fragment
            assert fragment.anchor is not None
            fragment.write(fragment.anchor)  # the round's progress is in the message now
            flying = [other for other in self._in_flight if other.fragment is fragment]
            if len(flying) > self._rounds:
                flying[-1 - self._rounds].due = step


class EagerDiLoCo(OneRoundLate):
    """Eager DiLoCo (arXiv 2502.12996): own progress at once, the others' one round late; never waits for the network.

    The update is X_i, B_i = outer_step(X_i, B_i, Dbar(r-d) + w_i (D_i(r) - D_i(r-d))), x_i = X_i.

    Args:
        inner: the optimizer that trains this worker.
        sync_every: inner steps per round, or a schedule object.
        delay: d, rounds until the others' progress is applied.
        delayed: apply the stale mean only (the paper's baseline). Workers then stay bit-identical, and training is
            visibly worse for long rounds.
        resync_every: every so many rounds wait for the mean in flight and average anchors and momenta, so that all
            workers agree exactly. None (default): never.
        outer_lr: nu; the paper uses 0.4. Lower it for `delayed`.
        outer_momentum: mu.
        nesterov: Nesterov momentum or heavy ball; group key "outer_nesterov".
        **shared: see `LowCommOptimizer`. With weights other than "uniform" the workers exchange their weights, 8 bytes
            each, when a round ends, and wait for them.

    Raises:
        ValueError: an argument is out of its range.

    Example:
        >>> import torch
        >>> from lowcomm.optim import EagerDiLoCo
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = EagerDiLoCo(torch.optim.SGD(model.parameters(), lr=0.1), sync_every=2)
        >>> for _ in range(4):
        ...     model(torch.ones(1, 2)).sum().backward()
        ...     optimizer.step()
        >>> optimizer.flush()

    With a codec, the own share is the decoded own message, so that what is applied early is what arrives later. The
    first rounds, flush and resync are not in the paper: `flush` applies the missing shares Dbar(r) - w_i D_i(r) with a
    plain step -nu and averages anchors and momenta.

    Memory beyond DiLoCo: d messages and (eager) d own shares.
    """

    def __init__(
        self,
        inner: Optimizer | Sequence[Optimizer],
        *,
        sync_every: int | Schedule,
        delay: int = 1,
        delayed: bool = False,
        resync_every: int | None = None,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        nesterov: bool = True,
        **shared: Unpack[SharedOptions],
    ):
        check_outer(outer_lr, outer_momentum)
        if isinstance(delay, bool) or not isinstance(delay, int) or delay < 1:
            raise ValueError(
                f"delay must be an int of at least 1 round but is: {delay!r}; DiLoCo is the method without"
            )
        if resync_every is not None and (delayed or resync_every < 1):
            raise ValueError(
                f"resync_every must be at least 1 and needs delayed=False (delayed workers always agree) but is: "
                f"{resync_every}"
            )
        self._rounds, self._delayed, self._resync_every = delay, delayed, resync_every
        self._keeps_own = not delayed
        super().__init__(
            inner,
            sync_every=sync_every,
            rule=Nesterov(),
            outer_defaults={
                "outer_lr": outer_lr,
                "outer_momentum": outer_momentum,
                "outer_nesterov": nesterov,
                "delay": delay,
                "delayed": delayed,
            },
            **shared,
        )

    def _send(self, fragments: list[Fragment], step: int, optional: bool = False) -> list[InFlight]:
        share = 1.0 if self._delayed else self._own_share()
        sent = super()._send(fragments, step, optional)
        for exchange in sent:
            if exchange.own is not None:
                exchange.own.mul_(share)
        return sent

    def _own_share(self) -> float:
        """w_i, this worker's weight over the sum of all."""
        if self._weights == "uniform":
            return 1.0 / self._reducer.world_size
        mine = self._weight()
        total = torch.full((1,), mine, dtype=torch.float64, device=self._fragments[0].device)
        work = self._dense.reduce(total, bucket=_SHARE_BUCKET, round=self._round)
        return mine / (float(work.result) * self._dense.world_size)

    def _after_send(self, sent: list[InFlight], step: int) -> None:
        super()._after_send(sent, step)
        for exchange in sent if not self._delayed else []:
            if not any(other.due == step for other in self._in_flight if other.fragment is exchange.fragment):
                assert exchange.own is not None
                self._outer_step(exchange.fragment, exchange.own.clone())  # first rounds: nothing has arrived yet
        if self._resync_every and len(sent) == len(self._fragments):
            rounds = self.param_groups[0]["round"] // len(self._fragments)
            if rounds % self._resync_every == 0:
                self._finish([exchange for exchange in self._in_flight if exchange.due <= step])
                self._settle_in_flight()

    def _apply(self, exchange: InFlight) -> None:
        if exchange.own is None:  # delayed, or the last exchange of a flush
            super()._apply(exchange)
            return
        newest = [other for other in self._in_flight if other.fragment is exchange.fragment][-1]
        mean, fresh, stale = exchange.work.result, cast(Tensor, newest.own), exchange.own
        self._outer_step(exchange.fragment, mean.add_(fresh).sub_(stale))
        exchange.fragment.give_message(mean)

    def _outer_step(self, fragment: Fragment, delta: Tensor) -> None:
        assert self._rule is not None
        fragment.apply(self._rule, delta, self.param_groups)

    def _settle_in_flight(self) -> None:
        if self._delayed:
            super()._settle_in_flight()
            return
        flying, self._in_flight = self._in_flight, []
        receipts = [exchange.work.wait() for exchange in flying]
        for exchange in flying:
            exchange.work.commit()
            self._add_missing_share(exchange)
        for fragment in self._fragments if flying else []:
            receipts += [self._average_flat(fragment, name, flat) for name, flat in fragment.flats().items()]
            fragment.write(cast(Tensor, fragment.anchor))
        if receipts:
            self._record(receipts)

    def _add_missing_share(self, exchange: InFlight) -> None:
        """X_i <- X_i - nu (Dbar(r) - w_i D_i(r)): what the others have contributed and has not been applied."""
        fragment, missing = exchange.fragment, exchange.work.result.sub_(cast(Tensor, exchange.own))
        assert fragment.anchor is not None
        for start, stop, _, group in fragment.pieces():
            step = missing[start:stop].mul_(float(self.param_groups[group]["outer_lr"]))
            fragment.anchor[start:stop].sub_(step.to(fragment.home))
        fragment.give_message(missing)

    def _average_flat(self, fragment: Fragment, name: str, flat: Tensor) -> Receipt:
        bucket = _FLAT_BUCKET + 16 * fragment.bucket + list(fragment.flats()).index(name)
        message = fragment.take_message().copy_(flat)
        work = self._dense.reduce(message, bucket=bucket, round=self._round, weight=self._weight())
        receipt = work.wait()
        flat.copy_(work.result)
        fragment.give_message(work.result)
        return receipt


_SHARE_BUCKET, _FLAT_BUCKET = 1 << 20, 1 << 21
