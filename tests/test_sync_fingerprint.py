"""Fingerprints: known values, sensitivity, and the check over ranks."""

from __future__ import annotations

import pytest
import torch
from lowcomm.compress import available_levels, use_kernel_level
from lowcomm.sync import Audit, SyncError, agree_on_tensors, fingerprint
from lowcomm.sync.exchange import finite_flags, scale_and_check
from lowcomm.sync.fingerprint import _MIX1, _MIX2, hash64
from ranks import run_ranks

MASK = 2**64 - 1


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * _MIX1) & MASK
    z = ((z ^ (z >> 27)) * _MIX2) & MASK
    return z ^ (z >> 31)


def _by_definition(tensor: torch.Tensor) -> int:
    data = bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())
    data += b"\0" * (-len(data) % 8)
    total = 0
    for i in range(len(data) // 8):
        total += _mix((int.from_bytes(data[8 * i : 8 * i + 8], "little") + (i + 1) * 0x9E3779B97F4A7C15) & MASK)
    return _mix((total + _mix(hash64(f"{tensor.dtype} {tuple(tensor.shape)}"))) & MASK)


def test_splitmix_known_answer() -> None:
    assert _mix(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF  # first output of splitmix64 with seed 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.uint8, torch.int16, torch.bool])
def test_equals_the_definition(dtype: torch.dtype) -> None:
    for level in available_levels():
        with use_kernel_level(level):
            for n in (0, 1, 2, 3, 5, 8, 9, 31, 1000):
                tensor = torch.arange(n).sub(3).to(dtype)
                assert fingerprint(tensor) == _by_definition(tensor)
            big = torch.arange(150_001).sub(70_000).to(dtype)
            assert fingerprint(big[1:]) == _by_definition(big[1:].clone())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_finite_flags(dtype: torch.dtype) -> None:
    largest, nan, inf = torch.finfo(dtype).max, float("nan"), float("inf")
    for level in available_levels():
        with use_kernel_level(level):
            assert finite_flags(torch.empty(0, dtype=dtype)) == 0
            for n in (1, 31, 32, 33, 200_003):
                for place in {0, n // 2, n - 1}:
                    for value, flags in [(largest, 0), (-largest, 0), (nan, 1), (-nan, 1), (inf, 2), (-inf, 2)]:
                        x = torch.full((n,), -0.0, dtype=dtype)
                        x[place] = value
                        assert finite_flags(x) == flags, (level, n, place, value)
                        assert scale_and_check(x, 0.25) == flags, (level, n, place, value)
                        expected = torch.full((n,), -0.0, dtype=dtype)
                        expected[place] = value * 0.25
                        assert torch.equal(x.nan_to_num(5.0), expected.nan_to_num(5.0)) and bool(x[0].isnan()) == (
                            place == 0 and flags == 1
                        )
            assert finite_flags(torch.tensor([1.0, inf, nan], dtype=dtype)) == 3


def test_every_bit_place_dtype_and_shape_counts() -> None:
    x = torch.randn(50_003)
    seen = {fingerprint(x), fingerprint(x.view(1, -1)), fingerprint(x.to(torch.float64)), fingerprint(x.flip(0))}
    for place in (0, 1, 4095, 50_002):
        for bit in (0, 22, 31):
            y = x.clone()
            y.view(torch.int32)[place] ^= -(2**31) if bit == 31 else 1 << bit
            seen.add(fingerprint(y))
    assert len(seen) == 16
    a, b = torch.ones(3), torch.zeros(3)
    assert len({fingerprint(t) for t in ([a, b], [b, a], [a], [b], [a, b, b], [])}) == 6
    assert fingerprint(x[::2]) == fingerprint(x[::2].clone())


def _audits(rank: int) -> list[object]:
    """What audits find: nothing, a setting, a tensor; and what they repair."""
    found: list[object] = []
    weight, groups = torch.ones(3), [{"params": [object()], "lr": 0.1, "betas": (0.9, 0.99), "name": None}]
    check = Audit(iter([("weight", weight)]), groups, every=2)
    found += [check(), check()]
    if rank == 1:
        groups[0]["betas"] = (0.9, 0.95)
        weight[1] = 2.0
    for audit in (check, check, Audit([("weight", weight)])):
        try:
            found.append(audit())
        except (SyncError, ValueError) as error:
            found.append(f"{type(error).__name__}: {error}")
    repair = Audit([("weight", weight)], groups, repair=True)
    found += [repair(), repair(), weight, groups[0]["betas"]]
    return found


def _agree_rank(rank: int, world_size: int) -> dict[str, object]:
    same, own = torch.arange(4.0), torch.tensor([1.0, float(rank == 1)])
    transposed = torch.full((2, 3), float(rank)).t()
    named = [("same", same), ("own", own), ("transposed", transposed)]
    results: dict[str, object] = {}
    for label, tensors in {
        "check": named,
        "length": named[: 2 + (rank == 2)],
        "layout": [("same", same.double() if rank == 2 else same)],
    }.items():
        try:
            agree_on_tensors(tensors, init="check")
        except ValueError as error:
            results[label] = str(error)
    odd = torch.full((3,), float(rank == 2))
    try:
        agree_on_tensors([("torn", torch.tensor([float(rank)]))], init="majority")
    except ValueError as error:
        results["torn"] = str(error)
    results["repaired"] = (agree_on_tensors([("same", same), ("odd", odd)], init="majority"), odd)
    results["audit"] = _audits(rank)
    results["differed"] = agree_on_tensors(named)
    results["then"] = agree_on_tensors(named, init="check")
    results["values"] = (own.clone(), transposed.clone())
    return results


def test_agreement_over_ranks() -> None:
    for outcome in run_ranks(_agree_rank, 3):
        assert "2 tensors differ" in outcome["check"]
        assert "the first is 'own', where ranks [1] hold other values" in outcome["check"]
        assert "rank 2 has 3 tensors but rank 0 has 2" in outcome["length"]
        assert "rank 2 has ('same', (4,), 'torch.float64')" in outcome["layout"]
        assert "no value of 'torn' is held by more than half of the 3 ranks" in outcome["torn"]
        assert outcome["repaired"][0] == ["odd"] and torch.equal(outcome["repaired"][1], torch.zeros(3))
        audit = outcome["audit"]
        assert audit[:3] == [[], [], []]
        assert audit[3] == (
            "Disagreement: settings[0]['betas'] must be the same on all ranks but is rank 0: (0.9, 0.99), rank 1: "
            "(0.9, 0.95), rank 2: (0.9, 0.99); nothing was exchanged"
        )
        assert "the first is 'weight', where ranks [1] hold other values" in audit[4]
        assert audit[5] == ["settings[0]['betas']", "weight"] and audit[6] == []
        assert torch.equal(audit[7], torch.ones(3)) and audit[8] == (0.9, 0.99)
        assert outcome["differed"] == ["own", "transposed"] and outcome["then"] == []
        assert torch.equal(outcome["values"][0], torch.tensor([1.0, 0.0]))
        assert torch.equal(outcome["values"][1], torch.zeros(3, 2))
