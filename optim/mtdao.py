"""MT-DAO: slow momenta, mixed with the gradient, averaged at long periods (arXiv 2510.05361).

The inner step is `QuasiHyperbolic` (momenta.py); parameters, every momentum and the second moment are averaged at their
own periods, as in DES-LOC. A momentum whose half-life is at least its period survives it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from .desloc import DESLOC
from .momenta import QuasiHyperbolic, momentum_names
from .options import SharedOptions

__all__ = ["MTDAO"]


class MTDAO(DESLOC):
    """MT-DAO (arXiv 2510.05361): DES-LOC around a quasi-hyperbolic optimizer with slow momenta.

    Args:
        params: parameters, or a `QuasiHyperbolic` that holds them already.
        sync_every: one period for everything (the paper uses 32), or a period for "params" and for each state name.
        lr, momenta, omegas, beta2, eps, weight_decay, form: see `QuasiHyperbolic`; used when `params` is not one.
        sync_point: see `DESLOC`.
        **shared: see `LowCommOptimizer`.

    Raises:
        ValueError: an argument is out of its range.

    Example:
        >>> import torch
        >>> from lowcomm.optim import MTDAO
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = MTDAO(model.parameters(), lr=1e-3, momenta=(0.99,), omegas=(0.95,), sync_every=32)

    The mixing weight has no published default; 0.95 is ours, to be tuned in 0.7 to 0.98.
    """

    def __init__(
        self,
        params: ParamsT | QuasiHyperbolic,
        *,
        sync_every: int | Mapping[str, int] = 32,
        lr: float = 1e-3,
        momenta: Sequence[float] = (0.99,),
        omegas: Sequence[float] = (0.95,),
        beta2: float = 0.9999,
        eps: float | None = None,
        weight_decay: float = 0.0,
        form: Literal["sgd", "adam", "adopt"] = "adopt",
        sync_point: Literal["post", "pre"] = "post",
        **shared: Unpack[SharedOptions],
    ):
        inner = params
        if not isinstance(inner, QuasiHyperbolic):
            inner = QuasiHyperbolic(params, lr, momenta, omegas, beta2, eps, weight_decay, form)  # type: ignore[arg-type]
        if isinstance(sync_every, int):
            group = inner.param_groups[0]
            names = momentum_names(len(group["momenta"])) + (["exp_avg_sq"] if group["form"] != "sgd" else [])
            sync_every = dict.fromkeys(["params", *names], sync_every)
        super().__init__(inner, sync_every=sync_every, sync_point=sync_point, **shared)
