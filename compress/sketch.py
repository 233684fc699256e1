"""Linear sketches: random projections of the vector that ranks can sum before anybody decodes.

CountSketch (Charikar et al. 2002; FetchSGD, arXiv 2007.07682): r rows of w cells. Row j has a hash h_j of positions to
cells and a sign s_j,

    T[j, h_j(i)] = sum_i s_j(i) x_i          x_i is estimated by the median over j of s_j(i) T[j, h_j(i)]

where (k0, k1) are the first two words of the shared random counter (j, sketch stream, step 0), h_j(i) is
fmix32(i * 0x9E3779B1 + k0) * w >> 32 and s_j(i) is -1 where fmix32(i * 0x9E3779B1 + k1) is odd. Cells are summed in
ascending order of i.

Subsampled randomised Hadamard transform (Ailon and Chazelle 2006): with shared random signs D, the Hadamard matrix H of
size P and k shared random positions S,

    y = (H D x / sqrt(P)) on S               x is estimated by (P / k) D H y / sqrt(P), y being 0 outside S
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor

from .codec import HAS_INF, Codec, check_decode, check_encode
from .kernels import dtype_code, kernel, runs_on_kernels, threads
from .packing import as_blocks
from .philox import SKETCH, bucket_seed, fmix32, permutation, philox4x32, rademacher
from .ranges import finite_part

__all__ = ["SRHT", "CountSketch", "fetchsgd_step", "hadamard"]

_WORD = 0xFFFFFFFF
_GOLDEN = 0x9E3779B1


@dataclass(frozen=True)
class CountSketch(Codec):
    """A table of signed sums, from which every large element can be estimated.

    Body: the table, rows x columns float32, row by row; 32 density bits per element. Tables of several ranks are
    summed as float vectors; what is decoded from the sum is the estimate of the sum. The hashes depend on the seed and
    the bucket alone, so tables of different rounds may be added too.

    Guarantee: over the draw of the hashes every estimate is unbiased; one row's has variance at most
    ||x||^2 / columns, and the median over the rows is within 3 ||x|| / sqrt(columns) with a probability that approaches
    1 exponentially in `rows`. Decoding is no contraction: small elements drown in the noise of large ones, and error
    feedback around it diverges. For training, use `fetchsgd_step`, which takes the largest estimates only and keeps
    the error in the sketch.

    Args:
        rows: r, number of hashes, 1 to 63. Default 5.
        density: cells in all rows, as a fraction of the elements. Default 1/8. Each row has
            ceil(density * n / rows) cells, at least 1.
        seed: of the hashes. Default 0.

    >>> codec = CountSketch(rows=5, density=10.0)
    >>> x = torch.tensor([0.0, 5.0, 0.0, -2.0])
    >>> body, out = torch.empty(codec.nbytes(4), dtype=torch.uint8), torch.empty(4)
    >>> codec.encode(x, body)
    0
    >>> codec.decode(body, out)
    >>> out.tolist()
    [0.0, 5.0, 0.0, -2.0]
    """

    rows: int = 5
    density: float = 1 / 8
    seed: int = 0

    id = 0x60
    linear = True
    requantizable = False

    def __post_init__(self) -> None:
        if not 1 <= self.rows <= 63:
            raise ValueError(f"rows must be 1 to 63 but is: {self.rows}")
        if not self.density > 0:
            raise ValueError(f"density must be positive but is: {self.density}")

    @property
    def block(self) -> int:
        return 2**62  # a table belongs to one whole vector

    @property
    def unbiased(self) -> bool:
        return True

    def omega(self, n: int) -> float | None:
        return (n - 1) / self.columns(n) if n and self.rows == 1 else None

    def columns(self, n: int) -> int:
        """Cells of each row for n elements."""
        return max(1, ceil(self.density * n / self.rows)) if n else 0

    def nbytes(self, n: int) -> int:
        return 4 * self.rows * self.columns(n)

    def encode(self, x: Tensor, out: Tensor, *, step: int = 0, rank: int = 0, bucket: int = 0) -> int:
        check_encode(self, x, out)
        keys, columns = self._keys(bucket), self.columns(x.numel())
        if runs_on_kernels(x, out):
            place = (keys.data_ptr(), self.rows, columns)
            flags: int = kernel("lc_count_sketch", "pilppili")(
                x.data_ptr(), dtype_code(x.dtype), x.numel(), out.data_ptr(), *place, threads()
            )
            return flags
        values, flags = finite_part(x)
        table = torch.zeros(self.rows, columns, device=x.device)
        for j in range(self.rows):
            cells, signs = hash_row(x.numel(), columns, keys[j], x.device)
            ordered_add(table[j], cells, signs * values)
        out.copy_(table.view(-1).view(torch.uint8))
        return flags

    def decode(self, body: Tensor, out: Tensor, *, step: int = 0, rank: int = 0, bucket: int = 0) -> None:
        check_decode(self, body, out)
        table = body.clone().view(torch.float32)  # a body may lie at any address
        if not bool(torch.isfinite(table).all()):
            raise ValueError("sketch cells must be finite but one is NaN or Inf; the body is damaged")
        self._estimate(table, out, bucket)

    def _estimate(self, table: Tensor, out: Tensor, bucket: int) -> None:
        keys, n = self._keys(bucket), out.numel()
        if runs_on_kernels(table, out):
            place = (keys.data_ptr(), self.rows, self.columns(n))
            kernel("lc_count_sketch_estimate", "plppili")(out.data_ptr(), n, table.data_ptr(), *place, threads())
            return
        estimates = []
        for row, key in zip(table.view(self.rows, -1), keys, strict=True):
            cells, signs = hash_row(n, row.numel(), key, out.device)
            estimates.append(signs * row[cells] + 0.0)  # no -0: it compares equal to +0 but has other bits
        ranked = torch.stack(estimates).sort(dim=0).values
        low, high = ranked[(self.rows - 1) // 2], ranked[self.rows // 2]
        out.copy_(low if self.rows % 2 else (low + high) * 0.5)

    def _keys(self, bucket: int) -> Tensor:
        """(rows, 2) int64 in [0, 2^32): the keys of cell and sign of each row."""
        words = philox4x32(torch.arange(self.rows), SKETCH, 0, bucket_seed(self.seed, bucket))
        return words[:, :2].contiguous()


def fetchsgd_step(
    codec: CountSketch,
    table: Tensor,
    momentum_table: Tensor,
    error_table: Tensor,
    *,
    n: int,
    k: int,
    momentum: float = 0.9,
    bucket: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One round of FetchSGD after the exchange: momentum and error feedback inside the sketch.

    V = momentum V + S;  E = E + V;  update = the k largest estimates of E;  V = E = 0 in every cell the update touches.
    (Subtracting the sketch of the update from E instead diverges.)

    Args:
        codec: the settings the ranks sketched their gradients with.
        table: S, the mean of the ranks' sketches, flat float32.
        momentum_table, error_table: V and E, flat float32, zero before the first round. Not modified.
        n: number of elements of the sketched vector.
        k: number of elements of the update, at most n.
        momentum: default 0.9.
        bucket: as in `encode`.

    Returns:
        positions of the update, ascending, int64; its values, float32; the new V; the new E. The parameters move by
        -lr * values.

    Source: arXiv 2007.07682 and its authors' code.
    """
    velocity = momentum_table * momentum + table
    error = error_table + velocity
    estimates = torch.empty(n, device=table.device)
    codec._estimate(error, estimates, bucket)
    positions = estimates.abs().sort(descending=True, stable=True).indices[:k].sort().values
    columns = codec.columns(n)
    for j, key in enumerate(codec._keys(bucket)):
        cells, _ = hash_row(n, columns, key, table.device)
        touched = cells[positions] + j * columns
        velocity[touched] = 0.0
        error[touched] = 0.0
    return positions, estimates[positions], velocity, error


