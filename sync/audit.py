"""`Audit`: every so often, compare tensors and hyper-parameters across ranks.

    audit = Audit(model.named_parameters(), optimizer.param_groups, every=20)
    optimizer.register_sync_hook(audit)

Exchanges give all ranks the same bits; what a rank does to them afterwards (a flipped bit, a schedule that ran ahead, a
checkpoint of yesterday) shows here. One pass over the tensors and 32 bytes a rank where all agree.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, MutableMapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from .errors import Disagreement
from .fingerprint import agree_on_tensors
from .groups import resolve_group
from .hello import hash64

__all__ = ["Audit"]

logger = logging.getLogger(__name__)


class Audit:
    """Compare tensors and settings across ranks at every `every`-th call; a sync hook, or called by hand.

    Args:
        named: (name, tensor), such as `model.named_parameters()`; in the same order on all ranks. Read once.
        settings: dictionaries of hyper-parameters, such as `optimizer.param_groups`. Compared are numbers, texts, None
            and tuples of them.
        every: calls between comparisons. Default 1.
        process_group: as everywhere.
        repair: give ranks that differ what more than half of all ranks hold, and log a warning that names them;
            otherwise raise.

    Raises:
        ValueError: every < 1. When called: tensors differ (and have no majority); it names the ranks and the first one.
        Disagreement: when called: a setting differs (and has no majority); it has every rank's value.

    >>> import torch
    >>> audit = Audit([("weight", torch.ones(2))], [{"lr": 0.1}], every=2)
    >>> audit(), audit()
    ([], [])
    """

    def __init__(
        self,
        named: Iterable[tuple[str, Tensor]],
        settings: Sequence[MutableMapping[str, Any]] = (),
        *,
        every: int = 1,
        process_group: Any = None,
        repair: bool = False,
    ) -> None:
        if every < 1:
            raise ValueError(f"every must be at least 1 but is: {every}")
        self._named, self._settings, self._every = list(named), settings, every
        self._group, self._repair, self._calls = resolve_group(process_group), repair, 0

    def __call__(self, *_: object) -> list[str]:
        """Count the call and, when one is due, compare; the names of what was repaired."""
        self._calls += 1
        if self._calls % self._every or self._group is None or dist.get_world_size(self._group) == 1:
            return []
        repaired = self._compare_settings()
        init = "majority" if self._repair else "check"
        return repaired + agree_on_tensors(self._named, self._group, init)  # type: ignore[arg-type]

    def _compare_settings(self) -> list[str]:
        mine = {
            f"settings[{i}][{key!r}]": value
            for i, group in enumerate(self._settings)
            for key, value in sorted(group.items())
            if _comparable(value)
        }
        hashes = self._gather(hash64(repr(mine)))
        if len(set(hashes)) == 1:
            return []
        everyones = self._gather(mine)
        differing = [name for name in everyones[0] if len({repr(theirs.get(name)) for theirs in everyones}) > 1]
        if not differing:  # names that rank 0 does not have
            raise Disagreement("names of settings", [sorted(theirs) for theirs in everyones])
        for name in differing:
            self._settle(name, [theirs.get(name) for theirs in everyones])
        return differing

    def _settle(self, name: str, values: Sequence[Any]) -> None:
        text, count = Counter(map(repr, values)).most_common(1)[0]
        if not self._repair or 2 * count <= len(values):
            raise Disagreement(name, values)
        odd = [rank for rank, value in enumerate(values) if repr(value) != text]
        logger.warning("lowcomm: %s differed on ranks %s and was repaired by majority to %s", name, odd, text)
        agreed = next(value for value in values if repr(value) == text)
        for i, group in enumerate(self._settings):
            for key in group:
                if name == f"settings[{i}][{key!r}]":
                    group[key] = agreed

    def _gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(values, value, group=self._group)
        return values


def _comparable(value: object) -> bool:
    if isinstance(value, tuple):
        return all(_comparable(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str)
