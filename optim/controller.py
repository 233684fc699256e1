"""The arithmetic of `AutoLoCo`: what a round is summed up to, the length of the next one, the outer coefficients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["RoundStatistics"]


@dataclass(frozen=True)
class RoundStatistics:
    """What the controller of `AutoLoCo` has seen of the latest round, and what it has made of it.

    Attributes:
        loss: mean training loss over steps and workers; NaN where none was recorded.
        noise: s2, smoothed neither here nor in `loss`; NaN with one worker or noise_power=0.
        drift: mean |D_i|^2 - |D|^2.
        coherence: |D|^2 / mean |D_i|^2: 1 for identical workers, 1 / K for orthogonal ones.
        lr_sum: A_r.
        outer_lr, outer_momentum: nu_r and mu_r of the outer step.
    """

    loss: float
    noise: float
    drift: float
    coherence: float
    lr_sum: float
    outer_lr: float
    outer_momentum: float


@dataclass
class Scalars:
    """Sums over the present round on this worker; after the exchange, means over workers."""

    loss: float = 0.0
    losses: float = 0.0  # how many there are
    lr: float = 0.0  # A
    lr_squared: float = 0.0  # S
    tokens: float = 0.0
    steps: float = 0.0
    interval: float = 0.0  # H as planned
    eta: float = 0.0  # learning rate of the first step
    squares: float = 0.0  # |D_i|^2, filled in when it is sent

    def row(self) -> list[float]:
        return list(vars(self).values())


@dataclass
class Controller:
    """What the interval and the outer step depend on, equal on all workers; `row` goes into checkpoints.

    Means are kept as (sum, weight) of an exponential average, so that their ratio has no start-up bias.
    """

    rounds: float = 0.0  # calibration rounds done
    previous: float = 0.0  # H of the last round
    loss: float = 0.0
    loss_weight: float = 0.0
    noise: float = 0.0
    noise_weight: float = 0.0
    tokens: float = 0.0  # per step in the last round
    loss_ref: float = 0.0
    noise_ref: float = 0.0
    eta_ref: float = 0.0
    lr_ref: float = 0.0  # A_ref; 0 until calibrated
    tokens_ref: float = 0.0

    def row(self) -> list[float]:
        return list(vars(self).values())

    def smoothed(self, name: Literal["loss", "noise"]) -> float:
        """The mean so far; 0, which means nothing as a ratio, before there is one."""
        weight = float(getattr(self, f"{name}_weight"))
        return float(getattr(self, name)) / weight if weight else 0.0

    def observe(self, name: Literal["loss", "noise"], value: float, smoothing: float) -> None:
        if math.isfinite(value):
            for key, new in ((name, value), (f"{name}_weight", 1.0)):
                setattr(self, key, smoothing * getattr(self, key) + (1.0 - smoothing) * new)

    def calibrate(self, seen: Scalars) -> None:
        """The round just seen is the reference."""
        self.loss_ref, self.noise_ref = self.smoothed("loss"), self.smoothed("noise")
        self.eta_ref, self.lr_ref, self.tokens_ref = seen.eta, seen.lr, self.tokens


def next_interval(
    reference: int, previous: int, ratios: Sequence[float], powers: Sequence[float], rate_limit: float
) -> int:
    """H of the coming round: H_ref (L/L_ref)^a (eta/eta_ref)^-b (s2/s2_ref)^-c, rounded, within reach of the last one.

    Args:
        reference: H_ref.
        previous: H of the last round; also the result when a ratio that counts is not positive and finite.
        ratios: (L / L_ref, eta / eta_ref, s2 / s2_ref).
        powers: (a, b, c); a ratio with power 0 is not looked at.
        rate_limit: H changes by at most this factor.

    >>> next_interval(16, 16, (0.5, 1.0, 1.0), (0.5, 1.5, 0.5), 1.5)
    11
    """
    raw = float(reference)
    for ratio, power, sign in zip(ratios, powers, (1, -1, -1), strict=True):
        if power and not (math.isfinite(ratio) and ratio > 0.0):
            return previous
        raw *= ratio ** (sign * power) if power else 1.0
    wanted = math.floor(min(raw, 2.0**40) + 0.5)
    return min(max(wanted, math.ceil(previous / rate_limit)), math.floor(previous * rate_limit))


def corrected_outer(lr: float, momentum: float, share: float, max_lr: float = math.inf) -> tuple[float, float]:
    """(nu_r, mu_r) of a round with `share` = A_r / A_ref of the reference's accumulated learning rate.

    >>> nu, mu = corrected_outer(0.7, 0.9, 2.0)
    >>> round(nu, 10), round(mu, 10)
    (1.33, 0.81)
    """
    mu = float(momentum**share)
    return min(max_lr, lr * (1.0 - mu) / (1.0 - momentum)), mu


def ratio(value: float, reference: float) -> float:
    """value / reference; NaN for a reference of 0."""
    return value / reference if reference else math.nan
