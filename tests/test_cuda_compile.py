"""The CUDA sources compile, without spilled registers, and what launches them gets every argument right.

All architectures: LOWCOMM_CUDA_ARCHITECTURES="80 90 100 120" (make cuda-check).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from codec_checks import gaussian
from lowcomm.compress import E3M0, Cast, Codec, Float8, Int4, Sign, Ternary, gpu, launches, nvrtc

CUDA = Path(__file__).parent.parent / "cuda"
SOURCES = sorted(path.stem for path in CUDA.glob("*.cu"))
ARCHITECTURES = [int(text) for text in os.environ.get("LOWCOMM_CUDA_ARCHITECTURES", "90").split()]
REGISTERS = 65536  # of a multiprocessor


def has_nvrtc() -> bool:
    try:
        return nvrtc.library() is not None
    except OSError:
        return False


def compiled(source: str, architecture: int) -> tuple[int, str]:
    """Bytes of the cubin, and what the assembler says of every kernel."""
    if has_nvrtc():
        binary, log = nvrtc.compile_source(
            nvrtc.source_text(source), f"{source}.cu", architecture, "--ptxas-options=-v"
        )
        return len(binary), log
    flags = [flag for flag in nvrtc.FLAGS if flag != "-default-device"]
    command = ["nvcc", *flags, f"-arch=sm_{architecture}", "-cubin", "-Xptxas", "-v", "-x", "cu", "-o", "/dev/null"]
    done = subprocess.run([*command, str(CUDA / f"{source}.cu")], text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    return 1, done.stderr


def test_every_kernel_compiles_without_spills() -> None:
    if not has_nvrtc() and not shutil.which("nvcc"):
        pytest.skip("needs NVRTC (pip install nvidia-cuda-nvrtc) or nvcc")
    jobs = [(source, architecture) for source in SOURCES for architecture in ARCHITECTURES]
    with ThreadPoolExecutor(2) as pool:
        outcomes = list(pool.map(lambda job: compiled(*job), jobs))
    for (source, architecture), (size, log) in zip(jobs, outcomes, strict=True):
        kernels = set(re.findall(r"Compiling entry function '(\w+)'", log))
        assert size and kernels == set(nvrtc.parameters(source)), (source, architecture, log)
        assert "warning" not in log, log
        spills = [int(number) for number in re.findall(r"(\d+) bytes (?:stack frame|spill)", log)]
        assert not any(spills), (source, architecture, log)
        bounds = re.findall(r"__launch_bounds__\((\d+)[^)]*\)\s*(\w+)\(", nvrtc.source_text(source))
        used = re.findall(r"Compiling entry function '(\w+)'.*?Used (\d+) registers", log, re.DOTALL)
        threads = {kernel: int(count) for count, kernel in bounds}
        assert set(threads) == kernels and len(used) == len(kernels)
        assert all(int(registers) * threads[kernel] <= REGISTERS for kernel, registers in used), log


def test_all_includes_are_the_projects_own() -> None:
    for source in SOURCES:
        text = nvrtc.source_text(source)
        assert "#include" not in text and nvrtc.parameters(source)
        assert all(set(letters) <= set("plfiwu") for letters in nvrtc.parameters(source).values())


class FakeCupy:
    """CuPy as far as gpu.py uses it: remembers launches."""

    __version__ = "14.0.0"

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[int, ...], tuple[int, ...], tuple[Any, ...], dict[str, Any]]] = []
        self.cuda = SimpleNamespace(
            ExternalStream=lambda pointer, device: ("stream", pointer, device), Device=torch.cuda.device
        )

    def RawModule(self, path: str) -> SimpleNamespace:
        def function(name: str) -> Any:
            def call(grid: tuple[int, ...], block: tuple[int, ...], arguments: tuple[Any, ...], **more: Any) -> None:
                self.calls.append((name, grid, block, arguments, more))

            call.attributes = {}  # type: ignore[attr-defined]
            return call

        assert path.endswith(".cubin")
        return SimpleNamespace(get_function=function)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCupy:
    """A machine with a GPU, as far as gpu.py can tell; tensors stay on the CPU."""
    cupy = FakeCupy()
    monkeypatch.setitem(__import__("sys").modules, "cupy", cupy)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=77))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "device", lambda device: __import__("contextlib").nullcontext())
    cupy.cuda.Device = torch.cuda.device
    monkeypatch.setattr(nvrtc, "cached_binary", lambda source, architecture: Path(f"{source}-{architecture}.cubin"))
    one = gpu.Gpu(torch.device("cpu"))
    monkeypatch.setattr(launches, "launcher", lambda tensor: one)
    monkeypatch.setattr(launches, "runs", lambda codec, *tensors: codec._on_cuda)
    return cupy


TYPES = {"p": np.uint64, "l": np.int64, "i": np.int32, "u": np.uint64, "w": np.uint32, "f": np.float32}
CODECS = (Sign(), Int4(), Int4(affine=True), E3M0(), Float8(), Cast(), Ternary(), Ternary("stochastic", clip=2.5))


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.config)
def test_launches_pass_typed_scalars_on_the_current_stream(fake: FakeCupy, codec: Codec) -> None:
    x, body = gaussian(5000), torch.empty(codec.nbytes(5000), dtype=torch.uint8)
    assert codec.encode(x, body, step=2**31, rank=3, bucket=2**40) == 0
    codec.decode(body, x)
    codec.decode_add(body, x, 0.5)
    codec.encode_feedback(x, x.clone(), x, body)
    assert len(fake.calls) >= 4
    declared = {name: letters for source in SOURCES for name, letters in nvrtc.parameters(source).items()}
    for name, grid, block, arguments, more in fake.calls:
        assert [type(argument) for argument in arguments] == [TYPES[letter] for letter in declared[name]]
        assert more["stream"] == ("stream", 77, None) and grid[0] * block[0] * 8 >= 5000 > (grid[0] - 1) * block[0] * 8
        assert block[0] % 32 == 0 and block[0] <= 1024


def test_empty_vectors_launch_nothing(fake: FakeCupy) -> None:
    empty = torch.empty(0)
    for codec in CODECS:
        codec.encode(empty, torch.empty(0, dtype=torch.uint8))
        codec.decode(torch.empty(0, dtype=torch.uint8), empty)
    assert not fake.calls


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="takes 2 arguments but got 1"):
        gpu.typed("kernel", "pl", (0,))
    with pytest.raises(OverflowError):
        gpu.typed("kernel", "i", (2**40,))
    assert [type(value) for value in gpu.typed("kernel", "pf", (None, 1))] == [np.uint64, np.float32]


def test_nothing_is_loaded_inside_a_capture(fake: FakeCupy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    body = torch.empty(Cast().nbytes(8), dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="run the codec once before"):
        Cast().encode(gaussian(8), body)


def test_flags_inside_a_capture_come_later(fake: FakeCupy, monkeypatch: pytest.MonkeyPatch) -> None:
    body, on = torch.empty(Cast().nbytes(8), dtype=torch.uint8), launches.launcher(torch.empty(1))
    Cast().encode(gaussian(8), body)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert Cast().encode(gaussian(8), body) == 0
    assert isinstance(on, gpu.Gpu) and fake.calls[-1][3][-1] == on.word.data_ptr() != fake.calls[0][3][-1]


def test_missing_cupy_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cupy", None)
    gpu.usable.cache_clear()
    with caplog.at_level("WARNING", logger="lowcomm.compress.gpu"):
        assert not gpu.usable() and not gpu.usable()
    assert caplog.text.count("pip install 'cupy-cuda") == 1
    gpu.usable.cache_clear()


def test_old_cupy_is_refused(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cupy", SimpleNamespace(__version__="13.6.0"))
    gpu.usable.cache_clear()
    assert not gpu.usable() and "13.6.0 is too old" in caplog.text
    gpu.usable.cache_clear()


def test_binaries_are_cached_by_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled once; other text, architecture or compiler, other file; concurrent writers leave a whole file."""
    compilations: list[int] = []

    def compile_source(text: str, name: str, architecture: int, *more: str) -> tuple[bytes, str]:
        compilations.append(architecture)
        return b"binary" * 1000, ""

    monkeypatch.setenv("LOWCOMM_CACHE", str(tmp_path))
    monkeypatch.setattr(nvrtc, "compile_source", compile_source)
    monkeypatch.setattr(nvrtc, "_version", lambda: (13, 0))
    with ThreadPoolExecutor(8) as pool:
        paths = set(pool.map(lambda _: nvrtc.cached_binary("sign", 90), range(8)))
    assert len(paths) == 1 and paths.pop().read_bytes() == b"binary" * 1000 and len(list(tmp_path.iterdir())) == 1
    before = len(compilations)
    nvrtc.cached_binary("sign", 90)
    assert len(compilations) == before
    nvrtc.cached_binary("sign", 80)
    monkeypatch.setattr(nvrtc, "_version", lambda: (13, 1))
    nvrtc.cached_binary("sign", 90)
    assert len(list(tmp_path.iterdir())) == 3
