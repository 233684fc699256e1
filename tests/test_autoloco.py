"""AutoLoCo against worked examples, DiLoCo, and what its controller promises; the late-budget schedule."""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import pytest
import torch
from lowcomm.optim import AutoLoCo, DiLoCo, LateBudget, LocalSGD
from lowcomm.optim.controller import corrected_outer, next_interval
from ranks import run_ranks
from torch.optim import SGD
from toys import P, anchor_of, momentum_of, run_toy, scalar

TIGHT = {"rel": 1e-12, "abs": 1e-14}
STILL: dict[str, Any] = {"loss_power": 0.0, "lr_power": 0.0, "noise_power": 0.0}
SHARES = (1.0, 1.0, 2.0, 0.5, 4.0)


def test_outer_coefficients() -> None:
    mus = [0.9740037464252967, 0.9486832980505138, 0.9, 0.81, 0.6561]
    nus = [0.18197377502292278, 0.35921691364640357, 0.7, 1.33, 2.4073]
    for share, mu, nu in zip((0.25, 0.5, 1, 2, 4), mus, nus, strict=True):
        assert corrected_outer(0.7, 0.9, share) == pytest.approx((nu, mu), **TIGHT)
        assert corrected_outer(0.7, 0.9, share, 1.0)[0] == pytest.approx(min(nu, 1.0), **TIGHT)


def test_interval_and_coefficients_of_the_worked_example() -> None:
    """Loss, learning rate, noise -> H and the coefficients of a round of that length; A_ref = 16 * 0.4."""
    rows = [
        (8, 0.4, 1, 16, 0.9, 0.7),
        (4, 0.4, 1, 11, 0.9301258731552128, 0.48911888791351066),
        (4, 0.2, 1, 16, 0.9486832980505138, 0.3592169136464037),
        (4, 0.2, 2, 23, 0.9270684547911674, 0.5105208164618283),
        (2, 0.1, 4, 32, 0.9486832980505138, 0.3592169136464037),
    ]
    previous = 16
    for loss, eta, noise, interval, mu, nu in rows:
        previous = next_interval(16, previous, (loss / 8, eta / 0.4, noise), (0.5, 1.5, 0.5), 1.5)
        assert previous == interval
        assert corrected_outer(0.7, 0.9, interval * eta / 6.4) == pytest.approx((nu, mu), **TIGHT)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_aratio_that_means_nothing_leaves_the_interval(bad: float) -> None:
    for place in range(3):
        ratios = [0.25, 1.0, 1.0]
        ratios[place] = bad
        assert next_interval(16, 10, ratios, (0.5, 1.5, 0.5), 1.5) == 10
        powers = [0.5, 1.5, 0.5]
        powers[place] = 0.0
        assert next_interval(16, 10, ratios, powers, 1.5) != 10 or place == 0


@pytest.mark.parametrize("form", ["gain", "normalized"])
@pytest.mark.parametrize("cuts", [(1.0, 1.0), (2.0, 1.0), (0.5, 3.0)])
def test_the_gain_does_not_depend_on_how_the_horizon_is_cut(form: str, cuts: tuple[float, float]) -> None:
    """Unit progress per unit of learning rate: displacement per unit is nu / (1 - mu) = 7, whatever the rounds."""
    anchor = momentum = moved = before = 0.0
    for k in range(4000):
        share = cuts[k % 2]
        nu, mu = corrected_outer(0.7, 0.9, share)
        delta = share
        if form == "normalized":
            nu, delta = 0.7 * share, (1 - mu) / (1 - 0.9)
        momentum = mu * momentum + delta
        anchor -= nu * (delta + mu * momentum)
        moved += share
        if k == 1999:
            before, moved = anchor, 0.0
    steady = (before - anchor) / moved
    if form == "normalized" or cuts[0] == cuts[1]:
        assert steady == pytest.approx(7.0, rel=1e-9)
    else:
        assert steady == pytest.approx(7.0, rel=0.2)  # a transient at every change of length


def test_gain_over_whole_runs() -> None:
    for share, rounds, expected in ((1.0, 4000, 6.985825), (2.0, 2000, 6.987913947368421)):
        anchor = momentum = 0.0
        nu, mu = corrected_outer(0.7, 0.9, share)
        for _ in range(rounds):
            momentum = mu * momentum + share
            anchor -= nu * (share + mu * momentum)
        assert -anchor / 4000 == pytest.approx(expected, rel=1e-9)


def _watch(optimizer: Any, parameters: Any) -> list[float]:
    return anchor_of(optimizer, parameters) + momentum_of(optimizer, parameters) + [parameters[0].item()]


def _forms(rank: int, world_size: int) -> dict[str, Any]:
    """D = p for p = 1, 1, 2, 0.5, 4: every round is one step of gradient 1 with learning rate p."""
    found: dict[str, Any] = {}
    for form in ("gain", "normalized"):
        p = scalar(0.0)
        inner = SGD([p], lr=1.0)
        optimizer = AutoLoCo(inner, sync_every=1, calib_rounds=1, max_outer_lr=math.inf, form=form, **STILL)  # type: ignore[arg-type]
        found[form] = []
        for share in SHARES:
            optimizer.param_groups[0]["lr"] = share
            p.grad = torch.ones(1, dtype=torch.float64)
            optimizer.step()
            found[form].append(p.item())
    return found


