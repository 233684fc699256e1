"""Shared by all codecs: the deterministic sum, LSB-first bit packing of any width, base-3 packing (torch operations).

Bits: field i of width b occupies stream bits [i*b, (i+1)*b); stream bit j is bit j mod 8 of byte j div 8. So with b=1
element 0 is bit 0 of byte 0, and with b=4 it is the low nibble. Unused bits of the last byte are 0 and ignored.
"""

from __future__ import annotations

from math import gcd

import torch
from torch import Tensor

__all__ = ["as_blocks", "chunked_tree_sum", "pack_base3", "pack_bits", "tree_sum", "unpack_base3", "unpack_bits"]

CHUNK = 4096  # elements summed by one tree before the partial sums are summed
_POWERS_OF_3 = (1, 3, 9, 27, 81)


def tree_sum(values: Tensor) -> Tensor:
    """Sum over the last dimension in the one order that every device and thread count can reproduce.

    The values are padded with zeros to a power of two P; then, while P > 1, P is halved and
    `values[0:P] += values[P:2P]`, every addition rounded to float32.

    >>> float(tree_sum(torch.tensor([1e8, 1.0, -1e8, 1.0])))
    2.0
    """
    n = values.shape[-1]
    if n == 0:
        return values.new_zeros(values.shape[:-1])
    width = 1 << (n - 1).bit_length()
    sums = torch.nn.functional.pad(values, (0, width - n))
    while width > 1:
        width //= 2
        sums = sums[..., :width] + sums[..., width:]
    return sums[..., 0]


def chunked_tree_sum(values: Tensor) -> Tensor:
    """Deterministic sum of a long vector: `tree_sum` of every 4096 elements, then `tree_sum` of the partial sums."""
    return tree_sum(tree_sum(as_blocks(values, CHUNK)))


def as_blocks(values: Tensor, block: int) -> Tensor:
    """The (n,) vector as (ceil(n/block), block), padded with zeros. Does not copy where nothing is to be padded."""
    rows = -(-values.numel() // block)
    missing = rows * block - values.numel()
    return (torch.nn.functional.pad(values, (0, missing)) if missing else values).view(rows, block)


def pack_bits(codes: Tensor, width: int) -> Tensor:
    """Pack integers into an LSB-first bit stream.

    Args:
        codes: (n,) integers; the low `width` bits of each are taken, so signed codes become two's complement.
        width: 1 to 32 bits per code.

    Returns:
        (ceil(n * width / 8),) uint8.

    >>> bytes(pack_bits(torch.tensor([1, 4095, 2730, 16]), 12).tolist()).hex()
    '01f0ffaa0a01'
    """
    n, (per_group, num_bytes) = codes.numel(), _group(width)
    wide = as_blocks(codes.to(torch.int64) & ((1 << width) - 1), per_group)
    out = torch.zeros(wide.shape[0], num_bytes, dtype=torch.int64, device=codes.device)
    for byte, field, shift in _overlaps(width):
        out[:, byte] |= wide[:, field] << shift if shift >= 0 else wide[:, field] >> -shift
    return (out & 255).to(torch.uint8).view(-1)[: (n * width + 7) // 8]


def unpack_bits(packed: Tensor, width: int, n: int, *, signed: bool = False) -> Tensor:
    """The n integers (int64) of an LSB-first bit stream; `signed` reads each field as two's complement.

    >>> unpack_bits(pack_bits(torch.tensor([-3, 2, -1]), 3), 3, 3, signed=True).tolist()
    [-3, 2, -1]
    """
    per_group, num_bytes = _group(width)
    groups = as_blocks(packed.to(torch.int64), num_bytes)
    codes = torch.zeros(groups.shape[0], per_group, dtype=torch.int64, device=packed.device)
    for byte, field, shift in _overlaps(width):
        codes[:, field] |= groups[:, byte] >> shift if shift >= 0 else groups[:, byte] << -shift
    codes &= (1 << width) - 1
    if signed:
        codes = (codes ^ (1 << (width - 1))) - (1 << (width - 1))
    return codes.view(-1)[:n]


def pack_base3(trits: Tensor) -> Tensor:
    """Pack (n,) integers in {0, 1, 2}, five to a byte: t0 + 3 t1 + 9 t2 + 27 t3 + 81 t4. Returns (ceil(n/5),) uint8.

    >>> pack_base3(torch.tensor([0, 2, 1, 1, 0, 0, 1, 0])).tolist()
    [42, 3]
    """
    powers = torch.tensor(_POWERS_OF_3, device=trits.device)
    return (as_blocks(trits.to(torch.int64), 5) * powers).sum(1).to(torch.uint8)


def unpack_base3(packed: Tensor, n: int) -> Tensor:
    """The n trits (int64) that `pack_base3` packed.

    Raises:
        ValueError: a byte is above 242, which no five trits give.
    """
    if packed.numel() and int(packed.max()) > 242:
        raise ValueError(f"base-3 bytes must be at most 242 but one is {int(packed.max())}; the body is damaged")
    powers = torch.tensor(_POWERS_OF_3, device=packed.device)
    return (packed.to(torch.int64).unsqueeze(1) // powers % 3).view(-1)[:n]


def _group(width: int) -> tuple[int, int]:
    """Fields and bytes of the shortest run of fields that ends on a byte boundary."""
    if not 1 <= width <= 32:
        raise ValueError(f"width must be 1 to 32 bits but is: {width}")
    return 8 // gcd(width, 8), width // gcd(width, 8)


def _overlaps(width: int) -> list[tuple[int, int, int]]:
    """(byte, field, left shift from field to byte) for every field that has bits in a byte of the group."""
    per_group, num_bytes = _group(width)
    pairs = [(byte, field, field * width - 8 * byte) for byte in range(num_bytes) for field in range(per_group)]
    return [(byte, field, shift) for byte, field, shift in pairs if -width < shift < 8]
