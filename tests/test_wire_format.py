"""The documented formats: a reader written from docs/wire-format.md alone decodes what the library encodes."""

from __future__ import annotations

import inspect
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import wire_reader
from lowcomm.compress import (
    E3M0,
    QSGD,
    SRHT,
    Cast,
    Codebook,
    Codec,
    CountSketch,
    DCTTopK,
    Eden,
    Float8,
    Int,
    Int2,
    Int4,
    Int8,
    Mixed,
    NaturalCompression,
    NuQSGD,
    PowerSGD,
    RandomK,
    SampledTopK,
    Sign,
    StoSign,
    Ternary,
    Threshold,
    TopK,
    ZeroPlusPlus,
)

from lowcomm import compress

SHAPES = ((12, 20), (7,), (), (6, 3, 5), (0, 4), (13, 11))
SHAPED_SIZE = 240 + 7 + 1 + 90 + 143
ANY_LENGTH: list[Codec] = [
    *(Cast(form) for form in ("f32", "bf16", "fp16")),
    *(Int8(), Int8(block=5), Int4(), Int4(scale="bf16", block=3), Int4(scale="pow2"), Int2(), Int(bits=5, block=7)),
    *(Int4(rounding="stochastic"), Int8(affine=True, block=16), Int(bits=4, block=9, affine=True), Int(bits=13)),
    *(QSGD(), QSGD(7, 16), NuQSGD(), NuQSGD(3, 16), ZeroPlusPlus(), ZeroPlusPlus(8, 16), NaturalCompression()),
    *(Codebook(), Codebook("quantile", 32)),
    *(Float8(), Float8("e5m2", 16), E3M0(), E3M0(16), E3M0(7, scale="pow2"), E3M0(rounding="stochastic")),
    *(Sign(scale, 8) for scale in ("l1", "l2", "two_means", "none")),
    *(Sign(), Sign(block=64), StoSign(2.0)),
    *(Ternary("deterministic", packing, block) for packing in ("base3", "2bit") for block in (4, 64, 256)),
    *(Ternary("stochastic"), Ternary("stochastic", "2bit", 16, clip=2.5)),
    *(Eden(bits, mode, 64, seed=2**35) for bits in (1, 2, 3, 4) for mode in ("biased", "unbiased")),
    *(Eden(), Eden(1, "matched", 32)),
    *(TopK(k=5, chunk=64), TopK(density=0.1, scope="global"), TopK(k=1, chunk=16, index="u32", value="f32")),
    *(TopK(k=9, chunk=64, index=index, value="bf16") for index in ("bits", "bitmap", "u32")),
    *(TopK(k=6, chunk=32, value=value) for value in ("f32", "sign1", "int8", "int4", "bins4")),
    *(TopK(k=1, chunk=1, index="bits"), TopK(k=16, chunk=16, value="int4")),
    *(DCTTopK(k=9, side=8), DCTTopK(k=5, side=3, index="bits", value="f32")),
    *(PowerSGD(rank=1, min_rate=1), PowerSGD(rank=2, min_rate=1, factors=Int8())),
    *(CountSketch(density=0.5), CountSketch(rows=4, seed=3)),
    *(RandomK(0.2), RandomK(0.3, method="stratified", contractive=False), RandomK(0.3, method="block", seed=4)),
    *(Threshold(1.0), Threshold(0.2, density=0.9), SampledTopK(), SampledTopK(0.1, sample=0.3)),
    *(SRHT(density=0.3, chunk=32), SRHT(chunk=16, contractive=True, seed=9)),
]
SHAPED: list[Codec] = [
    TopK(density=0.1, scope="tensor", shapes=SHAPES),
    TopK(k=3, chunk=16, scope="tile2d", shapes=SHAPES, index="bits"),
    DCTTopK(k=4, side=6, shapes=SHAPES),
    PowerSGD(rank=2, shapes=SHAPES, min_rate=1.5),
    Mixed(((Int4(), 200), (Cast("f32"), 81), (SRHT(chunk=64, density=0.5), 200))),
]


