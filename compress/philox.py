"""Random numbers that every rank and device can regenerate: Philox4x32-10 (Salmon et al. 2011, Random123).

The key is a 64-bit seed, the counter is (q, stream, step). Element i of a stream is word i mod 4 of counter i div 4,
so any element can be drawn without the ones before it. `step` is the round number; the bucket number is added to the
seed (`bucket_seed`). Rounding noise has a stream per rank; what a receiver must regenerate has a stream per purpose.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import kernels

__all__ = [
    "bucket_seed",
    "fmix32",
    "noise_stream",
    "permutation",
    "philox4x32",
    "rademacher",
    "random_words",
    "uniform",
]

SIGNS, INDICES, SKETCH = 0x4841444D, 0x52414E44, 0x43534B48  # streams of draws that all ranks share
_WORD = 0xFFFFFFFF


def noise_stream(rank: int) -> int:
    """The stream of a rank's own rounding noise, which no other rank draws."""
    return 0x10000 + rank


def bucket_seed(seed: int, bucket: int) -> int:
    """The 64-bit key for one bucket."""
    return (seed + bucket) % 2**64


def philox4x32(counters: Tensor, stream: int, step: int, seed: int) -> Tensor:
    """The four output words of every counter: (m,) int64 -> (m, 4) int64, each word in [0, 2^32).

    >>> [f"{word:08x}" for word in philox4x32(torch.tensor([0]), 0, 0, 0)[0].tolist()]
    ['6627e8d5', 'e169c58d', 'bc57ac4c', '9b00dbd8']
    """
    a, b = counters & _WORD, (counters >> 32) & _WORD
    c, d = torch.full_like(a, stream & _WORD), torch.full_like(a, step & _WORD)
    k0, k1 = seed & _WORD, (seed >> 32) & _WORD
    for _ in range(10):
        # int64 products wrap modulo 2^64, so both halves are right although the sign is not
        p, q = a * 0xD2511F53, c * 0xCD9E8D57
        a, b = ((q >> 32) & _WORD) ^ b ^ k0, q & _WORD
        c, d = ((p >> 32) & _WORD) ^ d ^ k1, p & _WORD
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return torch.stack((a, b, c, d), dim=1)


def random_words(n: int, *, seed: int, stream: int, step: int, device: torch.device | str = "cpu") -> Tensor:
    """Elements 0..n-1 of a stream: (n,) int64 in [0, 2^32)."""
    counters = torch.arange((n + 3) // 4, dtype=torch.int64, device=device)
    return philox4x32(counters, stream, step, seed).view(-1)[:n]


def uniform(n: int, *, seed: int, stream: int, step: int, device: torch.device | str = "cpu") -> Tensor:
    """(n,) float32 uniform in [0, 1): the upper 24 bits of each word, exact.

    >>> uniform(2, seed=42, stream=0, step=0)
    tensor([0.6130, 0.4686])
    """
    out = torch.empty(n, device=device)
    if kernels.runs_on_kernels(out):
        fill = kernels.kernel("lc_uniform_fill", "plwwui")
        fill(out.data_ptr(), n, stream & _WORD, step & _WORD, seed % 2**64, kernels.threads())
        return out
    words = random_words(n, seed=seed, stream=stream, step=step, device=device)
    return out.copy_(words >> 8).mul_(2.0**-24)


def rademacher(n: int, *, seed: int, step: int, device: torch.device | str = "cpu") -> Tensor:
    """(n,) float32 random signs, 128 from each counter: element i is bit i mod 32 of word i div 32; a set bit is -1.

    >>> rademacher(4, seed=42, step=0).tolist()
    [-1.0, 1.0, 1.0, -1.0]
    """
    out = torch.empty(n, device=device)
    if kernels.runs_on_kernels(out):
        fill = kernels.kernel("lc_sign_fill", "plwui")
        fill(out.data_ptr(), n, step & _WORD, seed % 2**64, kernels.threads())
        return out
    words = random_words((n + 31) // 32, seed=seed, stream=SIGNS, step=step, device=device)
    bits = (words.unsqueeze(1) >> torch.arange(32, device=device)) & 1
    return 1.0 - 2.0 * bits.view(-1)[:n].to(torch.float32)


def permutation(indices: Tensor, n: int, *, seed: int, step: int) -> Tensor:
    """pi(i) for every i of `indices`, (m,) int64 in [0, n), where pi is a random permutation of [0, n).

    A balanced Feistel network of 8 rounds on the smallest even number of bits (at least 8) that holds n - 1; values
    that leave [0, n) walk on until they return.

    >>> permutation(torch.arange(10), 10, seed=42, step=7).tolist()
    [2, 4, 0, 3, 1, 9, 7, 6, 5, 8]
    """
    if kernels.runs_on_kernels(indices):
        out = torch.empty_like(indices)
        call = kernels.kernel("lc_permutation", "ppllwui")
        pointers = indices.data_ptr(), out.data_ptr()
        call(*pointers, indices.numel(), n, step & _WORD, seed % 2**64, kernels.threads())
        return out
    bits = max(8, (n - 1).bit_length())
    half = (bits + 1) // 2
    keys = random_words(8, seed=seed, stream=INDICES, step=step).tolist()
    if bits == 8:
        return _walk_small(indices, n, keys)
    out = _feistel(indices.to(torch.int64), half, keys)
    while bool((outside := out >= n).any()):
        out = torch.where(outside, _feistel(out, half, keys), out)
    return out


def _walk_small(indices: Tensor, n: int, keys: list[int]) -> Tensor:
    # walks to a few numbers among 256 are long, but the whole network fits a table
    table = _feistel(torch.arange(256), 4, keys).tolist()
    out = [table[i] for i in indices.tolist()]
    for place, value in enumerate(out):
        while value >= n:
            value = table[value]
        out[place] = value
    return torch.tensor(out, dtype=torch.int64, device=indices.device)


def _feistel(values: Tensor, half: int, keys: list[int]) -> Tensor:
    mask = (1 << half) - 1
    left, right = values >> half, values & mask
    for key in keys:
        left, right = right, left ^ (fmix32((right * 0x9E3779B1 + key) & _WORD) & mask)
    return (left << half) | right


def fmix32(h: Tensor) -> Tensor:
    """The finaliser of MurmurHash3 on int64 words in [0, 2^32)."""
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & _WORD
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & _WORD
    return h ^ (h >> 16)
