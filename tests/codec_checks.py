"""Shared by the tests of codecs: encoding and decoding, inputs on which kernels go wrong, comparisons of levels."""

from __future__ import annotations

import math

import torch
from lowcomm.compress import Codec, available_levels, use_kernel_level
from torch import Tensor


def gaussian(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def encode(codec: Codec, x: Tensor, **where: int) -> tuple[Tensor, int]:
    body = torch.full((codec.nbytes(x.numel()),), 0xAB, dtype=torch.uint8)
    return body, codec.encode(x, body, **where)


def decode(codec: Codec, body: Tensor, n: int, **where: int) -> Tensor:
    out = torch.full((n,), 7.0)
    codec.decode(body, out, **where)
    return out


def round_trip(codec: Codec, x: Tensor, **where: int) -> Tensor:
    return decode(codec, encode(codec, x, **where)[0], x.numel(), **where)


def adversarial(n: int) -> list[Tensor]:
    """Inputs on which shortcuts in a kernel show."""
    x = gaussian(n, n)
    spread = torch.exp2(torch.randint(-140, 127, (n,), generator=torch.Generator().manual_seed(n)).float())
    zeros, odd = x.clone(), x.clone()
    zeros[::3], zeros[1::5] = 0.0, -0.0
    odd[::17], odd[5::29], odd[7::31] = math.nan, math.inf, -math.inf
    one_hot = torch.zeros(n)
    one_hot[n // 2 : n // 2 + 1] = -3
    finite = [x, -x.abs(), torch.full((n,), -0.3), zeros, torch.zeros(n), one_hot]
    scaled = [x * 2.0**-99, x * 1e-35, x * 1e-20, x.sign() * 3.4e38, (x * spread).clamp(-3e38, 3e38)]
    narrow = [x.bfloat16(), x.half(), (x * 2e38).bfloat16()]
    return [*finite, *scaled, odd, torch.full((n,), math.nan), *narrow]


def results(codec: Codec, x: Tensor) -> list[Tensor]:
    """Everything a codec computes from x, as bits."""
    n, where = x.numel(), {"step": 3, "rank": 2, "bucket": 5}
    body, flags = encode(codec, x, **where)
    added, weighted = torch.arange(n).float(), torch.arange(n).float()
    codec.decode_add(body, added, **where)
    codec.decode_add(body, weighted, 0.3, **where)
    out = [body, torch.tensor([flags]), decode(codec, body, n, **where), added, weighted]
    if x.dtype == torch.float32:
        residual = (gaussian(n, 1) * x.nan_to_num(0, 0, 0).abs()).clamp(-1e30, 1e30)
        fresh, own, kept = torch.full((n,), 9.0), x.clone(), residual.clone()
        # the candidate in memory of its own, in that of x, in that of the residual
        for candidate, source, old, decay in (
            (fresh, x, residual, 1.0),
            (own, own, residual, 1.0),
            (kept, x, kept, 0.95),
        ):
            flags = codec.encode_feedback(source, old, candidate, body, decay=decay, **where)
            out += [body.clone(), torch.tensor([flags]), candidate]
        assert torch.isfinite(fresh).all() and torch.isfinite(kept).all()
        assert torch.equal(fresh.view(torch.int32), own.view(torch.int32))
    return [part.view(torch.int32) if part.dtype == torch.float32 else part for part in out]


def assert_levels_agree(codec: Codec, n: int) -> None:
    """Every kernel level computes the bits that torch operations compute, on all adversarial inputs."""
    for number, x in enumerate(adversarial(n)):
        with use_kernel_level("torch"):
            expected = results(codec, x)
        for level in available_levels()[1:]:
            with use_kernel_level(level):
                found = results(codec, x)
            same = [torch.equal(a, b) for a, b in zip(expected, found, strict=True)]
            assert all(same), (codec.config, n, level, f"input {number}", same)


def assert_threads_and_streaming_do_not_show(codec: Codec, n: int) -> None:
    """At a length that is written with streaming stores where the address allows it, and with two threads."""
    x, residual, before = gaussian(n), gaussian(n, 1), torch.get_num_threads()
    outcomes = []
    try:
        for level, threads, shift in (
            (available_levels()[-2], 1, 0),  # the reference: one thread, the level below, which stores as usual
            (available_levels()[-1], 1, 0),
            (available_levels()[-1], 2, 1),
        ):
            torch.set_num_threads(threads)
            memory = torch.empty(2 * n + 64)
            out, candidate = memory[shift : shift + n], memory[n + 32 + shift : n + 32 + shift + n]
            with use_kernel_level(level):
                body = encode(codec, x)[0]
                codec.decode(body, out)
                corrected = torch.empty_like(body)
                codec.encode_feedback(x, residual, candidate, corrected)
            outcomes.append((out.clone(), candidate.clone(), body, corrected))
    finally:
        torch.set_num_threads(before)
    for outcome in outcomes[1:]:
        assert all(torch.equal(a, b) for a, b in zip(outcome, outcomes[0], strict=True))
