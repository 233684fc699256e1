"""Run every CUDA kernel once in the emulator and compare with torch operations; a program of its own, because the race
detector must be loaded before Python.

    python cuda_probe.py --order backward [--tsan] [--replace sign=changed.cu] [--only sign]

Used by test_cuda_races.py (with --tsan) and by cuda_mutations.py (with changed sources).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import torch
from codec_checks import gaussian
from cuda_emulator import ORDERS, Emulator, Guarded, compiler, emulated
from lowcomm.compress import E3M0, Cast, Codec, Eden, Float8, Int4, Int8, Sign, Ternary, TopK, use_kernel_level
from torch import Tensor

CUDA = Path(__file__).parent.parent / "cuda"

# The files in cuda/ with codecs that go through all that can race in them: groups of several warps, partial blocks.
PROBES: dict[str, tuple[tuple[Codec, int], ...]] = {
    "sign": ((Sign("two_means", 512), 1303), (Sign(), 303)),
    "int": ((Int8(block=512, affine=True), 1303), (Int4(rounding="stochastic"), 151)),
    "e3m0": ((E3M0(512), 703),),
    "float8": ((Float8(block=512), 703),),
    "cast": ((Cast("bf16"), 79),),
    "ternary": ((Ternary(block=512), 2703), (Ternary("stochastic", "base3", 64, 2.5), 335)),
    "topk": ((TopK(k=16, chunk=1024), 2500),),
    "eden": ((Eden(bits=1, block=1024), 2500), (Eden(bits=3, block=256), 700)),
}
PROBES = {source: probes for source, probes in PROBES.items() if (CUDA / f"{source}.cu").exists()}


def computed(codec: Codec, x: Tensor) -> list[Tensor]:
    """What encoding, decoding and error feedback make of x, in memory that ends where the tensors end."""
    memory = Guarded()
    body = memory.empty(codec.nbytes(x.numel()), torch.uint8)
    x, out, acc, left = (memory.copy(x) for _ in range(4))
    flags = codec.encode(x, body)
    codec.decode(body, out)
    codec.decode_add(body, acc, 0.3)
    parts = [torch.tensor([flags]), body.clone(), out.clone(), acc.clone()]
    codec.encode_feedback(x, x, left, body, decay=0.9)
    parts += [body.clone(), left.clone()]
    assert not memory.close(), f"wrong result: {codec.config} writes outside its tensors"
    return [part.view(torch.uint8) for part in parts]


def probe(emulator: Emulator, sources: list[str]) -> None:
    """Raise AssertionError or RuntimeError where a kernel does something else than torch operations."""
    for source in sources:
        for codec, n in PROBES[source]:
            x = gaussian(n)
            x[n // 2] = torch.nan
            with use_kernel_level("torch"):
                expected = computed(codec, x)
            with emulated(emulator):
                found = computed(codec, x)
            same = [torch.equal(a, b) for a, b in zip(expected, found, strict=True)]
            assert all(same), f"wrong result: {codec.config}, {same}"


def run_apart(arguments: list[str], tsan: bool) -> subprocess.CompletedProcess[str]:
    """This program in a process of its own, under the race detector or not."""
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(Path(__file__).parent), *sys.path]))
    if tsan:
        library = subprocess.run(
            [compiler(), "-print-file-name=libtsan.so"], text=True, capture_output=True, check=True
        )
        environment["LD_PRELOAD"] = os.path.realpath(library.stdout.strip())
        environment["TSAN_OPTIONS"] = "exitcode=66 halt_on_error=1"
        environment["OMP_NUM_THREADS"] = "1"
        arguments = [*arguments, "--tsan"]
    command = [sys.executable, __file__, *arguments]
    return subprocess.run(command, env=environment, text=True, capture_output=True, check=False, timeout=300)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--order", choices=sorted(ORDERS), default="forward")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tsan", action="store_true")
    parser.add_argument("--only", action="append", choices=sorted(PROBES))
    parser.add_argument("--replace", action="append", default=[], metavar="SOURCE=FILE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    texts = {name: Path(path).read_text() for name, path in (text.split("=", 1) for text in options.replace)}
    flags = ("-fsanitize=thread",) if options.tsan else ()
    probe(Emulator(options.order, options.seed, flags, texts), options.only or sorted(PROBES))


if __name__ == "__main__":
    main()
