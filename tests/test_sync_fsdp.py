"""The hook for FSDP2's replicas, and state of hooks that resumes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lowcomm.compress import Int8, TopK
from lowcomm.sync import ddp_hook, fsdp_hook
from ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

needs_hook = pytest.mark.skipif(
    not hasattr(FSDPModule, "set_all_reduce_hook"), reason=f"torch {torch.__version__} has no set_all_reduce_hook"
)


def _model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(12, 40), torch.nn.Tanh(), torch.nn.Linear(40, 6))


def _backward(model: torch.nn.Module, rank: int, t: int) -> list[torch.Tensor]:
    x = torch.randn(8, 12, generator=torch.Generator().manual_seed(10 * t + rank))
    model.zero_grad()
    model(x).square().mean().backward()
    return [p.grad for p in model.parameters()]


def _fsdp_rank(rank: int, world_size: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    results: dict[str, Any] = {}
    for name, codec in (("exact", None), ("int8", Int8()), ("again", Int8())):
        model = _model()
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh["shard"])
        hook = fsdp_hook(model, codec, process_group=mesh["replicate"])
        if name == "again":
            hook.load_state_dict(results["state"])
        for t in range(3):
            if name == "again" and t < 2:
                continue
            if name == "int8" and t == 2:
                results["state"] = hook.state_dict()
            results[f"{name} {t}"] = [g.full_tensor() for g in _backward(model, rank, t)]
        results[f"{name} receipts"] = len(hook.receipts)
    with pytest.raises(ValueError, match="shard it first"):
        fsdp_hook(_model())
    return results


@needs_hook
def test_fsdp2_replicas_average_their_shards() -> None:
    outcomes = run_ranks(_fsdp_rank, 4)
    for t in range(3):
        alone = [_backward(_model(), rank, t) for rank in range(4)]
        means = [torch.stack(gradients).mean(0) for gradients in zip(*alone, strict=True)]
        for outcome in outcomes:
            for exact, coded, mean in zip(outcome[f"exact {t}"], outcome[f"int8 {t}"], means, strict=True):
                torch.testing.assert_close(exact, mean, rtol=1e-5, atol=1e-7)
                torch.testing.assert_close(coded, mean, rtol=0, atol=0.02 * float(mean.abs().max()))
            assert all(torch.equal(a, b) for a, b in zip(outcome[f"int8 {t}"], outcomes[0][f"int8 {t}"], strict=True))
    for outcome in outcomes:
        assert outcome["exact receipts"] == outcome["int8 receipts"] == 2
        assert all(torch.equal(a, b) for a, b in zip(outcome["int8 2"], outcome["again 2"], strict=True))
        assert not torch.equal(outcome["int8 2"][0], outcome["exact 2"][0])


def _ddp_rank(rank: int, world_size: int) -> tuple[list[torch.Tensor], ...]:
    """Sums of what the rank put in and of what came out, and what it keeps, over a run that is resumed half-way."""
    put_in = [torch.zeros_like(p) for p in _model().parameters()]
    came_out = [torch.zeros_like(p) for p in _model().parameters()]
    state: dict[str, Any] = {}
    for start in (0, 3):
        model = DistributedDataParallel(_model(), bucket_cap_mb=0.0005 * (1 + start))
        hook = ddp_hook(TopK(density=1 / 8, chunk=64, value="f32"))
        model.register_comm_hook(None, hook)
        if start:
            hook.state.load_state_dict(model.module, state)
            again = hook.state.state_dict(model.module)
            for name, part in state["residuals"]["residual"].items():
                assert torch.equal(again["residuals"]["residual"][name], part)
        for t in range(start, start + 3):
            for total, gradient in zip(put_in, _backward(_model(), rank, t), strict=True):
                total += gradient
            for total, gradient in zip(came_out, _backward(model, rank, t), strict=True):
                total += gradient
        state = hook.state.state_dict(model.module)
    kept = state["residuals"]["residual"]
    return put_in, came_out, [kept[name].view_as(p) for name, p in model.module.named_parameters()]


def test_ddp_residuals_resume_by_name() -> None:
    outcomes = run_ranks(_ddp_rank, 2)
    put_in, came_out, kept = (
        [(a + b) / 2 for a, b in zip(*parts, strict=True)] for parts in zip(*outcomes, strict=True)
    )
    for before, after, rest in zip(put_in, came_out, kept, strict=True):
        torch.testing.assert_close(after + rest, before, rtol=1e-5, atol=1e-6)
    assert any(bool(rest.any()) for rest in kept)
