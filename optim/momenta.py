"""Inner optimizers with slow momenta: ADOPT, and quasi-hyperbolic mixtures of several momenta (MT-DAO).

g gradient, u^j first moments with decays b_j and weights omega_j, v second moment, eta learning rate:

    h   = g                                                           "sgd", "adam"
          clip(g / max(sqrt(v), eps), -c, c), c = n^(1/4)             "adopt", from the second step (n = 1) on
    u^j = b_j u^j + (1 - b_j) h
    d   = (1 - sum_j omega_j) h + sum_j omega_j u^j
    v   = b2 v + (1 - b2) g g                                         "adam": before use;  "adopt": after use
    x   = x (1 - eta lambda) - eta d                                  "adam": d / (sqrt(v) + eps)

No bias correction. ADOPT's first step only sets v = g g.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

__all__ = ["ADOPT", "QuasiHyperbolic"]


class QuasiHyperbolic(Optimizer):
    """Quasi-hyperbolic SGD, Adam or ADOPT with N momenta: the update of MT-DAO (arXiv 2510.05361).

    State: "exp_avg" for one momentum, "exp_avg_0", "exp_avg_1", ... for several; "exp_avg_sq"; "step".

    Args:
        params: as in torch.optim.
        lr: eta.
        momenta: decays b_j of the first moments.
        omegas: weights omega_j >= 0 with sum at most 1. No published default was found; 0.95 is ours.
        beta2: decay of the second moment.
        eps: "adopt": lower bound of sqrt(v); "adam": added to it. None: 1e-6 and 1e-8.
        weight_decay: lambda, decoupled; for "adopt" from the second step on.
        form: "sgd", "adam" or "adopt".

    Raises:
        ValueError: an argument is out of its range.

    Example:
        >>> import torch
        >>> from lowcomm.optim import QuasiHyperbolic
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = QuasiHyperbolic(model.parameters(), lr=1e-3, momenta=(0.99,), omegas=(0.95,))
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        momenta: Sequence[float] = (0.99,),
        omegas: Sequence[float] = (0.95,),
        beta2: float = 0.9999,
        eps: float | None = None,
        weight_decay: float = 0.0,
        form: Literal["sgd", "adam", "adopt"] = "adopt",
    ):
        if form not in ("sgd", "adam", "adopt"):
            raise ValueError(f"form must be 'sgd', 'adam' or 'adopt' but is: {form!r}")
        if len(momenta) != len(omegas) or not momenta or not all(0.0 <= b < 1.0 for b in (*momenta, beta2)):
            raise ValueError(f"need one omega for each momentum, decays in [0, 1) but got {momenta}, {omegas}, {beta2}")
        if min(omegas) < 0.0 or sum(omegas) > 1.0 + 1e-12:
            raise ValueError(f"omegas must be >= 0 and sum to at most 1 but is: {tuple(omegas)}")
        if lr < 0.0 or weight_decay < 0.0:
            raise ValueError(f"lr and weight_decay must be >= 0 but are: {lr}, {weight_decay}")
        eps = (1e-6 if form == "adopt" else 1e-8) if eps is None else eps
        defaults: dict[str, Any] = {"lr": lr, "momenta": tuple(momenta), "omegas": tuple(omegas), "beta2": beta2}
        super().__init__(params, {**defaults, "eps": eps, "weight_decay": weight_decay, "form": form})

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    quasi_hyperbolic_(p, p.grad, self.state[p], group)
        return loss


class ADOPT(QuasiHyperbolic):
    """ADOPT (arXiv 2411.02853): Adam whose second moment never contains the present gradient.

    Args:
        params: as in torch.optim.
        lr: learning rate.
        betas: (b1, b2).
        eps: lower bound of sqrt(v).
        weight_decay: decoupled.

    Example:
        >>> import torch
        >>> from lowcomm.optim import ADOPT
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = ADOPT(model.parameters(), lr=1e-3)
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.9999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ):
        super().__init__(
            params, lr, (betas[0],), (1.0,), beta2=betas[1], eps=eps, weight_decay=weight_decay, form="adopt"
        )


def momentum_names(count: int) -> list[str]:
    """State names of `count` momenta."""
    return ["exp_avg"] if count == 1 else [f"exp_avg_{j}" for j in range(count)]


def quasi_hyperbolic_(x: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    """The update at the top of this module, in place on `x` and `state`."""
    names, form = momentum_names(len(group["momenta"])), group["form"]
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32)
        state.update({name: torch.zeros_like(x) for name in names})
        if form != "sgd":
            state["exp_avg_sq"] = torch.zeros_like(x)
    n = int(state["step"])
    state["step"] += 1
    v: Tensor = state.get("exp_avg_sq", x)  # "sgd" has none and does not look at it
    h = g
    if form == "adopt":
        if n == 0:
            v.copy_(g * g)
            return
        bound = n**0.25
        h = (g / v.sqrt().clamp_(min=group["eps"])).clamp_(-bound, bound)
    x.mul_(1.0 - group["lr"] * group["weight_decay"])
    d = h * (1.0 - sum(group["omegas"]))
    for name, b, omega in zip(names, group["momenta"], group["omegas"], strict=True):
        u = state[name].mul_(b).add_(h, alpha=1.0 - b)
        d.add_(u, alpha=omega)
    if form != "sgd":
        v.mul_(group["beta2"]).add_(g * g, alpha=1.0 - group["beta2"])
    x.sub_(d * group["lr"] if form != "adam" else d * group["lr"] / (v.sqrt() + group["eps"]))
