"""Run a function in several local processes joined by gloo, and leave no process behind, whatever happens."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["Report", "launch"]

Report = Callable[[Any], None]

GROUP_TIMEOUT = timedelta(minutes=5)
_CONTEXT = multiprocessing.get_context("spawn")


def launch(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    on_report: Report | None = None,
    threads: int = 1,
    prepare: Callable[[int], None] | None = None,
) -> list[Any]:
    """Return [function(rank, world_size, report, *args) for every rank], each run in a process of its own.

    The default process group is gloo over the loopback interface. When one worker fails, or this process is
    interrupted, all workers are killed; should this process itself be killed, they notice and exit.

    Args:
        function: at the top level of a module. What it takes, returns and reports is pickled.
        world_size: number of processes.
        args: further arguments of `function`.
        on_report: called here with whatever a worker passes to `report`.
        threads: torch threads of each worker.
        prepare: called in each worker with its rank, before it joins the process group; pickled.

    Raises:
        RuntimeError: a worker raised an error or died.
    """
    with tempfile.TemporaryDirectory(prefix="lowcomm-") as folder:
        job = (pickle.dumps((function, args, prepare)), world_size, os.path.join(folder, "store"), threads)
        processes: list[SpawnProcess] = []
        pipes: list[Connection] = []
        try:
            with _interrupts_deferred(), _environment(_worker_environment(threads)):
                for rank in range(world_size):
                    ours, theirs = _CONTEXT.Pipe()
                    process = _CONTEXT.Process(target=_work, args=(theirs, rank, *job), daemon=True)
                    process.start()
                    theirs.close()  # so that the end of the worker is the end of the pipe
                    processes.append(process)
                    pipes.append(ours)
            results = _collect(processes, pipes, on_report)
            for process in processes:
                process.join(timeout=10)
            return results
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()


def _collect(processes: Sequence[SpawnProcess], pipes: list[Connection], on_report: Report | None) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(processes):
        for ready in wait([pipe for rank, pipe in enumerate(pipes) if rank not in results]):
            rank = pipes.index(ready)  # type: ignore[arg-type]
            try:
                kind, value = pipes[rank].recv()
            except (EOFError, ConnectionResetError):
                processes[rank].join()
                raise RuntimeError(f"worker {rank} died with exit code {processes[rank].exitcode}") from None
            if kind == "error":
                raise RuntimeError(f"worker {rank} failed:\n{value}")
            if kind == "result":
                results[rank] = value
            elif on_report is not None:
                on_report(value)
    return [results[rank] for rank in range(len(processes))]


def _work(pipe: Connection, rank: int, job: bytes, world_size: int, store: str, threads: int) -> None:
    threading.Thread(target=_follow_parent, daemon=True).start()
    try:
        torch.set_num_threads(threads)
        function, args, prepare = pickle.loads(job)
        if prepare is not None:
            prepare(rank)
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=GROUP_TIMEOUT
        )
        pipe.send(("result", function(rank, world_size, lambda value: pipe.send(("report", value)), *args)))
        dist.destroy_process_group()
    except Exception:
        with contextlib.suppress(OSError):
            pipe.send(("error", traceback.format_exc()))
        sys.stderr.flush()
        os._exit(1)  # no shared teardown: a peer may be waiting in a collective that nobody will finish


def _follow_parent() -> None:
    """Exit as soon as the parent is gone, even if it was killed without a chance to clean up."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


@contextlib.contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Hold Ctrl-C back while workers start.

    They inherit the blocked signal and so never see a Ctrl-C meant for all: it is the parent that ends them.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Set environment variables for the processes started inside."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _worker_environment(threads: int) -> dict[str, str]:
    values = {"OMP_NUM_THREADS": str(threads)}
    loopback = {"lo", "lo0"} & {name for _, name in socket.if_nameindex()}
    if loopback:  # the host name of a laptop or container often does not resolve
        values["GLOO_SOCKET_IFNAME"] = loopback.pop()
    return values
