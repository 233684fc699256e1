"""DRIVE and EDEN: oracles, exact identities, expected errors, the same bytes at every kernel level."""

from __future__ import annotations

import json
import math
from pathlib import Path

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
from lowcomm.compress import HAS_INF, HAS_NAN, SATURATED, Eden, available_levels, use_kernel_level
from lowcomm.compress import eden as module
from torch import Tensor

VECTORS = json.loads((Path(__file__).parent / "compressors_vectors.json").read_text())
MODES = ("biased", "unbiased", "matched")
BITS = (1, 2, 3, 4)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("block", "n"), [(8, 3), (8, 29), (64, 197), (512, 512 + 200)])
def test_levels_agree(bits: int, block: int, n: int) -> None:
    assert_levels_agree(Eden(bits, MODES[(bits + n) % 3], block, seed=2**40), n)


def test_levels_agree_at_the_usual_size() -> None:
    assert_levels_agree(Eden(1), 4096 + 300)


def test_threads_and_streaming_do_not_show() -> None:
    assert_threads_and_streaming_do_not_show(Eden(1), 2**20 + 4096 + 77)


def test_large_blocks() -> None:
    x = gaussian(65536 + 9000)
    for bits, block in ((1, 65536), (4, 32768), (1, 8192)):
        outcomes = []
        for level in available_levels()[-2:]:
            with use_kernel_level(level):
                body, _ = encode(Eden(bits, block=block), x)
                outcomes.append((body, decode(Eden(bits, block=block), body, x.numel())))
        assert all(torch.equal(a, b) for other in outcomes[1:] for a, b in zip(outcomes[0], other, strict=True))


def with_diagonal(monkeypatch: pytest.MonkeyPatch, diagonal: list[float]) -> None:
    monkeypatch.setattr(module, "rademacher", lambda n, **_: torch.tensor(diagonal)[:n])


