"""DES-LOC, MT-DAO and the synchronisation rules against worked examples."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from lowcomm.optim import ADOPT, DESLOC, MTDAO, QSR, AtSteps, LocalSGD, QuasiHyperbolic
from ranks import run_ranks
from torch.optim import Adam
from toys import run_toy

TIGHT = {"rel": 1e-12, "abs": 1e-14}


def _state(*names: str) -> Any:
    def watch(optimizer: Any, parameters: Any) -> list[float]:
        p = parameters[0]
        return [p.item(), *(float(optimizer.state[p]["inner"].get(name, math.nan)) for name in names)]

    return watch


def _runs(rank: int, world_size: int) -> dict[str, Any]:
    def sgdm(parameters: Any, lr: float = 0.5) -> QuasiHyperbolic:
        return QuasiHyperbolic(parameters, lr=lr, momenta=(0.9,), omegas=(1.0,), form="sgd")

    def desloc(inner: Any, x: int, u: int, v: int | None = None, **options: Any) -> DESLOC:
        periods = {"params": x, "exp_avg": u, **({} if v is None else {"exp_avg_sq": v})}
        return DESLOC(inner, sync_every=periods, **options)

    def adam(parameters: Any) -> Adam:
        return Adam(parameters, lr=0.1, betas=(0.9, 0.99), eps=1e-8)

    def plain_adam(parameters: Any) -> QuasiHyperbolic:
        return QuasiHyperbolic(parameters, 0.1, (0.9,), (1.0,), beta2=0.99, form="adam")

    def adopt(parameters: Any) -> ADOPT:
        return ADOPT(parameters, lr=0.1, betas=(0.9, 0.9999), eps=1e-6)

    def qh(parameters: Any, form: Any, **options: Any) -> MTDAO:
        return MTDAO(parameters, form=form, **options)

    u, v, uv = _state("exp_avg"), _state("exp_avg_sq"), _state("exp_avg", "exp_avg_sq")
    mixed: dict[str, Any] = {"lr": 0.5, "momenta": (0.9,), "omegas": (0.75,)}
    two: dict[str, Any] = {"lr": 0.1, "momenta": (0.9, 0.99), "omegas": (0.3, 0.5), "beta2": 0.999, "sync_every": 2}
    slow: dict[str, Any] = {"lr": 0.1, "momenta": (0.99,), "omegas": (0.95,), "sync_every": 2}
    return {
        "sgdm": run_toy(rank, lambda ps: desloc(sgdm(ps), 2, 3), 6, watch=u),
        "pre": run_toy(rank, lambda ps: desloc(sgdm(ps), 2, 3, sync_point="pre"), 6, watch=u),
        "adam": run_toy(rank, lambda ps: desloc(adam(ps), 2, 3, 4), 6, watch=uv),
        "plain adam": run_toy(rank, lambda ps: desloc(plain_adam(ps), 2, 3, 4), 6, watch=v),
        "adopt": run_toy(rank, lambda ps: desloc(adopt(ps), 2, 3, 4), 6, watch=uv),
        "qh sgd": run_toy(rank, lambda ps: qh(ps, "sgd", sync_every={"params": 2, "exp_avg": 4}, **mixed), 4, watch=u),
        "qh adopt": run_toy(rank, lambda ps: qh(ps, "adopt", **slow), 6),
        "two momenta": run_toy(rank, lambda ps: qh(ps, "adam", **two), 4),
        "every step": run_toy(rank, lambda ps: desloc(sgdm(ps), 1, 1), 4),
        "adam every step": run_toy(rank, lambda ps: desloc(adam(ps), 1, 1, 1), 4),
        "local adam": run_toy(
            rank, lambda ps: LocalSGD(adam(ps), sync_every=2, average_state=("exp_avg", "exp_avg_sq")), 6, watch=uv
        ),
        "all periods equal": run_toy(rank, lambda ps: desloc(adam(ps), 2, 2, 2), 6, watch=uv),
    }


def test_desloc_and_mtdao_oracles() -> None:
    w0, w1 = run_ranks(_runs, 2)

    def both(name: str, t: int, column: int = 0) -> tuple[float, float]:
        return w0[name][t - 1][column], w1[name][t - 1][column]

    x = [(1.95, 1.7), (1.50875,) * 2, (1.4000625, 0.771875), (0.6068703125,) * 2]
    x += [(0.266071171875, -0.05573828125), (-0.375231900390625,) * 2]
    u = [(0.1, 0.6), (0.185, 1.08), (0.8455625,) * 2, (0.8010125, 1.11538125)]
    u += [(0.68159828125, 1.3252171875), (0.96079669140625,) * 2]
    pre = [(1.95, 1.7), (1.8575, 1.16), (1.382625, 0.80675), (0.9908375, 0.25341875)]
    pre += [(0.2699775, -0.001211875), (-0.0104569375, -0.6620966875)]
    for t in range(1, 7):
        assert both("sgdm", t) == pytest.approx(x[t - 1], **TIGHT)
        assert both("sgdm", t, 1) == pytest.approx(u[t - 1], **TIGHT)
        assert both("pre", t) == pytest.approx(pre[t - 1], **TIGHT)
    corrected = {2: 1.8002418078983347, 4: 1.5161983840858544, 6: 1.363343970795904}
    plain = {2: 1.7656382658916268, 4: 1.2861305947143653, 6: 1.0027673616751787}
    for t in (2, 4, 6):
        assert both("adam", t) == pytest.approx((corrected[t],) * 2, **TIGHT)
        assert both("plain adam", t) == pytest.approx((plain[t],) * 2, **TIGHT)
    assert both("adam", 3, 1) == pytest.approx((0.90503627124475,) * 2, **TIGHT)
    assert both("adam", 4, 2) == pytest.approx((0.655069709500063,) * 2, **TIGHT)
    assert both("adam", 6, 1) == pytest.approx((1.4213878956801793,) * 2, **TIGHT)
    adopt = {1: (2.0, 2.0), 2: (1.99, 1.99), 3: (1.9711, 1.9710333333333334), 4: (1.944219437965391,) * 2}
    for t, row in {**adopt, 6: (1.875395505844494,) * 2}.items():
        assert both("adopt", t) == pytest.approx(row, **TIGHT)
    assert both("adopt", 6, 2) == pytest.approx((18.496423189974006, 18.503095390771314), **TIGHT)
    qh = [(1.8375, 1.025), (0.916015625,) * 2, (0.8710224609375, -0.025626953125), (0.041683111572265625,) * 2]
    for t in range(1, 5):
        assert both("qh sgd", t) == pytest.approx(qh[t - 1], **TIGHT)
    for t, value in {2: 1.99405, 4: 1.9826837418080723, 6: 1.9677322913822022}.items():
        assert both("qh adopt", t) == pytest.approx((value,) * 2, **TIGHT)
    for t, value in {2: 0.8515988293462484, 4: 0.3190414633758344}.items():
        assert both("two momenta", t) == pytest.approx((value,) * 2, **TIGHT)


def test_desloc_equivalences() -> None:
    w0, _ = run_ranks(_runs, 2)
    assert w0["local adam"] == w0["all periods equal"]
    # all periods 1 with momentum SGD is momentum SGD on the mean gradient
    x, u = 2.0, 0.0
    for t in range(4):
        u = 0.9 * u + 0.1 * (3 * x + 1) / 2
        x -= 0.5 * u
        assert w0["every step"][t][0] == pytest.approx(x, **TIGHT)
    # and with Adam it is not Adam on the mean gradient
    p = torch.nn.Parameter(torch.tensor([2.0], dtype=torch.float64))
    synchronous = Adam([p], lr=0.1, betas=(0.9, 0.99))
    for _ in range(4):
        p.grad = (3 * p.detach() + 1) / 2
        synchronous.step()
    assert abs(w0["adam every step"][3][0] - p.item()) > 1e-3


def test_one_worker_is_adam() -> None:
    periods = {"params": 2, "exp_avg": 3, "exp_avg_sq": 4}
    ours = run_toy(0, lambda ps: DESLOC(Adam(ps, lr=0.1), sync_every=periods), 9)
    theirs = run_toy(0, lambda ps: Adam(ps, lr=0.1), 9)
    assert ours == theirs


def test_quadratic_synchronisation_rule() -> None:
    rule = QSR(alpha=0.0175, base=4)
    table = {0.008: 4, 0.007: 6, 0.006: 8, 0.005: 12, 0.004: 19, 0.003: 34, 0.002: 76, 0.001: 306}
    assert {eta: rule.interval(eta) for eta in table} == table

    def eta(t: int) -> float:
        if t < 10:
            return 0.008 * (t + 1) / 10
        return 1e-6 + 0.5 * (0.008 - 1e-6) * (1 + math.cos(math.pi * (t - 10) / 90))

    rule = QSR(alpha=0.0175, base=4, total_steps=100, warmup_steps=10, peak_lr=0.008)
    t, rounds = 0, []
    while t < 100:
        due = rule.next_sync(t, eta(t))
        rounds.append((t, due - t))
        t = due
    assert rounds == [
        (0, 4), (4, 4), (8, 4), (12, 4), (16, 4), (20, 5), (25, 5), (30, 6), (36, 7), (43, 9), (52, 15), (67, 33)
    ]  # fmt: skip
    assert QSR(alpha=0.0, base=7).next_sync(3, 1e-9) == 10
    assert QSR(alpha=0.01, total_steps=50).next_sync(20, 0.0) == 50


def test_rules_drive_an_optimizer() -> None:
    def syncs(optimizer: Any, p: Any, steps: int) -> list[int]:
        seen = []
        for k in range(steps):
            before = optimizer.num_syncs
            p.grad = torch.ones(1)
            optimizer.step()
            if optimizer.num_syncs > before:
                seen.append(optimizer.param_groups[0]["local_step"])
            optimizer.param_groups[0]["lr"] = 0.1 / (k + 2)
        return seen

    p = torch.nn.Parameter(torch.zeros(1))
    optimizer = LocalSGD(torch.optim.SGD([p], lr=0.1), sync_every=QSR(alpha=0.05, base=2))
    assert syncs(optimizer, p, 10) == [2, 4, 10]
    q = torch.nn.Parameter(torch.zeros(1))
    explicit = LocalSGD(torch.optim.SGD([q], lr=0.1), sync_every=AtSteps((1, 3, 6)))
    assert syncs(explicit, q, 8) == [1, 3, 6]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sync_every": {"exp_avg": 2}}, "a period for 'params'"),
        ({"sync_every": {"params": 0}}, "at least 1"),
        ({"sync_point": "middle"}, "'post' or 'pre'"),
        ({"sync_point": "pre", "outer_lr": 0.7}, "no meaning"),
        ({"average_state": ("exp_avg",)}, "name the state in sync_every"),
    ],
)
def test_bad_settings(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DESLOC(Adam([torch.nn.Parameter(torch.zeros(1))]), **options)


def test_a_state_that_does_not_exist_is_named() -> None:
    p = torch.nn.Parameter(torch.zeros(1))
    optimizer = DESLOC(Adam([p]), sync_every={"params": 1, "momentum": 1})
    p.grad = torch.ones(1)
    with pytest.raises(ValueError, match=r"keeps: .*exp_avg"):
        optimizer.step()
