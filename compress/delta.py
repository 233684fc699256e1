"""Lossless deltas between two versions of a tensor, for sending weights of which few bits have changed.

Old and new are compared as bit patterns, so -0 and +0 differ and NaN payloads count; what changed is sent as positions
and new raw bits, which overwrite: applying a delta is exact, and applying it twice does no harm.

    body = u32 count for each chunk of 65536 elements | u16 offsets inside the chunk, ascending | new elements, raw

Sections are padded with zeros to 4 bytes. The header carries checksums of the old and the new bytes.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from .codec import pad4

__all__ = ["Delta", "apply_delta", "make_delta"]

CHUNK = 65536
_PATTERNS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Delta:
    """What turns one version of a tensor into the next.

    Attributes:
        dtype: "torch.bfloat16" and so on.
        shape: of both versions.
        count: changed elements.
        base_crc32: of the old bytes; `apply_delta` refuses another base.
        result_crc32: of the new bytes.
        body: uint8; `count * (2 + itemsize) + 4 * ceil(n / 65536)` bytes and padding.
    """

    dtype: str
    shape: tuple[int, ...]
    count: int
    base_crc32: int
    result_crc32: int
    body: Tensor

    @property
    def nbytes(self) -> int:
        return self.body.numel()

    @property
    def worth_it(self) -> bool:
        """Whether the body is smaller than 0.8 of the tensor; otherwise send the tensor."""
        size = torch.Size(self.shape).numel() * _itemsize(self.dtype)
        return self.nbytes < 0.8 * size


def make_delta(old: Tensor, new: Tensor) -> Delta:
    """The delta from `old` to `new`, tensors of one shape and dtype with elements of 1, 2, 4 or 8 bytes.

    Raises:
        ValueError: shapes or dtypes differ, or elements have another size.

    >>> old, new = torch.zeros(4), torch.tensor([0.0, 1.0, 0.0, -0.0])
    >>> delta = make_delta(old, new)
    >>> delta.count
    2
    >>> apply_delta(old, delta)
    >>> torch.equal(old.view(torch.int32), new.view(torch.int32))
    True
    """
    if old.shape != new.shape or old.dtype != new.dtype:
        raise ValueError(
            f"a delta needs two tensors of one shape and dtype but got {old.dtype} {tuple(old.shape)} and "
            f"{new.dtype} {tuple(new.shape)}"
        )
    before, after = _pattern(old), _pattern(new)
    changed = (before != after).nonzero().view(-1)
    chunks = -(-before.numel() // CHUNK)
    counts = torch.bincount(changed // CHUNK, minlength=chunks).to(torch.int32)
    offsets = (changed % CHUNK).to(torch.int32)
    low_high = torch.stack((offsets & 255, offsets >> 8), 1).to(torch.uint8).view(-1)
    sections = [counts.view(torch.uint8), low_high, after[changed].view(torch.uint8)]
    body = torch.cat([_padded(section) for section in sections])
    return Delta(str(old.dtype), tuple(old.shape), changed.numel(), _crc32(before), _crc32(after), body)


def apply_delta(tensor: Tensor, delta: Delta) -> None:
    """Turn `tensor`, the old version, into the new one, in place. The new version is left as it is.

    Raises:
        ValueError: shape or dtype differ, the tensor is neither version, or the body is damaged. Nothing is written.
    """
    if str(tensor.dtype) != delta.dtype or tuple(tensor.shape) != delta.shape:
        raise ValueError(
            f"the delta is for {delta.dtype} {delta.shape} but the tensor is {tensor.dtype} {tuple(tensor.shape)}"
        )
    pattern = _pattern(tensor).clone()
    checksum = _crc32(pattern)
    if checksum == delta.result_crc32:
        return
    if checksum != delta.base_crc32:
        raise ValueError(
            f"the delta was made from a tensor with checksum {delta.base_crc32:#010x} but this one has "
            f"{checksum:#010x}; fetch the full tensor"
        )
    positions, values = _read(delta, pattern.numel(), pattern.dtype)
    pattern[positions] = values
    if _crc32(pattern) != delta.result_crc32:
        raise ValueError("the delta does not give the tensor it was made for; its body is damaged")
    tensor.copy_(pattern.view(tensor.dtype).view(tensor.shape))


def _read(delta: Delta, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    body, chunks, count, size = delta.body, -(-n // CHUNK), delta.count, dtype.itemsize
    starts = [0, 4 * chunks, 4 * chunks + pad4(2 * count)]
    if body.dtype != torch.uint8 or body.dim() != 1 or body.numel() != starts[2] + pad4(count * size):
        raise ValueError(f"a body of {starts[2] + pad4(count * size)} bytes was expected but got {tuple(body.shape)}")
    counts = body[: starts[1]].clone().view(torch.int32).to(torch.int64)
    pairs = body[starts[1] : starts[1] + 2 * count].view(-1, 2).to(torch.int64)
    if bool((counts < 0).any()) or int(counts.sum()) != count:
        raise ValueError(f"chunk counts must be >= 0 and sum to {count}; the body is damaged")
    chunk = torch.repeat_interleave(torch.arange(chunks, device=body.device), counts)
    positions = chunk * CHUNK + pairs[:, 0] + 256 * pairs[:, 1]
    if count and (int(positions[-1]) >= n or bool((positions[1:] <= positions[:-1]).any())):
        raise ValueError(f"positions must ascend within [0, {n}); the body is damaged")
    return positions, body[starts[2] : starts[2] + count * size].clone().view(dtype)


def _pattern(tensor: Tensor) -> Tensor:
    size = tensor.element_size()
    if size not in _PATTERNS or tensor.dtype == torch.bool:
        raise ValueError(f"elements must have 1, 2, 4 or 8 bytes and not be bool but the dtype is {tensor.dtype}")
    return tensor.detach().contiguous().view(-1).view(_PATTERNS[size])


def _padded(section: Tensor) -> Tensor:
    return torch.nn.functional.pad(section, (0, pad4(section.numel()) - section.numel()))


def _crc32(pattern: Tensor) -> int:
    return zlib.crc32(pattern.cpu().contiguous().view(torch.uint8).numpy().tobytes())


def _itemsize(dtype: str) -> int:
    return int(getattr(torch, dtype.removeprefix("torch.")).itemsize)
