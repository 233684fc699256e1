"""Hierarchical local SGD: near workers average often, all workers seldom (arXiv 1808.07217).

Levels are pairs of a period and a group. At step t only the largest period that divides t acts:

    x_i <- mean over the group of that level;   the last level is the whole world
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch.optim import Optimizer
from typing_extensions import Unpack

from ..sync import AllReduce, resolve_group
from .engine import LowCommOptimizer
from .fragment import Fragment
from .options import SharedOptions
from .state import InFlight

__all__ = ["HierarchicalLocalSGD"]


class HierarchicalLocalSGD(LowCommOptimizer):
    """Hierarchical local SGD (arXiv 1808.07217): {period: group}, each period a multiple of the one before.

    Args:
        inner: the optimizer that trains this worker.
        sync_every: ascending {period in inner steps: group}. A group is its size (consecutive ranks; the groups are
            made here, by all ranks together) or this rank's ProcessGroup or 1-D DeviceMesh. The last group holds
            everybody: its size, or None for `process_group`.
        **shared: see `LowCommOptimizer`. `weights` are renormalised inside a group. `compress` is refused: groups have
            no common parameters to which a pseudo-gradient could refer.

    Raises:
        ValueError: periods that do not divide each other, sizes that do not, or `compress`.

    Example:
        >>> import torch
        >>> from lowcomm.optim import HierarchicalLocalSGD
        >>> model = torch.nn.Linear(2, 1)
        >>> inner = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> optimizer = HierarchicalLocalSGD(inner, sync_every={4: 1, 16: None})

    `flush` averages over the whole world; all workers must have made the same number of steps.
    """

    def __init__(
        self,
        inner: Optimizer | Sequence[Optimizer],
        *,
        sync_every: Mapping[int, Any],
        **shared: Unpack[SharedOptions],
    ):
        if shared.get("compress") is not None:
            raise ValueError("compress needs parameters that all workers have agreed on, which groups do not have")
        if not isinstance(sync_every, Mapping):
            raise ValueError(
                f"sync_every must map periods to groups, a schedule for each level, but is: {sync_every!r}"
            )
        self._periods = tuple(sync_every)
        _check_periods(self._periods)
        world = resolve_group(shared.get("process_group"))
        self._groups = _make_groups(list(sync_every.values()), world)
        super().__init__(
            inner,
            sync_every=self._periods[0],
            rule=None,
            outer_defaults={"periods": self._periods},
            **shared,
        )

    _of_this_process = ("_group", "_groups")

    def _connect(self, process_group: Any) -> None:
        super()._connect(process_group)
        self._levels = [AllReduce(group) for group in self._groups[:-1]] + [self._reducer]

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in super().__getstate__().items() if key != "_levels"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if not hasattr(self, "_groups") and "_groups" not in state:
            raise RuntimeError("process groups cannot be pickled: construct it anew and load a state_dict")
        super().__setstate__(state)

    def _send(self, fragments: list[Fragment], step: int, optional: bool = False) -> list[InFlight]:
        t, world = step - self._warmup_steps, self._reducer
        levels = [level for level, period in zip(self._levels, self._periods, strict=True) if t % period == 0]
        self._reducer = levels[-1]
        last = {fragment.bucket: fragment.last_send for fragment in self._fragments}
        try:
            sent = super()._send(fragments, step, optional)
        finally:
            self._reducer = world
        if levels[-1] is not world:  # progress that the world has not seen: `flush` still owes it
            for fragment in fragments:
                fragment.last_send = last[fragment.bucket]
            self._set_all("last_send", [fragment.last_send for fragment in self._fragments])
        return sent

    def _others_due(self, due: list[InFlight], receipts: list[Any]) -> tuple[Sequence[str], bool]:
        """State and buffers travel with averages over the whole world only."""
        everybody = (self._steps - self._warmup_steps) % self._periods[-1] == 0 or any(x.partial for x in due)
        return super()._others_due(due, receipts) if everybody else ((), False)

    def _roll_call(self) -> bool:
        return True


def _check_periods(periods: Sequence[int]) -> None:
    if not periods or any(isinstance(p, bool) or not isinstance(p, int) or p < 1 for p in periods):
        raise ValueError(f"sync_every must map periods of at least 1 step to groups but has: {list(periods)}")
    for shorter, longer in itertools.pairwise(periods):
        if longer <= shorter or longer % shorter:
            raise ValueError(f"every period must be a multiple of the one before but {longer} follows {shorter}")


def _make_groups(groups: list[Any], world: Any) -> list[Any]:
    """The group of every level; sizes become groups of consecutive ranks."""
    ranks = [0] if world is None else dist.get_process_group_ranks(world)
    if isinstance(groups[-1], int) and groups[-1] != len(ranks):
        raise ValueError(f"the last group must hold all {len(ranks)} workers but has size: {groups[-1]}")
    made: list[Any] = []
    before = 1
    for group in groups[:-1]:
        if not isinstance(group, int):
            made.append(group)
            continue
        if group < 1 or group % before or len(ranks) % group:
            raise ValueError(f"a group size must divide the next and be a multiple of the one before but is: {group}")
        before = group
        parts = [ranks[i : i + group] for i in range(0, len(ranks), group)] if world is not None else []
        new = [(part, dist.new_group(part)) for part in parts]
        made.append(next((g for part, g in new if dist.get_rank() in part), None))
    return [*made, world]