@pytest.mark.parametrize(("mode", "scale", "key"), [("unbiased", 3.0, "unbiased"), ("biased", 2.5, "biased")])
def test_drive_oracle(mode: str, scale: float, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    vector = VECTORS["drive_p4"]
    with_diagonal(monkeypatch, vector["diag"])
    with use_kernel_level("torch"):
        body, flags = encode(Eden(1, mode), torch.tensor(vector["x"]))
        assert flags == 0
        assert body[:4].view(torch.float32).item() == scale
        assert [body[4].item() >> i & 1 for i in range(4)] == vector["bits"]
        assert decode(Eden(1, mode), body, 4).tolist() == vector[f"decoded_{key}"]
    if mode == "unbiased":
        assert bytes(body.tolist()).hex() == vector["body_unbiased"]


def test_eden_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    vector = VECTORS["eden2_p4"]
    with_diagonal(monkeypatch, vector["diag"])
    with use_kernel_level("torch"):
        body, _ = encode(Eden(2, "unbiased"), torch.tensor(vector["x"]))
        assert [body[4].item() >> 2 * i & 3 for i in range(4)] == vector["codes"]
        assert body[:4].view(torch.float32).item() == pytest.approx(vector["S"], rel=1e-6)
        assert decode(Eden(2, "unbiased"), body, 4).tolist() == pytest.approx(vector["decoded"], rel=1e-6)


def vectors(n: int) -> list[Tensor]:
    heavy = gaussian(n, 2) / gaussian(n, 3).abs().clamp(min=0.05)
    sparse = torch.zeros(n)
    sparse[:: max(1, n // 5)] = 1.0
    return [gaussian(n), gaussian(n, 1).pow(3), heavy, sparse, torch.ones(n), torch.linspace(0, 1, n)]


def dot(a: Tensor, b: Tensor) -> float:
    return float(a.double() @ b.double())


@pytest.mark.parametrize("bits", BITS)
def test_identities(bits: int) -> None:
    """Exact for every x and every rotation, up to rounding; block by block, hence for the whole vector."""
    for n in (1, 64, 4096 + 128):  # no padding, which would take its share of C(x)
        for x in vectors(n):
            energy = dot(x, x)
            c = round_trip(Eden(bits, "unbiased"), x, step=4)
            assert dot(x, c) == pytest.approx(energy, rel=1e-5)
            c = round_trip(Eden(bits, "biased"), x, step=4)
            assert dot(x - c, x - c) == pytest.approx(energy - dot(c, c), rel=1e-5, abs=1e-6 * energy)
            c = round_trip(Eden(bits, "matched"), x, step=4)
            assert dot(c, c) == pytest.approx(energy, rel=1e-5)


@pytest.mark.parametrize(
    ("bits", "biased", "unbiased"),
    [(1, 0.36338, 0.57080), (2, 0.11748, 0.13312), (3, 0.03455, 0.03578), (4, 0.00950, 0.00959)],
)
@pytest.mark.parametrize("kind", ["gaussian", "cubed"])
def test_expected_error_does_not_depend_on_the_data(bits: int, biased: float, unbiased: float, kind: str) -> None:
    x = gaussian(2**17) if kind == "gaussian" else gaussian(2**17).pow(3)
    for mode, expected in (("biased", biased), ("unbiased", unbiased)):
        error = x - round_trip(Eden(bits, mode), x, step=1)
        assert dot(error, error) / dot(x, x) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("bits", [1, 3])
def test_unbiased(bits: int) -> None:
    x = torch.tensor([1.0, -2.0, 0.5, 4.0, -0.25, 0.0, 3.0, -1.0] * 8)
    codec = Eden(bits, "unbiased", 64, seed=3)
    draws = torch.stack([round_trip(codec, x, step=step) for step in range(4096)])
    assert ((draws.mean(0) - x).abs() <= 5 * draws.std(0) / 64 + 1e-6).all()


def test_averaging_over_ranks() -> None:
    """Unbiased: the error of the mean shrinks as 1/N. Biased, all ranks turn alike and err alike."""
    x = gaussian(2**15)
    for mode, ratio in (("unbiased", 1 / 8), ("biased", 1.0)):
        decoded = [round_trip(Eden(1, mode), x, rank=rank) for rank in range(8)]
        alone, mean = x - decoded[0], x - torch.stack(decoded).mean(0)
        assert dot(mean, mean) / dot(alone, alone) == pytest.approx(ratio, rel=0.1)


def test_a_rotation_belongs_to_its_round_and_bucket() -> None:
    x = gaussian(4096)
    bodies = [encode(Eden(1), x, step=step, bucket=bucket)[0] for step, bucket in ((0, 0), (1, 0), (0, 1))]
    assert not torch.equal(bodies[0], bodies[1])
    assert not torch.equal(bodies[0], bodies[2])
    assert torch.equal(bodies[0], encode(Eden(1, seed=1), x, bucket=-1)[0])


@pytest.mark.parametrize("bits", BITS)
def test_contraction(bits: int) -> None:
    codec = Eden(bits, block=64)
    delta = codec.delta(64)
    assert delta is not None and Eden(bits, "matched").delta(64) is None
    for x in adversarial(3 * 64 + 5):
        if x.dtype == torch.float32 and bool(torch.isfinite(x).all()) and float(x.abs().max()) < 1e18:
            error = x - round_trip(codec, x)
            assert dot(error, error) <= (1 - delta) * dot(x, x) * (1 + 1e-6) + 1e-60


def test_one_nonzero_is_exact() -> None:
    """A rotated unit vector is a vector of signs, which one bit holds."""
    x = torch.zeros(4096)
    x[1234] = -3.0
    for level in available_levels():
        with use_kernel_level(level):
            assert torch.equal(round_trip(Eden(1), x), x)


def test_powers_of_two_pass_through() -> None:
    x = gaussian(5000)
    for codec in (Eden(1), Eden(4), Eden(2, "unbiased"), Eden(1, "matched", 2048)):
        for level in available_levels():
            with use_kernel_level(level):
                for exponent in (-80, -50, -20, 20, 50, 80):
                    factor = 2.0**exponent
                    assert torch.equal(round_trip(codec, x * factor), round_trip(codec, x) * factor)


def test_huge_blocks_saturate() -> None:
    x = gaussian(4096).sign() * 3.0e38
    for bits in BITS:
        for level in available_levels():
            with use_kernel_level(level):
                body, flags = encode(Eden(bits), x)
                assert flags == SATURATED
                assert body[:4].view(torch.float32).item() == 2.0**100
                assert torch.isfinite(decode(Eden(bits), body, 4096)).all()


def test_non_finite_elements() -> None:
    x = gaussian(5000)
    reference = x.clone()
    reference[[3, 4500]] = 0.0
    x[3], x[4500] = math.nan, -math.inf
    for bits in BITS:
        for level in available_levels():
            with use_kernel_level(level):
                body, flags = encode(Eden(bits), x)
                assert flags == HAS_NAN | HAS_INF
                assert torch.equal(body, encode(Eden(bits), reference)[0])


def test_hostile_scales() -> None:
    """Any float32 may arrive as a scale; all levels make the same of it."""
    codec = Eden(1, block=64)
    for value in (math.inf, -math.inf, math.nan, 3.4e38, -1.0, 1e-45, -0.0, 2.0**125):
        body, _ = encode(codec, gaussian(150))
        body[:12] = torch.full((3,), value).view(torch.uint8)
        outcomes = []
        for level in available_levels():
            with use_kernel_level(level):
                outcomes.append(decode(codec, body, 150).nan_to_num(nan=123.0))
        assert all(torch.equal(outcomes[0], other) for other in outcomes[1:]), value


def test_levels_and_boundaries() -> None:
    """Lloyd-Max: a level is the mean of N(0, 1) between its boundaries, a boundary the middle of its levels."""
    for bits in BITS:
        c, edges = module.levels(bits).double(), module.boundaries(bits).double()
        torch.testing.assert_close(edges, (c[1:] + c[:-1]) / 2, rtol=0, atol=3e-7)
        ends = torch.cat((torch.tensor([-math.inf]), edges, torch.tensor([math.inf]))).double()
        density = torch.exp(-ends.square() / 2) / math.sqrt(2 * math.pi)
        mass = torch.special.ndtr(ends).diff()
        torch.testing.assert_close(-density.diff() / mass, c, rtol=1e-6, atol=1e-6)


def test_settings() -> None:
    for message, settings in (
        ("bits", {"bits": 5}),
        ("mode", {"mode": "exact"}),
        ("block", {"block": 4}),
        ("block", {"block": 5000}),
        ("block", {"block": 2**17}),
    ):
        with pytest.raises(ValueError, match=message):
            Eden(**settings)
    assert (Eden(1).id, Eden(2).id) == (0x40, 0x41)
    assert Eden(1).bits_per_element(4096) == 1 + 32 / 4096
    assert Eden(mode="unbiased").unbiased and not Eden().unbiased


@pytest.mark.parametrize("bits", BITS)
def test_sizes_and_padding(bits: int) -> None:
    codec = Eden(bits, block=64)
    for n in (0, 1, 3, 7, 63, 64, 65, 197):
        rest = n % 64
        coordinates = n - rest + (1 << (rest - 1).bit_length() if rest else 0)
        used = 4 * -(-n // 64) + (coordinates * bits + 7) // 8
        assert codec.nbytes(n) == (used + 3) // 4 * 4
        for level in available_levels():
            with use_kernel_level(level):
                body, _ = encode(codec, gaussian(n))
                assert not body[used:].any()
                assert not encode(codec, torch.zeros(n))[0].any()
