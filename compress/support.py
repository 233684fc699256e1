"""Shared supports: all ranks send the values at the same positions, as plain floats that any sum can average.

With a support S of k positions that all ranks know, and p = residual + x on each rank,

    message p[S] (k floats, no positions);  mean over ranks;  update = mean on S, 0 elsewhere;  residual = p outside S

so messages need no index lists, overlap completely and are linear. How the ranks come to agree on S:

* the positions of one rank's largest entries, which it broadcasts (`leader_support`, rank `round mod N`): CLT-k of
  ScaleCom, arXiv 2104.11125. Contraction holds for the leader's own vector.
* the largest entries of the last update, and some random positions (`history_support`): nothing is exchanged.
* the groups of neighbours with the largest energy, summed over the ranks (`group_energy`, a plain sum of n / group
  floats, then `energy_support`), after ARC-Top-K, arXiv 2510.26709: closer to the support of the mean than any rank's.

Contraction of the mean is not guaranteed for a single round; error feedback delivers what a support leaves out once the
support moves there.

    support = history_support(last_update, k, step=step)
    mean = mean_over_ranks(p[support])
    update = torch.zeros_like(p).index_copy_(0, support, mean)
    residual = p.index_fill(0, support, 0.0)
"""

from __future__ import annotations

import torch
from torch import Tensor

from .indices import decode_indices, encode_indices, index_nbytes
from .packing import as_blocks, tree_sum
from .philox import bucket_seed, permutation
from .topk import largest

__all__ = [
    "decode_support",
    "encode_support",
    "energy_support",
    "group_energy",
    "history_support",
    "leader_support",
    "support_nbytes",
]


def leader_support(x: Tensor, k: int) -> Tensor:
    """Positions of the k entries of largest magnitude of `x`, (n,) float32, ascending, int64; ties to the lower one.

    >>> leader_support(torch.tensor([1.0, -3.0, 0.0, 2.0]), 2).tolist()
    [1, 3]
    """
    _check_size(k, x.numel())
    return largest(x.view(1, -1), k)[0]


def history_support(
    update: Tensor, k: int, *, refresh: float = 0.1, step: int = 0, seed: int = 0, bucket: int = 0
) -> Tensor:
    """The largest entries of the last update and random positions, the same on all ranks: k ascending positions.

    Args:
        update: (n,) float32, the last mean update, bit-identical on all ranks; zeros before the first.
        k: size of the support, at most n.
        refresh: share of the support drawn at random, so that new positions get their turn. Default 0.1. Zeros of
            `update` are not taken for large entries: their places are drawn too.
        step, seed, bucket: round, seed and vector number of the draw.
    """
    n = update.numel()
    _check_size(k, n)
    if not 0 <= refresh <= 1:
        raise ValueError(f"refresh must be in [0, 1] but is: {refresh}")
    old = largest(update.view(1, -1), k)[0] if k else update.new_empty(0, dtype=torch.int64)
    by_size = old[torch.sort(update[old].abs(), descending=True, stable=True).indices]
    kept = by_size[: k - round(refresh * k)]
    kept = kept[update[kept] != 0]
    draws = permutation(torch.arange(min(n, 2 * k), device=update.device), n, seed=bucket_seed(seed, bucket), step=step)
    fresh = draws[~torch.isin(draws, kept)][: k - kept.numel()]
    return torch.cat((kept, fresh)).sort().values


def group_energy(x: Tensor, group: int = 32) -> Tensor:
    """Sum of squares of every `group` neighbours: (ceil(n / group),) float32, to be summed over the ranks.

    >>> group_energy(torch.tensor([3.0, 4.0, 1.0]), 2).tolist()
    [25.0, 1.0]
    """
    blocks = as_blocks(x, group)
    return tree_sum(blocks * blocks)


def energy_support(energy: Tensor, k: int, n: int, group: int = 32) -> Tensor:
    """Positions of the groups of largest energy, as many whole groups as fit k, at least one; ascending.

    Args:
        energy: the summed `group_energy`, bit-identical on all ranks.
        k: size of the support.
        n: elements of the vector.
        group: as in `group_energy`.

    >>> energy_support(torch.tensor([25.0, 1.0, 30.0]), 4, 5, group=2).tolist()
    [0, 1, 4]
    """
    _check_size(k, n)
    groups = largest(energy.view(1, -1), min(max(1, k // group), energy.numel()))[0]
    positions = (groups.unsqueeze(1) * group + torch.arange(group, device=energy.device)).view(-1)
    return positions[positions < n]


def support_nbytes(n: int, k: int) -> int:
    """Length of an encoded support, about 2 + log2(n / k) bits a position."""
    return index_nbytes("elias_fano", n, k, 1)


def encode_support(positions: Tensor, n: int) -> Tensor:
    """The bytes a leader broadcasts: one Elias-Fano record of k ascending positions in [0, n), padded to 4 bytes."""
    return encode_indices("elias_fano", positions.view(1, -1), n)


def decode_support(body: Tensor, n: int, k: int) -> Tensor:
    """The k positions of an encoded support.

    Raises:
        ValueError: the bytes are not a support of k positions.
    """
    if body.numel() != support_nbytes(n, k):
        raise ValueError(f"a support of {k} of {n} positions has {support_nbytes(n, k)} bytes but got {body.numel()}")
    positions = decode_indices("elias_fano", body, n, k, 1)[0]
    if int(positions[-1]) >= n:
        raise ValueError("the support is empty; the bytes are damaged")
    return positions


def _check_size(k: int, n: int) -> None:
    if not 1 <= k <= n:
        raise ValueError(f"k must be 1 to {n}, the number of elements, but is: {k}")
