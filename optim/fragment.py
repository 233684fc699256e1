"""A fragment: tensors that are synchronised together, and the flat buffers that belong to them.

The live tensors stay where they are. Each fragment owns contiguous flat buffers (anchor, outer buffers, messages)
and works on them in pieces small enough to stay in the cache, so that building a message and applying a result each
read and write main memory once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..compress import kernels
from .outer import OuterRule

__all__ = ["Fragment", "like_placement", "local_tensor"]

PIECE = 1 << 17  # elements; anchor, momentum, delta and live tensor of one piece fit a 2 MiB cache


def local_tensor(tensor: Tensor) -> Tensor:
    """The tensor that lives on this rank: the local shard of a DTensor, else the tensor itself, without autograd."""
    to_local = getattr(tensor, "to_local", None)
    return tensor.detach() if to_local is None else to_local().detach()


def anchor_dtype(dtype: torch.dtype) -> torch.dtype:
    """Outer quantities are float32 whatever the parameter's dtype, float64 for float64 and (exactly) for integers."""
    return torch.float32 if dtype.is_floating_point and dtype != torch.float64 else torch.float64


MessagePool = dict[tuple[int, torch.dtype, torch.device], list[Tensor]]


class Piece(NamedTuple):
    start: int  # extent in the flat buffers
    stop: int
    live: Tensor  # the part of the live tensor; flat when the tensor is contiguous, else the whole tensor in its shape
    group: int  # index of the parameter group


