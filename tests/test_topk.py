"""Top-k: bytes against published examples and a slow twin, every level of kernels, hostile bytes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lowcomm.compress import HAS_INF, HAS_NAN, SATURATED, TopK, available_levels, use_kernel_level
from lowcomm.compress.indices import INDEX_CODECS, decode_indices, encode_indices, index_nbytes
from lowcomm.compress.topk import largest
from lowcomm.compress.values import VALUE_CODECS, decode_values, encode_values
from sparse_reference import kept_positions, mag2, topk_mag2, tree_sum
from torch import Tensor

VECTORS: dict[str, Any] = json.loads((Path(__file__).parent / "compressors_vectors.json").read_text())
LEVELS = available_levels()


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Small inputs gain nothing from threads, and waiting for them costs much on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


TOPK_VECTORS = [name for name, entry in VECTORS.items() if name.startswith("topk_") and "body" in entry]


def encoded(codec: TopK, x: Tensor) -> tuple[Tensor, int]:
    body = torch.full((codec.nbytes(x.numel()),), 255, dtype=torch.uint8)
    return body, codec.encode(x, body)


def decoded(codec: TopK, body: Tensor, n: int) -> Tensor:
    out = torch.full((n,), 7.0)
    codec.decode(body, out)
    return out


def round_trip(codec: TopK, x: Tensor) -> Tensor:
    return decoded(codec, encoded(codec, x)[0], x.numel())


def inputs(n: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(n, generator=generator)
    cases = {
        "normal": x,
        "ties": (x * 2).round(),
        "zeros": torch.zeros(n),
        "mostly zeros": x * (torch.rand(n, generator=generator) < 0.004),
        "constant": torch.full((n,), -3.0),
        "alternating": 1.0 - 2.0 * (torch.arange(n) % 2),
        "heavy": x / torch.rand(n, generator=generator).clamp(min=1e-6),
        "other scale in every part": x
        * torch.exp(8 * torch.randn(n // 500 + 1, generator=generator))[torch.arange(n) // 500],
        "huge": (x * 2e38).clamp(-3.4e38, 3.4e38),
        "tiny": x * 1e-32,
        "denormal": x * 1e-40,
        "ramp": torch.arange(n, dtype=torch.float32),
    }
    for bad in (float("nan"), float("inf"), -float("inf")):
        broken = x.clone()
        broken[n // 3 :: 700] = bad
        cases[str(bad)] = broken
    return cases


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", TOPK_VECTORS)
def test_published_vectors(name: str, level: str) -> None:
    entry = VECTORS[name]
    x = torch.tensor(entry.get("x", VECTORS["x8"]))
    index, value = name.split("_")[-2:]
    k = 4 if "k4" in name else 2
    codec = TopK(k=k, chunk=8, index={"ef": "elias_fano"}.get(index, index), value=value, iterations=0)
    with use_kernel_level(level):
        body, flags = encoded(codec, x)
        assert bytes(body.tolist()).hex() == entry["body"] and flags == 0
        assert decoded(codec, body, x.numel()).tolist() == entry["decoded"]


def test_published_index_records() -> None:
    for name, c in (("elias_fano_c4096_k4", 4096), ("elias_fano_c8_k4", 8)):
        indices = torch.tensor([VECTORS[name]["indices"]])
        section = bytes(encode_indices("elias_fano", indices, c).tolist()).hex()
        assert section.rstrip("0") == VECTORS[name]["hex"].rstrip("0")
    section = encode_indices("bits", torch.tensor([VECTORS["pack12"]["indices"]]), 4096)
    assert bytes(section.tolist()).hex() == VECTORS["pack12"]["hex"] + "0000"


@pytest.mark.parametrize("iterations", [0, 1, 3])
def test_published_mag2_levels(iterations: int) -> None:
    entry = VECTORS["mag2_lloyd"]["iters"][str(iterations)]
    values = torch.tensor([VECTORS["mag2_lloyd"]["x"]], dtype=torch.float32)
    scales, codes, flags = encode_values("mag2", values, torch.tensor([8]), iterations)
    assert scales.view(torch.bfloat16).tolist() == [entry["small"], entry["large"]] and flags == 0
    assert [int(codes[i // 4]) >> (2 * i % 8) & 3 for i in range(8)] == entry["codes"]
    small, large, twin = mag2(values[0].numpy(), iterations)
    assert (small, large, twin) == (entry["small"], entry["large"], entry["codes"])


def test_published_mag2_and_four_bins() -> None:
    entry = VECTORS["mag2"]
    small, large, codes = mag2(np.array(entry["x"], dtype=np.float32), 0)
    assert (small, large, codes) == (pytest.approx(entry["small"]), pytest.approx(entry["large"]), entry["codes"])
    entry = VECTORS["bucket_mean_4bins_6sigma"]
    values = torch.tensor([entry["x"]])
    scales, codes, _ = encode_values("bins4", values, torch.tensor([8]), 0)
    assert [int(codes[i // 4]) >> (2 * i % 8) & 3 for i in range(8)] == entry["codes"]
    assert decode_values("bins4", scales, codes, 8, 1)[0].tolist() == pytest.approx(entry["decoded"], rel=1e-6)


def test_ties_go_to_the_lower_position() -> None:
    entry = VECTORS["topk_tie"]
    assert largest(torch.tensor([entry["x"]], dtype=torch.float32), entry["k"]).tolist() == [entry["indices"]]
    for level in LEVELS:
        with use_kernel_level(level):
            x = torch.tensor([2.0, -2.0] * 64)
            assert round_trip(TopK(k=5, chunk=128, value="f32"), x).nonzero().flatten().tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("level", LEVELS)
def test_nonfinite_elements_count_as_zero(level: str) -> None:
    x = torch.randn(128).clamp(min=0.1)
    x[5], x[70] = float("nan"), -float("inf")
    clean = torch.nan_to_num(x, nan=0.0, neginf=0.0)
    codec = TopK(k=8, chunk=128)
    with use_kernel_level(level):
        body, flags = encoded(codec, x)
        assert flags == HAS_NAN | HAS_INF
        assert torch.equal(body, encoded(codec, clean)[0])
        assert encoded(codec, clean)[1] == 0
        # also where they are among the entries sent, as zeros, because too little else is there
        few = torch.zeros(128)
        few[0], few[9] = float("nan"), 3.0
        residual = torch.zeros(128)
        assert codec.encode_feedback(few, residual, residual, body) == HAS_NAN
        assert float(residual[0]) == 0.0 and bool(torch.isfinite(residual).all())


@pytest.mark.parametrize("level", LEVELS)
def test_equals_the_slow_twin(level: str) -> None:
    with use_kernel_level(level):
        for n, c, k in [(200, 64, 5), (192, 64, 64), (130, 64, 1), (1000, 256, 33), (70, 128, 100), (3, 8, 7)]:
            for name, x in inputs(n).items():
                if name in ("huge", "tiny", "denormal"):  # out of the range in which the twin's plain sums work
                    continue
                codec = TopK(k=k, chunk=c)
                body, out = topk_mag2(x, k, c)
                assert bytes(encoded(codec, x)[0].tolist()) == body, (name, n, c, k)
                assert torch.equal(round_trip(codec, x), out), (name, n, c, k)


def configurations() -> Iterator[tuple[TopK, int]]:
    settings = itertools.cycle(itertools.product(INDEX_CODECS, VALUE_CODECS))
    for c, k in [(8, 3), (64, 5), (128, 16), (4096, 64), (4096, 65), (4096, 700), (4096, 4096), (4096, 1)]:
        for n in (0, 1, c - 1, c, c + k, 3 * c + 5):
            for _ in range(5 if c == 8 or k == 64 else 2):
                index, value = next(settings)
                yield TopK(k=k, chunk=c, index=index, value=value, iterations=n % 4), n
    for n in (1, 777, 10007):
        for index, value in itertools.product(INDEX_CODECS, ("mag2", "f32")):
            yield TopK(density=0.03, scope="global", index=index, value=value), n


def all_results(codec: TopK, x: Tensor) -> list[Tensor]:
    body, flags = encoded(codec, x)
    acc = torch.linspace(-1, 1, x.numel())
    codec.decode_add(body, acc, 0.3)
    candidate, feedback_body = x.float().clone(), torch.full_like(body, 255)
    residual = torch.linspace(1, -2, x.numel())
    kept = residual.clone()
    feedback_flags = codec.encode_feedback(candidate, residual, candidate, feedback_body, decay=0.9)
    assert torch.equal(residual, kept)
    return [body, decoded(codec, body, x.numel()), acc, candidate, feedback_body, torch.tensor([flags, feedback_flags])]


def test_every_level_writes_the_same_bytes() -> None:
    names = itertools.cycle(inputs(1))
    dtypes = itertools.cycle([torch.float32, torch.float32, torch.bfloat16, torch.float16])
    for codec, n in configurations():
        name, dtype = next(names), next(dtypes)
        x = inputs(n)[name].to(dtype)
        with use_kernel_level("torch"):
            expected = all_results(codec, x)
        assert all(bool(torch.isfinite(result).all()) for result in expected[1:4]), (codec, name)
        for level in LEVELS[1:]:
            with use_kernel_level(level):
                for left, right in zip(all_results(codec, x), expected, strict=True):
                    assert torch.equal(left, right), (level, codec, n, name, dtype)


def test_threads_and_alignment_do_not_change_the_bytes() -> None:
    x = torch.randn(4096 * 300 + 77)
    codec = TopK()
    body = encoded(codec, x)[0]
    out = decoded(codec, body, x.numel())
    torch.set_num_threads(3)
    shifted = torch.empty(x.numel() + 1)[1:].copy_(x)
    assert torch.equal(encoded(codec, shifted)[0], body)
    padded = torch.empty(body.numel() + 3, dtype=torch.uint8)[3:].copy_(body)
    codec.decode(padded, shifted)
    assert torch.equal(shifted, out)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("scope", ["chunk", "global"])
def test_energy_identity(level: str, scope: str) -> None:
    x = torch.randn(3 * 4096 + 100)
    with use_kernel_level(level):
        out = round_trip(TopK(value="f32", scope=scope), x)
    sent = out != 0
    assert torch.equal(out[sent], x[sent])
    squares = x.double() ** 2
    error = ((x.double() - out.double()) ** 2).sum()
    assert float(error) == pytest.approx(float(squares.sum() - squares[sent].sum()), rel=1e-12)


def test_default_costs_0_164_bit_per_parameter() -> None:
    x = torch.randn(2**20)
    body, _ = encoded(TopK(density=1 / 64), x)
    assert 8 * body.numel() / x.numel() == (64 * 8 + 64 * 2 + 32) / 4096 == 0.1640625
    assert TopK(index="bits").bits_per_element(2**20) == pytest.approx(0.2266, abs=1e-4)


@pytest.mark.parametrize(
    ("value", "error"), [("mag2", 0.0039), ("sign1", 0.0125), ("bins4", 0.0128), ("int8", 9.5e-6), ("bf16", 2.7e-6)]
)
def test_error_of_kept_values_on_gaussian_data(value: str, error: float) -> None:
    x = torch.randn(2**17, generator=torch.Generator().manual_seed(0))
    exact, out = round_trip(TopK(value="f32"), x), round_trip(TopK(value=value), x)
    assert float((exact - out).square().sum() / exact.square().sum()) == pytest.approx(error, rel=0.15)
    assert float(exact.square().sum() / x.square().sum()) == pytest.approx(0.12, rel=0.05)


@pytest.mark.parametrize("value", [value for value in VALUE_CODECS if value != "bins4"])
def test_contraction(value: str) -> None:
    for c, k in ((64, 8), (128, 3), (64, 64)):
        codec = TopK(k=k, chunk=c, value=value)
        delta = codec.delta(5 * c)
        assert delta is not None and 0 < delta <= 1
        for name, x in inputs(5 * c).items():
            if name in ("tiny", "denormal") or not bool(torch.isfinite(x).all()):
                continue
            x = x.double() / x.abs().max().clamp(min=1e-30)
            left = (x - round_trip(codec, x.float()).double()).square().sum()
            assert float(left) <= (1 - delta) * float(x.square().sum()) + 1e-9, (name, c, k)


def test_settings_that_say_the_same_are_equal() -> None:
    assert TopK() == TopK(density=1 / 64) == TopK(k=64) == TopK(density=0.9, k=64)
    assert TopK().config == TopK(k=64).config
    assert TopK(density=1e-9).k == 1
    assert TopK(k=3) != TopK(k=4) and TopK().id == 0x10 and TopK(scope="global").id == 0x11


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"density": 0.0}, r"density must be in \(0, 1\] but is: 0.0"),
        ({"density": 1.5}, "density must be"),
        ({"k": 0}, "k must be at least 1 but is: 0"),
        ({"k": 5000}, "k must be at most chunk = 4096 but is: 5000"),
        ({"chunk": 1000}, "power of two"),
        ({"chunk": 2048, "scope": "tile2d"}, "of four for tile2d"),
        ({"index": "gamma"}, "index must be one of"),
        ({"value": "fp8"}, "value must be one of"),
        ({"scope": "row"}, "scope must be one of"),
        ({"iterations": -1}, "iterations must be >= 0"),
        ({"shapes": ((2, 3),)}, "shapes are for the scopes"),
    ],
)
def test_settings_out_of_range(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TopK(**settings)


def test_scope_tensor_keeps_a_share_of_every_tensor() -> None:
    shapes = ((10, 7), (), (300,), (0, 4), (1,))
    codec = TopK(density=0.1, scope="tensor", value="f32").for_shapes(shapes)
    assert codec.shapes == shapes
    x = torch.randn(372)
    out = round_trip(codec, x)
    start = 0
    for numel, k in ((70, 7), (1, 1), (300, 30), (1, 1)):
        part = x[start : start + numel].numpy()
        assert out[start : start + numel].nonzero().flatten().tolist() == kept_positions(part, k)
        start += numel
    with pytest.raises(ValueError, match="have 372 elements but the vector has 371"):
        codec.nbytes(371)
    with pytest.raises(ValueError, match="see for_shapes"):
        TopK(scope="tensor").nbytes(5)
    assert TopK().for_shapes(shapes) == TopK()


@pytest.mark.parametrize("level", LEVELS)
def test_scope_tile2d(level: str) -> None:
    shapes = ((128, 192), (100,), (7, 3, 30), ())
    codec = TopK(k=16, scope="tile2d", value="f32", shapes=shapes)
    x = torch.randn(128 * 192 + 100 + 630 + 1)
    with use_kernel_level(level):
        out = round_trip(codec, x)
        acc = x.clone()
        codec.decode_add(encoded(codec, x)[0], acc)
        residual = torch.ones_like(x)
        codec.encode_feedback(x, residual, residual, torch.empty(codec.nbytes(x.numel()), dtype=torch.uint8))
    assert torch.equal(acc, x + out)
    expected = torch.zeros_like(x)
    start = 0
    # (rows, columns, tile height, tile width): largest divisors up to 64
    for rows, columns, h, w in ((128, 192, 64, 64), (1, 100, 1, 50), (7, 90, 7, 45), (1, 1, 1, 1)):
        matrix = x[start : start + rows * columns].view(rows, columns)
        target = expected[start : start + rows * columns].view(rows, columns)
        for r, s in itertools.product(range(0, rows, h), range(0, columns, w)):
            tile = matrix[r : r + h, s : s + w]
            for i in kept_positions(tile.reshape(-1).numpy(), min(16, h * w)):
                target[r + i // w, s + i % w] = tile[i // w, i % w]
        start += rows * columns
    assert torch.equal(out, expected)


def test_zero_bytes_decode_to_zeros() -> None:
    for index, value, level in itertools.product(INDEX_CODECS, VALUE_CODECS, LEVELS):
        for k in (1, 9):
            codec = TopK(k=k, chunk=64, index=index, value=value)
            with use_kernel_level(level):
                out = decoded(codec, torch.zeros(codec.nbytes(200), dtype=torch.uint8), 200)
            assert torch.equal(out, torch.zeros(200)), codec


def outcome(codec: TopK, body: Tensor, n: int) -> tuple[Tensor, Tensor] | None:
    """What decode and decode_add write, or None where both refuse; a refused sum is left alone."""
    out, acc = torch.full((n + 2,), 7.0), torch.full((n + 2,), 7.0)
    try:
        codec.decode(body, out[1:-1])
    except ValueError:
        with pytest.raises(ValueError, match="damaged"):
            codec.decode_add(body, acc[1:-1])
        assert float(out[0]) == float(out[-1]) == 7.0 and bool((acc == 7).all())
        return None
    codec.decode_add(body, acc[1:-1])
    assert float(out[0]) == float(out[-1]) == float(acc[0]) == float(acc[-1]) == 7.0
    return out, acc


def test_hostile_bytes_are_refused_or_harmless() -> None:
    """Random and damaged bodies: all levels agree, nothing outside the output is touched, nothing half is applied."""
    generator = torch.Generator().manual_seed(3)
    refused = accepted = 0
    for index, value in itertools.product(INDEX_CODECS, ("f32", "bf16", "mag2", "sign1", "int8", "int4", "bins4")):
        for c, k, n in ((64, 5, 200), (4096, 64, 9000)):
            codec = TopK(k=k, chunk=c, index=index, value=value)
            good, _ = encoded(codec, torch.randn(n, generator=generator))
            bodies = [
                torch.randint(256, good.shape, generator=generator, dtype=torch.uint8),
                torch.full_like(good, 255),
            ]
            for _ in range(6):
                damaged = good.clone()
                place = int(torch.randint(good.numel(), (1,), generator=generator))
                damaged[place] ^= 1 << int(torch.randint(8, (1,), generator=generator))
                bodies.append(damaged)
            for body in bodies:
                results = []
                for level in LEVELS:
                    with use_kernel_level(level):
                        results.append(outcome(codec, body, n))
                refused += results[0] is None
                accepted += results[0] is not None
                for result in results[1:]:
                    assert (result is None) == (results[0] is None), (codec, level)
                    if result is not None and results[0] is not None:
                        assert all(torch.equal(*pair) for pair in zip(result, results[0], strict=True)), codec
    assert refused > 100 and accepted > 50


@pytest.mark.parametrize("level", LEVELS)
def test_named_damage_is_refused(level: str) -> None:
    def refuse(codec: TopK, body: Tensor) -> None:
        with use_kernel_level(level), pytest.raises(ValueError, match="damaged"):
            decoded(codec, body, 64)

    codec = TopK(k=4, chunk=64, value="f32")  # 4 * 4 low bits, then 4 + 4 upper bits
    good = encoded(codec, torch.randn(64))[0]
    for upper in (0b11111, 0b111, 0b10000000):  # too many, too few, one
        body = good.clone()
        body[2] = upper
        refuse(codec, body)
    for fields in ([5, 5, 6, 7], [9, 8, 7, 6], [0, 0, 0, 1]):
        codec = TopK(k=4, chunk=64, value="f32", index="u32")
        body = torch.cat(
            (torch.tensor(fields, dtype=torch.int32).view(torch.uint8), torch.zeros(16, dtype=torch.uint8))
        )
        refuse(codec, body)
    body = torch.cat((torch.tensor([1, 2, 3, 64], dtype=torch.int32).view(torch.uint8), body[16:]))
    refuse(codec, body)
    for value, dtype in (("mag2", torch.bfloat16), ("sign1", torch.bfloat16), ("int8", torch.float32)):
        codec = TopK(k=4, chunk=64, value=value)
        for bad in (float("nan"), float("inf")):
            body = encoded(codec, torch.randn(64))[0]
            body[: dtype.itemsize] = torch.tensor([bad], dtype=dtype).view(torch.uint8)
            refuse(codec, body)


def test_wrong_length_is_refused() -> None:
    codec = TopK()
    body = torch.zeros(codec.nbytes(5000), dtype=torch.uint8)
    with pytest.raises(ValueError, match="a body of 168 contiguous uint8 bytes was expected"):
        codec.decode(body[:-4], torch.empty(5000))
    with pytest.raises(ValueError, match="was expected"):
        codec.decode(body, torch.empty(4096))


def test_largest_values_saturate() -> None:
    x = torch.full((64,), 3.4028234663852886e38)
    for value, level in itertools.product(("bf16", "mag2", "sign1", "int8", "int4"), LEVELS):
        codec = TopK(k=8, chunk=64, value=value)
        with use_kernel_level(level):
            body, flags = encoded(codec, x)
            assert flags == (0 if value.startswith("int") else SATURATED)
            assert float(decoded(codec, body, 64).max()) == pytest.approx(3.4e38, rel=0.01)


def test_section_sizes_of_long_rows() -> None:
    assert index_nbytes("elias_fano", 2**30, 2**24, 1) == (2**24 * 8) // 8
    indices = torch.tensor([[0, 2**33, 2**34 - 1]])
    section = encode_indices("elias_fano", indices, 2**34)
    assert torch.equal(decode_indices("elias_fano", section, 2**34, 3, 1), indices)


def test_tree_sum_of_the_twin() -> None:
    assert tree_sum([np.float32(v) for v in VECTORS["tree_sum"]["x"]]) == VECTORS["tree_sum"]["result"]
