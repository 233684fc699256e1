"""Shared supports: selection, agreement, bytes, and delivery under error feedback."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from lowcomm.compress import (
    decode_support,
    encode_support,
    energy_support,
    group_energy,
    history_support,
    leader_support,
)
from lowcomm.compress.support import support_nbytes
from torch import Tensor


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_leader_takes_its_largest() -> None:
    x = gaussian(1000)
    support = leader_support(x, 30)
    assert set(support.tolist()) == set(x.abs().topk(30).indices.tolist())
    assert bool((support[1:] > support[:-1]).all())
    assert leader_support(torch.tensor([1.0, -1.0, 1.0]), 2).tolist() == [0, 1]


@pytest.mark.parametrize(("n", "k"), [(1, 1), (8, 3), (1000, 30), (5000, 5000), (70000, 700)])
def test_supports_as_bytes(n: int, k: int) -> None:
    support = leader_support(gaussian(n), k)
    body = encode_support(support, n)
    assert body.numel() == support_nbytes(n, k)
    assert torch.equal(decode_support(body, n, k), support)
    with pytest.raises(ValueError, match="damaged"):
        decode_support(torch.zeros_like(body), n, k)
    with pytest.raises(ValueError, match="bytes but got"):
        decode_support(body[:-1], n, k)


def test_history_keeps_the_largest_and_draws_the_rest() -> None:
    update = torch.zeros(500)
    update[100:140] = torch.arange(1.0, 41.0)
    support = history_support(update, 40, refresh=0.25, step=3)
    assert support.numel() == 40 and bool((support[1:] > support[:-1]).all())
    assert set(range(110, 140)) <= set(support.tolist())  # the 30 largest
    assert not torch.equal(support, history_support(update, 40, refresh=0.25, step=4))
    assert torch.equal(support, history_support(update.clone(), 40, refresh=0.25, step=3))
    assert set(history_support(update, 40, refresh=0.0).tolist()) == set(range(100, 140))


@pytest.mark.parametrize(("n", "k"), [(1, 1), (10, 10), (300, 7), (1000, 999)])
def test_history_before_the_first_update_is_random(n: int, k: int) -> None:
    supports = [history_support(torch.zeros(n), k, step=step) for step in range(3)]
    for support in supports:
        assert support.numel() == k == len(set(support.tolist())) and 0 <= int(support.min()) <= int(support.max()) < n
    if k == 7:
        assert len({tuple(support.tolist()) for support in supports}) == 3


def test_energy_of_all_ranks_finds_the_groups_of_the_mean() -> None:
    x = gaussian(3, 330, seed=1) * 0.1
    x[:, 64:96] += 1.0
    x[0, 5] = 4.0  # one rank's outlier, a support of top-k would follow it
    energy = torch.stack([group_energy(row) for row in x]).sum(0)
    assert energy.numel() == 11
    assert torch.allclose(group_energy(x[1])[10], (x[1, 320:] ** 2).sum())
    assert energy_support(energy, 40, 330).tolist() == list(range(64, 96))
    assert energy_support(energy, 5, 330).numel() == 32
    last = torch.zeros(11)
    last[10] = 1.0
    assert energy_support(last, 32, 330).tolist() == list(range(320, 330))


@pytest.mark.parametrize("rule", ["leader", "history", "energy"])
def test_feedback_delivers_the_mean(rule: str) -> None:
    """Constant inputs with a common part: what was applied approaches rounds times the mean, nothing gets lost."""
    n, k, num_ranks, rounds = 256, 32, 4, 120
    inputs = gaussian(n) + 0.5 * gaussian(num_ranks, n, seed=1)
    residual, applied, update = torch.zeros(num_ranks, n), torch.zeros(n), torch.zeros(n)
    choose: dict[str, Callable[[Tensor, int], Tensor]] = {
        "leader": lambda p, step: leader_support(p[step % num_ranks], k),
        "history": lambda p, step: history_support(update, k, refresh=0.5, step=step),
        "energy": lambda p, step: energy_support(
            torch.stack([group_energy(row, 16) for row in p]).sum(0), k, n, group=16
        ),
    }
    for step in range(rounds):
        p = residual + inputs
        support = choose[rule](p, step)
        update = torch.zeros(n).index_copy_(0, support, p[:, support].mean(0))
        residual = p.index_fill(1, support, 0.0)
        applied += update
        assert torch.allclose(applied + residual.mean(0), (step + 1) * inputs.mean(0), atol=1e-3)
    assert float((applied / rounds - inputs.mean(0)).norm() / inputs.mean(0).norm()) < 0.3


def test_wrong_sizes_are_refused() -> None:
    for build in (lambda: leader_support(torch.ones(3), 4), lambda: history_support(torch.ones(3), 0)):
        with pytest.raises(ValueError, match="k must be 1 to 3"):
            build()
    with pytest.raises(ValueError, match="refresh must be"):
        history_support(torch.ones(3), 2, refresh=1.5)
