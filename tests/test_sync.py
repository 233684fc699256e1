"""AllReduce on real gloo ranks against single-process emulations, bit for bit."""

from __future__ import annotations

import pytest
import torch
from lowcomm.sync import AllReduce
from ranks import run_ranks
from sync_codecs import ExactCodec, NonzeroCodec, SignCodec
from sync_emulation import bounds, emulate_all_gather, emulate_two_phase, ordered_mean

SIZES = [0, 1, 2, 3, 7, 33, 1000]
ROUNDS = 3


def _vector(rank: int, n: int, round: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + 1000 * round + 7 * rank + n)
    return torch.randn(n, generator=generator)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.int32), b.view(torch.int32))


def _codec_rank(rank: int, world_size: int) -> dict[str, object]:
    results: dict[str, object] = {}
    for algorithm in ("all_gather", "two_phase"):
        for codec in (ExactCodec(), SignCodec(4)):
            allreduce = AllReduce(codec=codec, feedback="auto", algorithm=algorithm)
            for bucket, n in enumerate(SIZES):
                for round in range(ROUNDS):
                    flat = _vector(rank, n, round)
                    if round % 2:
                        work = allreduce.start(flat, bucket=bucket, round=round)
                    else:
                        work = allreduce.reduce(flat, bucket=bucket, round=round)
                    receipt = work.wait()
                    key = f"{algorithm} {type(codec).__name__} {n} {round}"
                    results[key] = (work.result, receipt)
                results[f"{algorithm} {type(codec).__name__} {n} state"] = allreduce.state(bucket)
                results[f"{algorithm} {type(codec).__name__} {n} slice"] = allreduce.owner_slice(n)
    exact = AllReduce(codec=ExactCodec(), algorithm="two_phase")
    for shift in range(2):  # every rank brings the vector of the next one
        results[f"shift {shift}"] = exact.reduce(_vector((rank + shift) % world_size, 1000, 0)).result.clone()
    return results


