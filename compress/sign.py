"""Sign codecs: one bit per element, and how large that bit is.

    bit_i = 1 where x_i < 0, else 0            (zero, minus zero and flagged elements are +)
    C(x)_i = -s where bit_i else +s            s: one float32 per block of B elements

`Sign` offers four scales, `StoSign` adds noise so that the sign is right on average, and `majority_vote` joins the
signs of many ranks into one.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from . import launches
from .codec import SATURATED, TINY, Codec, check_decode, check_encode, check_feedback, pad4
from .kernels import dtype_code, kernel, runs_on_kernels, threads
from .launches import Launcher, Sink, Source
from .packing import as_blocks, pack_bits, tree_sum, unpack_bits
from .philox import bucket_seed, noise_stream, uniform
from .ranges import exact_sqrt, finite_part, range_factor

__all__ = ["Sign", "StoSign", "majority_vote"]

_IDS = {"l1": 0x20, "l2": 0x21, "two_means": 0x23, "none": 0x26}
_KINDS = {"l1": 0, "l2": 1, "two_means": 2, "none": 3}  # as in sign.cpp
_SCALE_BYTES = {"l1": 4, "l2": 4, "two_means": 8, "none": 0}
MAX_BLOCK = 16384


@dataclass(frozen=True)
class Sign(Codec):
    """One bit per element and one scale per block (signSGD, EF-signSGD, 1-bit SGD, 1-bit Adam).

    With x one block of B elements (fewer in the last block: means are over the elements there are):

    | scale | value of a bit | squared error | bits per element |
    |---|---|---|---|
    | "l1" | +-s, s = ||x||_1 / B | ||x||^2 - ||x||_1^2 / B, exactly; the least that +-s can reach | 1 + 32/B |
    | "l2" | +-s, s = ||x||_2 / sqrt(B) | 2 (||x||^2 - ||x||_1 ||x||_2 / sqrt(B)); may exceed ||x||^2 | 1 + 32/B |
    | "two_means" | mean of the elements >= 0, mean of the elements < 0 | at most that of "l1" | 1 + 64/B |
    | "none" | +-1, the caller's learning rate is the scale | - | 1 |

    Guarantee: "l1" and "two_means" are contractive, ||x - C(x)||^2 <= (1 - 1/B) ||x||^2; use them with error feedback.
    "l2" keeps the norm and guarantees nothing for sparse x; "none" carries no magnitude. On Gaussian data the
    normalised squared error is 0.363 (l1, two_means) and 0.403 (l2).

    A bit cannot say zero: an element that is always 0 keeps receiving +s. Mask such elements or use `Ternary`.
    A block whose absolute maximum is below 2^-100 is sent as zeros (except with "none", which has no scale).

    Body: float32 scales (for "two_means" two of them for each block, >= 0 first), then the bits, element 0 in bit 0 of
    byte 0; each section padded to 4 bytes.

    Args:
        scale: one of the four above.
        block: B, a power of two from 4 to 16384.

    Raises:
        ValueError: an argument outside these.

    Example:
        >>> x = torch.tensor([1.0, -2.0, 0.5, 4.0, -0.25, 0.0, 3.0, -1.0])
        >>> codec = Sign(block=8)
        >>> body, out = torch.empty(codec.nbytes(8), dtype=torch.uint8), torch.empty(8)
        >>> codec.encode(x, body)
        0
        >>> codec.decode(body, out)
        >>> out
        tensor([ 1.4688, -1.4688,  1.4688,  1.4688, -1.4688,  1.4688,  1.4688, -1.4688])

    Source: signSGD arXiv 1802.04434; EF-signSGD ("l1") arXiv 1901.09847; two means: Seide et al., Interspeech 2014;
    "l2" is the scale of 1-bit Adam, arXiv 2102.02888. The papers scale whole tensors; the block is our choice.
    """

    scale: Literal["l1", "l2", "two_means", "none"] = "l1"
    block: int = 256

    def __post_init__(self) -> None:
        if self.scale not in _IDS:
            raise ValueError(f"scale must be one of {tuple(_IDS)} but is: {self.scale!r}")
        if not 4 <= self.block <= MAX_BLOCK or self.block & (self.block - 1):
            raise ValueError(f"block must be a power of two from 4 to {MAX_BLOCK} but is: {self.block}")
        object.__setattr__(self, "id", _IDS[self.scale])

    def nbytes(self, n: int) -> int:
        return self._scale_bytes(n) + pad4((n + 7) // 8)

    def encode(self, x: Tensor, out: Tensor, *, step: int = 0, rank: int = 0, bucket: int = 0) -> int:
        check_encode(self, x, out)
        if launches.runs(self, x, out):
            return launches.encode(self, x, out)
        if not runs_on_kernels(x, out):
            return self._encode_torch(x, out)
        call = kernel("lc_sign_encode", "pippllii")
        return int(call(x.data_ptr(), dtype_code(x.dtype), *self._sections(out, x.numel()), *self._shape(x)))

    def decode(self, body: Tensor, out: Tensor, *, step: int = 0, rank: int = 0, bucket: int = 0) -> None:
        check_decode(self, body, out)
        if launches.runs(self, body, out):
            return launches.decode(self, body, out)
        if not runs_on_kernels(body, out):
            return self._decode_torch(body, out)
        kernel("lc_sign_decode", "pppllii")(*self._sections(body, out.numel()), out.data_ptr(), *self._shape(out))

    def decode_add(
        self, body: Tensor, acc: Tensor, weight: float = 1.0, *, step: int = 0, rank: int = 0, bucket: int = 0
    ) -> None:
        check_decode(self, body, acc)
        if launches.runs(self, body, acc):
            return launches.decode(self, body, acc, weight)
        if not runs_on_kernels(body, acc):
            return super().decode_add(body, acc, weight)
        call = kernel("lc_sign_decode_add", "pppfllii")
        call(*self._sections(body, acc.numel()), acc.data_ptr(), weight, *self._shape(acc))

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
        if launches.runs(self, x, residual, candidate, out):
            return launches.encode(self, x, out, residual, candidate, decay)
        if not runs_on_kernels(x, residual, candidate, out):
            return super().encode_feedback(x, residual, candidate, out, decay=decay)
        buffers = (x.data_ptr(), residual.data_ptr(), candidate.data_ptr(), decay)
        call = kernel("lc_sign_feedback", "pppfppllii")
        return int(call(*buffers, *self._sections(out, x.numel()), *self._shape(x)))

    def delta(self, n: int) -> float | None:
        return 1 / max(1, min(self.block, n)) if self.scale in ("l1", "two_means") else None

    @property
    def _on_cuda(self) -> bool:
        return launches.takes_block(self.block)

    def _launch_encode(self, on: Launcher, source: Source, out: Tensor, n: int, place: tuple[int, int, int]) -> int:
        return launches.sign(on, source, *self._sections(out, n), n, self.block, _KINDS[self.scale])

    def _launch_decode(self, on: Launcher, body: Tensor, sink: Sink, n: int) -> None:
        launches.sign_decode(on, body.data_ptr(), sink, n, self.block, _KINDS[self.scale], self._scale_bytes(n))

    def _scale_bytes(self, n: int) -> int:
        return _SCALE_BYTES[self.scale] * -(-n // self.block)

    def _sections(self, body: Tensor, n: int) -> tuple[int, int]:
        return body.data_ptr(), body.data_ptr() + self._scale_bytes(n)

    def _shape(self, x: Tensor) -> tuple[int, int, int, int]:
        return x.numel(), self.block, _KINDS[self.scale], threads()

    def _encode_torch(self, x: Tensor, out: Tensor) -> int:
        values, flags = finite_part(x)
        negative = values < 0
        if self.scale != "none" and values.numel():
            scales, alive = self._scales(values)
            negative &= alive.repeat_interleave(self.block)[: values.numel()]
            out[: self._scale_bytes(values.numel())] = scales.contiguous().view(torch.uint8).view(-1)
        codes = out[self._scale_bytes(values.numel()) :]
        packed = pack_bits(negative, 1)
        codes[: packed.numel()] = packed
        codes[packed.numel() :] = 0
        return flags

    def _scales(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Scales, (blocks,) or (blocks, 2) float32, and which blocks are not sent as zeros, (blocks,) bool."""
        rows = as_blocks(values, self.block)
        absmax = rows.abs().amax(1)
        alive = absmax >= TINY
        factor = range_factor(absmax)
        scaled = rows * factor.unsqueeze(1)
        if self.scale == "two_means":
            plus, minus = _mean_of(scaled, rows >= 0, values), _mean_of(-scaled, rows < 0, values)
            means = torch.stack((plus / factor, 0.0 - minus / factor), dim=1)
            return torch.where(alive.unsqueeze(1), means, 0.0), alive
        counts = block_counts(values.numel(), self.block, values.device)
        if self.scale == "l1":
            statistic = tree_sum(scaled.abs()) / counts
        else:
            statistic = exact_sqrt(tree_sum(scaled * scaled) / counts)
        return torch.where(alive, statistic / factor, 0.0), alive

    def _decode_torch(self, body: Tensor, out: Tensor) -> None:
        n = out.numel()
        negative = unpack_bits(body[self._scale_bytes(n) :], 1, n).to(torch.bool)
        if self.scale == "none":
            out.copy_(torch.where(negative, -1.0, 1.0))
            return
        scales = body[: self._scale_bytes(n)].clone().view(torch.float32)
        positive, minus = (scales, -scales) if self.scale != "two_means" else scales.view(-1, 2).unbind(1)
        spread = [v.repeat_interleave(self.block)[:n] for v in (positive, minus)]
        out.copy_(torch.where(negative, spread[1], spread[0]))


