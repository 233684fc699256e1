"""Sparsification by a magnitude threshold: a given one, or one estimated from a sample as in deep gradient compression.

    C(x)_i = x_i where |x_i| >= t, 0 elsewhere

How many entries pass depends on the data, while messages need a length that all ranks know. So a codec has room for a
fixed number of entries; if more pass, the largest of them are sent, and error feedback delivers the others later.

    body = u32 count | count u32 positions, ascending | count f32 values | zeros up to the length for `capacity` entries

The first `4 + 8 count` bytes say everything; a link without fixed lengths needs no more.
"""

from __future__ import annotations

import ctypes
import math
import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from . import kernels
from .codec import Codec, check_decode, check_encode, check_feedback
from .philox import bucket_seed, noise_stream, uniform
from .ranges import finite_part
from .sparse import scatter, scatter_add
from .topk import WHOLE, largest

__all__ = ["SampledTopK", "Threshold"]

OVERFLOW = 0x100  # threshold.cpp: more entries than there is room for
MAX_ROUNDS, LEAST, SHRINK = 10, 0.8, 0.8  # of the search for a threshold, as in the published code
_MAGNITUDE, _INFINITY = 0x7FFFFFFF, 0x7F800000


class _Listed(Codec):
    """Codecs whose body is a list of at most `capacity(n)` positions and values."""

    density: float
    requantizable = False

    @property
    def block(self) -> int:
        return WHOLE

    def capacity(self, n: int) -> int:
        """Entries that a body for n elements has room for."""
        return min(n, math.ceil(self.density * n))

    def nbytes(self, n: int) -> int:
        if n >= 2**32:
            raise ValueError(f"positions are 32-bit numbers, so n must be below 2^32 but is: {n}")
        return 4 + 8 * self.capacity(n) if n else 0

    def decode(self, body: Tensor, out: Tensor, *, step: int = 0, rank: int = 0, bucket: int = 0) -> None:
        check_decode(self, body, out)
        if not out.numel():
            return
        if kernels.runs_on_kernels(body, out):
            _read_on_kernels(body, out, add=False, weight=1.0)
        else:
            scatter(*_read(body, out.numel()), out)

    def decode_add(
        self, body: Tensor, acc: Tensor, weight: float = 1.0, *, step: int = 0, rank: int = 0, bucket: int = 0
    ) -> None:
        check_decode(self, body, acc)
        if not acc.numel():
            return
        if kernels.runs_on_kernels(body, acc):
            _read_on_kernels(body, acc, add=True, weight=weight)
        else:
            scatter_add(*_read(body, acc.numel()), acc, weight)


@dataclass(frozen=True)
class Threshold(_Listed):
    """The entries of magnitude at least `tau`: 64 bits for each that there is room for, and 32 for their number.

    Guarantee: entries below tau in magnitude are all that is lost, ||x - C(x)||^2 <= n tau^2, as long as no more than
    the capacity pass; never more than ||x||^2. No contraction by a fixed factor, so `delta` is None.

    Args:
        tau: the threshold, positive; compared as the nearest float32.
        density: room for entries, as a fraction of n, in (0, 1]: ceil(density n). Default 1/16. Every message has this
            length. Where more pass, the largest are sent (ties to the lower position).

    Raises:
        ValueError: a setting outside the above, or n >= 2^32.

    >>> codec = Threshold(tau=1.0, density=0.5)
    >>> x = torch.tensor([1.0, -2.0, 0.5, 4.0, -0.25, 0.0, 3.0, -0.75])
    >>> body = torch.empty(codec.nbytes(8), dtype=torch.uint8)
    >>> codec.encode(x, body)
    0
    >>> out = torch.empty(8)
    >>> codec.decode(body, out)
    >>> out.tolist()
    [1.0, -2.0, 0.0, 4.0, 0.0, 0.0, 3.0, 0.0]

    Source: Strom 2015, "Scalable distributed DNN training using commodity GPU cloud computing"; exact values instead of
    +-tau, and a fixed room, are our choice.
    """

    tau: float
    density: float = 1 / 16

    id = 0x13

    def __post_init__(self) -> None:
        if not 0 < self.tau < math.inf:
            raise ValueError(f"tau must be positive and finite but is: {self.tau}")
        _check_fraction("density", self.density)

    def encode(self, x: Tensor, out: Tensor, *, step: int = 0, rank: int = 0, bucket: int = 0) -> int:
        check_encode(self, x, out)
        return _Selection(x, out).send(self._key()) if x.numel() else 0

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
        if not x.numel() or not kernels.runs_on_kernels(x, residual, candidate, out):
            return super().encode_feedback(x, residual, candidate, out, decay=decay)
        return _Correction(x, out, residual, candidate, decay).send(self._key())

    def _key(self) -> int:
        return max(1, _bits(self.tau))


