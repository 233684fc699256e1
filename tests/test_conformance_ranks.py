"""The contract between workers: real processes, different data on each, bits compared after every sync.

Each world size is one group of processes that runs all checks in turn; the tests then look at what it returned.
"""

from __future__ import annotations

import copy
import hashlib
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lowcomm.optim import DiLoCo, HierarchicalLocalSGD, StreamingDiLoCo
from optimizers_under_test import (
    COMMON,
    ENTRIES,
    INNERS,
    Entry,
    backward,
    build,
    everything,
    model_for,
    shared_state,
    train,
)
from ranks import run_ranks
from torch import nn
from torch.optim import SGD

each = pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.id)


def inners_of(entry: Entry) -> list[str]:
    """All inner optimizers where the method itself touches inner state, and for the two basic methods; else one."""
    if entry.inners:
        return list(entry.inners)
    return list(COMMON) if entry.id in ("LocalSGD", "DiLoCo", "SlowMo-average") else [entry.inner]


# Every function of torch.distributed ends in a method of one of these two classes.
CHANNELS = (dist.ProcessGroup, torch._C._distributed_c10d.Backend)
WORDS = ("broadcast", "reduce", "gather", "scatter", "alltoall", "all_to_all", "send", "recv", "barrier")


def digest(record: dict[str, Any]) -> str:
    """A short text that is equal exactly when names, dtypes and bits are."""
    state = hashlib.blake2b(digest_size=8)
    for name, value in sorted(record.items()):
        state.update(name.encode())
        if isinstance(value, torch.Tensor):
            state.update(
                str(value.dtype).encode() + value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            )
        else:
            state.update(repr(value).encode())
    return state.hexdigest()


