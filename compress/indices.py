"""Positions of kept entries as bytes: Elias-Fano, plain fields, bitmap, 32-bit numbers (torch operations).

A row has c positions of which k are kept, listed ascending. Every codec here has a fixed size, so a row can be found
without reading the ones before it:

    elias_fano   k low parts of l = floor(log2(c / k)) bits, then k + (c >> l) bits of which bit (i_j >> l) + j is set
                 for the j-th position i_j; each row padded to a byte. l + 1 + (c >> l) / k bits for a position: 8.0 at
                 64 of 4096, where no code can be below 7.36. (Elias 1974, Fano 1971)
    bits         fields of ceil(log2 c) bits, one stream over all rows
    bitmap       c bits for a row, one stream over all rows; smallest when more than about 1/8 is kept
    u32          32-bit numbers, row * c + position

A section of zero bytes means "no entries" in all of them, so zero padding is harmless.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .codec import pad4
from .packing import pack_bits, unpack_bits

__all__ = ["INDEX_CODECS", "decode_indices", "encode_indices", "index_nbytes"]

INDEX_CODECS = ("elias_fano", "bits", "bitmap", "u32")


def low_bits(c: int, k: int) -> int:
    """Bits of the low part of an Elias-Fano position: floor(log2(c / k))."""
    return (c // k).bit_length() - 1


def record_nbytes(c: int, k: int) -> int:
    """Bytes of one Elias-Fano row.

    >>> record_nbytes(4096, 64)
    64
    """
    low = low_bits(c, k)
    return (k * low + k + (c >> low) + 7) // 8


def index_nbytes(index: str, c: int, k: int, rows: int) -> int:
    """Bytes of the section that holds the positions of `rows` rows, padded to 4."""
    if index == "elias_fano":
        return pad4(rows * record_nbytes(c, k))
    if index == "u32":
        return 4 * rows * k
    per_row = c if index == "bitmap" else k * (c - 1).bit_length()
    return pad4((rows * per_row + 7) // 8)


def encode_indices(index: str, indices: Tensor, c: int) -> Tensor:
    """The section for `indices`, (rows, k) int64, ascending in [0, c) in each row. Returns uint8.

    >>> bytes(encode_indices("elias_fano", torch.tensor([[0, 1, 3, 6]]), 8).tolist()).hex()
    'b6040000'
    """
    rows, k = indices.shape
    if index == "elias_fano":
        section = _encode_elias_fano(indices, c)
    elif index == "u32":
        section = pack_bits((indices + _row_starts(indices, c)).view(-1), 32)
    elif index == "bitmap":
        bitmap = torch.zeros(rows, c, dtype=torch.uint8, device=indices.device).scatter_(1, indices, 1)
        section = pack_bits(bitmap.view(-1), 1)
    else:
        width = (c - 1).bit_length()
        section = pack_bits(indices.view(-1), width) if width else indices.new_zeros(0, dtype=torch.uint8)
    return torch.nn.functional.pad(section, (0, index_nbytes(index, c, k, rows) - section.numel()))


def decode_indices(index: str, section: Tensor, c: int, k: int, rows: int) -> Tensor:
    """Read a section back: (rows, k) int64. A row without entries has c at every place.

    Raises:
        ValueError: the section is not one that `encode_indices` can have written.
    """
    if index == "elias_fano":
        indices = _decode_elias_fano(section, c, k, rows)
    elif index == "bitmap":
        indices = _set_positions(unpack_bits(section, 1, rows * c).view(rows, c), k)
    else:
        indices = _decode_fields(index, section, c, k, rows)
    empty = (indices == c).all(dim=1, keepdim=True)
    ascending = (indices[:, 1:] > indices[:, :-1]) | empty
    if not bool(ascending.all()) or not bool(((indices >= 0) & (indices < c) | empty).all()):
        raise ValueError(f"positions must ascend within [0, {c}) in every row; the body is damaged")
    return indices


def _encode_elias_fano(indices: Tensor, c: int) -> Tensor:
    rows, k = indices.shape
    low = low_bits(c, k)
    bits = torch.zeros(rows, 8 * record_nbytes(c, k), dtype=torch.uint8, device=indices.device)
    shifts = torch.arange(low, device=indices.device)
    bits[:, : k * low] = ((indices.unsqueeze(2) >> shifts) & 1).view(rows, k * low).to(torch.uint8)
    order = torch.arange(k, device=indices.device)
    bits.scatter_(1, k * low + (indices >> low) + order, 1)
    return pack_bits(bits.view(-1), 1)


def _decode_elias_fano(section: Tensor, c: int, k: int, rows: int) -> Tensor:
    low, num_bytes = low_bits(c, k), record_nbytes(c, k)
    bits = unpack_bits(section, 1, 8 * rows * num_bytes).view(rows, 8 * num_bytes)
    high = _set_positions(bits[:, k * low : k * low + k + (c >> low)], k, missing=-1)
    weights = 1 << torch.arange(low, device=section.device)
    lows = (bits[:, : k * low].view(rows, k, low) * weights).sum(2)
    indices = ((high - torch.arange(k, device=section.device)) << low) | lows
    return torch.where(high < 0, c, indices)


def _set_positions(bits: Tensor, k: int, missing: int | None = None) -> Tensor:
    """Where the k bits of each row are set: (rows, width) 0/1 -> (rows, k); rows without any hold `missing` (width)."""
    rows, width = bits.shape
    counts = bits.sum(1)
    if not bool(((counts == k) | (counts == 0)).all()):
        raise ValueError(f"every row must have 0 or {k} entries but one has another number; the body is damaged")
    places = torch.full((rows, k), width if missing is None else missing, dtype=torch.int64, device=bits.device)
    places[counts == k] = bits.nonzero()[:, 1].view(-1, k)
    return places


def _decode_fields(index: str, section: Tensor, c: int, k: int, rows: int) -> Tensor:
    width = 32 if index == "u32" else (c - 1).bit_length()
    if width == 0:
        return torch.zeros(rows, k, dtype=torch.int64, device=section.device)
    fields = unpack_bits(section, width, rows * k).view(rows, k)
    # the encoder never writes a row of zeros, except one entry at position 0
    empty = (fields == 0).all(dim=1, keepdim=True)
    starts = _row_starts(fields, c) if index == "u32" else torch.zeros_like(fields[:, :1])
    if k == 1:
        empty &= starts > 0
    return torch.where(empty, c, fields - starts)


def _row_starts(indices: Tensor, c: int) -> Tensor:
    return torch.arange(indices.shape[0], device=indices.device).unsqueeze(1) * c
