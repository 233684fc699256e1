"""Ternary codec: every element becomes -s, 0 or +s, with one scale s per block.

deterministic:  t = 0.75 mean|x|;  keep |x_i| > t;  s = mean of the kept |x_i|;  C(x)_i = s sign(x_i) if kept else 0
stochastic:     s = max|x|;  C(x)_i = s sign(x_i) with probability |x_i| / s, else 0          (TernGrad)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from . import launches
from .codec import SATURATED, TINY, Codec, check_decode, check_encode, check_feedback, pad4
from .kernels import dtype_code, kernel, runs_on_kernels, threads
from .launches import Launcher, Sink, Source
from .packing import as_blocks, pack_base3, pack_bits, tree_sum, unpack_base3, unpack_bits
from .philox import bucket_seed, noise_stream, uniform
from .ranges import exact_sqrt, finite_part, range_factor
from .sign import MAX_BLOCK, block_counts

__all__ = ["Ternary"]


@dataclass(frozen=True)
class Ternary(Codec):
    """Three values per element, -s, 0 and +s, and one scale per block of B elements.

    "deterministic" keeps what exceeds 0.75 of the block's mean magnitude and sends the mean of what it keeps. It is
    contractive, ||x - C(x)||^2 <= (1 - 1/B) ||x||^2, more exactly by delta = (sum of kept |x|)^2 / (kept ||x||^2);
    normalised squared error 0.190 on Gaussian data. Use it with error feedback.

    "stochastic" (TernGrad) is unbiased: E C(x) = x, with E ||C(x) - x||^2 = (s ||x||_1 / ||x||^2 - 1) ||x||^2, at most
    (sqrt(B) - 1) ||x||^2; about 1.45 ||x||^2 on Gaussian data with B = 256. Use it without error feedback. `clip`
    lowers the variance to about 1.0 ||x||^2 and makes it biased. With `shared_scale` all ranks use one s, so that the
    codes of N ranks add up to integers in [-N, N]; larger elements are sent as that s and SATURATED is returned.

    1.6 + 32/B bits per element ("base3": byte = t0 + 3 t1 + 9 t2 + 27 t3 + 81 t4) or 2 + 32/B ("2bit"), with t = 0 for
    zero, 1 for +s, 2 for -s. Body: one float32 scale per block, then the codes; each section padded to 4 bytes. A block
    whose absolute maximum is below 2^-100 is sent as zeros.

    Args:
        mode: "deterministic" (default) or "stochastic".
        packing: "base3" (default), or "2bit", which is simpler to read elsewhere.
        block: B, a power of two from 4 to 16384.
        clip: stochastic only: first clamp the block to +-clip standard deviations about zero, the deviation taken
            about the block's mean; TernGrad uses 2.5. None (default) does not clip.
        shared_scale: stochastic only: s for all blocks, for instance a maximum over ranks of |x|. None (default):
            each block's maximum.
        seed: of the noise, stochastic only.

    Raises:
        ValueError: an argument outside these. `decode`: a code that stands for no three-valued element.

    Example:
        >>> x = torch.tensor([1.0, -2.0, 0.5, 4.0, -0.25, 0.0, 3.0, -1.0])
        >>> codec = Ternary(block=8)
        >>> body, out = torch.empty(codec.nbytes(8), dtype=torch.uint8), torch.empty(8)
        >>> codec.encode(x, body)
        0
        >>> codec.decode(body, out)
        >>> out
        tensor([ 0., -3.,  0.,  3.,  0.,  0.,  3.,  0.])

    Source: TernGrad arXiv 1705.07878; a threshold in proportion to mean|x| and a mean of what is kept are from ternary
    weight networks, arXiv 1605.04711. Blocks, and clipping per block instead of per layer, are our choice.
    """

    mode: Literal["deterministic", "stochastic"] = "deterministic"
    packing: Literal["base3", "2bit"] = "base3"
    block: int = 256
    clip: float | None = None
    shared_scale: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.mode not in ("deterministic", "stochastic"):
            raise ValueError(f"mode must be 'deterministic' or 'stochastic' but is: {self.mode!r}")
        if self.packing not in ("base3", "2bit"):
            raise ValueError(f"packing must be 'base3' or '2bit' but is: {self.packing!r}")
        if not 4 <= self.block <= MAX_BLOCK or self.block & (self.block - 1):
            raise ValueError(f"block must be a power of two from 4 to {MAX_BLOCK} but is: {self.block}")
        for name, value, least in (("clip", self.clip, 0.0), ("shared_scale", self.shared_scale, TINY)):
            if value is not None and self.mode != "stochastic":
                raise ValueError(f"{name} applies to mode 'stochastic' only; leave it None or change the mode")
            if value is not None and not (math.isfinite(value) and value >= least):
                raise ValueError(f"{name} must be finite and at least {least} but is: {value}")
        object.__setattr__(self, "id", 0x25 if self.packing == "base3" else 0x24)

    @property
    def unbiased(self) -> bool:
        return self.mode == "stochastic" and self.clip is None

    def nbytes(self, n: int) -> int:
        return 4 * -(-n // self.block) + pad4(self._code_bytes(n))

    def encode(self, x: Tensor, out: Tensor, *, step: int = 0, rank: int = 0, bucket: int = 0) -> int:
        check_encode(self, x, out)
        if launches.runs(self, x, out):
            return launches.encode(self, x, out, place=(step, rank, bucket))
        if not runs_on_kernels(x, out):
            return self._encode_torch(x, out, step, rank, bucket)
        source = (x.data_ptr(), dtype_code(x.dtype), *self._sections(out, x.numel()), *self._shape(x))
        if self.mode == "deterministic":
            return int(kernel("lc_ternary_encode", "pippllii")(*source))
        return int(kernel("lc_ternary_stochastic", "pippllii" + "ffuww")(*source, *self._noise(step, rank, bucket)))

    def decode(self, body: Tensor, out: Tensor, *, step: int = 0, rank: int = 0, bucket: int = 0) -> None:
        check_decode(self, body, out)
        if launches.runs(self, body, out):
            return launches.decode(self, body, out)
        if not runs_on_kernels(body, out):
            return self._decode_torch(body, out)
        call = kernel("lc_ternary_decode", "pppllii")
        check_codes(call(*self._sections(body, out.numel()), out.data_ptr(), *self._shape(out)))

    def decode_add(
        self, body: Tensor, acc: Tensor, weight: float = 1.0, *, step: int = 0, rank: int = 0, bucket: int = 0
    ) -> None:
        check_decode(self, body, acc)
        if launches.runs(self, body, acc):
            return launches.decode(self, body, acc, weight)
        if not runs_on_kernels(body, acc):
            return super().decode_add(body, acc, weight)
        call = kernel("lc_ternary_decode_add", "pppfllii")
        check_codes(call(*self._sections(body, acc.numel()), acc.data_ptr(), weight, *self._shape(acc)))

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
        place = {"step": step, "rank": rank, "bucket": bucket}
        if launches.runs(self, x, residual, candidate, out):
            return launches.encode(self, x, out, residual, candidate, decay, (step, rank, bucket))
        if not runs_on_kernels(x, residual, candidate, out):
            return super().encode_feedback(x, residual, candidate, out, decay=decay, **place)
        buffers = (x.data_ptr(), residual.data_ptr(), candidate.data_ptr(), decay)
        source = (*buffers, *self._sections(out, x.numel()), *self._shape(x))
        if self.mode == "deterministic":
            return int(kernel("lc_ternary_feedback", "pppfppllii")(*source))
        call = kernel("lc_ternary_stochastic_feedback", "pppfppllii" + "ffuww")
        return int(call(*source, *self._noise(step, rank, bucket)))

    def delta(self, n: int) -> float | None:
        return 1 / max(1, min(self.block, n)) if self.mode == "deterministic" else None

    def omega(self, n: int) -> float | None:
        return math.sqrt(min(self.block, n)) - 1 if self.unbiased and self.shared_scale is None and n else None

    @property
    def _on_cuda(self) -> bool:
        return launches.takes_block(self.block, most=8192 if self.packing == "2bit" else 1024)

    def _launch_encode(self, on: Launcher, source: Source, out: Tensor, n: int, place: tuple[int, int, int]) -> int:
        noise = () if self.mode == "deterministic" else (1, *self._noise(*place))
        return launches.ternary(on, source, *self._sections(out, n), *self._shape_of(n), *noise)

    def _launch_decode(self, on: Launcher, body: Tensor, sink: Sink, n: int) -> None:
        check_codes(launches.ternary_decode(on, *self._sections(body, n), sink, *self._shape_of(n)))

    def _shape_of(self, n: int) -> tuple[int, int, int]:
        return n, self.block, int(self.packing == "2bit")

    def _code_bytes(self, n: int) -> int:
        return -(-n // 5) if self.packing == "base3" else -(-n // 4)

    def _sections(self, body: Tensor, n: int) -> tuple[int, int]:
        return body.data_ptr(), body.data_ptr() + 4 * -(-n // self.block)

    def _shape(self, x: Tensor) -> tuple[int, int, int, int]:
        return *self._shape_of(x.numel()), threads()

    def _noise(self, step: int, rank: int, bucket: int) -> tuple[float, float, int, int, int]:
        """Clip and shared scale (0 for none), key, stream and step of the uniform noise."""
        return self.clip or 0.0, self.shared_scale or 0.0, bucket_seed(self.seed, bucket), noise_stream(rank), step

    def _encode_torch(self, x: Tensor, out: Tensor, step: int, rank: int, bucket: int) -> int:
        values, flags = finite_part(x)
        n = values.numel()
        if n == 0:
            return flags
        if self.mode == "deterministic":
            scales, trits = self._deterministic(values)
        else:
            noise = uniform(
                n, seed=bucket_seed(self.seed, bucket), stream=noise_stream(rank), step=step, device=x.device
            )
            scales, trits = self._stochastic(values, noise)
            if self.shared_scale is not None and bool((self._clipped(values).abs() > self.shared_scale).any()):
                flags |= SATURATED
        packed = pack_base3(trits) if self.packing == "base3" else pack_bits(trits, 2)
        out[: 4 * scales.numel()] = scales.view(torch.uint8)
        codes = out[4 * scales.numel() :]
        codes[: packed.numel()] = packed
        codes[packed.numel() :] = 0
        return flags

    def _deterministic(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Scales, (blocks,) float32, and trits, (n,)."""
        rows = as_blocks(values, self.block)
        absmax = rows.abs().amax(1)
        factor = range_factor(absmax)
        scaled = rows * factor.unsqueeze(1)
        threshold = 0.75 * (tree_sum(scaled.abs()) / block_counts(values.numel(), self.block, values.device))
        alive = absmax >= TINY
        kept = (scaled.abs() > threshold.unsqueeze(1)) & alive.unsqueeze(1)
        mean = tree_sum(torch.where(kept, scaled.abs(), 0.0)) / kept.sum(1).clamp(min=1)
        trits = torch.where(kept, torch.where(scaled < 0, 2, 1), 0)
        return mean / factor, trits.view(-1)[: values.numel()]

    def _stochastic(self, values: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Scales and trits; `noise` is (n,) uniform in [0, 1)."""
        clipped = self._clipped(values)
        absmax = as_blocks(clipped, self.block).abs().amax(1)
        scales = absmax if self.shared_scale is None else torch.full_like(absmax, self.shared_scale)
        scales = torch.where(absmax >= TINY, scales, 0.0)
        inverse = torch.where(scales > 0, 1.0 / scales, 0.0).repeat_interleave(self.block)[: values.numel()]
        kept = noise < clipped.abs() * inverse
        return scales, torch.where(kept, torch.where(clipped < 0, 2, 1), 0)

    def _clipped(self, values: Tensor) -> Tensor:
        if self.clip is None:
            return values
        rows = as_blocks(values, self.block)
        factor = range_factor(rows.abs().amax(1))
        counts = block_counts(values.numel(), self.block, values.device)
        scaled = rows * factor.unsqueeze(1)
        centred = scaled - (tree_sum(scaled) / counts).unsqueeze(1)
        centred.view(-1)[values.numel() :] = 0.0  # padding is no deviation
        deviation = exact_sqrt(tree_sum(centred * centred) / counts)
        limit = (self.clip * deviation / factor).unsqueeze(1)
        return torch.maximum(torch.minimum(rows, limit), -limit).view(-1)[: values.numel()]

    def _decode_torch(self, body: Tensor, out: Tensor) -> None:
        n = out.numel()
        blocks = -(-n // self.block)
        scales = body[: 4 * blocks].clone().view(torch.float32).repeat_interleave(self.block)[:n]
        codes = body[4 * blocks :][: self._code_bytes(n)]
        trits = unpack_base3(codes, n) if self.packing == "base3" else unpack_bits(codes, 2, n)
        check_codes(int(bool((trits == 3).any())))
        out.copy_(torch.where(trits == 0, 0.0, torch.where(trits == 2, -scales, scales)))


def check_codes(damaged: int) -> None:
    """Raise ValueError where a decoder met a code that no encoder writes."""
    if damaged:
        raise ValueError("the body holds a code that is not ternary (2-bit value 3, or a base-3 byte above 242)")