@dataclass(frozen=True)
class SampledTopK(_Listed):
    """About the density * n largest entries of the whole vector, without sorting it: the selection of DGC.

    The threshold is the one that a strided sample suggests. Where fewer than 0.8 K entries reach it, K being
    ceil(density n), it is lowered by a fifth, up to ten times; where more than K do, the K largest of them are sent.
    Zeros are never sent.

    64 bits for each of K entries, and 32 for their number. `delta` is None: the sample decides how much is kept, close
    to K entries on most data. Use it with `DGC`, or with error feedback. `TopK` selects exactly, in fewer bits.

    Args:
        density: K / n, in (0, 1]. Default 0.001.
        sample: fraction of the elements that is sampled, in (0, 1]; at least ceil(2 / density) elements are, or all of
            a vector with no more. Default 0.01.
        seed: of the first position of the sample, with `step`, `rank` and `bucket`.

    Raises:
        ValueError: a setting outside the above, or n >= 2^32.

    >>> codec = SampledTopK(density=0.01)
    >>> x = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    >>> body, out = torch.empty(codec.nbytes(100_000), dtype=torch.uint8), torch.empty(100_000)
    >>> codec.encode(x, body)
    0
    >>> codec.decode(body, out)
    >>> 800 <= int((out != 0).sum()) <= 1000
    True

    Source: arXiv 1712.01887 and its authors' code. They cut what is too much by position; the largest are our choice.
    """

    density: float = 0.001
    sample: float = 0.01
    seed: int = 0

    id = 0x14

    def __post_init__(self) -> None:
        _check_fraction("density", self.density)
        _check_fraction("sample", self.sample)

    def encode(self, x: Tensor, out: Tensor, *, step: int = 0, rank: int = 0, bucket: int = 0) -> int:
        check_encode(self, x, out)
        if not x.numel():
            return 0
        sample = x[self._sampled(x.numel(), step, rank, bucket)]
        return _Selection(x, out).search(self._estimate(sample), self.capacity(x.numel()))

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
        if not x.numel() or not kernels.runs_on_kernels(x, residual, candidate, out):
            where = {"step": step, "rank": rank, "bucket": bucket}
            return super().encode_feedback(x, residual, candidate, out, decay=decay, **where)
        sampled = self._sampled(x.numel(), step, rank, bucket)
        sample = residual[sampled] * decay + x[sampled]
        selection = _Correction(x, out, residual, candidate, decay)
        return selection.search(self._estimate(sample), self.capacity(x.numel()))

    def _sampled(self, n: int, step: int, rank: int, bucket: int) -> slice:
        """Every stride-th element from a random one on."""
        least = math.ceil(2 / self.density)
        if n <= least:
            return slice(None)
        wanted = max(math.ceil(self.sample * n), least)
        stride = 32 * math.ceil(n / wanted / 32) + 1  # odd, so that it hits all columns of matrices in turn
        while n // stride < wanted and stride > 1:
            stride = max(1, stride - 8)
        draw = uniform(1, seed=bucket_seed(self.seed, bucket), stream=noise_stream(rank), step=step)
        return slice(int(float(draw) * stride), None, stride)

    def _estimate(self, sample: Tensor) -> int:
        """The magnitude bits that the wanted fraction of the sample reaches."""
        sample = sample.to(torch.float32).contiguous()
        count = math.ceil(self.density * sample.numel())
        if kernels.runs_on_kernels(sample):
            kth = kernels.kernel("lc_kth_magnitude", "pll")(sample.data_ptr(), sample.numel(), count)
            return max(1, int(kth))
        keys = _keys(sample)
        return max(1, int(keys.topk(count, sorted=True).values[-1]))


