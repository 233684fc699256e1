"""The CUDA kernels, run on the CPU by an emulator: the bytes and values of the torch operations, bit for bit."""

from __future__ import annotations

import shutil

import pytest
import torch
from codec_checks import adversarial, decode, encode, gaussian, results
from cuda_emulator import ORDERS, Emulator, Guarded, compiler, emulated
from lowcomm.compress import Codec, Sign, use_kernel_level
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
