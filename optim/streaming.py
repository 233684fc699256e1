"""Streaming DiLoCo: fragments of the model take turns, and results arrive while training goes on (arXiv 2501.18512).

The parameters are split into P fragments. Fragment f has anchor X^f, momentum B^f and offset o_f = floor(f H / P). With
tau = delay:

    t mod H = o_f:        D_i^f = X^f - x_i^f;  start averaging D^f = sum_i w_i C(D_i^f)
    tau steps later:      X^f, B^f = outer_step(X^f, B^f, D^f)
                          x_i^f = alpha x_i^f + (1 - alpha) X^f

Each fragment is sent once per H steps, so the peak traffic is 1/P of DiLoCo's, and tau steps hide the exchange.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import Unpack

from ..sync import Receipt
from .diloco import check_outer
from .engine import LowCommOptimizer
from .fragment import Fragment
from .options import SharedOptions
from .outer import Nesterov
from .state import InFlight

__all__ = ["StreamingDiLoCo"]

Partition = Literal["strided", "sequential", "bytes"] | Sequence[Sequence[str]] | Callable[[str], int]


class StreamingDiLoCo(LowCommOptimizer):
    """Streaming DiLoCo (arXiv 2501.18512): one fragment at a time, overlapped with `delay` training steps.

    Args:
        inner: the optimizer that trains this worker. Layer patterns need it built from named parameters
            (`AdamW(model.named_parameters())`).
        sync_every: H, inner steps between two syncs of the same fragment.
        fragments: how parameters are split. "strided" (default) and "sequential" group transformer blocks, told by the
            first number in a parameter's name, `layers_per_fragment` at a time; parameters without a number
            (embeddings, head, final norm) form fragment 0. "bytes" makes `num_fragments` consecutive fragments of about
            equal size. A list of lists of parameter names, or a callable from name to fragment number, says it all.
        delay: tau, inner steps between sending a fragment and applying the result, 0 <= tau < H. May differ between
            workers.
        alpha: share of the worker's own value kept when the result is applied. None (default): 0.5 with a delay, 0
            without. With alpha > 0 workers agree on the anchor, not on their parameters.
        offsets: step (mod H) at which each fragment is sent; default floor(f H / P).
        first_send: "early" (default) sends fragment f first at its offset; "full" one period later, so that every
            message covers exactly H steps, as in the paper's example.
        outer_lr: nu. The paper uses 0.4 at every scale.
        outer_momentum: mu.
        nesterov: Nesterov momentum or heavy ball; group key "outer_nesterov".
        layers_per_fragment: blocks in a fragment; the paper uses 3.
        num_fragments: of the "bytes" partition.
        **shared: see `LowCommOptimizer`; `sync_buffers` and `average_state` act when fragment 0 is applied, and then
            block, so they are refused with a delay.

    Raises:
        ValueError: an argument out of range, a partition that misses parameters or takes one twice, or parameters
            without names where names are needed.

    Example:
        >>> import torch
        >>> from lowcomm.optim import StreamingDiLoCo
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(6)))
        >>> inner = torch.optim.SGD(model.named_parameters(), lr=0.1)
        >>> optimizer = StreamingDiLoCo(inner, sync_every=4, delay=1, layers_per_fragment=3)
        >>> for _ in range(5):
        ...     model(torch.ones(1, 2)).sum().backward()
        ...     optimizer.step()
        >>> optimizer.num_syncs
        2

    The paper leaves open where the fragment's optimizer state and module buffers are averaged, and the mapping from
    parameter names to layers; both are ours. Evaluate with `global_weights()`: the anchor does better than a replica.
    """

    def __init__(
        self,
        inner: Optimizer | Sequence[Optimizer],
        *,
        sync_every: int = 100,
        fragments: Partition = "strided",
        delay: int = 1,
        alpha: float | None = None,
        offsets: Sequence[int] | None = None,
        first_send: Literal["early", "full"] = "early",
        outer_lr: float = 0.4,
        outer_momentum: float = 0.9,
        nesterov: bool = True,
        layers_per_fragment: int = 3,
        num_fragments: int = 4,
        **shared: Unpack[SharedOptions],
    ):
        check_outer(outer_lr, outer_momentum)
        alpha = (0.5 if delay > 0 else 0.0) if alpha is None else alpha
        _check(sync_every, delay, alpha, first_send, shared)
        self._choice, self._layers, self._parts = fragments, layers_per_fragment, num_fragments
        self._tau, self._alpha, self._first_send = delay, alpha, first_send
        self._offsets = None if offsets is None else tuple(offsets)
        super().__init__(
            inner,
            sync_every=sync_every,
            rule=Nesterov(),
            outer_defaults={"outer_lr": outer_lr, "outer_momentum": outer_momentum, "outer_nesterov": nesterov},
            **shared,
        )
        self._numbers: list[
            int
        ] = []  # of every fragment in memory (one device and dtype each), its number in the schedule
        self._partition()

    @property
    def delay(self) -> int:
        """tau, inner steps between sending a fragment and applying the result."""
        return self._tau

    # ---- when ----------------------------------------------------------------------------------------------------

    def _count(self) -> int:
        return max(self._numbers) + 1

    def _offset(self, number: int) -> int:
        interval = int(self.param_groups[0]["sync_every"])
        return number * interval // self._count() if self._offsets is None else self._offsets[number] % interval

    def _due_at(self, number: int, step: int) -> bool:
        t, interval, offset = step - self._warmup_steps, self.param_groups[0]["sync_every"], self._offset(number)
        earliest = interval + offset if self._first_send == "full" and offset else 1
        return t >= earliest and (t - self._phase) % interval == offset

    def _next_send(self, step: int, lr: float) -> int:
        candidate = max(step, self._warmup_steps) + 1
        while not any(self._due_at(number, candidate) for number in set(self._numbers)):
            candidate += 1
        return candidate

    def _due_fragments(self, step: int) -> list[Fragment]:
        return [fragment for fragment in self._fragments if self._due_at(self._numbers[fragment.bucket], step)]

    def _delay(self, fragment: Fragment) -> int:
        return self._tau

    def _merge(self, fragment: Fragment) -> float:
        return self._alpha

    def _slots(self) -> int:
        return 1 if self._tau else 0

    def _others_due(self, due: list[InFlight], receipts: list[Receipt]) -> tuple[Sequence[str], bool]:
        sent = [self._numbers[x.fragment.bucket] for x, r in zip(due, receipts, strict=True) if r.algorithm != "none"]
        return (self._average_state, True) if 0 in sent else ((), False)

    # ---- what ----------------------------------------------------------------------------------------------------

    def _partition(self) -> list[list[tuple[Tensor, int]]]:
        numbers = self._fragment_numbers()
        members: dict[tuple[int, torch.device, torch.dtype], list[tuple[Tensor, int]]] = defaultdict(list)
        index = 0
        for g, group in enumerate(self.param_groups):
            for p in group["params"]:
                if p.requires_grad:
                    members[numbers[index], p.device, p.dtype].append((p, g))
                index += 1
        keys = sorted(members, key=lambda key: key[0])
        present = sorted({key[0] for key in keys})
        self._numbers = [present.index(key[0]) for key in keys]
        if self._offsets is not None and len(self._offsets) != len(present):
            raise ValueError(
                f"offsets must have one value for each of {len(present)} fragments but is: {self._offsets}"
            )
        return [members[key] for key in keys]

    def _fragment_numbers(self) -> list[int]:
        """The fragment number of every parameter, in group order."""
        if self._choice == "bytes":
            return equal_bytes([p for group in self.param_groups for p in group["params"]], self._parts)
        names = [name for group in self.param_groups for name in group.get("param_names", [])]
        if len(names) != sum(len(group["params"]) for group in self.param_groups):
            raise ValueError(
                f"fragments={self._choice!r} goes by parameter names, which the inner optimizer does not know: build "
                'it from model.named_parameters(), or use fragments="bytes"'
            )
        if isinstance(self._choice, str):
            return by_layer(names, self._layers, strided=self._choice == "strided")
        if callable(self._choice):
            return [int(self._choice(name)) for name in names]
        return by_name(names, self._choice)


def by_layer(names: Sequence[str], layers_per_fragment: int, strided: bool) -> list[int]:
    """Fragment numbers from the first number in each name; parameters without one are fragment 0.

    >>> by_layer(["embed", "h.0.w", "h.1.w", "h.2.w", "h.3.w"], 2, strided=True)
    [0, 1, 2, 1, 2]
    >>> by_layer(["embed", "h.0.w", "h.1.w", "h.2.w", "h.3.w"], 2, strided=False)
    [0, 1, 1, 2, 2]
    """
    found = [re.search(r"(?:^|\.)(\d+)(?:\.|$)", name) for name in names]
    layers = sorted({int(match[1]) for match in found if match})
    blocks = -(-len(layers) // layers_per_fragment)
    number = {layer: 1 + (k % blocks if strided else k // layers_per_fragment) for k, layer in enumerate(layers)}
    return [number[int(match[1])] if match else 0 for match in found]


def equal_bytes(parameters: Sequence[Tensor], parts: int) -> list[int]:
    """Consecutive fragments of about equal size: a parameter goes where its middle byte lies.

    >>> equal_bytes([torch.zeros(10), torch.zeros(2), torch.zeros(8)], 2)
    [0, 1, 1]
    """
    sizes = [p.numel() * p.element_size() for p in parameters]
    total, before, numbers = sum(sizes) or 1, 0, []
    for size in sizes:
        numbers.append(min(parts - 1, (2 * before + size) * parts // (2 * total)))
        before += size
    return numbers


def by_name(names: Sequence[str], partition: Sequence[Sequence[str]]) -> list[int]:
    """Fragment numbers from lists of names; every name exactly once."""
    numbers: dict[str, int] = {}
    for number, part in enumerate(partition):
        for name in part:
            if name in numbers:
                raise ValueError(f"fragments names {name!r} twice")
            if name not in names:
                raise ValueError(f"fragments names {name!r}, which the inner optimizer does not have")
            numbers[name] = number
    missing = [name for name in names if name not in numbers]
    if missing:
        raise ValueError(f"fragments must cover every parameter but misses {missing[:3]} ({len(missing)} in all)")
    return [numbers[name] for name in names]


def _check(sync_every: int, delay: int, alpha: float, first_send: str, shared: SharedOptions) -> None:
    if not isinstance(sync_every, int):
        raise ValueError(f"sync_every must be an int, since fragments take turns within it, but is: {sync_every!r}")
    if isinstance(delay, bool) or not isinstance(delay, int) or not 0 <= delay < max(sync_every, 1):
        raise ValueError(f"delay must be an int with 0 <= delay < sync_every ({sync_every}) but is: {delay!r}")
    if not 0.0 <= alpha <= 1.0:
        raise ValueError(f"alpha must be in [0, 1] but is: {alpha}")
    if first_send not in ("early", "full"):
        raise ValueError(f"first_send must be 'early' or 'full' but is: {first_send!r}")
    if delay and (shared.get("average_state") or shared.get("sync_buffers") is not None):
        raise ValueError("average_state and sync_buffers block, which delay is there to avoid; use delay=0")
