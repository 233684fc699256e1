"""Eden on CUDA, run on the CPU by an emulator: the bytes and values of the torch operations, bit for bit."""

from __future__ import annotations

import shutil

import pytest
import torch
from codec_checks import adversarial, encode, gaussian
from cuda_emulator import ORDERS, Emulator, compiler, emulated
from lowcomm.compress import Eden, encode_delta, use_kernel_level
from lowcomm.compress.fused import fuses
from lowcomm.compress.launches import Sink
from test_cuda_kernels import assert_anywhere, assert_inside, assert_same
from torch import Tensor

pytestmark = pytest.mark.skipif(not shutil.which(compiler()), reason="needs a C++ compiler")

EMULATORS = {order: Emulator(order) for order in ORDERS}
SHUFFLED = EMULATORS["shuffled"]
MODES = ("biased", "unbiased", "matched")
BITS = (1, 2, 3, 4)


@pytest.mark.parametrize("bits", BITS)
def test_hard_inputs(bits: int) -> None:
    n = 2 * 64 + 40
    for number, x in enumerate(adversarial(n)):
        codec = Eden(bits, MODES[number % 3], 64, seed=2**40)
        assert_same(codec, x, EMULATORS[tuple(ORDERS)[number // 3 % 3]], number)


def test_default() -> None:
    for bits, mode in ((1, "biased"), (4, "unbiased")):
        assert_same(Eden(bits, mode), gaussian(4096 + 300), SHUFFLED)


def test_blocks() -> None:
    for number, block in enumerate((8, 16, 32, 128, 256, 512, 2048)):
        codec = Eden(BITS[number % 4], MODES[number % 3], block)
        assert_same(codec, gaussian(block + block // 2 + 3), SHUFFLED)
    assert not Eden(block=8192)._on_cuda


def test_tails() -> None:
    for n in (*range(0, 131, 7), 1, 2, 3, 4, 5, 31, 32, 33, 64, 65):
        codec = Eden(BITS[n % 4], block=32)
        with use_kernel_level("torch"):
            expected = encode(codec, gaussian(n))[0]
        with emulated(EMULATORS["backward"]):
            assert torch.equal(encode(codec, gaussian(n))[0], expected), n


def test_memory() -> None:
    for codec in (Eden(3, block=128), Eden(1, block=512)):
        assert_inside(codec, codec.block + 77, EMULATORS["forward"])
        assert_anywhere(codec, codec.block + 77, EMULATORS["forward"])


def test_fused_passes() -> None:
    codec, n, place = Eden(2, block=256), 512 + 77, (4, 1, 6)
    where = {"step": 4, "rank": 1, "bucket": 6}
    frames = torch.zeros(3, codec.nbytes(n), dtype=torch.uint8)
    weights = torch.tensor([0.5, 1.0, 3.0])
    out, total = torch.empty(n), torch.empty(n)
    for rank, body in enumerate(frames):
        codec.encode(gaussian(n, rank), body, **where)

    def delta() -> list[Tensor]:
        body, candidate = torch.empty(codec.nbytes(n), dtype=torch.uint8), torch.empty(n)
        encode_delta(codec, gaussian(n, 7), gaussian(n, 9), body, gaussian(n, 8), candidate, decay=0.9, **where)
        return [body, candidate]

    with use_kernel_level("torch"):
        expected = delta()
        codec.decode(frames[0], out, **where)
        out *= 0.5
        for body, weight in zip(frames[1:], (1.0, 3.0), strict=True):
            codec.decode_add(body, out, weight, **where)
        out /= torch.tensor(3.0)
    sink = Sink(codec.nbytes(n), 3, weights.data_ptr(), divisor=3.0, out=total.data_ptr())
    with emulated(SHUFFLED):
        found = delta()
        codec._launch_decode(SHUFFLED, frames[0], sink, n, place)
        assert not fuses(codec, list(frames), out)  # whoever adds up messages does not say which step they are of
    assert torch.equal(total, out)
    assert [torch.equal(a, b) for a, b in zip(expected, found, strict=True)] == [True, True]
