"""Plain codecs that tests can see through: every body is the decoded vector as float32, or a part of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from lowcomm.compress.codec import Codec, check_decode, check_encode, nonfinite_flags
from torch import Tensor


@dataclass(frozen=True)
class Dense(Codec):
    """Sends everything exactly."""

    id = 0x7001

    def nbytes(self, n: int) -> int:
        return 4 * n

    def message(self, x: Tensor) -> Tensor:
        return x

    def encode(self, x: Tensor, out: Tensor, *, step: int = 0, rank: int = 0, bucket: int = 0) -> int:
        check_encode(self, x, out)
        wide = x.to(torch.float32)
        finite = torch.where(torch.isfinite(wide), wide, torch.zeros_like(wide))
        out.view(torch.float32).copy_(self.message(finite))
        return nonfinite_flags(wide)

    def decode(self, body: Tensor, out: Tensor, *, step: int = 0, rank: int = 0, bucket: int = 0) -> None:
        check_decode(self, body, out)
        out.copy_(body.view(torch.float32))

    def delta(self, n: int) -> float | None:
        return 1.0


@dataclass(frozen=True)
class KeepLargest(Dense):
    """Sends the k entries of largest magnitude exactly, ties to the lower index."""

    k: int = 1

    id = 0x7002
    requantizable = False

    def message(self, x: Tensor) -> Tensor:
        kept = torch.sort(x.abs(), descending=True, stable=True).indices[: self.k]
        sparse = torch.zeros_like(x)
        sparse[kept] = x[kept]
        return sparse

    def delta(self, n: int) -> float | None:
        return min(1.0, self.k / n)


@dataclass(frozen=True)
class RoundTo(Dense):
    """Rounds every entry to a multiple of `unit`: neither exact nor homogeneous."""

    unit: float = 0.25

    id = 0x7003

    def message(self, x: Tensor) -> Tensor:
        return torch.round(x / self.unit) * self.unit

    def delta(self, n: int) -> float | None:
        return None
