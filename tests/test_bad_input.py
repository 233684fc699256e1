"""Bad input to optimizers, alone and between ranks: a clear error, and nothing half-applied."""

from __future__ import annotations

import time
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lowcomm.compress import Int4, Int8
from lowcomm.optim import DiLoCo, LocalSGD
from lowcomm.sync import Disagreement, NonFinite, PeerTimeout
from ranks import run_ranks, start_ranks
from torch import nn
from torch.optim import SGD, AdamW


def sgd(count: int = 2) -> SGD:
    return SGD([nn.Parameter(torch.ones(3)) for _ in range(count)], lr=0.1)


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: DiLoCo("AdamW"), ValueError, "inner must be a torch.optim.Optimizer"),
        (lambda: DiLoCo([]), ValueError, "inner must be a torch.optim.Optimizer"),
        (lambda: DiLoCo(DiLoCo(sgd())), ValueError, "wrap the inner optimizer only once"),
        (lambda: DiLoCo(sgd(), every=3), TypeError, "unexpected keyword argument 'every'"),
        (lambda: DiLoCo(sgd(), sync_every=0), ValueError, "sync_every must be at least 1 but is: 0"),
        (lambda: DiLoCo(sgd(), sync_every=2.5), ValueError, "sync_every must be an int or have a next_sync method"),
        (lambda: DiLoCo(sgd(), sync_every=True), ValueError, "sync_every must be an int or have a next_sync method"),
        (lambda: DiLoCo(sgd(), outer_lr=0.0), ValueError, "outer_lr must be > 0 and finite but is: 0.0"),
        (lambda: DiLoCo(sgd(), outer_momentum=1.0), ValueError, r"outer_momentum must be in \[0, 1\) but is: 1.0"),
        (lambda: DiLoCo(sgd(), compress="int8"), ValueError, "compress must be a codec"),
        (lambda: DiLoCo(sgd(), compress=Int8(), feedback="ef"), ValueError, "feedback must be"),
        (lambda: DiLoCo(sgd(), weights=-1), ValueError, "weights must be finite and not negative"),
        (lambda: DiLoCo(sgd(), weights="tokens"), ValueError, "weights must be 'uniform', a number or a callable"),
        (lambda: DiLoCo(sgd(), on_failure="ignore"), ValueError, "on_failure must be one of"),
        (lambda: DiLoCo(sgd(), offload="disk"), ValueError, "offload must be one of"),
        (lambda: DiLoCo(sgd(), warmup_steps=-1), ValueError, "warmup_steps must be an int of at least 0"),
        (lambda: DiLoCo(sgd(), process_group="world"), TypeError, "process_group must be"),
        (lambda: LocalSGD(sgd()), TypeError, "sync_every"),
    ],
)
def test_constructors_refuse(build: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build()


def test_parameter_iterators_used_up_and_shared() -> None:
    model = nn.Linear(2, 2)
    used = model.parameters()
    list(used)
    with pytest.raises(ValueError, match="empty parameter list"):
        DiLoCo(SGD(used, lr=0.1))
    with pytest.raises(ValueError, match="appears twice in the inner optimizers"):
        DiLoCo([SGD(model.parameters(), lr=0.1), AdamW(model.parameters())])


def _load_into(source: Any, target: Any) -> str:
    before = [p.detach().clone() for group in target.param_groups for p in group["params"]]
    state = target.state_dict()
    with pytest.raises(ValueError, match="loaded") as caught:
        target.load_state_dict(source.state_dict())
    after = [p for group in target.param_groups for p in group["params"]]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert str(target.state_dict()["param_groups"]) == str(state["param_groups"])
    return str(caught.value)


def test_checkpoints_of_something_else_are_refused() -> None:
    def trained(optimizer: Any) -> Any:
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.ones_like(p)
        optimizer.step()
        return optimizer

    wider = SGD([nn.Parameter(torch.ones(4)) for _ in range(2)], lr=0.1)
    target = trained(DiLoCo(sgd(), sync_every=3))
    assert "has shape (4,), its parameter (3,)" in _load_into(trained(DiLoCo(wider, sync_every=3)), target)
    assert "parameters, the optimizer's 2" in _load_into(trained(DiLoCo(sgd(3), sync_every=3)), target)
    assert "int8" in _load_into(trained(DiLoCo(sgd(), sync_every=3, compress=Int8())), target)
    assert "its groups lack" in _load_into(trained(sgd()), target)
    assert "an entry has ['inner'], expected" in _load_into(trained(LocalSGD(sgd(), sync_every=3)), target)
    local = trained(LocalSGD(sgd(), sync_every=3))
    assert "not of a LocalSGD: an entry has ['anchor'" in _load_into(target, local)
    without = trained(DiLoCo(sgd(), sync_every=3, compress=Int8(), feedback=None))
    assert "residual" in _load_into(trained(DiLoCo(sgd(), sync_every=3, compress=Int8())), without)


def _disagreements(rank: int, world_size: int) -> dict[str, Any]:
    errors: dict[str, Any] = {}

    def attempt(name: str, build: Any, poison: Any = None) -> None:
        torch.manual_seed(0)
        p = nn.Parameter(torch.ones(300))
        optimizer = build(p)
        p.grad = torch.full((300,), 1.0 + rank)
        try:
            for _ in range(2):
                optimizer.step()
                if poison is not None:
                    poison(p)
        except (Disagreement, NonFinite) as error:
            anchor = optimizer.state[p].get("anchor")
            untouched = anchor is None or torch.equal(anchor, torch.ones(300))
            errors[name] = (type(error).__name__, str(error), untouched)

    one = rank == 1
    attempt("outer_lr", lambda p: DiLoCo(SGD([p], lr=0.1), sync_every=2, outer_lr=0.5 if one else 0.7))
    attempt("sync_every", lambda p: DiLoCo(SGD([p], lr=0.1), sync_every=1 if one else 2))
    attempt("lr", lambda p: DiLoCo(SGD([p], lr=0.2 if one else 0.1), sync_every=2))
    attempt("method", lambda p: (LocalSGD if one else DiLoCo)(SGD([p], lr=0.1), sync_every=2))
    attempt("codec", lambda p: DiLoCo(SGD([p], lr=0.1), sync_every=2, compress=Int4() if one else Int8()))

    def poison(p: Any) -> None:
        if one:
            p.data[7] = float("nan")

    attempt("nan", lambda p: DiLoCo(SGD([p], lr=0.1), sync_every=2), poison)
    attempt("nan codec", lambda p: DiLoCo(SGD([p], lr=0.1), sync_every=2, compress=Int8()), poison)
    group = dist.new_group([0])
    try:
        DiLoCo(sgd(), process_group=group)
    except ValueError as error:
        errors["group"] = ("ValueError", str(error), True)
    return errors


def test_ranks_that_disagree_are_named_with_their_values() -> None:
    first, second = run_ranks(_disagreements, 2, group_timeout=20)
    for errors in (first, second):
        for name, values in {"outer_lr": ("0.7", "0.5"), "lr": ("0.1", "0.2"), "sync_every": ("2", "1")}.items():
            kind, message, untouched = errors[name]
            assert kind == "Disagreement" and untouched
            assert name in message and f"rank 0: {values[0]}" in message and f"rank 1: {values[1]}" in message
        assert "DiLoCo" in errors["method"][1] and "LocalSGD" in errors["method"][1]
        assert "int8" in errors["codec"][1] and "int4" in errors["codec"][1]
        for name in ("nan", "nan codec"):
            assert errors[name][0] == "NonFinite" and "[1]" in errors[name][1] and errors[name][2]
    assert "group" not in first
    assert "does not belong to" in second["group"][1]


def _stopped(rank: int, world_size: int) -> Any:
    p = nn.Parameter(torch.ones(5))
    optimizer = DiLoCo(SGD([p], lr=0.1), sync_every=2)
    p.grad = torch.ones(5)
    optimizer.step()
    if rank == 1:
        time.sleep(12)
        return None
    start = time.monotonic()
    with pytest.raises(PeerTimeout, match="rank 1") as caught:
        optimizer.step()
    kept = torch.equal(optimizer.state[p]["anchor"], torch.ones(5))
    momentum = optimizer.state[p]["outer_momentum_buffer"].abs().sum().item()
    return time.monotonic() - start, str(caught.value), kept, momentum, p.detach().clone()


def test_a_rank_that_stops_is_named_after_the_timeout() -> None:
    (value, error), _ = start_ranks(_stopped, 2, group_timeout=5, timeout=40)
    assert error is None, error
    seconds, message, kept, momentum, p = value
    assert seconds < 11
    assert "rank 1" in message and "timeout" in message
    assert kept and momentum == 0.0
    torch.testing.assert_close(p, torch.full((5,), 0.8))


def _different_start(rank: int, world_size: int) -> Any:
    torch.manual_seed(rank)
    model = nn.Linear(4, 2)
    with pytest.raises(ValueError, match="weight") as caught:
        DiLoCo(SGD(model.named_parameters(), lr=0.1), init="check")
    DiLoCo(SGD(model.named_parameters(), lr=0.1))
    return str(caught.value), model.weight.detach().clone()


def test_workers_that_start_apart_are_refused_or_aligned() -> None:
    (message, first), (_, second) = run_ranks(_different_start, 2)
    assert "rank" in message
    assert torch.equal(first, second)
    torch.manual_seed(0)
    assert torch.equal(first, nn.Linear(4, 2).weight)


def _same_data(rank: int, world_size: int, same: bool) -> list[str]:
    model = nn.Linear(3, 2, bias=False)
    optimizer = DiLoCo(torch.optim.SGD(model.parameters(), lr=0.1), sync_every=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            x = torch.ones(1, 3) * (1 + step + (0 if same else rank))
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("same", [True, False])
def test_workers_that_do_the_same_are_told_so_once(same: bool) -> None:
    """As under DistributedDataParallel, which trainers add by themselves, or with one data order for all."""
    for messages in run_ranks(_same_data, 2, same):
        assert ["exactly the same progress" in message for message in messages] == [True] * same
