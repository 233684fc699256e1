"""Top-k of cosine transforms: the transform, tiles, padding, equality of all levels, and the guarantee."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lowcomm.compress import EF14, HAS_INF, HAS_NAN, DCTTopK, TopK, available_levels, use_kernel_level
from lowcomm.compress.dct import dct_matrix, transform_tiles
from torch import Tensor

VECTOR: dict[str, Any] = json.loads((Path(__file__).parent / "compressors_vectors.json").read_text())["dct4"]
levels = pytest.mark.parametrize("level", available_levels())
SHAPES = ((64, 128), (100,), (48, 6, 5), (7, 11), (), (0, 3), (33, 64))
SIZE = sum(math.prod(shape) for shape in SHAPES)


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def round_trip(codec: DCTTopK, x: Tensor) -> tuple[Tensor, Tensor]:
    body, out = torch.empty(codec.nbytes(x.numel()), dtype=torch.uint8), torch.empty(x.numel())
    codec.encode(x, body)
    codec.decode(body, out)
    return body, out


@levels
def test_published_coefficients(level: str) -> None:
    x = torch.tensor(VECTOR["x"], dtype=torch.float32)
    with use_kernel_level(level):
        for tiles in (x.view(1, 1, 4), x.view(1, 4, 1)):
            assert torch.allclose(transform_tiles(tiles).view(-1), torch.tensor(VECTOR["X"]), atol=1e-6)


@pytest.mark.parametrize("n", [1, 2, 3, 8, 48, 64, 127])
def test_matrix_is_orthonormal(n: int) -> None:
    c = dct_matrix(n).double()
    assert torch.allclose(c @ c.t(), torch.eye(n, dtype=torch.float64), atol=1e-6)


@levels
@pytest.mark.parametrize(
    ("h", "w"), [(64, 64), (1, 64), (48, 5), (3, 7), (64, 100), (9, 8), (4, 128), (128, 3), (1, 1)]
)
def test_transform_and_inverse(level: str, h: int, w: int) -> None:
    tiles = gaussian(3, h, w)
    tiles[1, :, 1:] = 0  # most factors zero
    tiles[2] = 0
    tiles[2, h // 2, w // 2] = -2.0
    exact = dct_matrix(h).double() @ tiles.double() @ dct_matrix(w).double().t()
    with use_kernel_level("torch"):
        expected, expected_back = transform_tiles(tiles), transform_tiles(tiles, inverse=True)
    with use_kernel_level(level):
        got, back = transform_tiles(tiles), transform_tiles(tiles, inverse=True)
        assert torch.allclose(transform_tiles(got, inverse=True), tiles, atol=1e-4)
    assert torch.allclose(got.double(), exact, atol=1e-4)
    assert torch.equal(got.view(torch.int32), expected.view(torch.int32))
    assert torch.equal(back.view(torch.int32), expected_back.view(torch.int32))


@pytest.mark.parametrize("codec", [DCTTopK(shapes=SHAPES), DCTTopK(shapes=SHAPES, value="f32", index="bits", side=16)])
def test_all_levels_write_the_same_bytes(codec: DCTTopK) -> None:
    x = gaussian(SIZE)
    with use_kernel_level("torch"):
        body, out = round_trip(codec, x)
    assert body.numel() == codec.nbytes(SIZE)
    for level in available_levels():
        with use_kernel_level(level):
            again, decoded = round_trip(codec, x)
        assert torch.equal(again, body)
        assert torch.equal(decoded.view(torch.int32), out.view(torch.int32))


@pytest.mark.parametrize("n", [0, 1, 7, 255, 256, 257, 1000])
def test_flat_vectors_of_any_length(n: int) -> None:
    x = gaussian(n)
    everything = DCTTopK(k=256, side=16, value="f32", index="bitmap")
    assert torch.allclose(round_trip(everything, x)[1], x, atol=1e-4)
    few = DCTTopK(k=8, side=16, value="f32")
    assert 0 <= -(-n // 256) * few.nbytes(256) - few.nbytes(n) < 16  # only the padding of the sections differs
    got = round_trip(few, x)[1]
    assert float((x - got).norm() ** 2) <= (1 - few.delta(n)) * float(x.norm() ** 2) * (1 + 1e-5)


def test_tiles_are_those_of_the_matrix() -> None:
    matrix = gaussian(128, 192)
    codec = DCTTopK(k=1, value="f32", shapes=((128, 192),))
    assert codec.transform(matrix.view(-1)).numel() == matrix.numel()
    with_one_wave = torch.zeros(128, 192)
    wave = torch.outer(dct_matrix(64)[3], dct_matrix(64)[5])
    with_one_wave[64:, 128:] = 10 * wave
    got = round_trip(codec, with_one_wave.view(-1))[1].view(128, 192)
    assert torch.allclose(got, with_one_wave, atol=1e-5)


def test_smooth_tiles_need_few_coefficients() -> None:
    ramp = (torch.arange(64.0).view(64, 1) + torch.arange(64.0)).view(-1)
    got = round_trip(DCTTopK(value="f32"), ramp)[1]
    assert float((got - ramp).norm() / ramp.norm()) < 1e-3
    plain, out = TopK(k=32, value="f32"), torch.empty(4096)
    body = torch.empty(plain.nbytes(4096), dtype=torch.uint8)
    plain.encode(ramp, body)
    plain.decode(body, out)
    assert float((out - ramp).norm() / ramp.norm()) > 0.9


def test_mean_over_contributing_ranks() -> None:
    """The recipe of the docstring: coefficients are exchanged, and decoded sums are transformed back once."""
    codec, sparse = DCTTopK(k=8, side=16, value="f32"), TopK(k=8, chunk=256, value="f32")
    xs = [gaussian(600, seed=seed) for seed in range(3)]
    total, counts, plain = torch.zeros(768), torch.zeros(768), torch.zeros(600)
    for x in xs:
        coefficients, decoded = codec.transform(x), torch.empty(768)
        body = torch.empty(sparse.nbytes(768), dtype=torch.uint8)
        sparse.encode(coefficients, body)
        sparse.decode(body, decoded)
        total += decoded
        counts += decoded != 0
        assert torch.equal(body, round_trip(codec, x)[0])
        plain += round_trip(codec, x)[1]
    assert torch.allclose(codec.inverse(total, 600), plain, atol=1e-5)
    assert codec.inverse(total / counts.clamp(min=1), 600).shape == (600,)


def test_bits_per_element() -> None:
    assert DCTTopK().bits_per_element(4096) == (32 * 9 + 32 * 2 + 32) / 4096
    assert DCTTopK(shapes=((64, 64),)).nbytes(4096) == DCTTopK().nbytes(4096) == 48


def test_feedback_conserves() -> None:
    codec, x, feedback = DCTTopK(shapes=SHAPES), gaussian(SIZE), EF14()
    state, total = feedback.init(SIZE, torch.device("cpu")), torch.zeros(SIZE)
    body, out = torch.empty(codec.nbytes(SIZE), dtype=torch.uint8), torch.empty(SIZE)
    for step in range(10):
        _, state = feedback.encode(codec, x.clone(), state, body, step=step)
        codec.decode(body, out)
        total += out
        assert torch.allclose(total + state["residual"], x * (step + 1), atol=1e-3)


@levels
def test_non_finite_elements_count_as_zero(level: str) -> None:
    x, clean = gaussian(SIZE), gaussian(SIZE)
    x[3], x[70], clean[3], clean[70] = math.nan, math.inf, 0.0, 0.0
    codec = DCTTopK(shapes=SHAPES)
    body = torch.empty(codec.nbytes(SIZE), dtype=torch.uint8)
    with use_kernel_level(level):
        assert codec.encode(x, body) == HAS_NAN | HAS_INF
        assert torch.equal(body, round_trip(codec, clean)[0])
        huge = torch.full((SIZE,), 3e38)
        assert bool(torch.isfinite(round_trip(codec, huge)[1]).all())


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: DCTTopK(k=0), "k must be at least 1"),
        (lambda: DCTTopK(side=129), "side must be 1 to 128 but is: 129"),
        (lambda: DCTTopK(value="f64"), "value must be one of"),
        (lambda: DCTTopK(shapes=((2, 3),)).nbytes(7), "6 elements but the vector has 7"),
    ],
)
def test_wrong_use_is_refused(build: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def test_shapes_come_from_the_fragment() -> None:
    assert DCTTopK().for_shapes([list(shape) for shape in SHAPES]) == DCTTopK(shapes=SHAPES)  # type: ignore[misc]
