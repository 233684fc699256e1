"""On a GPU: the bytes of the CPU for every codec, on any stream, in CUDA graphs, at any address, at any size.

    pytest tests/test_gpu.py        (LOWCOMM_GPU_LARGE=0 leaves out the sizes that need many gigabytes)

Without a GPU everything here is skipped; the same kernels run in an emulator in test_cuda_kernels.py.
"""

from __future__ import annotations

import math
import os

import pytest
import torch
from lowcomm.compress import (
    E3M0,
    HAS_INF,
    HAS_NAN,
    Cast,
    Codec,
    Eden,
    Float8,
    Int,
    Int2,
    Int4,
    Int8,
    Sign,
    StoSign,
    Ternary,
    TopK,
    decode_outer_step,
    decode_sum,
    encode_delta,
    gpu,
    late_flags,
    launches,
)
from torch import Tensor

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch sees none")

CODECS: tuple[Codec, ...] = (
    *(Cast("f32"), Cast("bf16"), Cast("fp16")),
    *(Int8(), Int4(), Int2(), Int8(affine=True), Int4(scale="bf16"), Int4(rounding="stochastic"), Int(bits=5)),
    *(Float8("e4m3"), Float8("e5m2"), E3M0(), E3M0(rounding="stochastic", scale="pow2"), E3M0(4096)),
    *(Sign("l1"), Sign("l2"), Sign("two_means"), Sign("none"), Sign(block=4096), StoSign(4.0)),
    *(Ternary(), Ternary(packing="2bit"), Ternary("stochastic", clip=2.5)),
    *(TopK(), TopK(value="f32"), TopK(index="bits"), Eden(bits=1), Eden(bits=4), Eden(bits=2, mode="unbiased")),
)
WITH_KERNELS = [codec for codec in CODECS if codec._on_cuda]
LARGE = os.environ.get("LOWCOMM_GPU_LARGE", "1") == "1"


def gaussian(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def bytes_for(n: int, codec: Codec, device: str) -> Tensor:
    return torch.full((codec.nbytes(n),), 0xAB, dtype=torch.uint8, device=device)


def outcome(codec: Codec, x: Tensor) -> list[Tensor]:
    """What a codec makes of x on the device of x."""
    n, device, place = x.numel(), str(x.device), {"step": 3, "rank": 2, "bucket": 5}
    body, out, acc = bytes_for(n, codec, device), torch.full((n,), 7.0, device=x.device), x.float().clone()
    flags = codec.encode(x, body, **place)
    codec.decode(body, out, **place)
    codec.decode_add(body, acc, 0.3, **place)
    parts = [body.clone(), torch.tensor([flags]), out, acc]
    if x.dtype == torch.float32:
        residual = x.flip(0).nan_to_num(0, 0, 0)
        codec.encode_feedback(x, residual, residual, body, decay=0.9, **place)
        parts += [body, residual]
    return [part.cpu() for part in parts]


def assert_same(codec: Codec, x: Tensor) -> None:
    expected, found = outcome(codec, x), outcome(codec, x.cuda())
    same = [torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(expected, found, strict=True)]
    assert all(same), (codec.config, x.numel(), x.dtype, same)


def test_small_kernels_are_used() -> None:
    assert gpu.usable(), "CuPy 14 or newer and NVRTC are needed; see the log"
    x = torch.zeros(1, device="cuda")
    assert all(launches.runs(codec, x) for codec in WITH_KERNELS)


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.config)
def test_small_tails_and_adversarial(codec: Codec) -> None:
    for n in (0, 1, 7, 255, 4097, 10_007):
        assert_same(codec, gaussian(n, n))
    x = gaussian(10_007)
    odd = x.clone()
    odd[::17], odd[5::29], odd[7::31] = math.nan, math.inf, -math.inf
    for hard in (odd, x * 1e-35, x.sign() * 3.4e38, torch.zeros(10_007), x.bfloat16(), x.half()):
        assert_same(codec, hard)


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.config)
def test_a_million_elements(codec: Codec) -> None:
    assert_same(codec, gaussian(2**20 + 13))


@pytest.mark.skipif(not LARGE, reason="LOWCOMM_GPU_LARGE=0")
@pytest.mark.parametrize("codec", [Sign(), Int8(), Int4(), E3M0(), Ternary(), TopK(), Eden(bits=1)], ids=repr)
def test_a_quarter_of_a_billion_elements(codec: Codec) -> None:
    x = torch.randn(2**28, generator=torch.Generator("cuda").manual_seed(0), device="cuda")
    body = bytes_for(x.numel(), codec, "cuda")
    codec.encode(x, body)
    on_cpu = bytes_for(x.numel(), codec, "cpu")
    codec.encode(x.cpu(), on_cpu)
    assert torch.equal(body.cpu(), on_cpu)


