"""What goes with what: every method beside every option, tried between real processes; the page that says so.

`python tests/composition.py > docs/composition.md` writes the page from what it has just run (`make composition`);
tests/test_composition.py runs the same and compares.
"""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from lowcomm.compress import E3M0, EF21, Int8, TopK
from lowcomm.optim import AtSteps, LowCommOptimizer
from optimizers_under_test import (
    ENTRIES,
    INNERS,
    Entry,
    backward,
    build,
    differences,
    entry_named,
    everything,
    model_for,
    shared_state,
    through_file,
    train,
)
from ranks import run_ranks
from torch import nn

NAMES = {  # in the page: entry of the conformance suite
    "LocalSGD": "LocalSGD",
    "FedAvg": "FedAvg",
    "HierarchicalLocalSGD": "HierarchicalLocalSGD",
    "DiLoCo": "DiLoCo",
    "AutoLoCo": "AutoLoCo",
    "StreamingDiLoCo": "StreamingDiLoCo",
    "EagerDiLoCo": "EagerDiLoCo",
    "EagerDiLoCo(delayed=True)": "DelayedDiLoCo",
    "CO2": "CO2",
    "SlowMo": "SlowMo",
    "SignMomentum": "SignMomentum",
    "DESLOC": "DESLOC",
    'DESLOC(sync_point="pre")': "DESLOC-pre",
    "MTDAO": "MTDAO",
}


class Refused(Exception):
    """The constructor has refused the combination; the message is its reason."""


# What became of one combination on one rank, as a dict, since it travels between processes:
#   word: what the page says, "yes", a time, or "refused"; reason: why; error: traceback of anything else;
#   agreed: a text that must be the same on all ranks with the same "team".
Outcome = dict[str, Any]


def entry_of(name: str) -> Entry:
    if name != "DelayedDiLoCo":
        return entry_named(name)
    entry = entry_named("DelayedDiLoCo-Int8")
    options = {key: value for key, value in entry.options.items() if key != "compress"}
    return Entry(entry.cls, options, first=entry.first, busy=entry.busy, elementwise=False, name=name)


def make(entry: Entry, model: nn.Module, **options: Any) -> LowCommOptimizer:
    """Construct; a ValueError is a refusal, anything else a fault."""
    inner = INNERS[entry.inner](model.parameters())
    try:
        return entry(inner, **options)
    except ValueError as error:
        raise Refused(str(error)) from error


def result(model: nn.Module, optimizer: LowCommOptimizer) -> str:
    """Flush, and a text that is the same exactly when parameters and outer state are."""
    optimizer.flush()
    state = hashlib.blake2b(digest_size=8)
    for name, value in sorted(shared_state(model, optimizer).items()):
        full = value.full_tensor() if hasattr(value, "full_tensor") else value
        assert bool(torch.isfinite(full).all()), name
        state.update(name.encode() + full.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


def run(entry: Entry, rank: int, **options: Any) -> tuple[str, LowCommOptimizer]:
    model = model_for()
    optimizer = make(entry, model, **options)
    train(model, optimizer, range(entry.twice + 1), rank)
    return result(model, optimizer), optimizer


@cache
def undisturbed(name: str, rank: int) -> tuple[str, int]:
    """Result of an entry without further options, and bytes sent."""
    digest, optimizer = run(entry_of(name), rank)
    return digest, optimizer.bytes_sent


# ---- one check for each column; each returns (word, agreed text, team) -------------------------------------------

Check = Callable[[Entry, int, Any], tuple[str, str, int]]


def with_codec(codec: Any, feedback: Any) -> Check:
    def check(entry: Entry, rank: int, meshes: Any) -> tuple[str, str, int]:
        packed, optimizer = run(entry, rank, compress=codec, feedback=feedback)
        assert packed != undisturbed(entry.id, rank)[0], "the codec has changed nothing"
        assert feedback is None or "residual" in optimizer._reducer.state_names() or feedback != "auto"
        return "yes", packed, 0

    return check


def weights(entry: Entry, rank: int, meshes: Any) -> tuple[str, str, int]:
    weighted, _ = run(entry, rank, weights=1.0 + rank)
    scaled, _ = run(entry, rank, weights=lambda: 4.0 * (1.0 + rank))
    assert weighted == scaled, "a common factor matters"
    assert weighted != undisturbed(entry.id, rank)[0], "weights do not matter"
    return "yes", weighted, 0


def schedule(entry: Entry, rank: int, meshes: Any) -> tuple[str, str, int]:
    steps = (2, 5, 6)
    digest, optimizer = run(entry, rank, sync_every=AtSteps(steps))
    return "yes", digest + str(optimizer.num_syncs), 0


def warmup(entry: Entry, rank: int, meshes: Any) -> tuple[str, str, int]:
    model = model_for()
    optimizer = make(entry, model, warmup_steps=2)
    train(model, optimizer, range(2), rank)
    together = [p.detach().clone() for p in model.parameters()]
    table: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(table, together)
    assert all(torch.equal(a, b) for other in table for a, b in zip(other, together, strict=True))
    train(model, optimizer, range(2, entry.twice + 1), rank)
    return "yes", result(model, optimizer), 0


def buffers(entry: Entry, rank: int, meshes: Any) -> tuple[str, str, int]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    optimizer = make(entry, model, sync_buffers=model)
    train(model, optimizer, range(entry.first), rank)
    digest = result(model, optimizer)
    return "yes", digest + str([value.tolist() for value in model.buffers()]), 0


def offload(entry: Entry, rank: int, meshes: Any) -> tuple[str, str, int]:
    """On a CPU it changes where nothing is: the same bits, and the same bytes sent."""
    away, optimizer = run(entry, rank, offload="cpu")
    assert (away, optimizer.bytes_sent) == undisturbed(entry.id, rank)
    return "yes", away, 0


def group(entry: Entry, rank: int, meshes: Any) -> tuple[str, str, int]:
    """Two groups that know nothing of each other: one dimension of a mesh, and then a process group."""
    mesh = meshes["replicate"]
    digest, optimizer = run(entry, rank, process_group=mesh)
    same, _ = run(entry, rank, process_group=mesh.get_group())
    assert optimizer.last_sync is not None and optimizer.last_sync.world_size == 2
    assert digest == same
    return "yes", digest, 1 + rank % 2


def sharded(compress: Any) -> Check:
    """Two replicas of two FSDP2 shards, against two unsharded replicas on the same data."""

    def check(entry: Entry, rank: int, meshes: Any) -> tuple[str, str, int]:
        from torch.distributed.fsdp import fully_shard

        replicas, replica = meshes["replicate"], meshes["replicate"].get_local_rank()
        dtype = torch.float64 if compress is None else torch.float32
        model, plain = model_for(dtype=dtype), model_for(dtype=dtype)
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=meshes["shard"])
        optimizer = make(entry, model, process_group=replicas, compress=compress)
        reference = make(entry, plain, process_group=replicas, compress=compress)
        train(model, optimizer, range(entry.twice + 1), replica)
        train(plain, reference, range(entry.twice + 1), replica)
        digest = result(model, optimizer)
        reference.flush()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            close = 1e-12 if compress is None else 0.2  # a codec's blocks end with the shard
            assert torch.allclose(p.full_tensor(), q, atol=close), (p.full_tensor() - q).abs().max()  # type: ignore[attr-defined]
        return "yes", digest, 0

    return check


