"""The hook for DistributedDataParallel: exact without a codec, residuals follow the parameters, errors arrive."""

from __future__ import annotations

import pytest
import torch
from lowcomm.compress import EF14, TopK
from lowcomm.sync import AllReduce, ddp_hook
from ranks import run_ranks
from sync_codecs import ExactCodec, SignCodec
from torch.nn.parallel import DistributedDataParallel


def _model(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [
        torch.nn.Linear(12, 40),
        torch.nn.Tanh(),
        torch.nn.Linear(40, 30),
        torch.nn.Tanh(),
        torch.nn.Linear(30, 2),
    ]
    return torch.nn.Sequential(*layers).to(dtype)


def _step(model: torch.nn.Module, rank: int, t: int, dtype: torch.dtype = torch.float32) -> None:
    x = torch.randn(8, 12, generator=torch.Generator().manual_seed(10 * t + rank)).to(dtype)
    model.zero_grad()
    model(x).square().mean().backward()


def _gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters()]


def _ddp_rank(rank: int, world_size: int) -> dict[str, object]:
    results: dict[str, object] = {}
    plain = DistributedDataParallel(_model(), bucket_cap_mb=0.002)
    ours = DistributedDataParallel(_model(), bucket_cap_mb=0.002)
    hook = ddp_hook()
    ours.register_comm_hook(None, hook)
    exact = DistributedDataParallel(_model(), bucket_cap_mb=0.002)
    exact.register_comm_hook(None, ddp_hook(ExactCodec()))
    for t in range(3):
        for model in (plain, ours, exact):
            _step(model, rank, t)
        results[f"dense {t}"] = (_gradients(plain), _gradients(ours), _gradients(exact))
    results["buckets"] = len(hook.state.receipts)
    results["feedback"] = _with_feedback(rank)
    narrow = DistributedDataParallel(_model(torch.bfloat16))
    narrow.register_comm_hook(None, ddp_hook(SignCodec()))
    _step(narrow, rank, 0, torch.bfloat16)
    results["narrow"] = _gradients(narrow)
    broken = DistributedDataParallel(_model())
    broken.register_comm_hook(None, ddp_hook(SignCodec(), nonfinite="raise"))
    if rank == 1:
        next(broken.module.parameters()).data.fill_(float("nan"))
    with pytest.raises(RuntimeError, match=r"ranks \[1\] offered NaN"):
        _step(broken, rank, 0)
    return results


def _with_feedback(rank: int) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Sums of local and of averaged gradients, and residuals, by parameter; buckets are re-arranged meanwhile."""
    alone, model = _model(), DistributedDataParallel(_model(), bucket_cap_mb=0.002)
    hook = ddp_hook(TopK(density=1 / 4, chunk=64, value="f32"), EF14())
    model.register_comm_hook(None, hook)
    put_in = [torch.zeros_like(p) for p in alone.parameters()]
    came_out = [torch.zeros_like(p) for p in alone.parameters()]
    for t in range(6):
        _step(alone, rank, t)
        _step(model, rank, t)
        for total, grad in zip(put_in, _gradients(alone), strict=True):
            total += grad
        for total, grad in zip(came_out, _gradients(model), strict=True):
            total += grad
    assert hook.state._moved, "DDP did not re-arrange its buckets"
    kept = {}
    for index, parameters in hook.state._layouts.items():
        parts = hook.state.reducer.state(index)["residual"].split([p.numel() for p in parameters])
        kept.update(zip(parameters, parts, strict=True))
    return put_in, came_out, [kept[p].view_as(p) for p in model.module.parameters()]


def test_ddp_hook() -> None:
    outcomes = run_ranks(_ddp_rank, 2)
    for outcome in outcomes:
        assert outcome["buckets"] > 1
        for t in range(3):
            for plain, *others in zip(*outcome[f"dense {t}"], strict=True):
                for other in others:
                    torch.testing.assert_close(other, plain, rtol=1e-6, atol=1e-8)
        for own, first in zip(outcome["narrow"], outcomes[0]["narrow"], strict=True):
            assert own.dtype == torch.bfloat16 and torch.equal(own, first) and bool(own.any())
    # nothing is lost: what ranks put in is what came out and what they keep
    pairs = zip(*(outcome["feedback"] for outcome in outcomes), strict=True)
    put_in, came_out, kept = ([(a + b) / 2 for a, b in zip(*parts, strict=True)] for parts in pairs)
    for before, after, rest in zip(put_in, came_out, kept, strict=True):
        torch.testing.assert_close(after + rest, before, rtol=1e-5, atol=1e-6)
    assert any(bool(rest.any()) for rest in kept)


def test_callbacks_run_once_whenever_they_are_added() -> None:
    calls = []
    work = AllReduce().start(torch.ones(2))
    work.then(lambda: calls.append(work.done()))
    assert calls == [True]
