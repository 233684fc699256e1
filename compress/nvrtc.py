"""Compile the CUDA sources with NVRTC, which torch's CUDA wheels bring along; no other part of a toolkit is needed.

The result, a cubin for one architecture, is kept on disk under a name that hashes all it depends on: source text,
flags, architecture, compiler. Files are put in place by renaming, so any number of processes may start at once.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import sys
import tempfile
from functools import cache
from glob import glob
from importlib.resources import files
from pathlib import Path

__all__ = ["FLAGS", "cached_binary", "compile_source", "parameters", "source_text"]

# The wire format defines every rounding: no fused multiply-add, no flushing of denormal numbers, exact division.
FLAGS = ("-std=c++17", "-fmad=false", "-ftz=false", "-prec-div=true", "-prec-sqrt=true", "-default-device")

_INCLUDE = re.compile(r'^#include "(\w+\.cuh)"$', re.MULTILINE)
_KERNEL = re.compile(r'extern "C" __global__ void (?:__launch_bounds__\([^)]*\)\s*)?(\w+)\(([^)]*)\)')
_LETTERS = {"float": "f", "int": "i", "u32": "w", "i64": "l", "u64": "u"}


@cache
def source_text(name: str) -> str:
    """The source of cuda/NAME.cu with the project's own headers put in place of their includes."""
    folder = files(__package__.rpartition(".")[0]).joinpath("cuda")
    seen: set[str] = set()

    def expand(file: str) -> str:
        text = folder.joinpath(file).read_text(encoding="ascii")
        return f'#line 1 "{file}"\n' + _INCLUDE.sub(lambda found: include(found[1], text, file, found.end()), text)

    def include(header: str, text: str, file: str, end: int) -> str:
        if header in seen:
            return ""
        seen.add(header)
        return expand(header) + f'\n#line {text.count(chr(10), 0, end) + 1} "{file}"'

    return expand(f"{name}.cu")


@cache
def parameters(name: str) -> dict[str, str]:
    """The kernels of cuda/NAME.cu and their parameters, spelled by the letters of kernels.py (p pointer ...)."""

    def letter(parameter: str) -> str:
        return "p" if "*" in parameter else _LETTERS[parameter.split()[-2]]

    found = _KERNEL.findall(source_text(name))
    return {kernel: "".join(letter(parameter) for parameter in text.split(",")) for kernel, text in found}


@cache
def library() -> ctypes.CDLL:
    """NVRTC, as installed with torch or as a package of its own; otherwise wherever the system's loader finds it.

    Raises:
        OSError: there is none.
    """
    patterns = [str(Path(folder, "nvidia", "*", "lib", "libnvrtc.so.1[0-9]")) for folder in sys.path if folder]
    found = sorted((path for pattern in patterns for path in glob(pattern)), key=lambda path: path[-2:])
    from torch.version import cuda as wanted  # the driver can run what torch's own version compiles

    same = [path for path in found if wanted and path.endswith("." + wanted.split(".")[0])]
    names = [*same, *found[::-1], "libnvrtc.so.13", "libnvrtc.so.12"]
    for name in names[:-1]:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return ctypes.CDLL(names[-1])


def _version() -> tuple[int, int]:
    major, minor = ctypes.c_int(), ctypes.c_int()
    library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


def _newest_architecture() -> int:
    count = ctypes.c_int()
    library().nvrtcGetNumSupportedArchs(ctypes.byref(count))
    architectures = (ctypes.c_int * count.value)()
    library().nvrtcGetSupportedArchs(architectures)
    return int(max(architectures))


def compile_source(text: str, name: str, architecture: int, *more: str) -> tuple[bytes, str]:
    """(binary, compiler's log) of a source for compute capability `architecture`, such as 90.

    The binary is a cubin; for a GPU that is newer than this compiler, PTX, which the driver compiles.

    Raises:
        RuntimeError: the source does not compile.
    """
    lib, program = library(), ctypes.c_void_p()
    newest = _newest_architecture()
    target, kind = (f"sm_{architecture}", "CUBIN") if architecture <= newest else (f"compute_{newest}", "PTX")
    options = [option.encode() for option in (*FLAGS, f"-arch={target}", *more)]
    lib.nvrtcCreateProgram(ctypes.byref(program), text.encode(), name.encode(), 0, None, None)
    try:
        failed = lib.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
        log = _fetch(program, "ProgramLog").decode(errors="replace").rstrip("\0\n")
        if failed:
            raise RuntimeError(f"{name} does not compile for {target}: {log}")
        return _fetch(program, kind), log
    finally:
        lib.nvrtcDestroyProgram(ctypes.byref(program))


def _fetch(program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    getattr(library(), f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    getattr(library(), f"nvrtcGet{what}")(program, buffer)
    return buffer.raw


def cached_binary(name: str, architecture: int) -> Path:
    """The file with the binary of cuda/NAME.cu for this architecture, compiled now if it is not there yet."""
    text = source_text(name)
    key = hashlib.sha256(repr((text, FLAGS, architecture, _version())).encode()).hexdigest()[:32]
    path = _folder() / f"{name}-{architecture}-{key}.cubin"
    if not path.exists():
        binary, _ = compile_source(text, f"{name}.cu", architecture)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.stem, delete=False) as file:
            file.write(binary)
        os.replace(file.name, path)
    return path


def _folder() -> Path:
    """Where binaries are kept: LOWCOMM_CACHE, or the user's cache folder, or else a folder of this process."""
    default = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(os.environ.get("LOWCOMM_CACHE") or Path(default, "lowcomm"))
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        return _own_folder()


@cache
def _own_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="lowcomm-"))
