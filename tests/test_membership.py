"""Workers that miss exchanges, come back, leave or join, and workers that run out of data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lowcomm.optim import DiLoCo, LocalSGD, StreamingDiLoCo
from ranks import run_ranks
from torch.optim import SGD
from toys import P, anchor_of, momentum_of, scalar

TIGHT = {"rel": 1e-12, "abs": 1e-14}


def _steps(optimizer: Any, p: Any, rank: int, count: int) -> None:
    for _ in range(count):
        p.grad = P[rank](p.detach())
        optimizer.step()


def _dropped(rank: int, world_size: int, rejoin: str) -> Any:
    """Worker 1 misses round 2 and is back in round 3."""
    alone = [dist.new_group([r]) for r in range(2)]
    p = scalar(2.0)
    optimizer = DiLoCo(SGD([p], lr=0.1), sync_every=2)
    rows = []
    _steps(optimizer, p, rank, 2)
    rows.append(anchor_of(optimizer, [p]) + momentum_of(optimizer, [p]))
    if rank == 0:
        optimizer.set_process_group(alone[0])
        _steps(optimizer, p, rank, 2)
        rows.append(anchor_of(optimizer, [p]) + momentum_of(optimizer, [p]))
    else:
        # cut off: trains on from its own parameters, its anchor stays
        for _ in range(2):
            p.data -= 0.1 * P[1](p.detach())
        rows.append([p.item()])
    optimizer.set_process_group(dist.group.WORLD, rejoin=rejoin)
    if rejoin == "discard":
        rows.append([p.item()])
    _steps(optimizer, p, rank, 2)
    rows.append(anchor_of(optimizer, [p]) + momentum_of(optimizer, [p]) + [p.item()])
    return rows


def test_dropped_exchange_contributes_when_it_is_back() -> None:
    w0, w1 = run_ranks(_dropped, 2, "contribute")
    assert w0[0] == w1[0] == pytest.approx([1.15545, 0.635], **TIGHT)
    assert w0[1] == pytest.approx([0.756122785, 0.6010355], **TIGHT)
    assert w1[1] == pytest.approx([0.379488], **TIGHT)
    expected = [-0.40011461458475, 1.154052454575, -0.40011461458475]
    assert w0[2] == w1[2] == pytest.approx(expected, **TIGHT)


def test_dropped_exchange_can_be_discarded() -> None:
    w0, w1 = run_ranks(_dropped, 2, "discard")
    assert w1[2] == w0[2] == pytest.approx([0.756122785], **TIGHT)
    assert w0[3] == w1[3]


RECOVERY = json.loads((Path(__file__).parent / "fixtures" / "mock_failure_recovery.json").read_text())


def _recovery(rank: int, world_size: int) -> Any:
    """Replica 1 dies after step 6, restarts, makes 3 steps alone, and joins at replica 0's step 9, before that sync."""
    alone = [dist.new_group([r]) for r in range(2)]

    def build(group: Any) -> Any:
        ps = [torch.nn.Parameter(torch.tensor([1.0], dtype=torch.float64)) for _ in "pq"]
        inner = SGD(list(zip("pq", ps, strict=True)), lr=1.0)
        options: Any = {"fragments": [["p"], ["q"]], "offsets": [3, 0], "delay": 0, "alpha": 0.0}
        return ps, StreamingDiLoCo(
            inner, sync_every=6, outer_lr=2.0, outer_momentum=0.0, process_group=group, **options
        )

    def run(ps: Any, optimizer: Any, count: int) -> None:
        for _ in range(count):
            for p in ps:
                p.grad = torch.full_like(p, 2.0)
            optimizer.step()
            record.append([p.item() for p in ps])

    record: list[list[float]] = []
    ps, optimizer = build(dist.group.WORLD)
    run(ps, optimizer, 6)
    if rank == 1:
        record.clear()
        ps, optimizer = build(alone[1])
        record.append([1.0, 1.0])
        run(ps, optimizer, 2)
    else:
        optimizer.set_process_group(alone[0])
        run(ps, optimizer, 2)
    optimizer.set_process_group(dist.group.WORLD, rejoin="discard")
    if rank == 1:  # healed: its parameters are those of replica 0
        for p in ps:
            p.data.copy_(torch.empty_like(p))
    for p in ps:
        dist.broadcast(p.data, 0)
    run(ps, optimizer, 13)
    return record


def test_recorded_recovery_of_a_replica() -> None:
    w0, w1 = run_ranks(_recovery, 2)
    assert [row[0] for row in w0] == RECOVERY["replica0_w0"][1:]
    assert [row[1] for row in w0] == RECOVERY["replica0_w1"][1:]
    assert [row[0] for row in w1] == RECOVERY["replica1_after_restart_w0"]
    assert [row[1] for row in w1] == RECOVERY["replica1_after_restart_w1"]


def _uneven(rank: int, world_size: int) -> Any:
    """Worker r has 3 + 4 r batches; sync every 2 steps."""
    results: dict[str, Any] = {}
    for name, build in {
        "local": lambda ps: LocalSGD(SGD(ps, lr=0.1), sync_every=2),
        "diloco": lambda ps: DiLoCo(SGD(ps, lr=0.1), sync_every=2),
        "streaming": lambda ps: StreamingDiLoCo(
            SGD([("p", ps[0])], lr=0.1), sync_every=3, delay=1, fragments=[["p"]], alpha=0.0
        ),
    }.items():
        p = scalar(2.0)
        optimizer = build([p])
        _steps(optimizer, p, rank % 2, 3 + 4 * rank)
        optimizer.flush()
        first, syncs = p.item(), optimizer.num_syncs
        optimizer.flush()
        assert optimizer.num_syncs == syncs  # nothing was sent
        results[name] = (first, p.item(), optimizer.last_sync.failure)
    return results


def test_uneven_batches_end_in_agreement() -> None:
    for world_size in (2, 3):
        outcomes = run_ranks(_uneven, world_size, group_timeout=20)
        for name in outcomes[0]:
            values = {outcome[name][0] for outcome in outcomes}
            assert len(values) == 1, name
            assert all(outcome[name][0] == outcome[name][1] for outcome in outcomes), name
