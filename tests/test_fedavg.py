"""FedAvg: data-proportional weights, uneven numbers of steps, rounds that take some of the clients only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lowcomm.compress import Int8
from lowcomm.optim import FedAvg
from ranks import run_ranks
from torch.optim import SGD
from toys import R, scalar

TIGHT = {"rel": 1e-12, "abs": 1e-14}
SAMPLES = (2, 4, 6, 4)
ROUNDS = 6


def _train(rank: int, optimizer: Any, p: Any) -> None:
    if not optimizer.participates:
        optimizer.sit_out()
        return
    steps = -(-SAMPLES[rank] // 2)
    for _ in range(steps):
        p.grad = R[rank](p.detach().double()).to(p.dtype)
        optimizer.step()


def _clients(rank: int, world_size: int, fraction: float) -> Any:
    found: dict[str, Any] = {"x": [], "took part": [], "resumed": []}
    p = scalar(2.0)
    settings: dict[str, Any] = {"samples": SAMPLES[rank], "batch_size": 2, "fraction": fraction, "seed": 3}
    optimizer = FedAvg(SGD([p], lr=0.1), **settings)
    for _ in range(ROUNDS):
        q = scalar(0.0)
        again = FedAvg(SGD([q], lr=0.1), **settings)
        q.data.copy_(p.data)
        again.load_state_dict(optimizer.state_dict())
        found["took part"].append(optimizer.participants)
        _train(rank, optimizer, p)
        _train(rank, again, q)
        found["x"].append(p.item())
        found["resumed"].append(q.item())
    optimizer.flush()
    found["flushed"] = p.item()
    small = torch.nn.Parameter(torch.full((4,), 2.0))
    packed = FedAvg(SGD([small], lr=0.1), compress=Int8(), **settings)
    for _ in range(ROUNDS):
        _train(rank, packed, small)
    found["packed"] = small.tolist()
    return found


def _expected(chosen: list[list[int]]) -> list[float]:
    x, values = 2.0, []
    for participants in chosen:
        total = moved = 0.0
        for rank in participants:
            local = x
            for _ in range(-(-SAMPLES[rank] // 2)):
                local -= 0.1 * float(R[rank](torch.tensor(local, dtype=torch.float64)))
            total += SAMPLES[rank]
            moved += SAMPLES[rank] * local
        x = moved / total
        values.append(x)
    return values


@pytest.mark.parametrize("fraction", [1.0, 0.5, 0.1])
def test_fedavg_is_its_formula(fraction: float) -> None:
    found = run_ranks(_clients, 4, fraction)
    chosen = found[0]["took part"]
    assert all(len(participants) == max(1, round(4 * fraction)) for participants in chosen)
    if fraction < 1.0:
        assert len({tuple(participants) for participants in chosen}) > 1
    expected = _expected(chosen)
    for one in found:
        assert one["took part"] == chosen
        assert one["x"] == pytest.approx(expected, **TIGHT)
        assert one["x"] == found[0]["x"]
        assert one["resumed"] == one["x"]
        assert one["flushed"] == one["x"][-1]
        assert one["packed"] == found[0]["packed"]
        assert one["packed"] == pytest.approx([expected[-1]] * 4, rel=0.02)


def test_bad_settings() -> None:
    inner = SGD([scalar(0.0)], lr=0.1)
    for bad in ({"samples": 0}, {"fraction": 0.0}, {"fraction": 1.5}, {"epochs": 0}):
        with pytest.raises(ValueError, match="0 < fraction <= 1"):
            FedAvg(inner, **{"samples": 2, "batch_size": 1, **bad})
    with pytest.raises(ValueError, match=r"FedAvg sets weights itself"):
        FedAvg(inner, samples=2, batch_size=1, weights=2.0)
    with pytest.raises(RuntimeError, match="counts on this worker"):
        FedAvg(inner, samples=2, batch_size=1).sit_out()
