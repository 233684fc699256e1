"""Delayed and eager outer updates against worked examples."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from lowcomm.optim import DiLoCo, EagerDiLoCo
from ranks import run_ranks
from torch.optim import SGD
from toys import anchor_of, momentum_of, run_toy

TIGHT = {"rel": 1e-12, "abs": 1e-14}


def _watch(optimizer: Any, parameters: Any) -> list[float]:
    return anchor_of(optimizer, parameters) + momentum_of(optimizer, parameters) + [parameters[0].item()]


def _runs(rank: int, world_size: int) -> dict[str, Any]:
    def build(parameters: Any, **options: Any) -> EagerDiLoCo:
        return EagerDiLoCo(SGD(parameters, lr=0.1), sync_every=2, **options)

    def flushed(optimizer: Any, parameters: Any) -> Any:
        twin_parameters, twin = copy.deepcopy((parameters, optimizer))
        twin.flush()
        once = _watch(twin, twin_parameters)
        twin.flush()
        return once, _watch(twin, twin_parameters), twin_parameters[0].item()

    plain: dict[str, Any] = {"outer_lr": 1.0, "outer_momentum": 0.0}
    return {
        "delayed": run_toy(rank, lambda ps: build(ps, delayed=True), 8, watch=_watch),
        "eager": run_toy(rank, build, 6, watch=_watch),
        "plain": run_toy(rank, lambda ps: build(ps, **plain), 8, watch=_watch),
        "weighted": run_toy(rank, lambda ps: build(ps, weights=[2.0, 2.0][rank]), 6, watch=_watch),
        "resync": run_toy(rank, lambda ps: build(ps, resync_every=2), 8, watch=_watch),
        "flushed": run_toy(rank, build, 5, watch=flushed),
        "flushed plain": run_toy(rank, lambda ps: build(ps, **plain), 6, watch=flushed),
        "two rounds late": run_toy(rank, lambda ps: build(ps, delay=2, delayed=True), 10, watch=_watch),
    }


def test_delayed_and_eager_oracles() -> None:
    w0, w1 = run_ranks(_runs, 2)
    delayed = {2: (2.0, 0.0), 4: (1.15545, 0.635), 6: (-0.049145, 1.2065), 8: (-1.2688863375, 1.48859875)}
    for t, row in delayed.items():
        assert w0["delayed"][t - 1][:2] == pytest.approx(row, **TIGHT)
        assert w1["delayed"][t - 1] == w0["delayed"][t - 1]
    eager = [
        ((0.095, 1.87365), (0.54, 1.2818)),
        ((0.70849675, 0.9911993225), (0.991724, 0.30300708)),
        ((1.0475350106375, 0.044330710852125), (1.2100896244, -0.681626000452)),
    ]
    for r, rows in enumerate(eager):
        for worker, (momentum, anchor) in zip((w0, w1), rows, strict=True):
            got = worker["eager"][2 * r + 1]
            assert got == pytest.approx([anchor, momentum, anchor], **TIGHT)
            assert worker["weighted"][2 * r + 1] == pytest.approx(got, **TIGHT)
    gaps = [0.445, 0.356825, 0.319488625, 0.286318045625]
    firsts = [1.905, 1.279025, 0.809717625, 0.481798450625]
    for r, (gap, first) in enumerate(zip(gaps, firsts, strict=True)):
        x0, x1 = w0["plain"][2 * r + 1][0], w1["plain"][2 * r + 1][0]
        assert (x0 - x1, x0) == pytest.approx((gap, first), **TIGHT)


def test_eager_flush_and_resync_make_workers_agree() -> None:
    w0, w1 = run_ranks(_runs, 2)
    for t in range(5):
        once, twice, live = w0["flushed"][t]
        assert once == twice
        assert live == once[0]
        assert w1["flushed"][t] == w0["flushed"][t]
    # plain SGD outside: after a flush everything that was sent has been applied, as blocking DiLoCo would have
    assert w0["resync"][3] == w1["resync"][3]
    assert w0["resync"][7] == w1["resync"][7]
    assert w0["resync"][5][0] != w1["resync"][5][0]
    late = [w0["two rounds late"][t - 1][0] for t in (2, 4, 6)]
    assert late[:2] == [2.0, 2.0]
    assert late[2] == pytest.approx(1.15545, **TIGHT)


def test_one_worker_eager_is_diloco() -> None:
    def run(cls: Any) -> Any:
        return run_toy(0, lambda ps: cls(SGD(ps, lr=0.1), sync_every=2), 8, watch=_watch)

    for eager, blocking in zip(run(EagerDiLoCo), run(DiLoCo), strict=True):
        assert eager == pytest.approx(blocking, **TIGHT)
