"""Do all ranks hold the same tensors? Compared by hash, one small exchange; repaired by a broadcast."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from .groups import resolve_group

__all__ = ["agree_on_tensors"]


@torch.no_grad()
def agree_on_tensors(
    named: Sequence[tuple[str, Tensor]], process_group: Any = None, init: Literal["broadcast", "check"] = "broadcast"
) -> list[str]:
    """Make sure that all ranks hold the same values; return the names of the tensors that differed.

    Args:
        named: (name, tensor) in the same order on all ranks. Of DTensors the local shards are compared.
        process_group: as everywhere in lowcomm.sync.
        init: "broadcast" copies the first rank's values to all where they differ; "check" raises.

    Raises:
        ValueError: names, shapes or dtypes differ between ranks, or values differ and init="check".

    >>> agree_on_tensors([("weight", torch.ones(2))])
    []
    """
    group = resolve_group(process_group)
    if group is None or dist.get_world_size(group) == 1:
        return []
    local = [(name, _local(tensor)) for name, tensor in named]
    mine = [(name, tuple(tensor.shape), str(tensor.dtype), _digest(tensor)) for name, tensor in local]
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, mine, group=group)
    _check_layouts(gathered)
    differing = [i for i in range(len(mine)) if len({table[i][3] for table in gathered}) > 1]
    if differing and init == "check":
        name = mine[differing[0]][0]
        ranks = [r for r, table in enumerate(gathered) if table[differing[0]][3] != gathered[0][differing[0]][3]]
        raise ValueError(
            f"{len(differing)} tensors differ between ranks; the first is {name!r}, where ranks {ranks} have other "
            'values than rank 0; start from the same weights, or use init="broadcast"'
        )
    for i in differing:
        _broadcast(local[i][1], group)
    return [mine[i][0] for i in differing]


def _local(tensor: Tensor) -> Tensor:
    to_local = getattr(tensor, "to_local", None)
    return tensor.detach() if to_local is None else to_local().detach()


def _digest(tensor: Tensor) -> int:
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes()
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little")


def _check_layouts(gathered: list[Any]) -> None:
    for rank, table in enumerate(gathered):
        if len(table) != len(gathered[0]):
            raise ValueError(f"rank {rank} has {len(table)} tensors, rank 0 has {len(gathered[0])}")
        for theirs, first in zip(table, gathered[0], strict=True):
            if theirs[:3] != first[:3]:
                raise ValueError(f"rank {rank} has {theirs[:3]} where rank 0 has {first[:3]} (name, shape, dtype)")


def _broadcast(tensor: Tensor, group: Any) -> None:
    values = tensor.contiguous()
    dist.broadcast(values, dist.get_global_rank(group, 0), group=group)
    if values is not tensor:
        tensor.copy_(values)
