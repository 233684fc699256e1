"""Deep gradient compression: clipping, momentum correction, masking, dense parts, warm-up."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from lowcomm.compress import DGC, Mixed, warmup_density
from reference_codecs import Dense, KeepLargest
from torch import Tensor

CPU = torch.device("cpu")


def reference(gs: list[Tensor], k: int, m: float, nesterov: bool, masking: bool, limit: float | None) -> list[Tensor]:
    """The published loop, one element at a time in double precision; returns what is sent."""
    u = v = torch.zeros(gs[0].numel(), dtype=torch.float64)
    sent = []
    for g in (g.double() for g in gs):
        if limit is not None and float(g.norm()) > limit:
            g = g * limit / float(g.norm())
        u, v = (m * (u + g), v + m * (u + g) + g) if nesterov else (m * u + g, v + m * u + g)
        chosen = torch.sort(v.abs(), descending=True, stable=True).indices[:k]
        message = torch.zeros_like(v)
        message[chosen] = v[chosen]
        sent.append(message)
        v, u = v.clone(), u.clone()
        v[chosen] = 0
        if masking:
            u[chosen] = 0
    return sent


def run(feedback: DGC, codec: KeepLargest | Dense | Mixed, gs: list[Tensor]) -> tuple[list[Tensor], dict[str, Tensor]]:
    state, sent = feedback.init(gs[0].numel(), CPU), []
    for step, g in enumerate(gs):
        body = torch.empty(codec.nbytes(g.numel()), dtype=torch.uint8)
        _, state = feedback.encode(codec, g.clone(), state, body, step=step)
        message = torch.empty_like(g)
        codec.decode(body, message, step=step)
        sent.append(message)
    return sent, state


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("masking", [False, True])
@pytest.mark.parametrize("clip", [None, 6.0])
def test_equals_the_published_loop(nesterov: bool, masking: bool, clip: float | None) -> None:
    torch.manual_seed(0)
    gs = [torch.randn(30) for _ in range(40)]
    feedback = DGC(momentum=0.9, nesterov=nesterov, masking=masking, clip_norm=clip, num_ranks=4)
    sent, _ = run(feedback, KeepLargest(k=3), gs)
    expected = reference(gs, 3, 0.9, nesterov, masking, None if clip is None else clip / 2)
    for got, want in zip(sent, expected, strict=True):
        assert torch.allclose(got.double(), want, atol=1e-4)


def test_without_masking_all_momentum_is_sent_or_kept() -> None:
    torch.manual_seed(1)
    gs = [torch.randn(30) for _ in range(40)]
    sent, state = run(DGC(masking=False), KeepLargest(k=3), gs)
    u, filtered = torch.zeros(30, dtype=torch.float64), torch.zeros(30, dtype=torch.float64)
    for g in gs:
        u = 0.9 * u + g.double()
        filtered += u
    assert torch.allclose(torch.stack(sent).double().sum(0) + state["residual"].double(), filtered, atol=1e-3)


def test_dense_parts_get_plain_momentum() -> None:
    torch.manual_seed(2)
    gs = [torch.randn(12) for _ in range(10)]
    codec = Mixed(((KeepLargest(k=2), 8), (Dense(), 4)))
    sent, state = run(DGC(momentum=0.5), codec, gs)
    u = torch.zeros(4)
    for g, message in zip(gs, sent, strict=True):
        u = u * 0.5 + g[8:]
        assert torch.equal(message[8:], u)
    sparse, _ = run(DGC(momentum=0.5), KeepLargest(k=2), [g[:8] for g in gs])
    assert all(torch.equal(message[:8], alone) for message, alone in zip(sent, sparse, strict=True))
    assert int((state["velocity"][:8] == 0).sum()) == 2


def test_clipping_leaves_small_gradients_alone() -> None:
    g = torch.tensor([3.0, 4.0])
    for clip, num_ranks, expected in [(10.0, 4, [3.0, 4.0]), (5.0, 4, [1.5, 2.0]), (5.0, 1, [3.0, 4.0])]:
        sent, _ = run(DGC(clip_norm=clip, num_ranks=num_ranks), Dense(), [g])
        assert sent[0].tolist() == expected


def test_discard_keeps_the_momentum() -> None:
    feedback = replace(DGC(momentum=0.5))
    state = {"velocity": torch.tensor([2.0, 4.0]), "residual": torch.tensor([1.0, 1.0])}
    kept = feedback.discard(torch.tensor([1.0, -1.0]), state)
    assert kept["velocity"].tolist() == [2.0, 1.0] and kept["residual"].tolist() == [3.0, 2.0]
    assert state["velocity"].tolist() == [2.0, 4.0]


def test_warmup() -> None:
    sparsity = [round(100 * (1 - warmup_density(epoch, 0.001)), 2) for epoch in range(6)]
    assert sparsity == [74.88, 93.69, 98.42, 99.6, 99.9, 99.9]
    assert [warmup_density(epoch, 0.01, [0.5, 0.1]) for epoch in range(4)] == [0.5, 0.1, 0.01, 0.01]
    assert warmup_density(0, 0.25, 0) == 0.25
    assert math.isclose(warmup_density(0, 0.01, 1), 0.1)
    with pytest.raises(ValueError, match="density"):
        warmup_density(0, 0.0)
