"""Top-k on CUDA, run on the CPU by an emulator: the bytes and values of the torch operations, bit for bit."""

from __future__ import annotations

import itertools
import shutil

import pytest
import torch
from codec_checks import adversarial, encode, gaussian
from cuda_emulator import ORDERS, Emulator, compiler, emulated
from lowcomm.compress import TopK, decode_outer_step, decode_sum, encode_delta, launches, use_kernel_level
from lowcomm.compress.indices import INDEX_CODECS
from test_cuda_kernels import assert_anywhere, assert_inside, assert_same
from torch import Tensor

pytestmark = pytest.mark.skipif(not shutil.which(compiler()), reason="needs a C++ compiler")

EMULATORS = {order: Emulator(order) for order in ORDERS}
SHUFFLED = EMULATORS["shuffled"]
VALUES = ("f32", "bf16", "mag2", "sign1", "int8", "int4")


def hard(n: int) -> list[Tensor]:
    """Rows in which selection is hard: ties, few magnitudes, few entries that are not zero, denormal numbers."""
    x = gaussian(n, n + 1)
    sparse = torch.where(torch.rand(n, generator=torch.Generator().manual_seed(n)) < 0.004, x, 0.0)
    return [(2 * x).round(), sparse, x * 1e-40, torch.arange(n, dtype=torch.float32), 1.0 - 2.0 * (torch.arange(n) % 2)]


def test_default() -> None:
    n = 4096 + 1300
    inputs = [*adversarial(n), *hard(n)]
    assert_same(TopK(), inputs[0], EMULATORS["forward"])
    assert_same(TopK(), inputs[-5], EMULATORS["backward"])
    for number in (0, 3, 5, 9, 11, 14, 16, 17):
        assert_same(TopK(), inputs[number], SHUFFLED, number)


def test_hard_inputs() -> None:
    codec, n = TopK(k=8, chunk=512), 512 + 130
    for number, x in enumerate([*adversarial(n), *hard(n)]):
        assert_same(codec, x, EMULATORS[tuple(ORDERS)[number % 3]], number)


def test_around_the_borders_of_chunks() -> None:
    for n in (4095, 4096, 4097, 2 * 4096 + 63):
        assert_same(TopK(), gaussian(n), SHUFFLED)


def test_tails() -> None:
    codec = TopK(k=4, chunk=32)
    for n in (*range(0, 131, 7), 31, 32, 33, 64, 65):
        with use_kernel_level("torch"):
            expected = encode(codec, gaussian(n))[0]
        with emulated(EMULATORS["backward"]):
            assert torch.equal(encode(codec, gaussian(n))[0], expected), n


@pytest.mark.parametrize("value", VALUES)
def test_formats(value: str) -> None:
    n = 3 * 64 + 50
    inputs = [*adversarial(n), *hard(n)]
    for number, (index, k) in enumerate(itertools.product(INDEX_CODECS, (5, 64))):
        for x in inputs[number % 4 :: 4]:
            assert_same(TopK(k=k, chunk=64, index=index, value=value), x, SHUFFLED, index)


