"""Run a function on several gloo ranks, each a real process, and collect what they return."""

from __future__ import annotations

import importlib.util
import inspect
import multiprocessing
import os
import pickle
import queue
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "torch.distributed", "lowcomm.optim", "lowcomm.sync"])


def run_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120, group_timeout: float = 60
) -> list[Any]:
    """Return [function(rank, world_size, *args) for every rank], run in processes joined by gloo.

    `function` is at the top level of a test module. What it takes and returns is pickled: tensors, numbers, dicts.
    """
    outcomes = start_ranks(function, world_size, *args, timeout=timeout, group_timeout=group_timeout)
    for rank, (_value, error) in enumerate(outcomes):
        if error is not None:
            raise AssertionError(f"rank {rank} failed:\n{error}")
    return [value for value, _ in outcomes]


def start_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120, group_timeout: float = 60
) -> list[tuple[Any, str | None]]:
    """As `run_ranks`, but failures are returned: one (value, traceback or None) for each rank.

    A rank that dies or is still running after `timeout` seconds has the traceback "died" or "timed out".
    """
    arguments = pickle.dumps(args)
    with tempfile.TemporaryDirectory() as folder:
        results = _CONTEXT.Queue()
        path, name = inspect.getfile(function), function.__qualname__
        processes = [
            _CONTEXT.Process(
                target=_run_one,
                args=(
                    results,
                    path,
                    name,
                    rank,
                    world_size,
                    os.path.join(folder, "store"),
                    group_timeout,
                    arguments,
                ),
                daemon=True,
            )
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        try:
            return _collect(results, processes, timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(results: Any, processes: list[Any], timeout: float) -> list[tuple[Any, str | None]]:
    outcomes: dict[int, tuple[Any, str | None]] = {}
    deadline = time.monotonic() + timeout
    while len(outcomes) < len(processes) and time.monotonic() < deadline:
        try:
            rank, value, error = results.get(timeout=0.2)
            outcomes[rank] = (None if value is None else pickle.loads(value), error)
        except queue.Empty:
            for rank, process in enumerate(processes):
                if process.exitcode not in (None, 0):
                    outcomes.setdefault(rank, (None, f"died with exit code {process.exitcode}"))
    return [outcomes.get(rank, (None, "timed out")) for rank in range(len(processes))]


def _run_one(
    results: Any, path: str, name: str, rank: int, world_size: int, store: str, group_timeout: float, args: bytes
) -> None:
    # pickle, not the queue's own pickler: tensors travel by value and outlive the process
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        spec = importlib.util.spec_from_file_location(f"_ranks_{os.path.basename(path)[:-3]}", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=group_timeout),
        )
        dist.barrier()  # a rank that returns at once must not leave while another is still connecting
        value = getattr(module, name)(rank, world_size, *pickle.loads(args))
        results.put((rank, pickle.dumps(value), None))
        results.close()
        results.join_thread()
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
        results.close()
        results.join_thread()
    os._exit(0)  # no shared teardown: a failed peer must not hold this one
