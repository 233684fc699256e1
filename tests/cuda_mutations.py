"""Which seeded bugs do the tests of the CUDA kernels find? Prints a table; fails where no kernel shows a bug.

    python tests/cuda_mutations.py [--tsan] [--only sign]

Mutants: each barrier left out; comparisons with n moved by one; masks of warp collectives cut in half; and edits of the
arithmetic that is easily got wrong. Modes: three orders of lanes, and with --tsan the race detector. Takes
minutes, so it is no part of the default tests (make cuda-mutations).
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from cuda_probe import PROBES, run_apart
from lowcomm.compress import nvrtc

EDITS = (
    ("bound read past the end", r"first \+ 8 <= n", "first + 8 <= n + 1"),
    ("tail element dropped", r"if \(first \+ j < n\)", "if (first + j + 1 < n)"),
    ("tail padding not left out", r"first \+ j < n \? (\(part|p\[)", r"first + j <= n ? \1"),
    ("shuffle mask of half a warp", r"__shfl_xor_sync\(LC_ALL", "__shfl_xor_sync(0xFFFFu"),
    ("butterfly too short", r"int flip = group / 2; flip; flip /= 2", "int flip = group / 4; flip; flip /= 2"),
    ("one warp of a group forgotten", r"w < first \+ warps", "w < first + warps - 1"),
    (
        "halves summed in another order",
        r"\(\(a\[0\] \+ a\[4\]\) \+ \(a\[2\] \+ a\[6\]\)\)",
        "((a[0] + a[2]) + (a[4] + a[6]))",
    ),
    ("rounding away from even", r"LC_RINT\(y\)", "LC_FLOOR(y + 0.5f)"),
    ("noise of the neighbour", r"\(u64\)first / 4 \+ 1", "(u64)first / 4 + 2"),
    ("residual of the input", r"e\.v\[j\] - decoded\[j\]", "e.v[j]"),
    ("NaN left in the residual", r"e\.bad >> j & 1 \? 0\.0f : ", ""),
    ("kept at the threshold", r"magnitude\[j\] > threshold", "magnitude[j] >= threshold"),
    ("digit of the next byte", r"place == 5", "place == 4"),
    (
        "weight not rounded first",
        r"r \|\| s\.add \? sum\[j\] \+ weighted",
        "r || s.add ? weighted + sum[j] + 0.0f * v[j] + weight",
    ),
)


def function_before(text: str, at: int) -> str:
    """Name of the function around a place in a source."""
    names = re.findall(r"(?:LC_DEVICE|__global__)[^;{}]*?\b(lc_\w+|\w+)\s*\([^;{}]*\)\s*(?:const )?\{", text[:at])
    return str(names[-1]) if names else "?"


def mutants(source: str) -> Iterator[tuple[str, str]]:
    """(name, text) of all mutants of cuda/SOURCE.cu."""
    text = nvrtc.source_text(source)
    numbers: dict[str, int] = {}
    for found in re.finditer(r"__syncthreads\(\);", text):
        function = function_before(text, found.start())
        numbers[function] = numbers.get(function, 0) + 1
        yield f"{function} {numbers[function]}", text[: found.start()] + text[found.end() :]
    for name, pattern, replacement in EDITS:
        changed = re.sub(pattern, replacement, text)
        if changed != text:
            yield name, changed


def verdict(source: str, path: Path, order: str, tsan: bool) -> str:
    done = run_apart(["--order", order, "--only", source, "--replace", f"{source}={path}"], tsan)
    if done.returncode == 0:
        return "-"
    for words in ("data race", "deadlock", "bad memory", "disagree", "calling lane", "wrong result"):
        if words in done.stderr:
            return words
    return "wrong result" if "AssertionError" in done.stderr else f"exit {done.returncode}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tsan", action="store_true", help="also the race detector")
    parser.add_argument("--only", action="append", choices=sorted(PROBES))
    options = parser.parse_args()
    modes = [
        ("forward", False),
        ("backward", False),
        ("shuffled", False),
        *([("forward", True)] if options.tsan else []),
    ]
    found: dict[str, bool] = {}  # a header is part of many sources, and not each of them uses all of it
    for source in options.only or sorted(PROBES):
        for name, text in mutants(source):
            with tempfile.NamedTemporaryFile("w", suffix=".cu") as file:
                file.write(text)
                file.flush()
                verdicts = [verdict(source, Path(file.name), *mode) for mode in modes]
            print(f"{source:10s} {name:34s}", *[f"{word:14s}" for word in verdicts], flush=True)
            found[name] = found.get(name, False) or set(verdicts) != {"-"}
    survivors = [name for name, seen in found.items() if not seen]
    print(f"{len(survivors)} of {len(found)} survive", *survivors, sep="\n  ")
    sys.exit(bool(survivors))


if __name__ == "__main__":
    main()