def check(codec: Codec, x: torch.Tensor) -> None:
    n = x.numel()
    body, out = torch.empty(codec.nbytes(n), dtype=torch.uint8), torch.empty(n)
    codec.encode(x, body, step=5, rank=1, bucket=3)
    codec.decode(body, out, step=5, rank=1, bucket=3)
    assert wire_reader.read(codec, bytes(body.tolist()), n, step=5, rank=1, bucket=3) == out.tolist()
    if codec.id in (0x22, 0x26):
        return  # signs without a scale cannot say zero
    zeros = bytes(codec.nbytes(n))
    assert not any(wire_reader.read(codec, zeros, n, step=5, bucket=3))
    codec.decode(torch.zeros_like(body), out, step=5, rank=1, bucket=3)
    assert not out.any()


@pytest.mark.parametrize("codec", ANY_LENGTH, ids=lambda codec: codec.config)
def test_reader_agrees(codec: Codec) -> None:
    for n in (0, 1, 2, 31, 33, 64, 131):
        x = torch.randn(n, generator=torch.Generator().manual_seed(n))
        x[2::7] = 0
        check(codec, x)


@pytest.mark.parametrize("codec", SHAPED, ids=lambda codec: codec.config)
def test_reader_agrees_on_shaped_vectors(codec: Codec) -> None:
    check(codec, torch.randn(SHAPED_SIZE, generator=torch.Generator().manual_seed(1)))


def documented(page: str) -> str:
    return (Path(__file__).parent.parent / "docs" / page).read_text()


def test_every_codec_is_documented_with_its_number() -> None:
    kinds = [getattr(compress, name) for name in compress.__all__]
    codecs = [kind for kind in kinds if inspect.isclass(kind) and issubclass(kind, Codec) and kind is not Codec]
    text = documented("wire-format.md")
    ids = {int(number, 16) for number in re.findall(r"0x[0-9a-f]{2}\b", text)}
    read = {type(codec) for codec in ANY_LENGTH + SHAPED}
    for kind in codecs:
        assert f"`{kind.__name__}" in text, f"{kind.__name__} is missing in docs/wire-format.md"
        assert kind in read, f"{kind.__name__} is missing in this test"
    assert {codec.id for codec in ANY_LENGTH + SHAPED} <= ids


def test_examples_of_the_document() -> None:
    assert [f"{word:08x}" for word in wire_reader.philox(0, 0, 0, 0)] == [
        "6627e8d5",
        "e169c58d",
        "bc57ac4c",
        "9b00dbd8",
    ]
    assert [wire_reader.sign(i, 0, 42) for i in range(8)] == [-1, 1, 1, -1, -1, 1, -1, 1]
    pi = wire_reader.permutation(10, 7, 42)
    assert [pi(i) for i in range(10)] == [2, 4, 0, 3, 1, 9, 7, 6, 5, 8]
    assert wire_reader.fields(bytes.fromhex("01f0ffaa0a01"), 12, 4) == [1, 4095, 2730, 16]
    assert wire_reader.elias_fano(bytes.fromhex("059001c0ff53"), 10, 4, 4096) == [5, 100, 2048, 4095]
    body = bytes.fromhex("b60400000000803f000000c00000804000004040")
    assert wire_reader.read(TopK(k=4, chunk=8, value="f32"), body, 8) == [1, -2, 0, 4, 0, 0, 3, 0]


def test_the_codec_that_the_guide_writes() -> None:
    policy, codec = re.findall(r"```python\n(.*?)```", documented("choosing-a-codec.md"), re.DOTALL)
    model = torch.nn.Sequential(torch.nn.Embedding(50, 8), torch.nn.Linear(8, 4))
    names: dict[str, Any] = {"model": model, "__name__": "guide"}
    exec(policy, names)
    assert [numel for _, numel in names["compress"].runs] == [432, 4]
    sys.modules["guide"] = types.ModuleType("guide")
    exec(codec, names)
    whole = names["WholeSign"]()
    for n in (0, 1, 9, 5000):
        x = torch.randn(n, generator=torch.Generator().manual_seed(n))
        body, out = torch.empty(whole.nbytes(n), dtype=torch.uint8), torch.full((n,), 7.0)
        assert whole.encode(x, body) == 0
        whole.decode(body, out)
        assert torch.equal(out < 0, x < 0)
        assert n == 0 or torch.allclose(out.abs(), x.abs().mean().expand(n))
