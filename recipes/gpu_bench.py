"""How near to memory speed the CUDA kernels run, and what else there is on a GPU for the same job.

    python -m lowcomm.recipes.gpu_bench --size 2**28 --json gpu.json

GB/s counts the bytes that must move: every input read once, every output written once. "of copy" is that over what a
device-to-device float32 copy of the same vector reaches, timed in the same breath. Peers are timed as their users call
them, with the bytes of the same job. The last line of the output is one JSON object with everything.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..compress import (
    E3M0,
    Cast,
    Codec,
    Eden,
    Float8,
    Int4,
    Int8,
    Sign,
    Ternary,
    TopK,
    decode_outer_step,
    decode_sum,
    encode_delta,
    launches,
    use_kernel_level,
)
from .bench import elements
from .measure import against_copy, machine

__all__ = ["main"]

CODECS: dict[str, Codec] = {
    "Sign": Sign(),
    "Int4": Int4(),
    "Int8": Int8(),
    "Int4 stochastic": Int4(rounding="stochastic"),
    "E3M0": E3M0(),
    "Float8": Float8(),
    "Ternary": Ternary(),
    "Ternary 2bit": Ternary(packing="2bit"),
    "Cast bf16": Cast("bf16"),
    "TopK 64/4096": TopK(),
    "TopK select only": TopK(value="f32", index="u32"),
    "Eden 1 bit": Eden(bits=1),
    "Eden 4 bits": Eden(bits=4),
}
RANKS = 8

Call = Callable[[], object]


@dataclass(frozen=True)
class Row:
    """One operation: milliseconds, GB/s of bytes that must move, share of what a copy moves."""

    what: str
    operation: str
    kernel: bool
    ms: float
    gbs: float
    of_copy: float


def calls(codec: Codec, x: Tensor) -> Iterator[tuple[str, int, Call]]:
    """(operation, bytes that must move, call) of one codec on preallocated memory."""
    n, size = x.numel(), codec.nbytes(x.numel())
    body = torch.empty(size, dtype=torch.uint8, device=x.device)
    out, residual = torch.empty_like(x), torch.zeros_like(x)
    codec.encode(x, body)
    yield "encode", 4 * n + size, lambda: codec.encode(x, body)
    yield "encode with feedback", 12 * n + size, lambda: codec.encode_feedback(x, residual, residual, body)
    yield (
        "delta, feedback, encode",
        16 * n + size,
        lambda: encode_delta(codec, x, out, body, residual, residual),
    )
    yield "decode", 4 * n + size, lambda: codec.decode(body, out)
    yield "decode and add", 8 * n + size, lambda: codec.decode_add(body, out)
    if codec.requantizable and RANKS * (size + 16) < 2**34:
        frames = torch.zeros(RANKS, (size + 15) // 16 * 16, dtype=torch.uint8, device=x.device)
        bodies = [frame[:size] for frame in frames]
        for one in bodies:
            one.copy_(body)
        yield "decode and sum 8 ranks", 4 * n + RANKS * size, lambda: decode_sum(codec, bodies, out, divisor=8.0)
        step: dict[str, Any] = {"lr": 1e-3, "momentum_factor": 0.9, "nesterov": True, "divisor": 8.0}
        yield (
            "decode 8 ranks and outer step",
            16 * n + RANKS * size,
            lambda: decode_outer_step(codec, bodies, out, residual, **step),
        )


def peers(x: Tensor) -> Iterator[tuple[str, str, int, Call]]:
    """(name, operation, bytes that must move, call) of what else does such a job on a GPU and is installed."""
    n = x.numel()
    for name in ("Int4", "Sign"):
        codec = CODECS[name]
        body = torch.empty(codec.nbytes(n), dtype=torch.uint8, device=x.device)

        def plain(codec: Codec = codec, body: Tensor = body) -> int:
            with use_kernel_level("torch"):
                return codec.encode(x, body)

        yield f"{name}, torch operations", "encode", 4 * n + body.numel(), plain
        compiled = torch.compile(plain)
        yield f"{name}, torch.compile", "encode", 4 * n + body.numel(), compiled
    rows = x[: n // 4096 * 4096].view(-1, 4096)
    yield "torch.topk 64 of 4096", "select", 4 * n + 12 * 64 * rows.shape[0], lambda: rows.abs().topk(64, sorted=False)
    if importlib.util.find_spec("cupy"):
        import cupy

        array = cupy.from_dlpack(x)
        yield "cupy.packbits", "bits only", 4 * n + n // 8, lambda: cupy.packbits(array < 0)
    if importlib.util.find_spec("bitsandbytes"):
        functional = importlib.import_module("bitsandbytes.functional")
        yield "bitsandbytes 8 bits", "encode", 5 * n, lambda: functional.quantize_blockwise(x, blocksize=256)
        yield "bitsandbytes nf4", "encode", 4 * n + n // 2, lambda: functional.quantize_4bit(x, blocksize=64)
    if importlib.util.find_spec("torchao"):
        subclass = importlib.import_module("torchao.optim.subclass_8bit")
        kind = subclass.OptimState8bit.zeros((n,), True, 256, str(x.device))
        yield "torchao 8 bits", "encode", 5 * n, lambda: kind.copy_(x)


def measured(what: str, operation: str, moved: int, call: Call, x: Tensor, target: Tensor, kernel: bool) -> Row:
    """Time one call against a copy of x."""
    timing = against_copy(call, lambda: target.copy_(x), device=x.device.type, seconds=0.3)
    share = timing.times_copy * moved / (8 * x.numel())
    return Row(what, operation, kernel, timing.ms, moved / timing.ms / 1e6, share)


def rows(x: Tensor, names: list[str]) -> Iterator[Row]:
    target = torch.empty_like(x)
    for name in names:
        codec = CODECS[name]
        kernel = launches.runs(codec, x)
        for operation, moved, call in calls(codec, x):
            yield measured(name, operation, moved, call, x, target, kernel)
        if x.is_cuda:
            torch.cuda.empty_cache()
    for name, operation, moved, call in peers(x):
        try:
            yield measured(name, operation, moved, call, x, target, False)
        except Exception as error:  # a peer that cannot do this size must not end the table
            print(f"{name}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m lowcomm.recipes.gpu_bench", description="Codecs on a GPU")
    parser.add_argument("--size", type=elements, default=2**28, help="elements; default 2**28")
    parser.add_argument("--device", default="cuda", help="where the vector lives; default cuda")
    parser.add_argument("--only", nargs="+", choices=sorted(CODECS), default=list(CODECS), help="codecs; default all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the JSON object to a file too")
    options = parser.parse_args(argv)
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        print("gpu_bench: --device cuda needs a CUDA device, and torch sees none", file=sys.stderr)
        return 2
    x = torch.randn(options.size, generator=torch.Generator(options.device).manual_seed(0), device=options.device)
    found = []
    print(f"{'':24} {'':30} {'ms':>9} {'GB/s':>8} {'of copy':>8}")
    for row in rows(x, options.only):
        found.append(asdict(row))
        note = "" if row.kernel else "  (no kernel)"
        print(f"{row.what:24} {row.operation:30} {row.ms:9.4g} {row.gbs:8.1f} {row.of_copy:8.1%}{note}", flush=True)
    result = json.dumps({"tool": "gpu_bench", **machine(x.device.type), "elements": options.size, "rows": found})
    if options.json:
        options.json.write_text(result + "\n")
    print(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
