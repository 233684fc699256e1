"""`lowcomm bench-sync`: its table, its errors, and a limited link between two network namespaces."""

from __future__ import annotations

import json
import os
import subprocess
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lowcomm.recipes import bench_sync
from lowcomm.recipes.launch import Report, launch
from lowcomm.recipes.links import Link, bits_per_second, unavailable
from lowcomm.sync import AllReduce, SyncError

NO_LINKS = unavailable()
needs_links = pytest.mark.skipif(bool(NO_LINKS), reason=f"no network namespaces: {NO_LINKS}")


def test_table_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_sync.main(["None", "two_phase: Int4()", "--size", "4096", "--rounds", "1", "--overlap"]) == 0
    lines = capsys.readouterr().out.splitlines()
    result = json.loads(lines[-1])
    dense, coded = result["rows"]
    assert dense["algorithm"] == "dense" and coded["algorithm"] == "two_phase"
    assert dense["MB sent"] == pytest.approx((4 * 4096 + 65) / 1e6)
    assert coded["bytes"] == pytest.approx(4 * 4096 / (1e6 * coded["MB sent"]))
    assert coded["blocked"] >= 0 and coded["ms"] > 0
    assert result["command"] == "lowcomm bench-sync None 'two_phase: Int4()' --size 4096 --rounds 1 --overlap"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["Zip()"], "no class 'Zip'"),
        (["--link", "fast"], "a rate looks like 100mbit or 1gbit but is: 'fast'"),
        (["--link", "1gbit", "--world", "3"], "joins two processes but --world is 3"),
        (["spiral: Int4()"], "algorithm must be one of"),
    ],
)
def test_mistakes_are_found_before_anything_starts(arguments: list[str], message: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=message):
        bench_sync.main(arguments)


def test_rates() -> None:
    assert bits_per_second("10kbit") == 1e4 and bits_per_second("1.5gbit") == 1.5e9
    with pytest.raises(ValueError, match="0mbit"):
        bits_per_second("0mbit")


def _timed(rank: int, world_size: int, report: Report, size: int) -> float:
    reducer, flat = AllReduce(), torch.zeros(size)
    reducer.reduce(flat)
    dist.barrier()
    start = time.perf_counter()
    reducer.reduce(flat)
    return time.perf_counter() - start


@needs_links
def test_a_link_limits_the_rate_and_is_torn_down() -> None:
    before = set(os.listdir("/run/netns"))
    with Link("100mbit") as link:
        seconds = max(launch(_timed, 2, 250_000, prepare=link.enter))  # 1 MB each way
        names = link.names
    ideal = 8e6 / 100e6
    assert 0.9 * ideal < seconds < 10 * ideal
    assert not set(names) & set(os.listdir("/run/netns")) and set(os.listdir("/run/netns")) <= before


def _cut_rank(rank: int, world_size: int, report: Report, folder: str, timeout: float) -> list[tuple[str, float, bool]]:
    """An exchange over a good link, one while it is cut for longer than the timeout, one after a short cut."""
    ready, outcomes = Path(folder), []
    groups = [dist.new_group(timeout=bench_sync_timeout(timeout)) for _ in range(2)]
    for index, group in enumerate(groups):
        reducer = AllReduce(group, codec=_codec(), feedback="auto", algorithm="two_phase")
        reducer.reduce(torch.ones(200_000) * rank)
        before = reducer.state(0)
        dist.barrier()
        (ready / f"{index}-{rank}").touch()
        while not (ready / f"cut-{index}").exists():
            time.sleep(0.01)
        start = time.monotonic()
        try:
            reducer.reduce(torch.ones(200_000) * rank, round=1)
            outcome = "ok"
        except SyncError as error:
            outcome = type(error).__name__
        after = reducer.state(0)
        same = all(torch.equal(before[name], after[name]) for name in before)
        outcomes.append((outcome, time.monotonic() - start, same))
        (ready / f"done-{index}-{rank}").touch()
        while not (ready / f"restored-{index}").exists():
            time.sleep(0.01)
        dist.barrier()  # the default group has outlived the cut
    return outcomes
