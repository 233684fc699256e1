"""Load CUDA kernels and launch them through CuPy on torch's tensors, device and current stream.

CuPy takes what is needed here: it loads a compiled binary as it is and starts a kernel with given pointers and numbers.
Without it codecs run on torch operations, on the GPU all the same, and the log says once how to get it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import nvrtc

__all__ = ["Gpu", "gpu", "late_flags", "takes"]

_SCALARS: dict[str, Callable[[Any], Any]] = {
    "p": lambda address: np.uint64(address or 0),
    "l": np.int64,
    "i": np.int32,
    "u": np.uint64,
    "w": np.uint32,
    "f": np.float32,
}
_MIN_CUPY = 14

logger = logging.getLogger(__name__)


@cache
def usable() -> bool:
    """Whether CuPy and NVRTC are there. What is missing is said once in the log."""
    package = f"cupy-cuda{(torch.version.cuda or '13').split('.')[0]}x>={_MIN_CUPY}"
    try:
        import cupy

        if int(cupy.__version__.split(".")[0]) < _MIN_CUPY:
            raise ImportError(f"CuPy {cupy.__version__} is too old")
        nvrtc.library()
    except Exception as error:  # a broken CuPy fails in many ways; none may break training
        logger.warning(
            "lowcomm: no CUDA kernels (%s); codecs run on torch operations, slower. Remedy: pip install '%s'",
            error,
            package,
        )
        return False
    return True


def takes(*tensors: Tensor) -> bool:
    """Whether the CUDA kernels take these tensors: CUDA, all on one device, contiguous."""
    device = tensors[0].device
    for tensor in tensors:
        if tensor.device != device or not tensor.is_contiguous():
            return False
    return device.type == "cuda" and usable()


def typed(kernel: str, letters: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments as scalars of the types that the kernel declares; CuPy passes them on byte by byte.

    Raises:
        TypeError: their number is another.
        OverflowError: a number does not fit its type.
    """
    if len(arguments) != len(letters):
        raise TypeError(f"{kernel} takes {len(letters)} arguments but got {len(arguments)}")
    return tuple(_SCALARS[letter](argument) for letter, argument in zip(letters, arguments, strict=True))


class Gpu:
    """Launches kernels on one device. `launches.py` knows their shapes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.word = torch.zeros(1, dtype=torch.int32, device=device)  # flags of launches in CUDA graphs

    def launch(
        self, source: str, kernel: str, blocks: int, threads: int, *arguments: int | float | None, shared: int = 0
    ) -> None:
        """Start `kernel` of cuda/SOURCE.cu with `blocks` blocks of `threads` threads on torch's current stream.

        Args:
            arguments: numbers, and addresses (None: a null pointer), in the kernel's order.
            shared: bytes of dynamic shared memory for each block.
        """
        if not blocks:
            return
        function = self._function(source, kernel)
        values = typed(kernel, nvrtc.parameters(source)[kernel], arguments)
        with torch.cuda.device(self.device):
            # asked for at every launch: a graph capture or a user's stream is current for a while only
            handle = torch.cuda.current_stream(self.device).cuda_stream
            import cupy

            stream = cupy.cuda.ExternalStream(handle, self.device.index)
            function((blocks,), (threads,), values, shared_mem=shared, stream=stream)

    @cache  # noqa: B019 - one object per device lives as long as the process
    def _function(self, source: str, kernel: str) -> Any:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{kernel} is not loaded yet, which a graph capture forbids; run the codec once before it"
            )
        import cupy

        major, minor = torch.cuda.get_device_capability(self.device)
        path = nvrtc.cached_binary(source, 10 * major + minor)
        with torch.cuda.device(self.device), cupy.cuda.Device(self.device.index):
            function = cupy.RawModule(path=str(path)).get_function(kernel)
            _ = function.attributes  # loads the module on this device now
        return function

    def flags(self, run: Callable[[int], None]) -> int:
        """Call `run` with the address of a zeroed word of flags, and return what the kernels leave in it.

        Inside a graph capture nothing can be read: the flags gather in `word`, see `late_flags`, and 0 is returned.
        """
        if torch.cuda.is_current_stream_capturing():
            run(self.word.data_ptr())
            return 0
        word = torch.zeros(1, dtype=torch.int32, device=self.device)
        run(word.data_ptr())
        return int(word)


@cache
def _gpu(index: int) -> Gpu:
    return Gpu(torch.device("cuda", index))


def gpu(device: torch.device) -> Gpu:
    """The launcher of a CUDA device."""
    return _gpu(torch.cuda.current_device() if device.index is None else device.index)


def late_flags(device: torch.device) -> int:
    """Flags that kernels inside replayed CUDA graphs have raised on `device` since the last call.

    An encode that is captured in a graph returns 0, as nothing is known yet. Elements that are not finite are encoded
    as zero there too; call this now and then to learn that there were some.
    """
    word = gpu(device).word
    flags = int(word)
    word.zero_()
    return flags
