"""Local SGD and DiLoCo against worked examples in float64, with real processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lowcomm.optim import DiLoCo, HierarchicalLocalSGD, LocalSGD
from ranks import run_ranks
from torch.optim import SGD, AdamW
from toys import anchor_of, momentum_of, run_toy

TIGHT = {"rel": 1e-12, "abs": 1e-14}


class UnevenSteps:
    """One sync, after a number of steps that differs between workers."""

    def __init__(self, steps: int):
        self.steps = steps

    def next_sync(self, step: int, lr: float) -> int:
        return step + self.steps


def _local_sgd(rank: int, world_size: int) -> dict[str, Any]:
    def sgd(parameters: Any) -> SGD:
        return SGD(parameters, lr=0.1)

    return {
        "plain": run_toy(rank, lambda ps: LocalSGD(sgd(ps), sync_every=2), 6),
        "weights": run_toy(rank, lambda ps: LocalSGD(sgd(ps), sync_every=2, weights=[1, 3][rank]), 4),
        "callable": run_toy(rank, lambda ps: LocalSGD(sgd(ps), sync_every=2, weights=lambda: [5.0, 15.0][rank]), 4),
        "uneven": run_toy(rank, lambda ps: LocalSGD(sgd(ps), sync_every=UnevenSteps([1, 3][rank])), [1, 3][rank]),
        "post": run_toy(rank, lambda ps: LocalSGD(sgd(ps), sync_every=2, warmup_steps=2), 6),
        "phase": run_toy(rank, lambda ps: LocalSGD(sgd(ps), sync_every=2, phase=1), 3),
        "every": run_toy(rank, lambda ps: LocalSGD(sgd(ps), sync_every=1), 3),
        "delta": run_toy(rank, lambda ps: DiLoCo(sgd(ps), sync_every=2, outer_lr=1.0, outer_momentum=0.0), 6),
    }


def test_local_sgd_oracles() -> None:
    w0, w1 = run_ranks(_local_sgd, 2)
    locals_ = [[1.81, 0.92], [1.29565, 0.5136], [0.92274625, 0.21896]]
    means = [1.365, 0.904625, 0.570853125]
    for r, mean in enumerate(means):
        assert w0["plain"][2 * r + 1][0] == w1["plain"][2 * r + 1][0] == pytest.approx(mean, **TIGHT)
        assert w0["delta"][2 * r + 1][0] == w1["delta"][2 * r + 1][0] == pytest.approx(mean, **TIGHT)
    assert [w0["plain"][0][0], w1["plain"][0][0]] == pytest.approx([1.9, 1.4], **TIGHT)
    assert locals_  # the local values before each average follow from the ones above
    for name in ("weights", "callable"):
        assert [w0[name][t][0] for t in (1, 3)] == pytest.approx([1.1425, 0.55725625], **TIGHT)
        assert [w1[name][t] for t in (1, 3)] == [w0[name][t] for t in (1, 3)]
    assert w0["uneven"][-1] == w1["uneven"][-1] == pytest.approx([1.218], **TIGHT)
    post = [(1.65, 1.65), (1.3525, 1.3525), (1.31725, 0.882), (0.8955625, 0.8955625)]
    post += [(0.90600625, 0.51645), (0.5642828125, 0.5642828125)]
    for t, expected in enumerate(post):
        assert (w0["post"][t][0], w1["post"][t][0]) == pytest.approx(expected, **TIGHT)
    assert w0["phase"][0] == w1["phase"][0]
    assert w0["phase"][1] != w1["phase"][1]
    assert w0["phase"][2] == w1["phase"][2]
    # every step with plain SGD is large-batch SGD on the mean gradient (3p + 1) / 2
    p = 2.0
    for t in range(3):
        p -= 0.1 * (3 * p + 1) / 2
        assert w0["every"][t][0] == w1["every"][t][0] == pytest.approx(p, **TIGHT)


def _diloco(rank: int, world_size: int) -> dict[str, Any]:
    def both(optimizer: Any, parameters: Any) -> list[float]:
        return anchor_of(optimizer, parameters) + momentum_of(optimizer, parameters) + [parameters[0].item()]

    def sgd(parameters: Any, **options: Any) -> DiLoCo:
        return DiLoCo(SGD(parameters, lr=0.1), sync_every=2, **options)

    def adamw(parameters: Any) -> DiLoCo:
        inner = AdamW(parameters, lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
        return DiLoCo(inner, sync_every=2)

    return {
        "nesterov": run_toy(rank, sgd, 6, watch=both),
        "heavy": run_toy(rank, lambda ps: sgd(ps, nesterov=False), 6, watch=both),
        "weights": run_toy(rank, lambda ps: sgd(ps, weights=[1, 3][rank]), 4, watch=both),
        "adamw": run_toy(rank, adamw, 6),
    }


def test_diloco_oracles() -> None:
    w0, w1 = run_ranks(_diloco, 2)
    expected = {
        "nesterov": [
            (1.15545, 0.635),
            (0.2597491625, 0.97424875),
            (-0.500703134934375, 1.0332548946875),
        ],
        "heavy": [(1.5555, 0.635), (0.79651625, 1.0842625), (-0.099398503125, 1.27987821875)],
        "weights": [(0.859525, 0.8575), (-0.285558419375, 1.2671491875)],
    }
    for name, rounds in expected.items():
        for r, (anchor, momentum) in enumerate(rounds):
            row = w0[name][2 * r + 1]
            assert row[:2] == pytest.approx([anchor, momentum], **TIGHT), name
            assert row[2] == row[0]
            assert w1[name][2 * r + 1] == row
    adamw = [1.682811317333165, 1.2437173926516119, 0.7184993309428364]
    assert [w0["adamw"][t][0] for t in (1, 3, 5)] == pytest.approx(adamw, **TIGHT)
    assert [w1["adamw"][t] for t in (1, 3, 5)] == [w0["adamw"][t] for t in (1, 3, 5)]


def test_world_of_one_without_process_group_is_lookahead() -> None:
    def build(parameters: Any) -> DiLoCo:
        return DiLoCo(SGD(parameters, lr=0.1), sync_every=2, outer_lr=0.5, outer_momentum=0.0)

    record = run_toy(0, build, 6)
    assert [record[t][0] for t in (1, 3, 5)] == pytest.approx([1.905, 1.819025, 1.741217625], **TIGHT)


def test_outer_step_is_torch_sgd() -> None:
    from lowcomm.compress import available_levels, use_kernel_level
    from lowcomm.optim.outer import outer_step_

    torch.manual_seed(0)
    for nesterov in (True, False):
        start, deltas = torch.randn(1001), [torch.randn(1001) for _ in range(5)]
        theirs = torch.nn.Parameter(start.clone())
        reference = SGD([theirs], lr=0.7, momentum=0.9, nesterov=nesterov)
        results = []
        for level in available_levels():
            anchor, momentum = start.clone(), torch.zeros(1001)
            with use_kernel_level(level):
                for delta in deltas:
                    outer_step_(anchor, momentum, delta.clone(), lr=0.7, momentum_decay=0.9, nesterov=nesterov)
            results.append(anchor)
        for delta in deltas:
            theirs.grad = delta.clone()
            reference.step()
        assert all(torch.equal(result, results[0]) for result in results)
        torch.testing.assert_close(results[0], theirs.detach(), rtol=1e-6, atol=1e-6)


def _hierarchy(rank: int, world_size: int) -> Any:
    build = {
        "sizes": lambda ps: HierarchicalLocalSGD(SGD(ps, lr=0.1), sync_every={2: 2, 4: 4}),
        "world": lambda ps: HierarchicalLocalSGD(SGD(ps, lr=0.1), sync_every={2: 2, 4: None}),
    }
    records = {name: run_toy(rank, make, 4, "R") for name, make in build.items()}
    errors = []
    for periods in ({2: 2, 3: 4}, {2: 3, 4: 4}, {2: 2, 4: 2}):
        try:
            HierarchicalLocalSGD(SGD([torch.nn.Parameter(torch.zeros(1))]), sync_every=periods)
        except ValueError as error:
            errors.append(str(error))
    return records, errors


def test_hierarchical_local_sgd_oracle() -> None:
    outcomes = run_ranks(_hierarchy, 4)
    rows = [
        (1.9, 1.4, 2.1, 1.6),
        (1.365, 1.365, 1.735, 1.735),
        (1.3285, 0.892, 1.8615, 1.388),
        (1.22375, 1.22375, 1.22375, 1.22375),
    ]
    for name in ("sizes", "world"):
        for t, row in enumerate(rows):
            assert [records[name][t][0] for records, _ in outcomes] == pytest.approx(row, **TIGHT)
    assert all(len(errors) == 3 for _, errors in outcomes)
