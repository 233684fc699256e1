"""FedAvg: every round some clients train on their own data, and the mean counts samples (arXiv 1602.05629).

Client i has n_i samples and makes H_i = E ceil(n_i / b) steps in a round; S is the round's random set of clients:

    i in S:      x_i <- H_i inner steps from X
    all:         X = sum_{i in S} n_i x_i / sum_{i in S} n_i;   x_i = X
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.optim import Optimizer
from typing_extensions import Unpack

from .engine import LowCommOptimizer
from .local_sgd import rule_of_means
from .options import SharedOptions
from .schedules import Every
from .state import InFlight

__all__ = ["FedAvg"]


class FedAvg(LowCommOptimizer):
    """FedAvg (arXiv 1602.05629): local SGD with partial participation and weights by number of samples.

    The update is X = sum_{i in S} n_i x_i / sum_{i in S} n_i.

    Args:
        inner: the optimizer that trains this client; its state stays with the client between its rounds.
        samples: n_i, size of this client's data. Clients may differ.
        batch_size: b, samples in a step.
        epochs: E, passes over its data that a client makes in a round.
        fraction: C, part of the clients that a round takes, at least one of them.
        seed: of the choice; the same on all workers.
        **shared: see `LowCommOptimizer`, without weights, warmup_steps and phase.

    Raises:
        ValueError: an argument out of its range, or one that FedAvg sets itself.

    Example:
        >>> import torch
        >>> from lowcomm.optim import FedAvg
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = FedAvg(torch.optim.SGD(model.parameters(), lr=0.1), samples=6, batch_size=2)
        >>> for _ in range(2):
        ...     if not optimizer.participates:
        ...         optimizer.sit_out()
        ...         continue
        ...     for batch in torch.ones(6, 2).split(2):
        ...         model(batch).sum().backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        >>> optimizer.num_syncs
        2

    The paper's server chooses the clients; here all derive the same choice from `seed` and the round.
    """

    def __init__(
        self,
        inner: Optimizer | Sequence[Optimizer],
        *,
        samples: int,
        batch_size: int,
        epochs: int = 1,
        fraction: float = 1.0,
        seed: int = 0,
        **shared: Unpack[SharedOptions],
    ):
        if min(samples, batch_size, epochs) < 1 or not 0.0 < fraction <= 1.0:
            raise ValueError(
                "need samples, batch_size and epochs of at least 1 and 0 < fraction <= 1 but got "
                f"{samples}, {batch_size}, {epochs}, {fraction}"
            )
        fixed = [name for name in ("sync_every", "weights", "warmup_steps", "phase") if name in shared]
        if fixed:
            raise ValueError(f"FedAvg sets {', '.join(fixed)} itself; use LocalSGD to choose")
        self._samples, self._fraction, self._seed = samples, fraction, seed
        shared["weights"] = self._sample_weight
        length = epochs * math.ceil(samples / batch_size)
        super().__init__(
            inner,
            sync_every=Every(length),
            rule=rule_of_means(shared),
            outer_defaults={"clients_round": 0, "fraction": fraction, "seed": seed},
            **shared,
        )

    @property
    def participants(self) -> list[int]:
        """The ranks that train in the present round."""
        clients = self._reducer.world_size
        generator = torch.Generator().manual_seed(self._seed * (1 << 32) + self.param_groups[0]["clients_round"])
        count = max(1, round(self._fraction * clients))
        return sorted(torch.randperm(clients, generator=generator)[:count].tolist())

    @property
    def participates(self) -> bool:
        """Whether this worker trains in the present round; one that does not calls `sit_out()` instead of stepping."""
        return self._reducer.rank in self.participants

    @torch.no_grad()
    def sit_out(self) -> None:
        """Be there for the end of a round without training, and take over its result.

        Raises:
            RuntimeError: the round counts on this worker.
        """
        if self.participates:
            raise RuntimeError(f"round {self.param_groups[0]['clients_round']} counts on this worker; call step()")
        if not self._ready:
            self._lay_out()
        if self._next_event <= self._steps:
            self._plan()
        self._set_steps(self.param_groups[0]["next_sync"])
        self._run_events()

    def _sample_weight(self) -> float:
        return float(self._samples if self.participates else 0)

    def _finish(self, due: list[InFlight]) -> bool:
        done = super()._finish(due)
        if done:
            self._set_all("clients_round", self.param_groups[0]["clients_round"] + 1)
        return done
