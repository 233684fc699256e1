"""What methods promise whatever the data: bounds, scales, schedules; and the arguments they promise to take."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from lowcomm.optim import (
    CO2,
    DESLOC,
    QSR,
    AutoLoCo,
    DiLoCo,
    EagerDiLoCo,
    QuasiHyperbolic,
    SignMomentum,
    SlowMo,
    StreamingDiLoCo,
)
from torch import Tensor
from torch.optim import SGD

REQUIRED = inspect.Parameter.empty
MODEL = torch.linspace(-1, 1, 6, dtype=torch.float64)


def parameter() -> torch.nn.Parameter:
    return torch.nn.Parameter(MODEL.clone())


def anchors(optimizer: Any, p: torch.nn.Parameter, gradients: list[Tensor]) -> list[Tensor]:
    """The anchor after every step."""
    found = []
    for gradient in gradients:
        p.grad = gradient.clone()
        optimizer.step()
        found.append(optimizer.state[p]["anchor"].clone())
    return found


def noise(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(6, generator=generator, dtype=torch.float64) for _ in range(count)]


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        (
            StreamingDiLoCo,  # alpha: None is 0.5 with a delay and 0 without
            {"sync_every": 100, "fragments": "strided", "delay": 1, "alpha": None, "offsets": None}
            | {"first_send": "early", "outer_lr": 0.4, "outer_momentum": 0.9, "nesterov": True},
        ),
        (
            EagerDiLoCo,
            {"sync_every": REQUIRED, "delay": 1, "delayed": False, "resync_every": None}
            | {"outer_lr": 0.7, "outer_momentum": 0.9, "nesterov": True},
        ),
        (DESLOC, {"sync_every": {"params": 64, "exp_avg": 192, "exp_avg_sq": 384}, "sync_point": "post"}),
        (SlowMo, {"sync_every": REQUIRED, "alpha": 1.0, "beta": 0.7, "buffers": "maintain"}),
        (
            SignMomentum,
            {"sync_every": 12, "global_lr": 1.0, "betas": (0.95, 0.98), "weight_decay": 0.1, "sign": "exact"},
        ),
        (CO2, {"sync_every": REQUIRED, "gap_penalty": True, "clip": None}),
        (DiLoCo, {"sync_every": 500, "outer_lr": 0.7, "outer_momentum": 0.9, "nesterov": True}),
        (AutoLoCo, {"sync_every": 500, "outer_lr": 0.7, "outer_momentum": 0.9, "nesterov": True}),
    ],
)
def test_signatures(method: Any, arguments: dict[str, Any]) -> None:
    found = inspect.signature(method).parameters
    assert next(iter(found)) == "inner"
    for name, default in arguments.items():
        assert found[name].kind is inspect.Parameter.KEYWORD_ONLY
        assert found[name].default == default, name


def test_a_round_without_progress_moves_by_momentum_alone() -> None:
    """Which is why `flush` never takes an outer step with nothing: first round X stays, then X -= nu mu (mu B)."""
    p = parameter()
    optimizer = DiLoCo(SGD([p], lr=0.1), sync_every=1)
    still = torch.zeros(6, dtype=torch.float64)
    first, moved, third = anchors(optimizer, p, [still, torch.ones(6, dtype=torch.float64), still])
    assert torch.equal(first, MODEL)
    torch.testing.assert_close(third, moved - 0.7 * 0.9 * 0.9 * torch.full_like(moved, 0.1), rtol=1e-12, atol=1e-14)


def test_sign_momentum_does_not_see_the_scale_of_the_progress() -> None:
    runs = []
    for scale in (1.0, 1000.0):
        p = parameter()
        optimizer = SignMomentum(SGD([p], lr=0.1), sync_every=2, weight_decay=0.0)
        runs.append(anchors(optimizer, p, [g * scale for g in noise(12)]))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_steps_are_bounded() -> None:
    """Sign momentum: eta gamma around the decayed anchor. CO2: alpha gamma phi."""
    p = parameter()
    before = MODEL.clone()
    optimizer = SignMomentum(SGD([p], lr=0.1), sync_every=1, global_lr=0.5)
    for after in anchors(optimizer, p, [g * 100 for g in noise(9)]):
        decayed = before * (1 - 0.5 * 0.1 * 0.1)
        assert float((after - decayed).abs().max()) <= 0.5 * 0.1 * (1 + 1e-12)
        before = after
    p, before = parameter(), MODEL.clone()
    late = CO2(SGD([p], lr=0.1), sync_every=1, alpha=0.8, beta=0.5, clip=0.25)
    for after in anchors(late, p, [g * 100 for g in noise(9)]):
        assert float((after - before).abs().max()) <= 0.8 * 0.1 * 0.25 * (1 + 1e-12)
        before = after


def test_slowmo_without_momentum_is_lookahead() -> None:
    p, q = parameter(), parameter()
    slow = SlowMo(SGD([p], lr=0.1), sync_every=3, alpha=0.5, beta=0.0)
    ahead = DiLoCo(SGD([q], lr=0.1), sync_every=3, outer_lr=0.5, outer_momentum=0.0)
    for a, b in zip(anchors(slow, p, noise(12)), anchors(ahead, q, noise(12)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("first_send", ["early", "full"])
@pytest.mark.parametrize(("interval", "parts", "delay"), [(7, 3, 0), (8, 4, 3), (3, 5, 2), (6, 6, 5)])
def test_every_fragment_is_sent_once_in_every_period(interval: int, parts: int, delay: int, first_send: Any) -> None:
    """At its own offset, whatever H and P; what is sent in a period adds up to the model."""
    parameters = [torch.nn.Parameter(torch.zeros(k + 1)) for k in range(parts)]
    inner = SGD([(str(k), p) for k, p in enumerate(parameters)], lr=0.1)
    optimizer = StreamingDiLoCo(
        inner, sync_every=interval, fragments=lambda name: int(name), delay=delay, first_send=first_send
    )
    sent: list[list[int]] = []
    for _ in range(5 * interval):
        for p in parameters:
            p.grad = torch.ones_like(p)
        optimizer.step()
        step = optimizer.param_groups[0]["local_step"]
        sent.append([k for k, last in enumerate(optimizer.param_groups[0]["last_send"]) if last == step])
    for k in range(parts):
        steps = [step for step, numbers in enumerate(sent, start=1) if k in numbers]
        offset = k * interval // parts
        first = offset if offset and first_send == "early" else interval + offset
        assert steps == list(range(first, 5 * interval + 1, interval))
    for start in range(2 * interval, 4 * interval):
        window = [k for numbers in sent[start : start + interval] for k in numbers]
        assert sorted(window) == list(range(parts))


def test_momentum_drifts_within_its_bound() -> None:
    """Gradients in [-rho, rho]: over K steps u moves by at most 2 rho (1 - b^K), whatever was averaged."""
    p = parameter()
    inner = QuasiHyperbolic([p], lr=0.1, momenta=(0.9,), omegas=(1.0,), form="sgd")
    optimizer = DESLOC(inner, sync_every={"params": 2, "exp_avg": 6})
    rows = []
    for gradient in noise(30):
        p.grad = gradient.clamp(-0.5, 0.5)
        optimizer.step()
        rows.append(optimizer.state[p]["inner"]["exp_avg"].clone())
    for k in (1, 3, 6):
        bound = 2 * 0.5 * (1 - 0.9**k)
        assert all(float((b - a).abs().max()) <= bound for a, b in zip(rows, rows[k:], strict=False))


def test_qsr_rounds_grow_and_end_with_the_run() -> None:
    rule, t, lengths = QSR(alpha=0.02, base=2, total_steps=200), 0, []
    while t < 200:
        due = rule.next_sync(t, 0.01 * (1 - t / 250))
        lengths.append(due - t)
        t = due
    assert t == 200
    assert lengths[:-1] == sorted(lengths[:-1]) and len(set(lengths)) > 3


def test_momentum_alone_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="does worse than no correction"):
        AutoLoCo(SGD([parameter()], lr=0.1), correct_lr=False)
