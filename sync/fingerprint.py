"""64-bit fingerprints of tensors, the same on every device, and the check that all ranks hold the same values.

    words    the bytes of the tensor as little-endian 64-bit integers w_0, w_1, ..., the last one padded with zeros
    sum      s = sum_i mix(w_i + (i + 1) * 0x9E3779B97F4A7C15)      modulo 2^64, mix as in splitmix64
    value    mix(s + mix(hash of dtype and shape))

Order matters because the position is in every term; a sum can be taken in any order, so devices and threads agree. It
finds accidents, not forgeries.
"""

from __future__ import annotations

import ctypes
import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ..compress.kernels import kernel, runs_on_kernels, threads
from .groups import resolve_group
from .hello import hash64

__all__ = ["agree_on_tensors", "fingerprint"]

logger = logging.getLogger(__name__)

_GOLDEN = 0x9E3779B97F4A7C15
_MIX1, _MIX2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = 2**64 - 1
_CHUNK = 1 << 19  # bytes that are mixed at once: the temporaries stay in the cache


def fingerprint(tensors: Tensor | Sequence[Tensor]) -> int:
    """A 64-bit hash of the contents, dtypes and shapes of one tensor or of several in their order.

    Of a DTensor the local shard counts. Bits are compared, so 0.0 and -0.0 differ, and equal NaN are equal.

    >>> fingerprint(torch.tensor([1.0, 2.0])) == fingerprint(torch.tensor([1.0, 2.0]))
    True
    >>> fingerprint(torch.tensor([1.0, 2.0])) == fingerprint(torch.tensor([2.0, 1.0]))
    False
    """
    if isinstance(tensors, Tensor):
        return _fingerprint(tensors)
    total = 0
    for tensor in tensors:
        total = _mix(total + _fingerprint(tensor) + _GOLDEN & _MASK)
    return total


def _fingerprint(tensor: Tensor) -> int:
    local = _local(tensor)
    label = f"{local.dtype} {tuple(local.shape)}"
    return _mix(_sum_of_words(local) + _mix(hash64(label)) & _MASK)


