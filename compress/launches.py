"""How the CUDA kernels are launched: grids, shared memory, layout of the body.

One function for every C function of the CPU kernels, with the same name and arguments behind the launcher, so that a
codec calls either by `kernel(name, ...)`; `threads` is ignored here. What a kernel does not take (`takes_block` and
others) runs on torch operations.
"""

from __future__ import annotations

from typing import Any

__all__ = ["takes_block"]

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
    on.launch("sign", "lc_sign_decode", _blocks(n, _THREADS), _THREADS, body, *sink, n, block, kind, bits_at)
    return 0
