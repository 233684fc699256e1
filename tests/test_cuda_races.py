"""The CUDA kernels under ThreadSanitizer: between two barriers no thread reads what another one writes."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from cuda_emulator import compiler
from cuda_probe import PROBES, run_apart
from lowcomm.compress import nvrtc

CUDA = Path(__file__).parent.parent / "cuda"


def has_sanitizer() -> bool:
    if not shutil.which(compiler()):
        return False
    found = subprocess.run([compiler(), "-print-file-name=libtsan.so"], text=True, capture_output=True, check=False)
    return os.path.isabs(found.stdout.strip())


needs_sanitizer = pytest.mark.skipif(not has_sanitizer(), reason="needs a C++ compiler with ThreadSanitizer")


def test_every_source_is_probed() -> None:
    assert set(PROBES) == {path.stem for path in CUDA.glob("*.cu")}


@needs_sanitizer
def test_no_races() -> None:
    done = run_apart(["--order", "forward"], tsan=True)
    assert done.returncode == 0, done.stderr[-4000:]


@needs_sanitizer
def test_a_missing_barrier_is_a_race(tmp_path: Path) -> None:
    """The detector sees through the emulator: the shared memory of a sum without its first barrier."""
    text = nvrtc.source_text("sign")
    at = text.index("__syncthreads();", text.index("float lc_warps_tree_sum"))
    changed = tmp_path / "sign.cu"
    changed.write_text(text[:at] + text[at + len("__syncthreads();") :])
    done = run_apart(["--only", "sign", "--replace", f"sign={changed}"], tsan=True)
    assert done.returncode != 0 and "data race" in done.stderr, done.stderr[-2000:]
