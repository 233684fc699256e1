"""What codecs do on CUDA tensors: launch kernels, with their grids and shared memory and the layout of the body.

A codec that has CUDA kernels says for which settings (`_on_cuda`) and how they are launched (`_launch_encode`,
`_launch_decode`). What the kernels do not take runs on torch operations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from torch import Tensor

from . import gpu
from .kernels import DTYPE_CODES, kernel_level

if TYPE_CHECKING:
    from .codec import Codec
    from .sparse import SparseFormat

__all__ = ["Launcher", "Sink", "Source", "decode", "encode", "launcher", "runs", "takes_block", "takes_rows"]

Argument = int | float | None

_THREADS = 256  # of a thread block, unless it must hold a larger block of elements


class Launcher(Protocol):
    """Starts kernels: `gpu.Gpu`, or in tests an emulator."""

    def launch(
        self, source: str, kernel: str, blocks: int, threads: int, *arguments: Argument, shared: int = 0
    ) -> None: ...

    def flags(self, run: Callable[[int], None]) -> int: ...


class Source(NamedTuple):
    """What is encoded: x, or anchor - x, with decay * residual in front; addresses. As LcSource in cuda/device.cuh,
    with the place of the new residual behind."""

    x: int
    dtype: int
    anchor: int | None = None
    residual: int | None = None
    decay: float = 1.0
    candidate: int | None = None


class Sink(NamedTuple):
    """What becomes of decoded messages; addresses. As LcSink in cuda/device.cuh, up to n."""

    stride: int = 0
    ranks: int = 1
    weights: int | None = None
    weight: float = 1.0
    divisor: float = 1.0
    add: bool = False
    out: int | None = None
    anchor: int | None = None
    momentum: int | None = None
    outer_lr: float = 0.0
    outer_momentum: float = 0.0
    nesterov: bool = False

    @property
    def updates(self) -> bool:
        """Whether what is there matters, so that a damaged body must leave it alone."""
        return self.add or self.anchor is not None


def launcher(tensor: Tensor) -> Launcher:
    """What starts kernels on the tensor's device."""
    return gpu.gpu(tensor.device)


def runs(codec: Codec | SparseFormat, *tensors: Tensor) -> bool:
    """Whether CUDA kernels do what `codec` does on these tensors."""
    return tensors[0].is_cuda and codec._on_cuda and kernel_level() != "torch" and gpu.takes(*tensors)


def encode(
    codec: Codec | SparseFormat,
    x: Tensor,
    out: Tensor,
    residual: Tensor | None = None,
    candidate: Tensor | None = None,
    decay: float = 1.0,
    place: tuple[int, int, int] = (0, 0, 0),
) -> int:
    """`Codec.encode`, or with a residual and a candidate `Codec.encode_feedback`; place: step, rank, bucket."""
    state = (None, None) if residual is None or candidate is None else (residual.data_ptr(), candidate.data_ptr())
    source = Source(x.data_ptr(), DTYPE_CODES[x.dtype], None, state[0], decay, state[1])
    return codec._launch_encode(launcher(x), source, out, x.numel(), place)


def decode(codec: Codec | SparseFormat, body: Tensor, out: Tensor, weight: float | None = None) -> None:
    """`Codec.decode`, or with a weight `Codec.decode_add`."""
    sink = Sink(out=out.data_ptr(), add=weight is not None, weight=1.0 if weight is None else weight)
    codec._launch_decode(launcher(out), body, sink, out.numel())


def takes_block(block: int, most: int = 8192) -> bool:
    """Whether the kernels take blocks of this many elements: powers of two from 8 on."""
    return 8 <= block <= most and block & (block - 1) == 0


