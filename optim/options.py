"""Arguments that all optimizers of the family share, and their checks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypedDict

from torch import Tensor, nn
from torch.optim import Optimizer

from ..compress import Codec, Feedback
from .schedules import Schedule

__all__ = ["SharedOptions"]

Weights = float | Literal["uniform"] | Callable[[], float]
Buffers = nn.Module | Iterable[Tensor] | None
Failure = Literal["raise", "skip", "local"]


class SharedOptions(TypedDict, total=False):
    """Keyword arguments that every optimizer of the family takes; see `LowCommOptimizer`."""

    process_group: Any
    weights: Weights
    average_state: Sequence[str]
    warmup_steps: int
    phase: int
    compress: Codec | None
    feedback: Feedback | Literal["auto"] | None
    sync_buffers: Buffers
    on_failure: Failure
    offload: Literal["cpu"] | None
    init: Literal["broadcast", "check"]
    statistics: bool


def check_inner(inner: Optimizer | Sequence[Optimizer]) -> list[Optimizer]:
    inners = [inner] if isinstance(inner, Optimizer) else list(inner) if isinstance(inner, Sequence) else []
    if not inners or not all(isinstance(optimizer, Optimizer) for optimizer in inners):
        raise ValueError(
            f"inner must be a torch.optim.Optimizer or a non-empty sequence of them but is: {inner!r}; "
            "build it first, for example AdamW(model.parameters())"
        )
    if any(hasattr(optimizer, "global_weights") for optimizer in inners):  # one of ours
        raise ValueError("inner is already a low-communication optimizer; wrap the inner optimizer only once")
    seen: set[int] = set()
    for p in (p for optimizer in inners for group in optimizer.param_groups for p in group["params"]):
        if id(p) in seen:
            raise ValueError(f"a parameter of shape {tuple(p.shape)} appears twice in the inner optimizers")
        seen.add(id(p))
    return inners


def check_options(
    sync_every: Any,
    weights: Any,
    average_state: Any,
    warmup_steps: Any,
    phase: Any,
    compress: Any,
    on_failure: Any,
    offload: Any,
    init: Any,
) -> None:
    if isinstance(sync_every, bool) or not isinstance(sync_every, (int, Schedule)):
        raise ValueError(f"sync_every must be an int or have a next_sync method but is: {sync_every!r}")
    if isinstance(sync_every, int) and sync_every < 1:
        raise ValueError(f"sync_every must be at least 1 but is: {sync_every}")
    if not (weights == "uniform" or callable(weights) or isinstance(weights, (int, float))):
        raise ValueError(f"weights must be 'uniform', a number or a callable but is: {weights!r}")
    if isinstance(weights, (int, float)) and not (math.isfinite(weights) and weights >= 0):
        raise ValueError(f"weights must be finite and not negative but is: {weights}")
    if isinstance(average_state, str) or not all(isinstance(name, str) for name in average_state):
        raise ValueError(f"average_state must be a sequence of names but is: {average_state!r}; write ('exp_avg',)")
    for name, count in (("warmup_steps", warmup_steps), ("phase", phase)):
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise ValueError(f"{name} must be an int of at least 0 but is: {count!r}")
    if compress is not None and not isinstance(compress, Codec):
        raise ValueError(f"compress must be a codec of lowcomm.compress or None but is: {compress!r}")
    for name, value, legal in (
        ("on_failure", on_failure, ("raise", "skip", "local")),
        ("offload", offload, (None, "cpu")),
        ("init", init, ("broadcast", "check")),
    ):
        if value not in legal:
            raise ValueError(f"{name} must be one of {legal} but is: {value!r}")


def floating_and_other(buffers: Buffers) -> tuple[list[Tensor], list[Tensor]]:
    tensors = list(buffers.buffers()) if isinstance(buffers, nn.Module) else list(buffers or ())
    floating = [t for t in tensors if t.is_floating_point()]
    return floating, [t for t in tensors if not t.is_floating_point()]
