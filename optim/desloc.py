"""DES-LOC: parameters and every optimizer state are averaged at their own period (arXiv 2505.22549).

x_i parameters, s_i^j the state tensors of worker i's optimizer (for Adam u = exp_avg and v = exp_avg_sq):

    inner step                     (x_i, s_i) <- inner(x_i, s_i, g_i);  t <- t + 1
    if t mod K_x == 0:             x_i   <- sum_k w_k x_k
    if t mod K_j == 0, each j:     s_i^j <- sum_k w_k s_k^j

With all periods equal this is Local Adam; K_u = 3 K_x and K_v = 6 K_x halve its traffic.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from torch.optim import Optimizer
from typing_extensions import Unpack

from ..sync import Receipt
from .diloco import check_outer
from .engine import LowCommOptimizer
from .fragment import Fragment
from .options import SharedOptions
from .outer import Average, Nesterov
from .schedules import NEVER
from .state import InFlight

__all__ = ["DESLOC", "half_life_periods"]

PERIODS: Mapping[str, int] = MappingProxyType({"params": 64, "exp_avg": 192, "exp_avg_sq": 384})


@dataclass(frozen=True)
class Periods:
    """The union of several periods counted from `start`."""

    periods: tuple[tuple[str, int], ...]
    start: int = 0

    def due(self, step: int) -> list[str]:
        """Names whose period ends at `step`."""
        t = step - self.start
        return [name for name, period in self.periods if t > 0 and t % period == 0]

    def next_sync(self, step: int, lr: float) -> int:
        t = max(step - self.start, 0)
        return self.start + min((t // period + 1) * period for _, period in self.periods)


class DESLOC(LowCommOptimizer):
    """DES-LOC (arXiv 2505.22549): independent averaging periods for parameters and optimizer state.

    Args:
        inner: any torch.optim.Optimizer; state is named as it names it.
        sync_every: period in inner steps of "params" and of every state tensor to be averaged. A state that is not
            named stays local. The paper recommends 3 and 6 times the parameters' period for Adam's moments.
        sync_point: "post" averages after the inner step, so gradients are taken at averaged parameters. "pre" is the
            paper's literal pseudo-code: what is due after step t is averaged in the next call of `step()`, before the
            update, with the gradient taken at the parameters before.
        reset: names of state tensors that are zeroed at every parameter sync (the paper's baseline).
        outer_lr, outer_momentum, nesterov: an outer rule for the parameter average; None (default): the plain average.
        **shared: see `LowCommOptimizer`. `compress` acts on parameters; state is averaged in full precision.

    Raises:
        ValueError: a period below 1, "params" missing, sync_point="pre" with an outer rule.

    Example:
        >>> import torch
        >>> from lowcomm.optim import DESLOC
        >>> model = torch.nn.Linear(2, 1)
        >>> inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
        >>> optimizer = DESLOC(inner, sync_every={"params": 2, "exp_avg": 6, "exp_avg_sq": 12})
        >>> for _ in range(4):
        ...     model(torch.ones(1, 2)).sum().backward()
        ...     optimizer.step()
        >>> optimizer.num_syncs
        2

    Where in the step the average is taken and how `weights` act on state are ours: weights apply to state as to
    parameters.
    """

    def __init__(
        self,
        inner: Optimizer | Sequence[Optimizer],
        *,
        sync_every: Mapping[str, int] = PERIODS,
        sync_point: Literal["post", "pre"] = "post",
        reset: Sequence[str] = (),
        outer_lr: float | None = None,
        outer_momentum: float = 0.9,
        nesterov: bool = True,
        **shared: Unpack[SharedOptions],
    ):
        if not isinstance(sync_every, Mapping):
            raise ValueError(f"sync_every must map names of state to periods, one for each, but is: {sync_every!r}")
        periods = dict(sync_every)
        _check(periods, sync_point, outer_lr)
        if outer_lr is not None:
            check_outer(outer_lr, outer_momentum)
        if isinstance(reset, str):
            raise ValueError(f"reset must be a sequence of names but is: {reset!r}; write ({reset!r},)")
        if shared.get("average_state"):
            raise ValueError("average_state is for methods with one period; name the state in sync_every instead")
        outer = {"outer_lr": outer_lr, "outer_momentum": outer_momentum, "outer_nesterov": nesterov}
        average = Average() if shared.get("compress") is not None else None
        self._periods = Periods(tuple(periods.items()), shared.get("warmup_steps", 0))
        self._reset, self._early_events = tuple(reset), sync_point == "pre"
        self._names_due: list[str] = []
        shared["average_state"] = tuple(name for name in periods if name != "params")
        super().__init__(
            inner,
            sync_every=self._periods,
            rule=average if outer_lr is None else Nesterov(),
            outer_defaults={"periods": self._periods.periods, **(outer if outer_lr is not None else {})},
            **shared,
        )

    def _due_fragments(self, step: int) -> list[Fragment]:
        return self._fragments if "params" in self._periods.due(step) else []

    def _after_send(self, sent: list[InFlight], step: int) -> None:
        self._names_due = [name for name in self._periods.due(step) if name != "params"]

    def _others_due(self, due: list[InFlight], receipts: list[Receipt]) -> tuple[Sequence[str], bool]:
        names, self._names_due = self._names_due, []
        full, buffers = super()._others_due(due, receipts)
        return (full if any(exchange.partial for exchange in due) else names), buffers

    def _apply(self, exchange: InFlight) -> None:
        super()._apply(exchange)
        for p in exchange.fragment.tensors if self._reset else []:
            for name in self._reset:
                if name in self._inner_state(p):
                    self._inner_state(p)[name].zero_()

    def _roll_call(self) -> bool:
        step = self._next_send(self._steps, 0.0)
        names = [name for name in self._periods.due(step) if name != "params"]
        if self._due_fragments(step):
            return super()._roll_call()
        others = self._send_others(names, False, optional=True)
        if all(work.wait().algorithm == "none" for _, work in others):
            return True
        for part, work in others:
            part.write(work.result)
        self._set_steps(step)
        return False


def half_life_periods(params: int, betas: Mapping[str, float]) -> dict[str, int]:
    """Periods from the half-life ln 0.5 / ln beta of every state, as multiples of the parameters' period; ours.

    >>> half_life_periods(32, {"exp_avg": 0.99, "exp_avg_sq": 0.999})
    {'params': 32, 'exp_avg': 64, 'exp_avg_sq': 704}
    """
    periods = {"params": params}
    for name, beta in betas.items():
        half_life = math.log(0.5) / math.log(beta)
        periods[name] = params * max(1, math.floor(half_life / params + 0.5))
    return periods


def _check(periods: Mapping[str, int], sync_point: str, outer_lr: float | None) -> None:
    if "params" not in periods:
        raise ValueError(f"sync_every must have a period for 'params' but has: {sorted(periods)}")
    for name, period in periods.items():
        if isinstance(period, bool) or not isinstance(period, int) or not 1 <= period < NEVER:
            raise ValueError(f"every period must be an int of at least 1 but {name!r} has: {period!r}")
    if sync_point not in ("post", "pre"):
        raise ValueError(f"sync_point must be 'post' or 'pre' but is: {sync_point!r}")
    if sync_point == "pre" and outer_lr is not None:
        raise ValueError("sync_point='pre' averages between gradient and update, where an outer step has no meaning")
