"""Process groups in every form they are given, and a group used by several objects, processes and threads."""

from __future__ import annotations

import os
import threading

import pytest
import torch
import torch.distributed as dist
from lowcomm.sync import AllReduce, resolve_group
from lowcomm.sync.lane import Lane
from ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh


def _groups_rank(rank: int, world_size: int) -> dict[str, object]:
    results: dict[str, object] = {}
    odd = dist.new_group([1, 3])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    flat_mesh = init_device_mesh("cpu", (4,))
    part_mesh = dist.device_mesh.DeviceMesh("cpu", [0, 2])
    x = torch.full((3,), float(rank))
    results["default"] = AllReduce().reduce(x.clone()).result
    results["mesh"] = AllReduce(flat_mesh).reduce(x.clone()).result
    for name in ("replicate", "shard"):
        reducer = AllReduce(mesh[name])
        results[name] = (reducer.rank, reducer.world_size, reducer.start(x.clone()).wait() and None)
        results[name + " mean"] = reducer.reduce(x.clone()).result
    for name, group in (("2-D", mesh), ("part", part_mesh if rank % 2 else mesh), ("odd", odd)):
        try:
            resolve_group(group)
            results[name] = "ok"
        except ValueError as error:
            results[name] = str(error)
    if rank % 2:
        results["odd mean"] = AllReduce(odd).start(x.clone())
        results["odd mean"] = (results["odd mean"].wait(), results["odd mean"].result)[1]
    reducer = AllReduce()
    reducer.start(x.clone()).wait()
    results["threads"] = sum(thread.name == "lowcomm-sync" for thread in threading.enumerate())
    child = os.fork()
    if child == 0:
        try:
            reducer.reduce(x.clone())
        except RuntimeError as error:
            os._exit(7 if "fork" in str(error) else 1)
        os._exit(0)
    results["child"] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return results


def test_groups() -> None:
    outcomes = run_ranks(_groups_rank, 4)
    for rank, outcome in enumerate(outcomes):
        assert outcome["default"].tolist() == outcome["mesh"].tolist() == [1.5] * 3
        assert outcome["replicate"][:2] == (rank // 2, 2) and outcome["shard"][:2] == (rank % 2, 2)
        assert outcome["replicate mean"].tolist() == [rank % 2 + 1.0] * 3
        assert outcome["shard mean"].tolist() == [rank // 2 * 2 + 0.5] * 3
        assert "('replicate', 'shard')" in outcome["2-D"] and "mesh['replicate']" in outcome["2-D"]
        assert "must be a 1-D" in outcome["part"] or "does not belong" in outcome["part"]
        if rank % 2:
            assert outcome["odd"] == "ok" and outcome["odd mean"].tolist() == [2.0] * 3
            assert "does not belong" in outcome["part"]
        else:
            assert "does not belong" in outcome["odd"]
        assert outcome["threads"] == 4 if rank % 2 else outcome["threads"] == 3  # one for each group with overlap
        assert outcome["child"] == 7


def test_what_is_no_group() -> None:
    with pytest.raises(TypeError, match="ProcessGroup, a 1-D DeviceMesh or None but is: str"):
        AllReduce("gloo")
    assert resolve_group(None) is None


def test_a_lane_keeps_the_order() -> None:
    order: list[int] = []

    class Task:
        def __init__(self, number: int) -> None:
            self.number, self.finished = number, threading.Event()

        def run(self) -> None:
            order.append(self.number)

        def publish(self) -> None:
            self.finished.set()

    lane, tasks = Lane(), [Task(number) for number in range(100)]
    assert lane.run(tasks[0])  # nothing queued: in this thread
    for task in tasks[1:]:
        lane.submit(task)
    for task in tasks[1:]:
        assert task.finished.wait(10)
    assert order == list(range(100))
