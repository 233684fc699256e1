"""Bit packing, the deterministic sum and the shared random generator against published and hand-made vectors."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lowcomm.compress import available_levels, packing, philox, use_kernel_level
from lowcomm.compress.philox import permutation, rademacher, uniform

VECTORS = json.loads((Path(__file__).parent / "compressors_vectors.json").read_text())


def test_tree_sum_vector() -> None:
    assert float(packing.tree_sum(torch.tensor(VECTORS["tree_sum"]["x"]))) == VECTORS["tree_sum"]["result"]


@given(st.integers(1, 300), st.integers(0, 2**31))
@settings(max_examples=50, deadline=None)
def test_tree_sum_folds_halves(n: int, seed: int) -> None:
    values = np.random.default_rng(seed).normal(size=n).astype(np.float32)
    padded = np.zeros(1 << max(n - 1, 0).bit_length(), np.float32)
    padded[:n] = values
    while padded.size > 1:
        padded = padded[: padded.size // 2] + padded[padded.size // 2 :]
    assert packing.tree_sum(torch.from_numpy(values)).numpy() == padded[0]


def test_tree_sum_of_nothing_and_of_rows() -> None:
    assert float(packing.tree_sum(torch.empty(0))) == 0
    rows = torch.randn(3, 5)
    assert torch.equal(packing.tree_sum(rows), torch.stack([packing.tree_sum(row) for row in rows]))


def test_chunked_tree_sum() -> None:
    values = torch.randn(10_000)
    parts = [packing.tree_sum(values[i : i + 4096]) for i in (0, 4096, 8192)]
    assert torch.equal(packing.chunked_tree_sum(values), packing.tree_sum(torch.stack(parts)))


def test_pack12_vector() -> None:
    packed = packing.pack_bits(torch.tensor(VECTORS["pack12"]["indices"]), 12)
    assert bytes(packed.tolist()).hex() == VECTORS["pack12"]["hex"]


@pytest.mark.parametrize("width", range(1, 33))
def test_bit_stream_of_every_width(width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    for n in (0, 1, 2, 3, 7, 8, 9, 17, 64, 101):
        codes = torch.randint(0, 2**width, (n,), generator=generator)
        stream = sum(int(code) << (i * width) for i, code in enumerate(codes))
        packed = packing.pack_bits(codes, width)
        assert bytes(packed.tolist()) == stream.to_bytes((n * width + 7) // 8, "little")
        assert torch.equal(packing.unpack_bits(packed, width, n), codes)
        signed = codes - (codes >> (width - 1) << width)
        assert torch.equal(packing.pack_bits(signed, width), packed)
        assert torch.equal(packing.unpack_bits(packed, width, n, signed=True), signed)


def test_unused_tail_bits_are_ignored() -> None:
    packed = packing.pack_bits(torch.tensor([1, 2, 3]), 3)
    packed[1] |= 0xFE
    assert packing.unpack_bits(packed, 3, 3).tolist() == [1, 2, 3]


def test_width_is_checked() -> None:
    with pytest.raises(ValueError, match="width must be 1 to 32 bits but is: 33"):
        packing.pack_bits(torch.tensor([1]), 33)


def test_base3() -> None:
    codes = VECTORS["ternary3"]["codes"]
    packed = packing.pack_base3(torch.tensor(codes))
    assert bytes(packed.tolist()).hex() == VECTORS["ternary3"]["body"][8:12]
    for n in (0, 1, 4, 5, 6, 23):
        trits = torch.randint(0, 3, (n,))
        assert torch.equal(packing.unpack_base3(packing.pack_base3(trits), n), trits)
    with pytest.raises(ValueError, match="at most 242 but one is 243"):
        packing.unpack_base3(torch.tensor([243], dtype=torch.uint8), 5)


@pytest.mark.parametrize("case", VECTORS["philox_kat"])
def test_philox_known_answers(case: dict[str, list[str]]) -> None:
    counter, key = ([int(word, 16) for word in case[name]] for name in ("ctr", "key"))
    q = counter[0] | counter[1] << 32
    words = philox.philox4x32(
        torch.tensor([q - 2**64 if q >= 2**63 else q]), counter[2], counter[3], key[0] | key[1] << 32
    )
    assert [f"{word:08x}" for word in words[0].tolist()] == case["out"]


def test_uniform_vectors() -> None:
    assert philox.uniform(8, seed=42, stream=0, step=0).tolist() == VECTORS["uniform_seed42_stream0_step0_first8"]
    assert philox.uniform(4, seed=42, stream=3, step=5).tolist() == VECTORS["uniform_seed42_stream3_step5_first4"]


def test_streams_differ() -> None:
    draws = [
        philox.uniform(64, seed=philox.bucket_seed(seed, bucket), stream=philox.noise_stream(rank), step=step)
        for seed, bucket, rank, step in ((1, 0, 0, 0), (1, 1, 0, 0), (1, 0, 1, 0), (1, 0, 0, 1), (7, 0, 0, 0))
    ]
    for i, a in enumerate(draws):
        assert all(not torch.equal(a, b) for b in draws[:i])


def test_rademacher_vector() -> None:
    assert philox.rademacher(16, seed=42, step=0).tolist() == VECTORS["rademacher_seed42"]
    assert torch.equal(philox.rademacher(1000, seed=3, step=9)[:130], philox.rademacher(130, seed=3, step=9))


def test_permutation_vectors() -> None:
    def first(n: int, k: int) -> list[int]:
        return philox.permutation(torch.arange(k), n, seed=42, step=7).tolist()

    assert first(10, 10) == VECTORS["feistel_perm_n10_seed42_step7"]
    assert first(1000, 8) == VECTORS["feistel_perm_n1000_seed42_step7_first8"]


@pytest.mark.parametrize("n", [1, 2, 3, 255, 256, 257, 1000, 5000])
def test_permutation_is_one(n: int) -> None:
    assert torch.equal(philox.permutation(torch.arange(n), n, seed=5, step=1).sort().values, torch.arange(n))


@pytest.mark.parametrize("n", [1, 5, 31, 32, 33, 127, 129, 5000, 40_000])
def test_every_level_draws_the_same_numbers(n: int) -> None:
    for seed, step in ((42, 3), (2**64 - 1, 2**32 - 1)):
        drawn = []
        for level in available_levels():
            with use_kernel_level(level):
                order = permutation(torch.arange(min(n, 700)), n, seed=seed, step=step)
                drawn.append((uniform(n, seed=seed, stream=9, step=step), rademacher(n, seed=seed, step=step), order))
        assert all(torch.equal(a, b) for other in drawn[1:] for a, b in zip(drawn[0], other, strict=True))
