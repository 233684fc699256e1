"""Meeting of a new group: small tables from all ranks, and state from one rank to some others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

__all__ = ["gather_rows", "send_to"]


def gather_rows(mine: Tensor, group: Any | None) -> list[list[float]]:
    """The row of every rank of the group, as numbers.

    Args:
        mine: (k,) float64 on the CPU, the same k on all ranks.
        group: a ProcessGroup, or None for this process alone.

    >>> import torch
    >>> gather_rows(torch.tensor([1.0, 2.0]), None)
    [[1.0, 2.0]]
    """
    if group is None:
        return [mine.tolist()]
    rows: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(rows, mine.tolist(), group=group)
    return rows


def send_to(tensor: Tensor, source: int, receivers: Sequence[int], group: Any | None) -> int:
    """Overwrite `tensor` on the ranks `receivers` with that of rank `source`; return the bytes this rank has sent.

    All ranks of the group may call it; those not concerned do nothing.
    """
    if group is None or not receivers:
        return 0
    rank = dist.get_rank(group)
    if rank in receivers:
        dist.recv(tensor, src=dist.get_global_rank(group, source), group=group)
    if rank != source:
        return 0
    for receiver in receivers:
        dist.send(tensor, dst=dist.get_global_rank(group, receiver), group=group)
    return len(receivers) * tensor.numel() * tensor.element_size()
