"""Tiny torch codecs for the tests of sync: a sign codec as in 1-bit SGD, an exact one, and one of variable size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from lowcomm.compress import Codec
from torch import Tensor


@dataclass(frozen=True)
class ExactCodec(Codec):
    """float32 as it is."""

    id: ClassVar[int] = 0x7000

    def nbytes(self, n: int) -> int:
        return 4 * n

    def encode(self, x: Tensor, out: Tensor, *, step: int = 0, rank: int = 0, bucket: int = 0) -> int:
        bad = ~torch.isfinite(x)
        out.copy_(x.masked_fill(bad, 0.0).view(torch.uint8))
        return (1 if bool(x.isnan().any()) else 0) | (2 if bool(x.isinf().any()) else 0)

    def decode(self, body: Tensor, out: Tensor, *, step: int = 0, rank: int = 0, bucket: int = 0) -> None:
        out.copy_(body.view(torch.float32))


@dataclass(frozen=True)
class SignCodec(Codec):
    """scale per block = mean |x|, one bit per element (set: negative)."""

    id: ClassVar[int] = 0x7001
    size: int = 4

    @property
    def block(self) -> int:
        return self.size

    def nbytes(self, n: int) -> int:
        return 4 * -(-n // self.size) + -(-n // 8)

    def encode(self, x: Tensor, out: Tensor, *, step: int = 0, rank: int = 0, bucket: int = 0) -> int:
        bad = ~torch.isfinite(x)
        clean = x.masked_fill(bad, 0.0).numpy()
        blocks = [clean[i : i + self.size] for i in range(0, clean.size, self.size)]
        scales = np.array([np.abs(b).sum(dtype=np.float32) / np.float32(b.size) for b in blocks], np.float32)
        bits = np.packbits(clean < 0, bitorder="little")
        out.copy_(torch.from_numpy(np.concatenate([scales.view(np.uint8), bits])))
        return (1 if bool(x.isnan().any()) else 0) | (2 if bool(x.isinf().any()) else 0)

    def decode(self, body: Tensor, out: Tensor, *, step: int = 0, rank: int = 0, bucket: int = 0) -> None:
        n, data = out.numel(), body.numpy()
        blocks = -(-n // self.size)
        scales = np.repeat(data[: 4 * blocks].copy().view(np.float32), self.size)[:n]
        bits = np.unpackbits(data[4 * blocks :], bitorder="little")[:n]
        out.copy_(torch.from_numpy(np.where(bits, -scales, scales).astype(np.float32)))


@dataclass(frozen=True)
class NonzeroCodec(Codec):
    """(index, value) pairs of the elements above a threshold, in a body that has room for all and says how many.

    Not requantizable: sums of sparse messages are denser than the messages.
    """

    id: ClassVar[int] = 0x7002
    requantizable: ClassVar[bool] = False
    threshold: float = 0.0

    def nbytes(self, n: int) -> int:
        return 4 + 8 * n

    def encode(self, x: Tensor, out: Tensor, *, step: int = 0, rank: int = 0, bucket: int = 0) -> int:
        index = torch.nonzero(x.abs() > self.threshold).flatten()
        parts = [torch.tensor([index.numel()], dtype=torch.int32), index.to(torch.int32)]
        data = torch.cat([*(part.view(torch.uint8) for part in parts), x[index].view(torch.uint8)])
        out.zero_()
        out[: data.numel()].copy_(data)
        return 0

    def decode(self, body: Tensor, out: Tensor, *, step: int = 0, rank: int = 0, bucket: int = 0) -> None:
        count = int(body[:4].clone().view(torch.int32))
        if count > out.numel():
            raise ValueError(f"a message of {out.numel()} elements cannot hold {count}")
        index = body[4 : 4 + 4 * count].clone().view(torch.int32).long()
        out.zero_()
        out[index] = body[4 + 4 * count : 4 + 8 * count].clone().view(torch.float32)
