"""The state of one exchange, from `start` to the committed result, and what its algorithms share."""

from __future__ import annotations

import math
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from ..compress import HAS_INF, HAS_NAN, Feedback
from ..compress.kernels import kernel, runs_on_kernels, threads
from .frames import ABSENT, WEIGHTED, FrameHeader
from .peers import Peers
from .plan import Traffic
from .receipt import Receipt

__all__ = ["Algorithm", "Buffers", "Exchange", "Shares"]

State = dict[str, Tensor]


@dataclass
class Exchange:
    """One vector on its way. Filled in by `start`, then by the thread that drives the lane."""

    flat: Tensor  # (n,) float32 or float64
    bucket: int
    round: int
    weight: float
    rank: int
    sequence: int
    receipt: Receipt
    check: int = 0
    describe: Callable[[], dict[str, object]] | None = None
    sample: int = 0  # digest for the hello
    optional: bool = False  # this rank only answers the others
    hold: bool = False  # committed by Work.commit, not when it has ended
    previous: Exchange | None = None  # an earlier exchange of the same bucket, not finished when this one started
    base: State | None = None  # the feedback state this exchange builds on
    candidate: State | None = None  # what replaces it on success
    # What the reducing side keeps: the owner's residual, a rule's memory.
    owner_base: State = field(default_factory=dict)
    owner_candidate: State = field(default_factory=dict)
    frames: Tensor | None = None  # uint8, what this rank sends first
    original: Tensor | None = None  # a copy of the vector, for statistics
    loss: float | None = None  # of this rank, for statistics
    message_norm: float = math.nan  # of this rank's message as the others decode it, for statistics
    norms: list[float] = field(default_factory=list)  # of all contributing ranks' messages, for statistics
    shares: Shares | None = None  # where the result is a sum of all messages
    flags: int = 0
    error: BaseException | None = None
    result: Tensor | None = None
    own: Tensor | None = None  # this rank's message as the others decode it, where asked for
    settled: bool = False  # committed or failed; set under the owner's lock
    finished: threading.Event = field(default_factory=threading.Event)
    drive: Callable[[Exchange], None] | None = None
    _callbacks: list[Callable[[], None]] = field(default_factory=list)
    _callback_lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def elements(self) -> int:
        return self.flat.numel()

    @property
    def broken(self) -> bool:
        """Whether this exchange, or one that it builds on, has failed."""
        previous = self.previous  # another thread may forget it any time
        return self.error is not None or (previous is not None and previous.broken)

    @property
    def header(self) -> FrameHeader:
        """The frame header of this rank's messages (the codec id is filled in by the algorithm)."""
        flags = self.flags | (WEIGHTED if self.weight != 1.0 else 0) | (ABSENT if self.weight == 0.0 else 0)
        return FrameHeader(codec=0, flags=flags, round=self.round, weight=min(self.weight, 3.4028234e38))

    def run(self) -> None:
        """Drive the exchange to its end; errors are kept for the waiters."""
        assert self.drive is not None
        try:
            self.drive(self)
        except BaseException as error:
            self.error = error

    def settle(self) -> None:
        """Committed or failed: drop what is not needed any more."""
        self.settled = True
        self.drive = self.describe = self.previous = None
        self.base = self.candidate = self.frames = None
        self.owner_base, self.owner_candidate = {}, {}

    def publish(self) -> None:
        """Wake the waiters, then call the callbacks."""
        with self._callback_lock:
            self.finished.set()
        for callback in self._callbacks:
            callback()
        self._callbacks.clear()

    def when_finished(self, callback: Callable[[], None]) -> None:
        """Call `callback` after `publish`, or at once if that was before."""
        with self._callback_lock:
            if not self.finished.is_set():
                self._callbacks.append(callback)
                return
        callback()


class Algorithm(Protocol):
    """How a vector travels. `prepare` runs in the caller of `start`, `communicate` in the lane."""

    name: str

    def settings(self) -> dict[str, object]:
        """Everything that must be the same on all ranks."""

    def codec_id(self) -> int:
        """Codec id for the hello."""

    def traffic(self, elements: int, world_size: int) -> Traffic:
        """What one rank sends for a vector."""

    def prepare(self, exchange: Exchange) -> None:
        """Encode `exchange.flat`; set `frames`, `flags` and `candidate`."""

    def own(self, exchange: Exchange) -> Tensor:
        """This rank's prepared message, decoded; a new tensor."""

    def communicate(self, exchange: Exchange, peers: Peers, shares: Shares, lengths: Sequence[int]) -> None:
        """Exchange and reduce; set `result`, `owner_candidate` and OR new flags into `receipt.flags`."""


