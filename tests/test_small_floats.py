"""Float8 and E3M0: published codes, every level and length, the promised errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
from lowcomm.compress import E3M0, HAS_INF, HAS_NAN, Codec, Float8, available_levels, use_kernel_level
from torch import Tensor

VECTORS: dict[str, Any] = json.loads((Path(__file__).parent / "compressors_vectors.json").read_text())
LEVELS = available_levels()
CODECS: list[Codec] = [
    Float8(),
    Float8("e5m2"),
    Float8("e4m3", block=8),
    Float8("e5m2", block=100),
    E3M0(),
    E3M0(block=8),
    E3M0(block=100),
    E3M0(block=4096),
    E3M0(scale="pow2"),
    E3M0(rounding="stochastic", seed=3),
    E3M0(block=32, rounding="stochastic", scale="pow2"),
]
NEAREST = [codec for codec in CODECS if not codec.unbiased]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Small inputs gain nothing from threads, and waiting for them costs much on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.config)
def test_levels_agree(codec: Codec) -> None:
    """All bit patterns that matter at some lengths around blocks; tests/test_properties.py has every length to 130."""
    for n in (1, 7, codec.block - 1, codec.block + 1, min(3 * codec.block + 5, 4101)):
        assert_levels_agree(codec, n)


@pytest.mark.parametrize("codec", [Float8(), Float8("e5m2"), E3M0(), E3M0(4096)], ids=lambda codec: codec.config)
def test_threads_and_streaming_do_not_show(codec: Codec) -> None:
    assert_threads_and_streaming_do_not_show(codec, 2**20 + 4 * 256 + 77)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("name", "codec"),
    [("fp8_e4m3_B8", Float8("e4m3", 8)), ("fp8_e5m2_B8", Float8("e5m2", 8)), ("e3m0_B8", E3M0(8))],
)
def test_published_bodies(name: str, codec: Codec, level: str) -> None:
    entry, x = VECTORS[name], torch.tensor(VECTORS["x8"])
    with use_kernel_level(level):
        body, flags = encode(codec, x)
        assert bytes(body.tolist()).hex() == entry["body"] and flags == 0
        codes = body[4:].tolist() if codec.id != 0x3A else [int(body[4 + i // 2]) >> 4 * (i % 2) & 15 for i in range(8)]
        assert codes == entry["codes"]
        assert decode(codec, body, 8).tolist() == entry["decoded"]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("form", ["e4m3", "e5m2"])
def test_published_codes_at_scale_one(form: str, level: str) -> None:
    """A block whose maximum is the largest number of the format has scale 1; what is larger saturates."""
    entry, largest = VECTORS[f"fp8_{form}_codes"], {"e4m3": 448.0, "e5m2": 57344.0}[form]
    x = torch.tensor(entry["x"]).clamp(-largest, largest)
    with use_kernel_level(level):
        body, _ = encode(Float8(form), x)
        assert bytes(body[4 : 4 + len(x)].tolist()).hex() == entry["codes"]
        assert decode(Float8(form), body, len(x)).tolist() == entry["decoded"]


@pytest.mark.parametrize("level", LEVELS)
def test_published_e3m0_codes(level: str) -> None:
    x = torch.tensor([0.9, -0.3, 0.05, 0.011, -0.007, 0.0, 1.0, -0.74])
    with use_kernel_level(level):
        assert bytes(encode(E3M0(8), x)[0][4:].tolist()).hex() == "d71300e7"


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("form", ["e4m3", "e5m2"])
def test_every_code_decodes_as_torch_reads_it(form: str, level: str) -> None:
    dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[form]
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    body = torch.cat((torch.tensor([0.37]).view(torch.uint8), codes))
    expected = codes.view(dtype).to(torch.float32) * torch.tensor(0.37)
    with use_kernel_level(level):
        try:
            found = decode(Float8(form), body, 256)
        except ValueError:  # codes that stand for no number may be refused, on every level alike
            body[4:][~torch.isfinite(expected)] = 0
            found, expected = decode(Float8(form), body, 256), expected.nan_to_num(0.0, 0.0, 0.0)
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("form", ["e4m3", "e5m2"])
def test_rounds_as_torch_does(form: str, level: str) -> None:
    """Every code's number and the neighbourhood of every midpoint, at scale one."""
    dtype, largest = {"e4m3": (torch.float8_e4m3fn, 448.0), "e5m2": (torch.float8_e5m2, 57344.0)}[form]
    numbers = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype).float()
    numbers = numbers[torch.isfinite(numbers)].unique()
    middles = (numbers[1:] + numbers[:-1]) / 2
    around = [torch.nextafter(middles, torch.full_like(middles, to)) for to in (torch.inf, -torch.inf)]
    x = torch.cat((numbers, middles, *around))
    codec = Float8(form, block=len(x))
    with use_kernel_level(level):
        body, _ = encode(codec, x)
    assert float(body[:4].clone().view(torch.float32)) == 1.0
    assert torch.equal(body[4 : 4 + len(x)], x.clamp(-largest, largest).to(dtype).view(torch.uint8))