def overlap(entry: Entry, rank: int, meshes: Any) -> tuple[str, str, int]:
    """The longest that an exchange was under way, in steps, while training went on."""
    model = model_for()
    optimizer = make(entry, model)
    sent: dict[int, tuple[int, Any]] = {}  # keeps the exchange, so that its id is not used again
    longest = 0
    for step in range(4 * entry.period):
        backward(model, step, rank)
        optimizer.step()
        for exchange in optimizer._in_flight:
            longest = max(longest, step - sent.setdefault(id(exchange), (step, exchange))[0] + 1)
    unit = f"{longest} steps" if longest != 1 else "1 step"
    rounds = longest / entry.period
    word = "no" if not longest else f"{rounds:.0f} round" if rounds.is_integer() else unit
    return word, result(model, optimizer), 0


def failing(entry: Entry, rank: int, meshes: Any) -> tuple[str, str, int]:
    digest, _ = run(entry, rank, on_failure="skip")
    assert digest == undisturbed(entry.id, rank)[0]
    return "yes", digest, 0


def final(model: nn.Module, optimizer: LowCommOptimizer) -> dict[str, Any]:
    """Flush; everything there is then, with the counters that only a checkpoint brings up to date."""
    optimizer.flush()
    optimizer.state_dict()
    return everything(model, optimizer)


def resumed_everywhere(entry: Entry, rank: int) -> list[int]:
    """Steps at which saving, loading into a fresh optimizer and going on does not give the undisturbed run's bits.

    What is in flight at a step is part of what is saved. Workers have different data and each its own checkpoint.
    """
    last = entry.twice + 1
    undisturbed, plain = build(entry)
    train(undisturbed, plain, range(last), rank)
    wanted = final(undisturbed, plain)
    model, optimizer = build(entry)
    bad = []
    for stop in range(last):
        other, again = build(entry, seed=7)
        other.load_state_dict(model.state_dict())
        again.load_state_dict(through_file(optimizer.state_dict()))
        train(other, again, range(stop, last), rank)
        if stop and differences(final(other, again), wanted):
            bad.append(stop)
        train(model, optimizer, range(stop, stop + 1), rank)
    if differences(final(model, optimizer), wanted):
        bad.append(last)  # saving has changed something
    return bad


COLUMNS: dict[str, Check] = {
    "quantiser": with_codec(Int8(block=16), None),
    "top-k, EF14": with_codec(TopK(density=0.25, chunk=16), "auto"),
    "top-k, EF21": with_codec(TopK(density=0.25, chunk=16, value="f32"), EF21()),
    "E3M0": with_codec(E3M0(), None),
    "weights": weights,
    "subgroup": group,
    "FSDP2": sharded(None),
    "FSDP2, codec": sharded(Int8(block=16)),
    "schedule": schedule,
    "warm-up": warmup,
    "buffers": buffers,
    "offload": offload,
    "skip": failing,
    "overlap": overlap,
}
ON_A_MESH = ("subgroup", "FSDP2", "FSDP2, codec")


