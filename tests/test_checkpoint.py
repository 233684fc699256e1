"""Checkpoints through torch's distributed checkpoint helpers, sharded parameters, export of the global weights."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lowcomm.compress import Int8, TopK
from lowcomm.optim import DiLoCo, StreamingDiLoCo
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._pytree import tree_map_only

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
NESTED = StateDictOptions()
OPTIONS = {"nested": NESTED, "flat": FLAT}


def model_of(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 4))


def build(model: nn.Module, method: str = "diloco", **options: Any) -> Any:
    inner = torch.optim.AdamW(model.named_parameters(), lr=0.01)
    if method == "streaming":
        return StreamingDiLoCo(inner, sync_every=4, fragments="bytes", num_fragments=2, delay=1, **options)
    compress = {"int8": Int8(block=32), "topk": TopK(k=8, chunk=32)}.get(method)
    return DiLoCo(inner, sync_every=3, compress=compress, **options)


def train(model: nn.Module, optimizer: Any, first: int, last: int, worker: int = 0) -> None:
    for step in range(first, last):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(100 * step + worker))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def values(model: nn.Module, optimizer: Any) -> list[Tensor]:
    """Everything that must come back bit for bit, as plain tensors."""
    found = [p.detach() for p in model.parameters()]
    for p in model.parameters():
        entry = optimizer.state_dict()["state"]
        found += [t for t in optimizer.state[p].values() if isinstance(t, Tensor)]
        found += [t for t in optimizer.state[p]["inner"].values() if isinstance(t, Tensor)]
        assert entry
    return [(t.full_tensor() if hasattr(t, "full_tensor") else t).clone() for t in found]


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def save(folder: str, model: nn.Module, optimizer: Any, options: StateDictOptions, key: str) -> None:
    state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer, options=options)}
    dcp.save({key: state}, checkpoint_id=folder)


def load(folder: str, model: nn.Module, optimizer: Any, options: StateDictOptions, key: str) -> None:
    state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer, options=options)}
    dcp.load({key: state}, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, optim_state_dict=state["optim"], options=options)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("method", ["diloco", "int8", "topk"])
def test_dcp_resumes_bit_for_bit_on_one_rank(method: str, options: str, tmp_path: Path) -> None:
    for stop in range(1, 7):
        model = model_of()
        optimizer = build(model, method)
        train(model, optimizer, 0, stop)
        folder = str(tmp_path / str(stop))
        save(folder, model, optimizer, OPTIONS[options], "run")
        train(model, optimizer, stop, 9)
        again = model_of(seed=1)
        resumed = build(again, method)
        load(folder, again, resumed, OPTIONS[options], "run")
        train(again, resumed, stop, 9)
        assert same(values(model, optimizer), values(again, resumed)), stop


def _two_replicas(rank: int, world_size: int, folder: str) -> dict[str, bool]:
    """Replicas differ between syncs, so each saves under a name of its own."""
    agreed = {}
    for method, options, stop in (
        ("diloco", "nested", 4),
        ("int8", "nested", 5),
        ("topk", "flat", 4),
        ("streaming", "nested", 4),
        ("streaming", "nested", 6),
    ):
        model = model_of()
        optimizer = build(model, method)
        train(model, optimizer, 0, stop, rank)
        place, key = f"{folder}/{method}{stop}", f"worker{rank}"
        save(place, model, optimizer, OPTIONS[options], key)
        train(model, optimizer, stop, 10, rank)
        again = model_of()
        resumed = build(again, method)
        load(place, again, resumed, OPTIONS[options], key)
        train(again, resumed, stop, 10, rank)
        agreed[f"{method} {options} {stop}"] = same(values(model, optimizer), values(again, resumed))
    return agreed


def test_dcp_resumes_bit_for_bit_on_two_ranks() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for agreed in run_ranks(_two_replicas, 2, folder):
            assert all(agreed.values()), agreed


def _sharded(model: nn.Module, mesh: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for layer in (model[0], model[2]):  # type: ignore[index]
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _fsdp(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """One replica in two shards: what is saved, sharded or in full, resumes bit for bit."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    full = StateDictOptions(full_state_dict=True, broadcast_from_rank0=False)
    results: dict[str, Any] = {}
    for name, method, options in (
        ("sharded", "diloco", NESTED),
        ("sharded flat", "diloco", FLAT),
        ("sharded int8", "int8", NESTED),
        ("full", "diloco", full),
    ):
        model = _sharded(model_of(), mesh["shard"])
        optimizer = build(model, method, process_group=mesh["replicate"])
        train(model, optimizer, 0, 4)
        saved = get_optimizer_state_dict(model, optimizer, options=options)
        saved_model = get_model_state_dict(model, options=options)
        if name == "sharded":
            save(folder, model, optimizer, options, "run")
        saved, saved_model = tree_map_only(Tensor, torch.clone, (saved, saved_model))
        train(model, optimizer, 4, 8)
        again = _sharded(model_of(seed=1), mesh["shard"])
        resumed = build(again, method, process_group=mesh["replicate"])
        if name == "sharded":
            load(folder, again, resumed, options, "run")
        else:
            set_model_state_dict(again, saved_model, options=options)
            set_optimizer_state_dict(again, resumed, optim_state_dict=saved, options=options)
        train(again, resumed, 4, 8)
        results[name] = same(values(model, optimizer), values(again, resumed))
    kinds = {type(resumed.state[p]["anchor"]).__name__ for p in again.parameters()}
    return {**results, "kinds": kinds}


