"""Random-k: k positions that all ranks draw from a shared seed, so that no index travels and bodies can be summed.

    permuted     positions pi(0), ..., pi(k-1) of a random permutation of [0, n)
    stratified   one position in each of k runs of n/k neighbours: idx_j = start_j + floor(u_j * length_j)
    block        k neighbours from a random start on, wrapping around

Contractive: the values as they are. Unbiased: times n/k (stratified: times length_j, the same where k divides n).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .codec import Codec, check_decode, check_encode
from .philox import INDICES, bucket_seed, permutation, uniform
from .ranges import finite_part

__all__ = ["RandomK"]

_METHODS = ("permuted", "stratified", "block")


@dataclass(frozen=True)
class RandomK(Codec):
    """k values at positions drawn anew in every round from a seed that all ranks share: 32 k/n bits per element.

    Body: k float32. No indices are sent, and since all ranks keep the same positions, bodies are summed as float
    vectors by an ordinary all-reduce.

    Guarantee, over the draw: unbiased with omega = n/k - 1 (stratified: rounded up), or contractive with delta = k/n.
    The permutation and the strata draw without repetition, on which both bounds rest.

    Args:
        density: k/n, in (0, 1]; k is rounded and at least 1.
        contractive: True (default) sends plain values, for error feedback; False multiplies them by n/k: unbiased.
        method: "permuted" (default), "stratified" (positions ascend: faster to read) or "block" (k neighbours).
        seed: of the positions.

    Raises:
        ValueError: a setting outside the above.

    Example:
        >>> codec = RandomK(density=0.5)
        >>> body = torch.empty(codec.nbytes(4), dtype=torch.uint8)
        >>> codec.encode(torch.tensor([1.0, 2.0, 3.0, 4.0]), body, step=7)
        0
        >>> out = torch.empty(4)
        >>> codec.decode(body, out, step=7)
        >>> int((out != 0).sum())
        2

    Source: arXiv 1809.07599 (with error feedback), arXiv 1710.09854 (unbiased). The permutation, a Feistel network on a
    counter-based generator, is ours.
    """

    density: float = 1 / 64
    contractive: bool = True
    method: str = "permuted"
    seed: int = 0

    id = 0x12
    linear = True

    def __post_init__(self) -> None:
        if not 0.0 < self.density <= 1.0:
            raise ValueError(f"density must be in (0, 1] but is: {self.density}")
        if self.method not in _METHODS:
            raise ValueError(f"method must be one of {_METHODS} but is: {self.method!r}")

    @property
    def unbiased(self) -> bool:
        return not self.contractive

    def kept(self, n: int) -> int:
        """k for a vector of n elements."""
        return min(n, max(1, round(self.density * n)))

    def nbytes(self, n: int) -> int:
        return 4 * self.kept(n)

    def positions(self, n: int, step: int, bucket: int, device: torch.device | str = "cpu") -> Tensor:
        """(k,) int64: the positions kept in this round."""
        k, seed = self.kept(n), bucket_seed(self.seed, bucket)
        if self.method == "permuted":
            return permutation(torch.arange(k, device=device), n, seed=seed, step=step)
        if self.method == "block":
            start = int(permutation(torch.zeros(1, dtype=torch.int64), n, seed=seed, step=step))
            return (torch.arange(k, device=device) + start) % n
        starts, lengths = _strata(n, k, device)
        draws = uniform(k, seed=seed, stream=INDICES, step=step, device=device)
        return starts + (draws.to(torch.float64) * lengths).to(torch.int64)

    def _factors(self, n: int, device: torch.device) -> Tensor | float:
        if self.contractive:
            return 1.0
        k = self.kept(n)
        return _strata(n, k, device)[1].to(torch.float32) if self.method == "stratified" else n / k

    def encode(self, x: Tensor, out: Tensor, *, step: int = 0, rank: int = 0, bucket: int = 0) -> int:
        check_encode(self, x, out)
        if x.numel() == 0:
            return 0
        values, flags = finite_part(x)  # of all elements: what is not drawn now would stay in a residual
        kept = values[self.positions(x.numel(), step, bucket, x.device)]
        out.copy_((kept * self._factors(x.numel(), x.device)).view(torch.uint8))
        return flags

    def decode(self, body: Tensor, out: Tensor, *, step: int = 0, rank: int = 0, bucket: int = 0) -> None:
        check_decode(self, body, out)
        out.zero_()
        if out.numel():
            out[self.positions(out.numel(), step, bucket, out.device)] = body.clone().view(torch.float32)

    def delta(self, n: int) -> float | None:
        return None  # k/n holds on average over the draw, not for a single one

    def omega(self, n: int) -> float | None:
        if self.contractive or not n:
            return None
        k = self.kept(n)
        return -(-n // k) - 1 if self.method == "stratified" else n / k - 1


def _strata(n: int, k: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """(first position, length) of k runs that cover [0, n)."""
    borders = torch.arange(k + 1, dtype=torch.int64, device=device) * n // k
    return borders[:-1], borders[1:] - borders[:-1]
