"""Deep gradient compression: momentum correction and factor masking for sparse gradients (arXiv 1712.01887).

Per element, with gradient g, momentum m, velocity u and accumulated velocity v, both zero at the start:

    clip       g = g * min(1, t / ||g||),  t = clip_norm / sqrt(number of ranks)
    plain      u = m u + g;      v = v + u
    Nesterov   u = m (u + g);    v = v + u + g
    send       d = C(v);         v = v - d
    mask       u = 0 where d is not 0

The mean of d is applied with plain SGD: a second momentum in the optimizer would count it twice. Weight decay is added
after the exchange.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .codec import HAS_INF, HAS_NAN, Codec
from .feedback import Feedback, State
from .policy import sections

__all__ = ["DGC", "warmup_density"]


@dataclass(frozen=True)
class DGC(Feedback):
    """Deep gradient compression as an error-feedback rule: x is the local gradient, v the residual.

    For a codec that keeps its entries exactly (top-k with float32 values) v is zero where something was sent, as in
    the paper; a codec that rounds them leaves the rounding error there. Parts of the vector whose codec sends
    everything (in a `Mixed` codec, typically vectors) get local momentum and no masking: nothing is late there.
    With masking off, sum(d) + v is the sum of the momentum-filtered gradients u.

    Args:
        momentum: m in [0, 1). Default 0.9.
        nesterov: Nesterov form. Default False.
        masking: momentum factor masking. Default True.
        clip_norm: threshold for the norm of the mean gradient; each rank clips at clip_norm / sqrt(num_ranks).
            Default None: no clipping.
        num_ranks: number of ranks, used by `clip_norm` only. Default 1.

    Source: arXiv 1712.01887. The norm is that of the vector given, one bucket.
    """

    momentum: float = 0.9
    nesterov: bool = False
    masking: bool = True
    clip_norm: float | None = None
    num_ranks: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be in [0, 1) but is: {self.momentum}")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"clip_norm must be positive, or None for no clipping, but is: {self.clip_norm}")
        if self.num_ranks < 1:
            raise ValueError(f"num_ranks must be >= 1 but is: {self.num_ranks}")

    def init(self, n: int, device: torch.device) -> State:
        return {"velocity": torch.zeros(n, device=device), "residual": torch.zeros(n, device=device)}

    def encode(
        self, codec: Codec, x: Tensor, state: State, out: Tensor, *, step: int = 0, rank: int = 0, bucket: int = 0
    ) -> tuple[int, State]:
        velocity, filtered = self._filter(x, state["velocity"])
        flags = codec.encode_feedback(filtered, state["residual"], x, out, step=step, rank=rank, bucket=bucket)
        if self.masking:
            decoded = torch.empty_like(velocity)
            codec.decode(out, decoded, step=step, rank=rank, bucket=bucket)
            for part, start, stop in sections(codec, x.numel()):
                if not part.requantizable:
                    velocity[start:stop].masked_fill_(decoded[start:stop] != 0, 0.0)
        if flags & (HAS_NAN | HAS_INF):
            velocity.masked_fill_(~torch.isfinite(velocity), 0.0)
        return flags, {"velocity": velocity, "residual": x}

    def discard(self, x: Tensor, state: State) -> State:
        velocity, filtered = self._filter(x, state["velocity"])
        residual = filtered + state["residual"]
        for value in (velocity, residual):
            value.masked_fill_(~torch.isfinite(value), 0.0)
        return {"velocity": velocity, "residual": residual}

    def _filter(self, g: Tensor, velocity: Tensor) -> tuple[Tensor, Tensor]:
        """(new u, what is added to v); `g` is consumed."""
        if self.clip_norm is not None:
            norm = torch.linalg.vector_norm(g)
            scale = (self.clip_norm / math.sqrt(self.num_ranks) / norm).clamp(max=1.0)
            g.mul_(torch.where(torch.isfinite(norm), scale, 1.0))  # no clipping by a norm that is not known
        if not self.nesterov:
            u = (velocity * self.momentum).add_(g)
            return u, u
        u = (velocity + g).mul_(self.momentum)
        return u, g.add_(u)


def warmup_density(epoch: int, density: float, warmup_epochs: int | Sequence[float] = 4) -> float:
    """The density of an epoch of the warm-up: max(k^(epoch + 1), density) with k = density^(1 / (warmup_epochs + 1)).

    Args:
        epoch: number of the epoch, from 0.
        density: final fraction of entries that are sent, in (0, 1].
        warmup_epochs: length of the warm-up, or the list of its densities, one for each epoch. Default 4.

    >>> [round(warmup_density(epoch, 0.001), 3) for epoch in range(6)]
    [0.251, 0.063, 0.016, 0.004, 0.001, 0.001]
    """
    if epoch < 0 or not 0 < density <= 1:
        raise ValueError(f"epoch must be >= 0 and density in (0, 1] but they are: {epoch}, {density}")
    if not isinstance(warmup_epochs, int):
        return warmup_epochs[epoch] if epoch < len(warmup_epochs) else density
    if epoch >= warmup_epochs:
        return density
    return max(math.pow(density, (epoch + 1) / (warmup_epochs + 1)), density)