def outcome(check: Check, entry: Entry, rank: int, meshes: Any) -> Outcome:
    found: Outcome = {"word": "refused", "reason": "", "error": "", "agreed": "", "team": 0}
    try:
        found["word"], found["agreed"], found["team"] = check(entry, rank, meshes)
    except Refused as refusal:
        found["reason"] = found["agreed"] = str(refusal)
    except Exception:
        found["error"] = traceback.format_exc()
    return found


def everything_tried(rank: int, world_size: int) -> dict[tuple[str, str], Outcome]:
    """On one rank, all cells that need no mesh with two ranks, and those that need one with four."""
    wide = world_size == 4
    meshes = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")) if wide else None
    found = {}
    for title, name in NAMES.items():
        for column, check in COLUMNS.items():
            if (column in ON_A_MESH) != wide:
                continue
            found[title, column] = outcome(check, entry_of(name), rank, meshes)
    return found


def resumed(rank: int, world_size: int) -> dict[str, list[int]]:
    return {entry.id: resumed_everywhere(entry, rank) for entry in ENTRIES}


def all_outcomes() -> dict[tuple[str, str], Outcome]:
    """Every cell, from all ranks."""
    return {
        **joined(run_ranks(everything_tried, 2, timeout=300)),
        **joined(run_ranks(everything_tried, 4, timeout=300)),
    }


def joined(ranks: list[dict[tuple[str, str], Outcome]]) -> dict[tuple[str, str], Outcome]:
    """One outcome for each cell, from those of all ranks; raises AssertionError where they do not fit together."""
    for rank, found in enumerate(ranks):
        for cell, one in found.items():
            assert not one["error"], f"{cell} on rank {rank}:\n{one['error']}"
    for cell in ranks[0]:
        outcomes = [found[cell] for found in ranks]
        for one in outcomes:
            assert one["word"] == outcomes[0]["word"], cell
            same = {o["agreed"] for o in outcomes if o["team"] == one["team"]}
            assert same == {one["agreed"]}, f"{cell}: workers differ"
    return ranks[0]


HEAD = """# What goes with what

Every method was run with every option on 2 processes (4 where there are groups or shards) with data of their own.
"yes": it ran, did what the option says (below), and all workers ended with the same bits. A number in brackets: the
constructor refuses, for the reason given there. Made by `make composition`; a test runs it all again and compares.

"""

TAIL = """
| column | option | what was compared besides |
|---|---|---|
| quantiser | `compress=Int8(...), feedback=None` | with the run without |
| top-k, EF14 / EF21 | `compress=TopK(...)`, `feedback="auto"` / `EF21()` | with the run without |
| E3M0 | `compress=E3M0(), feedback=None` | with the run without |
| weights | `weights=` a number or a callable | a common factor changes no bit, unequal weights do |
| subgroup | `process_group=` a mesh dimension, or a process group | both alike; the groups train apart |
| FSDP2 | `fully_shard` over a mesh dimension, `process_group=` the other | unsharded replicas, to 1e-12 in float64 |
| FSDP2, codec | the same with `Int8` | unsharded replicas, whose blocks end elsewhere |
| schedule | `sync_every=AtSteps(...)` | workers only |
| warm-up | `warmup_steps=2` | equal after every warm-up step |
| buffers | `sync_buffers=model` with BatchNorm | buffers equal |
| offload | `offload="cpu"` | bits and bytes sent as without |
| skip | `on_failure="skip"`, nothing failing | bits as without |
| overlap | none | how long an exchange is under way while training goes on |
| resume | checkpoint at every step of two periods | loaded anew and continued: the undisturbed run's bits |

Also checked for every method (tests/test_conformance*.py): two inner optimizers, GradScaler, closures, hooks, bf16 and
fp16 parameters, frozen and tied parameters, parameter groups added in mid-run, workers with unequal amounts of data.
"""


def page(found: dict[tuple[str, str], Outcome], bad_resumes: dict[str, list[int]]) -> str:
    reasons: dict[str, int] = {}
    rows = []
    for title, name in NAMES.items():
        words = []
        for column in COLUMNS:
            one = found[title, column]
            number = reasons.setdefault(one["reason"], len(reasons) + 1) if one["reason"] else 0
            words.append(f"[{number}]" if number else one["word"])
        classes = [e.id for e in ENTRIES if e.cls is entry_of(name).cls]
        assert not any(bad_resumes[one] for one in classes)
        rows.append(f"| `{title}` | " + " | ".join([*words, "yes"]) + " |")
    columns = [*COLUMNS, "resume"]
    table = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|", *rows]
    notes = [f"[{number}] {reason}\n" for reason, number in reasons.items()]
    return HEAD + "\n".join(table) + "\n\n" + "\n".join(notes) + TAIL


if __name__ == "__main__":
    print(page(all_outcomes(), run_ranks(resumed, 2)[0]), end="")
