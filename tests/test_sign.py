"""Sign codecs: oracles, identities, twins in plain Python, the same bytes at every kernel level."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from codec_checks import (
    adversarial,
    assert_levels_agree,
    assert_threads_and_streaming_do_not_show,
    decode,
    encode,
    gaussian,
    round_trip,
)
from lowcomm.compress import (
    EF14,
    HAS_INF,
    HAS_NAN,
    SATURATED,
    Sign,
    StoSign,
    available_levels,
    majority_vote,
    use_kernel_level,
)

VECTORS = json.loads((Path(__file__).parent / "compressors_vectors.json").read_text())
X8 = torch.tensor(VECTORS["x8"])
SCALES = ("l1", "l2", "two_means", "none")


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("block", [4, 8, 64, 128, 256, 1024])
def test_levels_agree(scale: str, block: int) -> None:
    codec = Sign(scale, block)
    for n in (block - 1, 3 * block + 5):
        assert_levels_agree(codec, n)


@pytest.mark.parametrize("tensor_bound", [False, True])
def test_stosign_levels_agree(tensor_bound: bool) -> None:
    for n in (1, 255, 1003):
        assert_levels_agree(StoSign(gaussian(n).abs() if tensor_bound else 1.5, seed=2**40), n)


def test_threads_and_streaming_do_not_show() -> None:
    assert_threads_and_streaming_do_not_show(Sign(), 2**20 + 4 * 256 + 77)


@pytest.mark.parametrize("name", ["l1", "l2"])
def test_oracles(name: str) -> None:
    vector = VECTORS[f"sign_{name}_B8"]
    for level in available_levels():
        with use_kernel_level(level):
            body, flags = encode(Sign(name, 8), X8)
            assert flags == 0
            assert bytes(body.tolist()).hex() == vector["body"]
            assert decode(Sign(name, 8), body, 8).tolist() == vector["decoded"]


def test_two_phase_oracle() -> None:
    """Workers and owner of a two-phase exchange with error feedback on both sides, two rounds."""
    vector = VECTORS["two_phase_sign_l1_B4_N2_EF"]
    codec, feedback = Sign(block=4), EF14()
    workers = [{"residual": torch.zeros(8)} for _ in range(2)]
    owners = [{"residual": torch.zeros(4)} for _ in range(2)]
    for expected in vector["rounds"]:
        decoded = []
        for rank, x in enumerate((vector["x0"], vector["x1"])):
            body = torch.empty(codec.nbytes(8), dtype=torch.uint8)
            _, workers[rank] = feedback.encode(codec, torch.tensor(x), workers[rank], body)
            assert body[:8].view(torch.float32).tolist() == expected["phase1"][rank]["scales"]
            decoded.append(decode(codec, body, 8))
        result = []
        for owner in range(2):
            mean = (decoded[0] + decoded[1])[4 * owner : 4 * owner + 4] / 2
            body = torch.empty(codec.nbytes(4), dtype=torch.uint8)
            assert mean.tolist() == expected["phase2"][owner]["mean"]
            _, owners[owner] = feedback.encode(codec, mean.clone(), owners[owner], body)
            assert body[:4].view(torch.float32).tolist() == expected["phase2"][owner]["scale"]
            result += decode(codec, body, 4).tolist()
        assert result == expected["result"]
        assert [w["residual"].tolist() for w in workers] == expected["worker_err"]
        assert [o["residual"].tolist() for o in owners] == expected["server_err"]


def test_majority_vote_oracle() -> None:
    vector = VECTORS["majority_vote"]
    votes = 1.0 - 2.0 * torch.tensor(vector["bits"])
    assert (majority_vote(votes) < 0).int().tolist() == vector["result"]


def test_majority_vote_ties() -> None:
    votes = torch.tensor([[1.0, -1.0, -1.0], [-1.0, -1.0, 1.0]])
    assert majority_vote(votes).tolist() == [1, -1, 1]
    assert majority_vote(votes, tie=-1.0).tolist() == [-1, -1, -1]
    assert majority_vote(votes, tie=0.0).tolist() == [0, -1, 0]
    assert majority_vote(votes, tie=torch.tensor([-1.0, 1.0, 1.0])).tolist() == [-1, -1, 1]
    assert majority_vote(torch.zeros(3, 2)).tolist() == [1, 1]  # zero encodes as +
    assert majority_vote(votes.to(torch.int8)).dtype == torch.int8


def test_majority_vote_outvotes_a_minority() -> None:
    honest, hostile = gaussian(1000).sign().expand(3, 1000), gaussian(2000, 1).view(2, 1000)
    assert torch.equal(majority_vote(torch.cat((honest, hostile))), honest[0])


def twin(x: np.ndarray, scale: str) -> list[float]:
    """One block in double precision."""
    negative = x < 0
    if scale == "two_means":
        plus = x[~negative].mean() if (~negative).any() else 0.0
        minus = x[negative].mean() if negative.any() else 0.0
        return [minus if bit else plus for bit in negative]
    s = {"l1": np.abs(x).mean(), "l2": math.sqrt((x * x).mean()), "none": 1.0}[scale]
    return [-s if bit else s for bit in negative]


@pytest.mark.parametrize("scale", SCALES)
def test_twin(scale: str) -> None:
    n, block = 4 * 256 + 100, 256
    for seed in range(20):
        x = gaussian(n, seed)
        rows = np.split(x.numpy().astype(np.float64), range(block, n, block))
        expected = [value for row in rows for value in twin(row, scale)]
        for level in available_levels():
            with use_kernel_level(level):
                torch.testing.assert_close(
                    round_trip(Sign(scale), x), torch.tensor(expected).float(), rtol=3e-7, atol=0
                )


def test_l1_error_identity() -> None:
    """The squared error is ||x||^2 - ||x||_1^2 / B, block by block."""
    for seed in range(5):
        x = gaussian(256, seed) * torch.rand(256).pow(3)
        error = (x.double() - round_trip(Sign(), x).double()).square().sum()
        expected = x.double().square().sum() - x.double().abs().sum() ** 2 / 256
        torch.testing.assert_close(error, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize(("scale", "expected"), [("l1", 0.363), ("l2", 0.403), ("two_means", 0.363)])
def test_error_on_gaussian_data(scale: str, expected: float) -> None:
    x = gaussian(2**17)
    error = (x - round_trip(Sign(scale), x)).square().sum() / x.square().sum()
    assert abs(float(error) / expected - 1) < 0.05


def test_two_means_never_loses_to_l1() -> None:
    for x in (gaussian(2560), gaussian(2560).exp(), gaussian(2560) + 1, gaussian(2560).pow(3)):
        errors = [float((x - round_trip(Sign(scale), x)).square().sum()) for scale in ("two_means", "l1")]
        assert errors[0] <= errors[1] * (1 + 1e-6)


@pytest.mark.parametrize("scale", ["l1", "two_means"])
def test_contraction(scale: str) -> None:
    n = 3 * 64 + 5
    for x in adversarial(n):
        if x.dtype != torch.float32 or not torch.isfinite(x).all() or float(x.abs().max()) > 1e18:
            continue
        for part in (*x.split(64),):
            delta = Sign(scale, 64).delta(part.numel())
            error = (part.double() - round_trip(Sign(scale, 64), part).double()).square().sum()
            assert delta is not None
            assert error <= (1 - delta) * part.double().square().sum() * (1 + 1e-6) + 1e-60
    assert Sign("l2").delta(256) is None


def test_a_mean_that_exceeds_float32_while_summing_does_not_overflow() -> None:
    x = torch.full((256,), -3.0e38)
    for level in available_levels():
        with use_kernel_level(level):
            for scale in ("l1", "l2", "two_means"):
                torch.testing.assert_close(round_trip(Sign(scale), x), x, rtol=1e-6, atol=0)


def test_powers_of_two_pass_through() -> None:
    x = gaussian(1000)
    for level in available_levels():
        with use_kernel_level(level):
            for scale in ("l1", "l2", "two_means"):
                for exponent in (-60, -30, 30, 60):
                    factor = 2.0**exponent
                    assert torch.equal(round_trip(Sign(scale), x * factor), round_trip(Sign(scale), x) * factor)


def test_non_finite_elements() -> None:
    x = gaussian(512)
    reference = x.clone()
    reference[[3, 300]] = 0.0
    x[3], x[300] = math.nan, -math.inf
    for level in available_levels():
        with use_kernel_level(level):
            for scale in SCALES:
                body, flags = encode(Sign(scale), x)
                assert flags == HAS_NAN | HAS_INF
                assert torch.equal(body, encode(Sign(scale), reference)[0])


def test_stosign_is_unbiased() -> None:
    bound = torch.tensor([1.0, 1.0, 2.0, 0.5, 0.0, 3.0, 1.0, 1.0])
    x = torch.tensor([0.5, -0.9, 0.1, 0.5, 0.0, -1.5, 1.0, -1.0])
    codec = StoSign(bound, seed=11)
    draws = torch.stack([round_trip(codec, x, step=step) for step in range(4096)])
    spread = (bound.square() - x.square()).sqrt()
    assert ((draws.mean(0) - x).abs() <= 5 * spread / 64 + 1e-7).all()
    assert (draws.abs() == bound).all()
    torch.testing.assert_close(draws.var(0), spread.square(), rtol=0.1, atol=1e-6)


def test_stosign_ranks_differ_and_repeat() -> None:
    codec, x = StoSign(4.0), gaussian(4096)
    bodies = [encode(codec, x, step=1, rank=rank, bucket=bucket)[0] for rank, bucket in ((0, 0), (1, 0), (0, 1))]
    assert not torch.equal(bodies[0], bodies[1])
    assert not torch.equal(bodies[0], bodies[2])
    assert torch.equal(bodies[0], encode(codec, x, step=1)[0])


def test_stosign_says_when_the_bound_is_too_small() -> None:
    x = torch.tensor([0.5, -2.0, 1.0])
    for level in available_levels():
        with use_kernel_level(level):
            assert encode(StoSign(1.0), x)[1] == SATURATED
            assert encode(StoSign(2.0), x)[1] == 0


def test_stosign_settings() -> None:
    bound = gaussian(9).abs()
    assert StoSign(bound) == StoSign(bound.clone())
    assert hash(StoSign(bound)) == hash(StoSign(bound.clone()))
    assert StoSign(bound) != StoSign(bound + 1)
    assert StoSign(1.0) != StoSign(1.0, seed=1)
    assert StoSign(bound).block == 9
    assert StoSign(1.0).unbiased
    with pytest.raises(ValueError, match="9 elements"):
        encode(StoSign(bound), gaussian(8))
    with pytest.raises(ValueError, match="finite and >= 0"):
        StoSign(-1.0)
    with pytest.raises(ValueError, match="finite and >= 0"):
        StoSign(torch.tensor([1.0, math.nan]))
    with pytest.raises(ValueError, match="float32 vector"):
        StoSign(torch.ones(2, 2))


def test_settings() -> None:
    with pytest.raises(ValueError, match="'l3'"):
        Sign("l3")  # type: ignore[arg-type]
    for block in (0, 2, 100, 2**15):
        with pytest.raises(ValueError, match=str(block)):
            Sign(block=block)
    assert Sign().config == "sign:block=256,scale=l1"
    assert [Sign(scale, 8).nbytes(20) for scale in SCALES] == [16, 16, 28, 4]
    assert Sign().bits_per_element(256) == 1 + 32 / 256


def test_sizes_and_padding() -> None:
    for n in (0, 1, 7, 8, 9, 255, 256, 257, 773):
        for level in available_levels():
            with use_kernel_level(level):
                body, _ = encode(Sign(), -gaussian(n).abs() - 1)
                codes = body[4 * -(-n // 256) :]
                assert codes.numel() == (-(-n // 8) + 3) // 4 * 4
                assert int(sum(bin(v).count("1") for v in codes.tolist())) == n  # unused bits and bytes are zero


def test_errors_leave_no_trace() -> None:
    codec, x = Sign(), gaussian(300)
    residual, candidate = torch.zeros(300), torch.full((300,), 5.0)
    with pytest.raises(ValueError, match="uint8"):
        codec.encode(x, torch.empty(10, dtype=torch.uint8))
    with pytest.raises(ValueError, match="float32"):
        codec.decode(torch.zeros(codec.nbytes(300), dtype=torch.uint8), torch.empty(300, dtype=torch.float64))
    with pytest.raises(ValueError, match="residual"):
        codec.encode_feedback(x, residual[:299], candidate, torch.empty(codec.nbytes(300), dtype=torch.uint8))
    assert (candidate == 5).all()
