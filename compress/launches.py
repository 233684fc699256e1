"""How the CUDA kernels are launched: grids, shared memory, layout of the body.

One function for every C function of the CPU kernels, with the same name and arguments behind the launcher, so that a
codec calls either by `kernel(name, ...)`; `threads` is ignored here. What a kernel does not take (`takes_block` and
others) runs on torch operations.
"""

from __future__ import annotations

from typing import Any

__all__ = ["takes_block", "takes_ternary"]

_THREADS = 256


def takes_block(block: int, least: int = 8, most: int = 8192) -> bool:
    """Whether the kernels take blocks of this many elements: powers of two."""
    return least <= block <= most and block & (block - 1) == 0


def _threads(block: int) -> int:
    """Threads of a thread block that holds whole blocks of elements, eight elements for each thread."""
    return max(_THREADS, block // 8)


def _blocks(n: int, threads: int) -> int:
    return -(-n // (8 * threads))


def _sum_space(block: int) -> int:
    """Bytes of shared memory for tree_sum: none where a block belongs to one warp."""
    return 32 * _threads(block) if block > 256 else 0


class Sink(tuple[Any, ...]):
    """Where decoded values go; the arguments of LcSink (cuda/device.cuh) up to `n`."""

    @classmethod
    def one(cls, out: int, add: bool, weight: float) -> Sink:
        """out = decoded, or out += weight * decoded."""
        return cls((0, 1, None, weight, 1.0, add, out, None, None, 0.0, 0.0, 0))

    @property
    def adds(self) -> bool:
        return bool(self[5])


# ---- sign.py


def lc_sign_encode(
    on: Any, x: int, dtype: int, scales: int, bits: int, n: int, block: int, kind: int, threads: int
) -> int:
    return _sign(on, (x, dtype, None, None, 1.0, None), scales, bits, n, block, kind)


def lc_sign_feedback(
    on: Any,
    x: int,
    residual: int,
    candidate: int,
    decay: float,
    scales: int,
    bits: int,
    n: int,
    block: int,
    kind: int,
    threads: int,
) -> int:
    return _sign(on, (x, 0, None, residual, decay, candidate), scales, bits, n, block, kind)


def _sign(on: Any, source: tuple[Any, ...], scales: int, bits: int, n: int, block: int, kind: int) -> int:
    size = _threads(block)
    rest = (n, block, kind, scales, bits)
    shape = (_blocks(n, size), size)
    return int(
        on.flags(
            lambda flags: on.launch("sign", "lc_sign_encode", *shape, *source, *rest, flags, shared=_sum_space(block))
        )
    )


def lc_sign_decode(on: Any, scales: int, bits: int, out: int, n: int, block: int, kind: int, threads: int) -> int:
    return _sign_decode(on, scales, Sink.one(out, False, 1.0), n, block, kind, bits - scales)


def lc_sign_decode_add(
    on: Any, scales: int, bits: int, acc: int, weight: float, n: int, block: int, kind: int, threads: int
) -> int:
    return _sign_decode(on, scales, Sink.one(acc, True, weight), n, block, kind, bits - scales)


def _sign_decode(on: Any, body: int, sink: Sink, n: int, block: int, kind: int, bits_at: int) -> int:
    return _decode(on, "sign", "lc_sign_decode", body, sink, (n, block, kind, bits_at))


# ---- quantize.py, float8.py, e3m0.py


def lc_int_encode(
    on: Any,
    x: int,
    dtype: int,
    residual: int | None,
    decay: float,
    candidate: int | None,
    n: int,
    block: int,
    bits: int,
    affine: int,
    scale: int,
    stochastic: int,
    seed: int,
    stream: int,
    step: int,
    out: int,
    threads: int,
) -> int:
    source = (x, dtype, None, residual, decay, candidate)
    settings = (bits, affine, scale, stochastic, seed, stream, step)
    at = _codes_at(n, block, 8 if affine else 4 >> scale)
    return _encode_blocks(on, "integers", "lc_int_encode", source, n, block, settings, out, at)


def lc_int_decode(
    on: Any,
    body: int,
    n: int,
    block: int,
    bits: int,
    affine: int,
    scale: int,
    out: int,
    add: int,
    weight: float,
    threads: int,
) -> int:
    rest = (n, block, bits, affine, scale, _codes_at(n, block, 8 if affine else 4 >> scale))
    return _decode(on, "integers", "lc_int_decode", body, Sink.one(out, bool(add), weight), rest)


def lc_float8_encode(
    on: Any,
    x: int,
    dtype: int,
    residual: int | None,
    decay: float,
    candidate: int | None,
    n: int,
    block: int,
    e5m2: int,
    out: int,
    threads: int,
) -> int:
    source = (x, dtype, None, residual, decay, candidate)
    at = _codes_at(n, block, 4)
    return _encode_blocks(on, "float8", "lc_float8_encode", source, n, block, (e5m2,), out, at)


def lc_float8_decode(
    on: Any, body: int, n: int, block: int, e5m2: int, out: int, add: int, weight: float, threads: int
) -> int:
    rest = (n, block, e5m2, _codes_at(n, block, 4))
    return _decode(on, "float8", "lc_float8_decode", body, Sink.one(out, bool(add), weight), rest)


def lc_e3m0_encode(
    on: Any,
    x: int,
    dtype: int,
    residual: int | None,
    decay: float,
    candidate: int | None,
    n: int,
    block: int,
    pow2: int,
    stochastic: int,
    seed: int,
    stream: int,
    step: int,
    out: int,
    threads: int,
) -> int:
    source = (x, dtype, None, residual, decay, candidate)
    settings, at = (pow2, stochastic, seed, stream, step), _codes_at(n, block, 1 if pow2 else 4)
    return _encode_blocks(on, "e3m0", "lc_e3m0_encode", source, n, block, settings, out, at)


def lc_e3m0_decode(
    on: Any, body: int, n: int, block: int, pow2: int, out: int, add: int, weight: float, threads: int
) -> int:
    rest = (n, block, pow2, _codes_at(n, block, 1 if pow2 else 4))
    return _decode(on, "e3m0", "lc_e3m0_decode", body, Sink.one(out, bool(add), weight), rest)


def _codes_at(n: int, block: int, scale_bytes: int) -> int:
    return (-(-n // block) * scale_bytes + 3) // 4 * 4


def _encode_blocks(
    on: Any,
    file: str,
    kernel: str,
    source: tuple[Any, ...],
    n: int,
    block: int,
    settings: tuple[int, ...],
    out: int,
    codes_at: int,
) -> int:
    size = _threads(block)
    rest = (*source, n, block, *settings, out, codes_at)
    return int(on.flags(lambda flags: on.launch(file, kernel, _blocks(n, size), size, *rest, flags)))


def _decode(on: Any, file: str, kernel: str, body: int, sink: Sink, rest: tuple[int, ...]) -> int:
    """Launch a decoder that has eight elements for each thread; rest begins with n."""
    on.launch(file, kernel, _blocks(rest[0], _THREADS), _THREADS, body, *sink, *rest)
    return 0


# ---- cast.py, which has no CPU kernels


def lc_cast_encode(
    on: Any,
    x: int,
    dtype: int,
    residual: int | None,
    decay: float,
    candidate: int | None,
    n: int,
    kind: int,
    out: int,
) -> int:
    rest = (x, dtype, None, residual, decay, candidate, n, kind, out)
    shape = (_blocks(n, _THREADS), _THREADS)
    return int(on.flags(lambda flags: on.launch("cast", "lc_cast_encode", *shape, *rest, flags)))


def lc_cast_decode(on: Any, body: int, out: int, add: int, weight: float, n: int, kind: int) -> int:
    return _decode(on, "cast", "lc_cast_decode", body, Sink.one(out, bool(add), weight), (n, kind))


# ---- ternary.py


def takes_ternary(block: int, two_bit: bool) -> bool:
    """Whether the kernels of `Ternary` take these settings."""
    return takes_block(block, most=8192 if two_bit else 1024)


def lc_ternary_encode(
    on: Any, x: int, dtype: int, scales: int, codes: int, n: int, block: int, two_bit: int, threads: int
) -> int:
    return _ternary(on, (x, dtype, None, None, 1.0, None), scales, codes, n, block, two_bit)


def lc_ternary_stochastic(
    on: Any, x: int, dtype: int, scales: int, codes: int, n: int, block: int, two_bit: int, threads: int, *noise: Any
) -> int:
    return _ternary(on, (x, dtype, None, None, 1.0, None), scales, codes, n, block, two_bit, 1, *noise)


def lc_ternary_feedback(
    on: Any,
    x: int,
    residual: int,
    candidate: int,
    decay: float,
    scales: int,
    codes: int,
    n: int,
    block: int,
    two_bit: int,
    threads: int,
) -> int:
    return _ternary(on, (x, 0, None, residual, decay, candidate), scales, codes, n, block, two_bit)


def lc_ternary_stochastic_feedback(
    on: Any,
    x: int,
    residual: int,
    candidate: int,
    decay: float,
    scales: int,
    codes: int,
    n: int,
    block: int,
    two_bit: int,
    threads: int,
    *noise: Any,
) -> int:
    return _ternary(on, (x, 0, None, residual, decay, candidate), scales, codes, n, block, two_bit, 1, *noise)


def _ternary(
    on: Any,
    source: tuple[Any, ...],
    scales: int,
    codes: int,
    n: int,
    block: int,
    two_bit: int,
    stochastic: int = 0,
    clip: float = 0.0,
    shared_scale: float = 0.0,
    seed: int = 0,
    stream: int = 0,
    step: int = 0,
) -> int:
    # base 3: whole bytes of five elements, whole warps and whole blocks in a thread block
    size = _threads(block) if two_bit else max(320, 5 * block // 8)
    space = 32 * size if block > 256 else 0 if two_bit else 8 * size
    rest = (*source, n, block, two_bit, stochastic, clip, shared_scale, seed, stream, step, scales, codes)
    shape = (_blocks(n, size), size)
    return int(on.flags(lambda flags: on.launch("ternary", "lc_ternary_encode", *shape, *rest, flags, shared=space)))


def lc_ternary_decode(
    on: Any, scales: int, codes: int, out: int, n: int, block: int, two_bit: int, threads: int
) -> int:
    return _ternary_decode(on, scales, codes, Sink.one(out, False, 1.0), n, block, two_bit)


def lc_ternary_decode_add(
    on: Any, scales: int, codes: int, acc: int, weight: float, n: int, block: int, two_bit: int, threads: int
) -> int:
    return _ternary_decode(on, scales, codes, Sink.one(acc, True, weight), n, block, two_bit)


def _ternary_decode(on: Any, scales: int, codes: int, sink: Sink, n: int, block: int, two_bit: int) -> int:
    shape, rest = (_blocks(n, _THREADS), _THREADS), (n, block, two_bit, codes - scales)

    def run(flags: int) -> None:
        if sink.adds:
            on.launch("ternary", "lc_ternary_check", *shape, codes, n, two_bit, flags)
        on.launch("ternary", "lc_ternary_decode", *shape, scales, *sink, *rest, flags)

    return int(on.flags(run))
