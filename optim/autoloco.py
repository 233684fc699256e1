"""AutoLoCo: DiLoCo whose rounds grow and shrink with training, and whose outer step follows (arXiv 2609.36662).

Round r has H_r inner steps with learning rates summing to A_r. With D the averaged pseudo-gradient, and reference
values taken from calibration rounds of H_ref steps:

    mu_r = mu_ref ^ (A_r / A_ref)                       momentum forgets at a constant rate per unit of learning rate
    nu_r = nu_ref (1 - mu_r) / (1 - mu_ref)             and the long-run gain nu / (1 - mu) stays
    X, B = outer_step(X, B, D) with (nu_r, mu_r)

    H    = H_ref sqrt( L / L_ref * (eta_ref / eta)^3 * s2_ref / s2 )

L is the training loss, eta the learning rate of the coming round, s2 = K / (K - 1) (mean |D_i|^2 - |D|^2) / S_r the
noise of one step's gradient, S_r the sum of the squared learning rates.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import Unpack

from ..sync import Receipt, SyncError, Work
from .controller import Controller, RoundStatistics, Scalars, corrected_outer, next_interval, ratio
from .diloco import check_outer
from .engine import LowCommOptimizer, not_compiled
from .fragment import Fragment
from .options import SharedOptions
from .outer import Nesterov
from .state import InFlight

__all__ = ["AutoLoCo"]

_SCALARS_BUCKET = 1 << 23


class CorrectedNesterov(Nesterov):
    """The outer step with the coefficients of the round at hand."""

    def __init__(self, form: str, momentum: bool, lr: bool, max_lr: float):
        self.form, self.corrects_momentum, self.corrects_lr, self.max_lr = form, momentum, lr, max_lr
        self.share = 1.0  # A_r / A_ref of the round

    def sgd_settings(self, group: dict[str, Any]) -> tuple[float, float, bool]:
        """(nu_r, mu_r, nesterov); in the normalized form the step is nu_ref A_r / A_ref and D is rescaled first."""
        lr, momentum, nesterov = super().sgd_settings(group)
        gain, decay = corrected_outer(lr, momentum, self.share, self.max_lr)
        if self.form == "normalized":
            gain = lr * self.share
        return gain if self.corrects_lr else lr, decay if self.corrects_momentum else momentum, nesterov

    def scale(self, group: dict[str, Any]) -> float:
        """What D is multiplied by before the step: c / p in the normalized form, with c = (1 - mu_r) / (1 - mu_ref)."""
        _, momentum, _ = super().sgd_settings(group)
        if self.form == "gain" or self.share <= 0.0:
            return 1.0
        return (1.0 - float(momentum**self.share)) / (1.0 - momentum) / self.share


class AutoLoCo(LowCommOptimizer):
    """AutoLoCo (arXiv 2609.36662): adaptive round length, outer momentum and learning rate corrected for it.

    The update is DiLoCo's with mu_r = mu_ref^(A_r / A_ref), nu_r = nu_ref (1 - mu_r) / (1 - mu_ref).

    Args:
        inner: the optimizer that trains this worker.
        sync_every: H_ref, inner steps of a reference round.
        outer_lr, outer_momentum, nesterov: nu_ref, mu_ref of a reference round, as in `DiLoCo`.
        total_steps: T; the last round ends exactly there. None: no end.
        lr_warmup_steps: rounds that start before it have H_ref steps; give the length of the learning rate's warm-up.
        calib_rounds: rounds of H_ref steps after that, the last of which is the reference.
        min_interval, max_interval: bounds of the rule; H_ref itself may lie outside.
        rate_limit: H changes at most by this factor from round to round.
        smoothing: of loss and noise, in [0, 1).
        loss_power, lr_power, noise_power: exponents of the rule. With a loss_power other than 0 the loss must be known:
            call `record(loss)` before `step()`, or give `step` a closure.
        max_outer_lr: cap of nu_r (form "gain").
        correct_momentum, correct_lr: switch the two corrections. Momentum without learning rate is the variant that
            does worse than none in the published ablation.
        form: "gain", as above. "normalized" also keeps the momentum buffer in units of a reference round, with p =
            A_r / A_ref and c = (1 - mu_r) / (1 - mu_ref): B = mu_r B + c D / p, X = X - nu_ref p (c D / p + mu_r B).
        horizon: "tokens": rounds last as long as H reference rounds' tokens, told by `record(loss, tokens)`.
        **shared: see `LowCommOptimizer`.

    Raises:
        ValueError: an argument is out of its range.
        RuntimeError: loss or tokens are needed and were not recorded.

    Example:
        >>> import torch
        >>> from lowcomm.optim import AutoLoCo
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = AutoLoCo(torch.optim.SGD(model.parameters(), lr=0.1), sync_every=2, total_steps=8)
        >>> for _ in range(8):
        ...     loss = model(torch.ones(4, 2)).square().mean()
        ...     loss.backward()
        ...     optimizer.record(loss)
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> optimizer.last_round.outer_momentum < 1.0
        True

    Only the paper's momentum rule was available to us. The interval rule, which minimises error for given time in
    local SGD, and nu_r, which keeps the gain, are ours; so is the normalized form's scaling. Costs one all-reduce of
    nine numbers a round.
    """

    def __init__(
        self,
        inner: Optimizer | Sequence[Optimizer],
        *,
        sync_every: int = 500,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        nesterov: bool = True,
        total_steps: int | None = None,
        lr_warmup_steps: int = 0,
        calib_rounds: int = 2,
        min_interval: int = 1,
        max_interval: int | None = None,
        rate_limit: float = 1.5,
        smoothing: float = 0.9,
        loss_power: float = 0.5,
        lr_power: float = 1.5,
        noise_power: float = 0.5,
        max_outer_lr: float = 1.0,
        correct_momentum: bool = True,
        correct_lr: bool = True,
        form: Literal["gain", "normalized"] = "gain",
        horizon: Literal["steps", "tokens"] = "steps",
        **shared: Unpack[SharedOptions],
    ):
        check_outer(outer_lr, outer_momentum)
        powers = (loss_power, lr_power, noise_power)
        limits = (min_interval, (1 << 40) if max_interval is None else max_interval, rate_limit, smoothing)
        _check(sync_every, calib_rounds, limits, form, horizon)
        _check_run(total_steps, lr_warmup_steps, powers)
        if form == "gain" and outer_lr > max_outer_lr:
            raise ValueError(f"outer_lr must be at most max_outer_lr ({max_outer_lr}) but is: {outer_lr}")
        if form == "normalized" and not (correct_momentum and correct_lr):
            raise ValueError("form='normalized' is one correction; correct_momentum and correct_lr must both be True")
        if correct_momentum and not correct_lr:
            warnings.warn(
                "AutoLoCo with a corrected momentum and an uncorrected learning rate does worse than no correction in "
                "the published ablation",
                stacklevel=2,
            )
        self._powers, self._limits, self._smoothing = powers, (limits[0], limits[1]), smoothing
        self._rate_limit, self._total, self._horizon = rate_limit, total_steps, horizon
        self._lr_warmup, self._calib_rounds = lr_warmup_steps, calib_rounds
        self._pending: list[Tensor | float] = []  # losses recorded and not yet added up
        self._squares: dict[int, float] = {}  # |D_i|^2 of what has just been sent, by bucket
        self._scalars_due = False
        self._mean: Scalars | None = None  # of the exchange that is about to be applied
        self.last_round: RoundStatistics | None = None
        """Statistics of the latest round, or None."""
        super().__init__(
            inner,
            sync_every=sync_every,
            rule=CorrectedNesterov(form, correct_momentum, correct_lr, max_outer_lr),
            outer_defaults={
                "outer_lr": outer_lr,
                "outer_momentum": outer_momentum,
                "outer_nesterov": nesterov,
                "autoloco": (*powers, *limits, total_steps or 0, lr_warmup_steps, calib_rounds, form, horizon),
                "round_sums": Scalars().row(),
                "controller": Controller().row(),
            },
            **shared,
        )

    # ---- what the round has seen ---------------------------------------------------------------------------------

    def record(self, loss: Tensor | float, tokens: int = 0) -> None:
        """Tell the loss of the coming step, and how many tokens it has processed. A tensor is not waited for."""
        self._pending.append(loss.detach() if isinstance(loss, Tensor) else float(loss))
        self._add(tokens=float(tokens))

    def _add(self, **changes: float) -> None:
        sums = self._sums()
        for name, value in changes.items():
            setattr(sums, name, getattr(sums, name) + value)
        self._set_all("round_sums", sums.row())

    def _sums(self) -> Scalars:
        return Scalars(*self.param_groups[0]["round_sums"])

    def _controller(self) -> Controller:
        return Controller(*self.param_groups[0]["controller"])

    def _settled_state(self) -> dict[Tensor, dict[str, Any]]:
        self._collect_losses()
        return super()._settled_state()

    def __getstate__(self) -> dict[str, Any]:
        self._collect_losses()
        return super().__getstate__()

    def _relink(self) -> None:
        self._pending = []
        super()._relink()

    def _end_warmup(self) -> None:
        super()._end_warmup()
        self._pending = []
        self._set_all("round_sums", Scalars().row())

    def _collect_losses(self) -> None:
        pending, self._pending = self._pending, []
        if pending:
            self._add(loss=float(sum(float(loss) for loss in pending)), losses=float(len(pending)))

    @not_compiled
    def _before_inner(
        self, closure: Callable[[], float] | None
    ) -> tuple[bool, Callable[[], float] | None, float | None]:
        if self._powers[0] and closure is None and not (self._pending or self._is_materialisation()):
            raise RuntimeError(
                "the interval depends on the training loss: call record(loss) before step(), give step() a closure, or "
                "set loss_power=0"
            )
        run, closure, loss = super()._before_inner(closure)
        if loss is not None and self._powers[0]:
            self.record(loss)
        elif closure is not None and self._powers[0]:
            evaluate = closure

            def noted() -> float:
                value = evaluate()
                self.record(value)
                return value

            closure = noted
        return run, closure, loss

    @not_compiled
    def _after_inner(self) -> None:
        if self._counting and self._steps >= self._warmup_steps:
            lr = float(self.param_groups[0].get("lr", 0.0))
            self._add(lr=lr, lr_squared=lr * lr, steps=1.0)
        super()._after_inner()

    # ---- when ----------------------------------------------------------------------------------------------------

    def _plan(self) -> None:
        super()._plan()
        sums = self._sums()
        if sums.steps == 0.0:
            sums.interval = float(self._interval(self._steps, float(self.param_groups[0].get("lr", 0.0))))
            sums.eta = float(self.param_groups[0].get("lr", 0.0))
            self._set_all("round_sums", sums.row())

    def _next_send(self, step: int, lr: float) -> int:
        start = max(step, self._warmup_steps)
        length = self._in_tokens(self._interval(start, lr))
        if self._total is not None and start < self._total:
            length = max(1, min(length, self._total - start))
        return start + length

    def _interval(self, step: int, lr: float) -> int:
        """H of a round that starts now, before truncation; the same on all workers."""
        now, reference = self._controller(), int(self.param_groups[0]["sync_every"])
        if not now.lr_ref:
            return reference
        ratios = (
            ratio(now.smoothed("loss"), now.loss_ref),
            ratio(lr, now.eta_ref),
            ratio(now.smoothed("noise"), now.noise_ref),
        )
        alone = self._reducer.world_size == 1
        powers = (*self._powers[:2], 0.0 if alone else self._powers[2])
        length = next_interval(reference, int(now.previous), ratios, powers, self._rate_limit)
        return min(max(length, self._limits[0]), self._limits[1])

    def _in_tokens(self, interval: int) -> int:
        """The number of steps after which the tokens of `interval` reference steps have been processed."""
        now = self._controller()
        if self._horizon == "steps" or not now.tokens_ref:
            return interval
        if not now.tokens:
            raise RuntimeError("horizon='tokens' needs the tokens of every step: call record(loss, tokens)")
        return max(1, math.ceil(interval * now.tokens_ref / now.tokens - 1e-9))

    # ---- what ----------------------------------------------------------------------------------------------------

    def _message(self, fragment: Fragment) -> Tensor:
        message = super()._message(fragment)
        if self._powers[2]:
            self._squares[fragment.bucket] = fragment.squared_norm(message)
        return message

    def _others_due(self, due: list[InFlight], receipts: list[Receipt]) -> tuple[Sequence[str], bool]:
        self._scalars_due = any(receipt.algorithm != "none" for receipt in receipts)
        return super()._others_due(due, receipts)

    def _send_others(self, names: Sequence[str], buffers: bool, optional: bool = False) -> list[tuple[Fragment, Work]]:
        sent = super()._send_others(names, buffers, optional)
        self._mean = None
        if self._scalars_due:
            sums = self._own_scalars()
            row = torch.tensor(sums.row(), dtype=torch.float64, device=self._fragments[0].device)
            here = float(sums.steps > 0.0)  # workers that have run out of data do not count
            work = self._dense.start(row, bucket=_SCALARS_BUCKET, round=self._round, weight=here)
            sent.append((Fragment(_SCALARS_BUCKET, [torch.empty_like(row)], [0]), work))
            work.wait()
            self._mean = Scalars(*work.result.tolist())
        return sent

    def _own_scalars(self) -> Scalars:
        self._collect_losses()
        sums = self._sums()
        sums.loss = sums.loss / sums.losses if sums.losses else 0.0
        sums.squares = sum(self._squares.values())
        self._squares = {}
        return sums

    def _before_apply(self, due: list[InFlight]) -> None:
        seen = self._mean
        if seen is None:
            return
        now, rule = self._controller(), self._corrected()
        squares = 0.0
        if self._powers[2]:
            squares = sum(x.fragment.squared_norm(x.work.result) for x in due)
        self._learn(now, seen, squares)
        rule.share = ratio(seen.lr, now.lr_ref) if now.rounds > self._calib_rounds else 1.0
        rule.share = rule.share if math.isfinite(rule.share) else 1.0
        self._set_all("controller", now.row())
        self._set_all("round_sums", Scalars().row())
        nu, mu, _ = rule.sgd_settings(self.param_groups[0])
        coherence = ratio(squares, seen.squares)
        noise = self._noise(seen, squares)
        loss = seen.loss if seen.losses else math.nan
        self.last_round = RoundStatistics(loss, noise, seen.squares - squares, coherence, seen.lr, nu, mu)

    def _learn(self, now: Controller, seen: Scalars, squares: float) -> None:
        """Take the round into the means; at the end of the calibration they become the reference."""
        now.observe("loss", seen.loss if seen.losses else math.nan, self._smoothing)
        now.observe("noise", self._noise(seen, squares), self._smoothing)
        now.previous, now.tokens = seen.interval, ratio(seen.tokens, seen.steps)
        if self._steps - round(seen.steps) >= self._lr_warmup:
            now.rounds += 1.0
            if now.rounds == self._calib_rounds:
                now.calibrate(seen)

    def _noise(self, seen: Scalars, squares: float) -> float:
        workers = self._reducer.world_size
        if workers == 1 or not self._powers[2]:
            return math.nan
        return workers / (workers - 1) * ratio(seen.squares - squares, seen.lr_squared)

    def _apply(self, exchange: InFlight) -> None:
        rule = self._corrected()
        if rule.form == "normalized":
            for start, stop, _, group in exchange.fragment.pieces():
                exchange.work.result[start:stop].mul_(rule.scale(self.param_groups[group]))
        super()._apply(exchange)

    def _failed(self, due: list[InFlight], error: SyncError) -> bool:
        now, rule = self._controller(), self._corrected()
        share = ratio(self._sums().lr, now.lr_ref)
        rule.share = share if math.isfinite(share) else 1.0
        return super()._failed(due, error)

    def _corrected(self) -> CorrectedNesterov:
        assert isinstance(self._rule, CorrectedNesterov)
        return self._rule


def _check_run(total_steps: int | None, lr_warmup_steps: int, powers: tuple[float, ...]) -> None:
    if total_steps is not None and total_steps < 1:
        raise ValueError(f"total_steps must be at least 1, or None, but is: {total_steps}")
    if lr_warmup_steps < 0 or not all(math.isfinite(power) for power in powers):
        raise ValueError(f"need lr_warmup_steps >= 0 and finite powers but got {lr_warmup_steps}, {powers}")


def _check(sync_every: int, calib_rounds: int, limits: tuple[float, ...], form: str, horizon: str) -> None:
    shortest, longest, rate_limit, smoothing = limits
    if isinstance(sync_every, bool) or not isinstance(sync_every, int):
        raise ValueError(f"sync_every must be an int, the length of a reference round, but is: {sync_every!r}")
    if calib_rounds < 1 or not 1 <= shortest <= longest:
        raise ValueError(
            "need calib_rounds >= 1 and 1 <= min_interval <= max_interval but got "
            f"{calib_rounds}, {shortest}, {longest}"
        )
    if not rate_limit > 1.0 or not 0.0 <= smoothing < 1.0:
        raise ValueError(f"need rate_limit > 1 and smoothing in [0, 1) but got {rate_limit}, {smoothing}")
    if form not in ("gain", "normalized") or horizon not in ("steps", "tokens"):
        raise ValueError(
            f"form must be 'gain' or 'normalized', horizon 'steps' or 'tokens' but they are: {form!r}, {horizon!r}"
        )