@contextmanager
def recorded() -> Iterator[list[str]]:
    """Names of the communicating methods of process groups that are called inside."""
    calls: list[str] = []
    originals = [(cls, name, value) for cls in CHANNELS for name, value in vars(cls).items() if is_communication(name)]

    def spy(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            helper = threading.current_thread() is not threading.main_thread()
            calls.append(f"{name} in the background" if helper else name)
            return function(*args, **kwargs)

        return call

    for cls, name, function in originals:
        setattr(cls, name, spy(name, function))
    try:
        yield calls
    finally:
        for cls, name, function in originals:
            setattr(cls, name, function)


def is_communication(name: str) -> bool:
    return any(word in name for word in WORDS) and not name.startswith("_set")


# ---- what runs on every rank -------------------------------------------------------------------------------------


def _training(rank: int, entry: Entry, inner: str) -> dict[str, list[Any]]:
    """Digest of the shared state after every step, after flush, and after a second flush; calls made at every step."""
    model = model_for(inner, seed=rank)  # construction makes them equal
    with recorded() as calls:
        optimizer = entry(INNERS[inner](model.parameters()))
        constructed = list(calls)
        digests, made = [digest(shared_state(model, optimizer))], []
        common = entry.agrees == "all"

        def look(step: int) -> None:
            digests.append(digest(shared_state(model, optimizer, parameters=common)))
            made.append(list(calls))
            calls.clear()

        calls.clear()
        train(model, optimizer, range(entry.twice + 1), rank, look)
    parameters = digest(dict(model.named_parameters()))
    optimizer.flush()
    flushed = digest(shared_state(model, optimizer))
    optimizer.flush()
    return {
        "digests": digests,
        "calls": made,
        "parameters": parameters,
        "constructed": constructed,
        "flushed": [flushed, digest(shared_state(model, optimizer))],
        "syncs": [optimizer.num_syncs],
    }


def _uneven(rank: int, entry: Entry) -> list[str]:
    """Rank r has 2 r batches more than rank 0; then an epoch more, saved and resumed after the flush."""
    model, optimizer = build(entry)
    digests = []
    train(model, optimizer, range(entry.first + 1 + 2 * rank), rank)
    optimizer.flush()
    digests.append(digest(shared_state(model, optimizer)))
    other, resumed = build(entry, seed=5)
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(optimizer.state_dict())
    train(model, optimizer, range(20, 20 + entry.period + rank), rank)
    optimizer.flush()
    digests.append(digest(shared_state(model, optimizer)))
    train(other, resumed, range(20, 20 + entry.period + rank), rank)
    resumed.flush()
    digests.append(digest(shared_state(other, resumed)))
    return digests


def _overflow(rank: int, entry: Entry, step_with_inf: int) -> list[Any]:
    """GradScaler with an infinity on rank 1 only: everybody counts the step and meets at the same sync."""
    model, optimizer = build(entry)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    digests: list[Any] = []
    for step in range(entry.first):
        backward(model, step, rank)
        for p in model.parameters():
            p.grad = scaler.scale(p.grad)  # type: ignore[arg-type]
        if step == step_with_inf and rank == 1:
            next(model.parameters()).grad[0, 0] = float("inf")  # type: ignore[index]
        scaler.step(optimizer)
        scaler.update()
    optimizer.flush()
    finite = all(bool(torch.isfinite(p).all()) for p in model.parameters())
    digests += [digest(shared_state(model, optimizer)), finite, optimizer.param_groups[0]["local_step"]]
    return [*digests, optimizer.num_syncs]


def _gradients_missing(rank: int, entry: Entry) -> list[str]:
    """Rank 1 has no gradient for the first layer in the first round, and none at all in the second."""
    model, optimizer = build(entry)
    for step in range(3 * entry.period):
        backward(model, step, rank)
        for name, p in model.named_parameters():
            if rank == 1 and (name.startswith("0.") or step >= entry.period) and step < entry.twice:
                p.grad = None
        optimizer.step()
    optimizer.flush()
    return [digest(shared_state(model, optimizer))]


def _buffers(rank: int, entry: Entry) -> list[Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    optimizer = entry.wrap(model.parameters(), sync_buffers=model)
    before: dict[str, torch.Tensor] = {}
    for step in range(entry.first):
        for _ in range(1 + rank):  # forward passes update the statistics; ranks make different numbers of them
            backward(model, step, rank)
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        optimizer.step()
    optimizer.flush()
    return [before, {name: buffer.clone() for name, buffer in model.named_buffers()}]


def _two_dtypes(rank: int, entry: Entry) -> list[str]:
    """A model in parts: one in float32, one in bfloat16. Each part is a message of its own."""

    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(5, 4)
            self.second = nn.Linear(4, 3).to(torch.bfloat16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(torch.tanh(self.first(x)).to(torch.bfloat16)).float()  # type: ignore[no-any-return]

    torch.manual_seed(rank)
    model = Parts()
    optimizer = entry.wrap(model.parameters())
    train(model, optimizer, range(entry.twice), rank)
    optimizer.flush()
    assert {p.dtype for p in model.parameters()} == {torch.float32, torch.bfloat16}
    return [digest(shared_state(model, optimizer))]


def _copied(rank: int, entry: Entry) -> list[str]:
    """A deep copy keeps its process group: the twins make the same run."""
    model, optimizer = build(entry)
    train(model, optimizer, range(entry.first + 1), rank)
    twin_model, twin = copy.deepcopy((model, optimizer))
    train(model, optimizer, range(9, 9 + entry.period), rank)
    train(twin_model, twin, range(9, 9 + entry.period), rank)
    return [digest(everything(model, optimizer)), digest(everything(twin_model, twin))]


def _state_asked_for_on_one_rank(rank: int, entry: Entry) -> list[Any]:
    """Rank 0 alone asks for the optimizer's state, before the first step and in mid-round: nobody communicates."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    inner = entry.inner if entry.inners else "sgd"
    model, optimizer = build(entry, inner)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    with recorded() as calls:
        if rank == 0:
            get_optimizer_state_dict(model, optimizer)
            assert all(torch.equal(p, start[name]) for name, p in model.named_parameters())
        asked = list(calls)
    train(model, optimizer, range(1), rank)
    with recorded() as calls:
        if rank == 0:
            optimizer.state_dict()
        asked += calls
    train(model, optimizer, range(1, entry.twice), rank)
    optimizer.flush()
    twin, plain = build(entry, inner)
    train(twin, plain, range(entry.twice), rank)
    plain.flush()
    return [asked, digest(shared_state(model, optimizer)), digest(shared_state(twin, plain))]


def _groups(rank: int, world_size: int) -> dict[str, Any]:
    """Process groups that are not the world: halves by new_group, and a mesh dimension."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    found = {}
    for name, group in (("half", halves[rank // 2]), ("mesh", mesh["replicate"])):
        model = model_for()
        optimizer = DiLoCo(SGD(model.parameters(), lr=0.1), sync_every=2, process_group=group)
        train(model, optimizer, range(4), rank)
        assert optimizer.last_sync is not None and optimizer.last_sync.world_size == 2
        found[name] = digest(shared_state(model, optimizer))
    return found


def _until_error(checks: Callable[[dict[str, Any], int, int], None], rank: int, world_size: int) -> dict[str, Any]:
    """What the checks have found; after an error, its traceback under "error" instead of the rest."""
    found: dict[str, Any] = {}
    try:
        checks(found, rank, world_size)
    except Exception:
        found["error"] = traceback.format_exc()
    return found


def _two_ranks(rank: int, world_size: int) -> dict[str, Any]:
    return _until_error(_check_two, rank, world_size)


def _more_ranks(rank: int, world_size: int) -> dict[str, Any]:
    return _until_error(_check_more, rank, world_size)


def _check_two(found: dict[str, Any], rank: int, world_size: int) -> None:
    for entry in ENTRIES:
        for inner in inners_of(entry):
            found[f"training {entry.id} {inner}"] = _training(rank, entry, inner)
        if entry.cls is not HierarchicalLocalSGD:
            found[f"uneven {entry.id}"] = _uneven(rank, entry)
        found[f"overflow {entry.id}"] = [_overflow(rank, entry, step) for step in (0, entry.first - 1)]
        found[f"missing {entry.id}"] = _gradients_missing(rank, entry)
        if entry.options.get("delay", 0) == 0 or entry.cls is not StreamingDiLoCo:
            found[f"buffers {entry.id}"] = _buffers(rank, entry)
        found[f"dtypes {entry.id}"] = _two_dtypes(rank, entry)
        found[f"copied {entry.id}"] = _copied(rank, entry)
        found[f"asked {entry.id}"] = _state_asked_for_on_one_rank(rank, entry)


def _check_more(found: dict[str, Any], rank: int, world_size: int) -> None:
    for entry in ENTRIES:
        found[f"training {entry.id} {entry.inner}"] = _training(rank, entry, entry.inner)
        if entry.cls is not HierarchicalLocalSGD:
            found[f"uneven {entry.id}"] = _uneven(rank, entry)
    if world_size == 4:
        found["groups"] = _groups(rank, world_size)


def _one_rank(rank: int, world_size: int) -> dict[str, Any]:
    """A process group of one makes the same run as no process group."""
    found = {}
    for entry in ENTRIES:
        runs = []
        for group in (None, dist.group.WORLD):
            if group is None:
                dist.destroy_process_group()
            else:
                dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
                group = dist.group.WORLD
            model, optimizer = build(entry)
            train(model, optimizer, range(entry.twice + 1))
            optimizer.flush()
            runs.append(digest(everything(model, optimizer)))
        found[entry.id] = runs
    return found


# ---- the tests ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    return run_ranks(_two_ranks, 2)


@pytest.fixture(scope="module")
def three() -> list[dict[str, Any]]:
    return run_ranks(_more_ranks, 3)


@pytest.fixture(scope="module")
def four() -> list[dict[str, Any]]:
    return run_ranks(_more_ranks, 4)


def of_ranks(found: list[dict[str, Any]], name: str) -> list[Any]:
    """What every rank has found under `name`."""
    for rank, one in enumerate(found):
        if name not in one:
            pytest.fail(f"rank {rank} did not get there:\n{one.get('error')}")
    return [one[name] for one in found]


def _check_training(entry: Entry, runs: list[dict[str, Any]]) -> None:
    digests = [run["digests"] for run in runs]
    assert len({d[0] for d in digests}) == 1, "construction makes workers equal"
    for step in range(1, entry.twice + 2):
        agree = len({d[step] for d in digests}) == 1
        if entry.is_sync(step) and entry.agrees != "flush":
            assert agree, f"workers differ after the sync of step {step}"
    assert len({run["parameters"] for run in runs}) == len(runs), "workers train on different data"
    assert len({text for run in runs for text in run["flushed"]}) == 1, "flush makes workers equal, once"
    assert len({tuple(run["syncs"]) for run in runs}) == 1


@pytest.mark.parametrize(("entry", "inner"), [(e, i) for e in ENTRIES for i in inners_of(e)], ids=str)
def test_workers_agree_after_every_sync(two: list[dict[str, Any]], entry: Entry, inner: str) -> None:
    _check_training(entry, of_ranks(two, f"training {entry.id} {inner}"))


@each
@pytest.mark.parametrize("world", ["three", "four"])
def test_more_workers_agree(request: pytest.FixtureRequest, entry: Entry, world: str) -> None:
    found = request.getfixturevalue(world)
    _check_training(entry, of_ranks(found, f"training {entry.id} {entry.inner}"))
    if entry.cls is HierarchicalLocalSGD:
        return
    for digests in zip(*of_ranks(found, f"uneven {entry.id}"), strict=True):
        assert len(set(digests)) == 1


@each
def test_no_communication_between_syncs(two: list[dict[str, Any]], entry: Entry) -> None:
    """Not one call on a step where nothing is due, and calls in the same order on every rank."""
    runs = of_ranks(two, f"training {entry.id} {entry.inner}")
    for run in runs:
        for step in entry.quiet:
            # an exchange that overlaps training may go on in its thread; step() itself says nothing
            made = [call for call in run["calls"][step - 1] if not (entry.busy and call.endswith("background"))]
            assert made == [], f"step {step} communicates"
        assert any(run["calls"]), "the recorder sees the syncs"
    if not entry.busy:
        assert runs[0]["constructed"] == runs[1]["constructed"]
        assert runs[0]["calls"] == runs[1]["calls"]


@each
def test_uneven_batches_end_with_flush(two: list[dict[str, Any]], entry: Entry) -> None:
    """Workers that run out of data early answer the others; resumed from a checkpoint after the flush alike."""
    if entry.cls is HierarchicalLocalSGD:
        pytest.skip("documented: its workers make equal numbers of steps")
    mine, theirs = of_ranks(two, f"uneven {entry.id}")
    assert mine == theirs
    assert mine[1] == mine[2] != mine[0]


@each
def test_infinity_on_one_rank(two: list[dict[str, Any]], entry: Entry) -> None:
    """GradScaler skips the update on one rank; that rank still counts the step and takes part in the sync."""
    mine, theirs = of_ranks(two, f"overflow {entry.id}")
    assert mine == theirs
    assert all(finite and steps == entry.first for _, finite, steps, _ in mine)


@each
def test_gradients_missing_on_one_rank(two: list[dict[str, Any]], entry: Entry) -> None:
    mine, theirs = of_ranks(two, f"missing {entry.id}")
    assert mine == theirs


@each
def test_module_buffers_are_averaged(two: list[dict[str, Any]], entry: Entry) -> None:
    if entry.id == "StreamingDiLoCo":
        with pytest.raises(ValueError, match="use delay=0"):
            build(entry, sync_buffers=nn.BatchNorm1d(3))
        return
    (before_0, after_0), (before_1, after_1) = of_ranks(two, f"buffers {entry.id}")
    for name, buffer in after_0.items():
        assert torch.equal(buffer, after_1[name])
        if buffer.is_floating_point():
            assert not torch.equal(before_0[name], before_1[name])
            torch.testing.assert_close(buffer, (before_0[name] + before_1[name]) / 2)
        else:
            assert torch.equal(buffer, before_0[name]) and not torch.equal(buffer, before_1[name])
            assert buffer.dtype == before_0[name].dtype


@each
def test_parameters_of_two_dtypes(two: list[dict[str, Any]], entry: Entry) -> None:
    mine, theirs = of_ranks(two, f"dtypes {entry.id}")
    assert mine == theirs


@each
def test_copies_keep_their_group(two: list[dict[str, Any]], entry: Entry) -> None:
    for original, twin in of_ranks(two, f"copied {entry.id}"):
        assert original == twin


@each
def test_asking_for_state_on_one_rank(two: list[dict[str, Any]], entry: Entry) -> None:
    """No collective inside state_dict; asked for before training, it changes neither phase nor trajectory.

    With Adam as the inner optimizer the checkpoint helper's own empty step leaves Adam's step counter at 1 (it does so
    for plain Adam, too), so there only agreement can be asked for.
    """
    answers = of_ranks(two, f"asked {entry.id}")
    for asked, queried, plain in answers:
        assert asked == []
        assert queried == answers[0][1]
        if not entry.inners:
            assert queried == plain


def test_process_groups_that_are_not_the_world(four: list[dict[str, Any]]) -> None:
    half, mesh = ([one[name] for one in of_ranks(four, "groups")] for name in ("half", "mesh"))
    assert half[0] == half[1] != half[2] == half[3]
    assert mesh[0] == mesh[2] != mesh[1] == mesh[3]


def test_world_of_one_is_no_world() -> None:
    for name, (without, with_group) in run_ranks(_one_rank, 1)[0].items():
        assert without == with_group, name
