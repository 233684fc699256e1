"""Instructions that the CUDA kernels spend on a byte of memory traffic, counted in their machine code; needs no GPU.

    python -m lowcomm.recipes.cuda_cost --nvdisasm nvdisasm --arch 90

A kernel is compiled for one case: float32 input at aligned addresses, whole blocks of finite numbers, one setting. The
compiler then drops every other path, and what is left is run through at most once by every thread. So instructions per
thread, divided by the bytes that a thread must move at least, are what the processor issues for a byte. An H200 can
issue about 7.8 thread instructions while its memory moves a byte (132 multiprocessors, 128 lanes, 1.98 GHz, 4.3 TB/s as
copies reach): above that a kernel is bound by instructions, whatever else. Not counted: subroutines for divisions of
very large and very small numbers. Branches that only some threads take are counted as if all did.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

from ..compress import nvrtc

__all__ = ["main"]

BUDGET = 7.8  # thread instructions for a byte, H200


class Case(NamedTuple):
    """One kernel with settings fixed: its source, a call of its device code, and bytes for each element."""

    name: str
    source: str
    call: str
    bytes_moved: float


SOURCE = "LcSource{x, LC_F32, nullptr, %s, 1.0f, n}"
PLAIN, FED = SOURCE % "nullptr", SOURCE % "residual"
SINK = "LcSink{1, 0, nullptr, 1.0f, 1.0f, 0, out, nullptr, nullptr, 0, 0, 0, n}"


def _blocks(name: str, source: str, form: str, block: int, bits: float) -> list[Case]:
    """Encode, encode with feedback and decode of a block quantizer; bits for each element, scales included."""
    size, at = bits / 8, "codes_at"

    def encode(of: str, candidate: str) -> str:
        return f"lc_encode_blocks({form}, {of}, {candidate}, {block}, body, {at}, flags)"

    return [
        Case(f"{name} encode", source, encode(PLAIN, "nullptr"), 4 + size),
        Case(f"{name} encode with feedback", source, encode(FED, "candidate"), 12 + size),
        Case(f"{name} decode", source, f"lc_decode_blocks({form}, body, {SINK}, {block}, {at})", 4 + size),
    ]


CASES = (
    *_blocks("Int8", "int", "IntFormat<8, false>{0, LC_SCALE_F32}", 256, 8 + 32 / 256),
    *_blocks("Int4", "int", "IntFormat<4, false>{0, LC_SCALE_F32}", 64, 4 + 32 / 64),
    *_blocks("Int4 stochastic", "int", "IntFormat<4, true>{0, LC_SCALE_F32, seed, 1, 2}", 64, 4 + 32 / 64)[:2],
    *_blocks("E3M0", "e3m0", "E3M0Format<false>{0}", 256, 4 + 32 / 256),
    *_blocks("Float8 e4m3", "float8", "Float8Format{0}", 256, 8 + 32 / 256),
)
KERNELS = (  # kernels whose own entry point fixes little: (name, source, call with constants, bytes)
    ("Sign encode", "sign", "lc_sign_encode(x, 0, nullptr, nullptr, 1, nullptr, n, 256, 0, body, body2, flags)", 4.14),
    (
        "Sign encode with feedback",
        "sign",
        "lc_sign_encode(x, 0, nullptr, residual, 1, candidate, n, 256, 0, body, body2, flags)",
        12.14,
    ),
    (
        "Sign decode",
        "sign",
        "lc_sign_decode(body, 0, 1, nullptr, 1, 1, 0, out, nullptr, nullptr, 0, 0, 0, n, 256, 0, codes_at)",
        4.14,
    ),
    (
        "Ternary base 3 encode",
        "ternary",
        "lc_ternary_encode(x, 0, nullptr, nullptr, 1, nullptr, n, 256, 0, 0, 0, 0, 0, 0, 0, body, body2, flags)",
        4.22,
    ),
    (
        "Ternary base 3 encode with feedback",
        "ternary",
        "lc_ternary_encode(x, 0, nullptr, residual, 1, candidate, n, 256, 0, 0, 0, 0, 0, 0, 0, body, body2, flags)",
        12.22,
    ),
    (
        "Ternary base 3 decode",
        "ternary",
        "lc_ternary_decode(body, 0, 1, nullptr, 1, 1, 0, out, nullptr, nullptr, 0, 0, 0, n, 256, 0, codes_at, flags)",
        4.22,
    ),
    ("Cast bf16 encode", "cast", "lc_cast_encode(x, 0, nullptr, nullptr, 1, nullptr, n, 1, body, flags)", 6.0),
    (
        "Cast bf16 decode",
        "cast",
        "lc_cast_decode(body, 0, 1, nullptr, 1, 1, 0, out, nullptr, nullptr, 0, 0, 0, n, 1)",
        6.0,
    ),
)
PROBE = """
extern "C" __global__ void __launch_bounds__(256)
probe(const float* x, const float* residual, float* candidate, float* out, u8* body, u8* body2, i64 codes_at, u64 seed,
      i64 n, u32* flags) {
  %s;
}
"""


def specialised(source: str, call: str) -> str:
    """The source with one more kernel, and with the tests for alignment and for the end of the vector decided."""
    text = nvrtc.source_text(source).replace('extern "C" __global__ void __launch_bounds__(1024)', "LC_DEVICE void")
    text = text.replace('extern "C" __global__ void __launch_bounds__(256)', "LC_DEVICE void")
    text = text.replace("return ((u64)p & (u64)(bytes - 1)) == 0;", "return true;").replace("first + 8 <= n", "true")
    text = text.replace("if (e.largest < LC_INFINITY_BITS) return e;", "return e;")
    text = text.replace("if (lc_thread() == 0)", "if (false)")
    return text.replace("first + 8 > n", "false").replace("first + 8 <= s.n", "true") + PROBE % call


def instructions(binary: bytes, nvdisasm: str) -> int:
    """Machine instructions of the kernel in a cubin, without the padding behind its last jump."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        listing = subprocess.run([nvdisasm, file.name], text=True, capture_output=True, check=True).stdout
    body = listing[listing.index(".text.probe:") :].split("slowpath:")[0]
    names = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?\s*(\w+)", body, re.MULTILINE)
    return sum(name != "NOP" for name in names)


def main(argv: list[str] | None = None) -> None:
    """Print the table as Markdown."""
    parser = argparse.ArgumentParser(prog="python -m lowcomm.recipes.cuda_cost", description="Instructions for a byte")
    parser.add_argument(
        "--nvdisasm", default="nvdisasm", help="NVIDIA's disassembler (pip install nvidia-cuda-nvdisasm)"
    )
    parser.add_argument("--arch", type=int, default=90, help="compute capability; default 90 (H100, H200)")
    options = parser.parse_args(argv)
    print("| kernel | instructions for 8 elements | bytes for 8 elements | instructions for a byte | of 7.8 |")
    print("| --- | --- | --- | --- | --- |")
    for name, source, call, bytes_moved in (*CASES, *KERNELS):
        text = specialised(source, call)
        binary, _ = nvrtc.compile_source(text, f"{source}.cu", options.arch)
        count, moved = instructions(binary, str(Path(options.nvdisasm))), 8 * bytes_moved
        rate = count / moved
        print(f"| {name} | {count} | {moved:.1f} | {rate:.1f} | {rate / BUDGET:.0%} |", flush=True)


if __name__ == "__main__":
    main()