@dataclass(frozen=True, eq=False)
class StoSign(Codec):
    """One unbiased bit per element, no scale on the wire: the sign of x plus uniform noise (StoSignSGD).

        bit_i = 1 where x_i + G_i (2 u_i - 1) < 0,  u_i uniform in [0, 1)
        C(x)_i = -G_i where bit_i else +G_i

    Where |x_i| <= G_i the expectation of C(x)_i is x_i and its variance G_i^2 - x_i^2. Larger elements are sent as
    their sign and the flag SATURATED is returned. Where G_i is 0 the decoded value is 0.

    G must be the same on every rank: agree on it before the exchange, for instance by a maximum over ranks of |x|, or
    of a running maximum `bound = torch.maximum(bound, x.abs())`. The noise differs between ranks and rounds, so the
    error of a mean over N ranks shrinks as 1/N; no error feedback.

    Body: the bits, element 0 in bit 0 of byte 0, padded to 4 bytes. 1 bit per element.

    Args:
        bound: G, one number for all elements, or a float32 tensor of shape (n,). With a tensor the vector cannot be
            cut: `block` is n. The tensor is not copied.
        seed: of the noise.

    Raises:
        ValueError: a bound that is negative or not finite, or a tensor that is not a float32 vector.

    Example:
        >>> codec = StoSign(bound=2.0)
        >>> body, out = torch.empty(codec.nbytes(3), dtype=torch.uint8), torch.empty(3)
        >>> codec.encode(torch.tensor([2.0, -2.0, 0.5]), body, step=7)
        0
        >>> codec.decode(body, out)
        >>> out[:2]
        tensor([ 2., -2.])

    Source: arXiv 2604.15416, which keeps a running maximum of its own on every rank and decodes to +-1; the shared
    bound, which makes the decoded vector unbiased, is our reading of it as a codec.
    """

    id = 0x22
    bound: float | Tensor = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        bound = self.bound
        if isinstance(bound, Tensor):
            if bound.dim() != 1 or bound.dtype != torch.float32 or not bound.is_contiguous():
                raise ValueError(
                    f"a tensor bound must be a contiguous float32 vector but is {bound.dtype} of shape "
                    f"{tuple(bound.shape)}"
                )
            if not bool(((bound >= 0) & torch.isfinite(bound)).all()):
                raise ValueError("bound must be finite and >= 0 in every element")
        elif not (math.isfinite(bound) and bound >= 0):
            raise ValueError(f"bound must be finite and >= 0 but is: {bound}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StoSign) and self.config == other.config

    def __hash__(self) -> int:
        return hash(self.config)

    @property
    def config(self) -> str:
        if not isinstance(self.bound, Tensor):
            return f"stosign:bound={self.bound},seed={self.seed}"
        checksum = zlib.crc32(self.bound.detach().cpu().numpy().data)
        return f"stosign:bound=crc32 {checksum:08x},seed={self.seed}"

    @property
    def block(self) -> int:
        return max(1, self.bound.numel()) if isinstance(self.bound, Tensor) else 8

    @property
    def unbiased(self) -> bool:
        return True

    def nbytes(self, n: int) -> int:
        return pad4((n + 7) // 8)

    def encode(self, x: Tensor, out: Tensor, *, step: int = 0, rank: int = 0, bucket: int = 0) -> int:
        check_encode(self, x, out)
        bound = self._bound(x)
        key, stream = bucket_seed(self.seed, bucket), noise_stream(rank)
        if runs_on_kernels(x, out, bound):
            call = kernel("lc_stosign_encode", "piplpluwwi")
            source = (x.data_ptr(), dtype_code(x.dtype), bound.data_ptr(), bound.numel(), out.data_ptr(), x.numel())
            return int(call(*source, key, stream, step, threads()))
        values, flags = finite_part(x)
        noise = 2 * uniform(x.numel(), seed=key, stream=stream, step=step, device=x.device) - 1
        packed = pack_bits(values + bound * noise < 0, 1)
        out[: packed.numel()] = packed
        out[packed.numel() :] = 0
        return flags | (SATURATED if bool((values.abs() > bound).any()) else 0)

    def decode(self, body: Tensor, out: Tensor, *, step: int = 0, rank: int = 0, bucket: int = 0) -> None:
        check_decode(self, body, out)
        bound = self._bound(out)
        if runs_on_kernels(body, out, bound):
            call = kernel("lc_stosign_decode", "pplpli")
            call(body.data_ptr(), bound.data_ptr(), bound.numel(), out.data_ptr(), out.numel(), threads())
            return
        negative = unpack_bits(body, 1, out.numel()).to(torch.bool)
        out.copy_(torch.where(negative, -bound, bound))

    def decode_add(
        self, body: Tensor, acc: Tensor, weight: float = 1.0, *, step: int = 0, rank: int = 0, bucket: int = 0
    ) -> None:
        check_decode(self, body, acc)
        bound = self._bound(acc)
        if not runs_on_kernels(body, acc, bound):
            super().decode_add(body, acc, weight)
            return
        call = kernel("lc_stosign_decode_add", "pplpfli")
        call(body.data_ptr(), bound.data_ptr(), bound.numel(), acc.data_ptr(), weight, acc.numel(), threads())

    def _bound(self, x: Tensor) -> Tensor:
        """G as a tensor of 1 or n elements."""
        if not isinstance(self.bound, Tensor):
            return torch.tensor([self.bound], device=x.device)
        if self.bound.numel() != x.numel() or self.bound.device != x.device:
            raise ValueError(
                f"bound has {self.bound.numel()} elements on {self.bound.device} but the vector has {x.numel()} on "
                f"{x.device}; give every vector length its own StoSign"
            )
        return self.bound


def majority_vote(votes: Tensor, tie: float | Tensor = 1.0) -> Tensor:
    """The sign that most ranks sent, element by element; less than half of the ranks cannot outvote the rest.

    Args:
        votes: (N, n), one row for each rank. An entry below 0 votes -1, any other +1.
        tie: what an even split gives: 1.0 (default), -1.0, 0.0, or the previous result, a tensor of shape (n,).

    Returns:
        (n,) of the dtype of `votes`: -1, +1, or `tie`. Counts are integers, so all ranks get the same result.

    Example:
        >>> majority_vote(torch.tensor([[1.0, -1.0, 1.0], [-1.0, -1.0, 1.0]]))
        tensor([ 1., -1.,  1.])

    Source: signSGD with majority vote, arXiv 1810.05291, which leaves ties open.
    """
    tally = torch.where(votes < 0, -1, 1).sum(0)
    outcome = torch.as_tensor(tie, dtype=votes.dtype, device=votes.device)
    return torch.where(tally == 0, outcome, tally.sign().to(votes.dtype))


def block_counts(n: int, block: int, device: torch.device) -> Tensor:
    """Elements that really are in each block of an n-vector: (ceil(n/block),) float32."""
    counts = torch.full((-(-n // block),), float(block), device=device)
    if n % block:
        counts[-1] = n % block
    return counts


def _mean_of(rows: Tensor, chosen: Tensor, values: Tensor) -> Tensor:
    """Mean of the chosen elements of each block (0 where none is), the padding of the last block left out."""
    count = chosen.sum(1)
    if values.numel() % rows.shape[1]:
        count[-1] = chosen[-1, : values.numel() % rows.shape[1]].sum()
    return tree_sum(torch.where(chosen, rows, 0.0)) / count.clamp(min=1)
