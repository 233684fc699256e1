"""Run the CUDA kernels on the CPU: build cuda/*.cu with g++ behind cuda_emulator.h, and launch them as gpu.py does."""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from unittest.mock import patch

import torch
from lowcomm.compress import Codec, gpu, launches, nvrtc
from torch import Tensor

HEADER = Path(__file__).with_name("cuda_emulator.h")
ORDERS = {"forward": 0, "backward": 1, "shuffled": 2}
FLAGS = (
    *("-std=c++17", "-O1", "-g", "-fPIC", "-shared", "-ffp-contract=off", "-fno-strict-aliasing"),
    *("-Wall", "-Wno-unused-function", "-Wno-unused-variable", "-Wno-unknown-pragmas", "-Wno-maybe-uninitialized"),
)
CTYPES = {
    "p": ctypes.c_void_p,
    "l": ctypes.c_int64,
    "u": ctypes.c_uint64,
    "i": ctypes.c_int32,
    "w": ctypes.c_uint32,
    "f": ctypes.c_float,
}


def compiler() -> str:
    return os.environ.get("CXX", "g++")


@cache
def built(text: str, names: tuple[str, ...], flags: tuple[str, ...] = ()) -> Path:
    """A shared library with the kernels `names` of a source."""
    unit = f'#include "{HEADER}"\n{text}\n' + "".join(f"EMU_KERNEL({name})\n" for name in names)
    key = hashlib.sha256("\0".join([unit, HEADER.read_text(), compiler(), *FLAGS, *flags]).encode()).hexdigest()[:24]
    folder = Path(tempfile.gettempdir(), f"lowcomm-emulator-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / f"{key}.so"
    if not path.exists():
        scratch = path.with_suffix(f".{os.getpid()}")
        command = [compiler(), *FLAGS, *flags, "-x", "c++", "-", "-o", str(scratch)]
        done = subprocess.run(command, input=unit, text=True, capture_output=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr)
        os.replace(scratch, path)
    return path


@cache
def loaded(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    library.emu_error.restype = library.emu_signature.restype = ctypes.c_char_p
    library.emu_allocate.restype = ctypes.c_void_p
    library.emu_allocate.argtypes = [ctypes.c_size_t]
    library.emu_release.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return library


class Emulator:
    """Stands in for `gpu.Gpu`. `texts` replaces sources, for tests of the tests."""

    def __init__(
        self, order: str = "forward", seed: int = 1, flags: tuple[str, ...] = (), texts: dict[str, str] | None = None
    ) -> None:
        self.order, self.seed, self.build_flags, self.texts = order, seed, flags, texts or {}
        self.launched: set[str] = set()

    def launch(
        self, source: str, kernel: str, blocks: int, threads: int, *arguments: int | float | None, shared: int = 0
    ) -> None:
        if not blocks:
            return
        letters = nvrtc.parameters(source)[kernel]
        library = loaded(
            built(
                self.texts.get(source) or nvrtc.source_text(source), tuple(nvrtc.parameters(source)), self.build_flags
            )
        )
        declared = library.emu_signature(kernel.encode()).decode()
        assert declared == letters, f"{kernel}: the compiler sees {declared} but nvrtc.parameters {letters}"
        values = [
            CTYPES[letter](value.item())
            for letter, value in zip(letters, gpu.typed(kernel, letters, arguments), strict=True)
        ]
        addresses = (ctypes.c_void_p * len(values))(*[ctypes.addressof(value) for value in values])
        where = ORDERS[self.order], ctypes.c_uint64(self.seed)
        if library.emu_launch(kernel.encode(), blocks, threads, shared, addresses, *where):
            raise RuntimeError(f"{kernel}: {library.emu_error().decode()}")
        self.launched.add(kernel)

    def flags(self, run: Callable[[int], None]) -> int:
        word = torch.zeros(1, dtype=torch.int32)
        run(word.data_ptr())
        return int(word)


@contextmanager
def emulated(emulator: Emulator) -> Iterator[Emulator]:
    """Codecs launch the CUDA kernels in the emulator, for CPU tensors, wherever there is one for their settings."""

    def runs(codec: Codec, *tensors: Tensor) -> bool:
        return codec._on_cuda and all(tensor.is_contiguous() for tensor in tensors)

    with patch.object(launches, "runs", runs), patch.object(launches, "launcher", lambda tensor: emulator):
        yield emulator


class Guarded:
    """Tensors that end at memory which cannot be accessed. `close` tells whether something was written around one."""

    def __init__(self) -> None:
        self._library = loaded(built("", ()))
        self._buffers: list[tuple[int, int]] = []

    def empty(self, n: int, dtype: torch.dtype = torch.float32) -> Tensor:
        if n == 0:
            return torch.empty(0, dtype=dtype)
        nbytes = n * dtype.itemsize
        address = self._library.emu_allocate(nbytes)
        self._buffers.append((address, nbytes))
        memory = (ctypes.c_uint8 * nbytes).from_address(address)
        return torch.frombuffer(memory, dtype=dtype)

    def copy(self, x: Tensor) -> Tensor:
        return self.empty(x.numel(), x.dtype).copy_(x)

    def close(self) -> bool:
        damaged = [self._library.emu_release(address, nbytes) for address, nbytes in self._buffers]
        self._buffers = []
        return any(damaged)
