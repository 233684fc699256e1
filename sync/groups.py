"""Turn the `process_group` argument into a group, and give overlapped exchanges a group of their own."""

from __future__ import annotations

from collections import defaultdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["resolve_group"]

Group = Any  # dist.ProcessGroup; builds without torch.distributed lack the name


def resolve_group(process_group: Any) -> Group | None:
    """The ProcessGroup behind the `process_group` argument, or None for a world of one.

    Args:
        process_group: a ProcessGroup, a 1-D DeviceMesh, or None: the default group where one is initialised, otherwise
            this process alone.

    Raises:
        ValueError: a mesh with several dimensions, or a group that this rank does not belong to.
        TypeError: anything else.

    >>> resolve_group(None) is None
    True
    """
    if process_group is None:
        if dist.is_available() and dist.is_initialized():
            return dist.group.WORLD
        return None
    if hasattr(process_group, "mesh_dim_names"):
        return _group_of_mesh(process_group)
    if dist.is_available() and process_group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            "process_group is a group that this rank does not belong to; construct the object on the group's own "
            "ranks only"
        )
    if not dist.is_available() or not isinstance(process_group, dist.ProcessGroup):
        raise TypeError(
            f"process_group must be a ProcessGroup, a 1-D DeviceMesh or None but is: {type(process_group).__name__}"
        )
    return process_group


def _group_of_mesh(mesh: Any) -> Group:
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names or tuple(range(mesh.ndim))
        raise ValueError(
            f"process_group must be a 1-D DeviceMesh but has the dimensions {names}; pick the replicate dimension, "
            f"for example mesh[{names[0]!r}]"
        )
    if mesh.get_coordinate() is None:
        raise ValueError("process_group is a DeviceMesh that this rank does not belong to; use a mesh containing it")
    return mesh.get_group()


def backend_name(group: Group) -> str:
    """Name of a group's backend, such as "gloo" or "cpu:gloo,cuda:nccl"."""
    try:
        return str(dist.get_backend(group))
    except (KeyError, RuntimeError, ValueError):  # a group that torch.distributed has not registered
        return str(group.name())


def rank_in(group: Group) -> int:
    """This process's rank in a group. torchft's groups wrap another one, which knows; they say 0 on all ranks."""
    inner = getattr(group, "parent", None)
    return int(group.rank()) if inner is None else rank_in(inner)


def group_timeout(group: Group, device: str) -> timedelta:
    """The timeout of a group's operations; torch's default where its backend does not tell."""
    try:
        timeout = group._get_backend(torch.device(device)).options._timeout
    except (AttributeError, RuntimeError):
        timeout = None
    return timeout if isinstance(timeout, timedelta) else dist.distributed_c10d.default_pg_timeout


def private_group(group: Group, device: str) -> Group:
    """Connections of our own between the ranks of a group. Called by all its ranks, in the same order.

    Exchanges that run in a thread need them: on the user's group their messages would mix with the user's own.
    `torch.distributed.new_group` would do, were its names the same on ranks that have made different numbers of groups.

    Args:
        device: "cpu" or "cuda", where the messages live.

    Returns:
        A backend with gloo or NCCL; the group itself where it runs on something else or is not registered.
    """
    backend = backend_name(group)
    try:
        ranks = dist.get_process_group_ranks(group)
    except (KeyError, RuntimeError, ValueError):
        return group
    name = "lowcomm/" + "-".join(map(str, ranks)) + f"/{device}/{_made[tuple(ranks)]}"
    _made[tuple(ranks)] += 1
    store = dist.distributed_c10d.PrefixStore(name, dist.distributed_c10d._get_default_store())
    if "nccl" in backend and device == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = group_timeout(group, device)
        return dist.ProcessGroupNCCL(store, group.rank(), group.size(), options)
    if "gloo" in backend:
        return dist.ProcessGroupGloo(store, group.rank(), group.size(), group_timeout(group, "cpu"))
    return group


_made: dict[tuple[int, ...], int] = defaultdict(int)  # private groups for each set of ranks: part of their names
