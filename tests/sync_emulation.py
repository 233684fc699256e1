"""What the compressed all-reduces must compute, in one process, written from their definition."""

from __future__ import annotations

import itertools

import torch
from lowcomm.compress import Codec
from torch import Tensor


def encode_decode(codec: Codec, x: Tensor, **key: int) -> Tensor:
    body = torch.empty(codec.nbytes(x.numel()), dtype=torch.uint8)
    codec.encode(x, body, **key)
    out = torch.empty_like(x)
    codec.decode(body, out, **key)
    return out


def ordered_mean(vectors: list[Tensor], factors: list[float], divisor: float) -> Tensor:
    terms = [v if factor == 1.0 else v * factor for v, factor in zip(vectors, factors, strict=True) if factor]
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total / divisor


def emulate_all_gather(
    codec: Codec, vectors: list[Tensor], residuals: list[Tensor], *, step: int = 0, bucket: int = 0
) -> tuple[Tensor, list[Tensor]]:
    """(mean, new residuals) of A1 with EF14, equal weights."""
    sent, kept = [], []
    for rank, (x, e) in enumerate(zip(vectors, residuals, strict=True)):
        p = e + x
        d = encode_decode(codec, p, step=step, rank=rank, bucket=bucket)
        sent.append(d)
        kept.append(p - d)
    n = len(vectors)
    return ordered_mean(sent, [1.0] * n, float(n)), kept


def bounds(elements: int, parts: int, block: int) -> list[tuple[int, int]]:
    blocks = -(-elements // block)
    share = -(-blocks // parts)
    edges = [min(r * share * block, elements) for r in range(parts + 1)]
    return list(itertools.pairwise(edges))


def emulate_two_phase(
    codec: Codec,
    vectors: list[Tensor],
    residuals: list[Tensor],
    owners: list[Tensor],
    *,
    step: int = 0,
    bucket: int = 0,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """(mean, new residuals, new owner residuals) of A2 with EF14 on both sides, equal weights."""
    world = len(vectors)
    result = torch.empty_like(vectors[0])
    kept = [torch.empty_like(x) for x in vectors]
    new_owners = []
    for owner, (start, stop) in enumerate(bounds(vectors[0].numel(), world, codec.block)):
        sent = []
        for rank in range(world):
            p = residuals[rank][start:stop] + vectors[rank][start:stop]
            d = encode_decode(codec, p, step=step, rank=rank, bucket=bucket + (owner << 32))
            kept[rank][start:stop] = p - d
            sent.append(d)
        p = owners[owner] + ordered_mean(sent, [1.0] * world, float(world))
        d = encode_decode(codec, p, step=step, rank=owner, bucket=bucket + ((world + owner) << 32))
        new_owners.append(p - d)
        result[start:stop] = d
    return result, kept, new_owners
