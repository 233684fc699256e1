"""The CUDA kernels, run on the CPU by an emulator: the bytes and values of the torch operations, bit for bit."""

from __future__ import annotations

import shutil

import pytest
import torch
from codec_checks import adversarial, decode, encode, gaussian, results
from cuda_emulator import ORDERS, Emulator, Guarded, compiler, emulated
from lowcomm.compress import (
    E3M0,
    Cast,
    Codec,
    Float8,
    Int,
    Int2,
    Int4,
    Int8,
    Sign,
    Ternary,
    decode_outer_step,
    decode_sum,
    encode_delta,
    use_kernel_level,
)
from lowcomm.sync.errors import CorruptFrame
from lowcomm.sync.exchange import Shares
from lowcomm.sync.reduction import Message, Reduction
from torch import Tensor

pytestmark = pytest.mark.skipif(not shutil.which(compiler()), reason="needs a C++ compiler")

EMULATORS = {order: Emulator(order) for order in ORDERS}


def assert_same(codec: Codec, x: Tensor, emulator: Emulator, note: object = "") -> None:
    """Everything a codec computes from x is what torch operations compute."""
    with use_kernel_level("torch"):
        expected = results(codec, x)
    with emulated(emulator):
        found = results(codec, x)
    same = [torch.equal(a, b) for a, b in zip(expected, found, strict=True)]
    assert emulator.launched
    assert all(same), (codec.config, x.numel(), emulator.order, note, same)


def assert_inside(codec: Codec, n: int, emulator: Emulator) -> None:
    """Nothing is read or written outside the tensors, and nothing of the output is left unwritten."""
    memory = Guarded()
    x, residual, old = memory.copy(gaussian(n)), memory.copy(gaussian(n, 1)), gaussian(n, 2)
    body, out, acc = memory.empty(codec.nbytes(n), torch.uint8), memory.empty(n), memory.copy(old)
    with use_kernel_level("torch"):
        expected, candidate, added = encode(codec, x)[0], residual.clone(), old.clone()
        values = decode(codec, expected, n)
        codec.decode_add(expected, added, 0.5)
        codec.encode_feedback(x, candidate, candidate, torch.empty_like(body), decay=0.9)
    with emulated(emulator):
        codec.encode(x, body)
        codec.decode(body, out)
        codec.decode_add(body, acc, 0.5)
        assert torch.equal(body, expected)
        codec.encode_feedback(x, residual, residual, body, decay=0.9)
    assert torch.equal(out, values) and torch.equal(acc, added) and torch.equal(residual, candidate)
    assert not memory.close()


def assert_anywhere(codec: Codec, n: int, emulator: Emulator) -> None:
    """Addresses need not be aligned."""
    x = gaussian(n)
    with use_kernel_level("torch"):
        expected = encode(codec, x)[0]
        values = decode(codec, expected, n)
    for shift in (1, 2, 3, 4, 8):
        memory, floats = torch.zeros(codec.nbytes(n) + 16, dtype=torch.uint8), torch.zeros(2 * n + 32)
        base = -memory.data_ptr() % 16
        body = memory[base + shift : base + shift + codec.nbytes(n)]
        moved, out = floats[shift : shift + n], floats[n + 16 + shift : n + 16 + shift + n]
        moved.copy_(x)
        with emulated(emulator):
            codec.encode(moved, body)
            codec.decode(body, out)
        assert torch.equal(body, expected) and torch.equal(out, values), (codec.config, shift)


def check(codec: Codec, sizes: tuple[int, ...]) -> None:
    """All adversarial inputs at the first size in all orders of lanes; tails; borders; misaligned memory."""
    for order, emulator in EMULATORS.items():
        inputs = adversarial(sizes[0])
        for number, x in enumerate(inputs if order == "shuffled" else inputs[:2]):
            assert_same(codec, x, emulator, number)
    for n in sizes[1:]:
        assert_same(codec, gaussian(n), EMULATORS["shuffled"])
    assert_inside(codec, sizes[0], EMULATORS["forward"])
    assert_anywhere(codec, sizes[0], EMULATORS["forward"])


SCALES = ("l1", "l2", "two_means", "none")


