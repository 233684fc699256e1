"""The loss filter: who passes, what it remembers, and ranks whose evaluation fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lowcomm.compress import Int4
from lowcomm.sync import AllReduce, LossFilter, SyncError
from ranks import run_ranks

N = 64


def _target(rank: int, own: bool) -> torch.Tensor:
    """Where the loss has its minimum: a common part, and one of the rank's own data."""
    common = torch.randn(N, generator=torch.Generator().manual_seed(0))
    return common + 0.5 * torch.randn(N, generator=torch.Generator().manual_seed(1 + rank)) * own


def _loss(update: torch.Tensor | None, rank: int, own: bool) -> float:
    parameters = torch.zeros(N) if update is None else -update
    return float((parameters - _target(rank, own)).square().sum())


def _message(rank: int, kind: str) -> torch.Tensor:
    """A pseudo-gradient: honest training, noise, or the opposite of training."""
    if kind == "noise":
        return torch.randn(N, generator=torch.Generator().manual_seed(99 + rank))
    return -_target(rank, True) * (-1 if kind == "opposite" else 1)


def test_only_messages_that_help_enter() -> None:
    kinds = ["honest", "noise", "honest", "opposite", "honest"]
    x = torch.stack([_message(rank, kind) for rank, kind in enumerate(kinds)])
    mean, memory = LossFilter(_loss).judge(x, range(5), 5)
    torch.testing.assert_close(mean, x[[0, 2, 4]].mean(0))
    mu, score = memory.view(2, 5)
    assert bool((mu[[0, 2, 4]] > 0).all()) and float(score[3]) < 0
    best = max((0, 2, 4), key=lambda rank: float(mu[rank] * score[rank]))
    assert torch.equal(LossFilter(_loss, keep=1).judge(x, range(5), 5)[0], x[best])
    assert torch.equal(LossFilter(_loss).combine(x), mean)
    assert LossFilter(_loss).combine(x[3:4]) is None  # nobody passes
    # A rank with a good record survives one bad round; its average has to fall first.
    record = torch.stack([torch.ones(5), torch.full((5,), 50.0)]).flatten()
    again, moved = LossFilter(_loss).judge(x, range(5), 5, memory=record)
    torch.testing.assert_close(again, x.mean(0))
    assert float(moved.view(2, 5)[1, 3]) < 50


def test_options_and_turns() -> None:
    for options, message in [({"step": 0.0}, "step"), ({"rate": 2.0}, "rate"), ({"keep": 0}, "keep")]:
        with pytest.raises(ValueError, match=message):
            LossFilter(_loss, **options)
    with pytest.raises(ValueError, match="needs whole vectors"):
        AllReduce(codec=Int4(), algorithm="two_phase", reduce=LossFilter(_loss))
    assert "function" not in repr(LossFilter(_loss))  # equal on all ranks, whatever the address
    asked: list[int] = []

    def count(update: torch.Tensor | None, rank: int, own: bool) -> float:
        asked.append(rank)
        return 0.0

    for judge in range(3):
        LossFilter(count, judged=1).judge(torch.ones(3, 4), range(3), 3, judge=judge, round=1)
    assert sorted(set(asked)) == [0, 1, 2] and len(asked) == 12


def _filter_rank(rank: int, world_size: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    kind = ["honest", "opposite", "honest", "honest"][rank]
    reducer = AllReduce(reduce=LossFilter(_loss, judged=2))
    for t in range(3):
        results[f"{t}"] = reducer.reduce(_message(rank, kind), round=t).result.clone()
    saved = reducer.state(0)
    results["names"] = (sorted(saved), sorted(reducer.state_names()))
    results["next"] = reducer.reduce(_message(rank, kind), round=3).result.clone()
    resumed = AllReduce(reduce=LossFilter(_loss, judged=2))
    resumed.load_state(0, saved)
    results["resumed"] = resumed.reduce(_message(rank, kind), round=3).result.clone()
    coded = AllReduce(codec=Int4(), feedback="auto", reduce=LossFilter(_loss))
    results["coded"] = coded.reduce(_message(rank, kind)).result.clone()
    results["absent"] = AllReduce(reduce=LossFilter(_loss)).reduce(_message(rank, kind), weight=float(rank != 2)).result

    def broken(update: torch.Tensor | None, of: int, own: bool) -> float:
        if rank == 1:
            raise ArithmeticError("no loss today")
        return _loss(update, of, own)

    failing = AllReduce(reduce=LossFilter(broken))
    try:
        failing.reduce(_message(rank, kind))
    except (SyncError, ArithmeticError) as error:
        results["broken"] = str(error)
    results["untouched"] = failing.state(0)
    return results


def test_filter_between_ranks() -> None:
    outcomes = run_ranks(_filter_rank, 4)
    honest = torch.stack([_message(rank, "honest") for rank in (0, 2, 3)])
    for rank, outcome in enumerate(outcomes):
        for name in ("0", "1", "2", "next"):
            torch.testing.assert_close(outcome[name], honest.mean(0))
            assert torch.equal(outcome[name], outcomes[0][name])
        assert outcome["names"] == (["previous"], ["previous"])
        assert torch.equal(outcome["resumed"], outcome["next"])
        assert torch.equal(outcome["coded"], outcomes[0]["coded"])
        torch.testing.assert_close(outcome["coded"], honest.mean(0), rtol=0, atol=0.3)
        torch.testing.assert_close(outcome["absent"], honest[[0, 2]].mean(0))
        assert outcome["broken"] == (
            "no loss today" if rank == 1 else "the evaluation function of a LossFilter failed on another rank"
        )
        assert outcome["untouched"] == {}