@dataclass(frozen=True)
class SRHT(Codec):
    """A random part of the Hadamard transform of every chunk.

    Body: k float32 of each chunk; 32 density bits per element. Ranks draw the same signs and positions, new ones every
    round, so bodies are summed as float vectors and the sum is decoded once.

    Guarantee: unbiased with E ||C(x) - x||^2 = (P / k - 1) ||x||^2 for every x; with `contractive`, which leaves out
    the factor P / k, ||x - C(x)||^2 = (1 - k / P) ||x||^2 in expectation. Unlike random-k its error in one round does
    not depend on where the large elements are. Use the unbiased form without error feedback, the other with it.

    Args:
        density: k / P, fraction of numbers that are sent, in (0, 1]. Default 1/8; k is rounded, at least 1.
        chunk: P, elements transformed together, a power of two up to 65536. Default 4096; the last chunk uses the
            smallest power of two that holds it.
        contractive: default False.
        seed: of signs and positions. Default 0.

    >>> codec = SRHT(density=1.0, chunk=8)
    >>> body, out = torch.empty(codec.nbytes(3), dtype=torch.uint8), torch.empty(3)
    >>> codec.encode(torch.tensor([1.0, -2.0, 3.0]), body)
    0
    >>> codec.decode(body, out)
    >>> out.tolist()
    [1.0, -2.0, 3.0]
    """

    density: float = 1 / 8
    chunk: int = 4096
    contractive: bool = False
    seed: int = 0

    id = 0x61
    linear = True
    requantizable = False

    def __post_init__(self) -> None:
        if not 0 < self.density <= 1:
            raise ValueError(f"density must be in (0, 1] but is: {self.density}")
        if not 1 <= self.chunk <= 65536 or self.chunk & (self.chunk - 1):
            raise ValueError(f"chunk must be a power of two, at most 65536, but is: {self.chunk}")

    @property
    def block(self) -> int:
        return self.chunk

    @property
    def unbiased(self) -> bool:
        return not self.contractive

    def nbytes(self, n: int) -> int:
        return 4 * sum(rows * self._kept(size) for _, rows, size in self._parts(n))

    def delta(self, n: int) -> float | None:
        shares = [self._kept(size) / size for _, _, size in self._parts(n)]
        return min(shares, default=1.0) if self.contractive else None

    def omega(self, n: int) -> float | None:
        variances = [size / self._kept(size) - 1 for _, _, size in self._parts(n)]
        return None if self.contractive else max(variances, default=0.0)

    def encode(self, x: Tensor, out: Tensor, *, step: int = 0, rank: int = 0, bucket: int = 0) -> int:
        check_encode(self, x, out)
        values, flags = finite_part(x)
        seed = bucket_seed(self.seed, bucket)
        signed = values * rademacher(x.numel(), seed=seed, step=step, device=x.device)
        bodies = []
        for first, rows, size in self._parts(x.numel()):
            rotated = hadamard(as_blocks(signed[first : first + rows * size], size)) * size**-0.5
            overflow = ~torch.isfinite(rotated)
            flags |= HAS_INF if bool(overflow.any()) else 0
            kept = rotated.masked_fill_(overflow, 0.0)[:, self._positions(size, seed, step, x.device)]
            bodies.append(kept.reshape(-1).view(torch.uint8))
        if bodies:
            torch.cat(bodies, out=out)
        return flags

    def decode(self, body: Tensor, out: Tensor, *, step: int = 0, rank: int = 0, bucket: int = 0) -> None:
        check_decode(self, body, out)
        numbers = body.clone().view(torch.float32)
        if not bool(torch.isfinite(numbers).all()):
            raise ValueError("coefficients must be finite but one is NaN or Inf; the body is damaged")
        seed, used = bucket_seed(self.seed, bucket), 0
        for first, rows, size in self._parts(out.numel()):
            k = self._kept(size)
            kept = numbers[used : used + rows * k].view(rows, k) * (1.0 if self.contractive else size / k)
            used += rows * k
            rotated = torch.zeros(rows, size, device=out.device)
            rotated[:, self._positions(size, seed, step, out.device)] = kept
            part = out[first : first + rows * size]
            part.copy_((hadamard(rotated) * size**-0.5).view(-1)[: part.numel()])
        out.mul_(rademacher(out.numel(), seed=seed, step=step, device=out.device))

    def _parts(self, n: int) -> list[tuple[int, int, int]]:
        """(first element, rows, row length): the whole chunks, then the rest."""
        whole, rest = divmod(n, self.chunk)
        parts = [(0, whole, self.chunk)] if whole else []
        return [*parts, (n - rest, 1, 1 << (rest - 1).bit_length())] if rest else parts

    def _kept(self, size: int) -> int:
        return max(1, round(self.density * size))

    def _positions(self, size: int, seed: int, step: int, device: torch.device) -> Tensor:
        return permutation(torch.arange(self._kept(size), device=device), size, seed=seed, step=step)