def test_fsdp_state_resumes_bit_for_bit() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for results in run_ranks(_fsdp, 2, folder):
            assert results.pop("kinds") == {"DTensor"}
            assert all(results.values()), results


def _two_sharded_replicas(rank: int, world_size: int) -> dict[str, Any]:
    """Two replicas of two shards give what two unsharded replicas give."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    replica = mesh["replicate"].get_local_rank()
    model = _sharded(model_of(), mesh["shard"])
    optimizer = build(model, process_group=mesh["replicate"])
    plain = model_of()
    reference = build(plain, process_group=mesh["replicate"])
    train(model, optimizer, 0, 7, replica)
    train(plain, reference, 0, 7, replica)
    sharded = [p.full_tensor() for p in model.parameters()]  # type: ignore[attr-defined]
    anchors = [optimizer.state[p]["anchor"].full_tensor() for p in model.parameters()]
    return {
        "live": all(torch.allclose(a, p, atol=1e-6) for a, p in zip(sharded, plain.parameters(), strict=True)),
        "anchors": anchors,
        "sent": optimizer.bytes_sent,
        "reference": reference.bytes_sent,
    }


def test_sharded_replicas_agree_and_send_their_shard_only() -> None:
    results = run_ranks(_two_sharded_replicas, 4)
    for result in results:
        assert result["live"]
        assert all(torch.equal(a, b) for a, b in zip(result["anchors"], results[0]["anchors"], strict=True))
        assert result["sent"] < 0.6 * result["reference"]


def _exported(rank: int, world_size: int, folder: str) -> dict[str, Tensor]:
    from safetensors.torch import load_file, save_file

    model = model_of()
    optimizer = build(model)
    train(model, optimizer, 0, 5, rank)
    own = [p.detach().clone() for p in model.parameters()]
    path = f"{folder}/rank{rank}.safetensors"
    with optimizer.global_weights():
        save_file(model.state_dict(), path)
    assert all(torch.equal(p, value) for p, value in zip(model.parameters(), own, strict=True))
    anchors = {name: optimizer.state[p]["anchor"].clone() for name, p in model.named_parameters()}
    loaded = load_file(path)
    assert all(torch.equal(loaded[name], anchor) for name, anchor in anchors.items())
    assert not torch.equal(loaded["0.weight"], own[0])
    dist.barrier()
    return loaded


def test_global_weights_are_exported_alike_by_all() -> None:
    pytest.importorskip("safetensors")
    with tempfile.TemporaryDirectory() as folder:
        first, second = run_ranks(_exported, 2, folder)
    assert all(torch.equal(first[name], second[name]) for name in first)


def _flushed(rank: int, world_size: int, folder: str, method: str, load: bool) -> list[Tensor]:
    model = model_of()
    optimizer = build(model, method)
    if load:
        saved = torch.load(f"{folder}/{method}0.pt", weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optim"])
        train(model, optimizer, 5, 12, rank)
    else:
        train(model, optimizer, 0, 5, rank)
    optimizer.flush()
    if not load:
        state = {"model": model.state_dict(), "optim": optimizer.state_dict()}
        torch.save(state, f"{folder}/{method}{rank}.pt")
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("method", ["diloco", "int8", "topk", "streaming"])
def test_another_number_of_workers_goes_on_from_a_flushed_checkpoint(method: str, tmp_path: Path) -> None:
    run_ranks(_flushed, 2, str(tmp_path), method, False)
    for world_size in (1, 3):
        first, *others = run_ranks(_flushed, world_size, str(tmp_path), method, True)
        assert all(same(first, other) for other in others)
