"""Streaming DiLoCo against worked examples, equivalences and recorded trajectories."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lowcomm.compress import TopK
from lowcomm.optim import DiLoCo, StreamingDiLoCo
from ranks import run_ranks
from torch.optim import SGD
from toys import anchor_of, momentum_of, run_toy

TIGHT = {"rel": 1e-12, "abs": 1e-14}
NAMES = "pq"


def _named(parameters: list[torch.nn.Parameter], lr: float = 0.1) -> SGD:
    return SGD(list(zip(NAMES, parameters, strict=False)), lr=lr)


def _everything(optimizer: Any, parameters: Any) -> list[float]:
    values = [p.item() for p in parameters]
    return values + anchor_of(optimizer, parameters) + momentum_of(optimizer, parameters)


def _streams(rank: int, world_size: int) -> dict[str, Any]:
    def build(parameters: Any, **options: Any) -> StreamingDiLoCo:
        options = {"outer_lr": 0.7, "sync_every": 4, **options}
        return StreamingDiLoCo(_named(parameters), fragments=[["p"], ["q"]], **options)

    def one(parameters: Any) -> StreamingDiLoCo:
        options: Any = {"outer_lr": 0.7, "delay": 0, "sync_every": 2}
        return StreamingDiLoCo(_named(parameters), fragments=[["p", "q"]], **options)

    delay = 1 if rank == 0 else 2
    return {
        "delayed": run_toy(rank, build, 9, "PQ", _everything),
        "blocking": run_toy(rank, lambda ps: build(ps, delay=0), 8, "PQ", _everything),
        "full": run_toy(rank, lambda ps: build(ps, first_send="full"), 11, "PQ", _everything),
        "full blocking": run_toy(rank, lambda ps: build(ps, first_send="full", delay=0), 10, "PQ", _everything),
        "one fragment": run_toy(rank, one, 6, "PQ", _everything),
        "diloco": run_toy(rank, lambda ps: DiLoCo(_named(ps), sync_every=2), 6, "PQ", _everything),
        "uneven delays": run_toy(rank, lambda ps: build(ps, delay=delay), 12, "PQ", _everything),
    }


def test_streaming_oracles() -> None:
    w0, w1 = run_ranks(_streams, 2)
    live = {
        1: ((1.9, 0.2), (1.4, -0.3)),
        2: ((1.81, 0.36), (0.92, -0.57)),
        3: ((1.729, 0.174175), (0.536, -0.476325)),
        5: ((1.09197425, 0.471472), (0.28824925, -0.95582325)),
        7: ((1.0744991425, 0.1302772344375), (-0.17552048, -0.8727022218125)),
        9: ((0.374041495925625, 0.44337743004), (-0.392297210386875, -1.276888799668125)),
    }
    for t, (first, second) in live.items():
        assert w0["delayed"][t - 1][:2] == pytest.approx(first, **TIGHT)
        assert w1["delayed"][t - 1][:2] == pytest.approx(second, **TIGHT)
    for t, (anchor_p, anchor_q) in {5: (0.5934585, -0.13965), 9: (-0.31226131357375, -0.401187611125)}.items():
        assert w0["delayed"][t - 1][2:4] == pytest.approx([anchor_p, anchor_q], **TIGHT)
        assert w1["delayed"][t - 1][2:] == w0["delayed"][t - 1][2:]
    assert w0["delayed"][8][4:] == pytest.approx([1.181937077875, 0.2463816625], **TIGHT)
    blocking = {(2, 3): -0.13965, (4, 2): 0.5934585, (6, 3): -0.405883628325, (8, 2): -0.53881625390575}
    for (t, column), value in blocking.items():
        assert w0["blocking"][t - 1][column] == w1["blocking"][t - 1][column] == pytest.approx(value, **TIGHT)


def test_first_send_full() -> None:
    w0, w1 = run_ranks(_streams, 2)
    rows = {
        6: (0.737856, -1.405677),
        7: (0.1730919175, -1.0046051325),
        10: (0.57662306176, -1.5453571415925),
        11: (-0.01284182436530625, -1.1889017627859313),
    }
    for t, (q0, q1) in rows.items():
        assert (w0["full"][t - 1][1], w1["full"][t - 1][1]) == pytest.approx((q0, q1), **TIGHT)
    assert w0["full"][10][3] == pytest.approx(-0.6869820981386126, **TIGHT)
    blocking = {(4, 2): 0.5934585, (6, 3): -0.444100965, (8, 2): -0.53881625390575, (10, 3): -0.6509685699863325}
    for (t, column), value in blocking.items():
        assert w0["full blocking"][t - 1][column] == pytest.approx(value, **TIGHT)
    assert w0["one fragment"] == w0["diloco"]
    # unequal delays: anchors and momenta agree whenever everybody has applied
    for t in (4, 8, 12):
        assert w0["uneven delays"][t - 1][3] == w1["uneven delays"][t - 1][3]


FIXTURE = json.loads((Path(__file__).parent / "fixtures" / "mock_two_fragment.json").read_text())


def _recorded(rank: int, world_size: int, cases: list[Any]) -> list[Any]:
    results = []
    for case in cases:
        parameters = [torch.nn.Parameter(torch.tensor([1.0], dtype=torch.float64)) for _ in NAMES]
        optimizer = StreamingDiLoCo(
            _named(parameters, lr=1.0),
            sync_every=6,
            fragments=[["p"], ["q"]],
            offsets=[3 - case["delay"], (6 - case["delay"]) % 6],
            delay=case["delay"],
            alpha=case["alpha"],
            outer_lr=2.0,
            outer_momentum=0.0,
        )
        record = [[1.0, 1.0, 1.0, 1.0]]
        for _ in range(15):
            for p in parameters:
                p.grad = torch.full_like(p, 2.0)
            optimizer.step()
            anchors = [optimizer.state[p]["anchor"].item() for p in parameters]
            record.append([p.item() for p in parameters] + anchors)
        results.append(record)
    return results


def test_recorded_trajectories_of_two_fragments() -> None:
    """The recording applies fragment 0 at steps 3, 9, 15 and fragment 1 at 6, 12, and sends `delay` steps before."""
    cases = FIXTURE["cases"]
    for records in run_ranks(_recorded, 2, cases):
        for case, record in zip(cases, records, strict=True):
            assert [row[0] for row in record] == case["local_w0"]
            assert [row[1] for row in record] == case["local_w1"]
            for step, anchors in case["global_after_step"].items():
                assert record[int(step)][2:] == anchors


def test_a_residual_follows_its_parameters_to_other_fragments() -> None:
    """Saved with two fragments, loaded into four: what was not sent yet stays with the parameter it belongs to."""

    def build(parts: int) -> tuple[torch.nn.Module, StreamingDiLoCo]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(6, 6) for _ in range(4)))
        options: Any = {"fragments": "bytes", "num_fragments": parts, "delay": 0}
        inner = SGD(model.named_parameters(), lr=0.1)
        return model, StreamingDiLoCo(inner, sync_every=4, compress=TopK(density=0.25, chunk=16), **options)

    (model, optimizer), (other, resumed) = build(2), build(4)
    for step in range(9):
        torch.manual_seed(step)
        model(torch.randn(4, 6)).square().sum().backward()
        optimizer.step()
    saved = optimizer.state_dict()
    residuals = [entry["residual"] for entry in saved["state"].values()]
    assert all(bool(residual.any()) for residual in residuals)
    resumed.load_state_dict(saved)
    again = resumed.state_dict()["state"]
    assert all(torch.equal(entry["residual"], kept) for entry, kept in zip(again.values(), residuals, strict=True))
    other(torch.ones(1, 6)).sum().backward()
    for _ in range(4):
        resumed.step()
