"""Receipts: bytes by phase against what is handed to the group, statistics over ranks, callbacks."""

from __future__ import annotations

import copy
import csv
import io
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lowcomm.compress import CountSketch, Int4, Sign, TopK
from lowcomm.optim import DiLoCo
from lowcomm.sync import (
    AllReduce,
    IslandAllReduce,
    Median,
    NormMedianClip,
    Receipt,
    SharedTopK,
    to_csv,
    to_tensorboard,
    to_wandb,
)
from lowcomm.sync.peers import _PHASES, _TAG, Peers
from ranks import run_ranks

N = 1003


class _Meter:
    """A process group that counts the bytes handed to it, by the kind of message in the tag."""

    def __init__(self, group: Any) -> None:
        self._group, self.rank, self.size, self.name = group, group.rank, group.size, group.name
        self.sent: dict[str, int] = {}
        self.received: dict[str, int] = {}

    def _add(self, counts: dict[str, int], phase: str, num_bytes: int) -> None:
        counts[phase] = counts.get(phase, 0) + num_bytes

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> Any:
        self._add(self.sent, _PHASES[tag - _TAG], tensors[0].nbytes)
        return self._group.send(tensors, to, tag)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Any:
        self._add(self.received, _PHASES[tag - _TAG], tensors[0].nbytes)
        return self._group.recv(tensors, source, tag)

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> Any:
        for counts in (self.sent, self.received):
            self._add(counts, "sum", 2 * (self.size() - 1) * tensors[0].nbytes // self.size())
        return self._group.allreduce(tensors, options)


def _cases() -> dict[str, dict[str, Any]]:
    topk = TopK(density=1 / 16, chunk=64)
    cases: dict[str, dict[str, Any]] = {
        "dense": {},
        "mean_contributors": {"reduce": "mean_contributors"},
        "linear": {"codec": CountSketch(rows=3, density=1 / 4)},
        "union": {"codec": topk, "feedback": "auto", "algorithm": "union"},
        "ring": {"codec": Int4(), "algorithm": "ring"},
        "all_gather": {"codec": topk, "feedback": "auto", "algorithm": "all_gather"},
        "two_phase": {"codec": Sign(), "feedback": "auto", "algorithm": "two_phase"},
        "median": {"reduce": Median()},
        "norms": {"codec": Int4(), "algorithm": "two_phase", "reduce": NormMedianClip()},
        "statistics": {"codec": Int4(), "algorithm": "two_phase", "statistics": True},
    }
    for support in ("leader", "history", "energy"):
        cases[support] = {"codec": SharedTopK(density=1 / 16, support=support), "feedback": "auto"}
    return cases


def _phases_rank(rank: int, world_size: int) -> dict[str, Receipt]:
    receipts = {}
    for name, options in _cases().items():
        reducer, meter = AllReduce(**options), _Meter(dist.group.WORLD)
        reducer._peers = Peers(meter)
        x = torch.randn(N, generator=torch.Generator().manual_seed(rank))
        receipt = reducer.reduce(x).wait()
        assert receipt.sent == meter.sent, (name, receipt.sent, meter.sent)
        assert receipt.received == meter.received, (name, receipt.received, meter.received)
        assert receipt.bytes_sent == sum(meter.sent.values()) and receipt.bytes_received == sum(meter.received.values())
        if name != "union":  # its plan is an upper bound
            bound = reducer.plan(N).bytes_sent
            scalars = receipt.sent.get("scalars", 0) * (name == "norms") + (name == "norms") * (world_size - 1)
            if name != "leader" or rank == 0:
                assert receipt.bytes_sent == bound + scalars, (name, receipt, bound)
        receipts[name] = receipt
    return receipts


@pytest.mark.parametrize("world_size", [2, 3, 4, 5])
def test_bytes_by_phase_are_those_handed_to_the_group(world_size: int) -> None:
    for rank, receipts in enumerate(run_ranks(_phases_rank, world_size)):
        others = world_size - 1
        assert set(receipts["dense"].sent) == {"agreement", "sum"}
        assert set(receipts["two_phase"].sent) == {"agreement", "first", "second"}
        assert set(receipts["all_gather"].sent) == {"agreement", "first"}
        assert set(receipts["history"].sent) == {"agreement", "sum"}  # no index crosses the network
        assert (receipts["leader"].sent.get("first", 0) > 0) == (rank == 0)
        assert receipts["statistics"].sent["scalars"] == 24 * others
        assert receipts["norms"].sent["scalars"] == 8 * world_size * others
        for receipt in receipts.values():
            assert receipt.header_bytes == receipt.sent["agreement"] + receipt.sent.get("scalars", 0)


def _statistics_rank(rank: int, world_size: int) -> list[Receipt]:
    vectors = torch.tensor([[3.0, 0.0], [0.0, 4.0], [5.0, 12.0]])
    receipts = []
    for options in ({}, {"codec": Int4(), "algorithm": "all_gather"}, {"reduce": Median()}):
        reducer = AllReduce(statistics=True, **options)
        receipts.append(reducer.reduce(vectors[rank].clone(), loss=float(rank)).wait())
        receipts.append(reducer.reduce(vectors[rank].clone(), weight=float(rank != 1), round=1).wait())
        receipts.append(reducer.start(vectors[rank].clone(), loss=None if rank else math.inf, round=2).wait())
    return receipts


def test_dispersion_over_ranks() -> None:
    outcomes = run_ranks(_statistics_rank, 3)
    norms = [3.0, 4.0, 13.0]
    for rank, receipts in enumerate(outcomes):
        for first in (0, 3, 6):
            assert receipts[first].norm == pytest.approx(norms[rank])
            assert receipts[first].norm_dispersion == pytest.approx(math.sqrt(182 / 9) / (20 / 3), rel=1e-9)
            assert receipts[first].loss_dispersion == pytest.approx(math.sqrt(2 / 3))
            assert receipts[first + 1].norm_dispersion == pytest.approx(5 / 8)
            assert receipts[first + 1].loss_dispersion is None
            assert receipts[first + 2].loss_dispersion is None  # infinite
        # cosines 0, 5/13, 12/13 weighted by 12, 39, 52
        expected = (0 * 12 + 5 / 13 * 39 + 12 / 13 * 52) / (12 + 39 + 52)
        assert receipts[0].direction_consistency == pytest.approx(expected, rel=1e-6)
        assert receipts[3].direction_consistency == pytest.approx(expected, rel=0.05)
        assert receipts[1].direction_consistency == pytest.approx(5 / 13, rel=1e-6)
        assert receipts[6].direction_consistency is None
        mean = torch.tensor([8 / 3, 16 / 3])
        own = torch.tensor([[3.0, 0.0], [0.0, 4.0], [5.0, 12.0]][rank])
        assert receipts[0].cosine == pytest.approx(float(torch.cosine_similarity(own, mean, dim=0)), rel=1e-6)


class _Board:
    def __init__(self) -> None:
        self.rows: list[tuple[str, float, int]] = []
        self.logged: list[dict[str, float]] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.rows.append((name, value, step))

    def log(self, numbers: dict[str, float]) -> None:
        self.logged.append(numbers)


def test_callbacks_for_boards_and_files() -> None:
    board, file = _Board(), io.StringIO()
    reports = [to_tensorboard(board), to_wandb(board, "x/"), to_csv(file)]
    reducer = AllReduce(statistics=True, on_receipt=lambda receipt: [report(receipt) for report in reports])
    for t in range(3):
        work = reducer.start(torch.ones(4) * t, round=t)
        work.wait(), work.wait()
    assert [value for name, value, step in board.rows if name == "sync/norm"] == [0.0, 2.0, 4.0]
    assert [step for name, _, step in board.rows if name == "sync/norm"] == [0, 1, 2]
    assert [numbers["x/round"] for numbers in board.logged] == [0.0, 1.0, 2.0]
    rows = list(csv.DictReader(io.StringIO(file.getvalue())))
    assert [float(row["norm"]) for row in rows] == [0.0, 2.0, 4.0]
    with pytest.raises(ValueError, match="leave it off"):
        IslandAllReduce(None, None, statistics=True)


def test_combined_receipts_add_their_phases() -> None:
    parts = [Receipt(1, i, "two_phase", 5, 2, sent={"first": 3}, received={"first": i}) for i in range(2)]
    whole = Receipt.combined(parts)
    assert whole.sent == {"first": 6} and whole.received == {"first": 1} and whole.elements == 10


def test_optimizers_report_their_syncs() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = DiLoCo(torch.optim.SGD([parameter], lr=0.1), sync_every=2, statistics=True)
    seen: list[Receipt] = []
    handle = optimizer.register_sync_hook(seen.append)

    def closure() -> float:
        parameter.grad = torch.ones(3)
        return 7.0

    for _ in range(4):
        optimizer.step(closure)
    assert len(seen) == 2 and seen[1] is optimizer.last_sync
    assert seen[0].norm == pytest.approx(0.2 * math.sqrt(3)) and seen[0].loss_dispersion == 0.0
    twin = copy.deepcopy(optimizer)
    handle.remove()
    for _ in range(2):
        optimizer.step(closure), twin.step(closure)
    assert len(seen) == 2 and twin.last_sync.norm is not None


def _auto_rank(rank: int, world_size: int) -> dict[str, Any]:
    """Small vectors are gathered, large ones go in two phases; feedback works in both, side by side."""
    reducer = AllReduce(codec=Int4(), feedback="auto", bandwidth=1e6)
    names = [reducer.plan(n).algorithm for n in (100, 100_000)]
    receipts = [reducer.reduce(torch.ones(n), bucket=n).wait() for n in (100, 100_000, 100)]
    states = {n: sorted(reducer.state(n)) for n in (100, 100_000)}
    fast = AllReduce(codec=Int4(), latency=0.0).plan(1000).algorithm
    return {
        "names": names,
        "ran": [r.algorithm for r in receipts],
        "states": states,
        "fast": fast,
        "promised": sorted(reducer.state_names()),
    }


def test_auto_weighs_latency_against_bytes() -> None:
    for outcome in run_ranks(_auto_rank, 3):
        assert outcome["names"] == ["all_gather", "two_phase"]
        assert outcome["ran"] == ["all_gather", "two_phase", "all_gather"]
        assert outcome["states"] == {100: ["residual"], 100_000: ["owner_residual", "residual"]}
        assert outcome["fast"] == "two_phase" and outcome["promised"] == ["owner_residual", "residual"]
