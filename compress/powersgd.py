"""PowerSGD: low-rank compression of matrices by one step of power iteration (arXiv 1905.13727).

For a matrix M_r (rows x cols) on each of N ranks and a matrix Q (cols x rank) that all ranks hold, from the last round
or random:

    P = mean_r M_r Q;   P = orthonormalize(P);   Q = mean_r M_r^T P;   M^ = P Q^T
    residual            e_r = M_r - P P^T M_r    ("local", default)   or   e_r = M_r - M^    ("mean")

M^ is the projection P P^T of the mean matrix. Both residuals add up to sum_r M_r - N M^; the local one is smaller when
ranks disagree. Both steps are plain means, 4 rank (rows + cols) bytes in all.

Two ways to use it:

* `PowerSGD` is a codec: every rank sends the factors of its own matrices, all ranks decode them and take the mean.
* `PowerIteration` runs the two means above. It works with any sum of float vectors, between ranks or in one process:

      exchange = PowerIteration(codec, gradient + residual, warm)
      right = exchange.right(mean_over_ranks(exchange.left()))
      update = exchange.finish(mean_over_ranks(right))
      residual, warm = exchange.residual(), exchange.warm
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import isqrt, prod
from typing import NamedTuple

import torch
from torch import Tensor

from .codec import Codec, check_decode, check_encode, nonfinite_flags
from .kernels import kernel, runs_on_kernels, threads
from .philox import bucket_seed, uniform

__all__ = [
    "PowerIteration",
    "PowerSGD",
    "effective_rank",
    "left_factor",
    "orthonormalize",
    "reconstruct",
    "right_factor",
]

_START = 0x50534744  # random stream of the first Q, shared by all ranks
_LOST = 1e-6  # a column that loses this much of its norm to the ones before it is rounding noise


def left_factor(matrix: Tensor, right: Tensor) -> Tensor:
    """P = M Q: (rows, cols) x (cols, rank) -> (rows, rank), float32."""
    # this layout of the factor is several times faster than the plain product, here and below
    return torch.nan_to_num(matrix @ right.t().contiguous().t())


def right_factor(matrix: Tensor, left: Tensor) -> Tensor:
    """Q = M^T P: (rows, cols), (rows, rank) -> (cols, rank), float32."""
    return torch.nan_to_num((left.t() @ matrix).t()).contiguous()


def orthonormalize(columns: Tensor) -> Tensor:
    """Orthonormal columns that span the same space, by the Gram-Schmidt process, each column twice.

    A column that depends on the ones before it, up to rounding, becomes zero: normalised rounding noise would not be
    orthogonal to them.

    Args:
        columns: (rows, rank) float32.

    >>> orthonormalize(torch.tensor([[3.0, 6.0], [4.0, 8.0]])).tolist()
    [[0.6000000238418579, 0.0], [0.800000011920929, 0.0]]
    """
    basis = columns.to(torch.float64)
    for j in range(basis.shape[1]):
        column, before = basis[:, j], basis[:, :j]
        length = column.norm()
        for _ in range(2):
            column = column - before @ (before.t() @ column)
        rest = column.norm()
        basis[:, j] = torch.where(rest > _LOST * length, column / rest, 0.0)
    return basis.to(torch.float32)


def reconstruct(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """P Q^T, (rows, cols) float32: the products of column j are added to those of the columns before it, in order.

    Unlike a matrix product of a library, this gives the same bits on every device.

    Args:
        left: P, (rows, rank) float32.
        right: Q, (cols, rank) float32.
        out: where to write the product; None: in new memory.
    """
    (rows, rank), cols = left.shape, right.shape[0]
    out = torch.empty(rows, cols, device=left.device) if out is None else out
    columns = right.t().contiguous()
    if runs_on_kernels(left, columns, out):
        pointers = (left.data_ptr(), columns.data_ptr(), out.data_ptr())
        kernel("lc_factor_product", "pppllli")(*pointers, rows, cols, rank, threads())
        return out
    torch.mul(left[:, :1], columns[0], out=out)
    for j in range(1, rank):
        out.add_(left[:, j : j + 1] * columns[j])
    return out


def effective_rank(right: Tensor, energy: float = 0.95) -> int:
    """The smallest j for which the j largest singular values hold `energy` of the energy of P Q^T, P orthonormal.

    The singular values of P Q^T are those of Q, so all ranks get the same number from the averaged factor.

    Args:
        right: Q, (cols, rank).
        energy: share of the sum of squared singular values, in (0, 1]. Default 0.95.

    >>> effective_rank(torch.diag(torch.tensor([3.0, 1.0, 0.1])))
    2
    """
    gram = right.to(torch.float64)
    energies = torch.linalg.eigvalsh(gram.t() @ gram).flip(0).clamp(min=0)
    share = energies.cumsum(0)
    return int((share < energy * share[-1]).sum()) + 1 if float(share[-1]) > 0 else 0


class _Matrix(NamedTuple):
    start: int  # in the flat vector
    rows: int
    cols: int


class _Layout(NamedTuple):
    matrices: tuple[_Matrix, ...]
    dense: tuple[tuple[int, int], ...]  # runs that are sent exactly
    num_dense: int
    left_size: int  # elements of all left factors
    right_size: int


@dataclass(frozen=True)
class PowerSGD(Codec):
    """Every matrix as the product of two thin factors; everything else exactly.

    Body: left factors (rows x rank, row-major, one matrix after another), right factors (cols x rank), exact elements,
    all float32, or this vector encoded by `factors`. 32 rank (rows + cols) / (rows cols) bits per element of a matrix.
    `encode` runs one power iteration from a random Q that all ranks share and that changes every round; to keep Q
    between rounds use `encode_from`, or `PowerIteration`, which also averages the factors over the ranks.

    Guarantee: ||x - C(x)||^2 = ||x||^2 - ||C(x)||^2, exact for matrices of no higher rank; no worst-case bound. Use it
    with error feedback. The encoder's matrix products are not the same to the last bit on all devices; the decoder is.

    Args:
        rank: columns of the factors. Default 4.
        min_rate: a matrix is compressed where min_rate * rank * (rows + cols) < rows * cols, and sent exactly where
            not. At least 1; default 2.
        shapes: shapes of the tensors that make up the flat vector. A tensor is a matrix with its first dimension as
            rows; tensors of fewer than two dimensions are sent exactly. Default (): the vector is folded to a matrix
            as square as possible.
        residual: "local" or "mean", see `PowerIteration`. Default "local".
        seed: of the random Q.
        factors: codec of the factor vector, None for float32. `Int4(block=256)` gives DiLoCoX's combination.

    Source: arXiv 1905.13727 and its authors' code. Folding a flat vector is torch's "batched" variant.

    >>> codec = PowerSGD(rank=1, shapes=((64, 32), (32,)))
    >>> codec.nbytes(64 * 32 + 32) == 4 * (64 + 32 + 32)
    True
    """

    rank: int = 4
    min_rate: float = 2.0
    shapes: tuple[tuple[int, ...], ...] = ()
    residual: str = "local"
    seed: int = 0
    factors: Codec | None = None

    id = 0x50
    requantizable = False

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank must be at least 1 but is: {self.rank}")
        if not self.min_rate >= 1:
            raise ValueError(f"min_rate must be at least 1 (smaller would expand the data) but is: {self.min_rate}")
        if self.residual not in ("local", "mean"):
            raise ValueError(f"residual must be 'local' or 'mean' but is: {self.residual!r}")
        if self.factors is not None and not self.factors.fixed_size:
            raise ValueError(f"factors needs a codec with a fixed body length, which {self.factors.config} has not")

    @property
    def block(self) -> int:
        return 2**62  # a message cannot be cut

    def for_shapes(self, shapes: Sequence[tuple[int, ...]]) -> PowerSGD:
        return replace(self, shapes=tuple(shapes))

    def nbytes(self, n: int) -> int:
        layout = _layout(self, n)
        numbers = layout.left_size + layout.right_size + layout.num_dense
        return 4 * numbers if self.factors is None else self.factors.nbytes(numbers)

    def start(self, n: int, device: torch.device | str = "cpu", *, step: int = 0, bucket: int = 0) -> Tensor:
        """Random right factors of all matrices, flat, uniform in [-1, 1): the same on all ranks."""
        size = _layout(self, n).right_size
        seed = bucket_seed(self.seed, bucket)
        return uniform(size, seed=seed, stream=_START, step=step, device=device) * 2 - 1

    def encode(self, x: Tensor, out: Tensor, *, step: int = 0, rank: int = 0, bucket: int = 0) -> int:
        warm = self.start(x.numel(), x.device, step=step, bucket=bucket)
        return self.encode_from(x, warm, out, step=step, rank=rank, bucket=bucket)[0]

    def encode_from(
        self, x: Tensor, warm: Tensor, out: Tensor, *, step: int = 0, rank: int = 0, bucket: int = 0
    ) -> tuple[int, Tensor]:
        """As `encode`, starting from the right factors `warm`; return (flags, right factors for the next round)."""
        check_encode(self, x, out)
        exchange = PowerIteration(self, x, warm)
        left = exchange.left()
        right = exchange.right(left)
        message = torch.cat((exchange.basis, right, left[exchange.layout.left_size :]))
        if self.factors is not None:
            return exchange.flags | self.factors.encode(message, out, step=step, rank=rank, bucket=bucket), right
        out.copy_(message.view(torch.uint8))
        return exchange.flags, right

    def decode(self, body: Tensor, out: Tensor, *, step: int = 0, rank: int = 0, bucket: int = 0) -> None:
        check_decode(self, body, out)
        layout = _layout(self, out.numel())
        if self.factors is None:
            message = body.clone().view(torch.float32)
        else:
            message = torch.empty(layout.left_size + layout.right_size + layout.num_dense, device=out.device)
            self.factors.decode(body, message, step=step, rank=rank, bucket=bucket)
        if not bool(torch.isfinite(message).all()):
            raise ValueError("factors must be finite but one is NaN or Inf; the body is damaged")
        left, right, dense = torch.split(message, [layout.left_size, layout.right_size, layout.num_dense])
        _assemble(self.rank, layout, left, right, dense, out)


class PowerIteration:
    """One round of PowerSGD over any number of ranks: two means of float32 vectors with a little arithmetic between.

    Call `left`, take the mean over the ranks, call `right` with it, take the mean, call `finish` with that. The means
    may be lossy (a two-phase exchange with `Int4`, as DiLoCoX does) as long as all ranks get the same bits. Matrix
    products give the same bits on equal machines only, but everything that reaches the result comes out of a mean.

    Args:
        codec: settings; its `factors` are not used here.
        message: (n,) float32, what is to be sent: gradient plus residual. Not modified, and kept until `finish`.
        warm: right factors of the last round, `exchange.warm`; None for `codec.start`. Equal on all ranks.

    Attributes:
        flags: HAS_NAN and HAS_INF as found in `message`; such elements count as 0.
        warm: right factors for the next round, once `finish` has run.

    >>> codec = PowerSGD(rank=1, shapes=((2, 8),), min_rate=1)
    >>> message = torch.arange(16.0)
    >>> exchange = PowerIteration(codec, message)
    >>> left = exchange.left()  # one rank is its own mean
    >>> right = exchange.right(left)
    >>> update = exchange.finish(right)
    >>> bool(torch.allclose(update + exchange.residual(), message, atol=1e-5))
    True
    """

    def __init__(self, codec: PowerSGD, message: Tensor, warm: Tensor | None = None) -> None:
        n = message.numel()
        self.layout = _layout(codec, n)
        self._codec = codec
        wide = message.to(torch.float32)
        self.flags = nonfinite_flags(wide)
        self._message = torch.where(torch.isfinite(wide), wide, 0.0) if self.flags else wide
        start = codec.start(n, message.device)
        self.warm = start if warm is None else self._alive(warm, start)
        self.basis = message.new_empty(0, dtype=torch.float32)  # orthonormal left factors, set by `right`
        self._own_right = self._dense = self._mean = self.basis

    def left(self) -> Tensor:
        """First vector to be averaged: left factors of all matrices, then the elements that are sent exactly."""
        parts = [left_factor(matrix, right) for matrix, right in self._matrices(self.warm)]
        return self._join(parts, [self._message[start:stop] for start, stop in self.layout.dense])

    def right(self, mean_left: Tensor) -> Tensor:
        """Second vector to be averaged: right factors of all matrices."""
        size = self.layout.left_size
        self._dense = mean_left[size:].clone()
        bases = [orthonormalize(part) for part in self._columns(mean_left[:size], rows=True)]
        self.basis = self._join(bases, [])
        parts = [right_factor(self._view(m), basis) for m, basis in zip(self.layout.matrices, bases, strict=True)]
        self._own_right = self._join(parts, [])
        return self._own_right.clone()

    def finish(self, mean_right: Tensor) -> Tensor:
        """The update that all ranks agree on, (n,) float32."""
        self.warm = mean_right.clone()
        self._mean = torch.empty_like(self._message)
        _assemble(self._codec.rank, self.layout, self.basis, self.warm, self._dense, self._mean)
        return self._mean.clone()

    def residual(self) -> Tensor:
        """What this rank keeps for its next message, after `finish`."""
        residual = self._message.clone()
        own = self._mean
        if self._codec.residual == "local":
            own = torch.empty_like(residual)
            zeros = torch.zeros_like(self._dense)
            _assemble(self._codec.rank, self.layout, self.basis, self._own_right, zeros, own)
        residual.sub_(own)
        for start, stop in self.layout.dense:
            residual[start:stop] = 0.0
        return residual

    def _view(self, matrix: _Matrix) -> Tensor:
        return _matrix(self._message, matrix)

    def _matrices(self, right: Tensor) -> list[tuple[Tensor, Tensor]]:
        views = [self._view(matrix) for matrix in self.layout.matrices]
        return list(zip(views, self._columns(right, rows=False), strict=True))

    def _columns(self, factors: Tensor, rows: bool) -> list[Tensor]:
        return _split(self._codec.rank, self.layout, factors, rows)

    def _alive(self, warm: Tensor, start: Tensor) -> Tensor:
        # A zero column would stay zero for ever: M 0 = 0. It starts afresh.
        pairs = zip(self._columns(warm, rows=False), self._columns(start, rows=False), strict=True)
        return self._join([torch.where(kept.any(dim=0), kept, fresh) for kept, fresh in pairs], [])

    def _join(self, parts: list[Tensor], runs: list[Tensor]) -> Tensor:
        flat = [part.reshape(-1) for part in parts] + runs
        return torch.cat(flat) if flat else self._message.new_empty(0)


@lru_cache(maxsize=256)
def _layout(codec: PowerSGD, n: int) -> _Layout:
    side = isqrt(n)
    shapes = codec.shapes or ((side, n // side), (n - side * (n // side),)) if n else ()
    if sum(map(prod, shapes)) != n:
        raise ValueError(f"shapes {shapes} have {sum(map(prod, shapes))} elements but the vector has {n}")
    matrices, dense, start = [], [], 0
    for shape in shapes:
        numel = prod(shape)
        rows, cols = (shape[0], prod(shape[1:])) if len(shape) > 1 else (1, numel)
        if codec.min_rate * codec.rank * (rows + cols) < rows * cols:
            matrices.append(_Matrix(start, rows, cols))
        elif numel:
            dense.append((start, start + numel))
        start += numel
    left_size = codec.rank * sum(matrix.rows for matrix in matrices)
    right_size = codec.rank * sum(matrix.cols for matrix in matrices)
    return _Layout(tuple(matrices), tuple(dense), sum(b - a for a, b in dense), left_size, right_size)


def _matrix(flat: Tensor, matrix: _Matrix) -> Tensor:
    return flat[matrix.start : matrix.start + matrix.rows * matrix.cols].view(matrix.rows, matrix.cols)


def _split(rank: int, layout: _Layout, factors: Tensor, rows: bool) -> list[Tensor]:
    """The factor of every matrix, (rows or cols, rank), as views of the flat vector of factors."""
    lengths = [matrix.rows if rows else matrix.cols for matrix in layout.matrices]
    parts = torch.split(factors, [length * rank for length in lengths])
    return [part.view(length, rank) for part, length in zip(parts, lengths, strict=True)]


def _assemble(rank: int, layout: _Layout, left: Tensor, right: Tensor, dense: Tensor, out: Tensor) -> None:
    """Write P Q^T of every matrix and the exact elements to `out`."""
    factors = zip(_split(rank, layout, left, True), _split(rank, layout, right, False), strict=True)
    for matrix, (p, q) in zip(layout.matrices, factors, strict=True):
        reconstruct(p, q, _matrix(out, matrix))
    for (start, stop), part in zip(layout.dense, torch.split(dense, [b - a for a, b in layout.dense]), strict=True):
        out[start:stop] = part
