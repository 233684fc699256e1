"""Threshold and sampled top-k: equal bytes on every level, exact selection when too much passes, hostile lists."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from codec_checks import (
    assert_levels_agree,
    assert_threads_and_streaming_do_not_show,
    decode,
    encode,
    gaussian,
    round_trip,
)
from lowcomm.compress import (
    DGC,
    HAS_INF,
    HAS_NAN,
    SampledTopK,
    Threshold,
    TopK,
    available_levels,
    use_kernel_level,
)
from torch import Tensor

LEVELS = available_levels()


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Small inputs gain nothing from threads, and waiting for them costs much on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


CODECS = [
    Threshold(0.5),
    Threshold(2.0, density=1.0),
    Threshold(1e-30, density=0.3),
    SampledTopK(0.01),
    SampledTopK(0.2, sample=0.3, seed=3),
    SampledTopK(1.0),
]


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.config)
def test_every_level_writes_the_same_bytes(codec: Threshold | SampledTopK) -> None:
    for n in (0, 1, 2, 31, 33, 64, 130, 4097, 10007):
        assert_levels_agree(codec, n)


@pytest.mark.parametrize("codec", [Threshold(2.5), Threshold(0.5), SampledTopK(0.01)], ids=lambda codec: codec.config)
def test_threads_do_not_show(codec: Threshold | SampledTopK) -> None:
    assert_threads_and_streaming_do_not_show(codec, 1_100_007)


def test_layout() -> None:
    x = torch.tensor([1.0, -2.0, 0.5, 4.0, -0.25, 0.0, 3.0, -1.0])
    codec = Threshold(1.5, density=0.5)
    for level in LEVELS:
        with use_kernel_level(level):
            body, flags = encode(codec, x)
            assert flags == 0
            used = struct.pack("<I3I3f", 3, 1, 3, 6, -2.0, 4.0, 3.0)
            assert bytes(body.tolist()) == used + bytes(codec.nbytes(8) - len(used))


@pytest.mark.parametrize("level", LEVELS)
def test_keeps_all_that_pass_or_the_largest(level: str) -> None:
    x = gaussian(5000)
    with use_kernel_level(level):
        kept = round_trip(Threshold(2.0), x)
        assert torch.equal(kept, torch.where(x.abs() >= 2.0, x, 0.0))
        assert torch.equal(round_trip(Threshold(float(x.abs().max())), x) != 0, x.abs() == x.abs().max())
        too_many = round_trip(Threshold(0.1, density=0.02), x)
        exact = round_trip(TopK(k=100, scope="global", value="f32", index="u32"), x)
        assert torch.equal(too_many, exact)
        ties = torch.tensor([1.0, -1.0] * 8)
        assert round_trip(Threshold(1.0, density=0.25), ties).nonzero().view(-1).tolist() == [0, 1, 2, 3]
        assert not round_trip(Threshold(100.0), x).any()


@pytest.mark.parametrize("level", LEVELS)
def test_error_is_bounded_by_the_threshold(level: str) -> None:
    x, tau = gaussian(4000), 2.2
    with use_kernel_level(level):
        error = (x - round_trip(Threshold(tau), x)).abs()
    assert float(error.max()) < tau


@pytest.mark.parametrize("level", LEVELS)
def test_nonfinite_elements_count_as_zero(level: str) -> None:
    x = gaussian(3000)
    x[5], x[2000] = math.nan, -math.inf
    clean = torch.nan_to_num(x, nan=0.0, neginf=0.0)
    with use_kernel_level(level):
        for codec in (Threshold(2.0), SampledTopK(0.01)):
            body, flags = encode(codec, x)
            assert flags == HAS_NAN | HAS_INF
            assert torch.equal(body, encode(codec, clean)[0])
            candidate = torch.empty(3000)
            assert codec.encode_feedback(x, torch.zeros(3000), candidate, body) == HAS_NAN | HAS_INF
            assert torch.isfinite(candidate).all() and candidate[5] == candidate[2000] == 0


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", ["gauss", "heavy", "sorted", "steps"])
def test_sampled_selection_is_near_the_wanted_number(kind: str, level: str) -> None:
    n = 100_000
    x = gaussian(n)
    if kind == "heavy":
        x = x / gaussian(n, 1).abs().clamp(min=1e-6)
    if kind == "sorted":
        x = x.sort().values
    if kind == "steps":
        x = x.round()
    codec = SampledTopK(0.01)
    with use_kernel_level(level):
        for step in range(5):
            kept = decode(codec, encode(codec, x, step=step)[0], n)
            count = int((kept != 0).sum())
            assert 800 <= count <= 1000
            # all that is kept is at least as large as all that is not
            assert float(kept[kept != 0].abs().min()) >= float(x[kept == 0].abs().max()) or count < 1000


def test_the_sample_moves() -> None:
    x = gaussian(50_000)
    codec = SampledTopK(0.005)
    first = [codec._sampled(50_000, step, rank, 0).start for step, rank in ((0, 0), (1, 0), (0, 1), (0, 0))]
    assert first[0] == first[3] and len(set(first)) > 1
    assert codec._sampled(400, 0, 0, 0) == slice(None)  # ceil(2 / density) elements: all of them
    assert codec._sampled(50_000, 0, 0, 0).step % 32 == 1 or 50_000 // codec._sampled(50_000, 0, 0, 0).step >= 500
    assert torch.equal(encode(codec, x, step=1)[0], encode(codec, x, step=1)[0])


@pytest.mark.parametrize("level", LEVELS)
def test_few_entries_are_sent_without_loss(level: str) -> None:
    x = torch.zeros(20_000)
    x[[3, 77, 19_999]] = torch.tensor([1e-30, -2.0, 5.0])
    with use_kernel_level(level):
        assert torch.equal(round_trip(SampledTopK(0.001), x), x)
        assert not round_trip(SampledTopK(0.001), torch.zeros(20_000)).any()
        one_hot = torch.zeros(20_000)
        one_hot[12_345] = -1e-40
        assert torch.equal(round_trip(SampledTopK(0.001), one_hot), one_hot)


def test_with_dgc() -> None:
    """What is sent and what is kept add up to the momentum-filtered gradients, with the mask off."""
    rule, codec, n = DGC(masking=False), SampledTopK(0.01), 5000
    state = rule.init(n, torch.device("cpu"))
    sent, velocity, total = torch.zeros(n), torch.zeros(n), torch.zeros(n)
    for step in range(10):
        g = gaussian(n, step)
        velocity = 0.9 * velocity + g
        total += velocity
        body = torch.empty(codec.nbytes(n), dtype=torch.uint8)
        _, state = rule.encode(codec, g.clone(), state, body, step=step)
        codec.decode_add(body, sent, step=step)
    torch.testing.assert_close(sent + state["residual"], total, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("level", LEVELS)
def test_damaged_lists_are_refused(level: str) -> None:
    codec, n = Threshold(1.0, density=0.5), 16
    good = bytes(encode(codec, gaussian(n) * 2)[0].tolist())

    def damaged(at: int, word: bytes) -> Tensor:
        return torch.tensor(list(good[:at] + word + good[at + 4 :]), dtype=torch.uint8)

    (count,) = struct.unpack("<I", good[:4])
    assert count >= 3
    bad = [
        damaged(0, struct.pack("<I", 9)),  # more than there is room for
        damaged(0, b"\xff" * 4),
        damaged(4 + 4 * (count - 1), struct.pack("<I", n)),  # behind the vector
        damaged(8, good[4:8]),  # twice the same position
        damaged(4 + 4 * count, struct.pack("<f", math.nan)),
        damaged(4 + 4 * count, struct.pack("<f", -math.inf)),
    ]
    with use_kernel_level(level):
        for body in bad:
            acc = torch.ones(n)
            with pytest.raises(ValueError, match="damaged"):
                codec.decode(body, torch.empty(n))
            with pytest.raises(ValueError, match="damaged"):
                codec.decode_add(body, acc)
            assert torch.equal(acc, torch.ones(n))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Threshold(0.0), "tau must be positive and finite but is: 0.0"),
        (lambda: Threshold(math.inf), "tau must be"),
        (lambda: Threshold(1.0, density=0), "density must be in"),
        (lambda: SampledTopK(density=2), "density must be in"),
        (lambda: SampledTopK(sample=0), "sample must be in"),
        (lambda: Threshold(1.0).nbytes(2**32), "n must be below 2.32"),
    ],
)
def test_bad_settings(build: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()
