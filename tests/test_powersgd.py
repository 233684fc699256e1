"""PowerSGD: published steps, projection identities, several ranks, degenerate matrices, the codec's bytes."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lowcomm.compress import (
    EF14,
    HAS_INF,
    HAS_NAN,
    PowerIteration,
    PowerSGD,
    available_levels,
    effective_rank,
    orthonormalize,
    use_kernel_level,
)
from lowcomm.compress.powersgd import left_factor, reconstruct, right_factor
from ranks import run_ranks
from reference_codecs import RoundTo
from torch import Tensor

VECTOR: dict[str, Any] = json.loads((Path(__file__).parent / "compressors_vectors.json").read_text())["powersgd_r1"]
SHAPES = ((24, 20), (7,), (), (12, 3, 5), (0, 4), (3, 4), (30, 16))
SIZE = 24 * 20 + 7 + 1 + 12 * 15 + 12 + 30 * 16
CODEC = PowerSGD(rank=2, shapes=SHAPES)


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def exchange(
    codec: PowerSGD, messages: list[Tensor], warm: Tensor | None = None
) -> tuple[Tensor, list[Tensor], Tensor]:
    """(update, residual of every rank, right factors) of one round."""
    ranks = [PowerIteration(codec, message, warm) for message in messages]
    left = torch.stack([rank.left() for rank in ranks]).mean(0)
    right = torch.stack([rank.right(left) for rank in ranks]).mean(0)
    updates = [rank.finish(right) for rank in ranks]
    assert all(torch.equal(update, updates[0]) for update in updates)
    return updates[0], [rank.residual() for rank in ranks], ranks[0].warm


def decode(codec: PowerSGD, x: Tensor, **place: int) -> Tensor:
    body = torch.empty(codec.nbytes(x.numel()), dtype=torch.uint8)
    codec.encode(x, body, **place)
    out = torch.empty(x.numel())
    codec.decode(body, out)
    return out


def test_published_steps() -> None:
    matrices = [torch.tensor(VECTOR[name]) for name in ("M1", "M2")]
    left = torch.stack([left_factor(m, torch.tensor(VECTOR["Q"])) for m in matrices]).mean(0)
    assert left.tolist() == VECTOR["P"]
    basis = orthonormalize(left)
    right = torch.stack([right_factor(m, basis) for m in matrices]).mean(0)
    for got, name in ((basis, "P_hat"), (right, "Q_new"), (reconstruct(basis, right), "M_hat")):
        assert torch.allclose(got, torch.tensor(VECTOR[name]), rtol=1e-6)

    codec = PowerSGD(rank=1, min_rate=1, shapes=((2, 8),))
    padded = [torch.cat((m, torch.zeros(2, 6)), dim=1).reshape(-1) for m in matrices]
    update, _, warm = exchange(codec, padded, torch.tensor([1.0] + [0.0] * 7))
    assert torch.allclose(update.view(2, 8)[:, :2], torch.tensor(VECTOR["M_hat"]), rtol=1e-6)
    assert torch.allclose(warm[:2], torch.tensor(VECTOR["Q_new"]).view(-1), rtol=1e-6)


def test_one_rank_projects() -> None:
    m = gaussian(40, 30)
    x, codec = m.reshape(-1), PowerSGD(rank=3, shapes=((40, 30),))
    update, (residual,), warm = exchange(codec, [x])
    basis = orthonormalize(left_factor(m, codec.start(1200).view(30, 3)))
    assert torch.allclose(basis.t() @ basis, torch.eye(3), atol=1e-6)
    assert torch.allclose(update.view(40, 30), basis @ (basis.t() @ m), atol=1e-5)
    assert math.isclose(float((x - update).norm() ** 2), float(x.norm() ** 2 - update.norm() ** 2), rel_tol=1e-5)
    assert torch.allclose(update + residual, x, atol=1e-5)
    assert warm.shape == (90,)


@pytest.mark.parametrize("rule", ["local", "mean"])
def test_ranks_project_the_mean_and_keep_the_rest(rule: str) -> None:
    codec = replace(CODEC, residual=rule)
    messages = [gaussian(SIZE, seed=rank) for rank in range(3)]
    mean = torch.stack(messages).mean(0)
    update, residuals, warm = exchange(codec, messages)
    alone, _, _ = exchange(codec, [mean])
    assert torch.allclose(update, alone, atol=1e-5)
    assert torch.allclose(torch.stack(residuals).mean(0) + update, mean, atol=1e-5)
    for start, stop in ((480, 488),):  # vectors and scalars are sent exactly
        assert torch.equal(update[start:stop], mean[start:stop])
        assert all(not residual[start:stop].any() for residual in residuals)
    again, _, _ = exchange(codec, messages, warm)
    assert float((again - mean).norm()) < float((update - mean).norm())  # power iteration goes on from the warm start


def test_local_residual_is_the_smaller_one() -> None:
    messages = [gaussian(SIZE, seed=rank) for rank in range(4)]
    norms = [
        sum(float(residual.norm() ** 2) for residual in exchange(replace(CODEC, residual=rule), messages)[1])
        for rule in ("local", "mean")
    ]
    assert norms[0] < norms[1]


def test_low_rank_matrices_are_recovered() -> None:
    for true_rank in (0, 1, 2, 3):
        m = gaussian(24, true_rank) @ gaussian(true_rank, 20, seed=1) if true_rank else torch.zeros(24, 20)
        codec = PowerSGD(rank=3, shapes=((24, 20),), min_rate=1)
        got = decode(codec, m.reshape(-1))
        assert torch.allclose(got, m.reshape(-1), atol=1e-5), true_rank


def test_rounding_noise_is_no_direction() -> None:
    m = gaussian(50, 1)
    columns = m @ torch.tensor([[1.0, -2.0, 1 / 3]])
    basis = orthonormalize(torch.cat((columns, gaussian(50, 1, seed=1)), dim=1))
    assert not basis[:, 1:3].any()
    assert torch.allclose(basis[:, [0, 3]].t() @ basis[:, [0, 3]], torch.eye(2), atol=1e-6)
    assert not orthonormalize(torch.zeros(5, 2)).any()
    for scale in (1e-30, 1e30):
        extreme = orthonormalize(gaussian(50, 3) * scale)
        assert torch.allclose(extreme.t() @ extreme, torch.eye(3), atol=1e-6)


def test_a_zero_round_does_not_kill_the_warm_start() -> None:
    x = gaussian(SIZE)
    _, _, warm = exchange(CODEC, [torch.zeros(SIZE)])
    assert not warm.any()
    update, _, _ = exchange(CODEC, [x], warm)
    assert torch.equal(update, exchange(CODEC, [x])[0]) and update.any()


@pytest.mark.parametrize(("rows", "cols", "rank"), [(1, 1, 1), (3, 7, 2), (70, 33, 5), (5, 2100, 3)])
def test_products_have_the_same_bits_at_every_level(rows: int, cols: int, rank: int) -> None:
    left, right = gaussian(rows, rank), gaussian(cols, rank, seed=1)
    left[0] = 0.0
    right[0] = -1.0
    results = []
    for level in available_levels():
        with use_kernel_level(level):
            results.append(reconstruct(left, right))
    assert torch.allclose(results[0], left @ right.t(), atol=1e-5)
    assert all(torch.equal(result.view(torch.int32), results[0].view(torch.int32)) for result in results)


def test_effective_rank() -> None:
    assert effective_rank(torch.zeros(5, 3)) == 0
    singular = torch.tensor([3.0, 2.0, 1.0])  # energies 9, 4, 1 of 14
    right = torch.linalg.qr(gaussian(30, 3)).Q * singular @ torch.linalg.qr(gaussian(3, 3, seed=1)).Q
    ranks = [effective_rank(right, energy) for energy in (0.6, 9.1 / 14, 0.92, 0.95, 1.0)]
    assert ranks == [1, 2, 2, 3, 3]


def test_body_layout_and_size() -> None:
    x = gaussian(SIZE)
    left, right_size, exact = 2 * (24 + 12 + 30), 2 * (20 + 15 + 16), 7 + 1 + 12  # 3 x 4 is too small to gain
    assert CODEC.nbytes(SIZE) == 4 * (left + right_size + exact)
    body = torch.empty(CODEC.nbytes(SIZE), dtype=torch.uint8)
    flags, right = CODEC.encode_from(x, CODEC.start(SIZE), body)
    message = body.view(torch.float32)
    assert flags == 0 and torch.equal(message[left:-exact], right)
    assert torch.equal(message[-exact:], torch.cat((x[480:488], x[668:680])))
    basis = message[:48].view(24, 2)
    assert torch.allclose(basis.t() @ basis, torch.eye(2), atol=1e-6)
    out = torch.empty(SIZE)
    CODEC.decode(body, out)
    assert torch.equal(out[:480].view(24, 20), reconstruct(basis, message[left : left + 40].view(20, 2)))
    assert torch.equal(out, decode(CODEC, x))


@pytest.mark.parametrize("n", [0, 1, 7, 24, 25, 63, 100, 4097])
def test_flat_vectors_of_any_length(n: int) -> None:
    codec, x = PowerSGD(rank=2), gaussian(n)
    got = decode(codec, x)
    assert float((x - got).norm()) <= float(x.norm())
    side = math.isqrt(n)
    if n < 100:  # 4 (9 + 11) >= 99: too small to gain
        assert torch.equal(got, x) and codec.nbytes(n) == 4 * n
    else:
        assert torch.equal(got[side * (n // side) :], x[side * (n // side) :])
    if n == 4097:
        assert codec.nbytes(n) == 4 * (2 * (64 + 64) + 1)


def test_random_start_is_shared_and_changes() -> None:
    x = gaussian(SIZE)
    assert torch.equal(decode(CODEC, x, step=3, rank=0), decode(CODEC, x, step=3, rank=1))
    assert not torch.equal(decode(CODEC, x, step=3), decode(CODEC, x, step=4))
    assert not torch.equal(CODEC.start(SIZE), CODEC.start(SIZE, bucket=1))
    assert float(CODEC.start(SIZE).abs().max()) <= 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_inputs_are_widened(dtype: torch.dtype) -> None:
    x = gaussian(SIZE).to(dtype)
    assert torch.equal(decode(CODEC, x), decode(CODEC, x.float()))


def test_feedback_delivers_everything() -> None:
    x, feedback = gaussian(SIZE), EF14()
    state, total = feedback.init(SIZE, torch.device("cpu")), torch.zeros(SIZE)
    body = torch.empty(CODEC.nbytes(SIZE), dtype=torch.uint8)
    for step in range(20):
        _, state = feedback.encode(CODEC, x.clone(), state, body, step=step)
        out = torch.empty(SIZE)
        CODEC.decode(body, out)
        total += out
        assert torch.allclose(total + state["residual"], x * (step + 1), atol=1e-3)
    assert float((total / 20 - x).norm() / x.norm()) < 0.4


def test_quantized_factors() -> None:
    inner = RoundTo(2.0**-10)
    codec = PowerSGD(rank=2, shapes=SHAPES, factors=inner)
    x = gaussian(SIZE)
    plain, got = decode(CODEC, x), decode(codec, x)
    assert codec.nbytes(SIZE) == inner.nbytes(CODEC.nbytes(SIZE) // 4)
    assert 0 < float((got - plain).abs().max()) < 0.05
    assert "unit=0.0009765625" in codec.config and codec.config != CODEC.config


@pytest.mark.parametrize("scale", [1e-40, 1e30, 3e38])
def test_extreme_magnitudes_stay_finite(scale: float) -> None:
    x = (gaussian(SIZE).clamp(-1, 1) * scale).nan_to_num()
    got = decode(CODEC, x)
    assert bool(torch.isfinite(got).all())
    if scale == 1e30:
        assert torch.allclose(got / scale, decode(CODEC, x / scale), atol=1e-4)


def test_non_finite_elements_count_as_zero() -> None:
    x = gaussian(SIZE)
    clean = x.clone()
    x[5], x[700], clean[5], clean[700] = math.nan, -math.inf, 0.0, 0.0
    body, expected = (torch.empty(CODEC.nbytes(SIZE), dtype=torch.uint8) for _ in range(2))
    assert CODEC.encode(x, body) == HAS_NAN | HAS_INF
    CODEC.encode(clean, expected)
    assert torch.equal(body, expected)
    iteration = PowerIteration(CODEC, x)
    iteration.finish(iteration.right(iteration.left()))
    assert iteration.flags == HAS_NAN | HAS_INF and bool(torch.isfinite(iteration.residual()).all())
    body.view(torch.float32)[3] = math.nan
    with pytest.raises(ValueError, match="body is damaged"):
        CODEC.decode(body, torch.empty(SIZE))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: PowerSGD(rank=0), "rank must be at least 1 but is: 0"),
        (lambda: PowerSGD(min_rate=0.5), "min_rate must be at least 1"),
        (lambda: PowerSGD(residual="global"), "'local' or 'mean' but is: 'global'"),
        (lambda: CODEC.nbytes(5), "1160 elements but the vector has 5"),
        (lambda: CODEC.encode(torch.zeros(SIZE), torch.zeros(4, dtype=torch.uint8)), "contiguous uint8 bytes"),
    ],
)
def test_wrong_use_is_refused(build: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def test_shapes_come_from_the_fragment() -> None:
    assert PowerSGD(rank=2).for_shapes(SHAPES) == CODEC
    assert CODEC.block > SIZE and not CODEC.requantizable and CODEC.delta(SIZE) is None


def _average_in_two_sums(rank: int, world_size: int) -> tuple[Tensor, Tensor, int]:
    from lowcomm.sync import AllReduce

    dense, warm, residual = AllReduce(), None, torch.zeros(SIZE)
    for step in range(3):
        iteration = PowerIteration(CODEC, residual + gaussian(SIZE, seed=10 * step + rank), warm)
        left, sent = iteration.left(), 0
        for bucket, vector in ((0, left), (1, None)):
            message = vector if vector is not None else iteration.right(left)
            work = dense.reduce(message, bucket=bucket, round=step)
            sent += work.wait().elements
            left = work.result if bucket == 0 else left
            right = work.result
        update = iteration.finish(right)
        residual, warm = iteration.residual(), iteration.warm
    return update, residual, sent


def test_two_sums_between_processes() -> None:
    results = run_ranks(_average_in_two_sums, 2)
    warm, residuals = None, [torch.zeros(SIZE), torch.zeros(SIZE)]
    for step in range(3):
        messages = [residuals[rank] + gaussian(SIZE, seed=10 * step + rank) for rank in range(2)]
        update, residuals, warm = exchange(CODEC, messages, warm)
    assert torch.equal(results[0][0], results[1][0])
    for rank in range(2):
        assert torch.allclose(results[rank][0], update, atol=1e-4)
        assert torch.allclose(results[rank][1], residuals[rank], atol=1e-4)
        assert 4 * results[rank][2] == CODEC.nbytes(SIZE)
