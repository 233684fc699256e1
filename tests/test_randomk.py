"""Random-k: shared positions, bounds on average, sums of bodies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from codec_checks import adversarial, encode, gaussian, round_trip
from lowcomm.compress import HAS_INF, HAS_NAN, RandomK
from lowcomm.sync import AllReduce
from ranks import run_ranks

METHODS = ("permuted", "stratified", "block")


def test_permutation_is_the_documented_one() -> None:
    codec = RandomK(density=1.0, seed=42)
    assert codec.positions(10, 7, 0).tolist() == [2, 4, 0, 3, 1, 9, 7, 6, 5, 8]
    part = RandomK(density=0.008, seed=42)
    assert part.positions(1000, 7, 0).tolist() == [637, 826, 771, 187, 743, 620, 673, 200]


@pytest.mark.parametrize("method", METHODS)
def test_positions_differ_and_depend_on_round_and_bucket_only(method: str) -> None:
    for n in (1, 2, 7, 64, 1000, 4097):
        for density in (1e-6, 0.1, 0.5, 1.0):
            codec = RandomK(density, method=method)
            positions = codec.positions(n, 3, 1)
            assert positions.numel() == codec.kept(n) == positions.unique().numel()
            assert int(positions.min()) >= 0 and int(positions.max()) < n
    codec = RandomK(0.1, method=method)
    x = gaussian(1000)
    assert torch.equal(encode(codec, x, step=1, rank=0)[0], encode(codec, x, step=1, rank=5)[0])
    assert not torch.equal(codec.positions(1000, 1, 0), codec.positions(1000, 2, 0))
    assert not torch.equal(codec.positions(1000, 1, 0), codec.positions(1000, 1, 1))


@pytest.mark.parametrize("method", METHODS)
def test_bounds_hold_on_average(method: str) -> None:
    x = gaussian(40, 2)
    plain, scaled = RandomK(0.25, method=method), RandomK(0.25, contractive=False, method=method)
    kept = torch.stack([round_trip(plain, x, step=step) for step in range(800)]).double()
    lost = (kept - x).square().sum(1).mean() / x.double().square().sum()
    assert lost.item() == pytest.approx(0.75, abs=0.03)
    assert torch.equal(round_trip(scaled, x, step=5), 4 * kept[5].float())
    draws = 4 * kept
    error = (draws.mean(0) - x).abs()
    assert bool((error <= 5 * draws.std(0) / 28 + 1e-6).all())
    variance = (draws - x).square().sum(1).mean() / x.double().square().sum()
    omega = scaled.omega(40)
    assert omega == 3.0
    assert variance.item() == pytest.approx(omega, rel=0.12)
    assert scaled.unbiased and not plain.unbiased


@pytest.mark.parametrize("method", METHODS)
def test_any_values_and_lengths(method: str) -> None:
    codec = RandomK(0.3, method=method)
    for n in (*range(0, 20), 100):
        for x in adversarial(n):
            body, _ = encode(codec, x)
            assert body.numel() == codec.nbytes(n)
            assert bool(torch.isfinite(body.view(torch.float32)).all())
            if x.dtype == torch.float32:
                candidate = torch.empty(n)
                found = codec.encode_feedback(x, torch.zeros(n), candidate, body)
                assert bool(torch.isfinite(candidate).all())
                assert bool(found & (HAS_NAN | HAS_INF)) == (not bool(torch.isfinite(x).all()))


def _mean(rank: int, world_size: int) -> Any:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(rank))
    reducer = AllReduce(codec=RandomK(0.1), feedback=None)
    work = reducer.reduce(x.clone(), round=4)
    return x, work.result.clone(), work.wait().payload_bytes


def test_bodies_are_summed() -> None:
    results = run_ranks(_mean, 3)
    positions = RandomK(0.1).positions(1000, 4, 0)
    mean = torch.stack([x for x, _, _ in results]).mean(0)
    for _, result, sent in results:
        assert torch.equal(result, results[0][1])
        torch.testing.assert_close(result[positions], mean[positions], rtol=1e-6, atol=1e-7)
        assert int((result != 0).sum()) == 100
        assert sent == 2 * 2 * 4 * 100 // 3


@pytest.mark.parametrize("options", [{"density": 0.0}, {"density": 1.5}, {"method": "sorted"}])
def test_bad_settings(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        RandomK(**options)