@dataclass(frozen=True)
class Shares:
    """How much each rank counts: result = sum_r factors[r] * x_r / divisor. A factor of 0 means: not in the sum."""

    factors: tuple[float, ...]
    divisor: float

    @classmethod
    def of(cls, weights: Sequence[float], plain_sum: bool = False) -> Shares:
        """From the averaging weights, which every rank knows; `plain_sum`: sum_r weights[r] * x_r, undivided.

        Equal weights give factors of exactly 1; a common power of two changes nothing in the others.

        >>> Shares.of([3.0, 0.0, 3.0])
        Shares(factors=(1.0, 0.0, 1.0), divisor=2.0)
        """
        if plain_sum:
            return cls(tuple(_float32(w) for w in weights), 1.0)
        positive = {w for w in weights if w > 0}
        if len(positive) == 1:
            return cls(tuple(float(w > 0) for w in weights), float(sum(w > 0 for w in weights)))
        exponent = math.frexp(max(weights))[1]
        factors = tuple(_float32(math.ldexp(w, -exponent)) for w in weights)
        return cls(factors, math.fsum(factors))

    @property
    def weighted(self) -> bool:
        return any(factor not in (0.0, 1.0) for factor in self.factors)


class Buffers:
    """Buffers that finished exchanges left behind, for the next ones: no allocation once every size has been seen."""

    _KEEP = 8  # of one size

    def __init__(self) -> None:
        self._free: dict[tuple[int, torch.dtype, torch.device], list[Tensor]] = {}

    def take(self, elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer with undefined contents."""
        free = self._free.get((elements, dtype, device))
        return free.pop() if free else torch.empty(elements, dtype=dtype, device=device)

    def give(self, *buffers: Tensor | None) -> None:
        """Hand over buffers that nobody else refers to."""
        for buffer in buffers:
            if buffer is not None:
                free = self._free.setdefault((buffer.numel(), buffer.dtype, buffer.device), [])
                if len(free) < self._KEEP:
                    free.append(buffer)


def initial_state(feedback: Feedback, exchange: Exchange) -> State:
    """The committed or pending state an exchange builds on, made when there is none."""
    if exchange.base is None:
        exchange.base = feedback.init(exchange.elements, exchange.flat.device)
    for name, tensor in exchange.base.items():
        if tensor.numel() != exchange.elements:
            raise ValueError(
                f"bucket {exchange.bucket} has a feedback state {name!r} of {tensor.numel()} elements but the vector "
                f"has {exchange.elements}; use another bucket number, or load_state(bucket, {{}}) to start afresh"
            )
    return exchange.base


def finite_flags(x: Tensor) -> int:
    """HAS_NAN | HAS_INF, in one pass over `x`, float32 or float64."""
    if x.numel() == 0:
        return 0
    if runs_on_kernels(x):
        return int(kernel("lc_finite", "plli")(x.data_ptr(), x.numel(), x.element_size(), threads()))
    low, high = torch.aminmax(x)
    if bool(torch.isfinite(low) & torch.isfinite(high)):
        return 0
    return (HAS_NAN if bool(torch.isnan(x).any()) else 0) | (HAS_INF if bool(torch.isinf(x).any()) else 0)


def scale_and_check(x: Tensor, factor: float) -> int:
    """x *= factor, 0 < factor <= 1, and HAS_NAN | HAS_INF of `x` before; one pass where there are kernels."""
    if factor == 1.0:
        return finite_flags(x)
    if x.dtype == torch.float32 and runs_on_kernels(x):
        return int(kernel("lc_scale_finite", "plfi")(x.data_ptr(), x.numel(), factor, threads()))
    flags = finite_flags(x)
    x.mul_(factor)
    return flags


class Stopwatch:
    """`with Stopwatch() as watch: ...` then `watch.ms`."""

    ms = 0.0

    def __enter__(self) -> Stopwatch:
        self._start = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.ms = (time.perf_counter() - self._start) * 1e3


def _float32(value: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", value))[0])