def _check_order(outcomes: list[dict[str, object]], world_size: int) -> None:
    """Uncompressed two phases give the mean in rank order, bit for bit; other orders differ by rounding only."""
    for shift in range(2):
        vectors = [_vector((rank + shift) % world_size, 1000, 0) for rank in range(world_size)]
        expected = ordered_mean(vectors, [1.0] * world_size, float(world_size))
        for outcome in outcomes:
            assert _same(outcome[f"shift {shift}"], expected)
            torch.testing.assert_close(outcome["shift 1"], outcome["shift 0"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
def test_codecs_equal_their_emulation_on_all_ranks(world_size: int) -> None:
    outcomes = run_ranks(_codec_rank, world_size)
    _check_order(outcomes, world_size)
    for algorithm in ("all_gather", "two_phase"):
        for codec in (ExactCodec(), SignCodec(4)):
            for bucket, n in enumerate(SIZES):
                key = f"{algorithm} {type(codec).__name__} {n}"
                residuals = [torch.zeros(n) for _ in range(world_size)]
                edges = bounds(n, world_size, codec.block)
                owners = [torch.zeros(stop - start) for start, stop in edges]
                for round in range(ROUNDS):
                    vectors = [_vector(rank, n, round) for rank in range(world_size)]
                    if algorithm == "all_gather":
                        expected, residuals = emulate_all_gather(codec, vectors, residuals, step=round, bucket=bucket)
                    else:
                        expected, residuals, owners = emulate_two_phase(
                            codec, vectors, residuals, owners, step=round, bucket=bucket
                        )
                    for outcome in outcomes:
                        assert _same(outcome[f"{key} {round}"][0], expected), (key, round)
                for rank, outcome in enumerate(outcomes):
                    state = outcome[f"{key} state"]
                    assert _same(state["residual"], residuals[rank])
                    if algorithm == "two_phase":
                        assert _same(state["owner_residual"], owners[rank])
                        assert outcome[f"{key} slice"] == edges[rank]


def _dense_rank(rank: int, world_size: int) -> list[object]:
    results: list[object] = []
    allreduce = AllReduce()
    for n in SIZES:
        work = allreduce.reduce(_vector(rank, n, 0))
        results.append((work.result, work.wait()))
        work = allreduce.start(_vector(rank, n, 1).double(), weight=float(rank))
        results.append((work.wait(), work.result)[::-1])
    return results


@pytest.mark.parametrize("world_size", [2, 3])
def test_dense(world_size: int) -> None:
    outcomes = run_ranks(_dense_rank, world_size)
    for i, n in enumerate(SIZES):
        vectors = [_vector(rank, n, 0) for rank in range(world_size)]
        mean = torch.stack(vectors).double().mean(0)
        doubles = [_vector(rank, n, 1).double() for rank in range(world_size)]
        weights = [float(rank) for rank in range(world_size)]
        weighted = ordered_mean(doubles, weights, sum(weights))
        for outcome in outcomes:
            result, receipt = outcome[2 * i]
            assert torch.equal(result, outcomes[0][2 * i][0])
            torch.testing.assert_close(result.double(), mean, rtol=1e-6, atol=1e-6)
            assert receipt.payload_bytes == 2 * (world_size - 1) * 4 * n // world_size
            torch.testing.assert_close(outcome[2 * i + 1][0], weighted, rtol=1e-12, atol=1e-12)


def test_raw_two_phase_is_the_ordered_mean() -> None:
    for outcome in run_ranks(_weighted_rank, 3):
        vectors = [_vector(rank, 100, 5) for rank in range(3)]
        for name, weights, factors, divisor in _CASES:
            del weights
            assert _same(outcome[name], ordered_mean(vectors, factors, divisor)), name


_CASES = [
    ("uniform", [1.0, 1.0, 1.0], [1.0, 1.0, 1.0], 3.0),
    ("uniform other", [7.5, 7.5, 7.5], [1.0, 1.0, 1.0], 3.0),
    ("absent", [2.0, 0.0, 2.0], [1.0, 0.0, 1.0], 2.0),
    ("weighted", [1.0, 2.0, 4.0], [1.0 / 8, 2.0 / 8, 4.0 / 8], 7.0 / 8),
    ("one", [0.0, 0.0, 5.0], [0.0, 0.0, 1.0], 1.0),
]


def _weighted_rank(rank: int, world_size: int) -> dict[str, torch.Tensor]:
    results = {}
    for algorithm in ("all_gather", "two_phase"):
        allreduce = AllReduce(codec=ExactCodec(), algorithm=algorithm)
        for name, weights, _, _ in _CASES:
            work = allreduce.reduce(_vector(rank, 100, 5), weight=weights[rank])
            receipt = work.wait()
            assert receipt.weight_total == sum(weights) and receipt.contributors == sum(w > 0 for w in weights)
            assert name not in results or torch.equal(results[name], work.result)
            results[name] = work.result
    return results


def _contributors_rank(rank: int, world_size: int) -> list[torch.Tensor]:
    x = torch.tensor([1.0, 0.0, 2.0 * (rank == 0), 3.0 * rank])
    options = [(None, "auto"), (NonzeroCodec(), "auto"), (ExactCodec(), "two_phase")]
    reducers = [AllReduce(codec=c, algorithm=a, reduce="mean_contributors") for c, a in options]
    results = [r.reduce(x.clone()).result for r in reducers]
    results.append(AllReduce(codec=NonzeroCodec(), reduce="sum").reduce(x.clone(), weight=2.0).result)
    return results


def test_mean_of_contributors_and_sum() -> None:
    for outcome in run_ranks(_contributors_rank, 3):
        for result in outcome[:3]:
            assert torch.equal(result, torch.tensor([1.0, 0.0, 2.0, 4.5]))
        assert torch.equal(outcome[3], torch.tensor([6.0, 0.0, 4.0, 18.0]))
