"""`lowcomm bench-sync`: its table, its errors, and a limited link between two network namespaces."""

from __future__ import annotations

import json
import os
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lowcomm.compress import Int4
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
        (["Zip()"], "Zip is not a codec"),
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


TIMEOUT = 3.0


def _meet(folder: Path, name: str, rank: int) -> None:
    """Tell the test that this rank has come to a point, and wait until it says to go on."""
    (folder / f"{name}-{rank}").touch()
    while not (folder / name).exists():
        time.sleep(0.01)


def _cut_rank(rank: int, world_size: int, report: Report, folder: str) -> list[tuple[str, float, bool, torch.Tensor]]:
    """(error, seconds, state unchanged, result): over a good link, with a short cut, a long one, and rebuilt."""
    outcomes = []
    for name in ("short", "long", "after"):
        group = dist.new_group(timeout=timedelta(seconds=TIMEOUT))
        reducer = AllReduce(group, codec=Int4(), feedback="auto", algorithm="two_phase")
        reducer.reduce(torch.ones(200_000) * rank)
        before = reducer.state(0)
        _meet(Path(folder), f"{name} cut", rank)
        start, error, result = time.monotonic(), "", torch.empty(0)
        try:
            result = reducer.reduce(torch.linspace(-1, 1, 200_000) * (1 + rank), round=1).result[::1000].clone()
        except SyncError as failure:
            error = type(failure).__name__
        seconds, after = time.monotonic() - start, reducer.state(0)
        same = all(torch.equal(before[key], after[key]) for key in before)
        outcomes.append((error, seconds, same, result))
        _meet(Path(folder), f"{name} over", rank)
    dist.barrier()
    start = time.monotonic()
    AllReduce().reduce(torch.zeros(250_000))  # 1 MB each way
    outcomes.append(("", time.monotonic() - start, True, torch.empty(0)))
    return outcomes


def _cut_and_restore(link: Link, folder: Path) -> None:
    for name, seconds in (("short", 1.0), ("long", 2 * TIMEOUT), ("after", 0.0)):
        _both_at(folder, f"{name} cut")
        if seconds:
            link.set_down(0)
        (folder / f"{name} cut").touch()
        time.sleep(seconds)
        link.set_up(0)
        _both_at(folder, f"{name} over")
        (folder / f"{name} over").touch()


def _both_at(folder: Path, name: str) -> None:
    deadline = time.monotonic() + 60
    while not all((folder / f"{name}-{rank}").exists() for rank in range(2)) and time.monotonic() < deadline:
        time.sleep(0.01)


@needs_links
def test_a_limited_link_that_is_cut_and_restored(tmp_path: Path) -> None:
    before = set(os.listdir("/run/netns"))
    with Link("100mbit") as link:
        thread = threading.Thread(target=_cut_and_restore, args=(link, tmp_path), daemon=True)
        thread.start()
        outcomes = launch(_cut_rank, 2, str(tmp_path), prepare=link.enter)
        thread.join(60)
    assert set(os.listdir("/run/netns")) <= before
    for short, long, after, timed in outcomes:
        assert timed[1] > 0.9 * 8e6 / 100e6
        assert short[0] == "" and not short[2] and short[1] > 0.5  # waited for the cable, then went on
        assert long[0] in ("PeerTimeout", "PeerFailure") and long[2], long
        assert long[1] < 2 * TIMEOUT
        assert after[0] == "" and torch.equal(after[3], short[3])  # as if nothing had happened
    assert torch.equal(outcomes[0][0][3], outcomes[1][0][3])
