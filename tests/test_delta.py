"""Lossless deltas: exact for any bits, refused on another base, small for few changes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lowcomm.compress import apply_delta, make_delta
from torch import Tensor

VECTORS: dict[str, Any] = json.loads((Path(__file__).parent / "compressors_vectors.json").read_text())
DTYPES = [torch.uint8, torch.int8, torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64]


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def test_worked_example() -> None:
    entry = VECTORS["delta_bf16"]
    words = [torch.tensor([int(w, 16) for w in entry[name]], dtype=torch.int32) for name in ("old", "new")]
    old, new = (w.to(torch.int16).view(torch.bfloat16) for w in words)
    delta = make_delta(old, new)
    assert bytes(delta.body.tolist()).hex() == entry["body"]
    assert (delta.base_crc32, delta.result_crc32) == (entry["crc32_old"], entry["crc32_new"])
    apply_delta(old, delta)
    assert bits(old) == bits(new)


@given(st.data())
def test_any_bits_come_back(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(DTYPES))
    n = data.draw(st.integers(0, 300))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    old = torch.randint(0, 256, (n * dtype.itemsize,), dtype=torch.uint8, generator=generator).view(dtype)
    new = old.clone()
    raw = new.view(torch.uint8)
    for _ in range(data.draw(st.integers(0, 20)) if n else 0):
        raw[data.draw(st.integers(0, raw.numel() - 1))] ^= data.draw(st.integers(1, 255))
    delta = make_delta(old, new)
    apply_delta(old, delta)
    assert bits(old) == bits(new)
    apply_delta(old, delta)
    assert bits(old) == bits(new)


def test_size_and_chunks() -> None:
    n = 200_000
    old = torch.randn(n, generator=torch.Generator().manual_seed(0)).bfloat16()
    new = old.clone()
    places = torch.randperm(n, generator=torch.Generator().manual_seed(1))[: n // 100]
    new[places] = new[places] * 2 + 1
    delta = make_delta(old.view(400, 500), new.view(400, 500))
    assert delta.nbytes <= delta.count * 4 + 4 * 4 + 8
    assert 8 * delta.nbytes / n < 0.33
    assert delta.worth_it
    target = old.clone().view(400, 500).t().contiguous().t()
    apply_delta(target, delta)
    assert bits(target) == bits(new)
    assert not make_delta(old, old + 1).worth_it


def test_another_base_or_a_damaged_body_changes_nothing() -> None:
    old = torch.arange(10.0)
    new = old.clone()
    new[[2, 7]] = -1.0
    delta = make_delta(old, new)
    other = old + 1
    kept = other.clone()
    with pytest.raises(ValueError, match="fetch the full tensor"):
        apply_delta(other, delta)
    assert torch.equal(other, kept)
    for place in range(delta.body.numel()):
        body = delta.body.clone()
        body[place] ^= 1
        target = old.clone()
        try:
            apply_delta(target, replace(delta, body=body))
        except ValueError:
            assert torch.equal(target, old)
        else:
            assert bits(target) == bits(new)  # a bit of the padding
    for body in (delta.body[:-1], torch.cat([delta.body, delta.body[:1]])):
        with pytest.raises(ValueError, match="bytes was expected"):
            apply_delta(old.clone(), replace(delta, body=body))


def test_tensors_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="one shape and dtype"):
        make_delta(torch.zeros(3), torch.zeros(4))
    with pytest.raises(ValueError, match="not be bool"):
        make_delta(torch.zeros(3, dtype=torch.bool), torch.zeros(3, dtype=torch.bool))
    with pytest.raises(ValueError, match="the delta is for"):
        apply_delta(torch.zeros(4), make_delta(torch.zeros(3), torch.ones(3)))
