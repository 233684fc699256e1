"""Ternary codec: oracles, identities, twins in plain Python, the same bytes at every kernel level."""

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
from lowcomm.compress import HAS_INF, HAS_NAN, SATURATED, Ternary, available_levels, use_kernel_level
from lowcomm.compress import ternary as module

VECTORS = json.loads((Path(__file__).parent / "compressors_vectors.json").read_text())
X8 = torch.tensor(VECTORS["x8"])
PACKINGS = ("base3", "2bit")


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("block", [4, 64, 256, 1024])
def test_levels_agree(packing: str, block: int) -> None:
    for n in (1, block - 1, min(11 * block + 50, 3 * block + 505)):
        assert_levels_agree(Ternary(packing=packing, block=block), n)


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("more", [{}, {"clip": 2.5}, {"shared_scale": 1.5}, {"shared_scale": 0.7, "clip": 1.0}])
def test_stochastic_levels_agree(packing: str, more: dict[str, float]) -> None:
    for n, block in ((5, 4), (6 * 64 + 7, 64)):
        assert_levels_agree(Ternary("stochastic", packing, block, seed=2**33, **more), n)


@pytest.mark.parametrize("packing", PACKINGS)
def test_threads_and_streaming_do_not_show(packing: str) -> None:
    assert_threads_and_streaming_do_not_show(Ternary(packing=packing), 2**20 + 3 * 1280 + 277)


