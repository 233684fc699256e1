"""SlowMo, sign momentum and CO2 against worked examples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lowcomm.optim import CO2, DiLoCo, EagerDiLoCo, SignMomentum, SlowMo
from lowcomm.optim.sign_momentum import SignStep
from ranks import run_ranks
from torch.optim import SGD
from toys import anchor_of, run_toy

TIGHT = {"rel": 1e-12, "abs": 1e-14}


def _watch(name: str) -> Any:
    def watch(optimizer: Any, parameters: Any) -> list[float]:
        return anchor_of(optimizer, parameters) + [float(optimizer.state[p][name]) for p in parameters]

    return watch


def _runs(rank: int, world_size: int) -> dict[str, Any]:
    def sgd(parameters: Any) -> SGD:
        return SGD(parameters, lr=0.1)

    def co2(parameters: Any, **options: Any) -> CO2:
        return CO2(sgd(parameters), sync_every=2, alpha=1.0, beta=0.5, **options)

    slow, sign, late = (_watch(n) for n in ("slow_momentum_buffer", "sign_momentum_buffer", "outer_momentum_buffer"))
    heavy: dict[str, Any] = {"outer_lr": 1.0, "outer_momentum": 0.5, "nesterov": False}
    return {
        "slowmo": run_toy(rank, lambda ps: SlowMo(sgd(ps), sync_every=2, beta=0.5), 6, watch=slow),
        "heavy": run_toy(rank, lambda ps: DiLoCo(sgd(ps), sync_every=2, **heavy), 6, watch=late),
        "dsm": run_toy(rank, lambda ps: SignMomentum(sgd(ps), sync_every=2), 8, "PQ", watch=sign),
        "co2": run_toy(rank, lambda ps: co2(ps, gap_penalty=False, clip=None), 8, watch=late),
        "delayed": run_toy(
            rank, lambda ps: EagerDiLoCo(sgd(ps), sync_every=2, delayed=True, **heavy), 8, watch=anchor_of
        ),
        "clipped": run_toy(rank, lambda ps: co2(ps, gap_penalty=False, clip=5.0), 8, watch=late),
        "gap": run_toy(rank, lambda ps: co2(ps, clip=None), 8, watch=late),
    }


def test_outer_rule_oracles() -> None:
    w0, w1 = run_ranks(_runs, 2)
    for name, record in w0.items():
        assert w1[name][1::2] == record[1::2], name
    rows: dict[str, list[tuple[float, ...]]] = {
        "slowmo": [(1.365, 6.35), (0.587125, 7.77875), (-0.048271875, 6.35396875)],
        "dsm": [
            (1.88, -0.1, 0.127, 0.021),
            (1.7612, -0.199, 0.24486, 0.03608),
            (1.643588, -0.29701, 0.3538288, 0.0454134),
            (1.52715212, -0.3940399, 0.454149564, 0.049169582),
        ],
        "co2": [(2.0, 0.0), (1.365, 6.35), (0.4125, 9.525), (-0.524125, 9.36625)],
        "clipped": [(2.0, 0.0), (1.5, 6.35), (1.0, 9.525), (0.5, 9.7375)],
    }
    for name, expected in rows.items():
        for r, row in enumerate(expected):
            assert w0[name][2 * r + 1] == pytest.approx(row, **TIGHT), name
    gap = [(2.0, 0.0), (1.365, 6.35), (0.73, 6.35), (0.219009057971014, 5.109909420289855)]
    for r, row in enumerate(gap):
        assert w0["gap"][2 * r + 1] == pytest.approx(row, rel=1e-11)
    for t in (1, 3, 5):
        assert w0["slowmo"][t][0] == pytest.approx(w0["heavy"][t][0], **TIGHT)
    for t in (1, 3, 5, 7):
        assert w0["co2"][t][0] == pytest.approx(w0["delayed"][t][0], **TIGHT)


def test_sign_momentum_with_one_worker_and_one_step_is_lion() -> None:
    start = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    p = torch.nn.Parameter(start.clone())
    optimizer = SignMomentum(SGD([p], lr=0.01), sync_every=1, betas=(0.9, 0.99), weight_decay=0.1)
    x, m = start.clone(), torch.zeros(3, dtype=torch.float64)
    for k in range(5):
        gradient = torch.tensor([1.0, -1.0, 0.3 - 0.2 * k], dtype=torch.float64)
        p.grad = gradient.clone()
        optimizer.step()
        update = (0.9 * m + 0.1 * gradient).sign()
        x = x * (1 - 0.01 * 0.1) - 0.01 * update
        m = 0.99 * m + 0.01 * gradient
    torch.testing.assert_close(p.detach(), x, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("sign", "chances"), [("two-point", (0.8, 0.4)), ("ternary", (0.6, 0.2))])
def test_random_sign_has_expectation_u_over_bound(sign: str, chances: tuple[float, float]) -> None:
    rule = SignStep(sign, 0.5, seed=3)
    rule.round = 1
    n = 20000
    signs = rule._signs(torch.tensor([0.3, -0.1]).repeat(n, 1).reshape(-1)).view(n, 2)
    happened = signs > 0 if sign == "two-point" else signs != 0
    assert happened.double().mean(0).tolist() == pytest.approx(chances, abs=0.015)
    assert signs.double().mean(0).tolist() == pytest.approx((0.6, -0.2), abs=0.03)


def test_slowmo_resets_base_buffers() -> None:
    p = torch.nn.Parameter(torch.ones(2))
    optimizer = SlowMo(SGD([p], lr=0.1, momentum=0.9), sync_every=2, beta=0.5, buffers="reset")
    for _ in range(2):
        p.grad = torch.ones(2)
        optimizer.step()
    assert optimizer.state[p]["inner"]["momentum_buffer"].abs().sum() == 0


def test_a_rule_that_divides_by_the_learning_rate_says_so_at_zero() -> None:
    p = torch.nn.Parameter(torch.ones(2))
    optimizer = SlowMo(SGD([p], lr=0.0), sync_every=1)
    p.grad = torch.ones(2)
    with pytest.raises(RuntimeError, match="must be > 0 at a sync"):
        optimizer.step()
