"""Turn the `process_group` argument into a group, and give overlapped exchanges a group of their own."""

from __future__ import annotations

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


def group_timeout(group: Group) -> timedelta | None:
    """The timeout of a group's operations, or None where its backend does not tell."""
    try:
        device = torch.device("cuda" if "nccl" in dist.get_backend(group) else "cpu")
        timeout = group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):
        return None
    return timeout if isinstance(timeout, timedelta) else None


def private_group(group: Group) -> Group:
    """A new group of the same ranks, backend and timeout. Called by all its ranks, in the same order.

    Exchanges that run in a thread need it: on the user's group their messages would mix with the user's own.
    """
    return dist.new_group(
        ranks=dist.get_process_group_ranks(group),
        backend=dist.get_backend(group),
        timeout=group_timeout(group),
        use_local_synchronization=True,
    )