def hadamard(rows: Tensor) -> Tensor:
    """H of every row, not normalised: (m, P) float32, P a power of two, in the order of the natural butterflies.

    Butterflies (a, b) -> (a + b, a - b) over strides 1, 2, 4, ..., each sum rounded to float32.

    >>> hadamard(torch.tensor([[1.0, -2.0, 3.0, 4.0]])).tolist()
    [[6.0, 2.0, -8.0, 4.0]]
    """
    m, size = rows.shape
    if runs_on_kernels(rows):
        out = rows.clone()
        kernel("lc_hadamard", "plli")(out.data_ptr(), m, size, threads())
        return out
    stride = 1
    while stride < size:
        pairs = rows.reshape(m, size // (2 * stride), 2, stride)
        low, high = pairs[:, :, 0], pairs[:, :, 1]
        rows = torch.stack((low + high, low - high), dim=2).view(m, size)
        stride *= 2
    return rows


def hash_row(n: int, columns: int, key: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cell (int64) and sign (float32) of positions 0 .. n-1 in one row."""
    mixed = torch.arange(n, device=device) * _GOLDEN
    cell_key, sign_key = key.tolist()
    cells = fmix32((mixed + cell_key) & _WORD) * columns >> 32
    return cells, 1.0 - 2.0 * (fmix32((mixed + sign_key) & _WORD) & 1).to(torch.float32)


def ordered_add(row: Tensor, cells: Tensor, values: Tensor) -> None:
    """row[cells[i]] += values[i], in ascending order of i on every device."""
    if row.device.type == "cpu":
        row.index_add_(0, cells, values)  # one after the other on the CPU, in any order elsewhere
    else:
        add_in_turns(row, cells, values)


def add_in_turns(row: Tensor, cells: Tensor, values: Tensor) -> None:
    """The same by steps without conflicts: first the first value of every cell, then the second of every cell, ..."""
    by_cell = cells.sort(stable=True)
    sizes = torch.bincount(cells, minlength=row.numel())
    turn = torch.arange(cells.numel(), device=cells.device) - (sizes.cumsum(0) - sizes)[by_cell.values]
    by_turn = turn.sort(stable=True)
    order = by_cell.indices[by_turn.indices]
    for part in torch.split(order, torch.bincount(by_turn.values).tolist()):
        row[cells[part]] += values[part]
