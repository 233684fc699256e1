"""What every codec promises: `Codec`, the flags, and checks shared by all.

A codec turns a flat vector of n numbers into a body of bytes and back. It knows nothing of process groups. The byte
formats are in docs/wire-format.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .launches import Launcher, Sink, Source

__all__ = ["HAS_INF", "HAS_NAN", "SATURATED", "Codec"]

HAS_NAN = 1
HAS_INF = 2
SATURATED = 8

TINY = 2.0**-100  # a block whose absolute maximum is below this is encoded as zeros with scale 0
_INPUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Codec:
    """Base class of all codecs: immutable settings, no state, equal when the settings are equal.

    A subclass is a frozen dataclass that sets the class attributes below and implements `nbytes`, `encode` and
    `decode`; `decode_add` and `encode_feedback` have generic versions here that a subclass replaces by a fused kernel.

    `step`, `rank` and `bucket` feed the shared random generator (compress/philox.py): the round number, the rank that
    *encoded* the message, and the bucket it belongs to. The same values must be given to encode and decode. Codecs
    that draw nothing ignore them.

    Attributes:
        id: number of the codec in frame headers.
        block: elements that are encoded together. A vector may be cut into slices at multiples of `block`, each
            slice encoded on its own, without changing what is decoded.
        unbiased: the expectation of the decoded vector is the input.
        linear: bodies of shared-seed encodings can be summed as float vectors before decoding.
        fixed_size: the body length depends on n only (never on the values).
        requantizable: a decoded mean of several messages may be encoded again with this codec (two-phase exchange).
    """

    id: ClassVar[int]
    linear: ClassVar[bool] = False
    fixed_size: ClassVar[bool] = True
    requantizable: ClassVar[bool] = True

    @property
    def block(self) -> int:
        return 1

    @property
    def unbiased(self) -> bool:
        return False

    def nbytes(self, n: int) -> int:
        """Exact body length in bytes for n elements."""
        raise NotImplementedError

    def encode(self, x: Tensor, out: Tensor, *, step: int = 0, rank: int = 0, bucket: int = 0) -> int:
        """Write the body of `x` to `out`.

        Args:
            x: (n,) float32, bfloat16 or float16, contiguous. Not modified. Narrow dtypes are widened to float32 first.
            out: (nbytes(n),) uint8 on the same device.

        Returns:
            Flags: HAS_NAN | HAS_INF when such elements were met. They are encoded as zero.
        """
        raise NotImplementedError

    def decode(self, body: Tensor, out: Tensor, *, step: int = 0, rank: int = 0, bucket: int = 0) -> None:
        """Overwrite `out`, (n,) float32, with the decoded vector. `body` is (nbytes(n),) uint8.

        Raises:
            ValueError: the body is not one that `encode` can have written for this n.
        """
        raise NotImplementedError

    def decode_add(
        self, body: Tensor, acc: Tensor, weight: float = 1.0, *, step: int = 0, rank: int = 0, bucket: int = 0
    ) -> None:
        """acc = fl(acc + fl(weight * decoded)); weight 1.0 skips the multiplication. `acc` is (n,) float32."""
        decoded = torch.empty_like(acc)
        self.decode(body, decoded, step=step, rank=rank, bucket=bucket)
        if weight != 1.0:
            decoded.mul_(weight)
        acc.add_(decoded)

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
        """One fused pass of error feedback: p = decay * residual + x; body = encode(p); candidate = p - decode(body).

        Args:
            x: (n,) float32.
            residual: (n,) float32, the committed residual. Not modified unless `candidate` is the same tensor.
            candidate: (n,) float32, receives the new residual. May be the same tensor as `x` or as `residual`.
            out: (nbytes(n),) uint8.
            decay: multiplies the residual; 1.0 skips the multiplication.

        Returns:
            Flags as `encode`. The candidate is 0 where p is not finite.
        """
        p = residual.clone() if decay == 1.0 else residual * decay
        p.add_(x)
        flags = self.encode(p, out, step=step, rank=rank, bucket=bucket)
        decoded = torch.empty_like(p)
        self.decode(out, decoded, step=step, rank=rank, bucket=bucket)
        torch.sub(p, decoded, out=candidate)
        if flags & (HAS_NAN | HAS_INF):
            candidate.masked_fill_(~torch.isfinite(p), 0.0)
        return flags

    # Whether decoding needs step, rank or bucket; then messages are not decoded together.
    _seeded_decode: ClassVar[bool] = False

    @property
    def _on_cuda(self) -> bool:
        """Whether there are CUDA kernels for these settings; then the two methods below launch them."""
        return False

    def _launch_encode(self, on: Launcher, source: Source, out: Tensor, n: int, place: tuple[int, int, int]) -> int:
        """Encode n elements of `source` into `out`; place: step, rank, bucket. Returns flags."""
        raise AssertionError("no CUDA kernel")

    def _launch_decode(self, on: Launcher, body: Tensor, sink: Sink, n: int) -> None:
        """Decode bodies of n elements, of which `body` is the first, into `sink`."""
        raise AssertionError("no CUDA kernel")

    def delta(self, n: int) -> float | None:
        """Worst-case contraction: ||x - C(x)||^2 <= (1 - delta) ||x||^2, or None where nothing is guaranteed."""
        return None

    def omega(self, n: int) -> float | None:
        """Worst-case variance of an unbiased codec: E ||C(x) - x||^2 <= omega ||x||^2, or None."""
        return None

    def for_shapes(self, shapes: Sequence[tuple[int, ...]]) -> Codec:
        """This codec for a flat vector of tensors with these shapes. Only codecs that use shapes differ from self."""
        return self

    @property
    def config(self) -> str:
        """Canonical text of the settings, `name:key=value,...` with sorted keys; equal exactly for equal codecs."""
        settings = sorted((f.name, getattr(self, f.name)) for f in fields(self))
        return f"{type(self).__name__.lower()}:" + ",".join(f"{name}={value}" for name, value in settings)

    def bits_per_element(self, n: int) -> float:
        """Bits really produced per element, scales and padding included."""
        return 8 * self.nbytes(n) / n


def check_encode(codec: Codec, x: Tensor, out: Tensor) -> None:
    """Raise ValueError unless (x, out) fit `codec.encode`."""
    if x.dim() != 1 or not x.is_contiguous() or x.dtype not in _INPUT_DTYPES:
        raise ValueError(
            f"encode takes a contiguous 1-D float32, bfloat16 or float16 tensor but got {x.dtype} of shape "
            f"{tuple(x.shape)}; flatten it first"
        )
    check_body(out, codec.nbytes(x.numel()))


def check_decode(codec: Codec, body: Tensor, out: Tensor) -> None:
    """Raise ValueError unless (body, out) fit `codec.decode`."""
    if out.dim() != 1 or not out.is_contiguous() or out.dtype != torch.float32:
        raise ValueError(
            f"decode writes a contiguous 1-D float32 tensor but got {out.dtype} of shape {tuple(out.shape)}"
        )
    check_body(body, codec.nbytes(out.numel()))


def check_feedback(codec: Codec, x: Tensor, residual: Tensor, candidate: Tensor, out: Tensor) -> None:
    """Raise ValueError unless the tensors fit `codec.encode_feedback`."""
    for name, tensor in (("x", x), ("residual", residual), ("candidate", candidate)):
        if tensor.dtype != torch.float32 or tensor.shape != (x.numel(),) or not tensor.is_contiguous():
            raise ValueError(
                f"error feedback takes contiguous float32 vectors of one length but {name} is {tensor.dtype} of "
                f"shape {tuple(tensor.shape)} and x has {x.numel()} elements"
            )
    check_body(out, codec.nbytes(x.numel()))


def check_body(body: Tensor, nbytes: int) -> None:
    """Raise ValueError unless `body` is a contiguous uint8 vector of exactly `nbytes`."""
    if body.dtype != torch.uint8 or body.dim() != 1 or not body.is_contiguous() or body.numel() != nbytes:
        raise ValueError(
            f"a body of {nbytes} contiguous uint8 bytes was expected but got {body.dtype} of shape {tuple(body.shape)}"
        )


def pad4(nbytes: int) -> int:
    """Round a section length up to 4 bytes."""
    return (nbytes + 3) // 4 * 4


def nonfinite_flags(x: Tensor) -> int:
    """HAS_NAN | HAS_INF as found in `x` (torch path)."""
    if x.numel() == 0 or bool(torch.isfinite(torch.stack(torch.aminmax(x))).all()):
        return 0
    flags = HAS_NAN if bool(torch.isnan(x).any()) else 0
    return flags | (HAS_INF if bool(torch.isinf(x).any()) else 0)
