"""CUDA streams of overlapped exchanges: the helper thread works on a stream of its own, and the host orders the two.

Both sides wait on the host, not on the device: at the end of `start` for what the caller's stream still has to write,
in the helper thread for what the exchange has to write. An exchange takes place once in many steps, so this costs next
to nothing, and it leaves no order between streams to get wrong. Without CUDA tensors nothing happens here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

__all__ = ["hand_over", "side_stream", "take_over"]

_streams: dict[torch.device, torch.cuda.Stream] = {}


def hand_over(tensor: Tensor) -> None:
    """Wait until everything queued for `tensor` on the caller's stream is done, so that another thread may go on."""
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()


@contextmanager
def side_stream(tensor: Tensor) -> Iterator[None]:
    """Run the block on the exchange stream of the tensor's device, and wait for its end."""
    if not tensor.is_cuda:
        yield
        return
    stream = _streams.setdefault(tensor.device, torch.cuda.Stream(tensor.device))
    try:
        with torch.cuda.stream(stream):
            yield
    finally:  # also after an error, or its buffers could be used again while kernels still write to them
        stream.synchronize()


def take_over(tensor: Tensor) -> None:
    """Tell the allocator that the caller's stream uses `tensor`, which may come from the exchange stream."""
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