def test_every_base3_byte_decodes() -> None:
    """Every byte at every place of a block, against arithmetic; and every byte above 242 is refused."""
    codec = Ternary(block=64)
    for shift in range(5):
        n = 5 * 243 + 64 * 5
        body = torch.zeros(codec.nbytes(n), dtype=torch.uint8)
        scale_bytes = 4 * -(-n // 64)
        body[:scale_bytes] = torch.ones(-(-n // 64)).view(torch.uint8)
        body[scale_bytes + 3 * shift : scale_bytes + 3 * shift + 243] = torch.arange(243, dtype=torch.uint8)
        digits = [byte // 3**k % 3 for byte in body[scale_bytes:].tolist() for k in range(5)][:n]
        expected = [(0.0, 1.0, -1.0)[digit] for digit in digits]
        for level in available_levels():
            with use_kernel_level(level):
                assert decode(codec, body, n).tolist() == expected


def test_damaged_codes_are_refused_before_anything_is_added() -> None:
    n = 3 * 1280 + 40
    for packing, codes_of_one, bad in (("base3", 5, 243), ("2bit", 4, 0b00001100)):
        codec = Ternary(packing=packing)
        for element in (0, 1279, n - codes_of_one, n - 1):
            body, _ = encode(codec, gaussian(n))
            body[4 * -(-n // 256) + element // codes_of_one] = bad
            for level in available_levels():
                acc = torch.full((n,), 3.0)
                with use_kernel_level(level):
                    with pytest.raises(ValueError, match=r"ternary|242"):
                        codec.decode_add(body, acc)
                    with pytest.raises(ValueError, match=r"ternary|242"):
                        codec.decode(body, acc)
                assert (acc == 3).all()


def test_unused_bits_are_ignored() -> None:
    codec = Ternary(packing="2bit", block=4)
    for level in available_levels():
        with use_kernel_level(level):
            body, _ = encode(codec, X8[:5])
            expected = decode(codec, body, 5)
            body[9] |= 0b11111100  # elements 5 to 7 of the codes do not exist
            assert torch.equal(decode(codec, body, 5), expected)


def test_deterministic_oracle() -> None:
    vector = VECTORS["ternary_det_B8"]
    for level in available_levels():
        with use_kernel_level(level):
            for packing, expected in (("2bit", vector["body_2bit"]), ("base3", vector["body_base3"])):
                body, flags = encode(Ternary(packing=packing, block=8), X8)
                assert flags == 0
                assert bytes(body.tolist()).hex() == expected
                assert decode(Ternary(packing=packing, block=8), body, 8).tolist() == vector["decoded"]


@pytest.mark.parametrize(("name", "packing"), [("ternary2", "2bit"), ("ternary3", "base3")])
def test_stochastic_oracle(name: str, packing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    vector = VECTORS[name]
    monkeypatch.setattr(module, "uniform", lambda n, **_: torch.tensor(vector["u"])[:n])
    codec = Ternary("stochastic", packing, block=8)
    with use_kernel_level("torch"):
        body, _ = encode(codec, X8)
    assert bytes(body.tolist()).hex() == vector["body"]
    for level in available_levels():
        with use_kernel_level(level):
            assert decode(codec, body, 8).tolist() == vector["decoded"]


def twin(x: np.ndarray) -> np.ndarray:
    """One block in double precision."""
    kept = np.abs(x) > 0.75 * np.abs(x).mean()
    return np.where(kept, np.sign(x) * np.abs(x)[kept].mean(), 0.0)


def test_twin() -> None:
    n = 4 * 256 + 100
    for seed in range(20):
        x = gaussian(n, seed)
        rows = np.split(x.numpy().astype(np.float64), range(256, n, 256))
        expected = torch.tensor(np.concatenate([twin(row) for row in rows])).float()
        for level in available_levels():
            with use_kernel_level(level):
                torch.testing.assert_close(round_trip(Ternary(), x), expected, rtol=3e-7, atol=0)


def test_error_identity() -> None:
    """||x - C(x)||^2 = ||x||^2 - (sum of kept |x|)^2 / kept, block by block."""
    for seed in range(5):
        x = (gaussian(256, seed) * torch.rand(256).pow(3)).double()
        decoded = round_trip(Ternary(), x.float()).double()
        kept = decoded != 0
        expected = x.square().sum() - x[kept].abs().sum() ** 2 / kept.sum()
        torch.testing.assert_close((x - decoded).square().sum(), expected, rtol=1e-5, atol=0)


def laplace(n: int) -> torch.Tensor:
    u = torch.rand(n, generator=torch.Generator().manual_seed(0)) - 0.5
    return -u.sign() * torch.log1p(-2 * u.abs() * (1 - 1e-6))


@pytest.mark.parametrize(
    ("x", "expected"), [(gaussian(2**17), 0.190), (laplace(2**17), 0.27)], ids=["gaussian", "laplace"]
)
def test_error_of_deterministic(x: torch.Tensor, expected: float) -> None:
    error = (x - round_trip(Ternary(), x)).square().sum() / x.square().sum()
    assert abs(float(error) / expected - 1) < 0.05


@pytest.mark.parametrize(("clip", "expected"), [(None, 1.45), (2.5, 1.0)])
def test_error_of_stochastic(clip: float | None, expected: float) -> None:
    x = gaussian(2**17)
    codec = Ternary("stochastic", clip=clip)
    error = (x - round_trip(codec, x, step=1)).square().sum() / x.square().sum()
    assert abs(float(error) / expected - 1) < 0.07
    assert codec.unbiased is (clip is None)


def test_contraction() -> None:
    codec = Ternary(block=64)
    for x in adversarial(3 * 64 + 5):
        if x.dtype != torch.float32 or not torch.isfinite(x).all() or float(x.abs().max()) > 1e18:
            continue
        for part in x.split(64):
            delta = codec.delta(part.numel())
            error = (part.double() - round_trip(codec, part).double()).square().sum()
            assert delta is not None
            assert error <= (1 - delta) * part.double().square().sum() * (1 + 1e-6) + 1e-60


@pytest.mark.parametrize("shared", [None, 4.0])
def test_stochastic_is_unbiased(shared: float | None) -> None:
    x = torch.tensor([1.0, -2.0, 0.5, 4.0, -0.25, 0.0, 3.0, -1.0])
    codec = Ternary("stochastic", block=8, shared_scale=shared, seed=5)
    draws = torch.stack([round_trip(codec, x, step=step) for step in range(4096)])
    spread = (x.abs() * (4 - x.abs())).sqrt()
    assert ((draws.mean(0) - x).abs() <= 5 * spread / 64 + 1e-7).all()
    assert set(draws.unique().tolist()) == {-4.0, 0.0, 4.0}
    assert (draws[:, 3] == 4).all()  # the largest element is never moved


def test_variance_bound() -> None:
    codec, x = Ternary("stochastic", block=64), torch.zeros(64)
    x[0], x[1:] = 8.0, 1.0  # near the worst case: s ||x||_1 / ||x||^2 is sqrt(B) up to rounding
    draws = torch.stack([round_trip(codec, x, step=step) for step in range(2000)])
    error = (draws - x).square().sum(1).mean() / x.square().sum()
    expected = 8 * x.sum() / x.square().sum() - 1
    assert abs(float(error / expected) - 1) < 0.05
    omega = codec.omega(64)
    assert omega is not None and float(expected) <= omega


def test_shared_scale_makes_sums_exact() -> None:
    codec, ranks = Ternary("stochastic", shared_scale=0.3), 7
    total = torch.zeros(5000)
    for rank in range(ranks):
        body, flags = encode(codec, gaussian(5000, rank) * 0.05, rank=rank)
        assert flags == 0
        total += decode(codec, body, 5000)
    counts = total / 0.3
    torch.testing.assert_close(counts, counts.round(), rtol=0, atol=1e-5)
    assert int(counts.abs().max()) <= ranks
    assert encode(codec, torch.tensor([0.1, -0.4]))[1] == SATURATED
    assert round_trip(codec, torch.tensor([0.1, -0.4]))[1] == -torch.tensor(0.3)


def test_clipping_clamps_to_standard_deviations() -> None:
    x = torch.cat((gaussian(255) * 0.1, torch.tensor([50.0])))
    codec = Ternary("stochastic", clip=2.5)
    for level in available_levels():
        with use_kernel_level(level):
            body, _ = encode(codec, x)
            expected = 2.5 * x.double().std(correction=0)
            assert body[:4].view(torch.float32).double().item() == pytest.approx(float(expected), rel=1e-6)


def test_powers_of_two_pass_through() -> None:
    x = gaussian(1000)
    for codec in (Ternary(), Ternary("stochastic"), Ternary("stochastic", clip=2.5)):
        for level in available_levels():
            with use_kernel_level(level):
                for exponent in (-60, -30, 30, 60):
                    factor = 2.0**exponent
                    assert torch.equal(round_trip(codec, x * factor), round_trip(codec, x) * factor)


def test_symmetry_and_idempotence() -> None:
    x = gaussian(1000)
    decoded = round_trip(Ternary(), x)
    assert torch.equal(round_trip(Ternary(), -x), -decoded)
    flat = torch.tensor([1.5, 0.0, -1.5, 0.0]).repeat(256)
    assert torch.equal(round_trip(Ternary(), flat), flat)


def test_non_finite_elements() -> None:
    x = gaussian(512)
    reference = x.clone()
    reference[[3, 300]] = 0.0
    x[3], x[300] = math.nan, -math.inf
    for codec in (Ternary(), Ternary(packing="2bit"), Ternary("stochastic"), Ternary("stochastic", clip=2.0)):
        for level in available_levels():
            with use_kernel_level(level):
                body, flags = encode(codec, x)
                assert flags == HAS_NAN | HAS_INF
                assert torch.equal(body, encode(codec, reference)[0])


def test_settings() -> None:
    for message, settings in (
        ("mode", {"mode": "greedy"}),
        ("packing", {"packing": "3bit"}),
        ("block", {"block": 5}),
        ("clip applies", {"clip": 2.5}),
        ("shared_scale applies", {"shared_scale": 1.0}),
        ("shared_scale must", {"mode": "stochastic", "shared_scale": 0.0}),
        ("clip must", {"mode": "stochastic", "clip": math.inf}),
    ):
        with pytest.raises(ValueError, match=message):
            Ternary(**settings)
    assert [Ternary(packing=packing).bits_per_element(1280) for packing in PACKINGS] == [1.6 + 32 / 256, 2 + 32 / 256]
    assert (Ternary().id, Ternary(packing="2bit").id) == (0x25, 0x24)


def test_sizes_and_padding() -> None:
    for packing, per_byte in (("base3", 5), ("2bit", 4)):
        codec = Ternary(packing=packing)
        for n in (0, 1, 7, 255, 256, 257, 773, 4096, 10007):
            codes = -(-n // per_byte)
            assert codec.nbytes(n) == 4 * -(-n // 256) + (codes + 3) // 4 * 4
            for level in available_levels():
                with use_kernel_level(level):
                    body, _ = encode(codec, gaussian(n))
                    assert not body[4 * -(-n // 256) + codes :].any()
