"""Top-k on a support that all ranks share: no index lists, and the values are summed as plain floats.

    p = decay e + x on each rank;  agree on a support S;  mean of p[S];  update = that mean on S, 0 elsewhere
    e = p outside S, 0 on S

How ranks agree on S (lowcomm.compress.support): the largest entries of one rank, taking turns; the largest of the last
update and some random ones, which costs no bytes; or the groups of neighbours with the largest energy over all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import ceil

import torch
from torch import Tensor

from ..compress import (
    Feedback,
    decode_support,
    encode_support,
    energy_support,
    group_energy,
    history_support,
    leader_support,
)
from ..compress.support import support_nbytes
from .dense import reduce_dense
from .exchange import Buffers, Exchange, Shares, finite_flags, initial_state
from .peers import FIRST, Peers
from .plan import Traffic, ring_bytes

__all__ = ["Shared", "SharedTopK"]

_SUPPORTS = ("leader", "history", "energy")


@dataclass(frozen=True)
class SharedTopK:
    """Send the same `density` of the elements from every rank. Give it to `AllReduce` in place of a codec.

    Not a codec: the ranks choose the support together. It needs error feedback (`EF14` or `EFDecay`).

    Args:
        density: share of the elements that is sent, in (0, 1]. Default 1/64.
        support: "leader": the largest entries of one rank, another each round; "history" (default): of the last update,
            and random ones; "energy": whole groups of neighbours, by their energy summed over the ranks.
        refresh: share of random positions in "history". Default 0.1.
        group: neighbours in a group of "energy". Default 32.
        seed: of the random positions.

    Raises:
        ValueError: density outside (0, 1], or another support.

    Source: ScaleCom (arXiv 2104.11125) for "leader"; ARC-Top-K (arXiv 2510.26709) for the idea of "energy".

    >>> SharedTopK(density=1 / 4).config
    'sharedtopk:density=0.25,group=32,refresh=0.1,seed=0,support=history'
    """

    density: float = 1 / 64
    support: str = "history"
    refresh: float = 0.1
    group: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.density <= 1:
            raise ValueError(f"density must be in (0, 1] but is: {self.density}")
        if self.support not in _SUPPORTS:
            raise ValueError(f"support must be one of {_SUPPORTS} but is: {self.support!r}")

    @property
    def unbiased(self) -> bool:
        return False

    @property
    def config(self) -> str:
        """Canonical text of the settings."""
        settings = sorted((f.name, getattr(self, f.name)) for f in fields(self))
        return "sharedtopk:" + ",".join(f"{name}={value}" for name, value in settings)

    def size(self, elements: int) -> int:
        """k: entries that are sent of a vector, at least one."""
        return min(elements, max(1, ceil(self.density * elements)))


class Shared:
    """The exchange of a SharedTopK."""

    name = "shared"

    def __init__(self, method: SharedTopK, feedback: Feedback | None, buffers: Buffers) -> None:
        decay = 1.0 if feedback is None else getattr(feedback, "decay", None)
        if decay is None:
            raise ValueError(f"SharedTopK works with EF14, EFDecay or no feedback but got: {feedback!r}")
        self._method, self._feedback, self._buffers, self._decay = method, feedback, buffers, float(decay)

    def settings(self) -> dict[str, object]:
        return {"codec": self._method.config, "feedback": repr(self._feedback), "algorithm": self.name}

    def codec_id(self) -> int:
        return 0

    def traffic(self, elements: int, world_size: int) -> Traffic:
        if not elements:
            return Traffic(0, 0)
        k, extra, group = self._method.size(elements), 0, self._method.group
        if self._method.support == "leader":
            extra = (world_size - 1) * support_nbytes(elements, k)  # by the leader
        elif self._method.support == "energy":
            extra = ring_bytes(4 * -(-elements // group), world_size)
            k = min(elements, max(1, k // group) * group)
        steps = {"leader": 1, "history": 0, "energy": 2 * (world_size - 1)}[self._method.support]
        return Traffic(extra + ring_bytes(4 * k, world_size), steps + 2 * (world_size - 1))

    def prepare(self, exchange: Exchange) -> None:
        # The support depends on the exchange before this one: everything else happens in the lane.
        exchange.flags = finite_flags(exchange.flat) if exchange.weight > 0 else 0

    def own(self, exchange: Exchange) -> Tensor:
        raise ValueError(
            "SharedTopK chooses what to send during the exchange, so that keep_own=True cannot work with it"
        )

    def communicate(self, exchange: Exchange, peers: Peers, shares: Shares, lengths: Sequence[int]) -> None:
        n, p = exchange.elements, exchange.flat
        if n == 0:
            exchange.result = p
            return
        state = {} if self._feedback is None else initial_state(self._feedback, exchange)
        counted = shares.factors[peers.rank] != 0.0
        if not counted:
            p.zero_()
        elif state:
            e = state["residual"]
            p.add_(e if self._decay == 1.0 else e * self._decay)
        if exchange.flags:
            p.masked_fill_(~torch.isfinite(p), 0.0)
        support = self._support(exchange, p, peers, shares)
        values = p[support]
        reduce_dense(values, peers, shares)
        exchange.receipt.flags |= finite_flags(values)
        self._finish(exchange, support, values, state, counted)

    def _finish(
        self, exchange: Exchange, support: Tensor, values: Tensor, state: dict[str, Tensor], counted: bool
    ) -> None:
        n, p = exchange.elements, exchange.flat
        if state:
            exchange.candidate = {"residual": p.index_fill_(0, support, 0.0)} if counted else dict(state)
        result = self._buffers.take(n, torch.float32, p.device) if state and counted else p
        exchange.result = result.zero_().index_copy_(0, support, values)
        if self._method.support == "history":
            exchange.owner_candidate = {"previous": exchange.result.clone()}

    def _support(self, exchange: Exchange, p: Tensor, peers: Peers, shares: Shares) -> Tensor:
        method, n = self._method, exchange.elements
        k = method.size(n)
        if method.support == "leader":
            return self._leaders_support(exchange, p, k, peers, shares)
        if method.support == "energy":
            energy = group_energy(p, method.group)
            peers.all_reduce(energy)
            return energy_support(energy, k, n, method.group)
        update = exchange.owner_base.get("previous")
        update = torch.zeros_like(p) if update is None else update
        key = {"step": exchange.round, "seed": method.seed, "bucket": exchange.bucket}
        return history_support(update, k, refresh=method.refresh, **key)

    def _leaders_support(self, exchange: Exchange, p: Tensor, k: int, peers: Peers, shares: Shares) -> Tensor:
        counted = [rank for rank, factor in enumerate(shares.factors) if factor]
        leader = counted[exchange.round % len(counted)]
        body = torch.empty(support_nbytes(p.numel(), k), dtype=torch.uint8, device=p.device)
        if peers.rank == leader:
            body.copy_(encode_support(leader_support(p, k), p.numel()))
        peers.broadcast(body, leader, FIRST)
        return decode_support(body, p.numel(), k)
