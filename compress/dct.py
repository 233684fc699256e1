"""Top-k of the discrete cosine transform, tile by tile: the compressor of DeMo (arXiv 2411.19870).

Matrices are cut into tiles T of h x w and transformed along both axes, X = C_h T C_w^T, by the orthonormal DCT-II

    C_n[k, i] = sqrt((1 if k = 0 else 2) / n) * cos(pi (2 i + 1) k / (2 n))

so energies are the same before and after, and what top-k loses of X is what is lost of T. Smooth tiles have few large
coefficients.

The entries of C_n are rounded to float32 once. Every sum is taken in ascending order from 0 with each product and each
addition rounded to float32, along the columns of the tile first, so that all devices agree on every bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import cos, pi, prod, sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from .codec import Codec, check_decode, check_encode
from .kernels import kernel, runs_on_kernels, threads
from .ranges import finite_part
from .sparse import SparseFormat, check_formats
from .topk import Piece, decode_rows, encode_rows

__all__ = ["DCTTopK", "dct_matrix", "transform_tiles"]

MAX_SIDE = 128  # of the kernel's scratch space


@lru_cache(maxsize=32)
def dct_matrix(n: int) -> Tensor:
    """C_n, (n, n) float32: `dct_matrix(n) @ x` are the coefficients of x.

    >>> [round(value, 4) for value in (dct_matrix(4) @ torch.tensor([1.0, 2.0, 3.0, 4.0])).tolist()]
    [5.0, -2.2304, 0.0, -0.1585]
    """
    rows = [[sqrt((1 if k == 0 else 2) / n) * cos(pi * (2 * i + 1) * k / (2 * n)) for i in range(n)] for k in range(n)]
    return torch.tensor(rows, dtype=torch.float64).to(torch.float32)


def transform_tiles(tiles: Tensor, *, inverse: bool = False) -> Tensor:
    """C_h T C_w^T of every tile, or C_h^T X C_w.

    Args:
        tiles: (number, h, w) float32, contiguous, h and w at most 128.

    >>> coefficients = transform_tiles(torch.ones(1, 2, 2))
    >>> [round(value, 6) for value in coefficients.flatten().tolist()]
    [2.0, 0.0, 0.0, 0.0]
    """
    _, h, w = tiles.shape
    columns, rows = dct_matrix(h).to(tiles.device), dct_matrix(w).to(tiles.device)
    along_columns, along_rows = (columns.t(), rows) if inverse else (columns, rows.t())
    out = torch.empty_like(tiles)
    if runs_on_kernels(tiles, out):
        kernel("lc_transform_tiles", "pplllppi")(
            tiles.data_ptr(),
            out.data_ptr(),
            *tiles.shape,
            (along_rows := along_rows.contiguous()).data_ptr(),
            (along_columns := along_columns.contiguous()).data_ptr(),
            threads(),
        )
        return out
    half = torch.zeros_like(tiles)
    for j in range(w):
        half += tiles[:, :, j : j + 1] * along_rows[j]
    out.zero_()
    for i in range(h):
        out += along_columns[:, i : i + 1] * half[:, i : i + 1, :]
    return out


class _Plan(NamedTuple):
    numel: int  # with padding
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class DCTTopK(Codec):
    """The k largest DCT coefficients of every tile.

    Bits per parameter of the default: 32 * (9 position + 2 value) + 32 (levels) of 4096 = 0.094.
    Guarantee: that of top-k on the coefficients, `delta(n)` = k / (h w) for exact values, up to the rounding of the
    transform. Use it with error feedback; DeMo keeps `EFDecay(0.999)` on lr * gradient.

    DeMo averages every coefficient over the ranks that sent it. For that, exchange `codec.transform(x)` by
    `TopK(k=32)` with reduce="mean_contributors", and apply `codec.inverse` to the result.

    Args:
        k: coefficients kept per tile, cut to the tile's size. Default 32.
        side: largest side of a tile, 1 to 128. Default 64.
        index: format of the positions, as in `TopK`. Default "elias_fano".
        value: format of the values, as in `TopK`. Default "mag2".
        iterations: of "mag2", as in `TopK`. Default 3.
        shapes: shapes of the tensors that make up the flat vector. A matrix (R, S) is cut into tiles of h x w, the
            largest divisors of R and S not above `side`; a vector is a matrix of one row; more than two dimensions are
            R = first, S = product of the others. Sides without such divisors (primes) give tiny tiles. Default ():
            every `side`^2 consecutive elements are a tile, row by row, the last one padded with zeros.

    Source: arXiv 2411.19870 and its authors' code, which keeps float32 values and 64-bit positions.

    >>> codec = DCTTopK(shapes=((128, 192),))
    >>> round(codec.bits_per_element(128 * 192), 3)
    0.094
    """

    k: int = 32
    side: int = 64
    index: str = "elias_fano"
    value: str = "mag2"
    iterations: int = 3
    shapes: tuple[tuple[int, ...], ...] = ()

    id = 0x51
    requantizable = False

    def __post_init__(self) -> None:
        check_formats(self.index, self.value, self.iterations)
        if self.k < 1:
            raise ValueError(f"k must be at least 1 but is: {self.k}")
        if not 1 <= self.side <= MAX_SIDE:
            raise ValueError(f"side must be 1 to {MAX_SIDE} but is: {self.side}")

    @property
    def block(self) -> int:
        return 2**62 if self.shapes else self.side**2

    def for_shapes(self, shapes: Sequence[tuple[int, ...]]) -> DCTTopK:
        return replace(self, shapes=tuple(map(tuple, shapes)))

    def nbytes(self, n: int) -> int:
        return sum(piece.nbytes for piece in _plan(self, n).pieces)

    def delta(self, n: int) -> float | None:
        bounds = [piece.layout.delta() for piece in _plan(self, n).pieces]
        known = [bound for bound in bounds if bound is not None]
        return min(known, default=1.0) * (1 - 2.0**-12) if len(known) == len(bounds) else None

    def transform(self, x: Tensor) -> Tensor:
        """All coefficients of the (n,) float32 vector, tile by tile: (n,), or longer where the last tile is padded."""
        numel, pieces = _plan(self, x.numel())
        padded = torch.nn.functional.pad(x, (0, numel - x.numel()))
        tiles = [transform_tiles(_tiles(piece, piece.to_rows(piece.of(padded)))) for piece in pieces]
        return torch.cat([tile.view(-1) for tile in tiles]) if tiles else padded

    def inverse(self, coefficients: Tensor, n: int) -> Tensor:
        """The (n,) vector of these coefficients."""
        numel, pieces = _plan(self, n)
        x = torch.empty(numel, device=coefficients.device)
        for piece in pieces:
            tiles = transform_tiles(_tiles(piece, piece.of(coefficients)), inverse=True)
            piece.from_rows(tiles.view(-1), piece.of(x))
        return x[:n]

    def encode(self, x: Tensor, out: Tensor, *, step: int = 0, rank: int = 0, bucket: int = 0) -> int:
        check_encode(self, x, out)
        values, flags = finite_part(x)
        coefficients = self.transform(values)
        for piece, body in self._split(out, x.numel()):
            flags |= encode_rows(piece.layout, piece.of(coefficients), body)
        return flags

    def decode(self, body: Tensor, out: Tensor, *, step: int = 0, rank: int = 0, bucket: int = 0) -> None:
        check_decode(self, body, out)
        coefficients = torch.empty(_plan(self, out.numel()).numel, device=out.device)
        for piece, part in self._split(body, out.numel()):
            decode_rows(piece.layout, part, piece.of(coefficients))
        out.copy_(self.inverse(coefficients, out.numel()))

    def _split(self, body: Tensor, n: int) -> list[tuple[Piece, Tensor]]:
        pieces = _plan(self, n).pieces
        return list(zip(pieces, torch.split(body, [piece.nbytes for piece in pieces]), strict=True))


@lru_cache(maxsize=256)
def _plan(codec: DCTTopK, n: int) -> _Plan:
    side = codec.side
    shapes = codec.shapes or ((-(-n // side**2) * side, side),)
    sizes = [prod(shape) for shape in shapes]
    if codec.shapes and sum(sizes) != n:
        raise ValueError(f"shapes {shapes} have {sum(sizes)} elements but the vector has {n}; see for_shapes")
    pieces, start = [], 0
    for shape, size in zip(shapes, sizes, strict=True):
        if size:
            pieces.append(_piece(codec, start, size, shape))
        start += size
    return _Plan(start, tuple(pieces))


def _piece(codec: DCTTopK, start: int, numel: int, shape: tuple[int, ...]) -> Piece:
    height = shape[0] if len(shape) > 1 else 1
    width = numel // height
    h, w = (max(d for d in range(1, min(size, codec.side) + 1) if size % d == 0) for size in (height, width))
    layout = SparseFormat(h * w, min(codec.k, h * w), codec.index, codec.value, codec.iterations)
    return Piece(start, numel, layout, layout.nbytes(numel // (h * w)), (height, width, h, w))


def _tiles(piece: Piece, rows: Tensor) -> Tensor:
    assert piece.tiles is not None
    return rows.view(-1, *piece.tiles[2:])