class Fragment:
    """Tensors with one dtype on one device, laid out one after the other in flat buffers.

    Args:
        bucket: number of the fragment in messages.
        tensors: live tensors (parameters, optimizer state or buffers), any shape and stride; local shards of DTensors.
        groups: for every tensor, the index of its parameter group.
        home: device of the flat buffers; None puts them beside the tensors.
        pool: message buffers that are not in use, by (length, dtype, device); fragments that take turns share one.

    Attributes:
        anchor: (n,) flat copy of the tensors as of the last sync, or None where only values are averaged.
        buffers: name -> (n,) outer buffers.
        last_send: step at which it was last sent, or agreed upon otherwise.
    """

    def __init__(
        self,
        bucket: int,
        tensors: Sequence[Tensor],
        groups: Sequence[int],
        home: torch.device | None = None,
        pool: MessagePool | None = None,
    ):
        self.bucket = bucket
        self.tensors = list(tensors)
        self.groups = list(groups)
        first = local_tensor(self.tensors[0])
        self.device = first.device
        self.dtype = anchor_dtype(first.dtype)
        self.home = home or self.device
        self.offsets = [0]
        for tensor in self.tensors:
            self.offsets.append(self.offsets[-1] + local_tensor(tensor).numel())
        self.numel = self.offsets[-1]
        self.anchor: Tensor | None = None
        self.buffers: dict[str, Tensor] = {}
        self.last_send = 0
        self._messages = ({} if pool is None else pool).setdefault((self.numel, self.dtype, self.device), [])
        self._pieces: list[Piece] = []
        self._addresses: list[int] = []
        self._rows: Tensor | None = None

    def pieces(self) -> list[Piece]:
        """The pieces, rebuilt if somebody has moved a tensor's storage since the last call."""
        locals_ = [local_tensor(tensor) for tensor in self.tensors]
        addresses = [tensor.data_ptr() for tensor in locals_]
        if addresses != self._addresses or not self._pieces:
            self._addresses = addresses
            self._pieces = [piece for index, tensor in enumerate(locals_) for piece in self._split(index, tensor)]
            self._rows = self._table(self._pieces)
        return self._pieces

    def _split(self, index: int, tensor: Tensor) -> Iterator[Piece]:
        start, stop, group = self.offsets[index], self.offsets[index + 1], self.groups[index]
        if not tensor.is_contiguous():
            yield Piece(start, stop, tensor, group)
            return
        flat = tensor.view(-1)
        for a in range(start, stop, PIECE):
            b = min(a + PIECE, stop)
            yield Piece(a, b, flat[a - start : b - start], group)

    def _table(self, pieces: Sequence[Piece]) -> Tensor | None:
        """(address, start, length) of every piece for the C++ kernels, or None where they do not apply."""
        narrow = {torch.float32: 0, torch.bfloat16: 1}
        if not all(
            self.dtype == torch.float32
            and piece.live.dtype in narrow
            and piece.live.is_contiguous()
            and self.home == piece.live.device == torch.device("cpu")
            for piece in pieces
        ):
            return None
        return torch.tensor([(p.live.data_ptr(), p.start, p.stop - p.start) for p in pieces], dtype=torch.int64)

    def take_message(self) -> Tensor:
        """An (n,) buffer for a message, contents undefined; buffers given back are used again."""
        if self._messages:
            return self._messages.pop()
        return torch.empty(self.numel, dtype=self.dtype, device=self.device)

    def give_message(self, buffer: Tensor) -> None:
        """Hand a message buffer back."""
        self._messages.append(buffer)

    def flats(self) -> dict[str, Tensor]:
        """All persistent flat buffers by name."""
        return {} if self.anchor is None else {"anchor": self.anchor, **self.buffers}

    def new_buffer(self) -> Tensor:
        """A zero (n,) buffer at home; pinned when it is host memory of a GPU fragment."""
        pin = self.home.type == "cpu" and self.device.type == "cuda"
        return torch.zeros(self.numel, dtype=self.dtype, device=self.home, pin_memory=pin)

    def take_anchor(self) -> None:
        """Make the live values the anchor."""
        if self.anchor is None:
            self.anchor = self.new_buffer()
        for piece in self.pieces():
            self.anchor[piece.start : piece.stop].view(piece.live.shape).copy_(piece.live)

    def pack_values(self, out: Tensor) -> Tensor:
        """out <- live values."""
        for start, stop, live, _ in self.pieces():
            out[start:stop].view(live.shape).copy_(live)
        return out

    def pack_delta(self, out: Tensor) -> Tensor:
        """out <- anchor - live: the pseudo-gradient, in the anchor's dtype."""
        assert self.anchor is not None
        pieces = self.pieces()
        if self._rows is not None and kernels.runs_on_kernels(self.anchor, out):
            arguments = self._rows.data_ptr(), len(pieces), self._live_code, self.anchor.data_ptr(), out.data_ptr()
            kernels.kernel("lc_pack_delta", "plippi")(*arguments, kernels.threads())
            return out
        for start, stop, live, _ in pieces:
            anchor = self.anchor[start:stop].to(self.device).view(live.shape)
            torch.sub(anchor, live, out=out[start:stop].view(live.shape))
        return out

    def write(self, values: Tensor) -> None:
        """live <- values, rounded to the live dtype."""
        for start, stop, live, _ in self.pieces():
            live.copy_(values[start:stop].view(live.shape))

    def apply(self, rule: OuterRule, delta: Tensor, groups: list[dict[str, Any]], alpha: float = 0.0) -> None:
        """Outer step from the averaged pseudo-gradient, then live <- alpha * live + (1 - alpha) * anchor."""
        flats = [self.anchor, *(self.buffers[name] for name in rule.buffers)]
        if alpha == 0.0 and self._apply_sgd(rule, delta, groups):
            return
        for start, stop, live, group in self.pieces():
            stored = [flat[start:stop] for flat in flats if flat is not None]
            anchor, *buffers = loaded = [part.to(self.device, non_blocking=True) for part in stored]
            rule.step_(anchor, dict(zip(rule.buffers, buffers, strict=True)), delta[start:stop], groups[group])
            for part, value in zip(stored, loaded, strict=True) if self.home != self.device else ():
                part.copy_(value)  # offloaded: the rule has worked on a copy
            merge_(live, anchor.view(live.shape), alpha)

    def _apply_sgd(self, rule: OuterRule, delta: Tensor, groups: list[dict[str, Any]]) -> bool:
        """The whole of `apply` in one pass, where rule and tensors allow; returns whether it was done."""
        pieces = self.pieces()
        settings = [rule.sgd_settings(group) for group in groups]
        if self._rows is None or None in settings or not kernels.runs_on_kernels(delta):
            return False
        assert self.anchor is not None
        flats = self.anchor.data_ptr(), self.buffers[rule.buffers[0]].data_ptr(), delta.data_ptr()
        kernel, threads = kernels.kernel("lc_apply_sgd", "plipppffii"), kernels.threads()
        for group, run in groupby(range(len(pieces)), key=lambda row: pieces[row].group):
            rows = list(run)
            lr, momentum, nesterov = settings[group]
            address = self._rows[rows[0]].data_ptr()
            kernel(address, len(rows), self._live_code, *flats, lr, momentum, nesterov, threads)
        return True

    @property
    def _live_code(self) -> int:
        return kernels.dtype_code(self._pieces[0].live.dtype)

    def squared_norm(self, flat: Tensor, change: Callable[[Tensor, int], Tensor] | None = None) -> float:
        """Sum of squares in float64 of a flat vector; of sharded tensors, over all shards, by one exchange of a number.

        All ranks that share the shards call it.

        Args:
            flat: (n,).
            change: what to do first with the part of every tensor, given its parameter group.
        """
        sums: dict[tuple[Any, ...], Tensor] = {}
        for index, tensor in enumerate(self.tensors):
            part = flat[self.offsets[index] : self.offsets[index + 1]]
            part = part if change is None else change(part, self.groups[index])
            square = torch.linalg.vector_norm(part, dtype=torch.float64).square().to(self.device)
            groups = shard_groups(tensor)
            sums[groups] = sums[groups] + square if groups in sums else square
        for groups, total in sums.items():
            for group in groups:
                dist.all_reduce(total, group=group)
        return sum(float(total) for total in sums.values())

    def view(self, flat: Tensor, index: int) -> Tensor:
        """The part of a flat buffer that belongs to tensor `index`, in the tensor's shape (a DTensor for a DTensor)."""
        tensor = self.tensors[index]
        part = flat[self.offsets[index] : self.offsets[index + 1]].view(local_tensor(tensor).shape)
        return like_placement(part, tensor)


def merge_(live: Tensor, anchor: Tensor, alpha: float) -> None:
    """live <- alpha * live + (1 - alpha) * anchor, computed in the anchor's dtype; alpha 0 copies, 1 does nothing."""
    if alpha == 0.0:
        live.copy_(anchor)
    elif alpha != 1.0:
        live.copy_(live.to(anchor.dtype).mul_(alpha).add_(anchor * (1.0 - alpha)))


def shard_groups(tensor: Tensor) -> tuple[Any, ...]:
    """The process groups over which a DTensor is sharded; () for a plain tensor."""
    if not hasattr(tensor, "to_local"):
        return ()
    mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
    return tuple(mesh.get_group(dim) for dim, placement in enumerate(placements) if placement.is_shard())


def like_placement(part: Tensor, tensor: Tensor) -> Tensor:
    """`part` as a DTensor with the mesh and placements of `tensor`, or as it is for a plain tensor."""
    if not hasattr(tensor, "to_local"):
        return part
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part,
        tensor.device_mesh,  # type: ignore[attr-defined]
        tensor.placements,  # type: ignore[attr-defined]
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
