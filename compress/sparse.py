"""The body of a sparse message: rows of c positions, k kept in each, as scales, indices and codes.

    body = scales | indices | codes, each section padded with zeros to 4 bytes

The formats of the sections are in indices.py and values.py. C++ kernels that select and encode at once (topk.cpp) write
the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import launches
from .indices import INDEX_CODECS, decode_indices, encode_indices, index_nbytes
from .launches import Launcher, Sink, Source
from .values import VALUE_CODECS, code_nbytes, decode_values, encode_values, scale_nbytes

__all__ = ["SparseFormat", "check_formats"]


@dataclass(frozen=True)
class SparseFormat:
    """Bytes of rows that keep k of c positions.

    Attributes:
        c: positions in a row.
        k: kept in each row, 1 to c.
        index: one of `INDEX_CODECS`.
        value: one of `VALUE_CODECS`.
        iterations: Lloyd iterations of the value format "mag2".
    """

    c: int
    k: int
    index: str
    value: str
    iterations: int = 3

    def nbytes(self, rows: int) -> int:
        """Length of the body of `rows` rows."""
        return sum(self.section_nbytes(rows))

    def section_nbytes(self, rows: int) -> tuple[int, int, int]:
        """Lengths of the scales, the indices and the codes."""
        indices = index_nbytes(self.index, self.c, self.k, rows)
        return scale_nbytes(self.value, rows), indices, code_nbytes(self.value, self.k, rows)

    def encode(self, indices: Tensor, values: Tensor, counts: Tensor, out: Tensor) -> int:
        """Write the body of (rows, k) positions, ascending in each row, and their float32 values; return the flags.

        Only counts[i] entries of row i are real; the others stand behind them, with values 0.
        """
        scales, codes, flags = encode_values(self.value, values, counts, self.iterations)
        torch.cat((scales, encode_indices(self.index, indices, self.c), codes), out=out)
        return flags

    def decode(self, body: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """Positions in [0, n), ascending, and values of the entries of a vector of n elements cut into rows.

        Raises:
            ValueError: the body is not one that `encode` can have written.
        """
        rows = -(-n // self.c)
        scales, indices, codes = torch.split(body, list(self.section_nbytes(rows)))
        places = decode_indices(self.index, indices, self.c, self.k, rows)
        values = decode_values(self.value, scales, codes, self.k, rows)
        flat = places + torch.arange(rows, device=body.device).unsqueeze(1) * self.c
        kept = (places < self.c) & (flat < n)
        return flat[kept], values[kept]

    @property
    def _on_cuda(self) -> bool:
        return launches.takes_rows(*self._rows)

    @property
    def _rows(self) -> launches.Rows:
        return launches.Rows(self.c, self.k, INDEX_CODECS.index(self.index), VALUE_CODECS.index(self.value))

    def _launch_encode(self, on: Launcher, source: Source, out: Tensor, n: int, place: tuple[int, int, int]) -> int:
        """Select and encode the entries of n elements cut into rows."""
        return launches.topk(on, source, out.data_ptr(), n, self._rows, self.iterations)

    def _launch_decode(self, on: Launcher, body: Tensor, sink: Sink, n: int) -> None:
        self.check(launches.topk_decode(on, body.data_ptr(), sink, n, self._rows))

    def check(self, damaged: int) -> None:
        """Raise ValueError where a decoder reports damage."""
        if damaged:
            raise ValueError(
                f"positions must ascend within [0, {self.c}) in every row of {self.k} entries, and scales and values "
                f"must be finite; the body is damaged"
            )

    def delta(self) -> float | None:
        """Worst-case contraction of a full row, less what rounding can take; None for "bins4"."""
        c, k = self.c, self.k
        bound = {
            "f32": k / c,
            "bf16": k / c,
            # one-hot rows and rows of equal magnitudes are the worst cases of a mean level
            "mag2": min(1 / k, k / c),
            "sign1": min(1 / k, k / c),
            "int8": max(1 / c, k / c * (1 - k / (4 * 127**2))),
            "int4": max(1 / c, k / c * (1 - k / (4 * 7**2))),
        }.get(self.value)
        return bound if bound is None or self.value == "f32" else bound * (1 - 2.0**-16)


def check_formats(index: str, value: str, iterations: int) -> None:
    """Raise ValueError unless the settings name formats that exist."""
    if index not in INDEX_CODECS:
        raise ValueError(f"index must be one of {INDEX_CODECS} but is: {index!r}")
    if value not in VALUE_CODECS:
        raise ValueError(f"value must be one of {VALUE_CODECS} but is: {value!r}")
    if iterations < 0:
        raise ValueError(f"iterations must be >= 0 but is: {iterations}")


def scatter(positions: Tensor, values: Tensor, out: Tensor) -> None:
    """Overwrite `out` by zeros and the values at their positions."""
    out.zero_()
    out[positions] = values


def scatter_add(positions: Tensor, values: Tensor, acc: Tensor, weight: float) -> None:
    """acc = fl(acc + fl(weight * value)) at the positions, which are distinct."""
    acc[positions] += values if weight == 1.0 else values * weight