def _threads(block: int) -> int:
    """Threads of a thread block that holds whole blocks of elements, eight elements for each thread."""
    return max(_THREADS, block // 8)


def _run_encoder(
    on: Launcher, source: str, kernel: str, n: int, threads: int, *arguments: Argument, shared: int = 0
) -> int:
    """Launch an encoder, whose last argument is the word of flags, and return the flags."""
    grid = -(-n // (8 * threads))
    return on.flags(lambda flags: on.launch(source, kernel, grid, threads, *arguments, flags, shared=shared))


def _run_decoder(on: Launcher, source: str, kernel: str, n: int, *arguments: Argument) -> None:
    on.launch(source, kernel, -(-n // (8 * _THREADS)), _THREADS, *arguments)


# ---- sign.py


def sign(on: Launcher, source: Source, scales: int, bits: int, n: int, block: int, kind: int) -> int:
    size = _threads(block)
    space = 32 * size if block > 256 else 0  # tree_sum: none where a block belongs to one warp
    return _run_encoder(on, "sign", "lc_sign_encode", n, size, *source, n, block, kind, scales, bits, shared=space)


def sign_decode(on: Launcher, body: int, sink: Sink, n: int, block: int, kind: int, bits_at: int) -> None:
    _run_decoder(on, "sign", "lc_sign_decode", n, body, *sink, n, block, kind, bits_at)


# ---- quantize.py, float8.py, e3m0.py


def blocks(
    on: Launcher, name: str, source: Source, n: int, block: int, settings: tuple[int, ...], out: int, codes_at: int
) -> int:
    rest = (n, block, *settings, out, codes_at)
    return _run_encoder(on, name, f"lc_{name}_encode", n, _threads(block), *source, *rest)


def blocks_decode(on: Launcher, name: str, body: int, sink: Sink, rest: tuple[int, ...]) -> None:
    _run_decoder(on, name, f"lc_{name}_decode", rest[0], body, *sink, *rest)


# ---- cast.py


def cast(on: Launcher, source: Source, n: int, kind: int, out: int) -> int:
    return _run_encoder(on, "cast", "lc_cast_encode", n, _THREADS, *source, n, kind, out)


def cast_decode(on: Launcher, body: int, sink: Sink, n: int, kind: int) -> None:
    _run_decoder(on, "cast", "lc_cast_decode", n, body, *sink, n, kind)


# ---- ternary.py


def ternary(
    on: Launcher,
    source: Source,
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
    rest = (n, block, two_bit, stochastic, clip, shared_scale, seed, stream, step, scales, codes)
    return _run_encoder(on, "ternary", "lc_ternary_encode", n, size, *source, *rest, shared=space)


def ternary_decode(on: Launcher, scales: int, codes: int, sink: Sink, n: int, block: int, two_bit: int) -> int:
    def run(flags: int) -> None:
        if sink.updates:
            _run_decoder(on, "ternary", "lc_ternary_check", n, codes, n, two_bit, flags)
        rest = (n, block, two_bit, codes - scales, flags)
        _run_decoder(on, "ternary", "lc_ternary_decode", n, scales, *sink, *rest)

    return on.flags(run)


# ---- sparse.py

_MAX_ROW, _MAX_KEPT = 8192, 4096
_MAX_SPACE = 45 << 10  # bytes of shared memory that every GPU gives without being asked
_CODE_BITS = (0, 0, 2, 1, 8, 4)  # by number of the value format; 0: whole numbers, which are not collected
_SCALE_BYTES = (0, 0, 4, 2, 4, 4)


class Rows(NamedTuple):
    """Rows of c positions of which k are kept; formats by their numbers in INDEX_CODECS and VALUE_CODECS."""

    c: int
    k: int
    positions: int
    values: int

    @property
    def threads(self) -> int:
        return max(32, (1 << (self.c - 1).bit_length()) // 16, (1 << (self.k - 1).bit_length()) // 8)

    @property
    def bits(self) -> tuple[int, int]:
        """Bits of a row among the positions and among the codes that a thread block collects in shared memory."""
        low = (self.c // self.k).bit_length() - 1
        record = (self.k * low + self.k + (self.c >> low) + 7) // 8 * 8
        fields = self.k * (self.c - 1).bit_length()
        return (record, fields, self.c, 0)[self.positions], self.k * _CODE_BITS[self.values]

    @property
    def together(self) -> int:
        """Rows for each thread block of the encoder, so that it writes whole bytes."""
        return next(rows for rows in (1, 2, 4, 8) if all(rows * count % 8 == 0 for count in self.bits))

    def encode_space(self) -> int:
        streams = sum((self.together * count + 7) // 32 + 2 for count in self.bits)
        return 4 * (self.k + self.threads + streams) + 2 * self.k

    def decode_space(self) -> int:
        streams = sum((count + 7) // 32 + 2 for count in self.bits)
        return 4 * (16 * self.threads + streams) + 2 * self.k

    def sections(self, n: int) -> tuple[int, int]:
        """Where the positions and the codes begin in the body of a vector of n elements."""
        rows = -(-n // self.c)
        indices = -(-rows * _SCALE_BYTES[self.values] // 4) * 4
        bits = 32 * self.k if self.positions == 3 else self.bits[0]
        return indices, indices + -(-rows * bits // 32) * 4


def takes_rows(c: int, k: int, index: int, value: int) -> bool:
    """Whether the kernels take these rows: up to 8192 positions, up to 4096 kept, not "bins4"."""
    if c > _MAX_ROW or k > _MAX_KEPT or value >= len(_CODE_BITS):
        return False
    rows = Rows(c, k, index, value)
    return max(rows.encode_space(), rows.decode_space()) <= _MAX_SPACE


def topk(on: Launcher, source: Source, body: int, n: int, rows: Rows, iterations: int) -> int:
    sections = (body, *(body + at for at in rows.sections(n)))
    grid, rest = -(-n // (rows.c * rows.together)), (n, *rows, iterations, rows.together, *sections)
    space = rows.encode_space()
    return on.flags(
        lambda flags: on.launch("topk", "lc_topk_encode", grid, rows.threads, *source, *rest, flags, shared=space)
    )


def topk_decode(on: Launcher, body: int, sink: Sink, n: int, rows: Rows) -> int:
    """Nonzero where a body is damaged; inside a graph capture that shows in `late_flags` only."""
    rest, space = (n, *rows, *rows.sections(n)), rows.decode_space()

    def run(flags: int) -> None:
        for check in (1, 0) if sink.updates else (0,):
            arguments = (body, *sink, *rest, check, flags)
            on.launch("topk", "lc_topk_decode", -(-n // rows.c), rows.threads, *arguments, shared=space)

    return on.flags(run)


# ---- eden.py


def _eden_space(threads: int) -> int:
    return 4 * (9 * threads + threads // 4)  # the block, sums, random signs


def eden(
    on: Launcher, source: Source, scales: int, codes: int, n: int, block: int, bits: int, mode: int, key: int, step: int
) -> int:
    size = _threads(block)
    rest = (n, block, bits, mode, key, step, scales, codes)
    return _run_encoder(on, "eden", "lc_eden_encode", n, size, *source, *rest, shared=_eden_space(size))


def eden_decode(
    on: Launcher, scales: int, codes: int, sink: Sink, n: int, block: int, bits: int, key: int, step: int
) -> None:
    size = _threads(block)
    rest = (n, block, bits, key, step, codes - scales)
    on.launch("eden", "lc_eden_decode", -(-n // (8 * size)), size, scales, *sink, *rest, shared=_eden_space(size))
