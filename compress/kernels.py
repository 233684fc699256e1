"""Find, load and select the C++ kernels.

The kernels are one shared library with a plain C interface, called through ctypes, which releases the GIL. Every
kernel writes the same bytes as the torch operations it replaces, so choosing a level changes speed and nothing else:

    "torch"     tensor operations only
    "portable"  C++ without special instructions
    "avx2"      C++ with AVX2 intrinsics (x86-64)

On CUDA tensors every level but "torch" uses CUDA kernels where there are some (launches.py).

The best level the machine has is chosen at import; the environment variable LOWCOMM_KERNELS names another one.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["available_levels", "kernel_level", "set_kernel_level", "use_kernel_level"]

LEVELS = ("torch", "portable", "avx2")
DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_ARGUMENTS = {
    "p": ctypes.c_void_p,
    "l": ctypes.c_int64,
    "i": ctypes.c_int32,
    "u": ctypes.c_uint64,
    "w": ctypes.c_uint32,
    "f": ctypes.c_float,
    "d": ctypes.c_double,
}

logger = logging.getLogger(__name__)
_level = "torch"
_local = threading.local()


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """The loaded kernel library, or None (said once in the log) where it was not built or cannot be loaded."""
    path = Path(__file__).with_name("_kernels.so")
    if not path.exists():
        logger.warning("lowcomm: installed without its C++ kernels; codecs run on torch operations, much slower")
        return None
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        logger.warning("lowcomm: cannot load %s (%s); codecs run on torch operations, much slower", path, error)
        return None


def available_levels() -> tuple[str, ...]:
    """The levels this machine can run, slowest first.

    >>> available_levels()[0]
    'torch'
    """
    lib = library()
    return LEVELS[:1] if lib is None else LEVELS[: 2 + int(lib.lc_max_level())]


def kernel_level() -> str:
    """The level in use: "torch", "portable" or "avx2"."""
    return _level


def set_kernel_level(level: str) -> None:
    """Use `level` from now on, in the whole process.

    Raises:
        ValueError: this machine does not have that level.
    """
    global _level
    if level not in available_levels():
        raise ValueError(f"kernel level must be one of {available_levels()} on this machine but is: {level!r}")
    lib = library()
    if lib is not None and level != "torch":
        lib.lc_set_level(LEVELS.index(level) - 1)
    _level = level


@contextmanager
def use_kernel_level(level: str) -> Iterator[None]:
    """Use `level` inside a `with` block.

    >>> with use_kernel_level("torch"):
    ...     kernel_level()
    'torch'
    """
    before = _level
    set_kernel_level(level)
    try:
        yield
    finally:
        set_kernel_level(before)


def runs_on_kernels(*tensors: Tensor) -> bool:
    """Whether the C++ kernels take these tensors: a kernel level in use, CPU, contiguous."""
    if _level == "torch":
        return False
    for tensor in tensors:  # noqa: SIM110 - a generator would double the cost of a small call
        if not (tensor.is_cpu and tensor.is_contiguous()):
            return False
    return True


def dtype_code(dtype: torch.dtype) -> int:
    """The number by which kernels know an input dtype: 0 float32, 1 bfloat16, 2 float16."""
    return DTYPE_CODES[dtype]


@cache
def kernel(name: str, arguments: str) -> Any:
    """The C function `name`, returning int32, with argument types spelled by letters.

    p pointer, l int64, i int32, w uint32, u uint64, f float, d double.
    """
    function = getattr(library(), name)
    function.argtypes = [_ARGUMENTS[letter] for letter in arguments]
    function.restype = ctypes.c_int32
    return function


def threads() -> int:
    """Threads a kernel may use: torch's own setting."""
    return torch.get_num_threads()


def workspace(nbytes: int) -> Tensor:
    """At least `nbytes` of memory for one call of a kernel, kept for the calling thread's next one."""
    kept: Tensor | None = getattr(_local, "workspace", None)
    if kept is None or kept.numel() < nbytes:
        _local.workspace = kept = torch.empty(nbytes, dtype=torch.uint8)
    return kept


def _choose_level() -> None:
    wanted = os.environ.get("LOWCOMM_KERNELS") or available_levels()[-1]
    set_kernel_level(wanted)


_choose_level()