def _same_as_diloco(rank: int) -> dict[str, Any]:
    """Constant H and learning rate, losses and noise free to vary: the rule is switched off by its powers."""

    def auto(parameters: Any, **options: Any) -> Any:
        return AutoLoCo(SGD(parameters, lr=0.1), sync_every=2, calib_rounds=1, **{**STILL, **options})

    return {
        "gain": run_toy(rank % 2, auto, 8, watch=_watch),
        "normalized": run_toy(rank % 2, lambda ps: auto(ps, form="normalized"), 8, watch=_watch),
        "diloco": run_toy(rank % 2, lambda ps: DiLoCo(SGD(ps, lr=0.1), sync_every=2), 8, watch=_watch),
    }


def _controlled(rank: int, **options: Any) -> dict[str, Any]:
    """A decaying learning rate and a falling loss: what the controller decides, on every rank."""
    p = scalar(2.0)
    settings: dict[str, Any] = {"sync_every": 4, "total_steps": 60, "smoothing": 0.0, **options}
    optimizer = AutoLoCo(SGD([p], lr=0.1), **settings)
    syncs, statistics, controllers = [], [], []
    for t in range(60):
        optimizer.param_groups[0]["lr"] = 0.1 * 0.97**t
        p.grad = P[rank % 2](p.detach())
        optimizer.record(torch.tensor(1.0 + rank) * 0.99**t, tokens=100 + 50 * (t >= 30))
        before = optimizer.num_syncs
        optimizer.step()
        if optimizer.num_syncs > before:
            syncs.append(t + 1)
            statistics.append(vars(optimizer.last_round))
            controllers.append(list(optimizer.param_groups[0]["controller"]))
    return {"syncs": syncs, "statistics": statistics, "controllers": controllers, "x": p.item()}


def _resumed(rank: int) -> list[int]:
    """Steps at which a run that is saved, loaded into a new optimizer and continued differs from an undisturbed one."""

    def build() -> Any:
        p = scalar(2.0)
        return p, AutoLoCo(SGD([p], lr=0.1), sync_every=2, smoothing=0.5, calib_rounds=1)

    def train(p: Any, optimizer: Any, first: int, last: int) -> None:
        for t in range(first, last):
            optimizer.param_groups[0]["lr"] = 0.1 * 0.9**t
            p.grad = P[rank % 2](p.detach())
            optimizer.record(torch.tensor(2.0 * 0.95**t + rank))
            optimizer.step()

    different = []
    for stop in range(1, 12):
        p, optimizer = build()
        train(p, optimizer, 0, stop)
        q, other = build()
        q.data.copy_(p.data)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        train(p, optimizer, stop, 16)
        train(q, other, stop, 16)
        keys = ("controller", "round_sums", "next_sync")
        same = p.item() == q.item() and all(optimizer.param_groups[0][k] == other.param_groups[0][k] for k in keys)
        if not same:
            different.append(stop)
    return different


def _all(rank: int, world_size: int) -> dict[str, Any]:
    return {
        "forms": _forms(rank, world_size),
        "diloco": _same_as_diloco(rank),
        "controlled": _controlled(rank),
        "tokens": _controlled(rank, horizon="tokens", **STILL),
        "resumed": _resumed(rank),
        "late": run_toy(
            rank % 2, lambda ps: LocalSGD(SGD(ps, lr=0.1), sync_every=LateBudget(6, syncs=1)), 6, watch=None
        ),
    }


@pytest.mark.parametrize("world_size", [2, 4])
def test_between_processes(world_size: int) -> None:
    found = run_ranks(_all, world_size)
    gain = [-1.33, -3.227, -9.6995647, -11.19370649165516, -31.137898100599525]
    normalized = [-1.33, -3.227, -9.786826, -11.220111, -31.717897844201154]
    for one in found:
        assert one["forms"]["gain"] == pytest.approx(gain, **TIGHT)
        assert one["forms"]["normalized"] == pytest.approx(normalized, **TIGHT)
        assert one["diloco"]["gain"] == one["diloco"]["diloco"]
        assert one["diloco"]["normalized"] == one["diloco"]["diloco"]
        assert one["controlled"] == found[0]["controlled"]
        assert one["tokens"]["syncs"] == found[0]["tokens"]["syncs"]
        assert one["resumed"] == []
    _check_controlled(found[0]["controlled"], world_size)
    # 150 tokens a step from step 31 on, against 100 in the reference: 4 reference steps are 3 steps
    syncs = found[0]["tokens"]["syncs"]
    lengths = [b - a for a, b in zip([0, *syncs], syncs, strict=False)]
    assert lengths[:7] == [4] * 7 and set(lengths[9:-1]) == {3}
    # one merge at the end: the mean of runs made apart
    apart = [2.0, 2.0]
    for _ in range(6):
        apart = [0.9 * apart[0] + 0.1, 0.8 * apart[1] - 0.2]
    assert [one["late"][5][0] for one in found] == pytest.approx([sum(apart) / 2] * world_size, **TIGHT)


