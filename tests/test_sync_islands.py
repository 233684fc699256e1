"""Exchanges between islands: 2 islands of 2 and of 3 ranks, equal and different vectors, failures inside one island."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from lowcomm.sync import Aborted, Disagreement, IslandAllReduce, NonFinite, SyncError
from ranks import run_ranks
from sync_codecs import ExactCodec, SignCodec
from sync_emulation import bounds, emulate_all_gather, emulate_two_phase

N = 101


def _vector(rank: int, t: int) -> torch.Tensor:
    return torch.randn(N, generator=torch.Generator().manual_seed(100 * t + rank))


def _groups(rank: int, world_size: int, size: int) -> tuple[object, object]:
    """(group between islands, group of the island); ranks are numbered island by island."""
    islands = [dist.new_group(range(i, i + size)) for i in range(0, world_size, size)]
    between = [dist.new_group(range(j, world_size, size)) for j in range(size)]
    return between[rank % size], islands[rank // size]


def _islands_rank(rank: int, world_size: int, size: int) -> dict[str, object]:
    between, island = _groups(rank, world_size, size)
    number, results = rank // size, {}
    for algorithm in ("all_gather", "two_phase"):
        same = IslandAllReduce(between, island, SignCodec(), "auto", same=True, algorithm=algorithm)
        for t in range(4):
            hold, flat = t == 2, _vector(number, t)
            work = same.start(flat, round=t, hold=hold) if t % 2 else same.reduce(flat, round=t, hold=hold)
            results[f"{algorithm} {t}"] = (work.wait(), work.result.clone())[1]
            work.commit()
        results[f"{algorithm} state"] = same.state(0)
        results["slice"] = same.owner_slice(N)
        assert set(same.state(0)) == set(same.state_names())
        copy = IslandAllReduce(between, island, SignCodec(), "auto", same=True, algorithm=algorithm)
        copy.load_state(0, same.state(0))
        one, two = (r.reduce(_vector(number, 9), round=9).result for r in (same, copy))
        assert torch.equal(one, two)
    every = IslandAllReduce(between, island)
    work = every.reduce(_vector(rank, 5))
    receipt = work.wait()
    results["mean"] = work.result
    results["bytes"] = (receipt.payload_bytes, receipt.island_bytes, receipt.contributors)
    work = every.start(_vector(rank, 6), weight=float(rank))
    results["weighted"] = (work.wait(), work.result)[1]
    results["errors"] = _errors(rank, between, island)
    return results


def _errors(rank: int, between: object, island: object) -> list[str]:
    reducer = IslandAllReduce(between, island, ExactCodec(), "auto")
    reducer.reduce(_vector(rank, 0))
    before, names = reducer.state(0), []
    bad = _vector(rank, 1)
    bad[0 if rank == 1 else 1] = float("nan") if rank == 1 else 0.0
    for call in (
        lambda: reducer.reduce(bad),
        lambda: reducer.reduce(_vector(rank, 1), round=int(rank == 1)),
        lambda: reducer.reduce(_vector(rank, 1), check=rank // 2),
        lambda: reducer.reduce(_vector(rank, 1), hold=True).discard(),
    ):
        try:
            call()
            names.append("ok")
        except SyncError as error:
            names.append(type(error).__name__)
        after = reducer.state(0)
        assert all(torch.equal(before[name], after[name]) for name in before)
    reducer.reduce(_vector(rank, 2))
    return names


@pytest.mark.parametrize("size", [2, 3])
def test_islands(size: int) -> None:
    islands = 2
    outcomes = run_ranks(_islands_rank, islands * size, size)
    parts = bounds(N, size, 1)
    for algorithm in ("all_gather", "two_phase"):
        for j, (start, stop) in enumerate(parts):
            length = stop - start
            residuals = [torch.zeros(length) for _ in range(islands)]
            owners = [torch.zeros(b - a) for a, b in bounds(length, islands, 4)]
            for t in range(4):
                vectors = [_vector(island, t)[start:stop] for island in range(islands)]
                if algorithm == "all_gather":
                    expected, residuals = emulate_all_gather(SignCodec(), vectors, residuals, step=t)
                else:
                    expected, residuals, owners = emulate_two_phase(SignCodec(), vectors, residuals, owners, step=t)
                for outcome in outcomes:
                    assert torch.equal(outcome[f"{algorithm} {t}"][start:stop], expected)
            for island in range(islands):
                outcome = outcomes[island * size + j]
                assert outcome["slice"] == (start, stop)
                assert torch.equal(outcome[f"{algorithm} state"]["owner_residual"], residuals[island])
    world = islands * size
    mean = torch.stack([_vector(rank, 5) for rank in range(world)]).mean(0)
    weighted = sum(rank * _vector(rank, 6) for rank in range(world)) / sum(range(world))
    for rank, outcome in enumerate(outcomes):
        assert torch.equal(outcome["mean"], outcomes[0]["mean"])
        torch.testing.assert_close(outcome["mean"], mean, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(outcome["weighted"], weighted, rtol=1e-5, atol=1e-6)
        start, stop = parts[rank % size]
        payload, inside, contributors = outcome["bytes"]
        assert payload == 4 * (stop - start) and contributors == world
        assert inside > 4 * N * (size - 1) // size
        nan, round_, check, discard = outcome["errors"]
        assert nan == NonFinite.__name__ and discard == "ok"
        assert round_ == Disagreement.__name__ if rank < size else round_ in (Disagreement.__name__, Aborted.__name__)
        assert check == Disagreement.__name__
