"""Cast and the integer quantizers: worked examples, equal bytes on every level, error bounds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lowcomm.compress import (
    HAS_INF,
    HAS_NAN,
    SATURATED,
    Cast,
    Codec,
    Int,
    Int2,
    Int4,
    Int8,
    available_levels,
    use_kernel_level,
)
from lowcomm.compress.quantize import _quantize_symmetric

VECTORS: dict[str, Any] = json.loads((Path(__file__).parent / "compressors_vectors.json").read_text())
X8 = torch.tensor(VECTORS["x8"])
LENGTHS = [*range(0, 131), 255, 256, 257, 511, 513, 1000, 4095, 4096, 4097, 10007, 40000]
CODECS: list[Codec] = [
    Int8(),
    Int4(),
    Int2(),
    Int8(block=8),
    Int(bits=3, block=32),
    Int(bits=12, block=100),
    Int4(affine=True),
    Int8(affine=True, rounding="stochastic", seed=1),
    Int4(rounding="stochastic", seed=7),
    Int8(rounding="stochastic"),
    Int4(scale="bf16"),
    Int8(scale="pow2"),
    Int4(block=5000),
]


def encoded(codec: Codec, x: torch.Tensor, **key: int) -> tuple[bytes, int]:
    out = torch.full((codec.nbytes(x.numel()),), 0xAA, dtype=torch.uint8)
    flags = codec.encode(x, out, **key)
    return bytes(out.tolist()), flags


def decoded(codec: Codec, x: torch.Tensor, **key: int) -> torch.Tensor:
    out = torch.empty(codec.nbytes(x.numel()), dtype=torch.uint8)
    codec.encode(x, out, **key)
    result = torch.empty(x.numel())
    codec.decode(out, result, **key)
    return result


@pytest.mark.parametrize("level", available_levels())
@pytest.mark.parametrize(
    ("name", "codec"),
    [
        ("int8_sym_B8", Int8(block=8)),
        ("int8_sym_B4", Int8(block=4)),
        ("int4_sym_B8", Int4(block=8)),
        ("int4_asym_B8", Int4(block=8, affine=True)),
        ("int8_sym_zero_and_tiny_blocks_B4", Int8(block=4)),
    ],
)
def test_worked_examples(name: str, codec: Codec, level: str) -> None:
    entry = VECTORS[name]
    x = torch.tensor(entry.get("x", VECTORS["x8"]))
    with use_kernel_level(level):
        assert encoded(codec, x)[0].hex() == entry["body"]
        assert decoded(codec, x).tolist() == entry["decoded"]


def test_stochastic_rounding_of_given_noise() -> None:
    entry = VECTORS["int4_sr_B8"]
    _, codes = _quantize_symmetric(X8, 8, 7, torch.tensor(entry["u"]))
    assert codes.tolist() == entry["codes"]


def test_cast_rounds_to_nearest_even() -> None:
    entry = VECTORS["bf16_rne"]
    body, flags = encoded(Cast("bf16"), torch.tensor(entry["x"]))
    assert [body[i : i + 2][::-1].hex() for i in range(0, 8, 2)] == entry["bits"]
    assert flags == 0
    for name in ("f32", "bf16", "fp16"):
        codec = Cast(name)
        for n in (0, 1, 2, 7, 100):
            x = torch.randn(n)
            assert len(encoded(codec, x)[0]) == codec.nbytes(n)
            torch.testing.assert_close(decoded(codec, x), x, rtol=2**-8, atol=0)
        assert encoded(codec, torch.tensor([float("nan"), 1.0]))[1] == HAS_NAN
        assert decoded(codec, torch.tensor([float("inf"), -1.0])).tolist() == [0.0, -1.0]
    assert encoded(Cast("fp16"), torch.tensor([1e6]))[1] == SATURATED
    assert decoded(Cast("fp16"), torch.tensor([-1e6])).tolist() == [-65504.0]
    odd = torch.zeros(Cast("bf16").nbytes(3) + 1, dtype=torch.uint8)[1:]
    Cast("bf16").encode(torch.tensor([1.0, 2.0, 3.0]), odd)
    out = torch.empty(3)
    Cast("bf16").decode(odd, out)
    assert out.tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.config)
def test_every_level_writes_the_same_bytes(codec: Codec) -> None:
    generator = torch.Generator().manual_seed(1)
    for n in LENGTHS:
        x = torch.randn(n, generator=generator) * 10.0 ** torch.randint(-3, 4, (1,), generator=generator)
        if n > 3:
            x[n // 2], x[n - 1] = 0.0, -x.abs().max() * 1.5
        residual = torch.randn(n, generator=generator)
        seen = set()
        for level in available_levels():
            with use_kernel_level(level):
                body, flags = encoded(codec, x, step=3, rank=1, bucket=2)
                out = torch.empty(codec.nbytes(n), dtype=torch.uint8)
                candidate = x.clone()
                codec.encode_feedback(candidate, residual, candidate, out, decay=0.9, step=3, rank=1, bucket=2)
                acc = torch.ones(n)
                codec.decode_add(out, acc, 0.3, step=3, rank=1, bucket=2)
                plain = torch.empty(n)
                codec.decode(out, plain, step=3, rank=1, bucket=2)
                seen.add(
                    (body, flags, bytes(out.tolist()), *(bytes(t.numpy().tobytes()) for t in (candidate, acc, plain)))
                )
        assert len(seen) == 1, n


@pytest.mark.parametrize("level", available_levels())
@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.config)
def test_bad_values_are_flagged_and_sent_as_zero(codec: Codec, level: str) -> None:
    x = torch.randn(300)
    x[7], x[256], x[299] = float("nan"), float("inf"), float("-inf")
    with use_kernel_level(level):
        assert encoded(codec, x)[1] & 3 == HAS_NAN | HAS_INF
        clean = torch.nan_to_num(x, 0.0, 0.0, 0.0)
        assert encoded(codec, x)[0] == encoded(codec, clean)[0]
        candidate, out = torch.empty(300), torch.empty(codec.nbytes(300), dtype=torch.uint8)
        codec.encode_feedback(x, torch.zeros(300), candidate, out)
        assert bool(torch.isfinite(candidate).all())
        assert candidate[[7, 256, 299]].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_inputs_are_widened(dtype: torch.dtype) -> None:
    x = torch.randn(1000).to(dtype)
    for codec in (Int8(), Int4(), Int8(affine=True), Cast("bf16")):
        for level in available_levels():
            with use_kernel_level(level):
                assert encoded(codec, x) == encoded(codec, x.to(torch.float32))


def test_error_is_as_documented() -> None:
    x = torch.randn(1 << 17, generator=torch.Generator().manual_seed(0))
    expected = {Int8(): 4.9e-5, Int4(): 0.0117, Int4(block=256): 0.016, Int4(block=256, affine=True): 0.012}
    for codec, nmse in expected.items():
        error = (x - decoded(codec, x)).square().sum() / x.square().sum()
        assert error.item() == pytest.approx(nmse, rel=0.05), codec


def test_guarantees_hold_on_adversarial_vectors() -> None:
    one_hot, many = torch.zeros(256), torch.full((256,), 1e-3)
    one_hot[255], many[3] = -5.0, 1e3
    denormal = torch.full((256,), 1e-40)
    for x in (one_hot, many, denormal, torch.ones(256), -torch.ones(256), torch.tensor([1.0, -1.0]).repeat(128)):
        for codec in (Int8(), Int4(), Int8(scale="pow2"), Int4(scale="bf16"), Int2()):
            delta = codec.delta(256)
            assert delta is not None
            error = (x - decoded(codec, x)).double().square().sum()
            assert error <= (1 - delta) * x.double().square().sum() + 1e-30
            again = decoded(codec, decoded(codec, x))
            assert torch.equal(again, decoded(codec, x))
    large = torch.tensor([3.4028234663852886e38, 1.0])
    for codec in (Int8(), Int4(), Int(bits=5)):
        assert bool(torch.isfinite(decoded(codec, large)).all())


def test_stochastic_rounding_is_unbiased_and_keeps_exact_values() -> None:
    codec = Int4(block=16, rounding="stochastic")
    x = torch.randn(16, generator=torch.Generator().manual_seed(5))
    draws = torch.stack([decoded(codec, x, step=step) for step in range(4096)]).double()
    error = (draws.mean(0) - x).abs()
    assert bool((error <= 5 * draws.std(0) / 64 + 1e-6).all())
    assert not torch.equal(decoded(codec, x, rank=0), decoded(codec, x, rank=1))
    exact = torch.arange(-7.0, 8.0)
    assert torch.equal(decoded(codec, exact), exact)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Int(bits=1), "bits must be 2 to 16 but is: 1"),
        (lambda: Int8(block=0), "block must be at least 1 element but is: 0"),
        (lambda: Int4(rounding="up"), "rounding must be"),
        (lambda: Int4(affine=True, scale="bf16"), "float32 scales only"),
        (lambda: Cast("f64"), "format must be one of"),
    ],
)
def test_bad_settings(build: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def test_wrong_buffers_are_refused() -> None:
    codec = Int8()
    with pytest.raises(ValueError, match="a body of 12 contiguous uint8 bytes"):
        codec.encode(torch.ones(8), torch.empty(11, dtype=torch.uint8))
    with pytest.raises(ValueError, match="contiguous 1-D"):
        codec.encode(torch.ones(2, 4), torch.empty(12, dtype=torch.uint8))
    with pytest.raises(ValueError, match="error feedback takes"):
        codec.encode_feedback(torch.ones(8), torch.ones(7), torch.ones(8), torch.empty(12, dtype=torch.uint8))
