"""Bytes that no encoder wrote: every codec, at every kernel level, refuses them or decodes them to a whole vector.

Run under AddressSanitizer (`make sanitize`), the same tests show that no byte outside the buffers is touched.
"""

import inspect

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lowcomm.compress import Codec, available_levels, use_kernel_level

from lowcomm import compress


def _codecs() -> list[Codec]:
    kinds = [getattr(compress, name) for name in compress.__all__]
    found = []
    for kind in kinds:
        if inspect.isclass(kind) and issubclass(kind, Codec) and kind is not Codec:
            required = [p for p in inspect.signature(kind).parameters.values() if p.default is p.empty]
            if not required:
                found.append(kind())
    return found


CODECS = [*_codecs(), compress.Threshold(1.0)]
MIXED = compress.Mixed(((compress.Int4(), 700), (compress.TopK(), 5000), (compress.Threshold(1.0), 300)))
GUARD = 64


def _outcome(codec: Codec, body: torch.Tensor, n: int, level: str) -> torch.Tensor | None:
    """The decoded vector, or None where the body was refused. Nothing around the vector may change."""
    memory = torch.full((n + 2 * GUARD,), 7.0)
    out = memory[GUARD : GUARD + n]
    with use_kernel_level(level):
        try:
            codec.decode(body, out)
        except ValueError:
            out = None
    assert bool((memory[:GUARD] == 7.0).all())
    assert bool((memory[GUARD + n :] == 7.0).all())
    return out


def _check(codec: Codec, body: torch.Tensor, n: int) -> None:
    outcomes = [_outcome(codec, body, n, level) for level in available_levels()]
    for level, outcome in zip(available_levels(), outcomes, strict=True):
        assert (outcome is None) == (outcomes[0] is None), f"{level} differs from torch on what it refuses"
        if outcome is not None and outcomes[0] is not None:
            same = torch.equal(outcome.nan_to_num(nan=1.5), outcomes[0].nan_to_num(nan=1.5))
            assert same, f"{level} differs from torch"


def _valid(codec: Codec, n: int, seed: int) -> torch.Tensor:
    x = torch.randn(n, generator=torch.Generator().manual_seed(seed))
    body = torch.empty(codec.nbytes(n), dtype=torch.uint8)
    codec.encode(x, body)
    return body


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.config)
@settings(max_examples=12, deadline=None, derandomize=True)
@given(n=st.integers(1, 9000), seed=st.integers(0, 2**32 - 1), flips=st.integers(1, 40))
def test_flipped_bits(codec: Codec, n: int, seed: int, flips: int) -> None:
    body = _valid(codec, n, seed)
    generator = torch.Generator().manual_seed(seed)
    where = torch.randint(body.numel(), (flips,), generator=generator)
    body[where] ^= torch.randint(1, 256, (flips,), generator=generator).to(torch.uint8)
    _check(codec, body, n)


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.config)
@settings(max_examples=12, deadline=None, derandomize=True)
@given(n=st.integers(1, 9000), seed=st.integers(0, 2**32 - 1))
def test_noise(codec: Codec, n: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    _check(codec, torch.randint(0, 256, (codec.nbytes(n),), generator=generator, dtype=torch.uint8), n)


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.config)
@pytest.mark.parametrize("byte", [0x00, 0x7F, 0x80, 0xFF])
def test_constant_bytes(codec: Codec, byte: int) -> None:
    for n in (1, 63, 64, 65, 4097):
        _check(codec, torch.full((codec.nbytes(n),), byte, dtype=torch.uint8), n)


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.config)
def test_wrong_lengths_are_refused(codec: Codec) -> None:
    for n in (1, 64, 5000):
        body = _valid(codec, n, 0)
        for wrong in (body[:-1], torch.cat([body, body[:1]]), body[:0]):
            with pytest.raises(ValueError, match="bytes"):
                codec.decode(wrong, torch.empty(n))
            with pytest.raises(ValueError, match="bytes"):
                codec.decode_add(wrong, torch.zeros(n))


@settings(max_examples=20, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1), flips=st.integers(1, 40))
def test_flipped_bits_in_a_mixed_body(seed: int, flips: int) -> None:
    body = _valid(MIXED, 6000, seed)
    generator = torch.Generator().manual_seed(seed)
    body[torch.randint(body.numel(), (flips,), generator=generator)] ^= 0x5A
    _check(MIXED, body, 6000)