@pytest.mark.parametrize("scale", SCALES)
def test_sign(scale: str) -> None:
    check(Sign(scale), (2 * 2048 + 256 + 77, 1, 8, 255, 256))
    for block in (8, 16, 32, 64, 128, 512, 1024, 2048, 4096, 8192):
        assert_same(Sign(scale, block), gaussian(2 * block + block // 2 + 3), EMULATORS["shuffled"])


def test_sign_tails() -> None:
    for n in range(131):
        with use_kernel_level("torch"):
            expected = encode(Sign(block=16), gaussian(n))[0]
        with emulated(EMULATORS["backward"]):
            assert torch.equal(encode(Sign(block=16), gaussian(n))[0], expected)


BLOCK_CODECS = (
    Int8(),
    Int4(),
    Int2(block=16),
    Int8(rounding="stochastic", seed=2**40 + 1),
    Int4(rounding="stochastic"),
    Int2(rounding="stochastic"),
    Int8(scale="bf16"),
    Int4(scale="pow2", rounding="stochastic"),
    Int4(affine=True),
    Int8(affine=True, rounding="stochastic"),
    Int(bits=2, affine=True),
    Float8("e4m3"),
    Float8("e5m2"),
    E3M0(),
    E3M0(scale="pow2"),
    E3M0(rounding="stochastic"),
)


@pytest.mark.parametrize("codec", BLOCK_CODECS, ids=lambda codec: codec.config)
def test_block_quantizers(codec: Codec) -> None:
    check(codec, (3 * 256 + 77, 1, 9))


def test_sizes_of_blocks() -> None:
    for block in (8, 16, 32, 64, 128, 512, 1024, 2048, 4096):
        for codec in (Int4(block=block), Int8(affine=True, block=block), E3M0(block), Float8(block=block)):
            assert_same(codec, gaussian(2 * block + block // 2 + 3), EMULATORS["shuffled"])


@pytest.mark.parametrize("format", ["f32", "bf16", "fp16"])
def test_cast(format: str) -> None:
    check(Cast(format), (2048 + 77, 1, 8))
    assert_same(Cast(format), torch.tensor([65504.0, 65519.9, 65520.0, -7e4, 3.39e38, 3.4e38]), EMULATORS["forward"])


TERNARY_CODECS = (
    Ternary(),
    Ternary(packing="2bit"),
    Ternary("stochastic", clip=2.5, seed=2**40),
    Ternary("stochastic", packing="2bit", shared_scale=1.5),
)


@pytest.mark.parametrize("codec", TERNARY_CODECS, ids=lambda codec: codec.config)
def test_ternary(codec: Ternary) -> None:
    check(codec, (2560 + 256 + 77, 1, 4, 5, 1281))


def test_ternary_blocks() -> None:
    for block in (8, 16, 32, 64, 128, 512, 1024, 2048, 8192):
        for codec in (
            Ternary(block=block),
            Ternary(packing="2bit", block=block),
            Ternary("stochastic", "base3", block, 2.5),
        ):
            assert_same(codec, gaussian(6 * block + block // 2 + 3), EMULATORS["shuffled"])


def test_ternary_refuses_damage() -> None:
    for codec, bad in ((Ternary(block=8), 243), (Ternary(packing="2bit", block=8), 0x30)):
        body, acc = encode(codec, gaussian(40))[0], torch.ones(40)
        body[-5] = bad
        with emulated(EMULATORS["forward"]):
            with pytest.raises(ValueError, match="not ternary"):
                codec.decode(body, torch.empty(40))
            with pytest.raises(ValueError, match="not ternary"):
                codec.decode_add(body, acc)
        assert torch.equal(acc, torch.ones(40))


@pytest.mark.parametrize(
    "codec", [Sign(), Int4(), Int8(affine=True), E3M0(), Float8(), Cast("bf16"), Ternary()], ids=repr
)
def test_fused_passes(codec: Codec) -> None:
    """Sums over ranks in rank order, the outer step behind them, and the delta in front of an encoder."""
    n, ranks = 2048 + 77, 5
    size = codec.nbytes(n)
    frames = torch.zeros(ranks, size + 16, dtype=torch.uint8)
    bodies = [frame[16:] for frame in frames]
    weights, divisor = [0.5, 1.0, 3.0, 0.1, 1.0], 3.0
    for rank, body in enumerate(bodies):
        with use_kernel_level("torch"):
            codec.encode(gaussian(n, rank), body)

    def outcome() -> list[Tensor]:
        out, plain, x, b = torch.empty(n), torch.empty(n), gaussian(n, 7), gaussian(n, 8)
        decode_sum(codec, bodies, out, weights, divisor)
        decode_sum(codec, bodies[:1], plain)
        for nesterov in (False, True):
            decode_outer_step(codec, bodies, x, b, lr=0.7, momentum_factor=0.9, nesterov=nesterov, divisor=divisor)
        parts = [out, plain, x.clone(), b.clone()]
        for live in (gaussian(n, 9), gaussian(n, 9).bfloat16()):
            body, candidate = torch.empty(size, dtype=torch.uint8), torch.empty(n)
            encode_delta(codec, x, live, body)
            corrected = torch.empty_like(body)
            encode_delta(codec, x, live, corrected, b, candidate, decay=0.9)
            parts += [body, corrected, candidate]
        return parts

    with use_kernel_level("torch"):
        expected = outcome()
    with emulated(EMULATORS["shuffled"]):
        found = outcome()
    assert [torch.equal(a, b) for a, b in zip(expected, found, strict=True)] == [True] * len(expected)


def test_reduction_decodes_all_messages_at_once() -> None:
    """A reduction on a GPU collects messages; the sum is the one that is made of them one by one, damage is named."""
    n, codec = 512 + 77, Ternary()
    frames = torch.zeros(3, codec.nbytes(n) + 16, dtype=torch.uint8)
    for rank, frame in enumerate(frames):
        codec.encode(gaussian(n, rank), frame[16:])

    def reduced(collects: bool) -> Tensor:
        reduction = Reduction("mean", Shares.of([1.0, 2.0, 1.0]), torch.empty(n))
        reduction._later = [] if collects else None
        for rank, factor in enumerate((1.0, 2.0, 1.0)):
            reduction.add(Message(codec, frames[rank, 16:], 0, rank, 0), factor)
        result = reduction.result(lambda total: total, None, 0)
        assert result is not None
        return result

    with use_kernel_level("torch"):
        expected = reduced(False)
    with emulated(Emulator()) as emulator:
        assert torch.equal(reduced(True), expected)
        assert emulator.launched == {"lc_ternary_decode"}
        frames[1, -8:] = 255
        with pytest.raises(CorruptFrame, match="rank 1"):
            reduced(True)