def test_e3m0_rounds_to_the_nearest_power() -> None:
    """Ties to the larger magnitude; below 2^-7 of the maximum nothing is left."""
    powers = torch.exp2(torch.arange(-6.0, 1.0))
    ties = powers[:-1] * 1.5
    below = torch.nextafter(ties, torch.zeros(()))
    edge = torch.tensor([2.0**-7])
    x = torch.cat((powers, ties, below, edge, torch.nextafter(edge, torch.zeros(1)), torch.tensor([1.0])))
    expected = torch.cat((powers, powers[1:], powers[:-1], powers[:1], torch.zeros(1), torch.ones(1)))
    for level in LEVELS:
        with use_kernel_level(level):
            for sign in (1.0, -1.0):
                assert torch.equal(round_trip(E3M0(len(x)), sign * x), sign * expected)


@pytest.mark.parametrize("codec", NEAREST, ids=lambda codec: codec.config)
def test_contraction_on_adversarial_vectors(codec: Codec) -> None:
    for n in (1, 33, 300):
        for x in adversarial(n):
            clean = x.float().nan_to_num(0.0, 0.0, 0.0)
            energy, delta = float(clean.double().square().sum()), codec.delta(n)
            if delta is None:
                continue
            error = float((clean - round_trip(codec, x)).double().square().sum())
            assert error <= (1 - delta) * energy * (1 + 1e-6) + n * 2.0**-200


@pytest.mark.parametrize(
    ("codec", "relative"),
    [(Float8(), 2.0**-4), (Float8("e5m2"), 2.0**-3), (E3M0(), 1 / 3)],
    ids=["e4m3", "e5m2", "e3m0"],
)
def test_relative_error_of_each_element(codec: Codec, relative: float) -> None:
    for kind in range(3):
        x = gaussian(4096, kind)
        x = x / gaussian(4096, 9).abs().clamp(min=1e-3) if kind == 1 else x
        largest = x.view(-1, 256).abs().amax(1, keepdim=True).expand(16, 256).reshape(-1)
        error = (x - round_trip(codec, x)).abs()
        normal = x.abs() >= largest * {0x38: 2.0**-6 / 448 * 1.01, 0x39: 2.0**-14 / 57344 * 1.01}.get(codec.id, 2.0**-6)
        assert bool((error[normal] <= relative * x[normal].abs() * (1 + 2.0**-20)).all())
        assert bool((error <= x.abs() * (1 + 2.0**-20)).all()) or codec.id != 0x3A


@pytest.mark.parametrize(
    ("codec", "expected"), [(Float8(), 6.8e-4), (Float8("e5m2"), 2.7e-3), (E3M0(), 0.038), (E3M0(4096), 0.038)]
)
def test_error_on_gaussian_data(codec: Codec, expected: float) -> None:
    x = gaussian(2**17)
    error = float((x - round_trip(codec, x)).double().square().sum() / x.double().square().sum())
    assert error == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("scale", ["f32", "pow2"])
def test_stochastic_e3m0_is_unbiased(scale: str) -> None:
    codec = E3M0(block=16, rounding="stochastic", scale=scale)
    x = gaussian(16, 4)
    draws = torch.stack([round_trip(codec, x, step=step) for step in range(4096)]).double()
    assert bool(((draws.mean(0) - x).abs() <= 5 * draws.std(0) / 64 + 1e-7).all())
    bound = codec.omega(16)
    assert bound is not None
    assert float((draws - x).square().sum(1).mean()) <= bound * float(x.double().square().sum())
    powers = torch.exp2(torch.arange(-6.0, 1.0))
    assert torch.equal(round_trip(codec, powers, step=7), powers)
    assert not torch.equal(round_trip(codec, x, rank=0), round_trip(codec, x, rank=1))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.config)
def test_nonfinite_elements(codec: Codec, level: str) -> None:
    x = gaussian(300)
    x[7], x[256], x[299] = float("nan"), float("inf"), float("-inf")

    def both(source: Tensor) -> tuple[bytes, int]:
        body, flags = encode(codec, source, step=1)
        return bytes(body.tolist()), flags

    with use_kernel_level(level):
        body, flags = both(x)
        assert flags & 3 == HAS_NAN | HAS_INF
        assert body == both(x.nan_to_num(0.0, 0.0, 0.0))[0]
        candidate = torch.empty(300)
        codec.encode_feedback(x, torch.zeros(300), candidate, torch.empty(codec.nbytes(300), dtype=torch.uint8))
        assert bool(torch.isfinite(candidate).all()) and candidate[[7, 256, 299]].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Float8("e3m4"), "format must be one of"),
        (lambda: Float8(block=0), "block must be at least 1"),
        (lambda: E3M0(rounding="up"), "rounding must be one of"),
        (lambda: E3M0(scale="bf16"), "scale must be one of"),
    ],
)
def test_bad_settings(build: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()