def _check_controlled(run: dict[str, Any], world_size: int) -> None:
    syncs, seen = run["syncs"], run["statistics"]
    assert syncs[-1] == 60
    lengths = [b - a for a, b in zip([0, *syncs], syncs, strict=False)]
    assert lengths[:2] == [4, 4]
    assert max(lengths) > 4  # the learning rate falls, so rounds grow
    for before, after in itertools.pairwise(lengths[:-1]):  # the last one ends with the run
        assert math.ceil(before / 1.5) <= after <= math.floor(before * 1.5)
    first = seen[0]
    rates = [0.1 * 0.97**t for t in range(4)]
    locals_ = [2.0, 2.0]
    for rate in rates:
        locals_ = [x - rate * float(g(torch.tensor(x, dtype=torch.float64))) for x, g in zip(locals_, P, strict=True)]
    deltas = [2.0 - x for x in locals_]
    n1, n2 = sum(d * d for d in deltas) / 2, (sum(deltas) / 2) ** 2
    noise = world_size / (world_size - 1) * (n1 - n2) / sum(rate * rate for rate in rates)
    assert first["noise"] == pytest.approx(noise, rel=1e-9)
    assert (first["drift"], first["coherence"]) == pytest.approx((n1 - n2, n2 / n1), rel=1e-9)
    assert first["lr_sum"] == pytest.approx(sum(rates), rel=1e-12)
    mean_rank = (world_size - 1) / 2
    assert first["loss"] == pytest.approx((1 + mean_rank) * sum(0.99**t for t in range(4)) / 4, rel=1e-6)
    reference = seen[1]["lr_sum"]
    for row in seen[2:]:
        nu, mu = corrected_outer(0.7, 0.9, row["lr_sum"] / reference, 1.0)
        assert (row["outer_lr"], row["outer_momentum"]) == pytest.approx((nu, mu), rel=1e-12)


def test_the_noise_of_the_worked_example() -> None:
    """P, two steps at 0.1: deltas 0.19 and 1.08."""
    n1, n2 = (0.19**2 + 1.08**2) / 2, 0.635**2
    assert 2 * (n1 - n2) / (2 * 0.01) == pytest.approx(19.8025, **TIGHT)


def test_what_is_needed_is_asked_for() -> None:
    p = scalar(1.0)
    p.grad = torch.ones(1, dtype=torch.float64)
    with pytest.raises(RuntimeError, match=r"call record\(loss\) before step"):
        AutoLoCo(SGD([p], lr=0.1), sync_every=2).step()
    assert p.item() == 1.0
    optimizer = AutoLoCo(SGD([p], lr=0.1), sync_every=1, calib_rounds=1, horizon="tokens", **STILL)
    for tokens in (5, 0):
        optimizer.record(1.0, tokens)
        optimizer.step()
    with pytest.raises(RuntimeError, match="needs the tokens of every step"):
        optimizer.step()
    losses = iter([3.0, 1.0])
    closed = AutoLoCo(SGD([p], lr=0.1), sync_every=2)
    for _ in range(2):
        closed.step(lambda: next(losses))
    assert closed.last_round is not None and closed.last_round.loss == 2.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sync_every": 2.0}, "sync_every must be an int, the length of a reference round"),
        ({"outer_lr": 1.2}, "at most max_outer_lr"),
        ({"form": "other"}, "form must be 'gain' or 'normalized'"),
        ({"form": "normalized", "correct_lr": False}, "one correction"),
        ({"rate_limit": 1.0}, "rate_limit > 1"),
        ({"smoothing": 1.0}, "smoothing in"),
        ({"min_interval": 8, "max_interval": 4}, "min_interval <= max_interval"),
        ({"calib_rounds": 0}, "calib_rounds >= 1"),
    ],
)
def test_bad_settings(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AutoLoCo(SGD([scalar(0.0)], lr=0.1), **options)


def test_late_budget() -> None:
    assert LateBudget(10).steps == (10,)
    assert LateBudget(10, syncs=5, share=1.0).steps == (2, 4, 6, 8, 10)
    assert LateBudget(1000, syncs=3, share=0.3).steps == (800, 900, 1000)
    schedule = LateBudget(9, syncs=4, share=0.5)
    assert schedule.steps[-1] == 9 and min(schedule.steps) > 4
    assert schedule.next_sync(9, 0.1) > 10**9
    for bad in ({"total_steps": 10, "syncs": 6}, {"total_steps": 10, "share": 0.0}, {"total_steps": 0}):
        with pytest.raises(ValueError, match="syncs <= share"):
            LateBudget(**bad)
