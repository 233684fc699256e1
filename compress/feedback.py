"""Error feedback: what compression left out of one message is added to the next.

A feedback object is immutable settings; its state is a dict of flat float32 tensors, held by whoever sends messages
(`lowcomm.sync.AllReduce`, one state per bucket). `encode` never changes the committed state: it returns a candidate,
which replaces the state only when the exchange succeeded. Dropping the candidate undoes everything, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .codec import Codec

__all__ = ["EF14", "Feedback"]

State = dict[str, Tensor]


@dataclass(frozen=True)
class Feedback:
    """Base class of all error-feedback rules."""

    def init(self, n: int, device: torch.device) -> State:
        """The state before the first message: named (n,) float32 tensors."""
        raise NotImplementedError

    def encode(
        self, codec: Codec, x: Tensor, state: State, out: Tensor, *, step: int = 0, rank: int = 0, bucket: int = 0
    ) -> tuple[int, State]:
        """Encode `x` corrected by `state` into `out`; return (flags, candidate state).

        Args:
            x: (n,) float32. It is consumed: the candidate may live in its memory.
            state: the committed state. Not modified.
        """
        raise NotImplementedError

    def aggregate(self, mean: Tensor, candidate: State) -> Tensor:
        """What the caller gets for the mean of the decoded messages. Runs once, when the exchange has succeeded."""
        return mean


@dataclass(frozen=True)
class EF14(Feedback):
    """Classic error feedback: p = e + x, send d = C(p), keep e = p - d (arXiv 1901.09847; Seide et al. 2014)."""

    def init(self, n: int, device: torch.device) -> State:
        return {"residual": torch.zeros(n, device=device)}

    def encode(
        self, codec: Codec, x: Tensor, state: State, out: Tensor, *, step: int = 0, rank: int = 0, bucket: int = 0
    ) -> tuple[int, State]:
        flags = codec.encode_feedback(x, state["residual"], x, out, step=step, rank=rank, bucket=bucket)
        return flags, {"residual": x}
