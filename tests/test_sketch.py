"""Linear sketches: published table, linearity, estimates, FetchSGD, subsampled Hadamard transforms."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lowcomm.compress import HAS_INF, HAS_NAN, SRHT, CountSketch, available_levels, fetchsgd_step, use_kernel_level
from lowcomm.compress.sketch import add_in_turns, hadamard, hash_row
from torch import Tensor

VECTORS: dict[str, Any] = json.loads((Path(__file__).parent / "compressors_vectors.json").read_text())
levels = pytest.mark.parametrize("level", available_levels())
CPU = torch.device("cpu")


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def table_of(codec: CountSketch, x: Tensor, **place: int) -> Tensor:
    body = torch.empty(codec.nbytes(x.numel()), dtype=torch.uint8)
    assert codec.encode(x, body, **place) == 0
    return body.view(torch.float32)


def estimate(codec: CountSketch, table: Tensor, n: int, **place: int) -> Tensor:
    out = torch.empty(n)
    codec.decode(table.view(torch.uint8), out, **place)
    return out


@levels
def test_published_table(level: str) -> None:
    case = VECTORS["countsketch_r3_c8_seed42"]
    x, codec = torch.tensor(VECTORS["x8"]), CountSketch(rows=3, density=3.0, seed=42)
    for j, key in enumerate(codec._keys(0)):
        cells, signs = hash_row(8, 8, key, CPU)
        assert cells.tolist() == case["buckets"][j] and signs.tolist() == case["signs"][j]
    with use_kernel_level(level):
        table = table_of(codec, x)
        assert table.view(3, 8).tolist() == case["table"]
        assert estimate(codec, table, 8).tolist() == case["median_estimates"]


@pytest.mark.parametrize("rows", [1, 2, 4, 5, 7])
@pytest.mark.parametrize("n", [1, 7, 512, 513, 2000])
def test_all_levels_agree_bit_for_bit(rows: int, n: int) -> None:
    codec, x = CountSketch(rows=rows, density=0.3, seed=rows), gaussian(n) * gaussian(n, seed=1).exp()
    x[::5] = -0.0
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        results = []
        for level in available_levels():
            with use_kernel_level(level):
                table = table_of(codec, x.to(dtype), bucket=3)
                results.append((table.clone(), estimate(codec, table, n, bucket=3)))
        for table, estimates in results[1:]:
            assert torch.equal(table.view(torch.int32), results[0][0].view(torch.int32))
            assert torch.equal(estimates.view(torch.int32), results[0][1].view(torch.int32))


def test_cells_are_summed_in_ascending_order() -> None:
    x = torch.tensor([1e8, 1.0, -1e8, 1.0, 0.5, 1e8, 1.0, -1e8] * 8)
    codec = CountSketch(rows=2, density=0.1)
    expected = torch.zeros(2, codec.columns(64))
    for j, key in enumerate(codec._keys(0)):
        cells, signs = hash_row(64, codec.columns(64), key, CPU)
        for i in range(64):
            expected[j, cells[i]] += signs[i] * x[i]
        in_turns = torch.zeros(codec.columns(64))
        add_in_turns(in_turns, cells, signs * x)
        assert torch.equal(in_turns, expected[j])
    for level in available_levels():
        with use_kernel_level(level):
            assert torch.equal(table_of(codec, x), expected.view(-1))


def test_sketches_add_up() -> None:
    codec, n = CountSketch(rows=5, density=0.5), 1000
    x, y = (torch.randint(-8, 9, (n,), generator=torch.Generator().manual_seed(s)).float() for s in (0, 1))
    total = table_of(codec, x, rank=0, step=4) + table_of(codec, y, rank=1, step=5)
    assert torch.equal(total, table_of(codec, x + y))
    assert codec.linear and not codec.requantizable
    assert not torch.equal(table_of(codec, x), table_of(codec, x, bucket=1))
    assert codec.nbytes(n) == 4 * 5 * 100 and codec.nbytes(0) == 0


def test_large_elements_are_found() -> None:
    n = 20000
    x = gaussian(n) * 0.01
    heavy = torch.randperm(n, generator=torch.Generator().manual_seed(2))[:20]
    x[heavy] = 5.0
    codec = CountSketch(rows=7, density=0.7)
    got = estimate(codec, table_of(codec, x), n)
    assert set(got.abs().topk(20).indices.tolist()) == set(heavy.tolist())
    assert float((got - x).abs().max()) <= 3 * float(x.norm()) / math.sqrt(codec.columns(n))


@pytest.mark.parametrize("rows", [1, 4, 5])
def test_estimates_are_unbiased(rows: int) -> None:
    x, num_seeds = gaussian(64), 300
    estimates = []
    for seed in range(num_seeds):
        codec = CountSketch(rows=rows, density=0.25 * rows, seed=seed)
        estimates.append(estimate(codec, table_of(codec, x), 64))
    errors = (torch.stack(estimates).mean(0) - x).abs()
    variance = torch.stack(estimates).var(0)
    assert bool((errors < 5 * (variance / num_seeds).sqrt()).all())
    share = float(variance.sum()) / float(x.norm() ** 2)
    assert codec.unbiased and codec.columns(64) == 16
    if rows == 1:
        assert math.isclose(share, codec.omega(64) or 0.0, rel_tol=0.1)
    else:
        assert share < 2 and codec.omega(64) is None  # the median is better than one row


@levels
def test_non_finite_elements_count_as_zero(level: str) -> None:
    x, clean = gaussian(600), gaussian(600)
    x[5], x[599], clean[5], clean[599] = math.nan, -math.inf, 0.0, 0.0
    codec = CountSketch()
    body = torch.empty(codec.nbytes(600), dtype=torch.uint8)
    with use_kernel_level(level):
        assert codec.encode(x, body) == HAS_NAN | HAS_INF
        assert torch.equal(body.view(torch.float32), table_of(codec, clean))
        body.view(torch.float32)[2] = math.nan
        with pytest.raises(ValueError, match="body is damaged"):
            codec.decode(body, torch.empty(600))


def test_empty_vector() -> None:
    codec, body = CountSketch(), torch.empty(0, dtype=torch.uint8)
    for level in available_levels():
        with use_kernel_level(level):
            assert codec.encode(torch.empty(0), body) == 0
            codec.decode(body, torch.empty(0))


def test_fetchsgd_step_by_step() -> None:
    """Against dense momentum and error feedback: with a wide sketch the estimates are exact."""
    codec, n, k = CountSketch(rows=5, density=500.0), 30, 4
    tables = torch.zeros(codec.rows * codec.columns(n)), torch.zeros(codec.rows * codec.columns(n))
    velocity, error = torch.zeros(n), torch.zeros(n)
    for seed in range(15):
        g = gaussian(n, seed=seed)
        positions, values, *tables = fetchsgd_step(codec, table_of(codec, g), *tables, n=n, k=k, momentum=0.9)  # type: ignore[assignment]
        velocity = 0.9 * velocity + g
        error = error + velocity
        chosen = error.abs().topk(k).indices.sort().values
        assert positions.tolist() == chosen.tolist()
        assert torch.allclose(values, error[chosen], atol=1e-4)
        velocity[chosen] = 0
        error[chosen] = 0


def test_fetchsgd_converges_on_a_sparse_problem() -> None:
    """Three ranks, half the cells, heavy coordinates: the distance shrinks although no rank sends a position."""
    n, codec = 1000, CountSketch(rows=5, density=0.5)
    target = torch.zeros(n)
    target[torch.randperm(n, generator=torch.Generator().manual_seed(3))[:10]] = gaussian(10).sign() * 3
    x, momentum, error = torch.zeros(n), *(torch.zeros(codec.rows * codec.columns(n)) for _ in range(2))
    for step in range(40):
        tables = [table_of(codec, x - target + 0.01 * gaussian(n, seed=3 * step + rank)) for rank in range(3)]
        mean = torch.stack(tables).mean(0)
        positions, values, momentum, error = fetchsgd_step(codec, mean, momentum, error, n=n, k=10, momentum=0.5)
        x[positions] -= 0.2 * values
    assert float((x - target).norm()) < 0.2 * float(target.norm())


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: CountSketch(rows=0), "rows must be 1 to 63 but is: 0"),
        (lambda: CountSketch(density=0.0), "density must be positive but is: 0.0"),
    ],
)
def test_wrong_settings_are_refused(build: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def srht(codec: SRHT, x: Tensor, **place: int) -> Tensor:
    body, out = torch.empty(codec.nbytes(x.numel()), dtype=torch.uint8), torch.empty(x.numel())
    codec.encode(x, body, **place)
    codec.decode(body, out, **place)
    return out


def test_hadamard_matrix() -> None:
    h = hadamard(torch.eye(8))
    expected = [[(-1.0) ** bin(i & j).count("1") for j in range(8)] for i in range(8)]
    assert h.tolist() == expected
    for size in (1, 2, 32, 64, 128, 4096):
        x = gaussian(3, size)
        results = []
        for level in available_levels():
            with use_kernel_level(level):
                results.append(hadamard(x))
        assert torch.allclose(hadamard(results[0]) / size, x, atol=1e-4)
        assert all(torch.equal(result.view(torch.int32), results[0].view(torch.int32)) for result in results)


@pytest.mark.parametrize("n", [0, 1, 2, 5, 15, 16, 17, 100])
def test_srht_of_any_length(n: int) -> None:
    x = gaussian(n)
    assert torch.allclose(srht(SRHT(density=1.0, chunk=16), x), x, atol=1e-5)
    codec = SRHT(density=0.25, chunk=16)
    rest = n % 16
    last = max(1, round(0.25 * (1 << (rest - 1).bit_length()))) if rest else 0
    assert codec.nbytes(n) == 4 * (n // 16 * 4 + last)
    assert srht(codec, x).shape == (n,)


def test_srht_is_linear_and_shared() -> None:
    codec, x, y = SRHT(density=0.25, chunk=64), gaussian(300), gaussian(300, seed=1)
    bodies = [torch.empty(codec.nbytes(300), dtype=torch.uint8) for _ in range(2)]
    for rank, vector in enumerate((x, y)):
        codec.encode(vector, bodies[rank], step=3, rank=rank, bucket=2)
    total = bodies[0].view(torch.float32) + bodies[1].view(torch.float32)
    out = torch.empty(300)
    codec.decode(total.view(torch.uint8), out, step=3, rank=9, bucket=2)
    assert torch.allclose(out, srht(codec, x + y, step=3, bucket=2), atol=1e-4)
    assert not torch.allclose(out, srht(codec, x + y, step=4, bucket=2), atol=0.1)


def test_srht_is_unbiased_with_the_stated_variance() -> None:
    x, chunks = gaussian(64), 100  # every chunk has signs of its own
    x[7] = 20.0
    codec = SRHT(density=0.25, chunk=64)
    rounds = [srht(codec, x.repeat(chunks), step=step).view(chunks, 64) for step in range(20)]
    estimates = torch.cat(rounds)
    spread = (estimates.var(0) / len(estimates)).sqrt()
    assert bool(((estimates.mean(0) - x).abs() < 5 * spread).all())
    variance = float(((estimates - x) ** 2).sum(1).mean()) / float(x.norm() ** 2)
    assert math.isclose(variance, codec.omega(64), rel_tol=0.05) and codec.omega(64) == 3
    assert codec.unbiased and codec.delta(64) is None


def test_srht_contractive_form_projects() -> None:
    x, codec = gaussian(256), SRHT(density=0.25, chunk=256, contractive=True)
    lost = []
    for step in range(30):
        got = srht(codec, x, step=step)
        assert torch.allclose(srht(codec, got, step=step), got, atol=1e-4)
        lost.append(float((x - got).norm() ** 2 / x.norm() ** 2))
        assert math.isclose(float(x @ got), float(got @ got), rel_tol=1e-4)
    assert abs(sum(lost) / 30 - 0.75) < 0.03
    assert codec.delta(256) == 0.25 and codec.omega(256) is None and not codec.unbiased


def test_srht_hostile_values() -> None:
    codec = SRHT(chunk=64)
    x, clean = gaussian(100), gaussian(100)
    x[3], clean[3] = math.nan, 0.0
    body, expected = (torch.empty(codec.nbytes(100), dtype=torch.uint8) for _ in range(2))
    assert codec.encode(x, body) == HAS_NAN and codec.encode(clean, expected) == 0
    assert torch.equal(body, expected)
    assert codec.encode(torch.full((100,), 3e38), body) == HAS_INF
    assert bool(torch.isfinite(body.view(torch.float32)).all())
    assert codec.encode(torch.zeros(100), body) == 0 and not body.any()
    body.view(torch.float32)[0] = math.inf
    with pytest.raises(ValueError, match="body is damaged"):
        codec.decode(body, torch.empty(100))
    with pytest.raises(ValueError, match="power of two"):
        SRHT(chunk=48)
    with pytest.raises(ValueError, match="density must be"):
        SRHT(density=1.5)