@torch.no_grad()
def _sum_of_words(tensor: Tensor) -> int:
    if tensor.numel() == 0:
        return 0
    raw = tensor.contiguous().reshape(-1).view(torch.uint8)
    if runs_on_kernels(raw):
        result = ctypes.c_uint64()
        call = kernel("lc_fingerprint", "plpi")
        call(raw.data_ptr(), raw.numel(), ctypes.addressof(result), threads())
        return result.value
    total = torch.zeros((), dtype=torch.int64, device=raw.device)
    for start in range(0, raw.numel(), _CHUNK):
        part = raw[start : start + _CHUNK]
        words = torch.zeros((part.numel() + 7) // 8, dtype=torch.int64, device=raw.device)
        words.view(torch.uint8)[: part.numel()].copy_(part)
        positions = torch.arange(start // 8 + 1, start // 8 + 1 + words.numel(), device=raw.device)
        total += _mix_words(words.add_(positions.mul_(_signed(_GOLDEN)))).sum()
    return int(total) & _MASK


def _mix_words(z: Tensor) -> Tensor:
    for shift, factor in ((30, _MIX1), (27, _MIX2)):
        z.bitwise_xor_((z >> shift) & ((1 << 64 - shift) - 1)).mul_(_signed(factor))
    return z.bitwise_xor_((z >> 31) & ((1 << 33) - 1))


def _mix(z: int) -> int:
    z = (z ^ (z >> 30)) * _MIX1 & _MASK
    z = (z ^ (z >> 27)) * _MIX2 & _MASK
    return z ^ (z >> 31)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def agree_on_tensors(
    named: Sequence[tuple[str, Tensor]],
    process_group: Any = None,
    init: Literal["broadcast", "check", "majority"] = "broadcast",
) -> list[str]:
    """Make sure that all ranks hold the same values; return the names of the tensors that differed.

    Costs one pass over the tensors and 16 bytes a rank where they agree.

    Args:
        named: (name, tensor) in the same order on all ranks. Of DTensors the local shards are compared.
        process_group: a ProcessGroup, a 1-D DeviceMesh or None, as everywhere.
        init: "broadcast" copies the first rank's values to all, where they differ; "majority" copies those that more
            than half of the ranks hold, and logs a warning that names the others; "check" raises.

    Raises:
        ValueError: names, shapes or dtypes differ between ranks; or values differ and init="check", or have no
            majority. It names the first tensor concerned and the ranks.

    >>> agree_on_tensors([("weight", torch.ones(2))])
    []
    """
    if init not in ("broadcast", "check", "majority"):
        raise ValueError(f'init must be "broadcast", "check" or "majority" but is: {init!r}')
    group = resolve_group(process_group)
    if group is None or dist.get_world_size(group) == 1:
        return []
    layout = [(name, tuple(_local(tensor).shape), str(tensor.dtype)) for name, tensor in named]
    prints = [fingerprint(tensor) for _, tensor in named]
    summaries = _gather((hash64(repr(layout)), hash64(repr(prints))), group)
    if all(summary == summaries[0] for summary in summaries):
        return []
    layouts, all_prints = zip(*_gather((layout, prints), group), strict=True)
    _check_layouts(layouts)
    differing = [i for i in range(len(prints)) if len({ones[i] for ones in all_prints}) > 1]
    names = [layout[i][0] for i in differing]
    columns = [[ones[i] for ones in all_prints] for i in differing]
    if init == "check":
        raise _difference(names, columns[0])
    sources = [0] * len(differing) if init == "broadcast" else _majorities(names, columns)
    for i, source in zip(differing, sources, strict=True):
        _broadcast(_local(named[i][1]), source, group)
    return names


def _majorities(names: Sequence[str], columns: Sequence[list[int]]) -> list[int]:
    """For every tensor a rank that holds what most hold."""
    common = [Counter(column).most_common(1)[0] for column in columns]
    for name, column, (_, count) in zip(names, columns, common, strict=True):
        if 2 * count <= len(column):
            raise ValueError(
                f"no value of {name!r} is held by more than half of the {len(column)} ranks; restore all ranks from "
                f'one checkpoint, or take those of the first rank with init="broadcast"'
            )
    odd = [rank for rank, value in enumerate(columns[0]) if value != common[0][0]]
    logger.warning(
        "lowcomm: %d tensors differed between ranks and were repaired by majority; the first is %r, on ranks %s",
        *(len(names), names[0], odd),
    )
    return [column.index(value) for column, (value, _) in zip(columns, common, strict=True)]


def _local(tensor: Tensor) -> Tensor:
    to_local = getattr(tensor, "to_local", None)
    return tensor.detach() if to_local is None else to_local().detach()


def _gather(value: Any, group: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def _check_layouts(layouts: Sequence[list[tuple[str, tuple[int, ...], str]]]) -> None:
    for rank, layout in enumerate(layouts):
        if len(layout) != len(layouts[0]):
            raise ValueError(f"rank {rank} has {len(layout)} tensors but rank 0 has {len(layouts[0])}")
        for theirs, first in zip(layout, layouts[0], strict=True):
            if theirs != first:
                raise ValueError(f"rank {rank} has {theirs} where rank 0 has {first} (name, shape, dtype)")


def _difference(names: list[str], prints: list[int]) -> ValueError:
    ranks = [rank for rank, value in enumerate(prints) if value != prints[0]]
    return ValueError(
        f"{len(names)} tensors differ between ranks; the first is {names[0]!r}, where ranks {ranks} hold other values "
        'than rank 0; start all ranks from the same weights, or use init="broadcast"'
    )


@torch.no_grad()
def _broadcast(tensor: Tensor, source: int, group: Any) -> None:
    values = tensor.contiguous()
    dist.broadcast(values, dist.get_global_rank(group, source), group=group)
    if values is not tensor:
        tensor.copy_(values)
