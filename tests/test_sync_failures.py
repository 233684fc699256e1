"""Real processes that die, stop or send rubbish: errors name the ranks, come in time, and change no state."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from lowcomm.sync import AllReduce, SyncError
from lowcomm.sync.peers import Peers
from ranks import start_ranks
from sync_codecs import NonzeroCodec, SignCodec

TIMEOUT = 4.0


def _attempt(reducer: AllReduce, x: torch.Tensor, overlapped: bool = False) -> tuple[str, str, float, bool]:
    """(error type, message, seconds, whether the state is what it was)"""
    before, start = reducer.state(0), time.monotonic()
    try:
        (reducer.start(x) if overlapped else reducer.reduce(x)).wait()
        name, message = "ok", ""
    except SyncError as error:
        name, message = type(error).__name__, str(error)
    after = reducer.state(0)
    same = before.keys() == after.keys() and all(torch.equal(before[k], after[k]) for k in before)
    return name, message, time.monotonic() - start, same


def _corrupting(reducer: AllReduce, where: int, rank: int, world_size: int) -> None:
    """Let this rank's next frames carry a wrong byte at offset `where` of every slot."""
    prepare = reducer._algorithm.prepare

    def corrupt(exchange: object) -> None:
        prepare(exchange)
        parts = world_size if reducer._algorithm.name == "two_phase" else 1
        exchange.frames.view(parts, -1)[:, where] ^= 0x55
        reducer._algorithm.prepare = prepare

    if rank == 1:
        reducer._algorithm.prepare = corrupt


def _scenarios(rank: int, world_size: int) -> dict[str, tuple[str, str, float, bool]]:
    four = [dist.new_group(range(4), timeout=timedelta(seconds=TIMEOUT)) for _ in range(3)]
    three = dist.new_group(range(3), timeout=timedelta(seconds=TIMEOUT))
    pids = [None] * 4
    dist.all_gather_object(pids, os.getpid())
    results = {}
    for algorithm in ("all_gather", "two_phase"):
        reducer = AllReduce(codec=SignCodec(), feedback="auto", algorithm=algorithm)
        reducer.reduce(torch.randn(30))
        for name, where in (("magic", 0), ("codec", 4), ("round", 8)):
            _corrupting(reducer, where, rank, world_size)
            results[f"{algorithm} {name}"] = _attempt(reducer, torch.randn(30))
            results[f"{algorithm} after {name}"] = _attempt(reducer, torch.randn(30))
    reducer = AllReduce(codec=NonzeroCodec(), feedback="auto")
    _corrupting(reducer, 17, rank, world_size)  # the number of entries
    results["body"] = _attempt(reducer, torch.randn(30))
    results["silent"] = _silent(rank, four[0], pids)
    dist.barrier()  # the rank that was stopped needs time to find out that the others have given it up
    results["late"] = _dies_between_messages(rank, four[1])
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    results["dead"] = _attempt(_used(three), torch.randn(30), overlapped=True)
    results["dead dense"] = _attempt(AllReduce(three), torch.randn(30))
    return results


def _used(group: object) -> AllReduce:
    reducer = AllReduce(group, codec=SignCodec(), feedback="auto", algorithm="two_phase")
    reducer.load_state(0, {"residual": torch.ones(30)})
    return reducer


def _silent(rank: int, group: object, pids: list[int]) -> tuple[str, str, float, bool]:
    reducer = _used(group)
    reducer.reduce(torch.randn(30))
    if rank == 3:
        os.kill(os.getpid(), signal.SIGSTOP)
    outcome = _attempt(reducer, torch.randn(30))
    if rank == 0:
        time.sleep(0.5)
        os.kill(pids[3], signal.SIGCONT)
    return outcome


def _dies_between_messages(rank: int, group: object) -> tuple[str, str, float, bool]:
    reducer = _used(group)
    if rank == 3:
        Peers.all_to_all = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    return _attempt(reducer, torch.randn(30))


def test_failures_of_real_processes() -> None:
    outcomes = start_ranks(_scenarios, 4, timeout=90)
    assert outcomes[0][1] is None, outcomes[0][1]
    assert outcomes[1][1] is None, outcomes[1][1]
    assert "exit code -9" in outcomes[2][1] and "exit code -9" in outcomes[3][1]
    for rank in (0, 1):
        results = outcomes[rank][0]
        for name, (error, message, seconds, untouched) in results.items():
            context = f"rank {rank}, {name}: {error}: {message}, {seconds:.1f} s"
            assert untouched == (error != "ok"), context
            if "after" in name:
                assert error == "ok", context
            elif name == "silent":
                assert error == "PeerTimeout" and "rank 3 did not answer" in message, context
                assert TIMEOUT - 1 < seconds < 3 * TIMEOUT, context
            elif name in ("late", "dead", "dead dense"):
                assert error == "PeerFailure" and seconds < TIMEOUT, context
                assert f"rank {3 if name == 'late' else 2} broke" in message, context
            else:
                assert error == "CorruptFrame" and "rank 1" in message, context
