"""Top-k sparsification: keep the entries of largest magnitude, send their positions and values.

    S = the k positions of largest |x|, ties to the lower position;   C(x) = values of x on S, 0 elsewhere

With exact values ||x - C(x)||^2 = ||x||^2 - sum_S x^2, so a row of c elements keeps at least k / c of its energy, and
error feedback delivers the rest later. The default, 64 of every 4096 consecutive elements with Elias-Fano positions and
2-bit values, is the recipe of SparseLoCo (arXiv 2508.15706) at 0.164 bit per parameter, 195 times below float32.

Order is decided on the 31 magnitude bits as an integer, so it is total and the same on every device. NaN and infinities
are flagged and count as 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import isqrt, prod

import torch
from torch import Tensor

from . import kernels, launches
from .codec import Codec, check_decode, check_encode, check_feedback
from .indices import INDEX_CODECS
from .launches import Launcher, Sink, Source
from .packing import as_blocks
from .ranges import finite_part
from .sparse import SparseFormat, check_formats, scatter, scatter_add
from .values import VALUE_CODECS

__all__ = ["TopK", "largest"]

SCOPES = ("chunk", "tensor", "global", "tile2d")
SHAPED = ("tensor", "tile2d")  # scopes that need the shapes of the tensors
WHOLE = 2**62  # block size of a codec whose messages cannot be cut
MAX_COPIED_ROW = 65536  # LC_MAX_ROW of the kernels


@dataclass(frozen=True)
class TopK(Codec):
    """The k largest entries of every chunk, tensor, tile or of the whole vector.

    Bits per parameter of the default: (64 * 8 positions + 64 * 2 values + 32 levels) / 4096 = 0.164.
    Guarantee: ||x - C(x)||^2 <= (1 - delta) ||x||^2, `delta(n)` = k / c with exact values, which is tight for constant
    magnitudes, and min(1 / k, k / c) with the one- and two-level formats. On Gaussian data 64 of 4096 keep 12 % of the
    energy, on heavy tails 40 %. Use it with error feedback.

    Args:
        density: fraction kept, in (0, 1]. Default 1/64.
        k: entries kept per row, instead of `density`. Without it, k = max(1, round(density * row length)).
        chunk: row length of scope "chunk" (the last row is shorter) and tile area of scope "tile2d"; a power of two,
            and of four for "tile2d". Default 4096.
        index: format of the positions: "elias_fano", "bits", "bitmap" or "u32" (indices.py).
        value: format of the values: "mag2", "sign1", "f32", "bf16", "int8", "int4" or "bins4" (values.py).
        scope: what competes for the k places. "chunk": every `chunk` consecutive elements of the flat vector. "tensor":
            each of the tensors listed in `shapes`. "global": the whole vector. "tile2d": tiles of matrices, as in DeMo
            and the first SparseLoCo code: of a matrix (R, S) tiles of h x w, the largest divisors of R and S not above
            sqrt(chunk), so that sides without such divisors (primes) give tiny tiles; a vector is a matrix of one row,
            more than two dimensions are R = first, S = product of the others; k is cut to the tile's size.
        iterations: Lloyd iterations of "mag2". Default 3.
        shapes: shapes of the tensors that the flat vector consists of, for the scopes "tensor" and "tile2d"; or leave
            them out and get a codec for each vector by `for_shapes`.

    The published code keeps 12-bit positions and 8-bit codes in its messages; index="bits", value="mag2" is the layout
    that the paper counts (0.227 bit per parameter with the levels included).

    Raises:
        ValueError: a setting is out of range, or the vector has another length than `shapes` say.

    >>> codec = TopK(density=1 / 64)
    >>> codec.nbytes(2**20), round(codec.bits_per_element(2**20), 3)
    (21504, 0.164)
    >>> codec = TopK(k=4, chunk=8, value="f32")
    >>> x = torch.tensor([1.0, -2.0, 0.5, 4.0, -0.25, 0.0, 3.0, -1.0])
    >>> body = torch.empty(codec.nbytes(8), dtype=torch.uint8)
    >>> codec.encode(x, body)
    0
    >>> out = torch.empty(8)
    >>> codec.decode(body, out)
    >>> out.tolist()
    [1.0, -2.0, 0.0, 4.0, 0.0, 0.0, 3.0, 0.0]
    """

    density: float = 1 / 64
    k: int | None = None
    chunk: int = 4096
    index: str = "elias_fano"
    value: str = "mag2"
    scope: str = "chunk"
    iterations: int = 3
    shapes: tuple[tuple[int, ...], ...] = ()

    id = 0x10
    requantizable = False

    def __post_init__(self) -> None:
        check_formats(self.index, self.value, self.iterations)
        if self.scope not in SCOPES:
            raise ValueError(f"scope must be one of {SCOPES} but is: {self.scope!r}")
        if not 0 < self.density <= 1:
            raise ValueError(f"density must be in (0, 1] but is: {self.density}")
        if self.k is not None and self.k < 1:
            raise ValueError(f"k must be at least 1 but is: {self.k}")
        if (
            self.chunk < 1
            or self.chunk & (self.chunk - 1)
            or (self.scope == "tile2d" and isqrt(self.chunk) ** 2 != self.chunk)
        ):
            raise ValueError(f"chunk must be a power of two, of four for tile2d, but is: {self.chunk}")
        if self.shapes and self.scope not in SHAPED:
            raise ValueError(f"shapes are for the scopes {SHAPED} but scope is {self.scope!r} and shapes {self.shapes}")
        if self.scope in ("chunk", "tile2d"):
            self._settle_k()
        if self.scope in ("tensor", "global"):
            object.__setattr__(self, "id", 0x11)

    def _settle_k(self) -> None:
        # k and density say the same here; settle both, so that equal settings compare equal
        k = max(1, round(self.density * self.chunk)) if self.k is None else self.k
        if k > self.chunk:
            raise ValueError(f"k must be at most chunk = {self.chunk} but is: {k}")
        object.__setattr__(self, "k", k)
        object.__setattr__(self, "density", k / self.chunk)

    @property
    def block(self) -> int:
        return self.chunk if self.scope == "chunk" else WHOLE

    def nbytes(self, n: int) -> int:
        return sum(piece.nbytes for piece in _plan(self, n))

    def delta(self, n: int) -> float | None:
        return min((piece.layout.delta() or 0.0 for piece in _plan(self, n)), default=1.0) or None

    def for_shapes(self, shapes: Sequence[tuple[int, ...]]) -> TopK:
        return replace(self, shapes=tuple(map(tuple, shapes))) if self.scope in SHAPED else self

    def encode(self, x: Tensor, out: Tensor, *, step: int = 0, rank: int = 0, bucket: int = 0) -> int:
        check_encode(self, x, out)
        flags = 0
        for piece, body in self._split(out, x.numel()):
            flags |= encode_rows(piece.layout, piece.to_rows(piece.of(x)), body)
        return flags

    def decode(self, body: Tensor, out: Tensor, *, step: int = 0, rank: int = 0, bucket: int = 0) -> None:
        check_decode(self, body, out)
        for piece, part in self._split(body, out.numel()):
            if piece.tiles is None:
                decode_rows(piece.layout, part, piece.of(out))
            else:
                rows = torch.empty_like(piece.of(out))
                decode_rows(piece.layout, part, rows)
                piece.from_rows(rows, piece.of(out))

    def decode_add(
        self, body: Tensor, acc: Tensor, weight: float = 1.0, *, step: int = 0, rank: int = 0, bucket: int = 0
    ) -> None:
        check_decode(self, body, acc)
        if len(_plan(self, acc.numel())) > 1 or self.scope == "tile2d":
            # several parts: decode all of them before anything is added, in case one is damaged
            return super().decode_add(body, acc, weight)
        for piece, part in self._split(body, acc.numel()):
            decode_rows(piece.layout, part, piece.of(acc), add=True, weight=weight)

    def encode_feedback(
        self,
        x: Tensor,
        residual: Tensor,
        candidate: Tensor,
        out: Tensor,
        *,
        decay: float = 1.0,
        step: int = 0,
        rank: int = 0,
        bucket: int = 0,
    ) -> int:
        check_feedback(self, x, residual, candidate, out)
        tensors = (x, residual, candidate, out)
        on_cuda = all(launches.runs(piece.layout, *tensors) for piece in _plan(self, x.numel()))
        if self.scope == "tile2d" or not (on_cuda or _kernels_take(self, *tensors)):
            return super().encode_feedback(x, residual, candidate, out, decay=decay)
        encode, flags = launches.encode if on_cuda else _encode_kernel, 0
        for piece, body in self._split(out, x.numel()):
            flags |= encode(piece.layout, piece.of(x), body, piece.of(residual), piece.of(candidate), decay)
        return flags

    @property
    def _on_cuda(self) -> bool:
        return self.scope == "chunk" and self._chunks._on_cuda

    @property
    def _chunks(self) -> SparseFormat:
        assert self.k is not None
        return SparseFormat(self.chunk, self.k, self.index, self.value, self.iterations)

    def _launch_encode(self, on: Launcher, source: Source, out: Tensor, n: int, place: tuple[int, int, int]) -> int:
        return self._chunks._launch_encode(on, source, out, n, place)

    def _launch_decode(self, on: Launcher, body: Tensor, sink: Sink, n: int) -> None:
        self._chunks._launch_decode(on, body, sink, n)

    def _split(self, body: Tensor, n: int) -> Iterator[tuple[Piece, Tensor]]:
        pieces = _plan(self, n)
        if len(pieces) == 1:
            return iter(((pieces[0], body),))
        return zip(pieces, torch.split(body, [piece.nbytes for piece in pieces]), strict=True)


@dataclass(frozen=True)
class Piece:
    """Elements [start, start + n) of the flat vector, encoded as rows; `tiles` = (R, S, h, w) where rows are tiles."""

    start: int
    n: int
    layout: SparseFormat
    nbytes: int
    tiles: tuple[int, int, int, int] | None = None

    def of(self, x: Tensor) -> Tensor:
        """This piece of a flat vector."""
        if self.n == x.numel():
            return x  # a slice would cost as much as encoding a small vector
        return x[self.start : self.start + self.n]

    def to_rows(self, x: Tensor) -> Tensor:
        """The (n,) elements of the piece in the order of its rows."""
        if self.tiles is None:
            return x
        height, width, h, w = self.tiles
        return x.view(height // h, h, width // w, w).transpose(1, 2).reshape(-1)

    def from_rows(self, rows: Tensor, out: Tensor) -> None:
        """Inverse of `to_rows` for a piece of tiles."""
        assert self.tiles is not None
        height, width, h, w = self.tiles
        tiles = rows.view(height // h, width // w, h, w)
        out.view(height // h, h, width // w, w).copy_(tiles.transpose(1, 2))


@lru_cache(maxsize=256)
def _plan(codec: TopK, n: int) -> tuple[Piece, ...]:
    """The pieces of a vector of n elements."""
    if codec.scope in ("chunk", "global"):
        sizes = [n]
    else:
        sizes = [prod(shape) for shape in codec.shapes]
        if sum(sizes) != n:
            raise ValueError(
                f"shapes {codec.shapes} have {sum(sizes)} elements but the vector has {n}; scope {codec.scope!r} needs "
                f"the shapes of the tensors in the vector, see for_shapes"
            )
    pieces, start = [], 0
    for i, size in enumerate(sizes):
        if size:
            pieces.append(_piece(codec, start, size, codec.shapes[i] if codec.shapes else (size,)))
        start += size
    return tuple(pieces)


def _piece(codec: TopK, start: int, n: int, shape: tuple[int, ...]) -> Piece:
    tiles, c, k = None, codec.chunk, codec.k
    if codec.scope == "tile2d":
        height, width = (1, n) if len(shape) < 2 else (shape[0], prod(shape[1:]))
        side = isqrt(codec.chunk)
        tiles = (height, width, _largest_divisor(height, side), _largest_divisor(width, side))
        c = tiles[2] * tiles[3]
    elif codec.scope != "chunk":
        c = n
    k = min(c, max(1, round(codec.density * c)) if k is None else k)
    layout = SparseFormat(c, k, codec.index, codec.value, codec.iterations)
    return Piece(start, n, layout, layout.nbytes(-(-n // c)), tiles)


def _largest_divisor(n: int, limit: int) -> int:
    return next(d for d in range(min(n, limit), 0, -1) if n % d == 0)


def encode_rows(layout: SparseFormat, x: Tensor, out: Tensor) -> int:
    """Select and encode the entries of `x`, (n,) cut into rows of c; return the flags."""
    if launches.runs(layout, x, out):
        return launches.encode(layout, x, out)
    if _kernels_take(layout, x, out):
        return _encode_kernel(layout, x, out)
    values, flags = finite_part(x)
    rows = as_blocks(values, layout.c)
    indices = largest(rows, layout.k)
    real = (x.numel() - torch.arange(rows.shape[0], device=x.device) * layout.c).clamp(max=layout.k)
    return flags | layout.encode(indices, rows.gather(1, indices), real, out)


def decode_rows(layout: SparseFormat, body: Tensor, out: Tensor, *, add: bool = False, weight: float = 1.0) -> None:
    """Overwrite `out`, or add to it. Where the body is damaged (ValueError) nothing is added."""
    if launches.runs(layout, body, out):
        return launches.decode(layout, body, out, weight if add else None)
    if _kernels_take(layout, body, out):
        return _decode_kernel(layout, body, out, add, weight)
    positions, values = layout.decode(body, out.numel())
    if add:
        scatter_add(positions, values, out, weight)
    else:
        scatter(positions, values, out)


def largest(rows: Tensor, k: int) -> Tensor:
    """Positions of the k entries of largest magnitude of each row, ascending; ties to the lower position.

    >>> largest(torch.tensor([[1.0, -1.0, 1.0, 1.0, 0.5, -1.0]]), 3).tolist()
    [[0, 1, 2]]
    """
    c = rows.shape[1]
    magnitudes = (rows.view(torch.int32) & 0x7FFFFFFF).to(torch.int64)
    keys = magnitudes << 32 | torch.arange(c - 1, -1, -1, device=rows.device)
    return keys.topk(k, dim=1, sorted=False).indices.sort(dim=1).values


def _kernels_take(formats: TopK | SparseFormat, *tensors: Tensor) -> bool:
    small = all(t.numel() < 2**31 for t in tensors)  # kernels number the elements of a row with 32 bits
    return formats.value != "bins4" and small and kernels.runs_on_kernels(*tensors)


def _encode_kernel(
    layout: SparseFormat,
    x: Tensor,
    out: Tensor,
    residual: Tensor | None = None,
    candidate: Tensor | None = None,
    decay: float = 1.0,
) -> int:
    if layout.c > MAX_COPIED_ROW:
        x = x.float()
    scratch, words, threads = _scratch(layout)
    encode = kernels.kernel("lc_topk_encode", "pippfllliiippli")
    flags = encode(
        x.data_ptr(),
        kernels.dtype_code(x.dtype),
        None if residual is None else residual.data_ptr(),
        None if candidate is None else candidate.data_ptr(),
        decay,
        x.numel(),
        layout.c,
        layout.k,
        INDEX_CODECS.index(layout.index),
        VALUE_CODECS.index(layout.value),
        layout.iterations,
        out.data_ptr(),
        scratch.data_ptr(),
        words,
        threads,
    )
    return int(flags)


def _decode_kernel(layout: SparseFormat, body: Tensor, out: Tensor, add: bool, weight: float) -> None:
    scratch, words, threads = _scratch(layout)
    formats = INDEX_CODECS.index(layout.index), VALUE_CODECS.index(layout.value)
    shape = out.numel(), layout.c, layout.k, *formats, scratch.data_ptr(), words, threads
    if add:
        decode_add = kernels.kernel("lc_topk_decode_add", "ppfllliipli")
        damaged = decode_add(body.data_ptr(), out.data_ptr(), weight, *shape)
    else:
        damaged = kernels.kernel("lc_topk_decode", "ppllliipli")(body.data_ptr(), out.data_ptr(), *shape)
    layout.check(damaged)


def _scratch(layout: SparseFormat) -> tuple[Tensor, int, int]:
    """Working memory for kernels: 32-bit words for every thread, their number for one, and the number of threads."""
    copied = layout.c if layout.c <= MAX_COPIED_ROW else 0
    words, threads = 5 * layout.k + 8192 + copied, kernels.threads()
    return kernels.workspace(4 * threads * words), words, threads