@pytest.mark.skipif(not LARGE, reason="LOWCOMM_GPU_LARGE=0")
@pytest.mark.parametrize("codec", [Sign(), Int8(), Ternary()], ids=repr)
def test_more_than_two_to_the_31_bytes_and_elements(codec: Codec) -> None:
    """The end of a vector of 2^31 elements and some, against the same elements on their own."""
    n, tail = 2**31 + 1280 * 7 + 13, 1280 * 7 + 13
    x = torch.empty(n, device="cuda")
    x[-tail:] = gaussian(tail).cuda()
    x[:-tail] = 1.0
    body, out = bytes_for(n, codec, "cuda"), torch.empty(n, device="cuda")
    codec.encode(x, body)
    codec.decode(body, out)
    alone, decoded = bytes_for(tail, codec, "cpu"), torch.empty(tail)
    codec.encode(gaussian(tail), alone)
    codec.decode(alone, decoded)
    assert torch.equal(out[-tail:].cpu(), decoded)


def test_small_misaligned_views() -> None:
    x = gaussian(5000)
    for codec in WITH_KERNELS:
        expected = outcome(codec, x)[0]
        for shift in (1, 2, 3, 8):
            floats = torch.zeros(5016, device="cuda")[shift : shift + 5000].copy_(x)
            body = torch.zeros(codec.nbytes(5000) + 16, dtype=torch.uint8, device="cuda")[shift:][: codec.nbytes(5000)]
            codec.encode(floats, body, step=3, rank=2, bucket=5)
            assert torch.equal(body.cpu(), expected), (codec.config, shift)


def test_small_on_another_stream() -> None:
    """Work queued on a user's stream, behind a long kernel, is waited for."""
    stream = torch.cuda.Stream()
    for codec in WITH_KERNELS:
        x = gaussian(2**20).cuda()
        expected = outcome(codec, gaussian(2**20) * 2)[0]
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(10_000_000)
            x.mul_(2)
            body = bytes_for(x.numel(), codec, "cuda")
            codec.encode(x, body, step=3, rank=2, bucket=5)
        stream.synchronize()
        assert torch.equal(body.cpu(), expected), codec.config


def test_small_in_a_graph() -> None:
    for codec in WITH_KERNELS:
        x, n = gaussian(10_000).cuda(), 10_000
        body, out = bytes_for(n, codec, "cuda"), torch.empty(n, device="cuda")
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):  # loads the kernels
            codec.encode(x, body)
            codec.decode(body, out)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            flags = codec.encode(x, body)
            codec.decode(body, out)
        late_flags(x.device)
        for seed in (1, 2):
            x.copy_(gaussian(n, seed))
            graph.replay()
            expected, decoded = bytes_for(n, codec, "cpu"), torch.empty(n)
            codec.encode(gaussian(n, seed), expected)
            codec.decode(expected, decoded)
            assert flags == 0 and torch.equal(body.cpu(), expected) and torch.equal(out.cpu(), decoded), codec.config
        assert late_flags(x.device) == 0
        x[17], x[4000] = math.nan, math.inf
        graph.replay()
        assert late_flags(x.device) == HAS_NAN | HAS_INF and late_flags(x.device) == 0


def test_small_fused_passes() -> None:
    n, ranks = 10_007, 8
    for codec in (Sign(), Int4(), Int8(), E3M0(), Float8(), Ternary(), Cast()):
        frames = torch.zeros(ranks, codec.nbytes(n) + 16, dtype=torch.uint8)
        for rank, frame in enumerate(frames):
            codec.encode(gaussian(n, rank), frame[16:])
        found = []
        for device in ("cpu", "cuda"):
            there = frames.to(device)
            bodies = [frame[16:] for frame in there]
            out, x, b = torch.empty(n, device=device), gaussian(n, 20).to(device), gaussian(n, 21).to(device)
            body, left = bytes_for(n, codec, device), torch.empty(n, device=device)
            decode_sum(codec, bodies, out, [0.5] * 7 + [2.0], 3.0)
            decode_outer_step(codec, bodies, x, b, lr=0.7, momentum_factor=0.9, nesterov=True, divisor=3.0)
            encode_delta(codec, x, gaussian(n, 22).to(device), body, b, left, decay=0.9)
            found.append([part.cpu() for part in (out, x, b, body, left)])
        assert [torch.equal(a, b) for a, b in zip(*found, strict=True)] == [True] * 5, codec.config


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_small_on_the_second_device() -> None:
    x = gaussian(5000)
    for codec in WITH_KERNELS:
        body = bytes_for(5000, codec, "cuda:1")
        codec.encode(x.to("cuda:1"), body, step=3, rank=2, bucket=5)
        assert torch.equal(body.cpu(), outcome(codec, x)[0]), codec.config