class _Selection:
    """Entries of x that reach a threshold, written to a body."""

    def __init__(self, x: Tensor, out: Tensor) -> None:
        self.x, self.out, self.flags = x, out, 0

    def send(self, key: int) -> int:
        """Send what reaches `key`, the bits of a magnitude, or the largest of it. Returns the flags."""
        hits = self.list(key, self.out)
        if hits > (self.out.numel() - 4) // 8:
            self._send_largest(key, hits)
        return self.finish()

    def search(self, key: int, wanted: int) -> int:
        """As `send`, with `key` lowered until about `wanted` entries reach it."""
        hits = self.list(key, self.out)
        for _ in range(MAX_ROUNDS):
            if hits >= LEAST * wanted or key == 1:
                break
            key = max(1, _bits(SHRINK * struct.unpack("<f", struct.pack("<I", key))[0]))
            hits = self.list(key, self.out)
        if hits > wanted:
            self._send_largest(key, hits)
        return self.finish()

    def list(self, key: int, body: Tensor) -> int:
        """List the entries that reach `key` in `body`, if it has room for all. Returns how many they are."""
        capacity = (body.numel() - 4) // 8
        if kernels.runs_on_kernels(self.x, body):
            return self._list_on_kernels(key, body, capacity)
        values, self.flags = finite_part(self.x)
        positions = (_keys(values) >= key).nonzero().view(-1)
        if positions.numel() <= capacity:
            _write(positions, values[positions], body)
        return positions.numel()

    def _list_on_kernels(self, key: int, body: Tensor, capacity: int) -> int:
        threads = min(kernels.threads(), 64)
        scratch = kernels.workspace((threads - 1) * 8 * capacity)
        call = kernels.kernel("lc_threshold_encode", "pippfllwppi")
        source = (self.x.data_ptr(), kernels.dtype_code(self.x.dtype), *self._corrected())
        target = (self.x.numel(), capacity, key, body.data_ptr(), scratch.data_ptr(), threads)
        self.flags |= int(call(*source, *target)) & ~OVERFLOW
        return int.from_bytes(ctypes.string_at(body.data_ptr(), 4), "little")

    def _corrected(self) -> tuple[int | None, int | None, float]:
        return None, None, 1.0

    def _send_largest(self, key: int, hits: int) -> None:
        room = torch.empty(4 + 8 * hits, dtype=torch.uint8, device=self.out.device)
        self.list(key, room)
        if kernels.runs_on_kernels(self.x, self.out):
            call = kernels.kernel("lc_threshold_trim", "plp")
            call(room.data_ptr(), (self.out.numel() - 4) // 8, self.out.data_ptr())
            return
        positions, values = _read(room, self.x.numel())
        kept = largest(values.view(1, -1), (self.out.numel() - 4) // 8).view(-1)
        _write(positions[kept], values[kept], self.out)

    def finish(self) -> int:
        return self.flags


class _Correction(_Selection):
    """Entries of decay * residual + x; what is not sent becomes the candidate. On kernels only."""

    def __init__(self, x: Tensor, out: Tensor, residual: Tensor, candidate: Tensor, decay: float) -> None:
        super().__init__(x, out)
        self.residual: Tensor | None = residual
        self.candidate, self.decay = candidate, decay

    def _corrected(self) -> tuple[int | None, int | None, float]:
        pointers = None if self.residual is None else self.residual.data_ptr()
        return pointers, self.candidate.data_ptr(), self.decay

    def list(self, key: int, body: Tensor) -> int:
        hits = super().list(key, body)
        # the corrected vector is in the candidate now, which may be the memory of x or of the residual
        self.x, self.residual = self.candidate, None
        return hits

    def finish(self) -> int:
        call = kernels.kernel("lc_threshold_clear", "ppl")
        call(self.candidate.data_ptr(), self.out.data_ptr(), self.x.numel() if self.flags else 0)
        return self.flags


def _keys(values: Tensor) -> Tensor:
    """Magnitudes as integers, which order them on every device alike; 0 where an element is not finite."""
    keys = values.contiguous().view(torch.int32) & _MAGNITUDE
    return keys.masked_fill(keys >= _INFINITY, 0)


def _bits(magnitude: float) -> int:
    """Those of the nearest float32."""
    return int.from_bytes(struct.pack("<f", min(magnitude, torch.finfo(torch.float32).max)), "little")


def _write(positions: Tensor, values: Tensor, body: Tensor) -> None:
    count = torch.tensor([positions.numel()], dtype=torch.int64, device=body.device)
    used = torch.cat((count, positions)).to(torch.int32).view(torch.uint8)
    body[: used.numel()] = used
    body[used.numel() : used.numel() + 4 * values.numel()] = values.contiguous().view(torch.uint8)
    body[used.numel() + 4 * values.numel() :] = 0


def _read(body: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Positions, int64, and values. Raises ValueError where no encoder can have written the body."""
    words = body.clone().view(torch.int32)
    count = int(words[0]) & 0xFFFFFFFF
    if count > (words.numel() - 1) // 2:
        raise ValueError(_DAMAGED)
    positions = words[1 : 1 + count].to(torch.int64) & 0xFFFFFFFF
    values = words[1 + count : 1 + 2 * count].view(torch.float32)
    ascending = bool((positions[1:] > positions[:-1]).all()) and (count == 0 or int(positions[-1]) < n)
    if not ascending or not bool(torch.isfinite(values).all()):
        raise ValueError(_DAMAGED)
    return positions, values


_DAMAGED = (
    "the count must fit the body, positions must ascend within the vector and values must be finite; "
    "the body is damaged"
)


def _read_on_kernels(body: Tensor, out: Tensor, *, add: bool, weight: float) -> None:
    call = kernels.kernel("lc_threshold_decode", "pllpifi")
    target = (out.numel(), (body.numel() - 4) // 8, out.data_ptr())
    if call(body.data_ptr(), *target, int(add), weight, kernels.threads()):
        raise ValueError(_DAMAGED)


def _check_fraction(name: str, value: float) -> None:
    if not 0 < value <= 1:
        raise ValueError(f"{name} must be in (0, 1] but is: {value}")
