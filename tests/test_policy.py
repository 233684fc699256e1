"""A codec for each parameter in one flat buffer."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from lowcomm.compress import HAS_NAN, Codec, Mixed
from lowcomm.compress.policy import sections
from reference_codecs import Dense, KeepLargest, RoundTo
from torch import Tensor, nn

CODEC = Mixed(((KeepLargest(k=2), 7), (RoundTo(0.5), 5), (Dense(), 3)))
PARTS = [(KeepLargest(k=2), 0, 7), (RoundTo(0.5), 7, 12), (Dense(), 12, 15)]


@dataclass(frozen=True)
class Draws(Dense):
    """Adds its random place to the message, so that a test sees which one it was given."""

    def encode(self, x: Tensor, out: Tensor, *, step: int = 0, rank: int = 0, bucket: int = 0) -> int:
        out.view(torch.float32).copy_(x + float(bucket % 2**48 + (bucket >> 48) * 1000) + 10000 * step + 100000 * rank)
        return 0


def test_sections_are_encoded_as_if_alone() -> None:
    x = torch.randn(15, generator=torch.Generator().manual_seed(0))
    body = torch.empty(CODEC.nbytes(15), dtype=torch.uint8)
    assert CODEC.encode(x, body) == 0
    out, start = torch.empty(15), 0
    CODEC.decode(body, out)
    for codec, first, last in PARTS:
        alone = torch.empty(codec.nbytes(last - first), dtype=torch.uint8)
        codec.encode(x[first:last], alone)
        assert torch.equal(body[start : start + alone.numel()], alone)
        expected = torch.empty(last - first)
        codec.decode(alone, expected)
        assert torch.equal(out[first:last], expected)
        start += alone.numel()
    assert start == body.numel()
    acc = torch.ones(15)
    CODEC.decode_add(body, acc, 0.5)
    assert torch.equal(acc, 1 + 0.5 * out)


@pytest.mark.parametrize("alias", ["none", "x", "residual"])
def test_feedback_pass_of_every_section(alias: str) -> None:
    generator = torch.Generator().manual_seed(1)
    x, residual = torch.randn(15, generator=generator), torch.randn(15, generator=generator)
    p = 0.5 * residual + x
    candidate = {"none": torch.empty(15), "x": x, "residual": residual}[alias]
    body = torch.empty(CODEC.nbytes(15), dtype=torch.uint8)
    CODEC.encode_feedback(x, residual, candidate, body, decay=0.5)
    out = torch.empty(15)
    CODEC.decode(body, out)
    assert torch.equal(candidate, p - out)


def test_flags_and_seeds() -> None:
    x = torch.zeros(15)
    x[13] = math.nan
    assert CODEC.encode(x, torch.empty(CODEC.nbytes(15), dtype=torch.uint8)) == HAS_NAN
    codec = Mixed(((Draws(), 2), (Draws(), 2)))
    body = torch.empty(16, dtype=torch.uint8)
    codec.encode(torch.zeros(4), body, step=1, rank=2, bucket=7)
    assert body.view(torch.float32).tolist() == [210007.0, 210007.0, 211007.0, 211007.0]


def test_choice_by_name_shape_dtype_and_role() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 2)).to(torch.bfloat16)
    seen = []

    def choose(name: str, shape: tuple[int, ...], dtype: torch.dtype, role: str) -> Codec:
        seen.append((name, shape, dtype, role))
        return KeepLargest(k=2) if len(shape) == 2 else Dense()

    codec = Mixed.from_parameters(model.named_parameters(), choose, role="gradient")
    # the bias of the first layer and both vectors of the norm are neighbours: one section
    assert codec.runs == ((KeepLargest(k=2), 12), (Dense(), 9), (KeepLargest(k=2), 6), (Dense(), 2))
    assert seen[0] == ("0.weight", (3, 4), torch.bfloat16, "gradient")
    assert codec.block == 29 and codec.nbytes(29) == 4 * 29


def test_empty_parameters_take_no_section() -> None:
    tensors = [("a", torch.zeros(0, 3)), ("b", torch.zeros(2)), ("c", torch.zeros(0)), ("d", torch.zeros(()))]
    codec = Mixed.from_parameters(tensors, lambda name, shape, dtype, role: Dense())
    assert codec.runs == ((Dense(), 3),)


def test_properties_are_those_of_the_weakest_section() -> None:
    assert CODEC.delta(15) is None
    assert Mixed(((KeepLargest(k=2), 8), (Dense(), 2))).delta(10) == 0.25
    assert CODEC.omega(15) is None and not CODEC.unbiased and not CODEC.requantizable
    assert list(sections(CODEC, 15)) == PARTS and list(sections(Dense(), 4)) == [(Dense(), 0, 4)]
    assert CODEC.config != Mixed(CODEC.runs[::-1]).config
    assert CODEC.config == "mixed:7*keeplargest:k=2;5*roundto:unit=0.5;3*dense:"


def test_empty_vector() -> None:
    body = torch.empty(CODEC.nbytes(0), dtype=torch.uint8)
    assert body.numel() == 0 and CODEC.encode(torch.empty(0), body) == 0
    CODEC.decode(body, torch.empty(0))


def test_wrong_use_is_refused() -> None:
    with pytest.raises(ValueError, match="15 elements but the vector has 14"):
        CODEC.nbytes(14)
    with pytest.raises(ValueError, match="at least one element"):
        Mixed(((Dense(), 0),))
    with pytest.raises(ValueError, match="used only once"):
        Mixed.from_parameters(iter([]), lambda name, shape, dtype, role: Dense())
