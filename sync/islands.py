"""Algorithm A4: compressed exchange between islands of ranks that are joined by fast links, work split inside them.

    1  inside an island   reduce-scatter in float32: rank j holds slice j of the island's mean
    2  between islands    rank j exchanges slice j with the ranks j of all other islands, compressed
    3  inside an island   all-gather of the slices in float32

Each byte crosses the slow links once, and every rank encodes, sends and decodes only its slice; residuals live with the
slices. Where all ranks of an island hold the same vector, as under DDP, step 1 is nothing but taking the slice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .allreduce import AllReduce
from .errors import Aborted, Disagreement, PeerFailure, SyncError
from .exchange import Exchange, finite_flags
from .groups import private_group, resolve_group
from .hello import Hello, check_agreement, combined_flags, exchange_hellos, exchange_votes
from .lane import lane_of
from .peers import FIRST, SECOND, Peers, network_error
from .receipt import Receipt
from .slices import Partition
from .streams import hand_over, side_stream
from .work import Work

__all__ = ["IslandAllReduce"]

State = dict[str, Tensor]


class IslandAllReduce:
    """`AllReduce` in three steps, for ranks in islands. `start`, `reduce` and states are used alike.

    All islands have the same number of ranks; rank j of an island is in one process group with the ranks j of all other
    islands.

    Args:
        process_group: the group of this rank between the islands.
        island: the group of this rank inside its island.
        codec, feedback: between the islands, as in `AllReduce`.
        same: all ranks of an island always give the same vector and weight, as under DDP; else the result is the mean
            over all ranks of all islands.
        options: further keyword arguments of `AllReduce`. Robust rules and "mean_contributors" take each island as one.

    Example, two nodes of eight ranks each:
        mesh = init_device_mesh("cuda", (2, 8), mesh_dim_names=("node", "local"))
        reducer = IslandAllReduce(mesh["node"], mesh["local"], Int8(), "auto", same=True)
    """

    def __init__(
        self,
        process_group: Any,
        island: Any,
        codec: Any = None,
        feedback: Any = None,
        *,
        same: bool = False,
        **options: Any,
    ) -> None:
        if options.get("statistics"):
            raise ValueError("statistics are about whole vectors, but ranks of an island exchange slices; leave it off")
        self._between = AllReduce(process_group, codec, feedback, **options)
        self._island_group = resolve_group(island)
        self._same = same
        self._lane = None if self._island_group is None else lane_of(self._island_group)
        self._island = Peers(self._island_group)
        self._works: dict[int, Work] = {}
        self.rank, self.world_size = self._between.rank, self._between.world_size

    def start(
        self,
        flat: Tensor,
        *,
        bucket: int = 0,
        round: int = 0,
        weight: float = 1.0,
        check: int = 0,
        describe: Callable[[], dict[str, object]] | None = None,
        hold: bool = False,
    ) -> Work:
        """Begin to reduce `flat`, (n,) float32; see `AllReduce.start`."""
        exchange = self._exchange(flat, bucket, round, weight, check, describe, hold)
        if self._lane is None:
            exchange.run()
            exchange.publish()
        elif self._use_groups(exchange):
            self._lane.submit(exchange)
        return Work(exchange, self)

    def reduce(self, flat: Tensor, **labels: Any) -> Work:
        """As `start` and `wait` in one, without the helper thread."""
        exchange = self._exchange(flat, **{**_DEFAULTS, **labels})
        work = Work(exchange, self)
        if self._lane is None:
            exchange.run()
            exchange.publish()
        elif not self._lane.run(exchange):
            self._lane.submit(exchange)
        work.wait()
        return work

    def _exchange(
        self,
        flat: Tensor,
        bucket: int,
        round: int,
        weight: float,
        check: int,
        describe: Callable[[], dict[str, object]] | None,
        hold: bool,
    ) -> Exchange:
        self._between.check_arguments(flat, bucket, round, weight)
        receipt = Receipt(round, bucket, "islands", flat.numel(), self.world_size)
        exchange = Exchange(flat, bucket, round, float(weight), self.rank, 0, receipt, check, describe, hold=hold)
        exchange.flags = finite_flags(flat) if weight > 0 else 0
        exchange.drive = self._drive
        hand_over(flat)
        return exchange

    def _use_groups(self, exchange: Exchange) -> bool:
        assert self._lane is not None
        try:
            device = exchange.flat.device.type
            if device not in self._lane.groups:
                exchange_votes(self._island, True)
                self._lane.groups[device] = private_group(self._island_group, device)
            self._between.prepare_overlap(device)
        except RuntimeError as error:
            exchange.error = error if isinstance(error, SyncError) else network_error(error, ())
            exchange.publish()
            return False
        return True

    def _drive(self, exchange: Exchange) -> None:
        with side_stream(exchange.flat):
            self._three_steps(exchange)

    def _three_steps(self, exchange: Exchange) -> None:
        group = None if self._lane is None else self._lane.groups.get(exchange.flat.device.type)
        if group is not None and self._island.group is not group:
            self._island = Peers(group)
        island, before, wire = self._island, self._island.sent, self._island.wire_seconds
        hellos, error = self._agree(exchange, island)
        if error is None:
            part, weight = self._own_slice(exchange, island, hellos)
        else:
            part, weight = exchange.flat[slice(*self.owner_slice(exchange.elements))], exchange.weight
        work = self._exchange_slice(exchange, island, part, weight, combined_flags(hellos), error)
        self._bring_together(exchange, island, work)
        receipt = work.wait()
        contributors = sum(hello.weight > 0 for hello in hellos) * receipt.contributors
        exchange.receipt = replace(
            receipt,
            algorithm="islands",
            elements=exchange.elements,
            contributors=contributors,
            island_bytes=island.sent - before,
            wire_ms=receipt.wire_ms + (island.wire_seconds - wire) * 1e3,
        )

    def _agree(self, exchange: Exchange, island: Peers) -> tuple[list[Hello], SyncError | None]:
        """The hellos of the island, and what is wrong with them; the other islands hear of it in the next step."""
        hellos = exchange_hellos(island, self._between.hello(exchange))
        alike = [replace(hello, weight=0.0) for hello in hellos]
        try:
            check_agreement(island, alike, lambda: self._between.description(exchange))
            if self._same and len({hello.weight for hello in hellos}) > 1:
                raise Disagreement("weight", [hello.weight for hello in hellos])
        except PeerFailure:
            raise
        except SyncError as error:
            return hellos, error
        return hellos, None

    def _own_slice(self, exchange: Exchange, island: Peers, hellos: Sequence[Hello]) -> tuple[Tensor, float]:
        """(this rank's slice of the island's mean, the island's weight)"""
        bounds = self._partition(exchange.elements).bounds
        start, stop = bounds[island.rank]
        if self._same or island.world_size == 1:
            return exchange.flat[start:stop].clone(), exchange.weight
        weights = [hello.weight for hello in hellos]
        pieces = [exchange.flat[a:b].view(torch.uint8) for a, b in bounds]
        slots = list(torch.empty(island.world_size, 4 * (stop - start), dtype=torch.uint8, device=exchange.flat.device))
        arrival = island.all_to_all(pieces, slots, FIRST)
        total = torch.zeros(stop - start, device=exchange.flat.device)
        for rank, weight in enumerate(weights):
            part = arrival.slot(rank).view(torch.float32)
            if weight > 0:
                total.add_(part if weight == 1.0 else part * weight)
        arrival.finish()
        return (total.div_(sum(weights)) if sum(weights) > 0 else total), sum(weights)

    def _exchange_slice(
        self, exchange: Exchange, island: Peers, part: Tensor, weight: float, flags: int, error: SyncError | None
    ) -> Work:
        """The step between the islands. All ranks of an island come through it, or it fails on all of them."""
        work: Work | None = None
        try:
            work = self._between.exchange_slice(part, exchange, weight, flags, error)
        except Exception as failure:
            exchange_votes(island, False)
            raise failure
        failed = [rank for rank, succeeded in enumerate(exchange_votes(island, True)) if not succeeded]
        if failed:
            work.discard()
            raise Aborted(f"ranks {failed} of this island could not exchange their slices; it was undone", failed)
        return work

    def _bring_together(self, exchange: Exchange, island: Peers, work: Work) -> None:
        bounds = self._partition(exchange.elements).bounds
        start, stop = bounds[island.rank]
        exchange.flat[start:stop].copy_(work.result)
        slots = [exchange.flat[a:b].view(torch.uint8) for a, b in bounds]
        try:
            for slot, message in zip(slots, island.all_gather(slots[island.rank], slots, SECOND).finish(), strict=True):
                if slot.data_ptr() != message.data_ptr():
                    slot.copy_(message)
        except PeerFailure:
            work.discard()
            raise
        exchange.result = exchange.flat
        if exchange.hold:
            self._works[id(exchange)] = work
        else:
            work.commit()
            exchange.settle()

    def commit(self, exchange: Exchange) -> None:
        """For `Work.commit`."""
        work = self._works.pop(id(exchange), None)
        if work is not None:
            work.commit()
            exchange.settle()

    def discard(self, exchange: Exchange) -> None:
        """For `Work.discard`."""
        work = self._works.pop(id(exchange), None)
        if work is not None:
            work.discard()
            exchange.error = Aborted("this exchange was discarded by its caller")
            exchange.settle()

    def _partition(self, elements: int) -> Partition:
        return Partition(elements, self._island.world_size)

    def owner_slice(self, elements: int) -> tuple[int, int]:
        """[start, stop) of the slice of a vector that this rank exchanges with other islands."""
        return self._partition(elements).bounds[self._island.rank]

    def state_names(self) -> tuple[str, ...]:
        """Names of the tensors that `state` has after the first exchange."""
        return tuple(_outer_name(name) for name in self._between.state_names())

    def state(self, bucket: int = 0) -> State:
        """A copy of the feedback state of a bucket. All tensors have the length of `owner_slice`."""
        state = self._between.state(bucket)
        length = max((tensor.numel() for tensor in state.values()), default=0)
        start, stop = self._between.owner_slice(length)
        result = {}
        for name, tensor in state.items():
            if name.startswith("owner_"):  # what this rank owns of the slice, padded to the slice
                padded = torch.zeros(length, device=tensor.device)
                padded[start:stop] = tensor
                tensor = padded
            result[_outer_name(name)] = tensor
        return result

    def load_state(self, bucket: int, state: State) -> None:
        """Replace the feedback state of a bucket by a copy of `state`, as `state()` returned it. {} starts afresh."""
        length = max((tensor.numel() for tensor in state.values()), default=0)
        start, stop = self._between.owner_slice(length)
        inner = {}
        for name in self._between.state_names():
            tensor = state.get(_outer_name(name))
            if tensor is not None:
                inner[name] = tensor[start:stop] if name.startswith("owner_") else tensor
        self._between.load_state(bucket, inner)


_DEFAULTS: dict[str, Any] = {
    "bucket": 0,
    "round": 0,
    "weight": 1.0,
    "check": 0,
    "describe": None,
    "hold": False,
}


def _outer_name(name: str) -> str:
    return name.replace("owner_", "owner_second_") if name.startswith("owner_") else f"owner_{name}"
