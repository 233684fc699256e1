"""Properties that hold for every codec, P1 to P24, on inputs that hypothesis draws.

Those of exchanges between ranks, of error feedback and of files live with what they are about; `ELSEWHERE` names them,
and a test checks that they exist.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from codec_checks import adversarial, decode, encode, gaussian, round_trip
from hypothesis import given, settings
from hypothesis import strategies as st
from lowcomm.compress import (
    E3M0,
    HAS_INF,
    HAS_NAN,
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
    available_levels,
    use_kernel_level,
)
from torch import Tensor

ABSMAX: list[Codec] = [
    *(Int8(), Int4(), Int2(), Int8(block=7), Int(bits=5, block=32), Int4(scale="bf16"), Int8(scale="pow2")),
    *(Float8(), Float8("e5m2", 16), E3M0(), E3M0(32, scale="pow2")),
]
STOCHASTIC: list[Codec] = [
    *(Int4(rounding="stochastic"), Int8(32, rounding="stochastic"), E3M0(16, rounding="stochastic")),
    *(QSGD(), QSGD(7, 16), NuQSGD(), NaturalCompression(), Ternary("stochastic"), Ternary("stochastic", "2bit", 16)),
]
DETERMINISTIC_TERNARY: list[Codec] = [Ternary(), Ternary(packing="2bit", block=64)]
SIGNS: list[Codec] = [Sign(), Sign("l2", 64), Sign("two_means", 16), Sign("none")]
SPARSE: list[Codec] = [
    *(TopK(), TopK(k=3, chunk=32), TopK(k=3, chunk=32, value="f32"), TopK(k=4, chunk=16, index="bits", value="bf16")),
    *(TopK(density=0.2, scope="global", value="f32"), TopK(k=5, chunk=64, index="bitmap", value="int4")),
    *(TopK(k=5, chunk=64, index="u32", value="int8"), TopK(k=5, chunk=64, value="sign1")),
    *(Threshold(0.7), Threshold(0.1, 0.2), SampledTopK(0.1)),
]
ROTATED: list[Codec] = [
    *(Eden(1), Eden(2, block=64), Eden(3, "matched", 64), Eden(4, "biased", 64)),
    *(Eden(1, "unbiased", 64), Eden(4, "unbiased", 64)),
]
LINEAR: list[Codec] = [
    *(RandomK(0.3), RandomK(0.3, method="stratified", contractive=False), RandomK(0.3, method="block")),
    *(SRHT(density=0.5, chunk=64), CountSketch(density=0.5)),
]
OTHERS: list[Codec] = [
    *(Cast("f32"), Cast("bf16"), Cast("fp16"), Int8(affine=True), Int4(affine=True, block=16)),
    *(ZeroPlusPlus(), Codebook(), Codebook("quantile", 64), StoSign(2.0)),
    *(DCTTopK(k=5, side=8), PowerSGD(rank=1, min_rate=1)),
]
CODECS = [*ABSMAX, *STOCHASTIC, *DETERMINISTIC_TERNARY, *SIGNS, *SPARSE, *ROTATED, *LINEAR, *OTHERS]
NO_ZERO = (0x22, 0x26)  # signs without a scale cannot say zero
CAPPED = (0x3D, 0x01)  # formats with a range of their own
WHERE = {"step": 3, "rank": 2, "bucket": 5}

ELSEWHERE = {
    "P13": [
        "test_feedback.py::test_residual_conserves_what_was_put_in",
        "test_feedback.py::test_failed_rounds_leave_no_trace",
    ],
    "P14": ["test_feedback.py::test_limits", "test_feedback.py::test_a_lossless_codec_leaves_nothing"],
    "P15": ["test_sync.py::test_codecs_equal_their_emulation_on_all_ranks"],
    "P16": ["test_sync.py::test_raw_two_phase_is_the_ordered_mean"],
    "P18": [
        "test_sync_robust.py::test_order_of_ranks_does_not_matter",
        "test_sync_robust.py::test_translation_moves_the_result_along",
        "test_sync_robust.py::test_identical_inputs_give_that_input",
        "test_sync_robust.py::test_one_arbitrary_rank_moves_the_result_by_a_bounded_amount",
    ],
    "P19": [
        "test_frames.py::test_wrong_magic_codec_or_round_is_rejected",
        "test_frames.py::test_a_truncated_frame_is_rejected",
        "test_hostile.py::test_wrong_lengths_are_refused",
    ],
    "P20": [
        "test_delta.py::test_any_bits_come_back",
        "test_delta.py::test_another_base_or_a_damaged_body_changes_nothing",
    ],
    "P21": ["test_feedback.py::test_resume_is_bit_exact", "test_sync_state.py::test_load_state_resumes_bit_for_bit"],
    "P22": ["test_sync_traffic.py::test_receipts_count_what_is_sent", "test_sync_sums.py::test_plans_come_true"],
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Small inputs gain nothing from threads, and waiting for them costs much on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def each(codecs: list[Codec]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("codec", codecs, ids=lambda codec: codec.config)


def drawn(seed: int, n: int) -> Tensor:
    """Numbers of one of several kinds, by seed: ordinary, heavy tails, ties, mostly zero, other scales."""
    x = gaussian(n, seed)
    kind = seed % 5
    if kind == 1:
        x = x / gaussian(n, seed + 1).abs().clamp(min=1e-4)
    elif kind == 2:
        x = (2 * x).round()
    elif kind == 3:
        x = x * (gaussian(n, seed + 1) > 1)
    elif kind == 4:
        x = x * 2.0 ** (seed % 61 - 30)
    return x


SEEDS = st.integers(0, 2**31)
few = settings(max_examples=6, deadline=None, derandomize=True)


def test_every_property_has_a_test() -> None:
    here = Path(__file__).read_text()
    for number in range(1, 25):
        assert f"P{number}" in ELSEWHERE or re.search(rf"def test_p{number}_", here), f"P{number} has no test"
    for places in ELSEWHERE.values():
        for place in places:
            file, name = place.split("::")
            assert f"def {name}(" in (Path(__file__).parent / file).read_text(), f"{place} does not exist"


@each(CODECS)
def test_p1_bodies_have_the_promised_length(codec: Codec) -> None:
    """And all of it is written: what was in the buffer before does not show."""
    block = min(codec.block, 512)
    for n in (0, 1, 7, block - 1, block, block + 1, 3 * block + 5, 4096, 10007):
        x, memory = gaussian(n), torch.full((codec.nbytes(n) + 64,), 0x5C, dtype=torch.uint8)
        codec.encode(x, memory[32:-32], **WHERE)
        assert bool((memory[:32] == 0x5C).all()) and bool((memory[-32:] == 0x5C).all())
        other = torch.full((codec.nbytes(n),), 0xA3, dtype=torch.uint8)
        codec.encode(x, other, **WHERE)
        assert torch.equal(memory[32:-32], other)
        assert codec.nbytes(n) % 4 == 0 and (n == 0) == (codec.nbytes(n) == 0)


@each([*ABSMAX, *DETERMINISTIC_TERNARY])
@few
@given(seed=SEEDS, n=st.integers(1, 600))
def test_p2_encoding_what_was_decoded_changes_nothing(codec: Codec, seed: int, n: int) -> None:
    x = drawn(seed, n)
    if codec.id in (0x24, 0x25):  # holds where all kept magnitudes are equal
        x = x.sign() * 0.75
    once = round_trip(codec, x)
    body = encode(codec, once)[0]
    assert torch.equal(decode(codec, body, n), once)
    if codec.id not in (0x24, 0x25) and getattr(codec, "scale", "f32") == "f32":  # other scales may halve
        codes = (n * getattr(codec, "bits", 8) + 31) // 32 * 4
        assert torch.equal(body[-codes:], encode(codec, x)[0][-codes:])


@each([Int4(), Int(bits=5), Int2(), Sign(), E3M0(), Ternary(packing="2bit"), Eden(3, block=64)])
def test_p2_unused_bits_are_zero_and_ignored(codec: Codec) -> None:
    bits = {0x20: 1, 0x24: 2}.get(codec.id) or codec.bits  # type: ignore[attr-defined]
    for n in (1, 3, 13, 61):
        coordinates = n if codec.id != 0x41 else max(1, 1 << (n - 1).bit_length())
        used, body = coordinates * bits % 32, encode(codec, gaussian(n))[0]
        word = int.from_bytes(bytes(body[-4:].tolist()), "little")
        assert used == 0 or word >> used == 0
        expected = decode(codec, body, n)
        if used:
            word |= (2**32 - 1) << used & (2**32 - 1)
            body[-4:] = torch.tensor(list(word.to_bytes(4, "little")), dtype=torch.uint8)
        for level in available_levels():
            with use_kernel_level(level):
                assert torch.equal(decode(codec, body, n), expected)


@each(CODECS)
def test_p3_zeros_stay_zeros(codec: Codec) -> None:
    for n in (1, 33, 300):
        if codec.id in NO_ZERO:
            continue
        assert not round_trip(codec, torch.zeros(n), **WHERE).any()
        assert not round_trip(codec, torch.full((n,), -0.0), **WHERE).any()
        assert not decode(codec, torch.zeros(codec.nbytes(n), dtype=torch.uint8), n, **WHERE).any()


SYMMETRIC = [*ABSMAX, *DETERMINISTIC_TERNARY, *SIGNS[:2], *SPARSE, *LINEAR, *OTHERS[:3]]
SYMMETRIC += [QSGD(), NuQSGD(), NaturalCompression(), Ternary("stochastic"), DCTTopK(k=5, side=8)]


@each(SYMMETRIC)
@few
@given(seed=SEEDS, n=st.integers(1, 400))
def test_p4_the_opposite_vector_is_sent_as_the_opposite(codec: Codec, seed: int, n: int) -> None:
    x = drawn(seed, n)
    if codec.id in (0x10, 0x20, 0x21):
        x = torch.where(x == 0, 1.0, x)  # zero has one sign
    assert torch.equal(round_trip(codec, -x, **WHERE), -round_trip(codec, x, **WHERE))


@each([c for c in CODECS if c.id not in (0x13, 0x22, 0x26, *CAPPED)])
@few
@given(seed=SEEDS, n=st.integers(1, 400), power=st.integers(-20, 20))
def test_p5_powers_of_two_pass_through(codec: Codec, seed: int, n: int, power: int) -> None:
    x = gaussian(n, seed)
    scaled = round_trip(codec, x * 2.0**power, **WHERE)
    assert torch.equal(scaled, round_trip(codec, x, **WHERE) * 2.0**power)


@each([c for c in [*ABSMAX, ZeroPlusPlus()] if c.block >= 32])
@few
@given(seed=SEEDS)
def test_p6_order_within_a_block_does_not_matter(codec: Codec, seed: int) -> None:
    x = drawn(seed, codec.block)
    order = torch.randperm(codec.block, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(round_trip(codec, x[order]), round_trip(codec, x)[order])


def hard_vectors(n: int) -> list[Tensor]:
    one, two, huge = torch.zeros(n), torch.zeros(n), torch.full((n,), 1e-3)
    one[-1], two[0], two[n // 2], huge[n // 3] = -3.0, 1.0, 1.0, 1e4
    alternating = 1.0 - 2.0 * (torch.arange(n) % 2)
    constant = [torch.full((n,), value) for value in (0.3, -0.3, 1e-40, -0.0)]
    return [one, two, huge, alternating, *constant, *(x.float() for x in adversarial(n)[:10])]


@each([codec for codec in CODECS if codec.delta(300) is not None])
def test_p7_contraction_on_hard_vectors(codec: Codec) -> None:
    for n in (1, 64, 300):
        delta = codec.delta(n)
        assert delta is not None and 0 < delta <= 1
        for number, x in enumerate(hard_vectors(n)):
            x = x.nan_to_num(0.0, 0.0, 0.0)
            body, flags = encode(codec, x, **WHERE)
            if flags:
                continue  # said to be beyond what the codec can do
            energy = float(x.double().square().sum())
            error = float((x - decode(codec, body, n, **WHERE)).double().square().sum())
            # blocks below 2^-100 are sent as zeros
            slack = n * 2.0**-200 + 1e-6 * energy
            assert error <= (1 - delta) * energy + slack, (n, number, error / max(energy, 1e-300), 1 - delta)


UNBIASED: list[Codec] = [
    *(Int4(32, rounding="stochastic"), Int8(32, rounding="stochastic"), Int2(block=32, rounding="stochastic")),
    *(E3M0(32, rounding="stochastic"), QSGD(7, 32), NuQSGD(3, 32), NaturalCompression(), StoSign(4.0)),
    *(Ternary("stochastic", block=32), *(Eden(bits, "unbiased", 32) for bits in (1, 2, 3, 4))),
]


@each(UNBIASED)
def test_p8_unbiased_within_the_variance_bound(codec: Codec) -> None:
    """4096 blocks of the same 32 numbers, each with noise of its own."""
    n, draws = 32, 4096
    x = gaussian(n, 3)
    found = round_trip(codec, x.repeat(draws), **WHERE).view(draws, n).double()
    error = (found.mean(0) - x).abs()
    # what is rare may not have happened; and Eden is unbiased over all rotations, nearly so over random signs
    slack = 0.05 if codec.id in (0x40, 0x41) else 5 / draws
    assert bool((error <= 5 * found.std(0) / math.sqrt(draws) + slack * float(x.abs().max())).all())
    bound = codec.omega(n)
    if bound is not None:
        assert float((found - x).square().sum(1).mean()) <= 1.02 * bound * float(x.double().square().sum())


@pytest.mark.parametrize("method", ["permuted", "stratified", "block"])
def test_p8_random_positions_are_unbiased(method: str) -> None:
    codec, n, draws = RandomK(0.3, method=method, contractive=False), 24, 500
    x = gaussian(n, 3)
    found = torch.stack([round_trip(codec, x, step=step) for step in range(draws)]).double()
    assert bool(((found.mean(0) - x).abs() <= 5 * found.std(0) / math.sqrt(draws) + 1e-6).all())
    bound = codec.omega(n)
    assert bound is not None
    # block: one draw moves all positions together, so its mean variance needs more draws than the others
    assert float((found - x).square().sum(1).mean()) <= 1.1 * bound * float(x.double().square().sum())


def test_p8_stochastic_rounding_does_not_move_what_is_exact() -> None:
    for step in range(20):
        levels = torch.arange(-7.0, 8.0)
        assert torch.equal(round_trip(Int4(16, rounding="stochastic"), levels, step=step), levels)
        powers = torch.exp2(torch.arange(-6.0, 1.0))
        assert torch.equal(round_trip(E3M0(16, rounding="stochastic"), powers, step=step), powers)
        assert torch.equal(round_trip(NaturalCompression(), -powers, step=step), -powers)


@few
@given(seed=SEEDS, n=st.integers(2, 300))
def test_p9_exact_identities(seed: int, n: int) -> None:
    x = gaussian(n, seed).double()
    energy, l1 = float(x.square().sum()), float(x.abs().sum())

    def error(codec: Codec) -> tuple[Tensor, float]:
        decoded = round_trip(codec, x.float(), step=seed % 1000).double()
        return decoded, float((x.float().double() - decoded).square().sum())

    assert error(Sign(block=512))[1] == pytest.approx(energy - l1**2 / n, rel=1e-4, abs=1e-6 * energy)
    for bits in (1, 2, 3, 4):
        decoded, _ = error(Eden(bits, "unbiased", 512))
        # the last block is padded with zeros, so the decoded vector has coordinates that are cut off: of no product
        assert float(x @ decoded) == pytest.approx(energy, rel=1e-5)
    k = max(1, n // 5)
    kept = float(x.float().double().abs().topk(k).values.square().sum())
    assert error(TopK(k=k, scope="global", value="f32"))[1] == pytest.approx(energy - kept, rel=1e-5, abs=1e-6 * energy)


WITH_KERNELS = [*ABSMAX, *STOCHASTIC[:3], *DETERMINISTIC_TERNARY, Ternary("stochastic"), *SIGNS, *SPARSE, *ROTATED]
WITH_KERNELS += [Int8(affine=True), Int4(affine=True, block=16), StoSign(2.0), DCTTopK(k=5, side=8)]


def outcome(codec: Codec, x: Tensor) -> list[Tensor]:
    """The bits of a body, of what it stands for, and of both with a residual."""
    body, flags = encode(codec, x, **WHERE)
    candidate, corrected = torch.empty_like(x), torch.empty_like(body)
    codec.encode_feedback(x, torch.ones_like(x), candidate, corrected, **WHERE)
    decoded = decode(codec, body, x.numel(), **WHERE)
    return [body, corrected, torch.tensor([flags]), decoded.view(torch.int32), candidate.view(torch.int32)]


@each(WITH_KERNELS)
def test_p10_levels_and_threads_agree_at_every_length(codec: Codec) -> None:
    """Every n from 0 to 130, ordinary numbers beside zeros, tiny and huge ones, NaN and infinities."""
    for n in range(131):
        x = gaussian(n, n) * torch.exp2(torch.arange(n) % 7 * 3.0 - 9)
        x[3::11], x[5::41] = 0.0, -1e-35
        if n % 3 == 0:
            x[7::50], x[9::60] = math.nan, -math.inf
        with use_kernel_level("torch"):
            expected = outcome(codec, x)
        for level in available_levels()[1:]:
            with use_kernel_level(level):
                torch.set_num_threads(1 + n % 2)
                found = outcome(codec, x)
                torch.set_num_threads(1)
            assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True)), (n, level)


@each([codec for codec in SPARSE if isinstance(codec, TopK)])
@few
@given(seed=SEEDS, n=st.integers(1, 200))
def test_p11_ties_and_bad_values_have_an_order(codec: TopK, seed: int, n: int) -> None:
    x = (gaussian(n, seed) * 1.5).round()
    x[1::9] = math.nan
    x[2::13] = math.inf
    clean = x.nan_to_num(0.0, 0.0, 0.0)
    row = n if codec.scope == "global" else codec.chunk
    for level in available_levels():
        with use_kernel_level(level):
            body = encode(codec, x)[0]
            assert torch.equal(body, encode(codec, clean)[0])
            decoded = decode(codec, body, n)
        for start in range(0, n, row):
            part, sent = clean[start : start + row], decoded[start : start + row] != 0
            size = min(row, n - start)
            k = max(1, round(codec.density * row)) if codec.scope == "global" else codec.k
            order = sorted(range(size), key=lambda i: (-abs(float(part[i])), i))[:k]
            found = set(sent.nonzero().view(-1).tolist())
            if codec.value in ("f32", "bf16"):
                assert found == {i for i in order if part[i] != 0}
            assert found <= set(order)


@each(CODECS)
@few
@given(seed=SEEDS, n=st.integers(1, 300))
def test_p12_bad_values_are_flagged_and_harm_nothing_else(codec: Codec, seed: int, n: int) -> None:
    x = drawn(seed, n)
    if codec.id == 0x22:
        x = x.clamp(-1.9, 1.9)
    bad = x.clone()
    bad[seed % n], bad[(seed // 7) % n] = math.inf, math.nan
    body, flags = encode(codec, bad, **WHERE)
    wanted = HAS_NAN | (HAS_INF if seed % n != (seed // 7) % n else 0)
    assert flags & (HAS_NAN | HAS_INF) == wanted
    assert torch.equal(body, encode(codec, bad.nan_to_num(0.0, 0.0, 0.0), **WHERE)[0])
    candidate = torch.empty(n)
    assert codec.encode_feedback(bad, torch.zeros(n), candidate, body, **WHERE) & (HAS_NAN | HAS_INF) == wanted
    assert bool(torch.isfinite(candidate).all()) and candidate[seed % n] == candidate[(seed // 7) % n] == 0


@each(CODECS)
def test_p17_the_order_of_ranks_changes_rounding_only(codec: Codec) -> None:
    n, ranks = 300, 5
    bodies = [encode(codec, gaussian(n, rank), step=1, rank=rank)[0] for rank in range(ranks)]
    sums, magnitude = [], torch.zeros(n)
    for order in (range(ranks), (3, 0, 4, 2, 1)):
        acc = torch.zeros(n)
        for rank in order:
            codec.decode_add(bodies[rank], acc, 0.2, step=1, rank=rank)
        sums.append(acc)
    for rank in range(ranks):
        magnitude += decode(codec, bodies[rank], n, step=1, rank=rank).abs() * 0.2
    assert bool(((sums[0] - sums[1]).abs() <= ranks * 2.0**-23 * magnitude).all())


@each([*ABSMAX, *STOCHASTIC, *DETERMINISTIC_TERNARY, Int8(affine=True), Int4(affine=True, block=16), ZeroPlusPlus()])
@few
@given(seed=SEEDS, n=st.integers(2, 600))
def test_p23_negative_blocks_and_a_maximum_at_the_end(codec: Codec, seed: int, n: int) -> None:
    negative = -gaussian(n, seed).abs() - 0.01
    decoded = round_trip(codec, negative, **WHERE)
    assert bool((decoded <= 0).all()) and bool(decoded.any())
    last = gaussian(n, seed)
    block = min(codec.block, n)
    last[block - 1] = -50.0
    decoded = round_trip(codec, last, **WHERE)
    if codec in ABSMAX:
        assert float(decoded[block - 1]) == pytest.approx(-50.0, rel=0.3 if codec.id == 0x3A else 2.0**-6)
    if not codec.unbiased:
        assert decoded[block - 1] == decoded[:block].min()


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (2, 3, 4), (2, 1, 3, 3), (2, 2, 1, 2, 3)])
def test_p24_tensors_of_any_dimension_cost_the_same(shape: tuple[int, ...]) -> None:
    parameter = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    n = parameter.numel()
    for codec in (Int8(), TopK(density=0.5, scope="tensor"), TopK(k=3, chunk=16, scope="tile2d"), DCTTopK(side=4, k=4)):
        fitted = codec.for_shapes([shape])
        decoded = round_trip(fitted, parameter.reshape(-1), **WHERE)
        assert decoded.shape == (n,) and bool(torch.isfinite(decoded).all())
        assert fitted.nbytes(n) == codec.for_shapes([(n,)]).nbytes(n) or codec.id == 0x51 or len(shape) > 1
    assert Int8().nbytes(n) == 4 * -(-n // 256) + -(-n // 4) * 4
