"""Send bytes to every other rank of a group and receive theirs, with errors that name ranks.

gloo runs on point-to-point messages: they overlap decoding with receiving, a broken or silent peer is known by its
rank, and gloo's own all-gather collapses above a few MiB. Other backends run on all-to-all and all-gather of uint8.
Messages on a GPU go over the CPU where the backend is gloo alone.
"""

from __future__ import annotations

import pickle
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from .errors import PeerFailure, PeerTimeout
from .groups import backend_name, rank_in

_TAG = 0x4C430000  # of our point-to-point messages, so that they never match the user's
# Kinds of messages: one that a failure left behind is never taken for one of another kind.
HELLO, FIRST, SECOND, VOTE, PARTIAL, OBJECT, SUM = range(7)
_PHASES = ("agreement", "first", "second", "agreement", "scalars", "agreement", "sum")  # by kind, for receipts


class Peers:
    """The ranks of one group as seen by this rank. Counts bytes and time on the wire.

    The group's own methods are called, so that it need not be one that `torch.distributed` has registered.

    Args:
        group: a ProcessGroup or a backend of one, or None for a world of one.
        point_to_point: send with isend/irecv; None: on gloo only.
    """

    def __init__(self, group: Any | None, point_to_point: bool | None = None) -> None:
        self.group: Any = group
        self.rank = 0 if group is None else rank_in(group)
        self.world_size = 1 if group is None else group.size()
        backend = "" if group is None else backend_name(group)
        self.point_to_point = "gloo" in backend if point_to_point is None else point_to_point
        self._has_nccl = "nccl" in backend
        self.device = torch.device("cpu" if self.point_to_point or not self._has_nccl else "cuda")  # of small messages
        self.sent_in: Counter[str] = Counter()  # bytes by phase
        self.received_in: Counter[str] = Counter()
        self.wire_seconds = 0.0

    @property
    def sent(self) -> int:
        """All bytes sent so far."""
        return self.sent_in.total()

    @property
    def received(self) -> int:
        """All bytes received so far."""
        return self.received_in.total()

    def all_gather(self, mine: Tensor, slots: Sequence[Tensor], kind: int) -> Arrival:
        """Send `mine` to every rank; slots[r] receives rank r's. The own slot is not used.

        Args:
            mine: uint8.
            slots: one uint8 tensor for each rank, as long as that rank's message.
            kind: HELLO, FIRST, SECOND or VOTE.
        """
        if self._by_messages(mine) or self.world_size == 1:
            return Arrival(self, [mine] * self.world_size, slots, kind)
        return self._all_gather_collective(mine, slots, kind)

    def all_to_all(self, outgoing: Sequence[Tensor], slots: Sequence[Tensor], kind: int) -> Arrival:
        """Send outgoing[r] to rank r; slots[r] receives what rank r has for this rank. All of one length."""
        if self._by_messages(slots[0]) or self.world_size == 1:
            return Arrival(self, outgoing, slots, kind)
        received = torch.empty(slots[0].numel() * self.world_size, dtype=torch.uint8, device=slots[0].device)
        sent = torch.cat(list(outgoing))
        self._wait(lambda: self.group.alltoall_base(received, sent, [], [], dist.AllToAllOptions()))
        self._count(kind, sent.numel() // self.world_size * (self.world_size - 1))
        return Arrival(self, outgoing, list(received.chunk(self.world_size)))

    def _all_gather_collective(self, mine: Tensor, slots: Sequence[Tensor], kind: int) -> Arrival:
        longest = max(slot.numel() for slot in slots)
        received = torch.empty(longest * self.world_size, dtype=torch.uint8, device=mine.device)
        padded = mine if mine.numel() == longest else torch.nn.functional.pad(mine, (0, longest - mine.numel()))
        options = c10d.AllgatherOptions()  # type: ignore[attr-defined]
        self._wait(lambda: self.group._allgather_base(received, padded, options))
        self._count(kind, longest * (self.world_size - 1))
        parts = [part[: slot.numel()] for part, slot in zip(received.view(-1, longest), slots, strict=True)]
        return Arrival(self, [mine] * self.world_size, parts)

    def all_reduce(self, x: Tensor) -> None:
        """Sum `x` over the ranks in place. Counted as a ring: 2 (N - 1) / N of its bytes in each direction."""
        if self.world_size == 1 or x.numel() == 0:
            return
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.SUM  # type: ignore[assignment]
        self._wait(lambda: self.group.allreduce([x], options))
        self._count(SUM, 2 * (self.world_size - 1) * x.numel() * x.element_size() // self.world_size)

    def broadcast(self, message: Tensor, source: int, kind: int) -> None:
        """Copy `message`, uint8, from rank `source` to all; the source sends it N - 1 times."""
        if self.world_size == 1:
            return
        if not self._by_messages(message):
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor = source, 0
            self._wait(lambda: self.group.broadcast([message], options))
            self.sent_in[_PHASES[kind]] += message.numel() * (self.world_size - 1) if self.rank == source else 0
            self.received_in[_PHASES[kind]] += 0 if self.rank == source else message.numel()
            return
        outgoing = [message if self.rank == source else None] * self.world_size
        slots = [message if rank == source else None for rank in range(self.world_size)]
        arrived = Arrival(self, outgoing, slots, kind).finish()
        if self.rank != source and arrived[0].data_ptr() != message.data_ptr():
            message.copy_(arrived[0])

    def _by_messages(self, tensor: Tensor) -> bool:
        """Whether this tensor travels by isend/irecv: over gloo, and not where NCCL takes tensors on a GPU."""
        return self.point_to_point and not (self._has_nccl and tensor.is_cuda)

    def staged(self, tensor: Tensor) -> bool:
        """Whether a message must go over the CPU."""
        return tensor.is_cuda and self._by_messages(tensor)

    def shift(self, message: Tensor, slot: Tensor, kind: int) -> None:
        """Send `message` to the next rank, wrapping around, and receive the previous one's in `slot`."""
        right, left = (self.rank + 1) % self.world_size, (self.rank - 1) % self.world_size
        if self._by_messages(message):
            outgoing = [message if rank == right else None for rank in range(self.world_size)]
            slots = [slot if rank == left else None for rank in range(self.world_size)]
            with Arrival(self, outgoing, slots, kind) as arrival:
                arrived = arrival.slot(left)
            if arrived.data_ptr() != slot.data_ptr():
                slot.copy_(arrived)
            return
        sizes = [[message.numel() if rank == peer else 0 for rank in range(self.world_size)] for peer in (left, right)]
        self._wait(lambda: self.group.alltoall_base(slot, message, *sizes, dist.AllToAllOptions()))
        self._count(kind, message.numel())

    def all_gather_object(self, value: object) -> list[Any]:
        """One picklable object from every rank. Used on the way to an error only."""
        if self.world_size == 1:
            return [value]
        mine = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(self.device)
        length = torch.tensor([mine.numel()], device=self.device).view(torch.uint8)
        table = list(torch.empty(self.world_size, 8, dtype=torch.uint8, device=self.device))
        lengths = [int(part.view(torch.int64)) for part in self.all_gather(length, table, OBJECT).finish()]
        slots = [torch.empty(n, dtype=torch.uint8, device=self.device) for n in lengths]
        return [pickle.loads(bytes(part.tolist())) for part in self.all_gather(mine, slots, OBJECT).finish()]

    def irecv(self, slot: Tensor, rank: int, kind: int) -> Any:
        """Begin to receive; counted."""
        self.received_in[_PHASES[kind]] += slot.numel()
        return self.group.recv([slot], rank, _TAG + kind)

    def isend(self, message: Tensor, rank: int, kind: int) -> Any:
        """Begin to send; counted."""
        self.sent_in[_PHASES[kind]] += message.numel()
        return self.group.send([message], rank, _TAG + kind)

    def _count(self, kind: int, num_bytes: int) -> None:
        self.sent_in[_PHASES[kind]] += num_bytes
        self.received_in[_PHASES[kind]] += num_bytes

    def _wait(self, start: Callable[[], Any]) -> None:
        """Start a collective and wait for it."""
        begin = time.perf_counter()
        try:
            start().wait()
        except RuntimeError as error:
            raise network_error(error, ()) from error
        finally:
            self.wire_seconds += time.perf_counter() - begin


class Arrival:
    """Messages on their way from every peer. `slot(r)` waits for rank r's; `finish` for all, ours included.

    Args:
        outgoing: what goes to each rank, None: nothing. The own entry is what `slot` returns for this rank.
        slots: where each rank's message goes, None: none is expected.
        kind: of the point-to-point messages to post; None: a collective has brought everything already.
    """

    def __init__(
        self, peers: Peers, outgoing: Sequence[Tensor | None], slots: Sequence[Tensor | None], kind: int | None = None
    ) -> None:
        self._peers = peers
        some = next(message for message in (*outgoing, *slots) if message is not None)
        self._device = some.device
        if kind is not None and peers.world_size > 1 and peers.staged(some):
            outgoing = [None if message is None else message.cpu() for message in outgoing]
            slots = [None if slot is None else torch.empty_like(slot, device="cpu") for slot in slots]
        self._slots = list(slots)
        self._slots[peers.rank] = outgoing[peers.rank]
        self._receiving: dict[int, Any] = {}
        self._sending: dict[int, Any] = {}
        self._failed: dict[int, RuntimeError] = {}
        if kind is not None and peers.world_size > 1:
            self._post(outgoing, kind)

    def _post(self, outgoing: Sequence[Tensor | None], kind: int) -> None:
        # Nearest neighbour first, so that not everybody floods rank 0 at once.
        world_size, rank = self._peers.world_size, self._peers.rank
        for step in range(1, world_size):
            source, target = (rank - step) % world_size, (rank + step) % world_size
            slot, message = self._slots[source], outgoing[target]
            if slot is not None:
                self._try(source, partial(self._receive, slot, source, kind))
            if message is not None:
                self._try(target, partial(self._send, message, target, kind))

    def _receive(self, slot: Tensor, rank: int, kind: int) -> None:
        self._receiving[rank] = self._peers.irecv(slot, rank, kind)

    def _send(self, message: Tensor, rank: int, kind: int) -> None:
        self._sending[rank] = self._peers.isend(message, rank, kind)

    def _try(self, rank: int, operation: Callable[[], Any]) -> None:
        start = time.perf_counter()
        try:
            operation()
        except RuntimeError as error:
            self._failed.setdefault(rank, error)
        finally:
            self._peers.wire_seconds += time.perf_counter() - start

    def slot(self, rank: int) -> Tensor:
        """Wait for the message of `rank` and return it.

        Raises:
            PeerFailure, PeerTimeout: it did not come.
        """
        work = self._receiving.pop(rank, None)
        if work is not None:
            self._try(rank, work.wait)
        if rank in self._failed:
            self.finish()
        message = self._slots[rank]
        assert message is not None
        return message.to(self._device)

    def __enter__(self) -> Arrival:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave nothing in flight, whatever happened inside the block: messages of a later exchange would match it."""
        if self._receiving or self._sending:
            self.finish()

    def finish(self) -> list[Tensor]:
        """Wait for everything, then return all messages; one error names all ranks that failed."""
        for rank in list(self._receiving):
            self._try(rank, self._receiving.pop(rank).wait)
        for rank in list(self._sending):
            self._try(rank, self._sending.pop(rank).wait)
        if self._failed:
            first = min(self._failed)
            raise network_error(self._failed[first], sorted(self._failed)) from self._failed[first]
        return [slot.to(self._device) for slot in self._slots if slot is not None]


def gather_numbers(peers: Peers, mine: Tensor) -> list[Tensor]:
    """A float64 vector from every rank, in rank order."""
    message = mine.contiguous().view(torch.uint8)
    slots = list(torch.empty(peers.world_size, message.numel(), dtype=torch.uint8, device=message.device))
    return [part.view(torch.float64).view_as(mine) for part in peers.all_gather(message, slots, PARTIAL).finish()]


def sum_of_parts(peers: Peers, mine: Tensor) -> Tensor:
    """The sum of a float64 vector over all ranks, in rank order: the same bits everywhere."""
    total = torch.zeros_like(mine)
    for part in gather_numbers(peers, mine):
        total += part
    return total


def network_error(error: RuntimeError, ranks: Sequence[int]) -> PeerFailure:
    """The SyncError for what a torch.distributed call raised."""
    text = str(error)
    who = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}" if ranks else "some rank"
    if "timed out" in text.lower() or "timeout" in text.lower():
        return PeerTimeout(
            f"{who} did not answer within the process group's timeout; the process group is broken, nothing was "
            f"committed ({text})",
            ranks,
        )
    return PeerFailure(
        f"the connection to {who} broke; the process group cannot be used any more, nothing was committed ({text})",
        ranks,
    )
