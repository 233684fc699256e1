"""QSGD, NUQSGD, natural compression, ZeRO++ and codebooks: worked examples, bounds, unbiasedness, damaged input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from codec_checks import adversarial, encode, gaussian, round_trip
from lowcomm.compress import (
    HAS_INF,
    HAS_NAN,
    QSGD,
    SATURATED,
    Codebook,
    Codec,
    NaturalCompression,
    NuQSGD,
    ZeroPlusPlus,
)
from lowcomm.compress.codebook import bin_means, uniform_codes

VECTORS: dict[str, Any] = json.loads((Path(__file__).parent / "compressors_vectors.json").read_text())
CODECS: list[Codec] = [
    QSGD(),
    QSGD(levels=7, block=8),
    NuQSGD(),
    NaturalCompression(),
    ZeroPlusPlus(),
    ZeroPlusPlus(bits=8, block=32),
    Codebook(),
    Codebook("quantile", block=64),
]


def test_qsgd_worked_example() -> None:
    entry = VECTORS["qsgd_s7_B8"]
    codec = QSGD(levels=7, block=8)
    scales, codes, _ = codec._quantize(torch.tensor(VECTORS["x8"]), torch.tensor(entry["u"]))
    assert codes.tolist() == entry["codes"]
    assert scales.view(torch.float32).item() == entry["norm"]
    assert codec._dequantize(scales, codes & 15).tolist() == entry["decoded"]


def test_bins_worked_example() -> None:
    entry = VECTORS["bucket_mean_4bins_6sigma"]
    x = torch.tensor(entry["x"])
    codes = uniform_codes(x, 4)
    assert codes.tolist() == entry["codes"]
    means = bin_means(x, codes, 4)
    assert means[codes].tolist() == pytest.approx(entry["decoded"], rel=1e-6)
    assert (means - x.mean()).tolist()[1:] == pytest.approx(entry["lookup"][1:], rel=1e-6)


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.config)
def test_any_length_and_any_values(codec: Codec) -> None:
    for n in (*range(0, 18), 63, 64, 65, 127, 128, 129, 300):
        for x in adversarial(n):
            body, flags = encode(codec, x)
            out = torch.empty(n)
            codec.decode(body, out)
            assert bool(torch.isfinite(out).all())
            bad = ~torch.isfinite(x.float())
            assert bool(flags & (HAS_NAN | HAS_INF)) == bool(bad.any())
            acc = torch.ones(n)
            codec.decode_add(body, acc, 0.5)
            assert torch.equal(acc, torch.ones(n) + out * 0.5)
        assert torch.equal(round_trip(codec, torch.zeros(n)), torch.zeros(n))
    body = torch.zeros(codec.nbytes(100), dtype=torch.uint8)
    out = torch.ones(100)
    codec.decode(body, out)
    assert out.abs().sum() == 0


def test_error_is_as_documented() -> None:
    x = gaussian(1 << 17)
    energy = x.double().square().sum()

    def error(codec: Codec) -> float:
        return float((x - round_trip(codec, x)).double().square().sum() / energy)

    assert error(QSGD()) == pytest.approx(0.0013, rel=0.05)
    assert error(QSGD(levels=7)) == pytest.approx(0.42, rel=0.05)
    assert error(ZeroPlusPlus()) == pytest.approx(0.0127, rel=0.05)
    assert error(Codebook()) < 1e-3
    assert error(Codebook("quantile")) < 2e-3


@pytest.mark.parametrize("codec", [QSGD(levels=7, block=16), NuQSGD(block=16), NaturalCompression()], ids=repr)
def test_unbiased_within_the_variance_bound(codec: Codec) -> None:
    x = gaussian(16, 3)
    draws = torch.stack([round_trip(codec, x, step=step) for step in range(4096)]).double()
    error = (draws.mean(0) - x).abs()
    assert bool((error <= 5 * draws.std(0) / 64 + 1e-6).all())
    omega = codec.omega(16)
    assert omega is not None
    assert (draws - x).square().sum(1).mean() <= 1.05 * omega * x.double().square().sum()
    assert not torch.equal(round_trip(codec, x, rank=0), round_trip(codec, x, rank=1))


def test_zeropp_contracts_as_documented() -> None:
    for x in (gaussian(256), torch.ones(256), torch.eye(1, 256)[0], -torch.eye(1, 256)[0]):
        for codec in (ZeroPlusPlus(), ZeroPlusPlus(bits=8)):
            delta = codec.delta(256)
            assert delta is not None
            lost = (x - round_trip(codec, x)).double().square().sum()
            assert lost <= (1 - delta) * x.double().square().sum() + 1e-12


def test_natural_compression_clips_what_is_too_large() -> None:
    x = torch.tensor([3e5, -1e6, 2.0])
    assert encode(NaturalCompression(), x)[1] == SATURATED
    assert round_trip(NaturalCompression(), x).tolist() == [2.0**18, -(2.0**18), 2.0]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: QSGD(levels=0), "levels must be 1 to 32767"),
        (lambda: NuQSGD(levels=65), "levels must be 1 to 64"),
        (lambda: ZeroPlusPlus(bits=1), "bits must be 2 to 8"),
        (lambda: Codebook("median"), "method must be"),
        (lambda: Codebook(block=0), "block"),
    ],
)
def test_bad_settings(build: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()
