"""Ranks that are killed or stopped in every phase of an exchange, and a run that goes on from its last checkpoint."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lowcomm.compress import Int4
from lowcomm.optim import DiLoCo
from lowcomm.sync import AllReduce, SyncError
from lowcomm.sync.peers import FIRST, HELLO, SECOND, VOTE, Peers
from ranks import run_ranks, start_ranks

TIMEOUT = 5.0
N = 3000
# What happens to the third rank of each group, and before which message of which algorithm.
FATES = [
    ("two_phase", HELLO, signal.SIGKILL),
    ("two_phase", FIRST, signal.SIGKILL),
    ("two_phase", SECOND, signal.SIGKILL),
    ("two_phase", VOTE, signal.SIGKILL),
    ("dense", None, signal.SIGKILL),
    ("two_phase", SECOND, signal.SIGSTOP),
]


def _strike(kind: int | None, fate: int) -> None:
    """Kill or stop this process right before its next message of `kind`; None: before its part of a sum."""
    isend, all_reduce = Peers.isend, Peers.all_reduce

    def send(self: Peers, message: torch.Tensor, rank: int, of: int) -> Any:
        if of == kind:
            os.kill(os.getpid(), fate)
        return isend(self, message, rank, of)

    def add(self: Peers, x: torch.Tensor) -> None:
        if kind is None:
            os.kill(os.getpid(), fate)
        all_reduce(self, x)

    Peers.isend, Peers.all_reduce = send, add


def _attempt(call: Callable[[], object]) -> tuple[str, str, float]:
    start = time.monotonic()
    try:
        call()
    except SyncError as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "ok", "", time.monotonic() - start


def _fates_rank(rank: int, world_size: int) -> list[tuple[tuple[str, str, float], bool, torch.Tensor]]:
    """Ranks 0 and 1 meet a third one in every group, and it does not live to the end of the second exchange."""
    groups = [dist.new_group([0, 1, 2 + i], timeout=timedelta(seconds=TIMEOUT)) for i in range(len(FATES))]
    pids: list[Any] = [None] * world_size
    dist.all_gather_object(pids, os.getpid())
    outcomes = []
    for i, (group, (algorithm, kind, fate)) in enumerate(zip(groups, FATES, strict=True)):
        if rank not in (0, 1, 2 + i):
            continue
        options = {} if algorithm == "dense" else {"codec": Int4(), "feedback": "auto", "algorithm": algorithm}
        reducer = AllReduce(group, **options)
        x = torch.randn(N, generator=torch.Generator().manual_seed(rank))
        reducer.reduce(x.clone())
        before = reducer.state(0)
        if rank > 1:
            _strike(kind, fate)
        outcome = _attempt(lambda r=reducer, x=x, i=i: (r.start if i % 2 else r.reduce)(x.clone(), round=1).wait())
        after = reducer.state(0)
        same = before.keys() == after.keys() and all(torch.equal(before[k], after[k]) for k in before)
        pair = dist.new_group([0, 1], use_local_synchronization=True)  # nobody else has to come
        survivors = AllReduce(pair, **options)
        for name in ("residual",) if before else ():
            survivors.load_state(0, {name: before[name]})
        outcomes.append((outcome, same, survivors.reduce(x.clone(), round=1).result))
    if rank == 0:
        os.kill(pids[-1], signal.SIGKILL)  # the stopped one
    return outcomes


def test_a_rank_that_dies_or_stops_in_any_phase() -> None:
    outcomes = start_ranks(_fates_rank, 2 + len(FATES), timeout=90)
    for rank in (0, 1):
        results, error = outcomes[rank]
        assert error is None, error
        for i, ((kind, message, seconds), same, result) in enumerate(results):
            context = f"{FATES[i]}, rank {rank}: {kind}: {message}, {seconds:.1f} s"
            stopped = FATES[i][2] == signal.SIGSTOP
            # Whoever dies before its vote has already sent all else; still nobody may commit.
            assert kind == ("PeerTimeout" if stopped else "PeerFailure"), context
            assert ("rank 2" in message) or FATES[i][0] == "dense", context
            assert seconds < 2 * TIMEOUT + 1, context
            assert same, context
            assert torch.equal(result, outcomes[0][0][i][2]), context
    for rank in range(2, 2 + len(FATES)):
        assert "exit code -9" in outcomes[rank][1]


# ---- a run that goes on from its last checkpoint ------------------------------------------------------------------


def _training(rank: int, world_size: int, folder: str, stop: str) -> dict[str, Any]:
    """Six syncs of DiLoCo with Int4; a checkpoint after each. stop: "never", "killed" in the fourth, or "resumed"."""
    torch.manual_seed(0)
    model = torch.nn.Linear(40, 30)
    optimizer = DiLoCo(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        sync_every=2,
        compress=Int4(),
        process_group=dist.new_group(timeout=timedelta(seconds=TIMEOUT)),
    )
    optimizer._reducer._alternative = None  # in two phases, however short the vector
    path, first = Path(folder) / f"{stop == 'never'}-{rank}.pt", 0
    if stop == "resumed":
        saved = torch.load(Path(folder) / f"False-{rank}.pt", weights_only=False)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
    for step in range(first, 12):
        x = torch.randn(8, 40, generator=torch.Generator().manual_seed(100 * step + rank))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        if stop == "killed" and step == 7:
            if rank == 2:
                _strike(SECOND, signal.SIGKILL)
            before = _flat_state(optimizer)
            outcome = _attempt(optimizer.step)
            return {"outcome": outcome, "same": torch.equal(before, _flat_state(optimizer))}
        optimizer.step()
        if step % 2:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}, path)
    return {"weights": torch.cat([p.detach().flatten() for p in model.parameters()]), "state": _flat_state(optimizer)}


def _flat_state(optimizer: DiLoCo) -> torch.Tensor:
    """Everything a sync may change, but for the live parameters: anchor, outer momentum, residuals."""
    state = optimizer.state_dict()["state"]
    parts = [v for p in sorted(state) for k, v in sorted(state[p].items()) if isinstance(v, torch.Tensor)]
    return torch.cat([part.detach().flatten().float() for part in parts])


def test_a_killed_run_continues_bit_for_bit_from_its_last_checkpoint(tmp_path: Path) -> None:
    whole = run_ranks(_training, 3, str(tmp_path), "never")
    killed = start_ranks(_training, 3, str(tmp_path), "killed", timeout=60)
    assert "exit code -9" in killed[2][1]
    for rank in (0, 1):
        value, error = killed[rank]
        assert error is None, error
        assert value["outcome"][0] == "PeerFailure" and "rank 2" in value["outcome"][1], value["outcome"]
        assert value["outcome"][2] < 2 * TIMEOUT and value["same"]
    resumed = run_ranks(_training, 3, str(tmp_path), "resumed")
    for rank in range(3):
        assert torch.equal(whole[rank]["weights"], resumed[rank]["weights"])
        assert torch.equal(whole[rank]["state"], resumed[rank]["state"])