@pytest.mark.parametrize(
    ("chunk", "k"),
    [
        (1, 1),
        (2, 1),
        (8, 4),
        (16, 16),
        (64, 1),
        (512, 16),
        (512, 17),
        (1024, 300),
        (2048, 64),
        (4096, 129),
        (8192, 128),
    ],
)
def test_rows(chunk: int, k: int) -> None:
    for x in (gaussian(2 * chunk + chunk // 2 + 1), (2 * gaussian(3 * chunk)).round()):
        for index, value in (("elias_fano", "mag2"), ("bits", "sign1")):
            assert_same(TopK(k=k, chunk=chunk, index=index, value=value), x, SHUFFLED)


def test_most_entries() -> None:
    assert_same(TopK(k=4096, value="int4"), gaussian(4096 + 5), SHUFFLED)
    assert_same(TopK(k=1500, chunk=2048), gaussian(2048 + 1600), SHUFFLED)
    assert not launches.takes_rows(16384, 64, 0, 2) and not launches.takes_rows(4096, 64, 0, 6)


def test_other_scopes() -> None:
    shapes = ((30, 20), (7,), (11, 3, 5))
    for scope in ("tensor", "tile2d", "global"):
        for value in ("mag2", "f32"):
            codec = TopK(density=0.05, chunk=256, scope=scope, value=value).for_shapes(shapes)
            assert_same(codec, gaussian(772), SHUFFLED)


def test_memory() -> None:
    for codec in (
        TopK(),
        TopK(k=5, chunk=64, index="bits", value="f32"),
        TopK(k=9, chunk=64, index="u32", value="int8"),
    ):
        assert_inside(codec, codec.chunk + 77, EMULATORS["forward"])
        assert_anywhere(codec, codec.chunk + 77, EMULATORS["forward"])


@pytest.mark.parametrize("index", INDEX_CODECS)
def test_damage_is_refused(index: str) -> None:
    codec = TopK(k=8, chunk=64, index=index)
    body, flags = encode(codec, gaussian(200))
    generator = torch.Generator().manual_seed(1)
    refused = 0
    for _ in range(30):
        bad = body.clone()
        bad[torch.randint(body.numel(), (2,), generator=generator)] = torch.randint(
            256, (2,), dtype=torch.uint8, generator=generator
        )
        outcomes = []
        for emulator in (None, SHUFFLED):
            acc = gaussian(200, 1)
            try:
                if emulator is None:
                    with use_kernel_level("torch"):
                        codec.decode_add(bad, acc, 0.5)
                else:
                    with emulated(emulator):
                        codec.decode_add(bad, acc, 0.5)
                outcomes.append((acc, False))
            except ValueError:
                assert torch.equal(acc, gaussian(200, 1))
                outcomes.append((acc, True))
        assert outcomes[0][1] == outcomes[1][1] and torch.equal(outcomes[0][0], outcomes[1][0])
        refused += outcomes[0][1]
    assert flags == 0 and 0 < refused < 30


def test_empty_rows() -> None:
    for index in INDEX_CODECS:
        codec = TopK(k=4, chunk=64, index=index, value="f32")
        body = torch.zeros(codec.nbytes(150), dtype=torch.uint8)
        out, acc = torch.ones(150), gaussian(150)
        with emulated(SHUFFLED):
            codec.decode(body, out)
            codec.decode_add(body, acc)
        assert not out.any() and torch.equal(acc, gaussian(150))


def test_fused_passes() -> None:
    """Sums over ranks in rank order, the outer step behind them, and the delta in front of the encoder."""
    codec, n = TopK(), 4096 + 300
    size = codec.nbytes(n)
    frames = torch.zeros(3, size + 16, dtype=torch.uint8)
    bodies = [frame[16:] for frame in frames]
    for rank, body in enumerate(bodies):
        codec.encode(gaussian(n, rank), body)

    def outcome() -> list[Tensor]:
        out, x, b = torch.empty(n), gaussian(n, 7), gaussian(n, 8)
        decode_sum(codec, bodies, out, [0.5, 1.0, 3.0], 3.0)
        for nesterov in (False, True):
            decode_outer_step(codec, bodies, x, b, lr=0.7, momentum_factor=0.9, nesterov=nesterov, divisor=3.0)
        parts = [out, x.clone(), b.clone()]
        for live in (gaussian(n, 9), gaussian(n, 9).bfloat16()):
            body, candidate = torch.empty(size, dtype=torch.uint8), torch.empty(n)
            encode_delta(codec, x, live, body, b, candidate, decay=0.9)
            parts += [body, candidate]
        return parts

    with use_kernel_level("torch"):
        expected = outcome()
    with emulated(SHUFFLED):
        found = outcome()
        assert {"lc_topk_encode", "lc_topk_decode"} <= SHUFFLED.launched
        bodies[1][:4] = 255
        anchor, momentum = gaussian(n), gaussian(n, 1)
        with pytest.raises(ValueError, match="damaged"):
            decode_outer_step(codec, bodies, anchor, momentum, lr=0.7)
    assert torch.equal(anchor, gaussian(n)) and torch.equal(momentum, gaussian(n, 1))
    assert [torch.equal(a, b) for a, b in zip(expected, found, strict=True)] == [True] * len(expected)
